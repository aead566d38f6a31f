"""Pure. `@gyre.consumer`: an async function of typed events, and what is known of it before it runs.

    @gyre.consumer(start="now")
    async def failures(event: CallFailed | CallCut, state: Counts) -> Counts: ...

Invariant: a consumer is a fold. It is called once an event, in stream order, with the state that the
event before left, and returns the next. What it does beside that (prints, posts) is an effect, which
may happen again after a crash; the state may not (see `consuming.py`).
"""

import inspect
import types
import typing
from collections.abc import Awaitable, Callable, Coroutine
from datetime import UTC, datetime
from typing import Any, Generic, ParamSpec

import msgspec

from gyre.errors import ConfigError
from gyre.events.codec import Recorded
from gyre.events.subjects import check_token
from gyre.events.types import Event

Start = int | str | datetime
"""A sequence; `beginning`; `now`: only what comes from now on; or a time, also as ISO 8601 text."""
P = ParamSpec("P")

_KNOWN = ("event", "state", "recorded")
_FORM = "async def name(event: CallFailed | CallCut, state: State, recorded: Recorded) -> State"


class Consumer(Generic[P]):
    """The decorated function, which can still be called as it is."""

    def __init__(
        self,
        function: Callable[..., Awaitable[Any]],
        *,
        name: str,
        types: tuple[type[Event], ...],
        start: Start,
        state_type: Any,
        wants_record: bool,
        report: Callable[[Any], str] | None,
        save_every_s: float,
    ) -> None:
        self.function = function
        self.name = name
        self.types = types
        """Only events of these classes; empty for all."""
        self.start = start
        self.state_type = state_type
        """None for a consumer without state."""
        self.wants_record = wants_record
        self.report = report
        self.save_every_s = save_every_s
        self.keeps_old_state = state_type is None or is_immutable(msgspec.inspect.type_info(state_type))
        """Whether the state before an event is sure to be untouched when the function fails on it."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Awaitable[Any]:
        return self.function(*args, **kwargs)

    def wants(self, event: Event) -> bool:
        """Of a newer gyre's events, only one that takes all events gets any."""
        return isinstance(event, self.types) if self.types else True

    def initial(self) -> Any:
        return None if self.state_type is None else self.state_type()

    async def apply(self, state: Any, recorded: Recorded) -> Any:
        """The state after one event that it wants."""
        arguments: dict[str, Any] = {} if self.state_type is None else {"state": state}
        if self.wants_record:
            arguments["recorded"] = recorded
        after = await self.function(recorded.event, **arguments)
        if self.state_type is not None and after is None:
            raise TypeError("it returned None where its next state was due: end it with `return state`")
        return after if self.state_type is not None else None


def consumer(
    *events: type[Event],
    name: str = "",
    start: Start = "beginning",
    report: Callable[[Any], str] | None = None,
    save_every_s: float = 1.0,
) -> Callable[[Callable[P, Coroutine[Any, Any, Any]]], Consumer[P]]:
    """Make an async function a consumer: `gyre consume module:function RUN_DIR` then runs it.

    `events`: the classes that it wants; default: what its first parameter is annotated with, `Event`
    for all. A parameter `state` receives its state, made at first by calling the annotated type, and a
    parameter `recorded` the event's envelope and sequence. The state must be one that msgspec writes as
    JSON: frozen structs and tuples at best, since one that can be changed in place is taken from the last
    save after an error, not from before the event.
    `name` is durable: its checkpoint goes by it (default: the function's). `start` holds while there is
    no checkpoint. `report` turns the state into text that is printed at the end. The state is saved every
    `save_every_s` seconds, 0 for after each event: an effect is repeated for at most so long a time.
    Raises ConfigError for a function that cannot be one.
    """

    def decorate(function: Callable[P, Coroutine[Any, Any, Any]]) -> Consumer[P]:
        label = getattr(function, "__qualname__", str(function))
        if not inspect.iscoroutinefunction(function):
            raise ConfigError(f"consumer {label}: not an async function; write {_FORM}")
        parameters = inspect.signature(function).parameters
        first, *others = parameters or [""]
        if not first or not set(others) <= set(_KNOWN[1:]):
            raise ConfigError(f"consumer {label}: its parameters are {', '.join(parameters)}; write {_FORM}")
        try:
            hints = typing.get_type_hints(function)
        except NameError as error:
            raise ConfigError(f"consumer {label}: an annotation: {error}; define it at the top of the module") from None
        if "state" in others and "state" not in hints:
            raise ConfigError(f"consumer {label}: say the type of `state`, which makes the first one")
        parse_start(start)
        return Consumer(
            function,
            name=check_token(name or function.__name__, "consumer"),
            types=_classes(events or _options(hints.get(first, Event)), label),
            start=start,
            state_type=hints.get("state") if "state" in others else None,
            wants_record="recorded" in others,
            report=report,
            save_every_s=save_every_s,
        )

    return decorate


def parse_start(start: Start) -> int | datetime | None:
    """A sequence, a time, or None for `now`. Text without a zone is UTC. Raises ConfigError."""
    if isinstance(start, datetime):
        return start if start.tzinfo else start.replace(tzinfo=UTC)
    if isinstance(start, int) or start.isdecimal():
        if int(start) < 1:
            raise ConfigError(f"start at {start}: sequences begin at 1")
        return int(start)
    if start in ("beginning", "now"):
        return 1 if start == "beginning" else None
    try:
        return parse_start(datetime.fromisoformat(start))
    except ValueError:
        raise ConfigError(
            f"start at {start!r}: give `beginning`, `now`, a sequence, or a time such as 2026-11-30T08:00:00Z"
        ) from None


def is_immutable(info: msgspec.inspect.Type) -> bool:
    """Whether no value of this type can be changed in place."""
    match info:
        case msgspec.inspect.StructType():
            return info.cls.__struct_config__.frozen and all(is_immutable(field.type) for field in info.fields)
        case msgspec.inspect.VarTupleType():
            return is_immutable(info.item_type)
        case msgspec.inspect.TupleType():
            return all(map(is_immutable, info.item_types))
        case msgspec.inspect.UnionType():
            return all(map(is_immutable, info.types))
        case msgspec.inspect.FrozenSetType():
            return is_immutable(info.item_type)
    return isinstance(
        info,
        msgspec.inspect.IntType
        | msgspec.inspect.FloatType
        | msgspec.inspect.StrType
        | msgspec.inspect.BoolType
        | msgspec.inspect.BytesType
        | msgspec.inspect.NoneType
        | msgspec.inspect.LiteralType
        | msgspec.inspect.EnumType,
    )


def _options(hint: Any) -> tuple[Any, ...]:
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if is_union else (hint,)


def _classes(options: tuple[Any, ...], label: str) -> tuple[type[Event], ...]:
    for option in options:
        if not (isinstance(option, type) and issubclass(option, Event)):
            raise ConfigError(f"consumer {label}: {option!r} is no event class; docs/events.md lists them")
    return () if Event in options else (*options,)
