"""Shell. Calls of all sessions: admitted to a cell, recorded, generated, recorded again.

Request -> seat at a cell in rollout -> `call.started` -> Generation -> `call.completed` (or `call.cut`, `call.failed`)
-> Answer. Invariants: the engine is asked only when the log has `call.started`; an Answer exists only when the log has
`call.completed`.
"""

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Protocol

from gyre.agents import endings, session
from gyre.agents.attempts import Attempts, NoReply
from gyre.agents.dialect import Answer, ProviderError, Request
from gyre.agents.engine_client import Engine
from gyre.agents.follower import Follower
from gyre.agents.redaction import Redactor
from gyre.agents.renderer import Renderer
from gyre.agents.seats import ABORT_TIMEOUT_S, Seat, Seats, abort
from gyre.agents.session import Started
from gyre.config import Config
from gyre.events.types import CallDelivered, SessionOpened

MAX_OPEN_CALLS = 64
"""Of one session, those that wait included: a command in its sandbox can reach the gateway too."""

_logger = logging.getLogger(__name__)


class Client(Protocol):
    """Whoever waits for an answer."""

    @property
    def gone(self) -> bool: ...


class _Held:
    """Of a session, beside its fold; until it is over."""

    def __init__(self) -> None:
        self.num_calls = 0
        """Open ones, those that wait included."""
        self.starting = asyncio.Lock()
        """One at a time: the log must have a call's base before it has the call."""
        self.replied_s: dict[str, float] = {}
        """Call -> when its reply, which asks for tools, was complete."""


