"""Shell. `streams.yaml` against the streams of a live server: what differs, what may be changed, and why not.

Invariant: all streams are compared before any is touched; one change that could lose events refuses all.
"""

import msgspec

from gyre.errors import StreamError
from gyre.events.run_dir import RunDir
from gyre.events.streams import Api, Difference, Streams, apply, find_live, plan

_REASONS = {
    "max_age": "older events would be dropped",
    "max_bytes": "events beyond it would be dropped or refused",
    "max_msgs": "events beyond it would be dropped or refused",
    "max_msgs_per_subject": "events of a subject beyond it would be dropped or refused",
    "subjects": "events on a subject that is left out would not be stored",
    "deny_delete": "anybody could delete events",
    "deny_purge": "anybody could purge events",
    "discard": "the oldest events would make room for new ones",
    "num_replicas": "fewer copies would be left",
    "duplicate_window": "an event that is sent again late would be stored twice",
    "storage": "the server cannot move a stream",
    "retention": "events would go once they were read",
}


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """What `apply_changes` would do."""

    missing: tuple[str, ...]
    """Streams that would be made."""
    differences: tuple[Difference, ...]

    @property
    def refused(self) -> tuple[Difference, ...]:
        return tuple(item for item in self.differences if not item.allowed)

    def lines(self, *, is_done: bool = False) -> list[str]:
        lines = [f"{name}: missing: {'created' if is_done else 'would be created'}" for name in self.missing]
        return lines + [_line(item, is_done) for item in self.differences] or ["streams: as streams.yaml says"]


async def compare(api: Api, streams: Streams) -> Changes:
    """Both streams of a run (`streams.for_run`) with what the server has. Raises StreamError."""
    missing: list[str] = []
    differences: list[Difference] = []
    for spec in (streams.log, streams.blobs, streams.keys):
        live = await find_live(api, spec.name)
        if live is None:
            missing.append(spec.name)
        else:
            differences += plan(spec, live)
    return Changes(missing=tuple(missing), differences=tuple(differences))


async def apply_changes(api: Api, streams: Streams) -> Changes:
    """Make it so; returns what was done. Raises StreamError, and then nothing was."""
    changes = await compare(api, streams)
    if changes.refused:
        reasons = "; ".join(map(_line, changes.refused))
        raise StreamError(f"nothing was changed: {reasons}; keep the setting, or start a new run with it")
    for spec in (streams.log, streams.blobs, streams.keys):
        await apply(api, spec)
    return changes


def sync_line(run_dir: RunDir) -> str:
    """How the server syncs to disk, which no client of a server may ask: read from the embedded one's config."""
    path = run_dir.nats / "server.conf"
    if not path.exists():
        return "sync: unknown: a server of your own says so only in its config (jetstream { sync_interval: always })"
    if "sync_interval: always" in path.read_text():
        what = "always: an acknowledged event is on the disk"
    else:
        what = "default, every two minutes: a power loss may take acknowledged events"
    return f"sync: {what} ({path})"


def _line(item: Difference, is_done: bool = False) -> str:
    if not item.allowed:
        verdict = f"refused: {_REASONS.get(item.setting, 'events could be lost')}"
    else:
        verdict = "changed" if is_done else "can be changed"
    return f"{item.stream}: {item.setting} is {item.live!r}, streams.yaml wants {item.wanted!r}: {verdict}"
