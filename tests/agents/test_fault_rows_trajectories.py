"""Faults that users of comparable systems met when trajectories were built: tests/test_fault_rows.py has the table."""

import asyncio
import json
from pathlib import Path
from typing import Any

import families
import msgspec
import pytest
from playing import Play
from scripted import BASH, decode, full_ids, serving, tool_call

from gyre.agents.messages import Message
from gyre.events.tokens import num_tokens, unpack_ids
from gyre.events.types import (
    BranchForked,
    CallCompleted,
    CallDelivered,
    CallStarted,
    ContextCompacted,
    Event,
    SubAgentSpawned,
    TokensDrifted,
)
from gyre.projections import tree as trees

USER = Message(role="user", content="task")
MORE = Message(role="user", content="more")
SPAWN = '{"prompt":  "Count the files, please.", "limit": 5000.0}'
"""Arguments as no serialiser would write them again."""


def said_first(play: Play) -> Message:
    return play.complete(
        play.start((USER,), (BASH,)), f'<tool_call>{{"name": "agent", "arguments": {SPAWN}}}</tool_call>'
    )


def comes_back(reply: Message, drift: str) -> Message:
    """The reply as the harness sends it: as it was, written anew, or as something else."""
    if drift == "none":
        return reply
    if drift == "diverging":
        return msgspec.structs.replace(reply, content="I meant something else.")
    (call,) = reply.tool_calls
    arguments = json.dumps({"limit": 5000, "prompt": "Count the files, please."})
    return msgspec.structs.replace(reply, tool_calls=(msgspec.structs.replace(call, arguments=arguments),))


def grown(play: Play) -> trees.Tree:
    """The tree that training sees; every reply arrived."""
    tree = trees.Tree("s")
    for event in play.events:
        tree = trees.evolve(tree, event)
        if isinstance(event, CallCompleted):
            told = CallDelivered(execution="x", session="s", call=event.call, delivered=True)
            tree = trees.evolve(tree, told)
    return tree


def of(play: Play, kind: type[Event]) -> list[Any]:
    return [event for event in play.events if isinstance(event, kind)]


def test_rllm_772_interleaved_parent_and_sub_agent_keep_one_open_tip_each() -> None:
    play = Play()
    parent: tuple[Message, ...] = (USER,)
    child: tuple[Message, ...] = (Message(role="system", content="sub"), USER)
    for turn in range(5):
        parent = (*parent, play.turn(parent, f"p{turn}"), MORE)
        child = (*child, play.turn(child, f"c{turn}"), MORE)
    assert [call.rule for call in of(play, CallStarted)] == ["root", "root"] + ["continue"] * 8
    tree = grown(play)
    assert len(trees.tips(tree)) == 2, "two rows, not one a turn"
    assert trees.stats(tree).num_targets == sum(num_tokens(e.sampled) for e in of(play, CallCompleted))


@pytest.mark.parametrize("drift", ["none", "re-rendered", "diverging"])
@pytest.mark.parametrize("kind", ["condensation", "sub-agent", "best-of-n", "retry", "edit"])
def test_uni_agent_51_a_tree_holds_every_fork_kind_with_every_drift(kind: str, drift: str) -> None:
    play = Play()
    reply = said_first(play)
    first = of(play, CallStarted)[0].call
    result = Message(role="tool", content="two")
    history = (USER, comes_back(reply, drift), result)
    tools = (BASH,)
    match kind:
        case "condensation":
            asks = (*history, Message(role="user", content="Sum up."))
            play.complete(play.start(asks, tools, hint="summary"), "Two files have been counted so far.")
            opening = (Message(role="user", content="Go on from: Two files have been counted so far."),)
            play.complete(play.start(opening, tools), "done")
            (compacted,) = of(play, ContextCompacted)
            assert (compacted.call, compacted.summary_call) == ("s-c2", "s-c1")
        case "sub-agent":
            child = (Message(role="user", content="Count the files, please."),)
            play.complete(play.start(child, ()), "two")
            play.complete(play.start(history, tools), "Two.")
            (spawned,) = of(play, SubAgentSpawned)
            assert (spawned.call, spawned.parent_call) == ("s-c1", first)
        case "best-of-n":
            begun = [play.start(history, tools) for _ in range(3)]
            replies = [play.complete(call, f"number {n}") for n, call in enumerate(begun)]
            for call, said in zip(begun, replies, strict=True):
                went_on = play.start((*history, said, MORE), tools)
                assert (went_on.call.rule, went_on.call.base) == ("continue", call.call.call)
        case "retry":
            begun = [play.start(history, tools)]
            play.fail(begun[0])
            begun.append(play.start(history, tools))
            assert begun[1].input_ids.tolist() == begun[0].input_ids.tolist()
            assert num_tokens(begun[1].call.context) == 0
            play.complete(begun[1], "there")
        case _:
            play.complete(play.start((*history, MORE), tools), "fine")
            play.complete(play.start((*history, Message(role="user", content="another")), tools), "so")
    for started in play.started:
        whole = full_ids(play.events, started.call.call)
        assert started.input_ids.tolist() == whole[: len(started.input_ids)]
    drifted = of(play, TokensDrifted)
    if drift == "diverging":
        assert {event.source for event in drifted} == {first}
        assert "I meant something else." in decode(unpack_ids(drifted[0].shown))
        assert SPAWN in decode(unpack_ids(drifted[0].sampled))
    else:
        assert not drifted
        kept = full_ids(play.events, first)
        later = next(s for s in play.started if s.call.placed_by == "tool-call-id")
        assert later.input_ids[: len(kept)].tolist() == kept, "what was sampled, however it was written"
    forks = {"edit": {"edit"}, "retry": {"retry"}, "best-of-n": {"retry"}}.get(kind, set())
    assert {event.kind for event in of(play, BranchForked)} == forks | ({"drift"} if drift == "diverging" else set())
    assert trees.stats(grown(play)).num_targets == sum(num_tokens(e.sampled) for e in of(play, CallCompleted))


