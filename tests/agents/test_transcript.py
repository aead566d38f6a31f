"""Tokens of a trajectory -> messages: what was rendered and sampled comes back."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from gyre.agents.checkpoint import load_renderer
from gyre.agents.reference_harness import TOOLS
from gyre.agents.renderer import Renderer
from gyre.agents.transcript import chat_lines, read_messages
from gyre.projections.batches import Batch, Microstep, Minibatch, Row
from gyre.projections.members import Member
from gyre.workers.tiny_policy import init_policy

# In the manner of Qwen: tools in the system turn, arguments as an object, reasoning only after the last question.
QWEN_LIKE = """
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\nYou may call:\\n<tools>' }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\n\\nAnswer in JSON.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' and tools %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content and loop.last %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}{{- message.content if loop.last else message.content.split('</think>')[-1].lstrip('\\n') }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder: Path = tmp_path_factory.mktemp("policies") / "tiny"
    init_policy(folder, 1, num_demonstrations=300)
    return load_renderer(folder)


@pytest.fixture(scope="module")
def qwen(tiny: Renderer) -> Renderer:
    return Renderer(tiny.tokenizer, QWEN_LIKE)


def call(number: int, command: str) -> dict[str, Any]:
    arguments = json.dumps({"command": command})
    return {"id": f"call_{number}", "type": "function", "function": {"name": "bash", "arguments": arguments}}


HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Make a.txt."},
    {"role": "assistant", "content": "Now.", "tool_calls": [call(0, "touch a.txt"), call(1, "ls")]},
    {"role": "tool", "content": "", "tool_call_id": "call_0"},
    {"role": "tool", "content": "a.txt", "tool_call_id": "call_1"},
    {"role": "assistant", "content": "Done."},
]


def row_of(ids: list[int], targets: range, execution: str = "e") -> Row:
    target = np.zeros(len(ids), np.bool_)
    target[targets.start : targets.stop] = True
    nothing = np.zeros(len(ids), np.float32)
    return Row(
        execution=execution,
        call="c",
        ids=np.array(ids, np.int32),
        target=target,
        logprob=nothing,
        weight=nothing,
        advantage=1.0,
        spans=(),
    )


def trajectory(renderer: Renderer, messages: list[dict[str, Any]], tools: tuple[Any, ...] = ()) -> Row:
    """Of the last reply, whose end of turn is the last target."""
    prompt = renderer.render(messages[:-1], tools)
    ids = renderer.render(messages, tools, False)
    end = len(ids) - ids[::-1].index(renderer.end_of_turn_id)
    return row_of(ids[:end], range(len(prompt), end))


def plain(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without weights, and without ids of calls, which are made up."""
    out = []
    for message in messages:
        kept = {k: v for k, v in message.items() if k not in ("weight", "tool_call_id")}
        if "tool_calls" in kept:
            kept["tool_calls"] = [c["function"] for c in kept["tool_calls"]]
        out.append(kept)
    return out


def test_a_conversation_with_calls_comes_back(tiny: Renderer) -> None:
    messages, tools, exact = read_messages(tiny, trajectory(tiny, HISTORY))
    assert exact and tools == []
    assert plain(messages) == plain(HISTORY)
    assert [m["weight"] for m in messages if m["role"] == "assistant"] == [0, 1]
    ids = [c["id"] for c in messages[2]["tool_calls"]]
    assert [m["tool_call_id"] for m in messages if m["role"] == "tool"] == ids


def test_tools_come_back_from_the_system_turn(qwen: Renderer) -> None:
    messages, tools, exact = read_messages(qwen, trajectory(qwen, HISTORY, tuple(TOOLS)))
    assert tools == list(TOOLS)
    assert exact
    assert plain(messages)[1:] == plain(HISTORY)[1:]
    alone = read_messages(qwen, trajectory(qwen, HISTORY[1:], tuple(TOOLS)))
    assert plain(alone[0]) == plain(HISTORY[1:]) and alone[2]


def test_a_reply_that_was_cut_comes_back_as_far_as_it_went(tiny: Renderer) -> None:
    whole = trajectory(tiny, HISTORY)
    cut = row_of(whole.ids.tolist()[:-1], range(len(whole.ids) - 2, len(whole.ids) - 1))
    messages, _, exact = read_messages(tiny, cut)
    assert exact and messages[-1]["role"] == "assistant" and messages[-1]["weight"] == 1


def test_a_call_that_was_written_otherwise_stays_text_where_text_is_exact(qwen: Renderer) -> None:
    odd = '<tool_call>\n{"arguments": {"command": "ls"}, "name": "bash"}\n</tool_call>'
    messages, _, exact = read_messages(qwen, trajectory(qwen, [HISTORY[1], {"role": "assistant", "content": odd}]))
    assert exact
    assert messages[-1] == {"role": "assistant", "content": odd, "weight": 1}


def test_what_the_template_drops_is_there_and_said_not_to_be_exact(qwen: Renderer) -> None:
    thought = {"role": "assistant", "content": "Hm.", "reasoning_content": "What now?"}
    before = qwen.render([HISTORY[1], thought], (), False)
    after = qwen.render([{"role": "user", "content": "And?"}, {"role": "assistant", "content": "Done."}], (), False)
    messages, _, exact = read_messages(qwen, row_of(before + after, range(len(before), len(before) + 2)))
    assert not exact
    assert messages[1] == thought | {"weight": 0}


def test_bytes_that_are_no_text_are_not_exact(tiny: Renderer) -> None:
    ids = tiny.tokenizer.encode("é", add_special_tokens=False).ids
    whole = trajectory(tiny, HISTORY).ids.tolist()
    assert len(ids) > 1, "the tiny tokenizer spells it in bytes"
    messages, _, exact = read_messages(
        tiny, row_of([*whole[:-1], ids[0], whole[-1]], range(len(whole), len(whole) + 1))
    )
    assert not exact and messages[-1]["content"] == "Done.\ufffd"


def test_lines_are_of_executions_that_scored(tiny: Renderer) -> None:
    rows = []
    members = []
    for name, score in (("a", 1.0), ("b", 0.25), ("c", None)):
        row = trajectory(tiny, HISTORY)
        rows.append(row_of(row.ids.tolist(), range(len(row.ids) - 2, len(row.ids)), name))
        members.append(
            Member(
                execution=name,
                group="g",
                score=score,
                in_baseline=True,
                in_loss=True,
                advantage=0.0,
                staleness=0,
                reason="",
                num_trajectories=1,
                num_targets=2,
            )
        )
    step = Microstep(index=0, minibatch=0, rows=tuple(rows))
    part = Minibatch(index=0, groups=("g",), num_executions=3, microsteps=(step,))
    batch = Batch(step=7, seed=1, members=tuple(members), minibatches=(part,), left_out=())
    lines = [orjson.loads(line) for line in chat_lines(tiny, batch, min_score=0.5)]
    assert [(line["step"], line["execution"], line["score"], line["exact"]) for line in lines] == [(7, "a", 1.0, True)]
    assert len(list(chat_lines(tiny, batch))) == 3
