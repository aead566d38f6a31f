"""Trees under random harnesses: the tokens of every call are those that its events say, and only grow."""

from typing import Any

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from playing import Play, opened
from scripted import BASH, RENDERER, decode, encode, full_ids, generation, tool_call

from gyre.agents import chat, endings, lineage, session
from gyre.agents.messages import Message, ToolCall, prefix_digests, to_wire
from gyre.events.tokens import num_tokens, pack_ids, pack_logprobs, unpack_ids
from gyre.events.types import BranchForked, CallCut, CallStarted, CallSuperseded, TokensDrifted

USER = Message(role="user", content="task")
MORE = Message(role="user", content="more")
LS = '{"command": "ls"}'

STEP = st.tuples(
    st.sampled_from(["continue", "retry", "edit", "drop", "rewind", "other", "tools"]),
    st.sampled_from(["a", "b", "thinking", tool_call("ls")]),
    st.sampled_from(["closed", "cut", "open"]),
    st.integers(0, 5),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(STEP, max_size=9))
def test_whatever_a_harness_does_tokens_are_appended_and_render_as_the_request(steps: list[Any]) -> None:
    play = Play()
    history: tuple[Message, ...] = (USER,)
    for kind, text, ending, where in steps:
        tools = (BASH,) if kind == "tools" else ()
        if kind == "edit" and len(history) > 1:
            at = where % len(history)
            history = (
                *history[:at],
                msgspec.structs.replace(history[at], content=f"edited {where}"),
                *history[at + 1 :],
            )
        elif kind == "drop" and len(history) > 2:
            history = (*history[:-2], history[-1])
        elif kind == "rewind":
            history = history[: 1 + where % len(history)]
        elif kind == "other":
            history = (Message(role="user", content=f"other {where}"),)
        started = play.start(history, tools)
        event = started.call
        assert started.input_ids.tolist() == full_ids(play.events, event.call)
        assert event.marks[-1].digest == prefix_digests(history, tools)[-1]
        # What the policy sees is the request, however it was put together.
        assert decode(started.input_ids) == RENDERER.render_text([to_wire(m) for m in history], list(tools))
        if kind != "retry" and ending != "open":
            reply = play.complete(started, text, closed=ending == "closed")
            result = Message(role="tool" if reply.tool_calls else "user", content=f"r{where}")
            history = (*history, reply, result)
    again = opened()
    for event in play.events:
        again = session.evolve(again, event)
    assert again == play.state


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(["a", "bb", tool_call("ls"), "c " + tool_call("cat x")]), min_size=1, max_size=6))
def test_growing_history_adds_only_its_delta(texts: list[str]) -> None:
    play = Play()
    history: tuple[Message, ...] = (USER,)
    before: list[int] = []
    for text in texts:
        started = play.start(history)
        assert started.input_ids[: len(before)].tolist() == before
        assert num_tokens(started.call.context) == len(started.input_ids) - len(before)
        reply = play.complete(started, text)
        before = full_ids(play.events, started.call.call)
        history = (*history, reply, MORE)
    assert [e.rule for e in play.events if isinstance(e, CallStarted)] == ["root"] + ["continue"] * (len(texts) - 1)


def test_twins_are_told_apart_by_the_id_that_was_minted() -> None:
    play = Play()
    replies = [play.turn((USER,), tool_call("ls")) for _ in range(3)]
    for number in (1, 0, 2):
        result = Message(role="tool", content=f"rc={number}")
        assert play.start((USER, replies[number], result)).call.base == f"s-c{number}"


def test_rewind_of_any_length_is_allowed() -> None:
    """miles#2292."""
    play = Play()
    history: tuple[Message, ...] = (USER,)
    for _ in range(180):
        history = (*history, play.turn(history, "x"), MORE)
        if len(history) > 300:
            break
    started = play.start((*history[:3], Message(role="user", content="summary")))
    assert (started.call.rule, started.call.base) == ("fork", "s-c1")


def test_interleaved_parent_and_sub_agent_each_continue_their_own() -> None:
    """rllm#772, #773."""
    play = Play()
    parent: tuple[Message, ...] = (USER,)
    child: tuple[Message, ...] = (Message(role="system", content="sub"), USER)
    for _ in range(4):
        parent = (*parent, play.turn(parent, "p"), MORE)
        child = (*child, play.turn(child, "c"), MORE)
    rules = [e.rule for e in play.events if isinstance(e, CallStarted)]
    assert rules == ["root", "root"] + ["continue"] * 6
    bases = [e.base for e in play.events if isinstance(e, CallStarted)]
    assert bases[2:] == [f"s-c{n}" for n in range(6)]


