"""Sub-agents that run beside their parent, spawn others, or are twins; chains that are compacted more than once."""

import json

from playing import Play
from scripted import BASH

from gyre.agents.messages import Message
from gyre.agents.session import Started
from gyre.events.types import CallStarted, ContextCompacted, SubAgentSpawned

TOOLS = (BASH,)
TASK = Message(role="user", content="Put the files in order.")


def spawn(*prompts: str) -> str:
    calls = (json.dumps({"name": "agent", "arguments": {"prompt": prompt}}) for prompt in prompts)
    return "".join(f"<tool_call>{call}</tool_call>" for call in calls)


def asked(prompt: str) -> tuple[Message, ...]:
    return Message(role="system", content="You are a helper."), Message(role="user", content=prompt)


def result(content: str) -> Message:
    return Message(role="tool", content=content)


def parents(play: Play) -> list[tuple[str, str]]:
    return [(event.call, event.parent_call) for event in play.events if isinstance(event, SubAgentSpawned)]


def classes(play: Play) -> list[str]:
    return [event.role_class for event in play.events if isinstance(event, CallStarted)]


def name(started: Started) -> str:
    return started.call.call


def test_a_sub_agent_of_a_sub_agent_belongs_to_it() -> None:
    play = Play()
    main = play.start((TASK,), TOOLS)
    play.complete(main, spawn("Look into the first half."))
    child = play.start(asked("Look into the first half."), TOOLS)
    play.complete(child, spawn("Look into the first quarter."))
    grandchild = play.start(asked("Look into the first quarter."), TOOLS)
    said = play.complete(grandchild, "nothing there")
    went_on = play.start((*asked("Look into the first quarter."), said, Message(role="user", content="Sure?")), TOOLS)
    assert parents(play) == [(name(child), name(main)), (name(grandchild), name(child))]
    assert went_on.call.rule == "continue"
    assert classes(play) == ["main", "sub-agent", "sub-agent", "sub-agent"]


def test_a_parent_that_does_not_wait_stays_the_main_agent() -> None:
    play = Play()
    reply = play.complete(play.start((TASK,), TOOLS), spawn("Count the files there."))
    going_on = (TASK, reply, result("It runs."))
    second = play.start(going_on, TOOLS)
    child = play.start(asked("Count the files there."), TOOLS)
    said = play.complete(second, "I wait.")
    play.complete(child, "seven")
    told = play.start((*going_on, said, Message(role="user", content="The agent is done: seven")), TOOLS)
    assert parents(play) == [(name(child), "s-c0")]
    assert told.call.rule == "continue"
    assert classes(play) == ["main", "main", "sub-agent", "main"]


def test_several_spawns_of_one_reply_are_told_apart_by_their_prompts() -> None:
    play = Play()
    main = play.start((TASK,), TOOLS)
    play.complete(main, spawn("Count the first half.", "Count the second half.", "Count the first half."))
    children = [play.start(asked(f"Count the {half} half."), TOOLS) for half in ("second", "first", "first")]
    assert parents(play) == [(name(child), name(main)) for child in children]
    again = play.start(asked("Count the second half."), TOOLS)
    assert again.call.classed_by == "same-request", "no fourth was asked for"


def test_a_chain_is_compacted_twice() -> None:
    play = Play()
    opening = (TASK,)
    for number in range(2):
        reply = play.complete(play.start(opening, TOOLS), f"working on part {number}")
        asks = (*opening, reply, Message(role="user", content="Sum up."))
        summary = play.complete(play.start(asks, TOOLS, hint="summary"), f"Part {number} of the files is in order now.")
        opening = (Message(role="user", content=f"Go on. So far: {summary.content}"),)
        play.start(opening, TOOLS, hint="main")
    compacted = [event for event in play.events if isinstance(event, ContextCompacted)]
    assert [event.summary_call for event in compacted] == ["s-c1", "s-c4"]
    assert classes(play) == ["main", "main-summary", "main"] * 2
