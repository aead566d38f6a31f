"""Pure. A trajectory's tokens -> the messages that they say, as supervised training takes them.

Direction: row of a batch -> turns -> messages and tools -> one JSON line. Invariant: `exact` is true only when the
policy's own template makes the same text of the messages again (but for the end of a last turn that was cut); what
a template does not give back, such as reasoning that it drops from earlier turns, is still there in the messages.

A turn begins at the token that opens turns in ChatML. Tool output that forged that token makes a turn of its own.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from gyre.agents.renderer import Renderer
from gyre.errors import HarnessError
from gyre.projections.batches import Batch, Row
from gyre.projections.trajectories import by_execution

Message = dict[str, Any]

_TOOLS = re.compile(r"\s*# Tools\n.*?<tools>\n(.*?)\n</tools>.*\Z", re.DOTALL)
_RESPONSE = re.compile(r"\s*<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)


def chat_lines(renderer: Renderer, batch: Batch, *, min_score: float | None = None) -> Iterator[bytes]:
    """One JSON object a trajectory, of executions whose score is at least `min_score`."""
    for member, rows in by_execution(batch, min_score):
        for row in rows:
            messages, tools, exact = read_messages(renderer, row)
            head = {"messages": messages} | ({"tools": tools} if tools else {})
            about = {"step": batch.step, "group": member.group, "execution": row.execution, "call": row.call}
            yield orjson.dumps(head | about | {"score": member.score, "exact": exact})


def read_messages(renderer: Renderer, row: Row) -> tuple[list[Message], list[Any], bool]:
    """(messages, tools, exact). A reply has `weight` 1 when the trajectory trains a token of it, else 0."""
    plain = _turns(renderer, row)
    shaped, tools = _shape(plain)
    text = _decode(renderer, row.ids.tolist())
    if _says(renderer, shaped, tools, text):
        return shaped, tools, True
    bare = [{"role": turn["role"], "content": turn["text"]} | _weight(turn) for turn in plain]
    if _says(renderer, bare, [], text):
        return bare, [], True
    return shaped, tools, False


def _turns(renderer: Renderer, row: Row) -> list[Message]:
    """Role, text, ids of a reply, and whether a token of it is trained."""
    ids, opening = row.ids.tolist(), renderer.opening
    starts = [i for i, token in enumerate(ids) if token == opening[0]]
    turns: list[Message] = []
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        piece = ids[start:end]
        if renderer.end_of_turn_id in piece:
            piece = piece[: piece.index(renderer.end_of_turn_id) + 1]
        closed = renderer.is_closed(piece)
        role, _, text = _decode(renderer, piece[1 : len(piece) - closed]).partition("\n")
        turn: Message = {"role": role, "text": text}
        if piece[: len(opening)] == opening:
            turn["reply"] = renderer.parse_reply(piece[len(opening) :])
            turn["weight"] = int(row.target[start:end].any())
        turns.append(turn)
    return turns


def _shape(turns: Sequence[Message]) -> tuple[list[Message], list[Any]]:
    """Messages of chat/completions: tools out of the system turn, calls out of replies, results out of user turns."""
    messages: list[Message] = []
    tools: list[Any] = []
    pending: list[str] = []
    for i, turn in enumerate(turns):
        role, text = turn["role"], turn["text"]
        if "reply" in turn:
            message, pending = _reply(turn, len(messages))
            messages.append(message)
        elif i == 0 and role == "system" and (found := _read_tools(text)) is not None:
            tools, text = found
            if text:
                messages.append({"role": role, "content": text})
        elif role == "user" and (results := _results(text)):
            messages += [_result(result, pending) for result in results]
        else:
            messages.append({"role": role, "content": text})
    return messages, tools


def _reply(turn: Message, number: int) -> tuple[Message, list[str]]:
    reply = turn["reply"]
    ids = [f"call_{number}_{i}" for i in range(len(reply.tool_calls))]
    message: Message = {"role": turn["role"], "content": reply.content}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if ids:
        message["tool_calls"] = [
            {"id": i, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for i, call in zip(ids, reply.tool_calls, strict=True)
        ]
    return message | _weight(turn), ids


def _result(text: str, pending: list[str]) -> Message:
    """The answer to the next call that has none; one whose call is not in the trajectory names none."""
    return {"role": "tool", "content": text} | ({"tool_call_id": pending.pop(0)} if pending else {})


def _weight(turn: Message) -> Message:
    return {"weight": turn["weight"]} if "weight" in turn else {}


def _read_tools(text: str) -> tuple[list[Any], str] | None:
    match = _TOOLS.search(text)
    if match is None:
        return None
    try:
        return [json.loads(line) for line in match[1].splitlines()], text[: match.start()]
    except ValueError:
        return None


def _results(text: str) -> list[str]:
    """The results in a user turn that holds nothing else; empty for any other."""
    found = _RESPONSE.findall(text)
    return found if not _RESPONSE.sub("", text).strip() else []


def _says(renderer: Renderer, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], text: str) -> bool:
    """Whether the template makes this text of them, the end of the last turn aside, and bytes that are no text."""
    if "\ufffd" in text:
        return False
    try:
        again = renderer.render_text([{k: v for k, v in m.items() if k != "weight"} for m in messages], tools, False)
    except HarnessError:
        return False
    return again.startswith(text) and again[len(text) :].strip() in ("", renderer.end_of_turn)


def _decode(renderer: Renderer, ids: Sequence[int]) -> str:
    text: str = renderer.tokenizer.decode(list(ids), skip_special_tokens=False)
    return text
