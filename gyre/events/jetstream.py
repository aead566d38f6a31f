"""Shell. One run's log on NATS JetStream.

Invariants: an append returns only after the server's acknowledgement, and is stored once however
often it was resent; readers see events in stream order, each once, over server restarts.
Direction: `publish` -> window of sends -> stream -> pull consumer -> bounded buffer -> `read`.
"""

import asyncio
import base64
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec
import orjson

from gyre.errors import BlobError, CodecError, ConflictError, GyreError, StreamError
from gyre.events.blobs import get_blob, put_blob
from gyre.events.codec import Recorded
from gyre.events.feed import Feed, FeedLost
from gyre.events.log import Ack, Item, Stored
from gyre.events.memory import check_place, recorded_from, some_are_stored
from gyre.events.nats_wire import PATIENCE_S, NatsWire, open_wire
from gyre.events.order import WriterOrder
from gyre.events.streams import Streams, apply, load_streams
from gyre.events.subjects import aggregate_subjects, blob_subject, key_subject
from gyre.events.tails import are_inline, attach, detach, is_detached, parse_detached
from gyre.events.types import Aggregate
from gyre.events.window import Answer, ApiError, Window
from gyre.events.wire import status_of

_CONFLICTS = (10071, 10164)
"""The second is of a cluster: another send to the subject is being replicated just now."""
_NO_MESSAGE = 10037
_REPEATED = 10201
"""A batch with an id that is stored already."""
_LEASE_NS = 3_500_000_000
"""Servers elect another leader when they have not heard of theirs for 4 s, not before."""


