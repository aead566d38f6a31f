"""Shell. Calls of all sessions: admitted to a cell, recorded, generated, recorded again.

Request -> place at a cell in rollout -> `call.started` -> engine, as often as it takes -> `call.completed`
(or `call.cut`, `call.failed`) -> Answer. Invariants: the engine is asked only when the log has
`call.started`; an Answer exists only when the log has `call.completed`; a fence is answered only when no
call stands at its cell. Sessions, routes and fences come from the log alone, so a restart loses nothing.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import msgspec

from gyre.agents import routes, session
from gyre.agents.dialect import Answer, ProviderError, Request
from gyre.agents.engine_client import Engine, Generation
from gyre.agents.generations import check_generation, join_generations
from gyre.agents.renderer import Renderer
from gyre.agents.session import Session, Started
from gyre.config import Config
from gyre.errors import EngineError
from gyre.events.codec import Recorded
from gyre.events.log import Log, Writer
from gyre.events.types import (
    CallCompleted,
    CallCut,
    CallFailed,
    CallStarted,
    Event,
    ExecutionDropped,
    ExecutionFinished,
    RunFinished,
    RunResumed,
    SessionOpened,
    SessionsRerouted,
)

MAX_OPEN_CALLS = 64
"""Of one session: a command in its sandbox can reach the gateway too."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 2.0
ABORT_TIMEOUT_S = 5.0

CallEvent = CallStarted | CallCompleted | CallCut | CallFailed

_logger = logging.getLogger(__name__)


class Client(Protocol):
    """Whoever waits for an answer."""

    @property
    def gone(self) -> bool: ...


class _Seat:
    """A call's stand at a cell: what keeps a fence from being answered."""

    def __init__(self, session: str) -> None:
        self.session = session
        self.cell = ""
        self.rid = ""
        self.engine: Engine | None = None


class _NoReply(Exception):
    """A started call that ends without a reply; `partial` is what was sampled until then."""

    def __init__(self, error: ProviderError, partial: Generation | None) -> None:
        super().__init__(str(error))
        self.error = error
        self.partial = partial


