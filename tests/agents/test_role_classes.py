"""Compactions and sub-agents as live harnesses make them: what the gateway tells from the texts, and remembers."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from scripted import BASH, ScriptedEngine, Served, serving, tool_call

from gyre.agents.expected_trees import describe_tree

TASK = {"role": "user", "content": "Write the file."}
ASK = {"role": "user", "content": "Write down what has been done."}
DONE = "Two of the three files are written; the third one, c.txt, is still to be written by hand."
SYSTEM = {"role": "system", "content": "You write files."}
HINT = {"x-claude-code-request-class": "compaction"}


def run(case: Coroutine[Any, Any, None]) -> None:
    asyncio.run(case)


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def opening(summary: str, *before: str) -> dict[str, Any]:
    return {"role": "user", "content": "\n".join([*before, "So far:", summary, "Go on."])}


async def say(served: Served, *messages: Any, hint: bool = False) -> dict[str, Any]:
    body = {"model": "policy", "messages": list(messages), "tools": [BASH]}
    async with aiohttp.ClientSession(headers=HINT if hint else {}) as http:
        response = await http.post(served.url() + "/chat/completions", json=body)
        assert response.status == 200, await response.text()
        reply: dict[str, Any] = (await response.json())["choices"][0]["message"]
        return reply


async def tree(served: Served) -> tuple[str, ...]:
    return describe_tree(await served.events())


def test_a_summary_is_known_by_what_stands_in_its_tags(tmp_path: Path) -> None:
    """Claude Code 2.1.332 takes out the analysis and the tags."""
    summary = f"<analysis>\nWhat was done?\n</analysis>\n\n<summary>\n{DONE}\n</summary>"

    async def case() -> None:
        engine = ScriptedEngine(script=lambda n, _: ["a.txt and b.txt", summary, "c.txt", "done"][n])
        async with serving(tmp_path, engine) as served:
            first = await say(served, TASK)
            await say(served, TASK, first, ASK, hint=True)
            await say(served, opening(DONE))
            assert await tree(served) == (
                "main 0 root",
                "main 1 compaction of main-summary 0",
                "main-summary 0 continue main 0",
            )

    run(case())


def test_a_summary_that_nothing_announced_is_known_by_the_opening_that_holds_it(tmp_path: Path) -> None:
    """Qwen Code 0.24.4 asks for it at the end of the history, with all tools, where the context has room for both."""

    async def case() -> None:
        script = ["a.txt and b.txt", f"<state_snapshot>\n{DONE}\n</state_snapshot>", "c.txt"]
        async with serving(tmp_path, ScriptedEngine(script=lambda n, _: script[n])) as served:
            first = await say(served, SYSTEM, TASK)
            await say(served, SYSTEM, TASK, first, ASK)
            await say(served, SYSTEM, opening(script[1]))
            assert await tree(served) == (
                "main 0 root",
                "main 1 compaction of main-summary 0",
                "main-summary 0 continue main 0",
            )

    run(case())


def test_a_short_answer_that_comes_up_again_is_no_summary(tmp_path: Path) -> None:
    async def case() -> None:
        script = ["All files are written.", "Nothing to do."]
        async with serving(tmp_path, ScriptedEngine(script=lambda n, _: script[n])) as served:
            await say(served, SYSTEM, TASK)
            await say(served, SYSTEM, {"role": "user", "content": "Is it true? All files are written."})
            assert await tree(served) == ("main 0 root", "main 1 edit main 0")

    run(case())


def test_a_summary_is_taken_up_once(tmp_path: Path) -> None:
    """Qwen Code rewrites its opening one call after the compaction; a gateway that starts again knows it too."""

    async def case() -> None:
        script = ["a.txt and b.txt", DONE, tool_call("ls"), "done"]
        engine = ScriptedEngine(script=lambda n, _: script[n])
        async with serving(tmp_path, engine) as served:
            first = await say(served, SYSTEM, TASK)
            await say(served, SYSTEM, TASK, first, ASK, hint=True)
            await say(served, SYSTEM, opening(DONE))
            log = served.log
        engine.script = lambda n, _: "done"
        async with serving(tmp_path, engine, log=log) as again:
            await say(again, SYSTEM, opening(DONE, "A reminder."))
            await say(again, SYSTEM, opening(DONE, "Another reminder."))
            assert await tree(again) == (
                "main 0 root",
                "main 1 compaction of main-summary 0",
                "main 2 edit main 0",
                "main 3 edit main 0",
                "main-summary 0 continue main 0",
            )

    run(case())


def test_equal_prompts_are_children_of_the_calls_that_spawned_them(tmp_path: Path) -> None:
    """Two calls that give the same prompt: the second child is the second call's, once the first is taken up."""
    child = {"role": "user", "content": "Write c.txt, and say when it is there."}
    spawn = tool_call(child["content"])

    async def case() -> None:
        engine = ScriptedEngine(script=lambda n, _: spawn if n < 2 else f"done {n}")
        async with serving(tmp_path, engine) as served:
            first = await say(served, TASK)
            id_ = first["tool_calls"][0]["id"]
            await say(served, TASK, first, {"role": "tool", "tool_call_id": id_, "content": "started"})
            await say(served, child)
            await say(served, {**child, "content": "A reminder. " + child["content"]})
            assert (await tree(served))[2:] == ("sub-agent 0 sub-agent of main 0", "sub-agent 1 sub-agent of main 1")

    run(case())


