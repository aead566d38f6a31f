"""Pure. What harnesses are put through, and what a policy that needs no weights says then: prompt -> reply.

Invariant: the reply follows from the prompt, the tools that it offers and the room that is left, so a request that
comes again is answered as before. Tool calls are made for the tools that the harness offers.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

FILE, CONTENT = "hello.txt", "written by a tool\n"
COMMAND = f"printf 'written by a tool\\n' > {FILE}"
INSTRUCTION = f"Write `{CONTENT.strip()}` to the file {FILE}, with a shell command. Then end."
CHILD_TASK = f"You are asked for one file: run the shell command that makes {FILE}, and say when it is there."
LAST_WORD, CHILD_WORD = "The file is written, and there is nothing more to do.", "The file that was asked for is there."
NOTED = "It is there, as the sub-agent says."
SUMMARY = "Looked around, as a first step; the file is still to be written, with a shell command."
INTRO, INTRO_AGAIN = "One command writes the file.", "Once more: one command writes the file."
LOOK = "echo looked"
ACTS = (LAST_WORD, CHILD_WORD, NOTED, "<tool_call>")
SPAWNING = ("sub-agent", "twins", "background")
FILLER = "Nothing here needs a change. "
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""For harnesses that go on until they hear it, whatever else is said."""
TITLE = '{"title": "Write a file"}'
NUM_FILLED = 2
"""Long replies that fill the context: the last of them may stay beside the summary, and must leave room there."""
FULL = 0.9
"""Of the context, once it is filled."""

SHELL_TOOLS = ("bash", "exec_command", "shell_command", "run_shell_command", "shell", "local_shell", "execute_command")
SPAWN_TOOLS, WAIT_TOOLS = ("agent", "task", "spawn_agent"), ("wait_agent",)
COMMANDS, PROMPTS = ("command", "cmd", "script"), ("prompt", "message")
_AGENT_TYPES = ("general-purpose", "general")
_WRAPPED = {
    "<summary>": f"<analysis>\nThere is little to say.\n</analysis>\n\n<summary>\n{SUMMARY}\n</summary>",
    "<state_snapshot>": f"<state_snapshot>\n{SUMMARY}\n</state_snapshot>",
}
"""Forms in which a harness wants it."""
_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)
_SUMMARY_ASKED = re.compile(r"summar|checkpoint|state_snapshot", re.IGNORECASE)
_AGENT_ID = re.compile(r'"agent_id": ?"([^"]+)"')

Name = Literal["main", "sub-agent", "twins", "background", "compaction", "retry", "cut", "cut-after-block"]


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    name: Name
    about: str
    fails_at: str = ""
    """The engine fails, once, where the policy would say this."""
    breaks_at: str = ""
    """The line to the harness breaks, once, where a reply holds this."""
    holds_sub_agents: bool = False
    """Sub-agents get no reply before the agent has had its last word."""


SCENARIOS: Mapping[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(name="main", about="a tool call, its result, a last word"),
        Scenario(name="sub-agent", about="the tool call is left to a sub-agent"),
        Scenario(name="twins", about="two sub-agents with the same task, side by side"),
        Scenario(name="background", about="a sub-agent that the agent does not wait for", holds_sub_agents=True),
        Scenario(name="compaction", about="replies fill the context until the harness asks for a summary"),
        Scenario(name="retry", about="the engine fails for good in the second call: 503", fails_at=LAST_WORD),
        Scenario(name="cut", about="the connection breaks within the first block of a reply", breaks_at="nothing more"),
        Scenario(name="cut-after-block", about="it breaks within the second block", breaks_at="to the end"),
    )
}


def say(prompt: str, scenario: str = "main", *, command: str = COMMAND, room: int = 0) -> str:
    """The reply. `room`: tokens that it may have so that the context is `FULL` after it."""
    turns = _TURN.findall(prompt)
    tools = json.loads(turns[0][1]) if turns and turns[0][1].startswith('[{"') else ()
    said = [content for role, content in turns if role == "assistant"]
    if scenario == "compaction" and SUMMARY not in prompt:
        if _asks_summary(turns, tools, said):
            return next((text for tag, text in _WRAPPED.items() if tag in prompt), SUMMARY)
        if tools and len(said) < NUM_FILLED:
            num = room // (NUM_FILLED - len(said)) // len(FILLER)
            return FILLER * max(1, num) + "\n" + _call(tool_call(tools, LOOK))
    if not tools:
        return TITLE  # a side call: a title, or the like
    acts = [content for content in said if LOOK not in content and any(act in content for act in ACTS)]
    steps = list(_steps(scenario, prompt, turns, tools, command))
    if len(acts) < len(steps):
        return steps[len(acts)]
    return _call(tool_call(tools, SUBMIT)) if len(acts) <= len(steps) + 1 else LAST_WORD


