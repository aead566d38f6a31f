"""Shell. Calls of all sessions: admitted to a cell, recorded, generated, recorded again.

Request -> place at a cell in rollout -> `call.started` -> engine, as often as it takes -> `call.completed`
(or `call.cut`, `call.failed`) -> Answer. Invariants: the engine is asked only when the log has
`call.started`; an Answer exists only when the log has `call.completed`; a fence is answered only when no
call stands at its cell. Waits, without an error, while no cell is in rollout.
"""

import asyncio
import contextlib
import logging
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np

from gyre.agents import session
from gyre.agents.dialect import Answer, ContextOverflow, ProviderError, Request
from gyre.agents.engine_client import Engine, Generation
from gyre.agents.follower import Follower
from gyre.agents.generations import check_generation, join_generations
from gyre.agents.redaction import Redactor
from gyre.agents.renderer import Renderer
from gyre.agents.seats import ABORT_TIMEOUT_S, Seat, Seats, abort
from gyre.agents.session import Started
from gyre.config import Config
from gyre.errors import EngineError
from gyre.events.types import CallDelivered, SessionOpened

MAX_OPEN_CALLS = 64
"""Of one session, those that wait included: a command in its sandbox can reach the gateway too."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 2.0
REFUSALS = (400, 413, 422)
"""Statuses of an engine that would say the same again."""
_TOO_LONG = re.compile(r"longer than the model's context length \((\d+) tokens\)")
"""How SGLang says so."""

_logger = logging.getLogger(__name__)


class Client(Protocol):
    """Whoever waits for an answer."""

    @property
    def gone(self) -> bool: ...


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
        self._engine_for = engine_for
        self._engines: dict[str, Engine] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._opening = asyncio.Lock()
        self.seats = Seats(known)
        self._num_calls: Counter[str] = Counter()
        self._replied_s: dict[str, dict[str, float]] = {}
        """Session -> call -> when its reply, which asks for tools, was complete."""
        self._num_unfinished = 0
        self._ending = False
        known.on_finished = self._on_finished

    async def close_orphans(self) -> None:
        """End the calls that a gateway before this one left open. To be called once, before any other call."""
        for state in list(self._known.sessions.values()):
            for event in session.decide_orphans(state):
                await self._known.record(event)

    async def end(self, grace_s: float) -> None:
        """Refuse what waits for a cell, and let what is in flight finish, for at most `grace_s`."""
        self._ending = True
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
        self._refuse_finished(name)
        if self._left_s(name) <= 0:
            limit_s = self._config.gateway.session_deadline_s
            raise ProviderError(410, "session_deadline", f"session {name} was opened more than {limit_s:g} s ago")
        if self._num_calls[name] >= MAX_OPEN_CALLS:
            raise ProviderError(
                429, "too_many_calls", f"session {name}: {MAX_OPEN_CALLS} calls are open", retry_after_s=1
            )

    def _left_s(self, name: str) -> float:
        """Until the deadline of the session."""
        limit_s = self._config.gateway.session_deadline_s
        return self._known.opened_s[name] + limit_s - self._clock_s() if limit_s else math.inf

    def count_tokens(self, name: str, request: Request) -> int:
        """Of the prompt that this request would make now. Raises ProviderError."""
        return session.count_prompt(self._known.sessions[name], self._redactor.request(request), self._renderer)

    def start(self, name: str, request: Request, client: Client) -> "asyncio.Task[Answer | ProviderError]":
        """A task of its own: a client that leaves does not end it. It raises only what ends the gateway."""
        self._num_unfinished += 1
        self._num_calls[name] += 1
        return self._tasks.create_task(self._run(name, self._redactor.request(request), client))

    async def _run(self, name: str, request: Request, client: Client) -> Answer | ProviderError:
        seat = Seat(name)
        deadline_s = min(self._config.gateway.call_deadline_s or math.inf, self._left_s(name))
        loop = asyncio.get_running_loop()
        timer = loop.call_later(deadline_s, self._end_late, seat) if deadline_s < math.inf else None
        try:
            await self._admit(seat, started=False)
            if client.gone:
                return ProviderError(499, "client_gone", "the client left before its call was started")
            started = await self._start(seat, request)
            try:
                generation, num_retries = await self._generate(seat, started)
            except _NoReply as no_reply:
                status, reason = no_reply.error.status, str(no_reply.error)
                await self._known.record(
                    session.decide_no_reply(started, no_reply.partial, status=status, reason=reason)
                )
                return no_reply.error
            completed = session.decide_completed(
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
                self._replied_s.setdefault(name, {})[started.call.call] = loop.time()
            return completed.answer
        except ProviderError as error:
            return error
        finally:
            if timer is not None:
                timer.cancel()
            self.seats.leave(seat)
            self._num_unfinished -= 1
            self._num_calls[name] -= 1
            if not self._num_calls[name]:
                del self._num_calls[name]
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
        # One at a time within a session: the log must have a call's base before it has the call.
        async with self._locks.setdefault(seat.session, asyncio.Lock()):
            self._refuse_finished(seat.session)
            state = self._known.sessions[seat.session]
            try:
                started = session.decide_start(
                    state,
                    request,
                    self._renderer,
                    cell=seat.cell,
                    config=self._config,
                    redactor=self._redactor,
                    since=lambda call: self._since(seat.session, call),
                )
            except session.OverBudget as over:
                if state.spent is None:
                    await self._known.record(over.event)
                raise
            await self._known.record(*started.events)
            return started

    def _since(self, name: str, call: str) -> float:
        now = asyncio.get_running_loop().time()
        return now - self._replied_s.get(name, {}).pop(call, now)

    async def _generate(self, seat: Seat, started: Started) -> tuple[Generation, int]:
        """(generation, retries). What an attempt sampled before it was cut is kept, and the next goes on from it."""
        max_tokens, num_retries = started.call.max_tokens, 0
        so_far: Generation | None = None
        failing_s, pause_s = 0.0, FIRST_PAUSE_S
        clock_s = asyncio.get_running_loop().time
        while True:
            try:
                self._refuse_finished(seat.session)
                self._refuse_late(seat)
                if num_retries:
                    await self._admit(seat, started=True)
            except ProviderError as error:
                raise _NoReply(error, so_far) from None
            begun_s, status, after_s = clock_s(), 503, 0
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
                refused = self._refusal(error, started)
                if refused is not None:
                    raise _NoReply(refused, so_far) from None
                reason = str(error) or f"the engine of {seat.cell} gave no answer"
                if isinstance(error, EngineError):
                    status, after_s = error.status or 503, error.retry_after_s
            is_moved = self.seats.is_fenced(seat)
            if is_moved:  # no fault of its engine
                failing_s, pause_s = 0.0, FIRST_PAUSE_S
            else:
                pause_s = max(pause_s, after_s)
                failing_s += clock_s() - begun_s + pause_s
            if failing_s > self._config.engine.call_timeout_s:
                raise _NoReply(ProviderError(status, "engine_failed", reason, retry_after_s=after_s or 1), so_far)
            num_retries += 1
            self.seats.leave(seat, moved=is_moved)
            self._known.notify()
            if not is_moved:
                _logger.warning("gateway: %s: %s; asking again", started.call.call, reason)
                await self._pause(seat, pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _pause(self, seat: Seat, pause_s: float) -> None:
        """Shorter when the call is to end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._known.wait_for(lambda: seat.late or self._known.sessions[seat.session].finished)

    def _refusal(self, error: EngineError | TimeoutError, started: Started) -> ProviderError | None:
        """What to tell of an error that would come again; None for all others."""
        if not isinstance(error, EngineError) or error.status not in REFUSALS:
            return None
        if match := _TOO_LONG.search(str(error)):
            return ContextOverflow(len(started.input_ids), int(match[1]))
        return ProviderError(error.status, "engine_refused", str(error))

    async def _attempt(self, seat: Seat, started: Started, have: tuple[int, ...], num_retries: int) -> Generation:
        """Raises EngineError, TimeoutError."""
        call, route = started.call, self._known.routes[seat.cell]
        if route.engine_url not in self._engines:
            self._engines[route.engine_url] = self._engine_for(route.engine_url)
        seat.rid = f"{call.call}-{num_retries}" if num_retries else call.call
        seat.engine = self._engines[route.engine_url]
        sampled = np.asarray(have, dtype=np.int32)
        try:
            async with asyncio.timeout(self._config.engine.call_timeout_s) as seat.timeout:
                generation = await seat.engine.generate(
                    seat.rid,
                    np.concatenate([started.input_ids, sampled]) if have else started.input_ids,
                    temperature=call.temperature,
                    top_p=call.top_p,
                    max_tokens=call.max_tokens - len(have),
                    stop_token_ids=(self._renderer.end_of_turn_id,),
                    extra_key=str(route.version),
                    stop=started.stop,
                )
        finally:
            seat.timeout = None
        return check_generation(generation, call.max_tokens - len(have))

    async def _admit(self, seat: Seat, *, started: bool) -> None:
        """Waits for a cell in rollout and takes a seat there; unblocked too when the execution finishes.

        Raises ProviderError when it has finished, or, for a call that has not started, when the gateway ends.
        """

        def found() -> bool:
            finished = self._known.sessions[seat.session].finished
            ending = self._ending and not started
            return finished or seat.late or ending or self.seats.choose(seat) is not None

        await self._known.wait_for(found)
        self._refuse_finished(seat.session)
        self._refuse_late(seat)
        if self._ending and not started:
            raise ProviderError(503, "gateway_ending", "the gateway is ending: ask again", retry_after_s=1)
        route = self.seats.choose(seat)
        assert route is not None
        self.seats.take(seat, route)

    def _on_finished(self, name: str) -> None:
        self._locks.pop(name, None)
        self._replied_s.pop(name, None)
        for seat in self.seats.of(name):
            self._tasks.create_task(abort(seat))

    def _end_late(self, seat: Seat) -> None:
        """Its deadline has come: what it waits for ends."""
        seat.late = True
        self._tasks.create_task(abort(seat))
        seat.leave_engine(ABORT_TIMEOUT_S)  # one that does not take the abort
        self._known.notify()

    def _refuse_late(self, seat: Seat) -> None:
        if seat.late:
            raise ProviderError(504, "deadline", f"session {seat.session}: the deadline of this call has passed")

    def _refuse_finished(self, name: str) -> None:
        if self._known.sessions[name].finished:
            raise ProviderError(410, "session_finished", f"session {name} is over: its execution finished")