def test_nemo_rl_2821_old_reasoning_stays_over_48_tool_turns() -> None:
    """The template drops it from older turns; what was sampled is kept, nothing is compared as text."""
    play = Play(families.renderer("qwen3"))
    history: tuple[Message, ...] = (USER,)
    before: list[int] = []
    for turn in range(48):
        started = play.start(history, (BASH,))
        assert started.input_ids[: len(before)].tolist() == before
        said = play.complete(started, f"<think>\nthought {turn}\n</think>\n\n" + tool_call(f"ls {turn}"))
        assert said.reasoning == f"thought {turn}" and len(said.tool_calls) == 1
        before = full_ids(play.events, started.call.call)
        history = (*history, said, Message(role="tool", content=f"r{turn}"))
        if turn % 10 == 9:
            history = (*history, MORE)
    assert [call.rule for call in of(play, CallStarted)] == ["root"] + ["continue"] * 47
    assert not of(play, BranchForked)


def test_nemo_gym_1787_a_reply_that_came_back_changed_is_an_event_and_no_assertion() -> None:
    play = Play(families.renderer("qwen3"))
    said = play.complete(play.start((USER,)), "<think>\nhm\n</think>\n\nyes")
    for content in ("yes ", "no", "", "<think>\nhm\n</think>\n\nyes", "yes<|im_end|>"):
        started = play.start((USER, msgspec.structs.replace(said, content=content), MORE))
        assert started.call.rule == "fork"
    assert len(of(play, TokensDrifted)) == 5
    assert {event.kind for event in of(play, BranchForked)} == {"drift"}


def test_verifiers_955_the_tool_set_is_part_of_what_is_matched() -> None:
    play = Play()
    said = play.complete(play.start((USER,), (BASH,)), "yes")
    other = {**BASH, "function": {**BASH["function"], "description": "Another."}}
    for tools in ((), (other,), (BASH, other)):
        assert play.start((USER, said, MORE), tools).call.rule == "root"
    assert play.start((USER, said, MORE), (BASH,)).call.rule == "continue"


def test_miles_2292_a_rewind_of_177_turns_is_a_branch() -> None:
    play = Play()
    history: tuple[Message, ...] = (USER,)
    for _ in range(178):
        history = (*history, play.turn(history, "x"), MORE)
    started = play.start((*history[:3], Message(role="user", content="Here is what happened: much.")))
    assert (started.call.rule, started.call.base) == ("fork", "s-c1")
    assert len(trees.leaves(grown(play))) == 2, "nothing was taken back"


def test_miles_3311_an_invalid_request_changes_nothing(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path) as served:
            asked: list[Any] = [{"role": "user", "content": "a"}]
            asked += [await served.say(*asked), {"role": "user", "content": "b"}]
            await served.until(CallDelivered)
            before = await served.events()
            image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
            for messages in (
                [*asked, image],
                [],
                [*asked, {"role": "robot"}],
                [*asked, {"role": "user", "content": 3}],
            ):
                status, _ = await served.post({"messages": messages})
                assert status == 400
            assert await served.events() == before
            await served.say(*asked)
            assert [e.rule for e in await served.events(CallStarted)] == ["root", "continue"]

    asyncio.run(asyncio.wait_for(case(), 60))


def test_areal_1627_orphans_of_retries_are_no_leaves_of_their_own() -> None:
    play = Play()
    for _ in range(3):
        play.fail(play.start((USER,)))
    said = play.turn((USER,), "at last")
    play.turn((USER, said, MORE), "done")
    tree = grown(play)
    assert len(trees.tips(tree)) == 1
    assert trees.stats(tree).num_targets == sum(num_tokens(e.sampled) for e in of(play, CallCompleted))
