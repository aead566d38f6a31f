"""Shell. Which of several schedulers leads: whoever holds one key of the run's key-value bucket.

Invariants: the key changes by compare-and-set only, so of two that try one succeeds; a leader writes it again and
again, and one that cannot stops leading; another tries only when the key has not changed for `lease_s` by its own
clock, so no two clocks are compared. The revision that made a leader is its term, and receivers refuse a lower one: an
election alone fences nobody, since a leader may not know yet that it was deposed.

Consumes and produces: the key. Waits for: the end of the other's lease. Is unblocked by: a cancel.
"""

import asyncio
from collections.abc import Awaitable, Callable

from gyre.errors import ConflictError
from gyre.events.log import Log

KEY = "scheduler"
RENEWALS = 4
"""In the time of a lease."""


class Election:
    def __init__(
        self, log: Log, name: str, lease_s: float, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        """`name`: of the writer and its incarnation, as in `scheduler/3`. Who writes under a name is one at a time: an
        earlier incarnation of one's own is dead, and not waited for."""
        self.log, self.lease_s, self.sleep = log, lease_s, sleep
        self.value = name.encode()
        self.revision = 0
        """Of the key, as this process wrote it last; 0: it does not lead."""

    async def win(self) -> int:
        """The revision under which this process leads. A key that is empty is free at once."""
        value, seen = await self.log.get_key(KEY)
        while True:
            if value and not self._is_own(value):
                await self.sleep(self.lease_s)
                value, revision = await self.log.get_key(KEY)
                if value and revision != seen:  # somebody leads
                    seen = revision
                    continue
                seen = revision
            try:
                self.revision = await self.log.put_key(KEY, self.value, expect=seen)
                return self.revision
            except ConflictError:
                value, seen = await self.log.get_key(KEY)

    def _is_own(self, value: bytes) -> bool:
        (name, _, incarnation), (own, _, newest) = value.rpartition(b"/"), self.value.rpartition(b"/")
        return name == own and int(incarnation) <= int(newest)

    async def hold(self) -> None:
        """Endless. Raises ConflictError when another took over."""
        while True:
            await self.sleep(self.lease_s / RENEWALS)
            try:
                self.revision = await self.log.put_key(KEY, self.value, expect=self.revision)
            except ConflictError:
                self.revision = 0
                raise ConflictError(
                    "scheduler: another process leads by now: the lease ended while this one was away"
                ) from None

    async def resign(self) -> None:
        """The next one need not wait."""
        if self.revision:
            try:
                await self.log.put_key(KEY, b"", expect=self.revision)
            except ConflictError:
                return
