"""Who leads among schedulers: a key by compare-and-set, its lease, the term that comes of it; on both kinds of log."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
from cell_logs import small_config

from gyre.errors import ConflictError
from gyre.events.log import Log, open_writer
from gyre.events.memory import MemoryLog
from gyre.events.types import RunFinished, TermStarted
from gyre.workers.election import KEY, Election
from gyre.workers.scheduler_loop import run_scheduler

OpenLog = Callable[[], AbstractAsyncContextManager[Log]]
LEASE_S = 0.2


@pytest.fixture(params=["memory", "jetstream"])
def open_log(request: pytest.FixtureRequest) -> OpenLog:
    if request.param == "jetstream":
        return request.getfixturevalue("jetstream_log")  # type: ignore[no-any-return]

    @asynccontextmanager
    async def memory() -> AsyncIterator[Log]:
        yield MemoryLog("r")

    return memory


def play(open_log: OpenLog, body: Callable[[Log], object]) -> None:
    async def work() -> None:
        async with open_log() as log, asyncio.timeout(120):
            await body(log)  # type: ignore[misc]

    asyncio.run(work())


def test_a_key_changes_by_compare_and_set(open_log: OpenLog) -> None:
    async def body(log: Log) -> None:
        assert await log.get_key("a") == (b"", 0)
        first = await log.put_key("a", b"x", expect=0)
        other = await log.put_key("b", b"y", expect=0)
        second = await log.put_key("a", b"z", expect=first)
        assert second > other > first >= 1
        assert await log.get_key("a") == (b"z", second)
        with pytest.raises(ConflictError, match="key a: expected revision"):
            await log.put_key("a", b"w", expect=first)

    play(open_log, body)


def test_of_several_that_try_at_once_one_leads_until_its_lease_ends(open_log: OpenLog) -> None:
    async def body(log: Log) -> None:
        rivals = [Election(log, f"s{i}/1", LEASE_S) for i in range(3)]
        tasks = [asyncio.create_task(rival.win()) for rival in rivals]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        (leader,) = (rival for rival in rivals if rival.revision)
        holding = asyncio.create_task(leader.hold())
        await asyncio.sleep(4 * LEASE_S)
        assert not holding.done() and sum(bool(rival.revision) for rival in rivals) == 1
        first = leader.revision
        holding.cancel()  # it dies
        while sum(task.done() for task in tasks) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        second = next(rival for rival in rivals if rival.revision > first)
        with pytest.raises(ConflictError, match="another process leads"):
            await leader.hold()
        assert second.revision > first
        for task in tasks:
            task.cancel()

    play(open_log, body)


def test_who_resigns_and_who_has_died_under_the_same_name_is_not_waited_for(open_log: OpenLog) -> None:
    async def body(log: Log) -> None:
        first = Election(log, "s0/1", 60.0)
        await first.win()
        again = Election(log, "s0/2", 60.0)
        assert await again.win() > first.revision
        await again.resign()
        assert (await log.get_key(KEY))[0] == b""
        assert await Election(log, "s1/1", 60.0).win() > again.revision
        await again.resign()  # too late to take anything from anybody
        assert (await log.get_key(KEY))[0] == b"s1/1"

    play(open_log, body)


def test_a_standby_takes_over_with_a_higher_term_and_ends_with_the_run(open_log: OpenLog) -> None:
    async def body(log: Log) -> None:
        config = small_config()
        config = type(config)(pipeline=config.pipeline, scheduler=type(config.scheduler)(lease_s=LEASE_S))
        one = asyncio.create_task(run_scheduler(log, await open_writer(log, "s0", time.time_ns), config))
        await started(log, 1)
        two = asyncio.create_task(run_scheduler(log, await open_writer(log, "s1", time.time_ns), config))
        three = asyncio.create_task(run_scheduler(log, await open_writer(log, "s2", time.time_ns), config))
        await asyncio.sleep(3 * LEASE_S)
        assert await num_terms(log) == 1
        one.cancel()
        await asyncio.gather(one, return_exceptions=True)
        terms = await started(log, 2)
        assert terms[1] > terms[0]
        await (await open_writer(log, "hand", time.time_ns)).append(RunFinished(reason="completed"))
        await asyncio.wait_for(asyncio.gather(two, three), 120)
        assert await num_terms(log) == 2

    play(open_log, body)


async def started(log: Log, num: int) -> list[int]:
    """The first so many terms."""
    terms = []
    async for recorded in log.read(1):
        if isinstance(recorded.event, TermStarted):
            terms.append(recorded.event.term)
            if len(terms) == num:
                break
    return terms


async def num_terms(log: Log) -> int:
    return len([r async for r in log.read(1, until=await log.last_seq()) if isinstance(r.event, TermStarted)])