class Calls:
    """Runs within the TaskGroup that it is given: an error in the log or a bug ends the gateway."""

    def __init__(
        self,
        log: Log,
        writer: Writer,
        config: Config,
        *,
        engine_for: Callable[[str], Engine],
        renderer: Renderer,
        clock_s: Callable[[], float],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self.tasks = tasks
        self.sessions: dict[str, Session] = {}
        self.folded = 0
        self.run_finished = False
        self._log = log
        self._writer = writer
        self._config = config
        self._renderer = renderer
        self._clock_s = clock_s
        self._engine_for = engine_for
        self._engines: dict[str, Engine] = {}
        self._routes: routes.Routes = {}
        self._sessions_of: dict[str, list[str]] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._changed = asyncio.Condition()
        self._seats: set[_Seat] = set()
        self._num_seats: Counter[str] = Counter()
        self._num_moved: Counter[str] = Counter()
        self._num_unfinished = 0
        self._ending = False

    # ---------------------------------------------------------------- the log

    async def follow(self) -> None:
        """Consumes the log from its first event; produces the state that the waits below wait for. Endless."""
        async for recorded in self._log.read(1):
            self._fold(recorded)
            await self._notify()

    async def catch_up(self) -> None:
        """Returns when all that is on the log now has been read."""
        last = await self._log.last_seq()
        await self.wait_for(lambda: self.folded >= last)

    async def close_orphans(self) -> None:
        """End the calls that a gateway before this one left open. To be called once, before any other call."""
        for state in list(self.sessions.values()):
            for event in session.decide_orphans(state):
                await self._record(event)

    async def answer_fences(self) -> None:
        """Waits for a fence with no call at its cell any more; produces `cell.sessions_rerouted`. Endless."""
        while True:
            await self.wait_for(lambda: self._owed() is not None)
            route = self._owed()
            if route is None or route.fence is None:
                continue
            answer = SessionsRerouted(
                cell=route.cell,
                epoch=route.fence,
                num_sessions=sum(s.cell == route.cell and not s.finished for s in self.sessions.values()),
                num_calls_moved=self._num_moved.pop(route.cell, 0),
            )
            seq = await self._writer.append(answer, cause=route.fence_seq)
            self._routes = routes.evolve(self._routes, answer, seq)

    def _owed(self) -> routes.Route | None:
        free = (r for r in self._routes.values() if r.fence is not None and not self._num_seats[r.cell])
        return next(free, None)

    def _fold(self, recorded: Recorded) -> None:
        event, envelope = recorded.event, recorded.envelope
        self.folded = recorded.seq
        match event:
            case SessionOpened():
                self.sessions[event.session] = session.open_session(event)
                self._sessions_of.setdefault(event.execution, []).append(event.session)
            case ExecutionFinished() | ExecutionDropped():
                self._finish(event)
            case CallStarted() | CallCompleted() | CallCut() | CallFailed():
                # Its own were folded when they were acknowledged.
                if (envelope.writer, envelope.incarnation) != (self._writer.name, self._writer.incarnation):
                    self._evolve(event)
            case RunFinished() | RunResumed():
                self.run_finished = isinstance(event, RunFinished)
            case _:
                self._routes = routes.evolve(self._routes, event, recorded.seq)

    def _finish(self, event: ExecutionFinished | ExecutionDropped) -> None:
        for name in self._sessions_of.pop(event.execution, ()):
            self.sessions[name] = session.evolve(self.sessions[name], event)
            self._locks.pop(name, None)
        for seat in self._seats:
            if seat.engine and self.sessions[seat.session].finished:
                self.tasks.create_task(self._abort(seat.engine, seat.rid))

    def _evolve(self, event: CallEvent) -> None:
        if event.session in self.sessions:
            self.sessions[event.session] = session.evolve(self.sessions[event.session], event)

    async def _record(self, event: CallEvent) -> None:
        """Append, and fold at the acknowledgement: the next request may come before it has been read back."""
        await self._writer.append(event)
        self._evolve(event)

    def append_later(self, event: Event) -> None:
        """For what nobody waits for; `end` does."""
        self._num_unfinished += 1
        self.tasks.create_task(self._append(event))

    async def _append(self, event: Event) -> None:
        try:
            await self._writer.append(event)
        finally:
            self._num_unfinished -= 1
            await self._notify()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def end(self, grace_s: float) -> None:
        """Refuse what waits for a cell, and let what is in flight finish, for at most `grace_s`."""
        self._ending = True
        await self._notify()
        try:
            async with asyncio.timeout(grace_s):
                await self.wait_for(lambda: self._num_unfinished == 0)
        except TimeoutError:
            _logger.warning("gateway: %d calls were still open after %g s", self._num_unfinished, grace_s)

    # ---------------------------------------------------------------- calls

    async def check_session(self, name: str) -> None:
        """Raises ProviderError unless requests of this session are taken."""
        if name not in self.sessions:
            await self.catch_up()
        state = self.sessions.get(name)
        if state is None:
            raise ProviderError(401, "invalid_session", f"no session {name!r:.80}: use the base URL .../s/<session>/v1")
        self._refuse_finished(name)
        if state.num_open_calls >= MAX_OPEN_CALLS:
            raise ProviderError(
                429, "too_many_calls", f"session {name}: {MAX_OPEN_CALLS} calls are open", retry_after_s=1
            )

    def start(self, name: str, request: Request, client: Client) -> "asyncio.Task[Answer | ProviderError]":
        """A task of its own: a client that leaves does not end it. It raises only what ends the gateway."""
        self._num_unfinished += 1
        return self.tasks.create_task(self._run(name, request, client))

    async def _run(self, name: str, request: Request, client: Client) -> Answer | ProviderError:
        seat = _Seat(name)
        try:
            await self._admit(seat, started=False)
            if client.gone:
                return ProviderError(499, "client_gone", "the client left before its call was started")
            started = await self._start(seat, request)
            try:
                generation, num_retries = await self._generate(seat, started)
            except _NoReply as no_reply:
                status, reason = no_reply.error.status, str(no_reply.error)
                await self._record(session.decide_no_reply(started, no_reply.partial, status=status, reason=reason))
                return no_reply.error
            completed = session.decide_completed(
                started,
                request.model,
                generation,
                self._renderer,
                created=int(self._clock_s()),
                num_retries=num_retries,
            )
            await self._record(completed.event)
            return completed.answer
        except ProviderError as error:
            return error
        finally:
            self._leave(seat)
            self._num_unfinished -= 1
            await self._notify()

    async def _start(self, seat: _Seat, request: Request) -> Started:
        # One at a time within a session: the log must have a call's base before it has the call.
        async with self._locks.setdefault(seat.session, asyncio.Lock()):
            self._refuse_finished(seat.session)
            state = self.sessions[seat.session]
            started = session.decide_start(state, request, self._renderer, cell=seat.cell, config=self._config)
            await self._record(started.call)
            for event in started.events[1:]:
                await self._writer.append(event)
            return started

    async def _generate(self, seat: _Seat, started: Started) -> tuple[Generation, int]:
        """(generation, retries). What an attempt sampled before it was cut is kept, and the next goes on from it."""
        max_tokens, num_retries = started.call.max_tokens, 0
        so_far: Generation | None = None
        failing_s, pause_s = 0.0, FIRST_PAUSE_S
        clock_s = asyncio.get_running_loop().time
        while True:
            try:
                self._refuse_finished(seat.session)
                if num_retries:
                    await self._admit(seat, started=True)
            except ProviderError as error:
                raise _NoReply(error, so_far) from None
            begun_s = clock_s()
            try:
                new = await self._attempt(seat, started, so_far.output_ids if so_far else (), num_retries)
                so_far = join_generations(so_far, new)
                if new.finish != "abort":
                    return so_far, num_retries
                if len(so_far.output_ids) >= max_tokens:
                    return msgspec.structs.replace(so_far, finish="length"), num_retries
                reason = f"the engine of {seat.cell} aborted the call"
                if new.output_ids:
                    failing_s, pause_s = 0.0, FIRST_PAUSE_S
            except (EngineError, TimeoutError) as error:
                reason = str(error) or f"the engine of {seat.cell} gave no answer"
            failing_s += clock_s() - begun_s + pause_s
            if failing_s > self._config.engine.call_timeout_s:
                raise _NoReply(ProviderError(503, "engine_failed", reason, retry_after_s=1), so_far)
            _logger.warning("gateway: %s: %s; asking again", started.call.call, reason)
            num_retries += 1
            self._num_moved[seat.cell] += self._routes[seat.cell].fence is not None
            self._leave(seat)
            await self._notify()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _attempt(self, seat: _Seat, started: Started, have: tuple[int, ...], num_retries: int) -> Generation:
        """Raises EngineError, TimeoutError."""
        call, route = started.call, self._routes[seat.cell]
        if route.engine_url not in self._engines:
            self._engines[route.engine_url] = self._engine_for(route.engine_url)
        seat.rid = f"{call.call}-{num_retries}" if num_retries else call.call
        seat.engine = self._engines[route.engine_url]
        async with asyncio.timeout(self._config.engine.call_timeout_s):
            generation = await seat.engine.generate(
                seat.rid,
                [*started.input_ids, *have],
                temperature=call.temperature,
                top_p=call.top_p,
                max_tokens=call.max_tokens - len(have),
                stop_token_ids=(self._renderer.end_of_turn_id,),
                extra_key=str(route.version),
                stop=started.stop,
            )
        return check_generation(generation, call.max_tokens - len(have))

    async def _admit(self, seat: _Seat, *, started: bool) -> None:
        """Waits for a cell in rollout and takes a seat there; unblocked too when the execution finishes.

        Raises ProviderError when it has finished, or, for a call that has not started, when the gateway ends.
        """

        def found() -> bool:
            finished = self.sessions[seat.session].finished
            return finished or (self._ending and not started) or self._choose(seat) is not None

        await self.wait_for(found)
        self._refuse_finished(seat.session)
        if self._ending and not started:
            raise ProviderError(503, "gateway_ending", "the gateway is ending: ask again", retry_after_s=1)
        route = self._choose(seat)
        assert route is not None
        seat.cell = route.cell
        self._seats.add(seat)
        self._num_seats[seat.cell] += 1

    def _choose(self, seat: _Seat) -> routes.Route | None:
        return routes.choose(self._routes, self._num_seats, seat.cell or self.sessions[seat.session].cell)

    def _leave(self, seat: _Seat) -> None:
        """The caller notifies."""
        if seat in self._seats:
            self._seats.remove(seat)
            self._num_seats[seat.cell] -= 1
            seat.engine = None

    async def _abort(self, engine: Engine, rid: str) -> None:
        """Best effort: the call ends by itself a little later, too."""
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await engine.abort(rid)

    def _refuse_finished(self, name: str) -> None:
        if self.sessions[name].finished:
            raise ProviderError(410, "session_finished", f"session {name} is over: its execution finished")
