"""A stored log is intact, or the first event that is altered, missing or out of place is named."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from synthetic_run import written

from gyre.errors import StreamError
from gyre.events.codec import UnknownEvent, body_digest, decode, encode
from gyre.events.log import Stored
from gyre.events.types import TablesRecorded
from gyre.projections.integrity import Integrity, examine
from tests.events.events import envelope, failed

LOG = asyncio.run(written())
EVENTS = [Stored(seq, subject, body) for seq, (subject, body) in enumerate(LOG._stored, start=1)]
ENVELOPES = [decode(stored.body) for stored in EVENTS]
SEALS = [seq for seq, item in enumerate(ENVELOPES, start=1) if isinstance(item.event, TablesRecorded)]
SEALED = ENVELOPES[SEALS[-1] - 1].event.through_seq  # type: ignore[attr-defined]


def check(events: Sequence[Stored], run: str = LOG.run) -> Integrity:
    async def stored() -> AsyncIterator[Stored]:
        for item in events:
            yield item

    return asyncio.run(examine(run, stored()))


def renumbered(events: Sequence[Stored]) -> list[Stored]:
    """As who writes them anew into a stream would leave them."""
    return [Stored(seq, item.subject, item.body) for seq, item in enumerate(events, start=1)]


def with_body(seq: int, body: bytes) -> list[Stored]:
    return [Stored(item.seq, item.subject, body) if item.seq == seq else item for item in EVENTS]


def test_an_untouched_log_is_intact() -> None:
    found = check(EVENTS)
    assert found.findings == () and found.ok
    assert (found.num_events, found.num_sealed) == (len(EVENTS), SEALED)
    assert found.text() == f"intact: {len(EVENTS)} events, {SEALED} of them sealed with their order"


@settings(max_examples=60)
@given(seq=st.integers(1, len(EVENTS) - 1), at=st.integers(0, 10_000), bit=st.integers(0, 7))
@example(seq=347, at=125, bit=4)  # an id that is no name any more
@example(seq=428, at=3244, bit=0)  # the link of a writer's last event
def test_any_bit_that_flips_is_found_where_it_is(seq: int, at: int, bit: int) -> None:
    body = bytearray(EVENTS[seq - 1].body)
    body[at % len(body)] ^= 1 << bit
    found = check(with_body(seq, bytes(body)))
    assert found.findings[0].seq == seq, found.text()


@pytest.mark.parametrize("field", ["prev", "time_ns", "cause"])
def test_an_event_that_was_altered_with_care_is_named(field: str) -> None:
    for seq in range(1, len(EVENTS), 29):
        value: Any = getattr(ENVELOPES[seq - 1], field)
        other = value + ("x" if field == "prev" else 1)
        body = encode(msgspec.structs.replace(ENVELOPES[seq - 1], **{field: other}))
        found = check(with_body(seq, body))
        assert found.findings[0].seq == seq, found.text()


def test_altering_a_writer_s_last_event_or_the_seal_itself_is_found() -> None:
    last = {item.writer: seq for seq, item in enumerate(ENVELOPES, start=1) if seq not in SEALS}
    for seq in last.values():
        envelope = ENVELOPES[seq - 1]
        for change in ({"time_ns": envelope.time_ns + 1}, {"prev": "0" * 32}):
            (finding,) = check(with_body(seq, encode(msgspec.structs.replace(envelope, **change)))).findings
            named = f"event {envelope.writer_seq} of {envelope.writer}/1 was altered"
            assert (finding.seq, finding.what) == (seq, named)
    seal = ENVELOPES[SEALS[-1] - 1]
    assert isinstance(seal.event, TablesRecorded)
    head = msgspec.structs.replace(seal.event.heads[0], digest="0" * 32)
    event = msgspec.structs.replace(seal.event, heads=(head, *seal.event.heads[1:]))
    (finding,) = check(with_body(SEALS[-1], encode(msgspec.structs.replace(seal, event=event)))).findings
    assert (finding.seq, finding.what) == (SEALS[-1], "the seal was altered")


def test_events_that_changed_places_are_found() -> None:
    for seq in range(2, SEALED, 23):
        swapped = [*EVENTS[: seq - 1], EVENTS[seq], EVENTS[seq - 1], *EVENTS[seq + 1 :]]
        found = check(renumbered(swapped))
        assert found.findings and found.findings[0].seq <= seq + 1, found.text()
        assert sum("sealed other events" in item.what for item in found.findings) <= 1, "told by one seal, not by each"
        kept = check(swapped)
        assert kept.findings[0].seq == seq, kept.text()
        assert {(seq, "out of place"), (seq, f"sequences {seq} to {seq} are missing")} <= {
            (item.seq, item.what) for item in kept.findings
        }


def test_an_event_that_was_taken_out_is_found() -> None:
    for seq in range(2, SEALED, 23):
        rest = [*EVENTS[: seq - 1], *EVENTS[seq:]]
        assert check(rest).findings[0].what == f"sequences {seq} to {seq} are missing"
        assert check(rest).findings[0].seq == seq
        found = check(renumbered(rest))
        assert found.findings, f"event {seq} taken out"


def test_a_writer_s_last_event_that_was_taken_out_is_missed_by_the_seal() -> None:
    last = {item.writer: seq for seq, item in enumerate(ENVELOPES, start=1) if seq not in SEALS}
    for writer, seq in last.items():
        found = check(renumbered([*EVENTS[: seq - 1], *EVENTS[seq:]]))
        missing = f"event {ENVELOPES[seq - 1].writer_seq} of {writer}/1 was sealed here and is missing"
        assert missing in {item.what for item in found.findings}, found.text()


def test_an_event_that_took_another_s_place_is_found_where_that_one_is_missed() -> None:
    for seq in range(2, SEALED, 23):
        lost = ENVELOPES[seq - 1]
        body = encode(envelope(failed(1), 1, writer="stranger", prev=""))
        found = check([*EVENTS[: seq - 1], Stored(seq, "gyre.r.execution.g0001-0", body), *EVENTS[seq:]])
        seal = min(at for at in SEALS if at > seq)
        after = [at for at in range(seq + 1, seal) if ENVELOPES[at - 1].writer == lost.writer]
        name = f"event {lost.writer_seq} of {lost.writer}/1"
        (finding,) = found.findings
        if after:
            expected = f"{name} is missing before it; sequence {seal} sealed other events or another order"
            assert (finding.seq, finding.what) == (after[0], expected)
        else:
            assert (finding.seq, finding.what) == (seal, f"{name} was sealed here and is missing")


def test_a_cause_comes_before_what_it_led_to() -> None:
    own = msgspec.structs.replace(envelope(failed(1)), cause=1)
    (finding,) = check([Stored(1, "gyre.r.execution.g0001-0", encode(own))]).findings
    assert finding.seq == 1 and finding.what.startswith("its cause, sequence 1, does not come before it")


def test_an_event_of_a_newer_gyre_is_no_damage() -> None:
    unknown = UnknownEvent(name="cell.sang.v1", payload=b"{}", tail=b"")
    assert check([Stored(1, "gyre.r.cell.c0", encode(envelope(unknown, 1, prev="")))]).findings == ()


def test_a_seal_of_no_table_seals_nothing_and_is_no_damage() -> None:
    seal = TablesRecorded(through_seq=1, tables=(), heads=())
    items = [(failed(1), "gyre.r.execution.g0001-0"), (seal, "gyre.r.run.main")]
    bodies = [encode(envelope(event, writer=f"w{seq}")) for seq, (event, _) in enumerate(items)]
    found = check([Stored(seq + 1, items[seq][1], body) for seq, body in enumerate(bodies)])
    assert (found.text(), found.num_sealed) == ("intact: 2 events, 0 of them sealed with their order", 0)


def test_what_cannot_be_read_is_found_behind_the_last_that_could() -> None:
    async def stored() -> AsyncIterator[Stored]:
        for item in EVENTS[:3]:
            yield item
        raise StreamError("the store is gone")

    found = asyncio.run(examine(LOG.run, stored()))
    assert not found.ok and found.text() == "damaged, first at sequence 4: the store is gone"
    twice = check([*EVENTS[:4], Stored(5, "", b""), Stored(6, "", b"")])
    assert twice.text().startswith("damaged, first at sequence 5: ") and twice.text().endswith("(1 more after it)")


def test_a_body_that_is_none_says_why() -> None:
    (finding, *_) = check(with_body(5, b"\0\0\0\x09{}")).findings
    assert (finding.seq, finding.what) == (5, "event body: truncated: header ends at byte 13, the body at 6")


def test_what_a_retry_or_a_crash_leaves_is_no_damage() -> None:
    subject = "gyre.r.execution.g0001-0"
    bodies = {number: encode(envelope(failed(number), number, prev="")) for number in (1,)}
    for number in (2, 3, 4, 6):
        prev = body_digest(bodies[number - 1]) if number - 1 in bodies else "of-event-5"
        bodies[number] = encode(envelope(failed(number), number, prev=prev))
    order = (1, 3, 2, 2, 4, 6)  # 3 went first, 2 came twice, 5 was lost with its process
    found = check([Stored(seq, subject, bodies[number]) for seq, number in enumerate(order, start=1)], "r")
    assert found.text() == (
        "intact: 6 events, 0 of them sealed with their order; 1 stored late by a retry; "
        "1 never stored (a process was killed)"
    )


def test_an_event_on_another_s_subject_is_named() -> None:
    moved = [Stored(item.seq, "gyre.r.cell.c9", item.body) if item.seq == 5 else item for item in EVENTS]
    assert check(moved).findings[0].seq == 5
