"""Shell. One pull consumer that feeds one reader.

Invariants: messages come in stream order without holes, or `FeedLost` is raised and the reader makes
a new feed where it stands; what is requested and not yet read is bounded. The server forgets an
abandoned consumer after `FORGET_S`.
Direction: requests -> server -> inbox -> buffer -> `next`.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence

import orjson

from gyre.errors import StreamError
from gyre.events.wire import Message, Outgoing, Wire, status_of

BATCH = 1000
BATCH_BYTES = 4 << 20
MAX_REQUESTS = 2
HEARTBEAT_S = 0.5
SILENCE_S = 2.0
"""Without a message or heartbeat from one look to the next, the consumer is taken for lost (its server was restarted,
say). A timer of each wait would cost a fifth of an event."""
EXPIRES_S = 30.0
FORGET_S = 30.0
_NS = 1_000_000_000
_YIELD_EVERY = 64
_LAST_SEQ, _LAST_NUMBER = "Nats-Last-Stream", "Nats-Last-Consumer"
_PASSED = ("Batch Completed", "MaxBytes")


class FeedLost(Exception):
    """The consumer is gone; make another."""


class Feed:
    """See the module. `open`, then `next` until it raises, then `close`."""

    def __init__(
        self, wire: Wire, stream: str, start: int, *, rest_s: float = 0.0, subjects: Sequence[str] = ()
    ) -> None:
        """`rest_s`: look for new messages so often, rather than be told of each: that costs both sides far less.

        `subjects`: the others are passed over."""
        self._wire = wire
        self._stream = stream
        self._start = start
        self._rest_s = rest_s
        self._subjects = subjects
        self._is_resting = False
        """The last look found the end."""
        self._num_idle = 0
        """Looks in a row that found nothing."""
        self._inbox = wire.new_inbox()
        self._consumer = ""
        self._stop: Callable[[], Awaitable[None]] | None = None
        self._buffer: deque[tuple[int, int, str, bytes]] = deque()
        """(sequence in the stream, number of the delivery, subject, stored body)."""
        self._requests: dict[str, int] = {}
        """Open requests, oldest first, with the number of messages that each still wants."""
        self._num_requests = 0
        self._num_read = 0
        self._due = start
        """The sequence that comes next."""
        self._last_seq, self._last_number = start - 1, 0
        """Of the last message that arrived."""
        self.is_at_end = False
        """There was nothing at `start` or after it when it was opened."""
        self._alive = asyncio.Event()
        self._heard = True
        """A message or heartbeat came since the last look for silence."""
        self._timer: asyncio.TimerHandle | None = None
        self._lost = False

    async def open(self) -> None:
        """Raises StreamError when the stream is missing."""
        self._stop = await self._wire.listen(f"{self._inbox}.*", self._on_message)
        config = {
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._start,
            "ack_policy": "none",
            "inactive_threshold": int(FORGET_S * _NS),
            "mem_storage": True,
            "num_replicas": 1,
            "filter_subjects": [*self._subjects],
        }
        answer = await self._wire.api(
            f"CONSUMER.CREATE.{self._stream}", {"stream_name": self._stream, "config": config}
        )
        if "error" in answer:
            raise StreamError(f"stream {self._stream}: no consumer: {answer['error'].get('description')}")
        self._consumer = answer["name"]
        self._listen_again()
        self.is_at_end = not answer.get("num_pending")

    async def next(self) -> tuple[int, str, bytes]:
        """(sequence, subject, stored body) of the next message. Raises FeedLost, StreamError."""
        while True:
            self._top_up()
            if self._buffer:
                seq, number, subject, stored = self._buffer.popleft()
                self._num_read += 1
                if self._num_read % _YIELD_EVERY == 0:
                    await asyncio.sleep(0)  # a full buffer must not hold up the rest of the process
                if number != self._num_read:
                    raise FeedLost(f"delivery {number} came where {self._num_read} was due")
                if seq != self._due and not self._subjects:
                    raise StreamError(f"stream {self._stream}: sequences {self._due} to {seq - 1} are missing")
                self._due = seq + 1
                return seq, subject, stored
            if self._lost:
                raise FeedLost(f"consumer {self._consumer} is gone, or silent")
            if self._is_resting:
                if self._num_idle * self._rest_s > EXPIRES_S:
                    raise FeedLost("quiet for so long: a look does not tell of what a connection took with it")
                await asyncio.sleep(self._rest_s)
                self._is_resting = False
                continue
            self._alive.clear()
            await self._alive.wait()

    def _listen_again(self) -> None:
        if not self._heard and self._requests and not self._buffer:
            self._lost = True
            self._alive.set()
        self._heard = False
        self._timer = asyncio.get_running_loop().call_later(SILENCE_S, self._listen_again)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._stop is not None:
            await self._stop()
        if self._consumer:
            # No answer is waited for, and a closed connection is no matter: the server forgets it anyhow.
            with contextlib.suppress(StreamError):
                self._wire.post([Outgoing(f"$JS.API.CONSUMER.DELETE.{self._stream}.{self._consumer}", b"")])

    def _top_up(self) -> None:
        most = 0 if self._is_resting else 1 if self._rest_s else MAX_REQUESTS
        while len(self._requests) < most and len(self._buffer) < BATCH and not self._lost:
            self._num_requests += 1
            reply = f"{self._inbox}.{self._num_requests}"
            self._requests[reply] = BATCH
            wait = {"expires": int(EXPIRES_S * _NS), "idle_heartbeat": int(HEARTBEAT_S * _NS)}
            request = {"batch": BATCH, "max_bytes": BATCH_BYTES, **({"no_wait": True} if self._rest_s else wait)}
            subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"
            sent = self._wire.post([Outgoing(subject, orjson.dumps(request), reply)])
            self._lost = self._lost or not sent

    def _on_message(self, message: Message) -> None:
        self._heard = True
        self._alive.set()
        status = status_of(message)
        if not status:
            self._num_idle = 0
            self._last_seq, self._last_number = sequences(message.reply)
            self._buffer.append((self._last_seq, self._last_number, message.subject, message.data))
            oldest = next(iter(self._requests), None)  # the server serves requests in their order
            if oldest is not None:
                self._requests[oldest] -= 1
                if self._requests[oldest] == 0:
                    del self._requests[oldest]
        elif status in ("404", "408") and self._rest_s:
            self._requests.pop(message.subject, None)
            self._is_resting = True
            self._num_idle += 1
        elif status == "408" or (status == "409" and _describes(message, _PASSED)):
            self._requests.pop(message.subject, None)  # it expired, or has all that it may have
        elif status != "100" or self._is_behind(message.headers or {}):
            self._lost = True

    def _is_behind(self, beat: Mapping[str, str]) -> bool:
        """A heartbeat tells, too, of what a connection took with it when it ended."""
        skipped = not self._subjects and int(beat.get(_LAST_SEQ, 0)) > self._last_seq
        return skipped or int(beat.get(_LAST_NUMBER, 0)) > self._last_number


def sequences(reply: str) -> tuple[int, int]:
    """In the stream, and of the delivery: `$JS.ACK.<stream>.<consumer>.<tries>.<seq>.<delivery>...`, or the longer form
    with domain and account before the stream."""
    parts = reply.split(".")
    at = 5 if len(parts) == 9 else 7
    return int(parts[at]), int(parts[at + 1])


def _describes(message: Message, texts: tuple[str, ...]) -> bool:
    description = (message.headers or {}).get("Description", "")
    return any(text in description for text in texts)