class JetStreamLog:
    """The `Log` of one run. Made by `connect`."""

    def __init__(self, wire: NatsWire, run: str, streams: Streams, rest_s: float = 0.0) -> None:
        self.wire = wire
        self._rest_s = rest_s
        self._run = run
        self.stream = streams.log.name
        self._blob_stream = streams.blobs.name
        self._key_stream = streams.keys.name
        # A resend is only recognised within the duplicate window: give up well before its end.
        self.window = Window(wire, patience_s=streams.log.duplicate_window_s * 0.75)
        self._acked_seq = 0
        """What is sent now comes after it."""
        self._turn = asyncio.Lock()
        self._num_ahead = 0
        """Sends that wait for their turn: what comes later must not overtake them."""

    @property
    def run(self) -> str:
        return self._run

    def publish(
        self, subject: str, body: bytes, msg_id: str, *, expect_last: int | None = None
    ) -> Coroutine[Any, Any, Ack]:
        return self.publish_all((Item(subject, body, msg_id),), expect_last=expect_last)

    async def publish_all(self, items: Sequence[Item], *, expect_last: int | None = None) -> Ack:
        headers = "" if expect_last is None else f"Nats-Expected-Last-Subject-Sequence: {expect_last}\r\n"
        if self._num_ahead or self.window.is_full or not are_inline(items):
            answering = await self._send_in_turn(items, headers)
        else:
            answering = self.window.send(items, headers)
        after = self._acked_seq
        answer = await answering
        if answer.error is None:
            self._acked_seq = answer.seq
            return Ack(answer.seq - len(items) + 1, answer.duplicate)
        if answer.error.err_code in _CONFLICTS and expect_last is not None:
            return await self._own_write(items[0].subject, items[0].msg_id, expect_last)
        if answer.error.err_code == _REPEATED:
            return Ack(seq=await self._seq_of(items, after), duplicate=True)
        raise self._refused(items[0].subject, answer.error)

    async def read(
        self,
        start: int = 1,
        *,
        until: int | None = None,
        only: Sequence[Aggregate] = (),
        order: WriterOrder | None = None,
    ) -> AsyncIterator[Recorded]:
        order = order or WriterOrder(from_start=start == 1, partial=bool(only))
        async with contextlib.aclosing(self.stored(start, until=until, only=only)) as bodies:
            async for stored in bodies:
                recorded = recorded_from(self._run, stored.seq, stored.subject, stored.body)
                if order.place(recorded.envelope, recorded.seq) != "repeat":
                    check_place(self._run, recorded)
                    yield recorded

    async def stored(
        self, start: int = 1, *, until: int | None = None, only: Sequence[Aggregate] = ()
    ) -> AsyncGenerator[Stored, None]:
        seq, subjects = max(start, 1), aggregate_subjects(self._run, only)
        while until is None or seq <= until:
            feed = Feed(self.wire, self.stream, seq, rest_s=self._rest_s, subjects=subjects)
            try:
                await feed.open()
                if feed.is_at_end:
                    await self._refuse_lost_end(seq)
                while until is None or seq <= until:
                    at, subject, stored = await feed.next()
                    body = await self._attached(at, stored)
                    seq = at + 1
                    yield Stored(at, subject, body)
            except FeedLost:
                await asyncio.sleep(0.1)
            finally:
                await feed.close()

    async def body(self, seq: int) -> bytes:
        message = await self._stored({"seq": seq})
        if message is None:
            raise StreamError(f"log {self._run}: no event at sequence {seq}")
        return await self._attached(seq, base64.b64decode(message["data"]))

    async def last_seq(self, only: Sequence[Aggregate] = ()) -> int:
        last = await self._end()
        if not only or not last:
            return last
        asked = [self._stored({"last_by_subj": name}) for name in aggregate_subjects(self._run, only)]
        found = await asyncio.gather(*asked)
        return max(int(message["seq"]) if message else 0 for message in found)

    async def _end(self) -> int:
        give_up = asyncio.get_running_loop().time() + PATIENCE_S
        while True:
            info = await self.wire.api(f"STREAM.INFO.{self.stream}", {})
            if "error" in info:
                why = info["error"].get("description")
                raise StreamError(f"stream {self.stream}: {why}: has the run been started?")
            if _has_majority(info.get("cluster") or {}):
                return int(info["state"]["last_seq"])
            if asyncio.get_running_loop().time() > give_up:
                raise StreamError(f"stream {self.stream}: no majority of its servers for {PATIENCE_S:g} s")
            await asyncio.sleep(0.1)

    async def _refuse_lost_end(self, seq: int) -> None:
        """Raises StreamError when the stream has had an event at `seq`, and has it no more: it would not come."""
        last = await self.last_seq()
        if last >= seq and await self._stored({"seq": seq}) is None:
            raise StreamError(f"stream {self.stream}: sequences {seq} to {last} are missing")

    async def _send_in_turn(self, items: Sequence[Item], headers: str) -> asyncio.Future[Answer]:
        """Once those before it are sent, the ends of its bodies are in the blobs, and the window has room."""
        self._num_ahead += 1
        try:
            async with self._turn:
                stored = [msgspec.structs.replace(item, body=await self._detached(item.body)) for item in items]
                await self.window.room()
                return self.window.send(stored, headers)
        finally:
            self._num_ahead -= 1

    async def _detached(self, body: bytes) -> bytes:
        """As the stream keeps it; what was cut off is in the blobs."""
        parts = detach(body)
        return body if parts is None else attach(parts[0], await put_blob(self, parts[1]))

    async def put_object(self, name: str, content: bytes) -> None:
        """One object of a blob (see `blobs.py`), which names it by its hash."""
        await self.window.room()
        error = (await self.window.send((Item(blob_subject(self._run, name), content),))).error
        if error is not None and not error.is_stored_before:
            raise self._refused(blob_subject(self._run, name), error)

    async def get_object(self, name: str) -> bytes:
        request = {"last_by_subj": blob_subject(self._run, name)}
        # A replica may answer that does not have it yet; whatever an event names was acknowledged before.
        for delay_s in (0.0, 0.05, 0.2, 0.5):
            await asyncio.sleep(delay_s)
            message = await self.wire.request(f"$JS.API.DIRECT.GET.{self._blob_stream}", orjson.dumps(request))
            if not status_of(message):
                return bytes(message.data)
        raise BlobError(f"blob {name}: not in stream {self._blob_stream}")

    async def get_key(self, key: str) -> tuple[bytes, int]:
        request = {"last_by_subj": key_subject(self._run, key)}
        answer = await self.wire.api(f"STREAM.MSG.GET.{self._key_stream}", request)
        if "error" not in answer:
            return base64.b64decode(answer["message"].get("data", "")), int(answer["message"]["seq"])
        if answer["error"].get("err_code") == _NO_MESSAGE:
            return b"", 0
        raise StreamError(f"stream {self._key_stream}: {answer['error'].get('description')}")

    async def put_key(self, key: str, value: bytes, *, expect: int) -> int:
        subject = key_subject(self._run, key)
        await self.window.room()
        headers = f"Nats-Expected-Last-Subject-Sequence: {expect}\r\n"
        answer = await self.window.send((Item(subject, value),), headers)
        if answer.error is None:
            return answer.seq
        if answer.error.err_code not in _CONFLICTS:
            raise self._refused(subject, answer.error)
        # It may have been stored by the first of several sends: then it is the last, and as it was sent.
        found, revision = await self.get_key(key)
        if found == value and revision > expect and value:
            return revision
        raise ConflictError(f"log {self._run}: key {key}: expected revision {expect}, it is {revision}")

    async def close(self) -> None:
        self.window.close(f"log {self._run}: closed")
        await self.wire.close()

    async def _attached(self, seq: int, stored: bytes) -> bytes:
        if not is_detached(stored):
            return stored
        try:
            kept, name = parse_detached(stored)
            return kept + await get_blob(self, name)
        except (BlobError, CodecError) as error:
            raise type(error)(f"log {self._run}: sequence {seq}: {error}") from None

    async def _own_write(self, subject: str, msg_id: str, expect_last: int) -> Ack:
        """A lost compare-and-set may be one's own write whose acknowledgement was lost: then it is the next one."""
        message = await self._stored({"seq": expect_last + 1, "next_by_subj": subject})
        if message is not None and _has_id(message, msg_id):
            return Ack(seq=message["seq"], duplicate=True)
        last = await self._stored({"last_by_subj": subject})
        raise ConflictError(
            f"log {self._run}: {subject}: expected last sequence {expect_last}, it is {last['seq'] if last else 0}"
        )

    async def _seq_of(self, items: Sequence[Item], after: int) -> int:
        """Of the first of items that were stored before, as a whole; most likely after `after`. Raises DuplicateError.

        It is looked for in the stream: a server of a cluster that is asked by a send with an expectation that cannot be
        (`Nats-Expected-Last-Msg-Id`, which stores nothing and tells of ids) hangs for good (2.15.1).
        """
        for start in sorted({after, 0}, reverse=True):
            seq = start
            while message := await self._stored({"seq": seq + 1, "next_by_subj": items[0].subject}):
                seq = int(message["seq"])
                if _has_id(message, items[0].msg_id):
                    rest = [await self._stored({"seq": seq + place}) for place in range(1, len(items))]
                    if all(m and _has_id(m, item.msg_id) for m, item in zip(rest, items[1:], strict=True)):
                        return seq
                    raise some_are_stored(self._run, items[0])
        raise some_are_stored(self._run, items[0])

    async def _stored(self, request: dict[str, Any]) -> dict[str, Any] | None:
        answer = await self.wire.api(f"STREAM.MSG.GET.{self.stream}", request)
        if "error" not in answer:
            return dict(answer["message"])
        if answer["error"].get("err_code") == _NO_MESSAGE:
            return None
        raise StreamError(f"stream {self.stream}: {answer['error'].get('description')}")

    def _refused(self, subject: str, error: ApiError) -> StreamError:
        reason = f"log {self._run}: {subject}: refused: {error.description} ({error.err_code})"
        return StreamError(reason + ("; free some disk space, nothing recorded is dropped" if error.is_full else ""))


