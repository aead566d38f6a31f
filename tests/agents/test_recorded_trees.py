"""Recorded traffic of real harnesses, put together again and played through dialect, session and lineage.

The recordings hold structure, not text: equal blocks have equal hashes. Each block becomes text made of its hash,
and goes through the dialect that its harness speaks. What a hash cannot hold, that one text contains another or that
the same was written anew, is in SPAWNS, QUOTES and ANEW. What must come out was written by hand: goldens/<run>.txt.
"""

import json
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import orjson
import pytest
from scripted import RENDERER, config, encode, generation

from gyre.agents import anthropic_messages, chat, endings, responses, roles, session
from gyre.agents.messages import mint_tool_call_id
from gyre.events.types import (
    BranchForked,
    CallFailed,
    CallStarted,
    CallSuperseded,
    ContextCompacted,
    SessionOpened,
    SubAgentSpawned,
    TokensDrifted,
)

HERE = Path(__file__).parent
GOLDENS = sorted((HERE / "goldens").glob("*.txt"))
DIALECTS: dict[str, Any] = {"anthropic": anthropic_messages, "chat": chat, "responses": responses}
CONFIG = msgspec.structs.replace(
    config(max_tokens=10**5), engine=msgspec.structs.replace(config().engine, context_tokens=10**8)
)

ONE, TWO = "f064", "d8c2"
SPAWNS = {
    "cc197_base": {(3, 0): ONE, (6, 0): ONE, (6, 1): TWO},
    "cc332_compact": {(5, 0): ONE},
    "cc332_compact2": {(5, 0): ONE},
    "cc332_hints": {(5, 0): ONE},
    "cc332_base": {(2, 0): ONE, (3, 0): ONE, (3, 1): TWO},
    "cc332_sync": {(0, 0): ONE, (0, 1): TWO},
    "cc332_tui": {(4, 0): ONE},
    "cx_sub": {(1, 0): ONE, (1, 1): TWO, (7, 0): ONE},
    "qw_base": {(2, 0): ONE, (2, 1): TWO},
    "qw_compact": {(6, 0): ONE},
    "oc_compact": {(6, 0): ONE},
    "qw15_base": {(2, 0): ONE, (2, 1): TWO},
}
"""run -> (call, tool call of its reply) -> block that is the sub-agent's prompt."""
QUOTES = {
    "cc332_compact": {"60eb": 3, "bed0": 8},
    "cc332_compact2": {"b3b1": 3, "432b": 8},
    "cc332_hints": {"27ee": 4},
    "cc332_tui": {"b8d2": 11},
    "cx_compact": {"daf0": 2},
    "qw_compact": {"e3f4": 4},
    "oc_compact": {"82ef": 3},
}
"""run -> block -> the call whose reply it contains."""
ANEW = {"513e": "0cc7", "90cc": "5a46", "09ed": "0a65"}
"""Block of a history -> block of a reply that it spells in another way: 5000 for 5000.0, `content: null` beside it."""
SUPERSEDED = {
    "cc332_cuthead": {0: 1},
    "cc332_cutmid": {1: 2},
    "cc332_cuttool": {1: 2, 2: 3},
    "cc332_eofmid": {1: 2},
    "cc332_hints": {8: 9},
    "cc332_sseerr": {0: 1, 2: 3},
    "cx_idle": {1: 2},
    "pi_fault": {4: 5, 6: 7},
    "qw_adv": {2: 3},
}
"""run -> call whose reply was sent whole or in part, and not taken -> the one that asked again. Written by hand, by
what the harnesses did: after a cut in mid-stream, and Qwen Code's dropped turn. A call that failed had no reply."""


def meaning(key: str) -> str:
    """The same for what is only spelled in another way."""
    return next((reply for anew, reply in ANEW.items() if key.startswith((anew, reply))), key)


