"""Shell. A bounded window of sends that are not acknowledged yet.

Invariants: a send is repeated, with the same headers, until the server answers it; never after
`patience_s`, since the server would no longer recognise a repeat. Sends go out in the order of the
calls; after a reconnect all open ones go out again in that order.

Group commit: a send goes out at the end of its turn of the event loop, unless so many are open that the server is
behind; then it waits for others, and they go out as one atomic batch, which the server syncs and answers once. A batch
holds first sends only. Whatever goes wrong with one, its sends are repeated one by one: those that were stored after
all are known by their Msg-Id.
What shall be stored as a whole or not at all is one send of several items: a batch of its own, repeated as such.
Direction: `send` -> connection -> server -> inbox -> answer.
"""

import asyncio
import math
from collections.abc import Iterable, Sequence
from itertools import count

import msgspec

from gyre.errors import StreamError
from gyre.events.log import Item
from gyre.events.wire import Message, Outgoing, Wire, status_of

MAX_OPEN = 4096
"""Sends in flight: several batches, so that the next is made while the server syncs one."""
MAX_OPEN_BYTES = 16 << 20
MIN_BATCH = 128
"""A batch costs the server a millisecond and its own syncs: fewer sends are faster one by one."""
MAX_BATCH = 1000
"""As many as the server allows: each batch costs it three syncs, whatever its sync interval."""
MAX_DUE_BYTES = 512 << 10
"""More does not wait for others."""
MAX_MEAN_BYTES = 4096
"""Of the sends of a batch: the server keeps it aside until it is whole, which costs it more than large ones save."""
HEADER_BYTES = 512
"""More than the headers of any send."""
ACK_TIMEOUT_S = 5.0
BACKOFF_S = 0.05
_STORE_FAILED = 10077
_FULL = (10023, 10047)
_IN_PROCESS = 10158
"""The server is still at work on an earlier send of this id."""
_INCOMPLETE = 10176
"""A batch of which it has only a part: a connection ended in the middle, or it has too many under way."""


class ApiError(msgspec.Struct, frozen=True):
    code: int = 0
    err_code: int = 0
    description: str = ""

    @property
    def is_full(self) -> bool:
        return self.err_code in _FULL or "no space" in self.description

    @property
    def is_stored_before(self) -> bool:
        """The subject has its one message already."""
        return self.err_code == _STORE_FAILED and "per subject" in self.description

    @property
    def is_passing(self) -> bool:
        """Of a server that is starting, or electing a leader: the same send will do later."""
        lasting = self.is_full or self.err_code == _STORE_FAILED
        return self.err_code in (_IN_PROCESS, _INCOMPLETE) or (self.code == 503 and not lasting)


class Answer(msgspec.Struct, frozen=True, gc=False):
    seq: int = 0
    """Of the last one in a batch."""
    duplicate: bool = False
    error: ApiError | None = None
    count: int = 0
    """How many the batch holds."""


_decoder = msgspec.json.Decoder(Answer)


class Send(msgspec.Struct, eq=False, gc=False):
    """One send until it is answered."""

    number: int
    items: Sequence[Item]
    """One, or several that are stored as a whole."""
    headers: str
    size: int
    """Of all payloads."""
    alone: bool
    born: float
    answer: asyncio.Future[Answer]
    last: float = math.inf
    """When it was posted; infinity while it is due."""