def is_sub_agent(prompt: str) -> bool:
    """Whether one asks, rather than the agent that spawned it."""
    opening = prompt[: prompt.find("<|im_start|>assistant\n")]
    return CHILD_TASK in opening and INSTRUCTION not in opening


def _steps(
    scenario: str, prompt: str, turns: Sequence[tuple[str, str]], tools: Sequence[Any], command: str
) -> Iterator[str]:
    if is_sub_agent(prompt):
        yield _call(tool_call(tools, command))
        yield CHILD_WORD
    elif scenario in SPAWNING:
        yield _call(spawn_call(tools, background=scenario == "background")) * (2 if scenario == "twins" else 1)
        waits = _offered(tools, WAIT_TOOLS)
        for agent in dict.fromkeys(_AGENT_ID.findall(prompt)) if waits and scenario != "background" else ():
            yield _call((waits, {"targets": [agent]}))
        yield LAST_WORD
        yield NOTED
    elif scenario == "cut-after-block":
        broken = any(role == "assistant" and content.strip() == INTRO for role, content in turns)
        yield (INTRO_AGAIN if broken else INTRO) + "\n" + _call(tool_call(tools, f"{command} # to the end"))
        yield LAST_WORD
    else:
        yield _call(tool_call(tools, command))
        yield LAST_WORD


def _asks_summary(turns: Sequence[tuple[str, str]], tools: Sequence[Any], said: Sequence[str]) -> bool:
    """In its last message, or, of a request without tools, anywhere."""
    asked = [content for role, content in turns if role == "user"]
    if not tools:
        return any(_SUMMARY_ASKED.search(content) for role, content in turns if role in ("user", "system"))
    return bool(said and asked and _SUMMARY_ASKED.search(asked[-1]) and len(asked) > 1)


def tool_call(tools: Sequence[Any], command: str) -> tuple[str, Mapping[str, Any]]:
    """(name, arguments) that run `command` with one of `tools`; the name is empty when none runs commands."""
    return _fill(tools, SHELL_TOOLS, COMMANDS, command)


def spawn_call(tools: Sequence[Any], *, background: bool = False) -> tuple[str, Mapping[str, Any]]:
    """(name, arguments) that start a sub-agent and wait for it, or do not where that can be said; the name is empty
    when none starts one."""
    name, arguments = _fill(tools, SPAWN_TOOLS, PROMPTS, CHILD_TASK)
    known = _properties(tools, name)
    told = next((tool["function"].get("description", "") for tool in tools if tool["function"]["name"] == name), "")
    kinds = {"subagent_type": next((kind for kind in _AGENT_TYPES if kind in told), _AGENT_TYPES[-1])}
    more = {"run_in_background": background, **kinds}
    return name, {**arguments, **{key: value for key, value in more.items() if key in known}}


def _fill(tools: Sequence[Any], names: Sequence[str], keys: Sequence[str], text: str) -> tuple[str, dict[str, Any]]:
    """The first of `names` that is offered, with `text` under the first of `keys` that it knows, and whatever else its
    schema requires."""
    name = _offered(tools, names)
    if not name:
        return "", {}
    properties = _properties(tools, name)
    key = next((key for key in keys if key in properties), keys[0])
    is_list = properties.get(key, {}).get("type") == "array"
    arguments: dict[str, Any] = {key: ["/bin/sh", "-c", text] if is_list else text}
    for required in _parameters(tools, name).get("required") or ():
        kind = properties.get(required, {}).get("type")
        arguments.setdefault(required, {"boolean": False, "number": 10, "integer": 10}.get(kind, "Write a file"))
    return name, arguments


def _offered(tools: Sequence[Any], names: Sequence[str]) -> str:
    offered = {str(tool["function"]["name"]).lower(): str(tool["function"]["name"]) for tool in reversed(tools)}
    return next((offered[name] for name in names if name in offered), "")


def _parameters(tools: Sequence[Any], name: str) -> Mapping[str, Any]:
    found = (tool["function"].get("parameters") for tool in tools if tool["function"]["name"] == name)
    return next(found, None) or {}


def _properties(tools: Sequence[Any], name: str) -> Mapping[str, Any]:
    return _parameters(tools, name).get("properties") or {}


def _call(call: tuple[str, Mapping[str, Any]]) -> str:
    name, arguments = call
    spelled = f'{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments)}}}'
    return f"<tool_call>{spelled}</tool_call>" if name else ""
