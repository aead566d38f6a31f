"""The scheduler's process over a log in memory: one decision, one command, one term at a time."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from cell_logs import arrival, completed, consumed, departure, joined, published, small_config, whole_group

from gyre.events.codec import Recorded
from gyre.events.log import open_writer
from gyre.events.memory import MemoryLog
from gyre.events.types import Decided, Event, RunFinished, RunResumed, SwitchRequested, TermStarted, Ticked
from gyre.workers.scheduler import SchedulerState, evolve, recompute
from gyre.workers.scheduler_loop import run_scheduler

CONFIG = small_config()
SERVING = (published(0), joined(), *arrival("c0", 1, 0))


async def write(log: MemoryLog, *events: Event, name: str = "hand") -> None:
    writer = await open_writer(log, name, time.time_ns)
    for event in events:
        await writer.append(event)


async def events_of(log: MemoryLog, *kinds: type[Event]) -> list[Recorded]:
    return [r async for r in log.read(1, until=await log.last_seq()) if isinstance(r.event, kinds)]


async def forever(_: float) -> None:
    await asyncio.Event().wait()


@asynccontextmanager
async def scheduler(log: MemoryLog) -> AsyncIterator[asyncio.Task[None]]:
    writer = await open_writer(log, "scheduler", time.time_ns)
    task = asyncio.create_task(run_scheduler(log, writer, CONFIG, clock=lambda: 7.0, sleep=forever))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(log: MemoryLog, kind: type[Event], num: int = 1) -> Recorded:
    async with asyncio.timeout(120):
        async for recorded in log.read(1):
            num -= isinstance(recorded.event, kind)
            if not num:
                return recorded
    raise AssertionError("unreachable")


def test_a_decision_is_commanded_once_and_replays() -> None:
    async def play() -> None:
        log = MemoryLog("r")
        await write(log, *SERVING)
        async with scheduler(log):
            await until(log, TermStarted)
            await write(log, *whole_group(0, 2, 0))
            command = await until(log, SwitchRequested)
            assert command.event == SwitchRequested(cell="c0", role="train", epoch=2, term=1)
            await write(log, *departure("c0", 2, 0), consumed(1, (0,)), completed(1), published(1))
            back = await until(log, SwitchRequested, 2)
            assert back.event == SwitchRequested(cell="c0", role="rollout", epoch=3, term=1)
            await asyncio.sleep(0.02)
        decided = await events_of(log, Decided)
        assert len(decided) == 2 and command.envelope.cause == decided[0].seq
        for recorded in decided:
            state = SchedulerState()
            async for earlier in log.read(1, until=recorded.envelope.cause):
                state = evolve(state, earlier)
            assert recompute(state, CONFIG) == recorded.event

    asyncio.run(play())


def test_a_restart_commands_a_decision_that_has_no_command_and_only_that() -> None:
    async def play() -> None:
        log = MemoryLog("r")
        await write(log, *SERVING, *whole_group(0, 2, 0), TermStarted(term=1))
        state = SchedulerState()
        async for recorded in log.read(1, until=await log.last_seq()):
            state = evolve(state, recorded)
        await write(log, recompute(state, CONFIG), name="scheduler")
        for term in (2, 3):  # the second finds the command of the first
            async with scheduler(log):
                await until(log, TermStarted, term)
                command = await until(log, SwitchRequested)
                assert command.event == SwitchRequested(cell="c0", role="train", epoch=2, term=2)
                await asyncio.sleep(0.02)
        assert len(await events_of(log, Decided)) == len(await events_of(log, SwitchRequested)) == 1

    asyncio.run(play())


def test_a_scheduler_that_sees_a_newer_term_stands_by_and_writes_nothing_more(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def play() -> None:
        log = MemoryLog("r")
        await write(log, *SERVING)
        async with scheduler(log) as old:
            await until(log, TermStarted)
            async with scheduler(log) as new:
                await until(log, TermStarted, 2)
                await write(log, RunFinished(reason="completed"))
                await asyncio.wait_for(asyncio.gather(old, new), 120)
        assert "stands by: scheduler: term 2 was started" in capsys.readouterr().err
        assert len(await events_of(log, TermStarted)) == 2

    asyncio.run(play())


def test_it_ends_with_the_run_and_not_with_an_end_that_was_resumed() -> None:
    async def play() -> None:
        log = MemoryLog("r")
        end = RunFinished(reason="interrupted")
        await write(log, end, RunResumed(versions=()))
        async with scheduler(log) as task:
            await until(log, TermStarted)
            assert not task.done()
            await write(log, end)
            await asyncio.wait_for(task, 120)
        async with scheduler(log) as task:
            await asyncio.wait_for(task, 120)
        assert len(await events_of(log, TermStarted)) == 1

    asyncio.run(play())


def test_it_ticks_sparsely_and_only_after_something_happened() -> None:
    async def play() -> None:
        log = MemoryLog("r")
        naps: asyncio.Queue[float] = asyncio.Queue()
        wake: asyncio.Queue[None] = asyncio.Queue()

        async def sleep(seconds: float) -> None:
            await naps.put(seconds)
            await wake.get()

        writer = await open_writer(log, "scheduler", time.time_ns)
        task = asyncio.create_task(run_scheduler(log, writer, CONFIG, clock=lambda: 7.5, sleep=sleep))
        for _ in range(4):
            assert await asyncio.wait_for(naps.get(), 120) >= CONFIG.scheduler.tick_s
            await asyncio.sleep(0.01)
            wake.put_nowait(None)
        ticks = await events_of(log, Ticked)
        assert [t.event for t in ticks] == [Ticked(term=1, now_s=7.5)]
        await write(log, RunFinished(reason="completed"))
        await asyncio.wait_for(task, 120)

    asyncio.run(play())
