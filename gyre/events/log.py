"""Pure. What a log is to those who write and read it; `memory.py` and `jetstream.py` are two of them.

Invariants: an append returns only when the event is durable; readers see events in stream order,
each once; sequences start at 1 and have no holes.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Protocol

import msgspec

from gyre.errors import ConflictError, DuplicateError
from gyre.events.codec import Envelope, Recorded, body_digest, encode_with_id
from gyre.events.order import WriterOrder
from gyre.events.subjects import event_subject
from gyre.events.types import Aggregate, Event


class Ack(msgspec.Struct, frozen=True, gc=False):
    seq: int
    duplicate: bool
    """The server had this Msg-Id already."""


class Stored(msgspec.Struct, frozen=True):
    """One event as the log keeps it: not decoded, so that a damaged one can be looked at too."""

    seq: int
    subject: str
    body: bytes


class Item(msgspec.Struct, frozen=True, gc=False):
    """One body to be stored."""

    subject: str
    body: bytes
    msg_id: str = ""


class Log(Protocol):
    """One run's stream."""

    @property
    def run(self) -> str: ...

    async def publish(self, subject: str, body: bytes, msg_id: str, *, expect_last: int | None = None) -> Ack:
        """Store one body durably. With `expect_last`, only if that is the subject's last sequence (0: none yet).

        Calls made one after another without awaiting are stored in that order unless one is retried.
        Raises ConflictError, StreamError.
        """
        ...

    async def publish_all(self, items: Sequence[Item], *, expect_last: int | None = None) -> Ack:
        """Store all of them or none, under sequences that follow one another; the ack has the first.

        `expect_last`: of the first one's subject. As `publish` else; DuplicateError when some of the ids are stored and
        others are not, of which nothing is stored then either.
        """
        ...

    def read(
        self,
        start: int = 1,
        *,
        until: int | None = None,
        only: Sequence[Aggregate] = (),
        order: WriterOrder | None = None,
    ) -> AsyncIterator[Recorded]:
        """Events from sequence `start` on, for ever, or through `until`.

        `only`: of these aggregates, for ever: whom calls do not concern is not woken for each. `order`: told of every
        event; its `gaps` are what writers numbered and the log does not hold, which a crash or a late retry explains.
        Raises CodecError naming the sequence; StreamError naming the sequences that the stream has lost, which nothing
        of gyre does.
        """
        ...

    def stored(
        self, start: int = 1, *, until: int | None = None, only: Sequence[Aggregate] = ()
    ) -> AsyncIterator[Stored]:
        """As `read`, but whole bodies without decoding them, stored repeats included: for archives and checks."""
        ...

    async def body(self, seq: int) -> bytes:
        """The stored bytes of one event. Raises StreamError when there is none."""
        ...

    async def last_seq(self, only: Sequence[Aggregate] = ()) -> int:
        """0 for an empty log. `only`: of these aggregates."""
        ...

    async def get_key(self, key: str) -> tuple[bytes, int]:
        """Value and revision of one key of the run's bucket; empty and 0 where there is none. Raises StreamError."""
        ...

    async def put_key(self, key: str, value: bytes, *, expect: int) -> int:
        """The new revision, if the key has the revision `expect` (0: none yet). Raises ConflictError, StreamError."""
        ...

    async def close(self) -> None: ...


class Writer:
    """Appends typed events under one name: gives each its number, its `prev` link and its id.

    Several appends may be in flight; their numbers follow the order of the calls. A compare-and-set
    waits until none is and holds the others back: when it loses, its number is free again and no
    later event refers to it.
    """

    def __init__(self, log: Log, name: str, incarnation: int, clock_ns: Callable[[], int]) -> None:
        self.log = log
        self.name = name
        self.incarnation = incarnation
        self._clock_ns = clock_ns
        self._writer_seq = 0
        self._prev = ""
        self._turn = asyncio.Lock()
        self._num_ahead = 0
        """Appends that wait for a compare-and-set: what comes later must not overtake them."""
        self._num_open = 0
        self._settled = asyncio.Event()

    def append(self, event: Event, *, cause: int = 0, expect_last: int | None = None) -> Coroutine[Any, Any, int]:
        """Returns the sequence, once the log has acknowledged it. Raises LogError."""
        return self.append_all((event,), cause=cause, expect_last=expect_last)

    async def append_all(self, events: Sequence[Event], *, cause: int = 0, expect_last: int | None = None) -> int:
        """Several events that are one fact: all are on the log or none is, with nothing in between.

        Returns the sequence of the last, once the log has acknowledged them. All have the same cause, since none has a
        sequence before. `expect_last`: of the first one's subject. Raises LogError.
        """
        if expect_last is not None or self._num_ahead:
            self._num_ahead += 1
            try:
                async with self._turn:
                    if expect_last is not None:
                        return await self._compare_and_set(events, cause, expect_last)
                    items = self._next(events, cause)
            finally:
                self._num_ahead -= 1
        else:
            items = self._next(events, cause)
        # No await in between: what was numbered next is also sent next.
        self._num_open += 1
        try:
            return await self._publish(items, None)
        finally:
            self._num_open -= 1
            self._settled.set()

    async def _compare_and_set(self, events: Sequence[Event], cause: int, expect_last: int) -> int:
        while self._num_open:
            self._settled.clear()
            await self._settled.wait()
        before = self._writer_seq, self._prev
        try:
            return await self._publish(self._next(events, cause), expect_last)
        except ConflictError:
            self._writer_seq, self._prev = before
            raise

    def _next(self, events: Sequence[Event], cause: int) -> tuple[Item, ...]:
        """What comes next. If one cannot be encoded, none takes a number."""
        items, number, prev = [], self._writer_seq, self._prev
        for event in events:
            number += 1
            envelope = Envelope(
                writer=self.name,
                incarnation=self.incarnation,
                writer_seq=number,
                prev=prev,
                time_ns=self._clock_ns(),
                cause=cause,
                event=event,
            )
            msg_id, body = encode_with_id(envelope)
            items.append(Item(event_subject(self.log.run, event), body, msg_id))
            prev = body_digest(body)
        self._writer_seq, self._prev = number, prev
        return tuple(items)

    async def _publish(self, items: tuple[Item, ...], expect_last: int | None) -> int:
        ack = await self.log.publish_all(items, expect_last=expect_last)
        if ack.duplicate:
            await self._check_same(items, ack.seq)
        return ack.seq + len(items) - 1

    async def _check_same(self, items: tuple[Item, ...], first: int) -> None:
        for seq, item in enumerate(items, first):
            if await self.log.body(seq) != item.body:
                raise DuplicateError(
                    f"log {self.log.run}: sequence {seq} holds another event of writer {self.name}/"
                    f"{self.incarnation}; another process writes under this name: stop one of the two"
                )


async def open_writer(log: Log, name: str, clock_ns: Callable[[], int]) -> Writer:
    """A writer with an incarnation above every one that the log holds for this name."""
    incarnation = 0
    last = await log.last_seq()
    if last:
        async for recorded in log.read(1, until=last):
            if recorded.envelope.writer == name:
                incarnation = max(incarnation, recorded.envelope.incarnation)
    return Writer(log, name, incarnation + 1, clock_ns)