class Recording:
    def __init__(self, run: str) -> None:
        self.rows = [json.loads(line) for line in (HERE / f"recordings/{run}.jsonl").read_text().splitlines()]
        self.run = run
        self.ids: dict[str, str] = {}
        """Recorded id of a tool call -> the one that was minted."""
        self.blocks = {self.key(b): b for r in self.rows for m in r["messages"] for b in m["blocks"]}
        self.arguments: dict[str, str] = {}
        for row in self.rows:
            for index, call in enumerate(self.reply_calls(row)):
                prompt = SPAWNS.get(run, {}).get((row["n"], index))
                if prompt:
                    full = next(key for key in self.blocks if key.startswith(prompt))
                    self.arguments[self.key(call)] = json.dumps({"prompt": self.text(self.blocks[full])})

    @staticmethod
    def key(block: dict[str, Any]) -> str:
        return str(block.get("hn") or block.get("args_canon") or block["h"])

    def text(self, block: dict[str, Any]) -> str:
        if block["len"] == 0:
            return ""
        # As long as it was, up to where length means nothing any more.
        text = f"text {meaning(self.key(block))}".ljust(min(block["len"], 100), ".")
        quoted = next((n for q, n in QUOTES.get(self.run, {}).items() if self.key(block).startswith(q)), None)
        if quoted is not None:
            text += "\nSo far: " + self.reply(next(r for r in self.rows if r["n"] == quoted))[0] + "\nGo on."
        return text

    def args(self, block: dict[str, Any]) -> str:
        key = self.key(block)
        number = 5000 if key.startswith(tuple(ANEW)) else 5000.0
        return self.arguments.get(key) or json.dumps({"of": meaning(key), "limit": number})

    def reply_blocks(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {"name": m.get("name"), "id": m.get("call"), **b} for m in row["reply"] or () for b in m.get("blocks", (m,))
        ]

    def reply_calls(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        return [b for b in self.reply_blocks(row) if b["t"] in ("tool_use", "tool_call", "function_call")]

    def reply(self, row: dict[str, Any]) -> tuple[str, str]:
        """(content, reasoning)"""
        blocks = self.reply_blocks(row)
        content = "".join(self.text(b) for b in blocks if b["t"] in ("text", "str", "output_text"))
        reasoning = "".join(self.text(b) for b in blocks if b["t"] in ("thinking", "reasoning_content", "reasoning"))
        return content, reasoning

    def said(self, row: dict[str, Any]) -> str:
        content, reasoning = self.reply(row)
        calls = [
            f'<tool_call>{{"name": "{b["name"]}", "arguments": {self.args(b)}}}</tool_call>'
            for b in self.reply_calls(row)
        ]
        return (f"<think>\n{reasoning}\n</think>\n\n" if reasoning else "") + content + "".join(calls)

    def body(self, row: dict[str, Any]) -> dict[str, Any]:
        names = [f"{name} {row['tools_h']}" for name in row["tool_names"]]
        head = {"model": row["model"], "stream": row["stream"]}
        messages = row["messages"]
        match row["api"]:
            case "anthropic":
                system = [
                    {"type": "text", "text": ("x-anthropic-billing-header: " if s["billing"] else "") + s["h"]}
                    for s in row["system"]
                ]
                tools = [{"name": name, "input_schema": {"type": "object"}} for name in names]
                turns = [{"role": m["role"], "content": self.anthropic(m)} for m in messages]
                return {**head, "system": system, "tools": tools, "messages": turns}
            case "responses":
                functions = [{"type": "function", "name": name} for name in names]
                return {**head, "tools": functions, "input": [self.item(m) for m in messages]}
        functions = [{"type": "function", "function": {"name": name}} for name in names]
        return {**head, "tools": functions, "messages": [self.chat(m) for m in messages]}

    def anthropic(self, message: dict[str, Any]) -> Any:
        if message["content_type"] == "str":
            return self.text(message["blocks"][0])
        content: list[dict[str, Any]] = []
        for b in message["blocks"]:
            match b["t"]:
                case "tool_use":
                    content.append(
                        {
                            "type": "tool_use",
                            "id": self.ids.get(b["id"], b["id"]),
                            "name": b["name"],
                            "input": json.loads(self.args(b)),
                        }
                    )
                case "tool_result":
                    content.append({"type": "tool_result", "tool_use_id": self.ids[b["ref"]], "content": self.text(b)})
                case kind:
                    content.append({"type": kind, kind: self.text(b), "cache_control": {} if b.get("cc") else None})
        return content

    def item(self, message: dict[str, Any]) -> dict[str, Any]:
        block = message["blocks"][0]
        match message["item"]:
            case "message":
                content = [{"type": b["t"], "text": self.text(b)} for b in message["blocks"]]
                return {"type": "message", "role": message["role"], "content": content}
            case "reasoning":
                return {
                    "type": "reasoning",
                    "summary": [{"type": "summary_text", "text": self.text(block)}],
                    "content": None,
                }
            case "function_call":
                id_ = self.ids.get(message["call"], message["call"])
                return {"type": "function_call", "name": message["name"], "call_id": id_, "arguments": self.args(block)}
        return {"type": message["item"], "call_id": self.ids.get(message["call"]), "output": self.text(block)}

    def chat(self, message: dict[str, Any]) -> dict[str, Any]:
        blocks = message["blocks"]
        wire: dict[str, Any] = {"role": message["role"]}
        texts = [{"type": "text", "text": self.text(b)} for b in blocks if b["t"] in ("str", "text")]
        wire["content"] = texts[0]["text"] if message["content_type"] == "str" and texts else texts or None
        if reasoning := "".join(self.text(b) for b in blocks if b["t"] == "reasoning_content"):
            wire["reasoning_content"] = reasoning
        calls = [
            {"id": self.ids.get(b["id"], b["id"]), "function": {"name": b["name"], "arguments": self.args(b)}}
            for b in blocks
            if b["t"] == "tool_call"
        ]
        return {**wire, "tool_calls": calls} if calls else wire


def ends_late(recording: Recording, golden: list[str]) -> dict[int, float]:
    """When each reply comes if it comes as late as it can: just before the first request that shows it arrived."""
    ends = {}
    for row in recording.rows:
        ids = {call["id"] for call in recording.reply_calls(row)}
        shown = [int(line.split()[0]) for line in golden if line.endswith((f"continue {row['n']}", f"of {row['n']}"))]
        shown += [
            later["n"]
            for later in recording.rows
            for message in later["messages"]
            for block in message["blocks"]
            if ids & {block.get("id"), block.get("ref"), message.get("call")}
            or QUOTES.get(recording.run, {}).get(recording.key(block)[:4]) == row["n"]
        ]
        starts = [later["t"] for later in recording.rows if later["n"] in shown]
        ends[row["n"]] = max(min(starts, default=1e9) - 1e-6, row["t"] + 1e-6)
    return ends


def play(run: str, ends: dict[int, float] | None = None, superseded: dict[int, int] | None = None) -> list[str]:
    """The tree that comes out, in the words of a golden; and into `superseded`, whose replies were not taken."""
    recording = Recording(run)
    state = session.open_session(SessionOpened(execution="x", session="s", temperature=1.0, top_p=1.0))
    numbers: dict[str, int] = {}
    started: dict[int, session.Started] = {}
    lines = []
    moments = [(row["t"], row["n"], True, row) for row in recording.rows]
    for row in recording.rows:
        end = ends[row["n"]] if ends else max(row["t_end"] or 0, row["t"] + 1e-6)
        moments.append((end, row["n"], False, row))
    for _, n, starts, row in sorted(moments, key=lambda moment: moment[:2]):
        if starts:
            dialect = DIALECTS[row["api"]]
            request = dialect.parse_request(orjson.dumps(recording.body(row)))
            request = roles.label(request, row["lineage_headers"])
            started[n] = session.decide_start(state, request, RENDERER, cell="c0", config=CONFIG)
            numbers[started[n].call.call] = n
            for index, call in enumerate(recording.reply_calls(row)):
                recording.ids[call["id"]] = mint_tool_call_id(started[n].call.call, index)
            for event in started[n].events:
                state = session.evolve(state, event)
                if isinstance(event, CallSuperseded) and superseded is not None:
                    superseded[numbers[event.call]] = numbers[event.by]
            lines.append(describe(started[n], numbers))
        elif not row["reply"]:
            call = started[n].call
            state = session.evolve(
                state, CallFailed(execution="x", session="s", call=call.call, status=500, reason=row["outcome"])
            )
        else:
            ids = [*encode(recording.said(row)), RENDERER.end_of_turn_id]
            said = generation(ids, "stop", num_prompt_tokens=len(started[n].input_ids))
            done = endings.decide_completed(started[n], "m", said, RENDERER, created=0, num_retries=0)
            state = session.evolve(state, done.event)
    return lines


def describe(started: session.Started, numbers: dict[str, int]) -> str:
    call = started.call
    how = f"{call.rule} {numbers[call.base]}" if call.base else call.rule
    for event in started.events:
        match event:
            case BranchForked():
                how = f"{event.kind} {numbers[event.base]}"
            case SubAgentSpawned():
                how = f"sub-agent of {numbers[event.parent_call]}"
            case ContextCompacted():
                how = f"compaction of {numbers[event.summary_call]}"
            case CallStarted() | TokensDrifted() | CallSuperseded():
                pass
    return f"{numbers[call.call]:<2} {call.role_class:<13} {how}"


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: path.stem)
def test_recorded_run_makes_the_tree_that_was_written_by_hand(path: Path) -> None:
    golden, superseded = read_golden(path), dict[int, int]()
    assert play(path.stem, superseded=superseded) == golden
    assert superseded == SUPERSEDED.get(path.stem, {})


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: path.stem)
def test_the_tree_is_the_same_when_replies_are_late_and_calls_overlap(path: Path) -> None:
    golden = read_golden(path)
    assert play(path.stem, ends_late(Recording(path.stem), golden)) == golden


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: path.stem)
def test_the_tree_is_the_same_whenever_each_reply_comes(path: Path) -> None:
    """Anywhere between the moment at which it came and the last one that what follows allows."""
    golden, recording = read_golden(path), Recording(path.stem)
    late = ends_late(recording, golden)
    came = {row["n"]: max(row["t_end"] or 0, row["t"] + 1e-6) for row in recording.rows}
    for seed in range(4):
        draw = Random(f"{path.stem} {seed}")
        ends = {n: draw.uniform(min(came[n], late[n]), late[n]) for n in late}
        assert play(path.stem, ends) == golden, f"seed {seed}"


def read_golden(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if not line.startswith("#")]