TWINS = {
    (0, 1): (
        "sub-agent 0 sub-agent of main 0",
        "sub-agent 1 continue sub-agent 0 (superseded)",
        "sub-agent 2 retry sub-agent 1",
        "sub-agent 3 sub-agent of main 0",
        "sub-agent 4 continue sub-agent 3",
    ),
    (1, 0): (
        "sub-agent 0 sub-agent of main 0",
        "sub-agent 1 continue sub-agent 0",
        "sub-agent 2 sub-agent of main 0",
        "sub-agent 3 continue sub-agent 2 (superseded)",
        "sub-agent 4 retry sub-agent 3",
    ),
}
"""Order in which the two go on; the first of them asks once more -> their lines."""


@pytest.mark.parametrize("order", TWINS)
@pytest.mark.parametrize("num_more", [0, 1])
def test_twins_that_say_the_same_go_on_each_from_its_own_reply(
    tmp_path: Path, order: tuple[int, int], num_more: int
) -> None:
    """Nothing but the minted ids tells their histories apart. `num_more`: messages that the second alone has."""
    child = {"role": "user", "content": "Write c.txt, and say when it is there."}
    spawn = tool_call(child["content"])

    async def case() -> None:
        engine = ScriptedEngine(script=lambda n, _: spawn * 2 if n == 0 else tool_call("touch c.txt"))
        async with serving(tmp_path, engine) as served:
            await say(served, TASK)
            twins = [await say(served, child), await say(served, child)]
            histories = [
                (child, twin, {"role": "tool", "tool_call_id": twin["tool_calls"][0]["id"], "content": "rc=0"})
                for twin in twins
            ]
            await say(served, *histories[order[0]])
            await say(served, *histories[order[1]], *[{"role": "user", "content": "Go on."}] * num_more)
            await say(served, *histories[order[0]])
            assert (await tree(served))[1:] == TWINS[order]

    run(case())


@pytest.mark.parametrize("number", [0, 1])
def test_twins_are_told_apart_behind_replies_without_tool_calls_too(tmp_path: Path, number: int) -> None:
    child = {"role": "user", "content": "Write c.txt, and say when it is there."}
    replies = [tool_call(child["content"]) * 2, *[tool_call("touch c.txt")] * 2, *["It is there."] * 2, "Yes."]

    async def case() -> None:
        async with serving(tmp_path, ScriptedEngine(script=lambda n, _: replies[n])) as served:
            await say(served, TASK)
            twins = [await say(served, child), await say(served, child)]
            histories = [
                (child, twin, {"role": "tool", "tool_call_id": twin["tool_calls"][0]["id"], "content": "rc=0"})
                for twin in twins
            ]
            for history in histories:
                await say(served, *history)
            await say(served, *histories[number], said("It is there."), {"role": "user", "content": "Really?"})
            line = ("sub-agent 2 continue sub-agent 1", "sub-agent 4 continue sub-agent 3")[number]
            assert line in await tree(served)
            assert len(await tree(served)) == 6

    run(case())
