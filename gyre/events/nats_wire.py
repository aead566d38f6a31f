"""Shell. A connection to NATS: the only module that knows the client library.

Invariants: what is posted goes out in the order of the calls; a message comes to its listener once, in the order of the
server's; what asks without changing anything is asked again until the server is back.
Direction: `post`, `request` -> server; server -> `listen`'s callbacks.
"""

import asyncio
import contextlib
import importlib.util
import re
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import msgspec
import nats
import orjson
from nats.aio.client import Client
from nats.aio.transport import TcpTransport

from gyre.errors import ConfigError, MissingError, StreamError
from gyre.events.window import ApiError
from gyre.events.wire import Message, Outgoing, frames

_ANSWER_S = 5.0
_PING_S = 2.0
_HANG_UP_S = 1.0
PATIENCE_S = 60.0
"""How long a request that changes nothing is repeated while the server is away."""
_PUBLISHERS = b"NATS/1.0\r\n"
"""How the headers of a publisher begin; those of the server have a status in the first line."""
_CREDS = re.compile(rb"BEGIN NATS USER JWT-+\r?\n\S+\.\S+\.\S+\r?\n.*BEGIN USER NKEY SEED-+\r?\nSU\w+\r?\n", re.S)
_REFUSED = re.compile(r'permissions violation for publish to "(.*)"')


