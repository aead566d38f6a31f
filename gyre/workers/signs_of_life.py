"""Shell. Signs of life: each cell writes a key of its own again and again, and the scheduler counts who does not.

Invariants: no two clocks are compared: whoever listens counts, by its own, for how long a key has not changed; time in
which it did not look does not count. Keys are no events: the log hears only of silence.

Direction: cell -> key -> Listener -> `scheduler.silence_noticed`.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable

from gyre.errors import ConflictError, StreamError
from gyre.events.log import Log

BEATS = 4
"""In the time of a lease."""


def key_of(cell: str) -> str:
    return f"alive.{cell}"


async def give_signs(
    log: Log, cell: str, lease_s: float, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """Endless. Passes over a log that is away."""
    while True:
        with contextlib.suppress(StreamError, ConflictError):
            _, revision = await log.get_key(key_of(cell))
            await log.put_key(key_of(cell), b"", expect=revision)
        await sleep(lease_s / BEATS)


class Listener:
    """Of one scheduler, from its election on."""

    def __init__(self, log: Log, lease_s: float) -> None:
        self.log, self.lease_s = log, lease_s
        self._heard: dict[str, tuple[int, float]] = {}
        """Revision of its key, and the silence since it changed."""
        self._looked_s: float | None = None

    async def silences(self, cells: Iterable[str], now_s: float) -> dict[str, float]:
        """Seconds of those whose lease is over. To be called several times in a lease."""
        passed_s = 0.0 if self._looked_s is None else min(max(0.0, now_s - self._looked_s), self.lease_s / 2)
        self._looked_s = None
        heard: dict[str, tuple[int, float]] = {}
        try:
            for cell in cells:
                _, revision = await self.log.get_key(key_of(cell))
                before, silence_s = self._heard.get(cell, (-1, 0.0))
                heard[cell] = (revision, silence_s + passed_s if revision == before else 0.0)
        except StreamError:
            return {}  # nobody could be heard
        self._heard, self._looked_s = heard, now_s
        return {cell: silence_s for cell, (_, silence_s) in heard.items() if silence_s >= self.lease_s}