def test_tool_results_that_come_one_by_one_and_together() -> None:
    """Tool messages in a row share a turn: where one ends depends on whether another follows."""
    play = Play()
    reply = play.turn((USER,), tool_call("a") + tool_call("b"))
    first, second = Message(role="tool", content="1"), Message(role="tool", content="2")
    for history in ((first, second), (first,), (first, MORE), (second, first), (first, second, MORE)):
        messages = (USER, reply, *history)
        started = play.start(messages)
        assert decode(started.input_ids) == RENDERER.render_text([to_wire(m) for m in messages])


def test_reasoning_that_a_harness_leaves_out_is_still_an_echo() -> None:
    play = Play()
    reply = play.turn((USER,), "<think>\nhm\n</think>\n\nanswer")
    assert reply.reasoning == "hm"
    bare = msgspec.structs.replace(reply, reasoning="")
    other = msgspec.structs.replace(reply, reasoning="changed")
    assert play.start((USER, bare, MORE)).call.rule == "continue"
    assert play.start((USER, other, MORE)).call.rule == "fork"


def test_failed_and_cut_calls_are_bases_too() -> None:
    play = Play()
    first = play.start((USER,))
    play.fold(endings.decide_no_reply(first, None, status=503, reason="gone"))
    second = play.start((USER,))
    assert second.input_ids.tolist() == first.input_ids.tolist() and num_tokens(second.call.context) == 0
    partial = generation(encode("par"), "abort")
    play.fold(endings.decide_no_reply(second, partial, status=410, reason="over"))
    third = play.start((USER, Message(role="assistant", content="par"), MORE))
    assert third.call.rule == "fork"
    assert lineage.prefix_ids(play.state.tree, "s-c1", 10**6).tolist() == [*first.input_ids, *encode("par")]
    assert unpack_ids(third.call.context).size


CALLS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12), st.integers(0, 3), st.integers(0, 3)), max_size=8)


@given(CALLS)
def test_any_prefix_of_any_call_is_put_together_along_its_bases(calls: list[tuple[int, int, int, int]]) -> None:
    """(base, of the calls before it; tokens shared, at most; new tokens; tokens sampled)"""
    tree, fulls, sampled = lineage.Tree(), [np.empty(0, dtype=np.int32)], [np.empty(0, dtype=bool)]
    for number, (base, shared, num_context, num_sampled) in enumerate(calls, 1):
        base = base % number
        shared = min(shared, len(fulls[base]))
        context, reply = (np.arange(num) + 100 * number + at for num, at in ((num_context, 0), (num_sampled, 50)))
        where = {"execution": "x", "session": "s", "call": f"c{number}"}
        began = CallStarted(
            **where, base=f"c{base}" if base else "", shared=shared, context=pack_ids(context), role_class="main",
            rule="fork", marks=(), temperature=1.0, top_p=1.0, max_tokens=8, cell="c0",
        )  # fmt: skip
        cut = CallCut(
            **where, sampled=pack_ids(reply), logprobs=pack_logprobs([-1.0] * len(reply)), spans=(), reason=""
        )
        tree = lineage.evolve(lineage.evolve(tree, began), cut)
        fulls.append(np.concatenate([fulls[base][:shared], context, reply]))
        news = np.repeat([False, True], [num_context, num_sampled])
        sampled.append(np.concatenate([sampled[base][:shared], news]))
        for num in range(len(fulls[-1]) + 1):
            assert lineage.prefix_ids(tree, f"c{number}", num).tolist() == fulls[-1][:num].tolist()
            assert lineage.holds_sampled(tree, f"c{number}", num) == bool(sampled[-1][:num].any())


def test_a_sub_agent_that_asks_again_has_not_taken_its_first_reply() -> None:
    play = Play()
    play.turn((USER,), tool_call("look for the lexer"))
    child = (Message(role="user", content="look for the lexer"),)
    play.turn(child, "it is there")
    again = play.start(child)
    assert again.call.role_class == "sub-agent" and superseded(again) == [("s-c1", "s-c2")]


def superseded(started: session.Started) -> list[tuple[str, str]]:
    return [(event.call, event.by) for event in started.events if isinstance(event, CallSuperseded)]


def test_replies_that_were_asked_for_side_by_side_are_both_superseded_by_what_comes_after() -> None:
    play = Play()
    first, second = play.start((USER,)), play.start((USER,))
    for started in (first, second):
        assert not superseded(started)
        play.complete(started, "words")
    assert superseded(play.start((USER,))) == [("s-c0", "s-c2"), ("s-c1", "s-c2")]


