"""Pure. What every provider's wire format is turned into, and back from.

body -> Request -> (gateway) -> Answer -> body or server-sent events; what goes wrong is a ProviderError,
which each dialect renders in its provider's shape. Invariant: behind this line nothing knows a dialect.
"""

from collections.abc import Iterator
from typing import Literal, Protocol

import msgspec

from gyre.agents.messages import Message, Tool
from gyre.errors import HarnessError

ReplyFinish = Literal["stop", "length", "tool_calls"]


class ProviderError(HarnessError):
    """The answer to a request that gets no reply. `code` is one of the gateway's own names for it."""

    def __init__(self, status: int, code: str, message: str, *, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


class Request(msgspec.Struct, frozen=True, kw_only=True):
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    structured: bool = False
    """JSON of a schema was asked for: with no tools, that is a title or the like."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    call: str
    model: str
    created: int
    """Seconds since 1970."""
    message: Message
    finish: ReplyFinish
    num_prompt_tokens: int
    num_cached_tokens: int
    num_sampled_tokens: int


class Dialect(Protocol):
    """A module of pure functions."""

    def parse_request(self, body: bytes) -> Request:
        """Raises ProviderError, and nothing else."""
        ...

    def render_response(self, answer: Answer) -> bytes: ...

    def render_chunks(self, answer: Answer, *, include_usage: bool) -> Iterator[bytes]:
        """Server-sent events, the terminal one last."""
        ...

    def render_error(self, error: ProviderError) -> bytes: ...
