"""Cells that fall silent: who counts it, what the scheduler makes of it, and what comes of one that is back."""

import asyncio
import time
from collections.abc import Callable

from cell_logs import arrival, joined, published, small_config

from gyre.config import CellsConfig, Config
from gyre.errors import StreamError
from gyre.events.codec import Recorded
from gyre.events.log import Log, open_writer
from gyre.events.memory import MemoryLog
from gyre.events.types import CellJoined, CellLost, Event, RunFinished, SilenceNoticed, TermStarted, Ticked
from gyre.workers.scheduler import SchedulerState, evolve, lost
from gyre.workers.scheduler_loop import run_scheduler
from gyre.workers.signs_of_life import Listener, give_signs, key_of

LEASE_S = 20.0
CONFIG: Config = type(small_config())(pipeline=small_config().pipeline, cells=CellsConfig(count=2, lease_s=LEASE_S))
SERVING = (published(0), joined(), *arrival("c0", 1, 0), joined("c1", 1), *arrival("c1", 1, 0))


async def write(log: Log, *events: Event, name: str = "hand") -> None:
    writer = await open_writer(log, name, time.time_ns)
    for event in events:
        await writer.append(event)


async def state_of(*events: Event) -> SchedulerState:
    log, state = MemoryLog("r"), SchedulerState()
    await write(log, *SERVING, *events)
    async for recorded in log.read(1, until=await log.last_seq()):
        state = evolve(state, recorded)
    return state


def after(*events: Event) -> CellLost | None:
    return lost(asyncio.run(state_of(*events)), CONFIG)


TERM = TermStarted(term=2)


def silence(cell: str = "c1", seconds: float = LEASE_S, term: int = 2) -> SilenceNoticed:
    return SilenceNoticed(term=term, cell=cell, seconds=seconds)


def test_a_satellite_is_lost_when_its_lease_is_over_and_not_before() -> None:
    assert after(TERM) is None
    assert after(TERM, silence(seconds=LEASE_S - 0.1)) is None
    assert after(TERM, silence()) == CellLost(cell="c1", reason="no sign of life for 20 s")
    assert after(TERM, silence(), Ticked(term=2, now_s=9.0)) is not None, "until it is written"


def test_the_core_a_stranger_and_the_word_of_a_deposed_scheduler_are_passed_over() -> None:
    assert after(TERM, silence("c0")) is None
    assert after(TERM, silence("c9")) is None
    assert after(TERM, silence(term=1)) is None
    assert after(TERM, silence(), TermStarted(term=3)) is None, "its successor counts for itself"


def test_of_several_that_are_silent_each_is_lost_in_turn() -> None:
    both = (TERM, joined("c2", 2), *arrival("c2", 1, 0), silence("c2"), silence("c1"))
    first = after(*both)
    assert first is not None and first.cell == "c2"
    second = after(*both, first)
    assert second is not None and second.cell == "c1"
    assert after(*both, first, second) is None


def test_who_is_lost_is_lost_once_and_who_joins_again_is_there() -> None:
    gone = CellLost(cell="c1", reason="no sign of life for 20 s")
    assert after(TERM, silence(), gone) is None
    assert after(TERM, gone, silence()) is None
    assert after(TERM, silence(), gone, joined("c1", 1)) is None
    assert after(TERM, silence(), joined("c1", 1)) is None
    assert after(TERM, silence(), gone, joined("c1", 1), silence()) == gone


class Away(MemoryLog):
    """A log whose keys cannot be read for a while."""

    is_away = False

    async def get_key(self, key: str) -> tuple[bytes, int]:
        if self.is_away:
            raise StreamError("away")
        return await super().get_key(key)


def test_silence_is_counted_by_one_clock_and_only_while_it_was_listened_to() -> None:
    async def play() -> None:
        log = Away("r")
        listener = Listener(log, LEASE_S)

        async def heard(now_s: float) -> dict[str, float]:
            return await listener.silences(("c1",), now_s)

        assert await heard(1000.0) == {}
        for now_s in (1009.0, 1018.0):
            assert await heard(now_s) == {}
        assert await heard(1027.0) == {"c1": 27.0}
        await log.put_key(key_of("c1"), b"", expect=0)
        assert await heard(1036.0) == {}, "a sign of life"
        assert await heard(1e9) == {}, "a clock that jumps, or a scheduler that was away, is no silence of others"
        assert await heard(5.0) == {}
        log.is_away = True
        assert await heard(14.0) == {}
        log.is_away = False
        assert await heard(9e9) == {}, "a server that was away, neither"
        assert list(await heard(9e9 + 10.0)) == ["c1"]

    asyncio.run(play())


def test_signs_go_on_when_the_log_was_away() -> None:
    async def play() -> None:
        log = Away("r")
        num_slept = 0

        async def sleep(seconds: float) -> None:
            nonlocal num_slept
            num_slept += 1
            log.is_away = num_slept == 2
            assert seconds < LEASE_S / 2
            if num_slept == 5:
                raise asyncio.CancelledError

        try:
            await give_signs(log, "c1", LEASE_S, sleep=sleep)
        except asyncio.CancelledError:
            assert (await log.get_key(key_of("c1")))[1] == 4, "one was not given"

    asyncio.run(play())


def test_the_scheduler_tells_of_a_silent_satellite_and_writes_that_it_is_lost() -> None:
    async def play() -> None:
        log = MemoryLog("r")
        await write(log, *SERVING)
        config = Config(pipeline=CONFIG.pipeline, cells=CellsConfig(count=2, lease_s=1.0))
        async with asyncio.TaskGroup() as group, asyncio.timeout(120):
            writer = await open_writer(log, "scheduler", time.time_ns)
            signs = group.create_task(give_signs(log, "c1", 1.0))
            scheduler = group.create_task(run_scheduler(log, writer, config))
            await asyncio.sleep(2.0)
            assert await of(log, CellLost) == []
            signs.cancel()
            await until(log, lambda r: isinstance(r.event, CellLost))
            await write(log, joined("c1", 1))
            signs = group.create_task(give_signs(log, "c1", 1.0))
            await asyncio.sleep(2.0)
            await write(log, RunFinished(reason="completed"))
            await scheduler
            signs.cancel()
        noticed = await of(log, SilenceNoticed)
        assert [r.event.cell for r in await of(log, CellLost)] == ["c1"]
        assert {r.event.cell for r in noticed} == {"c1"}, "the core gave no sign either"
        assert len(await of(log, CellJoined)) == 3

    asyncio.run(play())


async def of(log: Log, kind: type[Event]) -> list[Recorded]:
    return [r async for r in log.read(1, until=await log.last_seq()) if isinstance(r.event, kind)]


async def until(log: Log, is_there: Callable[[Recorded], bool]) -> None:
    async for recorded in log.read(1):
        if is_there(recorded):
            return