async def connect(
    url: str,
    run: str,
    *,
    create: Streams | None = None,
    token: str | None = None,
    credentials: Path | str = "",
    tls_ca: Path | str = "",
    timeout_s: float = 10.0,
    rest_s: float = 0.0,
) -> JetStreamLog:
    """Connect to the log of a run; `create` (of `load_streams()`) makes or checks its streams first.

    `url`: of one server, or of several of a cluster with commas between. `token`: a token, or `user:password`.
    `credentials`: a NATS creds file. `tls_ca`: certificates that sign the server's. `rest_s`: readers look for new
    events so often, rather than be told of each; for one whom nobody waits for. Raises StreamError when the server or
    the stream is not there, or the stream differs from `create`; ConfigError or MissingError for files that cannot be
    used.
    """
    streams = (create or load_streams()).for_run(run)
    wire = await open_wire(url, token=token, credentials=str(credentials), tls_ca=str(tls_ca), timeout_s=timeout_s)
    log = JetStreamLog(wire, run, streams, rest_s)
    wire.on_refused, wire.on_reconnect = log.window.refuse, log.window.resend
    try:
        if create is not None:
            await apply(log.wire.api, streams.blobs)
            await apply(log.wire.api, streams.log)
            await apply(log.wire.api, streams.keys)
        await log.last_seq()
        await log.window.open()
    except (GyreError, asyncio.CancelledError):
        await log.close()
        raise
    return log


def _has_id(message: dict[str, Any], msg_id: str) -> bool:
    return f"Nats-Msg-Id: {msg_id}\r\n".encode() in base64.b64decode(message.get("hdrs", ""))


def _has_majority(cluster: dict[str, Any]) -> bool:
    """Whether who answered is the leader still: one that is cut off from the others takes itself for it, and an old
    end of the log for the end, when the others have another leader."""
    replicas = cluster.get("replicas") or []
    heard = [replica for replica in replicas if not replica.get("offline") and replica.get("active", 0) < _LEASE_NS]
    return 2 * (1 + len(heard)) > 1 + len(replicas)
