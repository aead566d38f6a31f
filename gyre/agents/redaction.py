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

from gyre.agents.dialect import Request
from gyre.agents.messages import Message

MARK = "[redacted]"


class Redactor:
    """Without patterns it changes nothing."""

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        self._patterns = tuple(map(re.compile, patterns))

    def text(self, text: str) -> str:
        for pattern in self._patterns:
            text = pattern.sub(MARK, text)
        return text

    def message(self, message: Message) -> Message:
        calls = tuple(msgspec.structs.replace(c, arguments=self.text(c.arguments)) for c in message.tool_calls)
        return msgspec.structs.replace(
            message, content=self.text(message.content), reasoning=self.text(message.reasoning), tool_calls=calls
        )

    def request(self, request: Request) -> Request:
        if not self._patterns:
            return request
        messages = tuple(map(self.message, request.messages))
        return msgspec.structs.replace(request, messages=messages, tools=tuple(map(self._tree, request.tools)))

    def _tree(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {key: self._tree(item) for key, item in value.items()}
        return list(map(self._tree, value)) if isinstance(value, list) else value
