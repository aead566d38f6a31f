"""Shell. The scheduler process: folds the log, and writes what `decide` calls for.

Invariants: a decision is recorded before its command, and commanded once; nothing is decided before what this
process wrote last was read back; a scheduler that sees a newer term leads no more, and stands for the next.

Consumes: the log, and signs of life of cells. Produces: `scheduler.term_started`, `ticked`, `decided`, `move_refused`,
`silence_noticed`, `cell.switch_requested`, and `cell.lost` of a satellite that is silent.
Waits for: its election, then the next event. Is unblocked by: `run.finished`, a newer term, a lost key, a cancel.

A restart folds the whole log first, so a decision that has no command yet gets it now, under the new term.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable

from gyre.config import Config
from gyre.errors import ConflictError
from gyre.events.codec import Recorded
from gyre.events.follow import catch_up, is_run_finished
from gyre.events.log import Log, Writer
from gyre.events.subjects import ALL_BUT_CALLS
from gyre.events.types import RunFinished, SilenceNoticed, SwitchRequested, TermStarted, Ticked
from gyre.workers.election import Election
from gyre.workers.scheduler import SchedulerState, decide, evolve, is_dwelling, lost
from gyre.workers.signs_of_life import BEATS, Listener

SPARSE_TICK_S = 5.0
"""Without a dwell no policy asks for a clock: ticks only say that somebody watches."""


async def run_scheduler(
    log: Log,
    writer: Writer,
    config: Config,
    *,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Runs until the run is finished."""
    while not await _lead_once(log, writer, config, clock, sleep):
        pass


async def _lead_once(
    log: Log,
    writer: Writer,
    config: Config,
    clock: Callable[[], float],
    sleep: Callable[[float], Awaitable[None]],
) -> bool:
    """One election, and one term if it is won: True when the run is over, False when another scheduler took over."""
    loop = _Loop(log, writer, config)
    election = Election(log, f"{writer.name}/{writer.incarnation}", config.scheduler.lease_s)
    if not await _elected(log, election):
        return True
    try:
        if not await loop.take_over(election.revision):
            return True
        async with asyncio.TaskGroup() as group:
            others = [group.create_task(loop.tick(clock, sleep)), group.create_task(election.hold())]
            await loop.follow()
            for task in others:
                task.cancel()
        return True
    except* ConflictError as deposed:
        print(f"{writer.name}: stands by: {deposed.exceptions[0]}", file=sys.stderr, flush=True)
    finally:
        await election.resign()
    return False


async def _elected(log: Log, election: Election) -> bool:
    """False when the run is over before this process leads."""
    winning = asyncio.ensure_future(election.win())
    over = asyncio.ensure_future(_until_over(log))
    try:
        await asyncio.wait((winning, over), return_when=asyncio.FIRST_COMPLETED)
        if not winning.done():
            over.result()
            return False
        winning.result()
        return True
    finally:
        for task in (winning, over):
            task.cancel()
        await asyncio.gather(winning, over, return_exceptions=True)


async def _until_over(log: Log) -> None:
    last, is_finished = await log.last_seq(), False
    async for recorded in log.read(1):
        is_finished = is_run_finished(is_finished, recorded.event)
        if is_finished and recorded.seq >= last:
            return


class _Loop:
    def __init__(self, log: Log, writer: Writer, config: Config) -> None:
        self.log, self.writer, self.config = log, writer, config
        self.state = SchedulerState()
        self.term = 0
        self.appended_seq = 0
        self.subject_seq = 0
        """Last event on the scheduler's subject: what a term is compared and set against."""
        self.told_seq = 0
        """Last event that was not a tick."""

    async def take_over(self, revision: int) -> bool:
        """Fold the log to its end and start a term above all others; False when the run is over.

        The term is the revision under which this process was elected, unless the log knows a higher one.
        """
        while True:
            if await catch_up(self.log, self._fold, after=self.state.seq):
                return False
            term = max(self.state.cluster.term + 1, revision)
            try:
                self.appended_seq = await self.writer.append(TermStarted(term=term), expect_last=self.subject_seq)
            except ConflictError:
                continue  # another scheduler was faster: read what it did
            self.term = term
            return True

    async def follow(self) -> None:
        async for recorded in self.log.read(self.state.seq + 1, only=ALL_BUT_CALLS):
            self._fold(recorded)
            if isinstance(recorded.event, RunFinished):
                return
            if self.state.cluster.term > self.term:
                raise ConflictError(
                    f"scheduler: term {self.state.cluster.term} was started at sequence {recorded.seq}, this process "
                    f"has term {self.term}"
                )
            if self.state.seq >= self.appended_seq:
                await self._act()

    async def _act(self) -> None:
        """Write the one thing that the folded prefix calls for, if any."""
        open_ = self.state.cluster.decision
        if (gone := lost(self.state, self.config)) is not None:
            self.appended_seq = await self.writer.append(gone, cause=self.state.seq)
        elif open_ is None:
            for decided in decide(self.state, self.config):
                self.appended_seq = await self.writer.append(decided, cause=self.state.seq)
        elif not open_.commanded_seq:
            decided = open_.decided
            command = SwitchRequested(cell=decided.cell, role=decided.role, epoch=decided.epoch, term=self.term)
            self.appended_seq = await self.writer.append(command, cause=open_.seq)

    async def tick(self, clock: Callable[[], float], sleep: Callable[[float], Awaitable[None]]) -> None:
        """Sparsely, and not while nothing happens; often while a cell must stay where it is for some time."""
        ticked_seq, options, lease_s = 0, self.config.scheduler, self.config.cells.lease_s
        listener = Listener(self.log, lease_s)
        pause_s = options.tick_s if options.dwell_s else max(options.tick_s, SPARSE_TICK_S)
        while True:
            await sleep(min(pause_s, lease_s / BEATS))
            there = [cell.cell for cell in self.state.cluster.cells if cell.index and cell.state != "LOST"]
            for cell, seconds in (await listener.silences(there, clock())).items():
                await self.writer.append(SilenceNoticed(term=self.term, cell=cell, seconds=seconds))
            if self.told_seq > ticked_seq or is_dwelling(self.state, self.config):
                ticked_seq = await self.writer.append(Ticked(term=self.term, now_s=clock()))

    def _fold(self, recorded: Recorded) -> None:
        self.state = evolve(self.state, recorded)
        if ".scheduler." in recorded.subject:
            self.subject_seq = recorded.seq
        if not isinstance(recorded.event, Ticked):
            self.told_seq = recorded.seq
