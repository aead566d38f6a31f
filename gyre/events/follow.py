"""Pure. Keeps folds in step with a log: events in stream order -> `evolve` of each fold -> waiters.

Invariant: when `caught_up(n)` returns, every fold has seen events 1..n, each once and in order; with `only`, those of
them that it wants.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from gyre.events.codec import Recorded
from gyre.events.log import Log, Stored
from gyre.events.memory import check_place, recorded_from
from gyre.events.order import Gap, WriterOrder
from gyre.events.types import Aggregate, Event, RunFinished, RunResumed

Evolve = Callable[[Recorded], object]
QUIET_S = 3.0
"""A finished run that has been quiet for so long is over: its processes have said all that they had to say."""


def is_run_finished(before: bool, event: Event) -> bool:
    """Whether the run is over after this event: an end holds until the run is resumed."""
    return isinstance(event, RunFinished) or (before and not isinstance(event, RunResumed))


async def catch_up(log: Log, *folds: Evolve, after: int = 0) -> bool:
    """Fold what is there, and no more; whether the run is over by then. `after`: as of a `Follower`."""
    is_finished = False
    async for recorded in log.read(after + 1, until=await log.last_seq()):
        for evolve in folds:
            evolve(recorded)
        is_finished = is_run_finished(is_finished, recorded.event)
    return is_finished


class Waits:
    """Who waits for what. Only those are woken whose condition holds: of an `asyncio.Condition` all wake up at each
    change, and nearly all go to sleep again."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """It holds when this returns."""
        while not condition():
            waiting = condition, asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            try:
                await waiting[1]
            finally:
                self._waiting.remove(waiting)

    def notify(self) -> None:
        """To be called by whoever changes what a condition reads."""
        for condition, woken in self._waiting:
            if not woken.done() and condition():
                woken.set_result(None)


class Follower:
    """Start `run` as a task of its own; everybody else waits on `caught_up` or `changed`."""

    def __init__(self, log: Log, *folds: Evolve, after: int = 0, only: Sequence[Aggregate] = ()) -> None:
        """`after`: the last sequence that the folds have seen already. `only`: of what is appended from now on."""
        self._log = log
        self._only = only
        self._has_past = not only
        """What was there when `run` began is folded."""
        self._folds = folds
        self._waits = Waits()
        self.seq = after
        """The last sequence that the folds have seen."""
        self._order = WriterOrder(from_start=after == 0, partial=bool(only))

    async def run(self) -> None:
        """Consumes the log for ever; produces folded state. Ends only when it is cancelled or a fold raises."""
        async for stored in self._stored():
            recorded = recorded_from(self._log.run, stored.seq, stored.subject, stored.body)
            # A repeat is not folded, but it may be the log's end that somebody waits for.
            if self._order.place(recorded.envelope, recorded.seq) != "repeat":
                check_place(self._log.run, recorded)
                for evolve in self._folds:
                    evolve(recorded)
            self.seq = stored.seq
            self._waits.notify()

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """What the log does not hold of what writers numbered; with `only`, whose others are not seen, nothing."""
        return () if self._only else self._order.gaps()

    async def _stored(self) -> AsyncIterator[Stored]:
        if self._only:
            async for stored in self._log.stored(self.seq + 1, until=await self._log.last_seq()):
                yield stored
            self._has_past = True
            self._waits.notify()
        async for stored in self._log.stored(self.seq + 1, only=self._only):
            yield stored

    async def catch_up(self) -> None:
        """Waits until all that the log holds now is folded."""
        last = await self._log.last_seq(self._only)
        await self._waits.wait_for(lambda: self._has_past and self.seq >= last)

    async def caught_up(self, seq: int) -> None:
        """Waits until sequence `seq` is folded."""
        await self._waits.wait_for(lambda: self.seq >= seq)

    async def changed(self, after: int) -> int:
        """Waits until the folds have seen more than sequence `after`; returns how far they are."""
        await self.caught_up(after + 1)
        return self.seq
