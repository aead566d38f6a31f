"""What the scripted policy says in each scenario, to whom, and with which of the tools that are offered."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from gyre.agents.scenarios import (
    CHILD_TASK,
    CHILD_WORD,
    COMMAND,
    FILLER,
    INSTRUCTION,
    INTRO,
    INTRO_AGAIN,
    LAST_WORD,
    NOTED,
    SCENARIOS,
    SUBMIT,
    SUMMARY,
    say,
    spawn_call,
    tool_call,
)
from gyre.agents.scripted_policy import MERGES, ScriptedPolicy, make_renderer
from gyre.errors import EngineError

RENDERER = make_renderer()
BASH = {"type": "function", "function": {"name": "bash", "parameters": {"properties": {"command": {"type": "string"}}}}}
TASK = {"role": "user", "content": INSTRUCTION}


def prompt(*messages: dict[str, Any], tools: Any = (BASH,)) -> str:
    return RENDERER.tokenizer.decode(list(RENDERER.render(list(messages), list(tools))), skip_special_tokens=False)


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_scripted_policy_calls_the_tool_that_the_harness_has() -> None:
    def tool(name: str, required: tuple[str, ...] = (), **kinds: str) -> dict[str, object]:
        properties = {key: {"type": kind} for key, kind in kinds.items()}
        parameters = {"type": "object", "properties": properties, "required": list(required)}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    read = tool("Read", path="string")
    claude = tool("Bash", ("command", "description"), command="string", description="string")
    assert tool_call([read, claude], "ls") == ("Bash", {"command": "ls", "description": "Write a file"})
    assert tool_call([tool("exec_command", ("cmd",), cmd="string")], "ls") == ("exec_command", {"cmd": "ls"})
    assert tool_call([tool("shell", command="array")], "ls") == ("shell", {"command": ["/bin/sh", "-c", "ls"]})
    qwen = tool("run_shell_command", ("is_background",), command="string", is_background="boolean")
    assert tool_call([qwen], "ls") == ("run_shell_command", {"command": "ls", "is_background": False})
    assert tool_call([read], "ls") == ("", {})


def test_scripted_policy_ends_and_ends_again_for_who_does_not_hear() -> None:
    acted = said(say(prompt(TASK), command="ls"))
    assert '"command": "ls"' in acted["content"]
    assert say(prompt(TASK, acted)) == LAST_WORD
    assert SUBMIT in say(prompt(TASK, acted, said(LAST_WORD)))
    many = [said(say(prompt(TASK, acted, said(LAST_WORD))))] * 2
    assert say(prompt(TASK, acted, said(LAST_WORD), *many)) == LAST_WORD, "and not for ever"
    assert json.loads(say(prompt(TASK, tools=()))) == {"title": "Write a file"}


SPAWN = {
    "type": "function",
    "function": {
        "name": "Agent",
        "description": "Kinds: general-purpose",
        "parameters": {
            "properties": {
                "description": {"type": "string"},
                "prompt": {"type": "string"},
                "subagent_type": {"type": "string"},
                "run_in_background": {"type": "boolean"},
            },
            "required": ["description", "prompt"],
        },
    },
}
WAIT = {
    "type": "function",
    "function": {"name": "wait_agent", "parameters": {"properties": {"targets": {"type": "array"}}}},
}


def test_the_agent_spawns_and_its_sub_agent_acts() -> None:
    assert spawn_call([BASH]) == ("", {})
    assert spawn_call([BASH, SPAWN]) == (
        "Agent",
        {
            "prompt": CHILD_TASK,
            "description": "Write a file",
            "run_in_background": False,
            "subagent_type": "general-purpose",
        },
    )
    spawned = said(say(prompt(TASK, tools=(BASH, SPAWN)), "sub-agent"))
    assert CHILD_TASK in spawned["content"]
    assert say(prompt(TASK, spawned, tools=(BASH, SPAWN)), "sub-agent") == LAST_WORD
    answer = {"role": "tool", "content": '{"agent_id":"7f"}'}
    waiting = said(say(prompt(TASK, spawned, answer, tools=(BASH, SPAWN, WAIT)), "sub-agent"))
    assert '"targets": ["7f"]' in waiting["content"]
    assert say(prompt(TASK, spawned, answer, waiting, tools=(BASH, SPAWN, WAIT)), "sub-agent") == LAST_WORD
    child = {"role": "user", "content": f"A reminder.\n{CHILD_TASK}"}
    acted = said(say(prompt(child), "sub-agent"))
    assert "hello.txt" in acted["content"]
    assert say(prompt(child, acted), "sub-agent") == CHILD_WORD


def test_the_context_is_filled_until_a_summary_is_asked_for() -> None:
    first = said(say(prompt(TASK), "compaction", room=1000))
    assert 400 < first["content"].count(FILLER) * len(FILLER) <= 500
    second = said(say(prompt(TASK, first), "compaction", room=500))
    assert 400 < second["content"].count(FILLER) * len(FILLER) <= 500
    assert "hello.txt" in say(prompt(TASK, first, second), "compaction"), "it was not compacted"
    asks = {"role": "user", "content": "Write a summary of the conversation."}
    assert say(prompt(TASK, first, second, asks), "compaction") == SUMMARY
    assert say(prompt(asks, tools=()), "compaction") == SUMMARY
    tagged = say(prompt(TASK, first, {**asks, "content": "A summary, in <summary>."}), "compaction")
    assert tagged.startswith("<analysis>")
    assert f"<summary>\n{SUMMARY}\n</summary>" in tagged
    opening = {"role": "user", "content": f"Go on. {SUMMARY}"}
    acted = said(say(prompt(opening, second), "compaction"))
    assert "hello.txt" in acted["content"]
    assert say(prompt(opening, second, acted), "compaction") == LAST_WORD


def test_a_reply_that_was_cut_is_said_in_other_words() -> None:
    whole = say(prompt(TASK), "cut-after-block")
    assert whole.startswith(INTRO)
    assert COMMAND.partition(">")[2] in whole
    assert SCENARIOS["cut-after-block"].breaks_at in whole.partition("<tool_call>")[2]
    again = say(prompt(TASK, said(INTRO)), "cut-after-block")
    assert again.startswith(INTRO_AGAIN)
    assert say(prompt(TASK, said(INTRO), said(again)), "cut-after-block") == LAST_WORD
    assert SCENARIOS["cut"].breaks_at in LAST_WORD


def test_the_engine_fails_once_and_says_what_no_tokenizer_would() -> None:
    renderer = make_renderer(MERGES)
    policy = ScriptedPolicy(renderer, SCENARIOS["retry"], 10_000)
    acted = said(say(prompt(TASK)))
    ids = np.array(renderer.render([TASK, acted], [BASH]), dtype=np.int32)

    async def generate() -> str:
        options = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 999, "stop_token_ids": (7,), "extra_key": ""}
        output = (await policy.generate("r", ids, **options)).output_ids  # type: ignore[arg-type]
        assert output[-1] == 7
        assert len(output) == len(LAST_WORD) + 1, "a token a byte"
        return str(renderer.tokenizer.decode(list(output[:-1])))

    with pytest.raises(EngineError):
        asyncio.run(generate())
    assert asyncio.run(generate()) == LAST_WORD
    assert [len(asked.output_ids) for asked in policy.asked] == [0, len(LAST_WORD) + 1]


def test_two_sub_agents_get_the_same_task_and_one_in_the_background_is_not_waited_for() -> None:
    both = say(prompt(TASK, tools=(BASH, SPAWN)), "twins")
    assert both.count(CHILD_TASK) == 2
    alone = say(prompt(TASK, tools=(BASH, SPAWN, WAIT)), "background")
    assert '"run_in_background": true' in alone
    answer = {"role": "tool", "content": '{"agent_id":"7f"}'}
    assert say(prompt(TASK, said(alone), answer, tools=(BASH, SPAWN, WAIT)), "background") == LAST_WORD
    told = {"role": "user", "content": "It has ended."}
    assert say(prompt(TASK, said(alone), answer, said(LAST_WORD), told, tools=(BASH, SPAWN)), "background") == NOTED


def test_a_sub_agent_in_the_background_gets_its_reply_after_the_last_word() -> None:
    policy = ScriptedPolicy(RENDERER, SCENARIOS["background"], 10_000)
    spawned = said(say(prompt(TASK, tools=(BASH, SPAWN)), "background"))
    answered: list[str] = []

    async def ask(name: str, *messages: dict[str, Any]) -> None:
        ids = np.array(RENDERER.render(list(messages), [BASH, SPAWN]), dtype=np.int32)
        options = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 999, "stop_token_ids": (7,), "extra_key": ""}
        await policy.generate(name, ids, **options)  # type: ignore[arg-type]
        answered.append(name)

    async def case() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ask("sub-agent", {"role": "user", "content": CHILD_TASK}))
            await asyncio.sleep(0.01)
            assert answered == []
            await ask("agent", TASK, spawned)

    asyncio.run(case())
    assert answered == ["agent", "sub-agent"]
