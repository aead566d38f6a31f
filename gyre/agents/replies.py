"""Pure. What a policy sampled, as text: reasoning, content and tool calls, in order and as they come.

text, in pieces of any size -> Pieces -> Reply. Invariants: how the text was cut into pieces changes nothing; every
character is part of exactly one Piece, or is the frame of one; what begins as a tool call and is none is content,
word for word, for a harness can show text and cannot act on half a call.

Two ways of writing a call are known. `tagged`: `<tool_call>...</tool_call>` around an object, or around a list of
them, anywhere in the reply (Qwen, Hermes, SmolLM2). `bare`: the whole reply is one object (Llama 3). The object has
a `name`, and its `arguments` or `parameters` are an object.
"""

import json
import re
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any, Literal

import msgspec

Syntax = Literal["tagged", "bare"]

_THINK, _END_THINK = "<think>", "</think>"
_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_CODE = "<|python_tag|>"
"""Llama 3 may put it before a call."""
_TAG = re.compile(r"</?tool_call>")
_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*')
_KEYS = frozenset(("name", "arguments", "parameters", "type"))
_json = json.JSONDecoder()


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: str
    """JSON text of an object, exactly as sampled where that is possible."""


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    kind: Literal["reasoning", "content", "call"]
    text: str = ""
    call: ToolCall | None = None


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    ok: bool
    """False when something that began as a tool call is not one; it is then part of the content."""


def parse_text(text: str, syntax: Syntax = "tagged", *, reasons: bool = False) -> Reply:
    parser = ReplyParser(syntax, reasons=reasons)
    return join_pieces([*parser.feed(text), *parser.end()])


def join_pieces(pieces: Iterable[Piece]) -> Reply:
    texts: dict[str, str] = {"reasoning": "", "content": ""}
    calls = []
    for piece in pieces:
        if piece.call is not None:
            calls.append(piece.call)
        else:
            texts[piece.kind] += piece.text
    return Reply(**texts, tool_calls=tuple(calls), ok=not _TAG.search(texts["content"]))


class ReplyParser:
    """One reply. `reasons`: the prompt has opened its reasoning already, as some templates do."""

    def __init__(self, syntax: Syntax = "tagged", *, reasons: bool = False) -> None:
        self._syntax = syntax
        self._state = "reasoning" if reasons else "start"
        self._text = ""
        """What is not part of a Piece yet."""
        self._frame = ""
        """Of a call that is not complete: white space before it and its tag, content if it is none."""
        self._first = True
        """No character of this block has been seen."""

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        return list(self._read(ended=False))

    def end(self) -> list[Piece]:
        return list(self._read(ended=True))

    def _read(self, *, ended: bool) -> Iterator[Piece]:
        """Each step says whether it came further."""
        going = True
        while going:
            before = self._state, len(self._text)
            match self._state:
                case "start" | "answer":
                    self._open(ended)
                case "reasoning":
                    yield from self._reason(ended)
                case "content":
                    yield from self._say(ended)
                case "call":
                    yield from self._call(ended)
                case "bare" if ended:
                    yield from self._bare()
            going = (self._state, len(self._text)) != before

    def _open(self, ended: bool) -> None:
        """What the reply, or what follows its reasoning, begins with."""
        text = self._text.lstrip()
        if self._state == "answer":
            self._text = text
        tags = [_THINK] if self._state == "start" else []
        tags += ["{", _CODE] if self._syntax == "bare" else []
        if not ended and (not text or any(tag != text and tag.startswith(text) for tag in tags)):
            return
        if self._state == "start" and text.startswith(_THINK):
            self._text, self._state, self._first = text.removeprefix(_THINK), "reasoning", True
        elif self._syntax == "bare" and text.startswith(("{", _CODE)):
            self._state = "bare"
        elif self._text:
            self._state = "content"

    def _reason(self, ended: bool) -> Iterator[Piece]:
        if self._first and self._text:
            self._text, self._first = self._text.removeprefix("\n"), False
        text, tag, rest = self._text.partition(_END_THINK)
        if tag:
            self._text, self._state = rest, "answer"
            text = text.removesuffix("\n")
        else:
            held = 0 if ended else _num_held(text, "\n" + _END_THINK) or _num_held(text, _END_THINK)
            text, self._text = _split(text, held)
        if text:
            yield Piece(kind="reasoning", text=text)

    def _say(self, ended: bool) -> Iterator[Piece]:
        text, tag, rest = self._text.partition(_CALL) if self._syntax == "tagged" else (self._text, "", "")
        if not tag:
            held = 0 if ended else _num_held(text, _CALL)
            text, self._text = _split(text, held)
            if not ended:
                # White space before a call is its frame.
                said = text.rstrip()
                text, self._text = said, text[len(said) :] + self._text
        else:
            said = text.rstrip()
            self._frame, self._text, self._state = text[len(said) :] + tag, rest, "call"
            text = said
        if text:
            yield Piece(kind="content", text=text)

    def _call(self, ended: bool) -> Iterator[Piece]:
        body, tag, rest = self._text.partition(_END_CALL)
        if not tag and not ended:
            return
        self._text, self._state = rest, "content"
        calls = parse_calls(body) if tag else ()
        for call in calls:
            yield Piece(kind="call", call=call)
        if not calls:
            yield Piece(kind="content", text=self._frame + body + tag)

    def _bare(self) -> Iterator[Piece]:
        calls = parse_calls(self._text.strip().removeprefix(_CODE), only=_KEYS)
        if len(calls) == 1:
            yield Piece(kind="call", call=calls[0])
        else:
            yield Piece(kind="content", text=self._text)
        self._text, self._state = "", "content"


def parse_calls(body: str, *, only: AbstractSet[str] = frozenset()) -> tuple[ToolCall, ...]:
    """The calls that an object, or a list of them, stands for; none when any of it is not one.

    `only`: an object with other keys is none, where no tag says that it is meant as a call.
    """
    try:
        tree = json.loads(body)
    except (ValueError, RecursionError):
        return ()
    calls: list[ToolCall] = []
    at = 0
    for item in tree if isinstance(tree, list) else [tree]:
        arguments = _arguments(item)
        if arguments is None or (only and item.keys() - only):
            return ()
        text, at = _find_arguments(body, at, arguments)
        calls.append(ToolCall(name=item["name"], arguments=text))
    return tuple(calls)


def _arguments(item: Any) -> dict[str, Any] | None:
    """Of a call; None for whatever is none."""
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        return None
    arguments = item.get("arguments", item.get("parameters"))
    return arguments if isinstance(arguments, dict) else None


def _find_arguments(body: str, at: int, arguments: dict[str, Any]) -> tuple[str, int]:
    """(their text as it was sampled, where it ends): no drift when it comes back."""
    for match in _ARGUMENTS.finditer(body, at):
        try:
            value, end = _json.raw_decode(body, match.end())
        except (ValueError, RecursionError):
            continue
        if value == arguments:
            return body[match.end() : end], end
    return json.dumps(arguments), at


def _num_held(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be the beginning of `tag`."""
    return next((num for num in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:num])), 0)


def _split(text: str, held: int) -> tuple[str, str]:
    return (text[:-held], text[-held:]) if held else (text, "")