class Calls:
    """Runs within the TaskGroup that it is given: an error in the log or a bug ends the gateway."""

    def __init__(
        self,
        known: Follower,
        config: Config,
        *,
        engine_for: Callable[[str], Engine],
        renderer: Renderer,
        clock_s: Callable[[], float],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._known = known
        self._config = config
        self._renderer = renderer
        self._redactor = Redactor(config.gateway.redact)
        self._clock_s = clock_s
        self._tasks = tasks
        self._opening = asyncio.Lock()
        self.seats = Seats(known)
        self._attempts = Attempts(
            known,
            self.seats,
            engine_for=engine_for,
            end_of_turn_id=renderer.end_of_turn_id,
            timeout_s=config.engine.call_timeout_s,
        )
        self._held: defaultdict[str, _Held] = defaultdict(_Held)
        self._num_unfinished = 0
        """Calls and deliveries."""
        known.on_finished = self._on_finished

    async def close_orphans(self) -> None:
        """End the calls that a gateway before this one left open. To be called once, before any other call."""
        for state in list(self._known.sessions.values()):
            for event in endings.decide_orphans(state):
                await self._known.record(event)

    async def end(self, grace_s: float) -> None:
        """Refuse what waits for a cell, and let what is in flight finish, for at most `grace_s`."""
        self.seats.closed = True
        self._known.notify()
        try:
            async with asyncio.timeout(grace_s):
                await self._known.wait_for(lambda: self._num_unfinished == 0)
        except TimeoutError:
            _logger.warning("gateway: %d calls were still open after %g s", self._num_unfinished, grace_s)

    async def open_session(self, name: str) -> None:
        """As an execution of its own, unless it is open already; it is never scored."""
        async with self._opening:
            if name not in self._known.sessions:
                sampling = self._config.sampling
                opened = SessionOpened(
                    execution=name, session=name, temperature=sampling.temperature, top_p=sampling.top_p
                )
                await self._known.writer.append(opened)
                await self._known.catch_up()

    async def check_session(self, name: str) -> None:
        """Raises ProviderError unless requests of this session are taken."""
        if name not in self._known.sessions:
            # Its opening may be on the log already, and not have been read yet.
            await self._known.catch_up()
        state = self._known.sessions.get(name)
        if state is None:
            raise ProviderError(401, "invalid_session", f"no session {name!r:.80}: use the base URL .../s/<session>/v1")
        if refused := session.refusal(state):
            raise refused
        if self._left_s(name) <= 0:
            limit_s = self._config.gateway.session_deadline_s
            raise ProviderError(410, "session_deadline", f"session {name} was opened more than {limit_s:g} s ago")
        if self._held[name].num_calls >= MAX_OPEN_CALLS:
            raise ProviderError(
                429, "too_many_calls", f"session {name}: {MAX_OPEN_CALLS} calls are open", retry_after_s=1
            )

    def _left_s(self, name: str) -> float:
        """Until the deadline of the session."""
        limit_s = self._config.gateway.session_deadline_s
        return self._known.opened_s[name] + limit_s - self._clock_s() if limit_s else math.inf

    def count_tokens(self, name: str, request: Request) -> int:
        """Of the prompt that this request would make now. Raises ProviderError."""
        prompt = session.find_prompt(self._known.sessions[name], self._redactor.request(request), self._renderer)
        return prompt.num_tokens

    def start(self, name: str, request: Request, client: Client) -> "asyncio.Task[Answer | ProviderError]":
        """A task of its own: a client that leaves does not end it. It raises only what ends the gateway."""
        self._num_unfinished += 1
        self._held[name].num_calls += 1
        return self._tasks.create_task(self._run(name, self._redactor.request(request), client))

    async def _run(self, name: str, request: Request, client: Client) -> Answer | ProviderError:
        seat = Seat(name)
        deadline_s = min(self._config.gateway.call_deadline_s or math.inf, self._left_s(name))
        loop = asyncio.get_running_loop()
        timer = loop.call_later(deadline_s, self._end_late, seat) if deadline_s < math.inf else None
        try:
            if refused := await self.seats.admit(seat):
                return refused
            if client.gone:
                return ProviderError(499, "client_gone", "the client left before its call was started")
            started = await self._start(seat, request)
            outcome = await self._attempts.generate(seat, started)
            if isinstance(outcome, NoReply):
                error = outcome.error
                ended = endings.decide_no_reply(started, outcome.partial, status=error.status, reason=str(error))
                await self._known.record(ended)
                return error
            generation, num_retries = outcome
            completed = endings.decide_completed(
                started,
                request.model,
                generation,
                self._renderer,
                created=int(self._clock_s()),
                num_retries=num_retries,
                redactor=self._redactor,
            )
            await self._known.record(completed.event)
            if completed.event.tools:
                self._held[name].replied_s[started.call.call] = loop.time()
            return completed.answer
        except ProviderError as error:
            return error
        finally:
            if timer is not None:
                timer.cancel()
            self.seats.leave(seat)
            self._num_unfinished -= 1
            self._held[name].num_calls -= 1
            self._let_go(name)
            self._known.notify()

    def deliver(self, answer: Answer, name: str, *, delivered: bool) -> None:
        """Record, without waiting for it, whether the reply's last byte went out."""
        execution = self._known.sessions[name].execution
        event = CallDelivered(execution=execution, session=name, call=answer.call, delivered=delivered)
        self._num_unfinished += 1
        self._tasks.create_task(self._append(event))

    async def _append(self, event: CallDelivered) -> None:
        try:
            await self._known.writer.append(event)
        finally:
            self._num_unfinished -= 1
            self._known.notify()

    async def _start(self, seat: Seat, request: Request) -> Started:
        held = self._held[seat.session]
        async with held.starting:
            state = self._known.sessions[seat.session]
            try:
                started = session.decide_start(
                    state,
                    request,
                    self._renderer,
                    cell=seat.cell,
                    config=self._config,
                    redactor=self._redactor,
                    since=lambda call: _since(held, call),
                )
            except session.OverBudget as over:
                if state.spent is None:
                    await self._known.record(over.event)
                raise
            await self._known.record(*started.events)
            seat.started = True
            return started

    def _on_finished(self, name: str) -> None:
        self._let_go(name)
        for seat in self.seats.of(name):
            self._tasks.create_task(abort(seat))

    def _let_go(self, name: str) -> None:
        if self._known.sessions[name].finished and not self._held[name].num_calls:
            del self._held[name]

    def _end_late(self, seat: Seat) -> None:
        """Its deadline has come: what it waits for ends."""
        seat.late = True
        self._tasks.create_task(abort(seat))
        seat.leave_engine(ABORT_TIMEOUT_S)  # one that does not take the abort
        self._known.notify()


def _since(held: _Held, call: str) -> float:
    now = asyncio.get_running_loop().time()
    return now - held.replied_s.pop(call, now)