class _Arrived:
    """A message as it came. Only what the server itself says has headers that anybody reads."""

    __slots__ = ("_block", "data", "reply", "subject")

    def __init__(self, subject: bytes, reply: bytes, data: bytes, block: bytes | None) -> None:
        self.subject = subject.decode()
        self.reply = reply.decode()
        self.data = data
        self._block = block

    @property
    def headers(self) -> dict[str, str] | None:
        if not self._block or self._block.startswith(_PUBLISHERS):
            return None
        first, *lines = self._block.decode().strip().split("\r\n")
        status, _, description = first.removeprefix("NATS/1.0 ").partition(" ")
        found = {"Status": status, "Description": description}
        return found | {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


class _Client(Client):  # type: ignore[misc]
    """Hands the messages of some subscriptions over as they come: the library's queue, task and parsed headers cost
    more than all that is done with an event."""

    def __init__(self) -> None:
        super().__init__()
        self.direct: dict[int, Callable[[Message], None]] = {}
        """By the number of the subscription."""
        self.is_over = False
        """It is to be closed for good."""

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        callback = self.direct.get(sid)
        if callback is None:
            await super()._process_msg(sid, subject, reply, data, headers)
        else:
            callback(_Arrived(subject, reply, data, headers))

    async def _connect_to_server(self, server: Any) -> None:
        """Not for whom has closed it: the library's end of an attempt that is just failing is passed over before Python
        3.12, and the next ones would go on for ever."""
        if not self.is_over:
            await super()._connect_to_server(server)
        if self.is_over:
            if self._transport is not None:
                self._transport.close()
            raise asyncio.CancelledError


class NatsWire:
    """The client library behind the `Wire` protocol."""

    def __init__(self, client: _Client) -> None:
        self.client = client
        self.refused: set[str] = set()
        """Subjects that whom we are may not publish to, in small letters."""
        self.on_refused: Callable[[str], None] = lambda subject: None
        self.on_reconnect: Callable[[], None] = lambda: None

    def new_inbox(self) -> str:
        return str(self.client.new_inbox())

    def post(self, messages: Iterable[Outgoing]) -> bool:
        client = self.client
        if client.is_closed:
            raise StreamError("the connection to the log is closed")
        if not client.is_connected:
            return False
        # The library's `publish` costs more than the rest of an append. It writes later, so what it sends has no order
        # with these: `listen` waits until the server has what it says.
        client._transport.write(b"".join(frames(messages)))
        return True

    @property
    def max_bytes(self) -> int:
        return int(self.client.max_payload)

    async def listen(self, subject: str, callback: Callable[[Message], None]) -> Callable[[], Awaitable[None]]:
        try:
            subscription = await self.client.subscribe(subject, cb=_unused)
        except nats.errors.Error as error:
            raise StreamError(f"{subject}: cannot listen: {error}") from None
        self.client.direct[subscription._id] = callback
        with contextlib.suppress(nats.errors.Error, OSError):  # after a reconnect the library says it again
            await _undisturbed(self.client.flush(timeout=2))

        async def stop() -> None:
            self.client.direct.pop(subscription._id, None)
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()

        return stop

    async def api(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        give_up = loop.time() + PATIENCE_S
        while True:
            answer = dict(orjson.loads((await self.request(f"$JS.API.{name}", orjson.dumps(request))).data))
            error = msgspec.convert(answer.get("error", {}), ApiError)
            if not error.is_passing or loop.time() > give_up:
                return answer
            await asyncio.sleep(0.1)  # a cluster elects a leader

    async def request(self, subject: str, payload: bytes) -> Message:
        """Repeated while the server is away. Raises StreamError when it stays so."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    try:
                        asking = self.client.request(subject, payload, timeout=_ANSWER_S)
                        answer: Message = await _undisturbed(asking)
                        return answer
                    except nats.errors.ConnectionClosedError:
                        raise StreamError(f"{subject}: the connection to the log is closed") from None
                    except (nats.errors.Error, TimeoutError, OSError):
                        if subject.lower() in self.refused:
                            raise StreamError(f"{subject}: the role of this credential may not ask it") from None
                        await asyncio.sleep(0.1)
        except TimeoutError:
            raise StreamError(f"{subject}: no answer for {PATIENCE_S:g} s: is the server up?") from None

    async def close(self) -> None:
        # What is still to be sent changes nothing; where it cannot be, the library would stop here halfway, and connect
        # again for ever.
        self.client.is_over = True
        self.client._pending, self.client._pending_data_size = [], 0
        with contextlib.suppress(nats.errors.Error, OSError):  # the connection may be gone already
            await self.client.close()


async def _undisturbed(asking: Coroutine[Any, Any, Any]) -> Any:
    """What waits for an answer inside the library, let go but never cancelled: its `asyncio.wait_for` passes over a
    cancellation that comes with the answer (before Python 3.12), and an answer to what was cancelled ends all reading.
    """
    task = asyncio.ensure_future(asking)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.wait({task})
    return task.result()


async def _unused(message: Any) -> None:
    """What the library wants to call for a subscription whose messages never reach it."""


async def open_wire(url: str, *, token: str | None, credentials: str, tls_ca: str, timeout_s: float) -> NatsWire:
    """See `jetstream.connect`. Raises StreamError, ConfigError, MissingError."""
    client = _Client()
    wire = NatsWire(client)
    noted: dict[type[Exception], Exception] = {}

    async def note(error: Exception) -> None:
        noted[type(error)] = error
        if _is_lasting(error):
            first.cancel()  # the library would try for ever
        if refused := _REFUSED.search(str(error)):
            wire.refused.add(refused[1])
            wire.on_refused(refused[1])

    async def reconnected() -> None:
        wire.on_reconnect()

    options: dict[str, Any] = {
        "max_reconnect_attempts": -1,
        "reconnect_time_wait": 0.1,
        "connect_timeout": 2,
        # A server that was cut off does not hang up: after three of these without an answer the next one is tried.
        "ping_interval": _PING_S,
        "max_outstanding_pings": 2,
    }
    user, colon, password = (token or "").partition(":")
    if colon:
        options |= {"user": user, "password": password}
    elif token:
        options["token"] = token
    if credentials:
        options["user_credentials"] = _checked_credentials(Path(credentials))
    if tls_ca:
        options["tls"] = _tls(Path(tls_ca))
    connecting = client.connect(url.split(","), error_cb=note, reconnected_cb=reconnected, **options)
    first = asyncio.ensure_future(connecting)
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.wait({first})
        first.result()
    except (TimeoutError, asyncio.CancelledError, nats.errors.Error, OSError) as error:
        first.cancel()
        await wire.close()
        if isinstance(error, asyncio.CancelledError) and not any(map(_is_lasting, noted.values())):
            raise
        # A refused token is what matters among the reasons of all attempts; the client repeats it as resets.
        reason = next(filter(_is_lasting, noted.values()), None) or next(iter(noted.values()), error)
        raise StreamError(f"{url}: cannot connect: {reason or 'no answer'}") from None
    _hang_up_in_time(client)
    return wire


def _is_lasting(error: Exception) -> bool:
    """Another attempt would fail too. The library has several classes for a server that does not know us."""
    return isinstance(error, ssl.SSLCertVerificationError) or "authorization" in str(error).lower()


def _hang_up_in_time(client: Client) -> None:
    """The library goes to another server only when the one before has taken all that was still to be sent, which one
    that was cut off never does. What it did not acknowledge is sent again anyhow."""
    transport = client._transport
    wait_closed = transport.wait_closed

    async def wait_or_abort() -> None:
        try:
            async with asyncio.timeout(_HANG_UP_S):
                await wait_closed()
        except TimeoutError:
            transport._bare_io_writer.transport.abort()

    if isinstance(transport, TcpTransport):
        transport.wait_closed = wait_or_abort


def _tls(path: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=path)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"log.tls_ca: {path}: {error}: give a PEM file of certificates") from None


def _checked_credentials(path: Path) -> str:
    if not path.exists():
        raise ConfigError(f"log.credentials: {path}: no such file; give a NATS creds file")
    if not _CREDS.search(path.read_bytes()):  # in which the library would look for the next line for ever
        raise ConfigError(f"log.credentials: {path}: no creds file: it holds a user's JWT and seed, as nsc writes it")
    if importlib.util.find_spec("nkeys") is None:
        raise MissingError("log.credentials: nkeys is not installed, which signs with a creds file: pip install nkeys")
    return str(path)
