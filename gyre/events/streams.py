"""Shell. `streams.yaml` and the streams on the server: read, compared, applied.

Invariant: applying never loses an event. A missing stream is created, a setting that only widens is
updated, and everything else is refused by name.
Direction: file -> `Streams` -> plan against what is live -> JetStream API.
"""

from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Annotated, Any, Literal

import msgspec
import orjson

from gyre.config import Base, Natural, parse_tree
from gyre.errors import ConfigError, StreamError
from gyre.events.subjects import check_token

Api = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
"""Sends one request to `$JS.API.<first>` and returns the answer, errors included."""

_NOT_FOUND = 10059


class StreamSpec(Base, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one stream shall be. Values of 0 mean no limit."""

    name: str
    subjects: tuple[str, ...]
    storage: Literal["file", "memory"] = "file"
    num_replicas: Literal[1, 3, 5] = 1
    discard: Literal["new", "old"] = "new"
    deny_delete: bool = True
    deny_purge: bool = True
    allow_atomic: bool = False
    allow_direct: bool = False
    discard_new_per_subject: bool = False
    duplicate_window_s: Annotated[int, msgspec.Meta(ge=1)] = 120
    max_age_s: Natural = 0
    max_bytes: Natural = 0
    max_msgs_per_subject: Natural = 0

    def to_api(self) -> dict[str, Any]:
        """The server's form of it."""
        return {
            "name": self.name,
            "subjects": list(self.subjects),
            "retention": "limits",
            "storage": self.storage,
            "num_replicas": self.num_replicas,
            "discard": self.discard,
            "deny_delete": self.deny_delete,
            "deny_purge": self.deny_purge,
            "allow_atomic": self.allow_atomic,
            "allow_direct": self.allow_direct,
            "discard_new_per_subject": self.discard_new_per_subject,
            "duplicate_window": self.duplicate_window_s * 1_000_000_000,
            "max_age": self.max_age_s * 1_000_000_000,
            "max_bytes": self.max_bytes or -1,
            "max_msgs": -1,
            "max_msgs_per_subject": self.max_msgs_per_subject or -1,
        }


class Streams(Base, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The streams of one run: names filled in by `for_run`, `{run}` until then."""

    log: StreamSpec
    blobs: StreamSpec
    keys: StreamSpec

    def for_run(self, run: str) -> "Streams":
        check_token(run, "run")
        text = orjson.dumps(msgspec.to_builtins(self)).decode().replace("{run}", run)
        return msgspec.json.decode(text, type=Streams)

    def with_replicas(self, num: Literal[1, 3, 5]) -> "Streams":
        return Streams(
            log=msgspec.structs.replace(self.log, num_replicas=num),
            blobs=msgspec.structs.replace(self.blobs, num_replicas=num),
            keys=msgspec.structs.replace(self.keys, num_replicas=num),
        )


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    stream: str
    setting: str
    """As the server spells it."""
    live: Any
    wanted: Any
    allowed: bool
    """Whether the server can change it and no stored or coming event is lost by it."""


def load_streams(text: str | None = None, source: str = "streams.yaml") -> Streams:
    """The given text, or the file that gyre comes with. Raises ConfigError naming the path of what is wrong."""
    if text is None:
        text = (files("gyre.events") / "streams.yaml").read_text()
    streams = parse_tree(text, Streams, source)
    for label, spec in (("log", streams.log), ("blobs", streams.blobs), ("keys", streams.keys)):
        if "{run}" not in spec.name or not all("{run}" in subject for subject in spec.subjects):
            raise ConfigError(f"{source}: {label}: name and subjects must contain {{run}}, or runs would mix")
    if streams.log.max_age_s or streams.log.max_bytes or streams.log.discard != "new":
        raise ConfigError(f"{source}: log: max_age_s, max_bytes and discard must be 0, 0, new: it is the record")
    return streams


def plan(spec: StreamSpec, live: dict[str, Any]) -> tuple[Difference, ...]:
    """What differs on the server. `live` is the `config` of its stream info, where false values may be missing."""
    wanted = spec.to_api()
    return tuple(
        Difference(stream=spec.name, setting=key, live=live.get(key), wanted=value, allowed=_allowed(key, live, value))
        for key, value in wanted.items()
        if _normal(live.get(key)) != _normal(value)
    )


async def find_live(api: Api, name: str) -> dict[str, Any] | None:
    """The server's `config` of a stream; None when there is no such stream. Raises StreamError."""
    found = await api(f"STREAM.INFO.{name}", {})
    if "error" not in found:
        return dict(found["config"])
    if found["error"].get("err_code") != _NOT_FOUND:
        raise StreamError(f"stream {name}: {found['error'].get('description')}")
    return None


async def apply(api: Api, spec: StreamSpec) -> tuple[Difference, ...]:
    """Create the stream or bring it to `spec`; returns what was changed. Raises StreamError."""
    live = await find_live(api, spec.name)
    if live is None:
        answer = await api(f"STREAM.CREATE.{spec.name}", spec.to_api())
        if "error" in answer:
            raise StreamError(f"stream {spec.name}: not created: {answer['error'].get('description')}")
        return ()
    differences = plan(spec, live)
    for item in differences:
        if not item.allowed:
            raise StreamError(
                f"stream {item.stream}: {item.setting} is {item.live!r}, streams.yaml wants {item.wanted!r}; "
                "changing it could lose events: restore the setting, or start a new run"
            )
    if differences:
        answer = await api(f"STREAM.UPDATE.{spec.name}", {**live, **spec.to_api()})
        if "error" in answer:
            raise StreamError(f"stream {spec.name}: not updated: {answer['error'].get('description')}")
    return differences


def _normal(value: Any) -> Any:
    """The server leaves out false values, and writes no limit as 0 or -1."""
    return 0 if value in (None, False, -1) else value


def _allowed(setting: str, live: dict[str, Any], wanted: Any) -> bool:
    now = live.get(setting)
    match setting:
        case "max_age" | "max_bytes" | "max_msgs" | "max_msgs_per_subject":
            unlimited = _normal(wanted) == 0
            return bool(unlimited or (_normal(now) != 0 and wanted >= now))
        case "subjects":
            return bool(set(now or ()) <= set(wanted))
        case "deny_delete" | "deny_purge":
            return bool(wanted)
        case "discard":
            return bool(wanted == "new")
        case "num_replicas" | "duplicate_window":
            return bool(wanted >= (now or 0))
        case "allow_atomic" | "allow_direct":
            return True
    return False
