"""Pure. Canonical messages, and the digests by which histories are compared.

wire messages of any dialect -> Message -> digests, and Message -> the mapping that the renderer takes.
Invariant: two messages that mean the same to the policy have the same digest, however a harness spells
them: text or a list of text blocks, tool arguments serialised anew, other ids. The set of tools is the
first link of every chain of digests, so the same words under other tools are another history.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import orjson

MessageRole = Literal["system", "user", "assistant", "tool"]
Tool = dict[str, Any]

_EXACT_INT = 2**53
_SHARED_TURN = "+"
_FRACTION = re.compile(r"\d[.eE]")
"""Stands in every number that is read as a float."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    arguments: str
    """JSON text; a harness may echo text that is none."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: MessageRole
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""


def mint_tool_call_id(call: str, index: int) -> str:
    """Unique in the world, since `call` is; the same again when a call is replayed."""
    return "call_" + hashlib.sha256(f"{call}/{index}".encode()).hexdigest()[:24]


def to_wire(message: Message) -> dict[str, Any]:
    """The mapping of chat/completions, as chat templates take it."""
    wire: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        wire["reasoning_content"] = message.reasoning
    if message.tool_calls:
        wire["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in message.tool_calls
        ]
    if message.tool_call_id:
        wire["tool_call_id"] = message.tool_call_id
    return wire


def digest_message(message: Message) -> str:
    """Ids are left out. Reasoning has a digest of its own after a `+`, for the harnesses that leave it out."""
    parts = [message.role, message.content, [[c.name, _canonical(c.arguments)] for c in message.tool_calls]]
    digest = _hash(orjson.dumps(parts))
    return digest + "+" + _hash(message.reasoning.encode()) if message.reasoning else digest


def is_echo(echo: str, reply: str) -> bool:
    """Whether a message with digest `echo` is the reply with digest `reply`, come back."""
    return bool(reply) and (echo == reply or echo == reply.partition("+")[0])


def prefix_digests(messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[str, ...]:
    """One a message: names the tools and all messages up to it.

    Tool messages in a row share one turn of most chat templates, so a tool message that another one
    follows ends elsewhere in the tokens than one that ends the turn: `+` tells the two apart.
    """
    link = _hash(orjson.dumps(list(tools), option=orjson.OPT_SORT_KEYS))
    digests = []
    for index, message in enumerate(messages):
        link = _hash(f"{link} {digest_message(message)}".encode())
        shared = message.role == "tool" and index + 1 < len(messages) and messages[index + 1].role == "tool"
        digests.append(link + _SHARED_TURN if shared else link)
    return tuple(digests)


def _canonical(arguments: str) -> str:
    """Sorted keys, no spaces, 5000.0 as 5000; text that is not JSON as it is."""
    try:
        tree = orjson.loads(arguments)
        # Most have no number that could be spelled in two ways, and need no walk.
        tree = _plain(tree) if _FRACTION.search(arguments) else tree
        return orjson.dumps(tree, option=orjson.OPT_SORT_KEYS).decode()
    except (orjson.JSONDecodeError, TypeError, RecursionError):
        return arguments


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT_INT:
        return int(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def _hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:32]
