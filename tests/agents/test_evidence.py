"""What a call was placed and classed by stands on its event; a reply that came back otherwise is told in both forms."""

from typing import Any

import msgspec
import orjson
import pytest
from playing import Play
from scripted import BASH, decode, encode, tool_call

from gyre.agents import roles
from gyre.agents.dialect import Request
from gyre.agents.messages import Message
from gyre.events.codec import decode as decode_body
from gyre.events.codec import encode as encode_body
from gyre.events.tokens import unpack_ids
from gyre.events.types import BranchForked, CallStarted, TokensDrifted
from tests.events.events import envelope, example

USER = Message(role="user", content="task")
MORE = Message(role="user", content="more")


def evidence(started: Any) -> tuple[str, str]:
    return started.call.placed_by, started.call.classed_by


def test_what_a_call_was_placed_by() -> None:
    play = Play()
    first = play.start((USER,))
    assert evidence(first) == ("nothing", "nothing")
    said = play.complete(first, tool_call("ls"))
    result = Message(role="tool", content="a")
    second = play.start((USER, said, result))
    assert evidence(second) == ("tool-call-id", "history")
    text = play.complete(second, "done")
    assert evidence(play.start((USER, said, result, text, MORE))) == ("reply", "history")
    assert evidence(play.start((USER, said, result))) == ("request", "same-request")
    edited = msgspec.structs.replace(result, content="b")
    assert play.start((USER, MORE)).call.placed_by == "prefix"
    assert play.start((USER, said, edited)).call.placed_by == "tool-call-id"


def test_what_a_call_was_classed_by() -> None:
    play = Play()
    spawn = '<tool_call>{"name": "agent", "arguments": {"prompt": "Count the files, please."}}</tool_call>'
    play.complete(play.start((USER,), (BASH,)), spawn)
    child = play.start((Message(role="user", content="Count the files, please."),), (BASH,))
    assert child.call.classed_by == "spawn"
    play.complete(child, "There are two files here.")
    asks = (Message(role="user", content="Sum up: There are two files here."),)
    assert play.start(asks).call.classed_by == "quote"
    assert play.start((MORE,), model="gyre-small").call.classed_by == "helper-model"
    assert play.start((MORE,), structured=True).call.classed_by == "schema"
    assert play.start((Message(role="user", content="x"),), (BASH,), hint="sub-agent").call.classed_by == "header"


@pytest.mark.parametrize(
    ("headers", "hint", "name"),
    [
        ({"x-claude-code-request-class": "subagent", "x-claude-code-agent-id": "7"}, "sub-agent",
         "x-claude-code-request-class"),
        ({"x-claude-code-request-class": "a secret", "x-claude-code-agent-id": "7"}, "sub-agent",
         "x-claude-code-agent-id"),
        ({"x-openai-subagent": "compact"}, "summary", "x-openai-subagent"),
        ({"x-parent-session-id": "p"}, "sub-agent", "x-parent-session-id"),
        ({"authorization": "Bearer x"}, "", ""),
    ],
)  # fmt: skip
def test_the_header_that_labels_a_call_is_named_and_its_value_is_not_kept(
    headers: dict[str, str], hint: str, name: str
) -> None:
    request = roles.label(Request(messages=(USER,)), headers)
    assert (request.hint, request.header) == (hint, name)
    started = Play().start((USER,), hint=request.hint, header=request.header)
    assert started.call.header == name
    assert not any(value and value in str(started.call) for value in headers.values() if len(value) > 5)


def test_a_reply_that_came_back_as_something_else_is_told_in_both_forms() -> None:
    play = Play()
    first = play.start((USER,))
    said = play.complete(first, "what was said")
    other = msgspec.structs.replace(said, content="what was heard")
    started = play.start((USER, other, MORE))
    forked, drifted = started.events[1:]
    assert isinstance(forked, BranchForked) and forked.kind == "drift"
    assert isinstance(drifted, TokensDrifted)
    assert (drifted.call, drifted.source) == (started.call.call, first.call.call)
    assert decode(unpack_ids(drifted.sampled)) == "what was said<|im_end|>"
    assert decode(unpack_ids(drifted.shown)) == "what was heard<|im_end|>\n"
    assert unpack_ids(drifted.sampled).tolist()[:-1] == encode("what was said")


def test_the_reply_that_drifted_is_named_by_its_tool_call() -> None:
    play = Play()
    calls = [play.turn((USER,), tool_call(f"ls {n}")) for n in range(3)]
    changed = msgspec.structs.replace(calls[1], tool_calls=calls[1].tool_calls, content="I changed my mind.")
    started = play.start((USER, changed, MORE))
    (drifted,) = [event for event in started.events if isinstance(event, TokensDrifted)]
    assert drifted.source == "s-c1"


def test_evidence_is_optional_on_a_released_event() -> None:
    """A log from before it reads the same, byte for byte; so does one with it."""
    plain = example(CallStarted)
    assert isinstance(plain, CallStarted) and plain.placed_by == ""
    body = encode_body(envelope(plain))
    header = orjson.loads(body[4 : 4 + int.from_bytes(body[:4], "big")])
    assert not {"placed_by", "classed_by", "header"} & header["payload"].keys()
    assert decode_body(body).event == plain
    told = msgspec.structs.replace(plain, placed_by="prefix", classed_by="spawn", header="x-openai-subagent")
    assert decode_body(encode_body(envelope(told))).event == told