def test_without_minted_ids_the_same_request_again_is_a_retry_whatever_twins_have_said() -> None:
    """A harness that gives tool calls ids of its own."""
    play = Play()
    replies = [play.turn((USER,), tool_call("ls")) for _ in range(2)]
    own = msgspec.structs.replace(replies[0], tool_calls=(ToolCall(id="own", name="bash", arguments=LS),))
    history = (USER, own, Message(role="tool", content="rc=0"))
    asked = play.start(history)
    assert (asked.call.rule, asked.call.base) == ("continue", "s-c1")
    play.turn((USER,), tool_call("ls"))
    again = play.start(history)
    assert (again.call.placed_by, again.call.base) == ("request", asked.call.call)


def test_a_request_that_twins_have_made_shares_the_tokens_of_the_first() -> None:
    """They said the same in more tokens or fewer, and its ids are the harness's own."""
    play = Play()
    result = Message(role="tool", content="rc=0")
    replies = [play.turn((USER,), tool_call("ls").replace(": ", spelled)) for spelled in (": ", ":   ")]
    starts = [play.start((USER, reply, result)) for reply in replies]
    assert len(starts[0].input_ids) < len(starts[1].input_ids)
    own = msgspec.structs.replace(replies[0], tool_calls=(ToolCall(id="own", name="bash", arguments=LS),))
    again = play.start((USER, own, result))
    assert again.call.placed_by == "request" and again.input_ids.tolist() == starts[0].input_ids.tolist()


def test_an_assistant_message_in_the_place_of_one_that_nobody_said_is_an_edit() -> None:
    play = Play()
    play.start((USER, Message(role="assistant", content="ready"), MORE))
    edited = play.start((USER, Message(role="assistant", content="steady"), MORE))
    assert (kinds(edited), len(edited.events)) == (["edit"], 2)


def kinds(started: session.Started) -> list[str]:
    return [event.kind for event in started.events if isinstance(event, BranchForked)]


def test_a_request_that_comes_again_is_marked_as_the_first_was_and_begins_there() -> None:
    play = Play()
    asked = (Message(role="system", content="be brief"), USER)
    first = play.start(asked)
    for _ in range(2):
        again = play.start(asked)
        assert (again.call.base, again.call.marks, kinds(again)) == ("s-c0", first.call.marks[-1:], ["retry"])


def test_a_reply_that_is_left_out_is_no_drift_and_one_that_changed_is_that_of_the_latest() -> None:
    play = Play()
    for text in ("one", "two"):
        play.turn((USER,), text)
    left_out = play.start((USER, MORE))
    assert (kinds(left_out), len(left_out.events)) == (["edit"], 2)
    changed = play.start((USER, Message(role="assistant", content="three"), MORE))
    (drifted,) = [event for event in changed.events if isinstance(event, TokensDrifted)]
    assert (kinds(changed), drifted.source) == (["drift"], "s-c1")


def test_twins_supersede_only_their_own() -> None:
    play = Play()
    first, second = [
        (USER, play.turn((USER,), tool_call("ls")), Message(role="tool", content="rc=0")) for _ in range(2)
    ]
    play.turn(first, "done")
    for _ in range(2):
        play.turn(second, "done")
    assert superseded(play.started[-1]) == [("s-c3", "s-c4")]
    assert superseded(play.start(first)) == [("s-c2", "s-c5")]


def test_a_twin_that_asked_for_the_same_prompt_again_does_not_go_on_from_the_first_reply() -> None:
    play = Play()
    result = Message(role="tool", content="rc=0")
    replies = [play.turn((USER,), tool_call("ls")) for _ in range(2)]
    play.turn((USER, replies[1], result), "done")
    first = play.start((USER, replies[0], result))
    assert (first.call.rule, first.call.base) == ("continue", "s-c0")


def test_a_history_that_begins_with_a_reply_is_not_the_reply_to_itself() -> None:
    """As a harness puts words into the policy's mouth."""
    play = Play()
    words = Message(role="assistant", content="hello")
    first = play.start((words,))
    play.complete(first, "hello")
    again = play.start((words,))
    assert (again.call.rule, again.call.placed_by) == ("fork", "request")
    assert again.input_ids.tolist() == first.input_ids.tolist()
    assert play.start((words, words, MORE)).call.rule == "continue"


def test_echo_by_way_of_the_dialect() -> None:
    play = Play()
    reply = play.turn((USER,), "text")
    body = {"messages": [to_wire(USER), to_wire(reply), to_wire(MORE)]}
    request = chat.parse_request(msgspec.json.encode(body))
    assert play.start(request.messages).call.rule == "continue"
