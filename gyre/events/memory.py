"""Pure. A log in memory, under the same contract as JetStream's: for tests and for folds over exported logs."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from gyre.errors import CodecError, ConflictError, DuplicateError, StreamError
from gyre.events.codec import Recorded, UnknownEvent, body_digest, decode
from gyre.events.log import Ack, Item, Stored
from gyre.events.order import WriterOrder
from gyre.events.subjects import is_own_subject
from gyre.events.types import Aggregate, event_type


class MemoryLog:
    """Bodies in a list; the sequence is the place in it."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._stored: list[tuple[str, bytes]] = []
        self._seq_by_id: dict[str, int] = {}
        self._last_by_subject: dict[str, int] = {}
        self._grown = asyncio.Condition()
        self._keys: dict[str, tuple[bytes, int]] = {}
        self._revision = 0

    @property
    def run(self) -> str:
        return self._run

    async def publish(self, subject: str, body: bytes, msg_id: str, *, expect_last: int | None = None) -> Ack:
        return await self.publish_all((Item(subject, body, msg_id),), expect_last=expect_last)

    async def publish_all(self, items: Sequence[Item], *, expect_last: int | None = None) -> Ack:
        known = [self._seq_by_id.get(item.msg_id, 0) for item in items]
        if known[0] and known == list(range(known[0], known[0] + len(items))):
            return Ack(seq=known[0], duplicate=True)
        if any(known):
            raise some_are_stored(self._run, items[0])
        subject = items[0].subject
        last = self._last_by_subject.get(subject, 0)
        if expect_last is not None and expect_last != last:
            raise ConflictError(f"log {self._run}: {subject}: expected last sequence {expect_last}, it is {last}")
        for item in items:
            self._stored.append((item.subject, item.body))
            self._seq_by_id[item.msg_id] = self._last_by_subject[item.subject] = len(self._stored)
        async with self._grown:
            self._grown.notify_all()
        return Ack(seq=len(self._stored) - len(items) + 1, duplicate=False)

    async def read(
        self,
        start: int = 1,
        *,
        until: int | None = None,
        only: Sequence[Aggregate] = (),
        order: WriterOrder | None = None,
    ) -> AsyncIterator[Recorded]:
        order = order or WriterOrder(from_start=start == 1, partial=bool(only))
        async for stored in self.stored(start, until=until, only=only):
            recorded = recorded_from(self._run, stored.seq, stored.subject, stored.body)
            if order.place(recorded.envelope, recorded.seq) != "repeat":
                check_place(self._run, recorded)
                yield recorded

    async def stored(
        self, start: int = 1, *, until: int | None = None, only: Sequence[Aggregate] = ()
    ) -> AsyncIterator[Stored]:
        seq = max(start, 1)
        while until is None or seq <= until:
            async with self._grown:
                await self._grown.wait_for(lambda: len(self._stored) >= seq)  # noqa: B023 - evaluated here only
            subject, body = self._stored[seq - 1]
            if _is_of(subject, only):
                yield Stored(seq, subject, body)
            seq += 1

    async def body(self, seq: int) -> bytes:
        if not 1 <= seq <= len(self._stored):
            raise StreamError(f"log {self._run}: no event at sequence {seq}")
        return self._stored[seq - 1][1]

    async def last_seq(self, only: Sequence[Aggregate] = ()) -> int:
        found = (seq for seq, (subject, _) in enumerate(self._stored, 1) if _is_of(subject, only))
        return max(found, default=0)

    async def get_key(self, key: str) -> tuple[bytes, int]:
        return self._keys.get(key, (b"", 0))

    async def put_key(self, key: str, value: bytes, *, expect: int) -> int:
        revision = self._keys.get(key, (b"", 0))[1]
        if revision != expect:
            raise ConflictError(f"log {self._run}: key {key}: expected revision {expect}, it is {revision}")
        self._revision += 1
        self._keys[key] = (value, self._revision)
        return self._revision

    async def close(self) -> None:
        return None


def _is_of(subject: str, aggregates: Sequence[Aggregate]) -> bool:
    return not aggregates or subject.split(".")[2] in aggregates


def recorded_from(run: str, seq: int, subject: str, body: bytes) -> Recorded:
    """Decode one stored body. Raises CodecError naming log and sequence."""
    try:
        return Recorded(seq=seq, subject=subject, digest=body_digest(body), envelope=decode(body))
    except CodecError as error:
        raise CodecError(f"log {run}: sequence {seq}: {error}") from None


def some_are_stored(run: str, first: Item) -> DuplicateError:
    """Of items that are to be stored all at once."""
    return DuplicateError(
        f"log {run}: {first.subject}: the log holds some of these events and not the others, so it holds another's: "
        "another process writes under this name: stop one of the two"
    )


def check_place(run: str, recorded: Recorded) -> None:
    """Who may write what is decided by subjects, so an event on another's subject is none. Raises CodecError."""
    event = recorded.event
    if isinstance(event, UnknownEvent):
        return
    if not is_own_subject(run, recorded.subject, event):
        raise CodecError(
            f"log {run}: sequence {recorded.seq}: {event_type(event)} stands on {recorded.subject}, which is not "
            "its own: somebody wrote what is not theirs to write"
        )
