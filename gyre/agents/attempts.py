"""Shell. A started call, asked of engines as often as it takes.

seat, `call.started` -> engine -> Generation, or NoReply with what was sampled until then. Invariants: what an attempt
sampled before it was cut is kept, and the next goes on from it; an engine that fails is asked again, after pauses,
for no longer than `engine.call_timeout_s`, and time at a cell that leaves rollout is no failure of its engine.
"""

import asyncio
import contextlib
import functools
import logging
import re
from collections.abc import Callable

import msgspec
import numpy as np

from gyre.agents.dialect import ContextOverflow, ProviderError
from gyre.agents.engine_client import Engine, Generation
from gyre.agents.follower import Follower
from gyre.agents.generations import check_generation, join_generations
from gyre.agents.seats import Seat, Seats
from gyre.agents.session import Started
from gyre.errors import EngineError

FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 2.0
REFUSALS = (400, 413, 422)
"""Statuses of an engine that would say the same again."""
_TOO_LONG = re.compile(r"longer than the model's context length \((\d+) tokens\)")
"""How SGLang says so."""

_logger = logging.getLogger(__name__)


class NoReply(msgspec.Struct, frozen=True, kw_only=True):
    """How a started call ends without a reply; `partial` is what was sampled until then."""

    error: ProviderError
    partial: Generation | None


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """With the engine of a call, since it last did something."""

    failing_s: float = 0.0
    """Attempts and pauses."""
    pause_s: float = 0.0
    """The last pause."""

    def fail(self, attempt_s: float, after_s: float) -> "Patience":
        """Each pause is twice as long as the one before, or as long as the engine asks for."""
        pause_s = max(min(2 * self.pause_s, MAX_PAUSE_S) or FIRST_PAUSE_S, after_s)
        return Patience(failing_s=self.failing_s + (attempt_s + pause_s), pause_s=pause_s)


class Attempts:
    def __init__(
        self,
        known: Follower,
        seats: Seats,
        *,
        engine_for: Callable[[str], Engine],
        end_of_turn_id: int,
        timeout_s: float,
    ) -> None:
        self._known = known
        self._seats = seats
        self._engine_for = functools.cache(engine_for)
        self._end_of_turn_id = end_of_turn_id
        self._timeout_s = timeout_s

    async def generate(self, seat: Seat, started: Started) -> tuple[Generation, int] | NoReply:
        """(generation, retries) of a call that has a seat."""
        so_far: Generation | None = None
        num_retries, patience = 0, Patience()
        clock_s = asyncio.get_running_loop().time
        while True:
            refused = await self._seats.admit(seat) if num_retries else self._seats.refusal(seat)
            if refused:
                return NoReply(error=refused, partial=so_far)
            begun_s = clock_s()
            try:
                new = await self._ask(seat, started, so_far, num_retries)
            except EngineError as error:
                if refused := _refusal(error, started):
                    return NoReply(error=refused, partial=so_far)
                failure = error
            else:
                so_far = join_generations(so_far, new)
                if new.finish != "abort":
                    return so_far, num_retries
                if len(so_far.output_ids) >= started.call.max_tokens:
                    return msgspec.structs.replace(so_far, finish="length"), num_retries
                failure = EngineError(f"the engine of {seat.cell} aborted the call")
                if new.output_ids:
                    patience = Patience()
            moved = self._seats.is_fenced(seat)  # no fault of its engine
            patience = Patience() if moved else patience.fail(clock_s() - begun_s, failure.retry_after_s)
            if patience.failing_s > self._timeout_s:
                after_s = failure.retry_after_s or 1
                told = ProviderError(failure.status or 503, "engine_failed", str(failure), retry_after_s=after_s)
                return NoReply(error=told, partial=so_far)
            num_retries += 1
            self._seats.leave(seat, moved=moved)
            self._known.notify()
            if not moved:
                _logger.warning("gateway: %s: %s; asking again", started.call.call, failure)
                await self._pause(seat, patience.pause_s)

    async def _pause(self, seat: Seat, pause_s: float) -> None:
        """Shorter when the call is to end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._known.wait_for(lambda: self._seats.refusal(seat) is not None)

    async def _ask(self, seat: Seat, started: Started, so_far: Generation | None, num_retries: int) -> Generation:
        """What comes after `so_far`. Raises EngineError."""
        call, route = started.call, self._known.routes[seat.cell]
        have = so_far.output_ids if so_far else ()
        max_tokens = call.max_tokens - len(have)
        seat.rid = f"{call.call}-{num_retries}" if num_retries else call.call
        seat.engine = self._engine_for(route.engine_url)
        sampled = np.asarray(have, dtype=np.int32)
        try:
            async with asyncio.timeout(self._timeout_s) as seat.timeout:
                generation = await seat.engine.generate(
                    seat.rid,
                    np.concatenate([started.input_ids, sampled]) if have else started.input_ids,
                    temperature=call.temperature,
                    top_p=call.top_p,
                    max_tokens=max_tokens,
                    stop_token_ids=(self._end_of_turn_id,),
                    extra_key=str(route.version),
                    stop=started.stop,
                )
        except TimeoutError as error:
            raise EngineError(str(error) or f"the engine of {seat.cell} gave no answer") from None
        finally:
            seat.timeout = None
        return check_generation(generation, max_tokens)


def _refusal(error: EngineError, started: Started) -> ProviderError | None:
    """What to tell of an error that would come again; None for all others."""
    if error.status not in REFUSALS:
        return None
    if match := _TOO_LONG.search(str(error)):
        return ContextOverflow(len(started.input_ids), int(match[1]))
    return ProviderError(error.status, "engine_refused", str(error))
