"""Pure. Secrets in what a harness sends: replaced before anything is made of them.

Request -> the same with every match of the configured patterns as `[redacted]`. Invariant: what is rendered to tokens,
digested and recorded is the redacted text and nothing else, so log and policy see the same history; the same text
gives the same again, so a history that comes back is known.

What the policy sampled is recorded as it was sampled, and shown so to its harness: the policy never saw a secret. Where
such a reply comes back, or a text of it, both sides are compared as redacted.
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import orjson

from gyre.agents.dialect import Request
from gyre.agents.messages import Message, Tool

MARK = "[redacted]"
MAX_CLEAN = 2**20


class Redactor:
    """Without patterns it changes nothing. A history comes with each request: what was found clean is known again."""

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        self._patterns = tuple(map(re.compile, patterns))
        self._clean: set[int] = set()
        """Hashes, of 64 bits and seeded at random, of messages and tools in which no pattern was found."""

    def text(self, text: str) -> str:
        for pattern in self._patterns:
            text = pattern.sub(MARK, text)
        return text

    def message(self, message: Message) -> Message:
        """The same value when there is nothing to redact."""
        key = hash(message)
        if key in self._clean:
            return message
        redacted = self._redact(message)
        if redacted == message:
            self._keep(key)
            return message
        return redacted

    def _keep(self, key: int) -> None:
        if len(self._clean) >= MAX_CLEAN:
            self._clean.clear()
        self._clean.add(key)

    def _redact(self, message: Message) -> Message:
        calls = tuple(msgspec.structs.replace(c, arguments=self.text(c.arguments)) for c in message.tool_calls)
        return msgspec.structs.replace(
            message, content=self.text(message.content), reasoning=self.text(message.reasoning), tool_calls=calls
        )

    def request(self, request: Request) -> Request:
        if not self._patterns:
            return request
        messages = tuple(map(self.message, request.messages))
        return msgspec.structs.replace(request, messages=messages, tools=self._tools(request.tools))

    def _tools(self, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
        key = hash(orjson.dumps(tools))
        if key in self._clean:
            return tools
        redacted = tuple(map(self._tree, tools))
        if redacted == tools:
            self._keep(key)
        return redacted

    def _tree(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {key: self._tree(item) for key, item in value.items()}
        return list(map(self._tree, value)) if isinstance(value, list) else value


NOTHING = Redactor()
