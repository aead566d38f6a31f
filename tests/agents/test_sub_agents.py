"""Sub-agents that run beside their parent, spawn others, or are twins; chains that are compacted more than once."""

import json

import pytest
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


def test_a_sub_agent_whose_call_failed_asks_again_and_is_no_twin() -> None:
    play = Play()
    play.complete(play.start((TASK,), TOOLS), spawn("Count the files.", "Count the files."))
    child = play.start(asked("Count the files."), TOOLS)
    play.fail(child)
    again = play.start(asked("Count the files."), TOOLS)
    assert (again.call.classed_by, parents(play)) == ("same-request", [(name(child), "s-c0")])


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


@pytest.mark.parametrize("told", ["header", "quote", "nothing"])
def test_a_summary_of_a_sub_agent_has_a_class_of_its_own(told: str) -> None:
    play = Play()
    main = play.start((TASK,), TOOLS)
    play.complete(main, spawn("Look into the first half."))
    history = asked("Look into the first half.")
    reply = play.complete(play.start(history, TOOLS), "I have read the files a, b and c.")
    if told == "quote":
        transcript = Message(role="user", content=f"Sum up this talk: {reply.content}")
        summing = play.start((Message(role="system", content="You sum up."), transcript))
    else:
        asks = (*history, reply, Message(role="user", content="Sum up."))
        summing = play.start(asks, TOOLS, hint="summary" if told == "header" else "")
    summary = play.complete(
        summing, "Of the first half the files a, b and c have been read; d to f are left to be read."
    )
    opening = (history[0], Message(role="user", content=f"Go on. So far: {summary.content}"))
    after = play.start(opening, TOOLS)
    (compacted,) = [event for event in play.events if isinstance(event, ContextCompacted)]
    assert (compacted.call, compacted.summary_call) == (name(after), name(summing))
    assert after.call.role_class == "sub-agent"
    assert (compacted.summary_class or summing.call.role_class) == "sub-agent-summary"


def test_an_assistant_message_that_nobody_said_is_part_of_the_opening() -> None:
    """As some harnesses put one between their reminders and the prompt."""
    play = Play()
    main = play.start((TASK,), TOOLS)
    play.complete(main, spawn("Count the first half.", "Count the second half."))
    children = []
    for half in ("first", "second"):
        reminder = (asked("x")[0], Message(role="user", content="Today is Monday."))
        prompt = Message(role="user", content=f"Count the {half} half.")
        opening = (*reminder, Message(role="assistant", content="Got it. Thanks for the context!"), prompt)
        children.append(play.start(opening, TOOLS))
        said = play.complete(children[-1], f"The {half} half has seven files.")
        assert play.start((*opening, said, Message(role="user", content="Sure?")), TOOLS).call.rule == "continue"
    assert parents(play) == [(name(child), name(main)) for child in children]
    assert classes(play) == ["main"] + ["sub-agent"] * 4
