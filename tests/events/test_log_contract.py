"""One contract for every log: in memory, on JetStream, and on a cluster that keeps each event three times."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count, pairwise

import pytest

from gyre.errors import CodecError, ConflictError, DuplicateError, StreamError
from gyre.events.codec import Recorded, UnknownEvent, body_digest, encode
from gyre.events.follow import Follower
from gyre.events.log import Ack, Item, Log, Stored, Writer, open_writer
from gyre.events.memory import MemoryLog
from gyre.events.order import Chain, Gap, WriterOrder
from gyre.events.types import CallFailed, CellLost, RunFinished, RunResumed
from tests.chaos import namespaces
from tests.events.events import envelope, failed, started, ticking

OpenLog = Callable[[], AbstractAsyncContextManager[Log]]
_numbers = count(1)


@pytest.fixture(params=["memory", "jetstream", "resting", pytest.param("cluster", marks=pytest.mark.cluster)])
def open_log(request: pytest.FixtureRequest) -> OpenLog:
    if request.param == "cluster" and not namespaces.is_inside() and not namespaces.why_not():
        pytest.skip("here on three hosts: tests/chaos/test_three_hosts.py")
    if request.param != "memory":
        return request.getfixturevalue(f"{request.param}_log")

    @asynccontextmanager
    async def memory() -> AsyncIterator[Log]:
        yield MemoryLog(f"m{next(_numbers)}")

    return memory


def check(open_log: OpenLog, body: Callable[[Log], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), open_log() as log:
            await body(log)

    asyncio.run(main())


async def collect(log: Log, start: int = 1, until: int | None = None) -> list[Recorded]:
    last = await log.last_seq() if until is None else until
    return [recorded async for recorded in log.read(start, until=last)]


def test_an_event_is_read_back_as_it_was_appended(open_log: OpenLog) -> None:
    async def body(log: Log) -> None:
        writer = await open_writer(log, "gateway", ticking())
        assert await log.last_seq() == 0
        assert await writer.append(failed(1)) == 1
        assert await writer.append(failed(2), cause=1) == 2
        first, second = await collect(log)
        assert (first.seq, first.event, first.subject) == (1, failed(1), f"gyre.{log.run}.call.g0001-0")
        assert second.envelope.prev == first.digest
        assert (second.envelope.cause, second.envelope.writer_seq, second.envelope.incarnation) == (1, 2, 1)
        assert body_digest(await log.body(2)) == second.digest
        assert await log.last_seq() == 2

    check(open_log, body)


def test_2000_concurrent_appends_keep_the_order_of_the_calls(open_log: OpenLog) -> None:
    async def body(log: Log) -> None:
        writer = await open_writer(log, "w", ticking())
        large = started(bytes(300_000))
        appends = [writer.append(large if number % 400 == 7 else failed(number)) for number in range(2000)]
        assert await asyncio.gather(*appends) == list(range(1, 2001))
        recorded = await collect(log)
        assert [r.envelope.writer_seq for r in recorded] == list(range(1, 2001))
        assert all(b.envelope.prev == a.digest for a, b in pairwise(recorded))

    check(open_log, body)


def test_a_reader_follows_and_ends_at_until(open_log: OpenLog) -> None:
    async def body(log: Log) -> None:
        writer = await open_writer(log, "w", ticking())
        seen: list[int] = []
        arrived = asyncio.Event()

        async def follow() -> None:
            async for recorded in log.read():
                seen.append(recorded.seq)
                arrived.set()

        follower = asyncio.create_task(follow())
        bounded = asyncio.create_task(collect(log, 2, 3))
        for number in range(1, 5):
            arrived.clear()
            await writer.append(failed(number))
            await arrived.wait()
        assert seen == [1, 2, 3, 4]
        assert [r.seq for r in await bounded] == [2, 3]
        follower.cancel()
        with pytest.raises(asyncio.CancelledError):
            await follower

    check(open_log, body)


def test_a_reader_of_some_aggregates_gets_no_others(open_log: OpenLog) -> None:
    async def body(log: Log) -> None:
        writer = await open_writer(log, "w", ticking())
        lost = CellLost(cell="c0", reason="engine")
        events = [failed(1), lost, failed(2), RunResumed(versions=()), failed(3), lost]
        for event in events[:3]:
            await writer.append(event)
        assert await log.last_seq(("call", "cell")) == 3
        assert await log.last_seq(("cell",)) == 2
        assert await log.last_seq(("policy",)) == 0
        reader = log.read(2, only=("cell", "run"))
        assert (await anext(reader)).seq == 2
        for event in events[3:]:
            await writer.append(event)
        found = [await anext(reader) for _ in range(2)]
        assert [(r.seq, r.event) for r in found] == [(4, events[3]), (6, events[5])]
        await reader.aclose()  # type: ignore[attr-defined]

    check(open_log, body)


def test_reading_resumes_at_a_sequence(open_log: OpenLog) -> None:
    async def body(log: Log) -> None:
        writer = await open_writer(log, "w", ticking())
        for number in range(10):
            await writer.append(failed(number))
        assert [r.seq for r in await collect(log, 7)] == [7, 8, 9, 10]

    check(open_log, body)


def test_stored_bodies_are_whole_undecoded_and_may_repeat(open_log: OpenLog) -> None:
    async def body(log: Log) -> None:
        large = encode(envelope(started(bytes(900_000)), 1))
        subject = f"gyre.{log.run}.call.g0001-0"
        for msg_id, content in (("a", large), ("b", large), ("c", b"no event")):
            await log.publish(subject, content, msg_id)
        found = [stored async for stored in log.stored(1, until=3)]
        assert found == [Stored(1, subject, large), Stored(2, subject, large), Stored(3, subject, b"no event")]
        assert [stored.seq async for stored in log.stored(3, until=3)] == [3]
        assert [recorded.seq for recorded in await collect(log, 1, 2)] == [1]

    check(open_log, body)


def test_several_readers_see_the_same(open_log: OpenLog) -> None:
    async def body(log: Log) -> None:
        readers = [asyncio.create_task(collect(log, 1, 300)) for _ in range(4)]
        writers = [Writer(log, f"w{index}", 1, ticking()) for index in range(3)]
        await asyncio.gather(*(writers[number % 3].append(failed(number)) for number in range(300)))
        first, *others = [await reader for reader in readers]
        assert [r.seq for r in first] == list(range(1, 301))
        assert all(other == first for other in others)

    check(open_log, body)


def test_compare_and_set_has_one_winner(open_log: OpenLog) -> None:
    async def body(log: Log) -> None:
        rivals = [Writer(log, f"w{index}", 1, ticking()) for index in range(5)]
        results = await asyncio.gather(
            *(rival.append(failed(0), expect_last=0) for rival in rivals), return_exceptions=True
        )
        assert results.count(1) == 1
        assert sum(isinstance(result, ConflictError) for result in results) == 4
        winner = rivals[results.index(1)]
        assert await winner.append(failed(1), expect_last=1) == 2

    check(open_log, body)


def test_a_lost_compare_and_set_leaves_no_hole_in_the_chain(open_log: OpenLog) -> None:
    async def body(log: Log) -> None:
        writer = await open_writer(log, "w", ticking())
        await writer.append(failed(0))
        results = await asyncio.gather(
            writer.append(failed(1)),
            writer.append(failed(2), expect_last=0),
            writer.append(failed(3)),
            return_exceptions=True,
        )
        assert (results[0], results[2]) == (2, 3)
        assert isinstance(results[1], ConflictError)
        recorded = await collect(log)
        assert [r.envelope.writer_seq for r in recorded] == [1, 2, 3]
        assert recorded[2].envelope.prev == recorded[1].digest

    check(open_log, body)


def test_events_that_are_one_fact_stand_in_a_row(open_log: OpenLog) -> None:
    """Whatever their subjects and sizes, and whoever else writes meanwhile."""

    async def body(log: Log) -> None:
        writers = [Writer(log, f"w{index}", 1, ticking()) for index in range(3)]
        large = started(bytes(400_000))
        facts = [(failed(number), RunFinished(reason="completed"), large, failed(-number)) for number in range(20)]
        appends = []
        for number, fact in enumerate(facts):
            appends.append(writers[number % 3].append(failed(1000 + number)))
            appends.append(writers[number % 3].append_all(fact, cause=0))
        lasts = (await asyncio.gather(*appends))[1::2]
        recorded = await collect(log)
        assert len(recorded) == 100
        for fact, last in zip(facts, lasts, strict=True):
            found = recorded[last - 4 : last]
            assert tuple(r.event for r in found) == fact
            assert all(b.envelope.prev == a.digest for a, b in pairwise(found))
        chain = Chain()
        for item in recorded:
            chain.observe(item)
        assert (chain.faults(), chain.gaps()) == ((), ())

    check(open_log, body)


def test_a_repeated_fact_is_stored_once(open_log: OpenLog) -> None:
    async def body(log: Log) -> None:
        items = _items(log, "w", 3)
        await Writer(log, "other", 1, ticking()).append(failed(0))
        assert await log.publish_all(items) == Ack(seq=2, duplicate=False)
        await Writer(log, "later", 1, ticking()).append(failed(0))
        assert await log.publish_all(items) == Ack(seq=2, duplicate=True)
        assert await log.last_seq() == 5

    check(open_log, body)


def test_a_fact_of_which_a_part_is_there_is_refused_as_a_whole(open_log: OpenLog) -> None:
    async def body(log: Log) -> None:
        items = _items(log, "w", 3)
        for place in (0, 2):
            await log.publish_all([items[place]])
            with pytest.raises(DuplicateError, match="some of these events and not the others"):
                await log.publish_all(items)
        assert await log.last_seq() == 2
        with pytest.raises(DuplicateError, match="sequence 3 holds another event of writer v/1"):
            await log.publish_all(_items(log, "v", 2))
            await Writer(log, "v", 1, ticking()).append_all((failed(8), failed(9)))
        assert await log.last_seq() == 4

    check(open_log, body)


def test_a_lost_compare_and_set_stores_nothing_of_a_fact(open_log: OpenLog) -> None:
    async def body(log: Log) -> None:
        writer = await open_writer(log, "w", ticking())
        finished = RunFinished(reason="completed")
        assert await writer.append_all((failed(1), finished), expect_last=0) == 2
        with pytest.raises(ConflictError, match="expected last sequence 0, it is 1"):
            await writer.append_all((failed(2), finished), expect_last=0)
        assert await log.last_seq() == 2
        assert await writer.append_all((failed(3), finished), expect_last=1) == 4
        recorded = await collect(log)
        assert [r.envelope.writer_seq for r in recorded] == [1, 2, 3, 4]
        assert all(b.envelope.prev == a.digest for a, b in pairwise(recorded))

    check(open_log, body)


def test_a_fact_of_which_one_event_cannot_be_encoded_takes_no_number(open_log: OpenLog) -> None:
    async def body(log: Log) -> None:
        writer = await open_writer(log, "w", ticking())
        with pytest.raises(CodecError, match="status"):
            await writer.append_all((failed(1), CallFailed(**_wrong_status()), failed(2)))
        await writer.append(failed(1))
        assert [r.envelope.writer_seq for r in await collect(log)] == [1]

    check(open_log, body)


def _items(log: Log, writer: str, num: int) -> list[Item]:
    envelopes = [envelope(failed(number), number, writer=writer) for number in range(1, num + 1)]
    return [Item(f"gyre.{log.run}.call.g0001-0", encode(item), item.id) for item in envelopes]


def test_an_event_that_cannot_be_encoded_takes_no_number(open_log: OpenLog) -> None:
    async def body(log: Log) -> None:
        writer = await open_writer(log, "w", ticking())
        with pytest.raises(CodecError, match="status"):
            await writer.append(CallFailed(**_wrong_status()))
        await writer.append(failed(1))
        assert [r.envelope.writer_seq for r in await collect(log)] == [1]

    check(open_log, body)


def _wrong_status() -> dict[str, object]:
    return {"execution": "e", "session": "s", "call": "c", "status": "500", "reason": ""}


def test_a_repeated_id_is_stored_once(open_log: OpenLog) -> None:
    async def body(log: Log) -> None:
        item = envelope(failed(1))
        subject = f"gyre.{log.run}.call.g0001-0"
        first = await log.publish(subject, encode(item), item.id)
        again = await log.publish(subject, encode(item), item.id)
        assert (first.seq, first.duplicate, again.seq, again.duplicate) == (1, False, 1, True)
        assert await log.last_seq() == 1

    check(open_log, body)


def test_a_compare_and_set_whose_answer_was_lost_is_ones_own_and_no_conflict(open_log: OpenLog) -> None:
    """Whoever has not heard the answer sends the same again, when others have written there meanwhile."""

    async def body(log: Log) -> None:
        one, (first, *rest) = envelope(RunFinished(reason="completed"), writer="v"), _items(log, "w", 3)
        subject = f"gyre.{log.run}.run.main"
        assert (await log.publish(subject, encode(one), one.id, expect_last=0)).seq == 1
        assert (await log.publish_all((first, *rest), expect_last=0)).seq == 2
        later = Writer(log, "later", 1, ticking())
        await later.append(failed(7))
        again = await log.publish(subject, encode(one), one.id, expect_last=0)
        fact = await log.publish_all((first, *rest), expect_last=0)
        assert (again.seq, again.duplicate, fact.seq, fact.duplicate) == (1, True, 2, True)
        other = envelope(RunFinished(reason="completed"), writer="u")
        with pytest.raises(ConflictError, match="expected last sequence 0, it is 1"):
            await log.publish(subject, encode(other), other.id, expect_last=0)
        assert [r.seq for r in await collect(log)] == [1, 2, 3, 4, 5]

    check(open_log, body)


def test_a_repeat_that_was_stored_is_read_once(open_log: OpenLog) -> None:
    async def body(log: Log) -> None:
        item = envelope(failed(1))
        subject = f"gyre.{log.run}.call.g0001-0"
        await log.publish(subject, encode(item), item.id)
        await log.publish(subject, encode(item), "an-id-of-later")
        await Writer(log, "other", 1, ticking()).append(failed(2))
        assert [r.seq for r in await collect(log)] == [1, 3]

    check(open_log, body)


def test_a_foreign_body_under_ones_id_is_refused(open_log: OpenLog) -> None:
    async def body(log: Log) -> None:
        await Writer(log, "w", 1, ticking()).append(failed(1))
        with pytest.raises(DuplicateError, match="sequence 1 holds another event of writer w/1"):
            await Writer(log, "w", 1, ticking()).append(failed(2))

    check(open_log, body)


def test_a_reopened_writer_raises_its_incarnation(open_log: OpenLog) -> None:
    async def body(log: Log) -> None:
        for expected in (1, 2, 3):
            writer = await open_writer(log, "w", ticking())
            assert writer.incarnation == expected
            await writer.append(failed(0))
        assert [r.envelope.incarnation for r in await collect(log)] == [1, 2, 3]
        assert (await open_writer(log, "other", ticking())).incarnation == 1

    check(open_log, body)


def test_an_event_of_a_newer_gyre_passes_through(open_log: OpenLog) -> None:
    async def body(log: Log) -> None:
        event = UnknownEvent(name="call.imagined.v9", payload=b'{"b": 1, "a":[null,1e5]}', tail=b"\x00\xff")
        item = envelope(event)
        await log.publish(f"gyre.{log.run}.run.main", encode(item), item.id)
        (recorded,) = await collect(log)
        assert recorded.envelope == item
        assert encode(recorded.envelope) == await log.body(1)

    check(open_log, body)


@pytest.mark.parametrize("num_bytes", [65_536, 65_537, 1_000_000, 3_000_000])
def test_a_body_of_any_size_comes_back(open_log: OpenLog, num_bytes: int) -> None:
    async def body(log: Log) -> None:
        writer = await open_writer(log, "w", ticking())
        event = started(bytes(range(256)) * (num_bytes // 256) + bytes(num_bytes % 256))
        seq = await writer.append(event)
        (recorded,) = await collect(log, seq)
        assert recorded.event == event
        assert body_digest(await log.body(seq)) == recorded.digest

    check(open_log, body)


def test_a_large_header_comes_back(open_log: OpenLog) -> None:
    async def body(log: Log) -> None:
        writer = await open_writer(log, "w", ticking())
        event = CallFailed(execution="e", session="s", call="c", status=1, reason="long " * 400_000)
        seq = await writer.append(event)
        (recorded,) = await collect(log, seq)
        assert recorded.event == event

    check(open_log, body)


def test_a_reader_tells_what_writers_numbered_and_the_log_does_not_hold(open_log: OpenLog) -> None:
    """Which is neither fatal nor lasting: a retry may store it late."""

    async def body(log: Log) -> None:
        first, *_, last = items = _items(log, "w", 5)
        for item in (first, last):
            await log.publish_all([item])
        following = Follower(log)
        task = asyncio.create_task(following.run())
        await following.caught_up(2)
        assert [str(gap) for gap in following.gaps] == ["events 2 to 4 of w/1, missing before sequence 2"]
        await log.publish_all([items[2]])
        await following.caught_up(3)
        order = WriterOrder()
        assert [r.envelope.writer_seq async for r in log.read(until=3, order=order)] == [1, 5, 3]
        assert order.gaps() == following.gaps == (Gap("w", 1, 2, 2, 3), Gap("w", 1, 4, 4, 2))
        for item in (items[1], items[3]):
            await log.publish_all([item])
        await following.caught_up(5)
        assert following.gaps == ()
        task.cancel()

    check(open_log, body)


def test_a_malformed_body_is_named_by_its_sequence(open_log: OpenLog) -> None:
    async def body(log: Log) -> None:
        await log.publish(f"gyre.{log.run}.run.main", b"\x00\x00\x00\x05hello", "x")
        with pytest.raises(CodecError, match=f"log {log.run}: sequence 1: event body"):
            await collect(log)

    check(open_log, body)


def test_there_is_no_body_where_there_is_no_event(open_log: OpenLog) -> None:
    async def body(log: Log) -> None:
        with pytest.raises(StreamError, match="no event at sequence 1"):
            await log.body(1)

    check(open_log, body)
