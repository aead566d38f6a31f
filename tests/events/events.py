"""Events for tests: small ones, and one example of every type made from its fields."""

from collections.abc import Callable
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from gyre.events.codec import Envelope
from gyre.events.types import CallFailed, CallStarted, Event


def failed(number: int, execution: str = "g0001-0") -> CallFailed:
    return CallFailed(execution=execution, session="s", call=f"s-c{number}", status=500, reason="refused")


def started(context: bytes) -> CallStarted:
    return CallStarted(
        execution="g0001-0",
        session="s",
        call="s-c1",
        base="",
        shared=0,
        context=context,
        role_class="main",
        rule="root",
        marks=(),
        temperature=1.0,
        top_p=1.0,
        max_tokens=64,
        cell="c0",
    )


def envelope(event: Event, number: int = 1, *, writer: str = "w", prev: str = "", incarnation: int = 1) -> Envelope:
    return Envelope(
        writer=writer, incarnation=incarnation, writer_seq=number, prev=prev, time_ns=1_000, cause=0, event=event
    )


def ticking() -> Callable[[], int]:
    """A clock that counts."""
    now = iter(range(1, 1 << 40))
    return lambda: next(now)


def example(cls: type[Event]) -> Event:
    """The same value every time: each field holds something of its own."""
    return msgspec.convert({**_fields(cls), "type": cls.__struct_config__.tag}, cls, builtin_types=(bytes,))


def _fields(cls: type[msgspec.Struct]) -> dict[str, Any]:
    """Without those that came after its release."""
    hints = get_type_hints(cls)
    later = cls.__struct_defaults__ if cls.__struct_config__.omit_defaults else ()
    names = cls.__struct_fields__[: len(cls.__struct_fields__) - len(later)]
    return {name: _value(hints[name], name, at) for at, name in enumerate(names, start=1)}


def _value(hint: Any, name: str, at: int) -> Any:
    if get_origin(hint) is Literal:
        return get_args(hint)[-1]
    if get_origin(hint) is tuple:
        return [_value(get_args(hint)[0], name, at + extra) for extra in range(2)]
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return _fields(hint)
    if isinstance(hint, UnionType):
        return _value(get_args(hint)[0], name, at)
    if hint is bool:
        return True
    return {str: f"{name}-{at}", int: at, float: at + 0.25, bytes: bytes(range(at, at + 8))}[hint]
