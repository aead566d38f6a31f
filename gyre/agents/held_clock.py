"""Shell. The clock of an execution: it stands still while no engine can answer, as in a role switch or an outage.

Invariant: what is bounded by it has as many seconds in which an engine could answer as the bound says, or more by at
most `STEP_S`. Direction: seconds held so far -> seconds of the execution.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

STEP_S = 0.02
"""While it stands still just before a bound it is looked at no more often."""


class HeldClock:
    """Begins at 0 when it is made. `held`: seconds since some start in which no engine could answer."""

    def __init__(self, held: Callable[[], float]) -> None:
        self._held, self._loop = held, asyncio.get_running_loop()
        self._begun = self._loop.time() - held()

    def __call__(self) -> float:
        return self._loop.time() - self._begun - self._held()

    async def reach(self, seconds: float) -> None:
        while (rest := seconds - self()) > 0:  # noqa: ASYNC110 - time is what it waits for
            await asyncio.sleep(max(rest, STEP_S))

    @asynccontextmanager
    async def limit(self, seconds: float) -> AsyncIterator[asyncio.Timeout]:
        """The block has until this clock says `seconds`, as with asyncio.timeout; 0: without a limit."""
        async with asyncio.timeout(None) as bound:
            ending = asyncio.create_task(self._end(bound, seconds)) if seconds else None
            try:
                yield bound
            finally:
                if ending is not None:
                    ending.cancel()

    async def _end(self, bound: asyncio.Timeout, seconds: float) -> None:
        await self.reach(seconds)
        bound.reschedule(self._loop.time())
