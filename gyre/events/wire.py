"""Pure. What the window of sends and the feed of a reader need of a connection; `jetstream.py` provides it."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol


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

    async def post(
        self, subject: str, payload: bytes, *, reply: str = "", headers: dict[str, str] | None = None
    ) -> bool:
        """False when the connection is away just now. Raises StreamError when it was closed for good."""
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
