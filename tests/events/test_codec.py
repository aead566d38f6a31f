"""Bodies: canonical, typed, and refused when they are anything else."""

import asyncio
import json
import math
import re
from collections.abc import Callable
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.errors import CodecError
from gyre.events.codec import UnknownEvent, body_digest, decode, encode
from gyre.events.log import Writer
from gyre.events.memory import MemoryLog
from gyre.events.tails import attach, detach, is_detached, parse_detached
from gyre.events.types import (
    EVENT_TYPES,
    CallCompleted,
    CellSwitched,
    Event,
    ExecutionScored,
    GradientOffered,
    Phase,
    event_type,
)
from tests.events.events import envelope, example, failed, started, ticking
from tests.events.golden_files import GOLDEN, golden_of

TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
INTS = st.integers(-(2**53), 2**53)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of a field."""
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) is tuple:
        return st.lists(values(get_args(hint)[0]), max_size=3).map(tuple)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return structs(hint)
    if isinstance(hint, UnionType):
        return st.none() | values(get_args(hint)[0])
    plain: dict[Any, st.SearchStrategy[Any]] = {
        str: TEXTS,
        int: INTS,
        bool: st.booleans(),
        float: st.floats(allow_nan=False, allow_infinity=False),
        bytes: st.binary(max_size=24),
    }
    return plain[hint]


def structs(cls: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(cls)
    return st.builds(cls, **{name: values(hints[name]) for name in cls.__struct_fields__})


EVENTS: st.SearchStrategy[Event] = st.one_of([structs(cls) for cls in EVENT_TYPES.values()])


@pytest.mark.parametrize("name", EVENT_TYPES)
def test_a_released_type_keeps_its_bytes(name: str) -> None:
    path = GOLDEN / f"{name}.json"
    assert path.exists(), f"{name} is new: write its golden file with `python -m tests.events.golden_files`"
    golden = json.loads(path.read_text())
    body = bytes.fromhex(golden["body_hex"])
    assert golden_of(EVENT_TYPES[name]) == golden, f"{name} is released: add a new version instead of changing it"
    assert decode(body).event == example(EVENT_TYPES[name])
    assert body_digest(body) == golden["digest"]


def test_no_released_type_went_away() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(EVENT_TYPES)


@pytest.mark.parametrize("name", EVENT_TYPES)
def test_every_example_round_trips(name: str) -> None:
    item = envelope(example(EVENT_TYPES[name]))
    assert decode(encode(item)) == item


@given(EVENTS, st.integers(1, 2**40), TEXTS, st.integers(0, 2**40))
@settings(max_examples=300)
def test_any_event_round_trips(event: Event, number: int, writer: str, cause: int) -> None:
    item = msgspec.structs.replace(envelope(event, number, writer=writer), cause=cause)
    body = encode(item)
    assert decode(body) == item
    assert encode(decode(body)) == body


@given(EVENTS, st.data())
@settings(max_examples=500)
def test_a_mutated_body_is_refused_or_is_another_events(event: Event, data: st.DataObject) -> None:
    body = bytearray(encode(envelope(event)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body) - 1))
        match data.draw(st.sampled_from(["set", "cut", "insert", "drop"])):
            case "set":
                body[at] = data.draw(st.integers(0, 255))
            case "cut":
                del body[at + 1 :]
            case "insert":
                body[at:at] = data.draw(st.binary(min_size=1, max_size=4))
            case "drop" if len(body) > 1:
                del body[at]
    _refused_or_canonical(bytes(body))


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_any_bytes_are_refused_or_canonical(body: bytes) -> None:
    _refused_or_canonical(body)


def _refused_or_canonical(body: bytes) -> None:
    try:
        item = decode(body)
    except CodecError:
        return
    assert encode(item) == body


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 100_000,
        b'{"type":"x","payload":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"null",
        b'"\xff"',
        b"{}",
    ],
)
def test_hostile_headers_are_refused(header: bytes) -> None:
    with pytest.raises(CodecError):
        decode(len(header).to_bytes(4, "big") + header)


def test_a_body_that_is_not_canonical_is_refused() -> None:
    body = encode(envelope(failed(1)))
    spaced = body[4:].replace(b'"cause":0', b'"cause": 0')
    with pytest.raises(CodecError, match="not in canonical form"):
        decode(len(spaced).to_bytes(4, "big") + spaced)


def test_a_wrong_id_is_refused() -> None:
    body = encode(envelope(failed(1))).replace(b'"writer":"w"', b'"writer":"v"')
    with pytest.raises(CodecError, match="is not the hash of its type, writer and writer_seq"):
        decode(body)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("cls", "changes", "where"),
    [
        (ExecutionScored, lambda value: {"score": value}, "execution.scored.v1.score"),
        (ExecutionScored, lambda value: {"graded": value}, "execution.scored.v1.graded"),
        (GradientOffered, lambda value: {"losses": (0.5, value)}, "gradient_offered.v1.losses[1]"),
        (CellSwitched, lambda value: {"phases": (Phase(name="a", seconds=value),)}, "switched.v1.phases[0].seconds"),
    ],
)
def test_a_number_that_is_not_finite_is_refused_wherever_it_stands(
    cls: type[Event], changes: Callable[[float], dict[str, Any]], where: str, value: float
) -> None:
    """JSON would make a null of it."""
    event = msgspec.structs.replace(example(cls), **changes(value))
    with pytest.raises(CodecError, match=rf"{re.escape(where)}: {value} is not a finite number"):
        encode(envelope(event))


def test_a_value_of_the_wrong_type_is_refused_before_it_is_stored() -> None:
    wrong = ExecutionScored(execution="e", score="high", parts=(), wall_s=1.0)  # type: ignore[arg-type]
    with pytest.raises(CodecError, match=r"execution.scored.v1: .*score"):
        encode(envelope(wrong))


def test_equal_events_have_equal_bodies() -> None:
    whole, real = (ExecutionScored(execution="e", score=score, parts=(), wall_s=2) for score in (1, 1.0))
    assert whole == real
    assert encode(envelope(whole)) == encode(envelope(real))


def test_token_arrays_stay_out_of_the_json() -> None:
    body = encode(envelope(started(b"\x01\x02\x03\x04")))
    assert body.endswith(b"\x01\x02\x03\x04")
    assert b'"context":4' in body
    completed = example(CallCompleted)
    assert isinstance(completed, CallCompleted)
    assert encode(envelope(completed)).endswith(completed.sampled + completed.logprobs)


class CountedV2(Event, frozen=True, kw_only=True, tag="test.counted.v2"):
    aggregate = "run"
    num_calls: int
    num_failed: int


class Counted(Event, frozen=True, kw_only=True, tag="test.counted.v1"):
    """As a released version stays when a newer one has come."""

    aggregate = "run"
    calls: int

    def upcast(self) -> Event:
        return CountedV2(num_calls=self.calls, num_failed=0).upcast()


def test_an_event_of_an_old_version_is_seen_as_the_newest_and_keeps_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls in (Counted, CountedV2):
        monkeypatch.setitem(EVENT_TYPES, event_type(cls), cls)

    async def main() -> None:
        log = MemoryLog("r")
        await Writer(log, "w", 1, ticking()).append(Counted(calls=3))
        await Writer(log, "v", 1, ticking()).append(CountedV2(num_calls=4, num_failed=1))
        first, second = [recorded async for recorded in log.read(until=2)]
        assert (first.event, first.envelope.event) == (CountedV2(num_calls=3, num_failed=0), Counted(calls=3))
        assert second.event == CountedV2(num_calls=4, num_failed=1)
        assert body_digest(encode(first.envelope)) == first.digest

    asyncio.run(main())


def test_an_unknown_event_keeps_its_bytes() -> None:
    item = envelope(UnknownEvent(name="x.y.v2", payload=b'{"z":1.50, "a":[NULL]}'.lower(), tail=b"tail"))
    assert encode(decode(encode(item))) == encode(item)


@given(st.integers(0, 4), st.integers(0, 400_000), st.integers(0, 100_000), st.booleans())
@settings(max_examples=60)
def test_detaching_a_tail_is_reversible(word: int, header: int, tail: int, garbage: bool) -> None:
    body = (header.to_bytes(4, "big") + bytes(header) + bytes(tail))[: None if word == 4 else word]
    body = (b"\x80" if garbage else b"") + body
    parts = detach(body)
    if parts is None:
        assert not is_detached(body)
        return
    stored = attach(parts[0], "ab" * 32)
    assert is_detached(stored)
    assert len(stored) < 300_000
    assert parse_detached(stored) == (parts[0], "ab" * 32)
    assert b"".join(parts) == body


def test_a_stored_body_without_its_blob_name_is_refused() -> None:
    with pytest.raises(CodecError, match="name of its blob"):
        parse_detached(attach(b"kept", "ab" * 31))
