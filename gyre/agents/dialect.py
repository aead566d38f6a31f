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
Hint = Literal["", "main", "sub-agent", "summary", "auxiliary"]


class ProviderError(HarnessError):
    """The answer to a request that gets no reply. `code` is one of the gateway's own names for it."""

    def __init__(self, status: int, code: str, message: str, *, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


class ContextOverflow(ProviderError):
    """Harnesses compact when they see it, and know it by their provider's own words."""

    def __init__(self, num_tokens: int, max_tokens: int) -> None:
        super().__init__(
            400,
            "context_length_exceeded",
            f"This model's maximum context length is {max_tokens} tokens. "
            f"However, your messages resulted in {num_tokens} tokens.",
        )
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens


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
    hint: Hint = ""
    """What the harness's headers say that it is for."""
    header: str = ""
    """The name of the header that says so."""
    custom_tools: tuple[str, ...] = ()
    """Tools that take one text rather than JSON; the policy is offered a function with one argument."""
    namespaces: tuple[tuple[str, str], ...] = ()
    """(tool, the namespace that it is called in)."""


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
    num_reasoning_tokens: int = 0
    stop_text: str = ""
    """The one of `Request.stop` that ended the reply."""


class Dialect(Protocol):
    """A module of pure functions."""

    KEEP_ALIVE: bytes
    """What a stream that waits is sent: no part of a reply."""

    def parse_request(self, body: bytes) -> Request:
        """Raises ProviderError, and nothing else."""
        ...

    def render_response(self, request: Request, answer: Answer) -> bytes: ...

    def render_chunks(self, request: Request, answer: Answer) -> Iterator[bytes]:
        """Server-sent events, the terminal one last."""
        ...

    def render_error(self, error: ProviderError) -> bytes: ...

    def render_stream_error(self, request: Request, error: ProviderError) -> bytes:
        """A whole stream, for an error that the provider tells within one; empty for all others."""
        ...
