"""Pure. What the window of sends and the feed of a reader need of a connection; `jetstream.py` provides it."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol

import msgspec

_AROUND_HEADERS = len("NATS/1.0\r\n\r\n")


class Outgoing(msgspec.Struct, frozen=True, gc=False):
    """A message to be published."""

    subject: str
    payload: bytes
    reply: str = ""
    headers: str = ""
    """Lines, each `Name: value` and a line end; ASCII."""


def frames(messages: Iterable[Outgoing]) -> list[bytes]:
    """As they go over the connection, one after the other, in parts, so that a large payload is copied once."""
    parts: list[bytes] = []
    for message in messages:
        headers, size = message.headers, len(message.payload)
        if headers:
            length = len(headers) + _AROUND_HEADERS
            line = f"HPUB {message.subject} {message.reply} {length} {length + size}\r\nNATS/1.0\r\n{headers}\r\n"
        else:
            line = f"PUB {message.subject} {message.reply} {size}\r\n"
        parts += (line.encode(), message.payload, b"\r\n")
    return parts


class Message(Protocol):
    @property
    def subject(self) -> str: ...

    @property
    def reply(self) -> str: ...

    @property
    def data(self) -> bytes: ...

    @property
    def headers(self) -> Mapping[str, str] | None: ...


class Wire(Protocol):
    def new_inbox(self) -> str:
        """A subject that nobody else listens to."""
        ...

    def post(self, messages: Iterable[Outgoing]) -> bool:
        """Publish them in this order. False when the connection is away just now.

        Nothing is waited for: who calls bounds what is under way. Raises StreamError when it was closed for good.
        """
        ...

    @property
    def max_bytes(self) -> int:
        """Of one message, headers included."""
        ...

    async def listen(self, subject: str, callback: Callable[[Message], None]) -> Callable[[], Awaitable[None]]:
        """Calls back for every message, over reconnects, until the returned function is called."""
        ...

    async def api(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        """Ask `$JS.API.<name>`, again while the server is away. Raises StreamError when it stays so."""
        ...


def status_of(message: Message) -> str:
    """The server's own answers carry a status such as `503`; empty for a message of a publisher."""
    return (message.headers or {}).get("Status", "")
