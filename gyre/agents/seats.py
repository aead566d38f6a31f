"""Shell. The calls that stand at cells, and what a fence asks for: its cell is emptied, then it is answered.

Invariant: a fence is answered only when no call stands at its cell. Calls wait, without an error, while no cell is in
rollout. A call that stands at a fenced cell while another cell is open is cut short, and goes on at the other from what
it has sampled; without another cell it is left to finish.

Direction: routes, calls -> seats -> aborts, `cell.sessions_rerouted`.
"""

import asyncio
import contextlib
from collections import Counter

from gyre.agents import routes, session
from gyre.agents.dialect import ProviderError
from gyre.agents.engine_client import Engine
from gyre.agents.follower import Follower
from gyre.errors import EngineError
from gyre.events.types import SessionsRerouted

ABORT_TIMEOUT_S = 5.0
ABORT_AGAIN_S = 0.1


class Seat:
    """A call's stand at a cell: what keeps a fence from being answered."""

    def __init__(self, session: str) -> None:
        self.session = session
        self.cell = ""
        self.started = False
        """It is on the log."""
        self.rid = ""
        self.engine: Engine | None = None
        self.late = False
        """Its deadline has passed."""
        self.timeout: asyncio.Timeout | None = None
        """Of the attempt that runs."""

    def leave_engine(self, after_s: float) -> None:
        """End the attempt that runs, if any, whatever the engine does."""
        if self.timeout is not None and not self.timeout.expired():
            self.timeout.reschedule(asyncio.get_running_loop().time() + after_s)


class Seats:
    def __init__(self, known: Follower) -> None:
        self.closed = False
        """The gateway ends: nothing more is started. Who sets it notifies."""
        self._known = known
        self._taken: set[Seat] = set()
        self._num: Counter[str] = Counter()
        self._num_moved: Counter[str] = Counter()

    async def admit(self, seat: Seat) -> ProviderError | None:
        """Waits for a cell in rollout and takes a seat there, or returns why it will get none."""
        await self._known.wait_for(lambda: self.refusal(seat) is not None or self._choose(seat) is not None)
        if refused := self.refusal(seat):
            return refused
        route = self._choose(seat)
        assert route is not None
        seat.cell = route.cell
        self._taken.add(seat)
        self._num[seat.cell] += 1
        return None

    def refusal(self, seat: Seat) -> ProviderError | None:
        """Why a call is not to be waited for any more; None while it is."""
        if refused := session.refusal(self._known.sessions[seat.session]):
            return refused
        if seat.late:
            return ProviderError(504, "deadline", f"session {seat.session}: the deadline of this call has passed")
        if self.closed and not seat.started:
            return ProviderError(503, "gateway_ending", "the gateway is ending: ask again", retry_after_s=1)
        return None

    def _choose(self, seat: Seat) -> routes.Route | None:
        last = seat.cell or self._known.sessions[seat.session].cell
        return routes.choose(self._known.routes, self._num, last)

    def leave(self, seat: Seat, *, moved: bool = False) -> None:
        """The caller notifies."""
        if seat in self._taken:
            self._taken.remove(seat)
            self._num[seat.cell] -= 1
            self._num_moved[seat.cell] += moved
            seat.engine = None

    def is_fenced(self, seat: Seat) -> bool:
        """Or lost: in either case the call goes on elsewhere."""
        route = self._known.routes[seat.cell]
        return route.fence is not None or route.lost

    def of(self, session: str) -> list[Seat]:
        return [seat for seat in self._taken if seat.session == session]

    async def answer_fences(self) -> None:
        """Waits for a fence with no call at its cell any more; produces `cell.sessions_rerouted`. Endless."""
        while True:
            await self._known.wait_for(lambda: self._owed() is not None)
            route = self._owed()
            if route is None or route.fence is None:
                continue
            sessions = self._known.sessions.values()
            answer = SessionsRerouted(
                cell=route.cell,
                epoch=route.fence,
                num_sessions=sum(s.cell == route.cell and not s.finished for s in sessions),
                num_calls_moved=self._num_moved.pop(route.cell, 0),
            )
            await self._known.answer_fence(route, answer)

    async def move_calls(self) -> None:
        """Waits for calls at a fenced or lost cell while another one is open; cuts them short there. Endless."""
        while True:
            await self._known.wait_for(lambda: bool(self._stranded()))
            await asyncio.gather(*(self._end(seat) for seat in self._stranded()))
            await asyncio.sleep(ABORT_AGAIN_S)  # an engine passes over what it has not taken yet

    async def _end(self, seat: Seat) -> None:
        if self._known.routes[seat.cell].lost:  # nobody is there to be asked
            seat.leave_engine(0.0)
        else:
            await abort(seat)

    def _stranded(self) -> list[Seat]:
        if not any(route.open for route in self._known.routes.values()):
            return []
        return [seat for seat in self._taken if seat.engine and self.is_fenced(seat)]

    def _owed(self) -> routes.Route | None:
        fenced = (route for route in self._known.routes.values() if route.fence is not None)
        return next((route for route in fenced if not self._num[route.cell]), None)


async def abort(seat: Seat) -> None:
    """Best effort: the call ends by itself a little later, too."""
    if seat.engine is not None:
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await seat.engine.abort(seat.rid)
