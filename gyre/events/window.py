"""Shell. A bounded window of sends that are not acknowledged yet.

Invariants: a send is repeated, with the same headers, until the server answers it; never after
`patience_s`, since the server would no longer recognise a repeat. Sends go out in the order of the
calls; after a reconnect all open ones go out again in that order.
Direction: `send` -> connection -> server -> inbox -> `settle`.
"""

import asyncio
from itertools import count

import msgspec

from gyre.errors import StreamError
from gyre.events.wire import Message, Wire, status_of

MAX_OPEN = 2048
"""Sends in flight: more brings no more throughput."""
ACK_TIMEOUT_S = 5.0
BACKOFF_S = 0.05
_STORE_FAILED = 10077
_FULL = (10023, 10047)
_IN_PROCESS = 10158
"""The server is still at work on an earlier send of this id."""


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
        return self.err_code == _IN_PROCESS or (self.code == 503 and not lasting)


class Answer(msgspec.Struct, frozen=True):
    seq: int = 0
    duplicate: bool = False
    error: ApiError | None = None


_decoder = msgspec.json.Decoder(Answer)


class Send:
    """One send until it is answered. `answer` resolves to None when it shall be repeated."""

    __slots__ = ("answer", "born", "headers", "last", "number", "payload", "subject")

    def __init__(self, number: int, subject: str, payload: bytes, headers: dict[str, str] | None, now: float) -> None:
        self.number = number
        self.subject = subject
        self.payload = payload
        self.headers = headers
        self.born = self.last = now
        self.answer: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()

    def resolve(self, answer: Answer | None) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


class Window:
    """See the module. `open` first; `resend` is to be called after every reconnect."""

    def __init__(self, wire: Wire, patience_s: float) -> None:
        self._wire = wire
        self._patience_s = patience_s
        self._inbox = wire.new_inbox()
        self._open: dict[int, Send] = {}
        self._numbers = count(1)
        self._free = asyncio.Semaphore(MAX_OPEN)
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._closed = ""

    async def open(self) -> None:
        await self._wire.listen(f"{self._inbox}.*", self._on_answer)

    async def send(self, subject: str, payload: bytes, headers: dict[str, str] | None) -> Send:
        """Waits for a place in the window, then sends. `settle` must follow at once. Raises StreamError."""
        await self._free.acquire()
        send = Send(next(self._numbers), subject, payload, headers, asyncio.get_running_loop().time())
        self._open[send.number] = send
        try:
            await self._post(send)
        except BaseException:
            self._leave(send)
            raise
        if self._sweep_timer is None:
            self._sweep_later()
        return send

    async def settle(self, send: Send) -> Answer:
        """The server's answer. Raises StreamError when there is none in time."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                answer = await send.answer
                if answer is not None:
                    return answer
                if loop.time() - send.born > self._patience_s:
                    raise StreamError(
                        f"{send.subject}: no acknowledgement for {self._patience_s:g} s: is the server up or full?"
                    )
                send.answer = loop.create_future()
                await self._post(send)
        finally:
            self._leave(send)

    def resend(self) -> None:
        """Repeat all open sends, in their order."""
        for send in self._open.values():
            send.resolve(None)

    def refuse(self, subject: str) -> None:
        """Open sends to this subject (in small letters, as the client tells it) are not allowed to whom we are."""
        for send in self._open.values():
            if send.subject.lower() == subject:
                send.resolve(
                    Answer(error=ApiError(code=403, description="the role of this credential may not write there"))
                )

    def close(self, reason: str) -> None:
        """Open sends fail with StreamError."""
        self._closed = reason
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        for send in self._open.values():
            if not send.answer.done():
                send.answer.set_exception(StreamError(f"{reason} before {send.subject} was acknowledged"))

    async def _post(self, send: Send) -> None:
        if self._closed:
            raise StreamError(f"{self._closed}: nothing can be published")
        send.last = asyncio.get_running_loop().time()
        # When the connection is away, `resend` or the sweep sends it later.
        await self._wire.post(send.subject, send.payload, reply=f"{self._inbox}.{send.number}", headers=send.headers)

    def _leave(self, send: Send) -> None:
        if self._open.pop(send.number, None) is not None:
            self._free.release()

    def _on_answer(self, message: Message) -> None:
        send = self._open.get(int(message.subject.rpartition(".")[2]))
        if send is None:
            return
        answer = None if status_of(message) else _decoder.decode(message.data)
        if answer is None or (answer.error is not None and answer.error.is_passing):
            asyncio.get_running_loop().call_later(BACKOFF_S, send.resolve, None)
        else:
            send.resolve(answer)

    def _sweep_later(self) -> None:
        self._sweep_timer = asyncio.get_running_loop().call_later(ACK_TIMEOUT_S / 4, self._sweep)

    def _sweep(self) -> None:
        now = asyncio.get_running_loop().time()
        for send in self._open.values():
            if now - send.last > ACK_TIMEOUT_S:
                send.resolve(None)
        self._sweep_timer = None
        if self._open:
            self._sweep_later()
