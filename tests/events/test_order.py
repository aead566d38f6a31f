"""What a reader notices of a writer's events: repeats, gaps, and where a chain was altered."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.events.codec import Envelope, Recorded, body_digest, decode, encode
from gyre.events.order import Chain, Gap, WriterOrder
from gyre.events.types import Event, Head
from tests.events.events import envelope, failed


def numbered(number: int, writer: str = "w") -> Envelope:
    return envelope(failed(number), number, writer=writer)


def test_in_order_events_are_new_and_seen_ones_repeats() -> None:
    order = WriterOrder()
    assert [order.place(numbered(n)) for n in (1, 2, 2, 3, 1)] == ["new", "new", "repeat", "new", "repeat"]
    assert order.place(numbered(1, "other")) == "new"
    assert order.gaps() == ()


def test_a_gap_is_told_once_and_closes_when_the_late_ones_come() -> None:
    order = WriterOrder()
    assert [order.place(numbered(n), seq) for n, seq in ((1, 10), (5, 50), (3, 30))] == ["new", "gap", "new"]
    assert order.gaps() == (("w", 1, 2, 2, 30), ("w", 1, 4, 4, 50))
    assert [order.place(numbered(n)) for n in (3, 4, 2, 6)] == ["repeat", "new", "new", "new"]
    assert order.gaps() == ()


def test_a_gap_says_what_is_missing_and_where() -> None:
    assert str(Gap("w", 1, 2, 2, 30)) == "event 2 of w/1, missing before sequence 30"
    assert str(Gap("w", 1, 2, 5)) == "events 2 to 5 of w/1"


def test_a_first_number_above_1_is_a_gap_only_for_a_fold_from_the_start() -> None:
    assert WriterOrder().place(numbered(3)) == "gap"
    late = WriterOrder(from_start=False)
    assert [late.place(numbered(n)) for n in (3, 2, 3, 2)] == ["new", "new", "repeat", "repeat"]
    assert late.gaps() == ()


def test_a_reader_that_passes_aggregates_over_keeps_the_latest_holes_and_no_more() -> None:
    order = WriterOrder(partial=True)
    for number in range(2, 40_000, 2):
        order.place(numbered(number))
    (seen,) = order.seen
    assert 4096 <= len(seen.missing) <= 2 * 4096 and seen.missing[-1] == (39_997, 39_997)
    assert [order.place(numbered(n)) for n in (39_997, 39_997, 39_998)] == ["new", "repeat", "repeat"]


@given(st.lists(st.integers(1, 30), max_size=60))
def test_order_agrees_with_a_set_of_all_numbers(numbers: list[int]) -> None:
    order, seen = WriterOrder(), set[int]()
    for number in numbers:
        placed = order.place(numbered(number))
        assert (placed == "repeat") == (number in seen)
        assert (placed == "gap") == (number > max(seen, default=0) + 1)
        seen.add(number)
    missing = {n for _, _, first, last, _ in order.gaps() for n in range(first, last + 1)}
    assert missing == set(range(1, max(seen, default=0) + 1)) - seen


@given(st.lists(st.integers(1, 20), max_size=40), st.integers(0, 40), st.booleans())
def test_an_order_that_is_resumed_goes_on_as_if_it_had_not_stopped(numbers: list[int], stop: int, start: bool) -> None:
    whole, first = WriterOrder(from_start=start), WriterOrder(from_start=start)
    expected = [whole.place(numbered(n)) for n in numbers]
    found = [first.place(numbered(n)) for n in numbers[:stop]]
    resumed = WriterOrder.resumed(first.seen, from_start=start)
    for number in numbers[stop:]:
        had = resumed.has(numbered(number))
        found.append(resumed.place(numbered(number)))
        assert had == (found[-1] == "repeat")
    assert found == expected
    assert resumed.gaps() == whole.gaps()


def written(events: list[Event], writer: str = "w") -> list[bytes]:
    """The bodies that a writer makes of these events."""
    bodies: list[bytes] = []
    for number, event in enumerate(events, start=1):
        prev = body_digest(bodies[-1]) if bodies else ""
        bodies.append(encode(envelope(event, number, writer=writer, prev=prev)))
    return bodies


def folded(bodies: list[bytes]) -> Chain:
    chain = Chain()
    for seq, body in enumerate(bodies, start=1):
        chain.observe(Recorded(seq=seq, subject="", digest=body_digest(body), envelope=decode(body)))
    return chain


def altered(body: bytes, **changes: object) -> bytes:
    return encode(msgspec.structs.replace(decode(body), **changes))


NUM = 6
PLAIN = written([failed(n) for n in range(NUM + 1)])
"""The last one binds the one before it, and nothing binds the last."""


def test_an_unaltered_log_has_no_fault() -> None:
    chain = folded(PLAIN)
    assert chain.faults() == ()
    assert chain.heads() == (Head(writer="w", incarnation=1, writer_seq=NUM + 1, digest=body_digest(PLAIN[-1])),)


@pytest.mark.parametrize("at", range(NUM))
@pytest.mark.parametrize("change", [{"event": failed(99)}, {"prev": "f" * 32}, {"time_ns": 5}, {"cause": 3}])
def test_the_altered_event_is_the_one_that_is_named(at: int, change: dict[str, object]) -> None:
    bodies = list(PLAIN)
    bodies[at] = altered(bodies[at], **change)
    (fault,) = folded(bodies).faults()
    assert (fault.seq, fault.kind, fault.writer_seq) == (at + 1, "altered", at + 1)
    assert str(fault) == f"sequence {at + 1}: event {at + 1} of w/1 was altered"


def test_a_writer_s_first_event_follows_nothing() -> None:
    """Also while no later one tells that it is another."""
    (fault,) = folded([altered(PLAIN[0], prev="f" * 32)]).faults()
    assert (fault.seq, fault.kind) == (1, "altered")


def test_two_altered_events_are_both_named() -> None:
    bodies = list(PLAIN)
    bodies[1], bodies[4] = altered(bodies[1], cause=9), altered(bodies[4], prev="0" * 32)
    assert [fault.seq for fault in folded(bodies).faults()] == [2, 5]


def test_a_hole_is_a_gap_and_no_fault() -> None:
    holed = folded([*PLAIN[:2], *PLAIN[3:]])
    assert (holed.faults(), holed.gaps()) == ((), (("w", 1, 3, 3, 3),))


def test_a_second_body_under_one_number_is_foreign() -> None:
    bodies = [*PLAIN, PLAIN[-1], altered(PLAIN[-1], cause=77)]
    (fault,) = folded(bodies).faults()
    assert (fault.seq, fault.kind) == (NUM + 3, "foreign"), "the same body again is a retry"
    assert str(fault) == f"sequence {NUM + 3}: event {NUM + 1} of w/1 has two bodies"


@given(st.permutations(range(NUM)), st.integers(0, NUM - 1))
def test_events_that_retries_reordered_are_checked_all_the_same(places: list[int], at: int) -> None:
    bodies = [PLAIN[place] for place in places]
    assert folded(bodies).heads() == folded(PLAIN[:NUM]).heads(), "a late one is no head"
    bodies.append(PLAIN[-1])
    assert folded(bodies).faults() == ()
    bodies[at] = altered(bodies[at], time_ns=3)
    assert [(fault.seq, fault.writer_seq) for fault in folded(bodies).faults()] == [(at + 1, places[at] + 1)]


def test_faults_of_several_writers_are_told_by_sequence() -> None:
    bodies = [
        body for pair in zip(PLAIN, written([failed(n) for n in range(NUM + 1)], "v"), strict=True) for body in pair
    ]
    for at in (0, 5, 8):
        bodies[at] = altered(bodies[at], time_ns=3)
    chain = folded(bodies)
    assert [(fault.seq, fault.writer) for fault in chain.faults()] == [(1, "w"), (6, "v"), (9, "w")]
    assert [head.writer for head in chain.heads()] == ["v", "w"]