class Window:
    """See the module. `open` first; `resend` is to be called after every reconnect."""

    def __init__(self, wire: Wire, patience_s: float) -> None:
        self._wire = wire
        self._patience_s = patience_s
        self._inbox = wire.new_inbox()
        self._open: dict[int, Send] = {}
        self._open_bytes = 0
        self._left = asyncio.Event()
        """A send has left the window."""
        self._numbers = count(1)
        self._due: list[Send] = []
        """To be posted, in the order of the calls."""
        self._due_bytes = 0
        self._is_turn = False
        """Whether this turn of the event loop ends with a look at them."""
        self._batches: dict[int, tuple[Send, ...]] = {}
        """Batches in flight, by the number of their last send."""
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._closed = ""

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()  # which costs a system call
        self._most = self._wire.max_bytes - HEADER_BYTES
        await self._wire.listen(f"{self._inbox}.*", self._on_answer)

    @property
    def is_full(self) -> bool:
        return len(self._open) >= MAX_OPEN or self._open_bytes >= MAX_OPEN_BYTES

    async def room(self) -> None:
        """Waits until the window is not full."""
        while self.is_full:
            self._left.clear()
            await self._left.wait()

    def send(self, items: Sequence[Item], headers: str = "") -> asyncio.Future[Answer]:
        """Sends at the end of this turn of the event loop, all of them or none; the answer to the last is theirs.

        `room` before it. At most `MAX_BATCH`. headers: lines, each with its end; of the first one's. What has some, or
        no Msg-Id, is in no batch with others. Raises StreamError, now or as the answer when there is none in time.
        """
        size = 0
        for item in items:
            num_bytes = len(item.body)
            if num_bytes > self._most:
                raise StreamError(f"{item.subject}: {num_bytes} bytes are more than the server's max_payload")
            size += num_bytes
        if len(items) > MAX_BATCH:
            raise StreamError(f"{items[0].subject}: {len(items)} events at once are more than {MAX_BATCH}")
        if self._closed:
            raise StreamError(f"{self._closed}: nothing can be published")
        alone = bool(headers) or len(items) > 1 or not items[0].msg_id
        answer: asyncio.Future[Answer] = self._loop.create_future()
        send = Send(next(self._numbers), items, headers, size, alone, self._loop.time(), answer)
        self._open[send.number] = send
        self._open_bytes += size
        self._post(send)
        if self._sweep_timer is None:
            self._sweep_later()
        return answer

    def resend(self) -> None:
        """Repeat all sends that are under way, in their order."""
        self._most = self._wire.max_bytes - HEADER_BYTES  # of another server, perhaps
        self._batches.clear()
        for send in [*self._open.values()]:
            self._repeat(send)

    def refuse(self, subject: str) -> None:
        """Open sends to this subject (in small letters, as the client tells it) are not allowed to whom we are."""
        refused = Answer(error=ApiError(code=403, description="the role of this credential may not write there"))
        for send in [*self._open.values()]:
            if any(item.subject.lower() == subject for item in send.items):
                self._resolve((send,), (refused,))

    def close(self, reason: str) -> None:
        """Open sends fail with StreamError."""
        self._closed = reason
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        for send in [*self._open.values()]:
            self._fail(send, f"{reason} before {send.items[0].subject} was acknowledged")

    def _post(self, send: Send) -> None:
        send.last = math.inf
        self._due.append(send)
        self._due_bytes += send.size
        if len(self._due) >= MAX_BATCH or self._due_bytes >= MAX_DUE_BYTES:
            self._post_due()
        elif not self._is_turn:
            self._look_later()

    def _look_later(self) -> None:
        self._is_turn = True
        self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._is_turn = False
        is_behind = len(self._open) - len(self._due) >= MIN_BATCH
        if self._due and not (is_behind and self._may_join):
            self._post_due()

    @property
    def _may_join(self) -> bool:
        """Whether what is due can be of one batch."""
        return self._due_bytes <= MAX_MEAN_BYTES * len(self._due) and not any(send.alone for send in self._due)

    def _post_due(self) -> None:
        is_batch = len(self._due) >= MIN_BATCH and self._may_join
        due, self._due, self._due_bytes = self._due, [], 0
        now = self._loop.time()
        for send in due:
            send.last = now
        messages: list[Outgoing] = []
        if is_batch:
            self._batches[due[-1].number] = tuple(due)
            messages = self._batch([send.items[0] for send in due], due[-1].number)
        else:
            for send in due:
                if len(send.items) > 1:
                    messages += self._batch(send.items, send.number, send.headers)
                else:
                    item, reply = send.items[0], f"{self._inbox}.{send.number}"
                    msg_id = f"Nats-Msg-Id: {item.msg_id}\r\n" if item.msg_id else ""
                    messages.append(Outgoing(item.subject, item.body, reply, msg_id + send.headers))
        try:
            # When the connection is away, `resend` or the sweep sends them later.
            self._wire.post(messages)
        except StreamError as error:
            for send in due:
                self._fail(send, str(error))

    def _batch(self, items: Iterable[Item], number: int, headers: str = "") -> list[Outgoing]:
        """One atomic batch, under a name of its own; the server answers its last message. headers: of the first's."""
        name = f"Nats-Batch-Id: {self._inbox[-16:]}-{next(self._numbers)}\r\nNats-Batch-Sequence: "
        messages = [
            Outgoing(item.subject, item.body, "", f"Nats-Msg-Id: {item.msg_id}\r\n{name}{place}\r\n")
            for place, item in enumerate(items, 1)
        ]
        messages[0] = msgspec.structs.replace(messages[0], headers=messages[0].headers + headers)
        commit = messages[-1].headers + "Nats-Batch-Commit: 1\r\n"
        messages[-1] = msgspec.structs.replace(messages[-1], reply=f"{self._inbox}.{number}", headers=commit)
        return messages

    def _on_answer(self, message: Message) -> None:
        number = int(message.subject.rpartition(".")[2])
        answer = None if status_of(message) else _decoder.decode(message.data)
        batch, send = self._batches.pop(number, None), self._open.get(number)
        if batch is not None:
            if answer is None or answer.count != len(batch):
                for each in batch:
                    self._repeat(each)
            else:
                self._resolve(batch, map(Answer, count(answer.seq - len(batch) + 1)))
        elif send is None:
            return
        elif answer is None or (answer.error is not None and answer.error.is_passing):
            self._loop.call_later(BACKOFF_S, self._repeat, send)
        else:
            self._resolve((send,), (answer,))

    def _repeat(self, send: Send) -> None:
        """Unless it was answered or is due."""
        if send.last == math.inf or send.number not in self._open:
            return
        if send.answer.done():  # nobody waits for it any more
            self._leave((send,))
        elif self._loop.time() - send.born > self._patience_s:
            subject, patience_s = send.items[0].subject, self._patience_s
            self._fail(send, f"{subject}: no acknowledgement for {patience_s:g} s: is the server up or full?")
        else:
            send.alone = True
            self._post(send)

    def _resolve(self, sends: Iterable[Send], answers: Iterable[Answer]) -> None:
        for send, answer in zip(sends, answers, strict=False):
            if not send.answer.done():
                send.answer.set_result(answer)
        self._leave(sends)

    def _fail(self, send: Send, reason: str) -> None:
        if not send.answer.done():
            send.answer.set_exception(StreamError(reason))
        self._leave((send,))

    def _leave(self, sends: Iterable[Send]) -> None:
        for send in sends:
            if self._open.pop(send.number, None) is not None:
                self._open_bytes -= send.size
        self._left.set()
        if self._due and not self._is_turn:
            self._look_later()

    def _sweep_later(self) -> None:
        self._sweep_timer = self._loop.call_later(ACK_TIMEOUT_S / 4, self._sweep)

    def _sweep(self) -> None:
        now = self._loop.time()
        late = [send for send in self._open.values() if now - send.last > ACK_TIMEOUT_S]
        if late:
            self._batches.clear()
        for send in late:
            self._repeat(send)
        self._sweep_timer = None
        if self._open:
            self._sweep_later()
