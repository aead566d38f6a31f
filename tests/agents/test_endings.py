"""How a started call ends: what the log keeps, and what the harness is shown."""

from typing import Any

import msgspec
import pytest
from playing import CONFIG, opened
from scripted import RENDERER, encode, generation, tool_call

from gyre.agents import endings, session
from gyre.agents.dialect import Request
from gyre.agents.messages import Message, mint_tool_call_id
from gyre.events.tokens import unpack_ids, unpack_logprobs
from gyre.events.types import CallCut, CallFailed


def started(stop: tuple[str, ...] = ()) -> session.Started:
    request = Request(messages=(Message(role="user", content="task"),), stop=stop)
    return session.decide_start(opened(), request, RENDERER, cell="c0", config=CONFIG)


def completed(text: str, finish: str = "stop", stop: tuple[str, ...] = ()) -> endings.Completed:
    ids = [*encode(text), RENDERER.end_of_turn_id]
    said = msgspec.structs.replace(generation(ids, finish, version=3, num_prompt_tokens=40), engine_s=1.5)
    done = endings.decide_completed(started(stop), "m", said, RENDERER, created=9, num_retries=2)
    assert unpack_ids(done.event.sampled).tolist() == ids, "whole, whatever is shown of it"
    assert unpack_logprobs(done.event.logprobs).tolist() == list(said.logprobs)
    assert (done.event.spans, done.event.num_retries, done.event.engine_s) == (said.spans, 2, 1.5)
    assert done.answer.num_sampled_tokens == len(ids)
    prompt = len(started().input_ids)
    for told in (done.event, done.answer):
        assert (told.call, told.num_prompt_tokens, told.num_cached_tokens) == ("s-c0", prompt, said.num_cached_tokens)
    assert (done.answer.model, done.answer.created) == ("m", 9)
    return done


@pytest.mark.parametrize(
    ("text", "finish", "told"),
    [
        ("words", "stop", "stop"),
        (tool_call("ls"), "stop", "tool_calls"),
        ("words", "length", "length"),
        (tool_call("ls"), "length", "length"),
    ],
)
def test_why_a_reply_ended_is_told_to_log_and_harness_alike(text: str, finish: str, told: str) -> None:
    done = completed(text, finish)
    assert done.event.finish == done.answer.finish == told


@pytest.mark.parametrize(
    ("stop", "shown", "by"),
    [
        ((), "one two three", ""),
        (("four",), "one two three", ""),
        (("three", "two"), "one ", "two"),
        (("four", "two three", "three"), "one ", "two three"),
        (("one",), "", "one"),
    ],
)
def test_a_reply_is_shown_up_to_the_first_of_the_texts_that_end_it(stop: tuple[str, ...], shown: str, by: str) -> None:
    answer = completed("one two three", stop=stop).answer
    assert (answer.message.content, answer.stop_text) == (shown, by)


def test_tools_are_named_and_their_calls_have_ids_of_the_call() -> None:
    done = completed(tool_call("ls") + tool_call("pwd"))
    assert done.event.tools == ("bash", "bash")
    ids = [call.id for call in done.answer.message.tool_calls]
    assert ids == [mint_tool_call_id("s-c0", index) for index in range(2)]


def test_reasoning_is_counted_where_there_is_some() -> None:
    assert completed("words").answer.num_reasoning_tokens == 0
    thought = "<think>\nhm\n</think>"
    assert completed(thought + "\n\nwords").answer.num_reasoning_tokens == len(encode(thought))


def test_what_was_sampled_before_an_error_is_kept_and_without_any_the_call_failed() -> None:
    where: dict[str, Any] = {"execution": "x", "session": "s", "call": "s-c0"}
    failed = endings.decide_no_reply(started(), None, status=503, reason="gone")
    assert failed == CallFailed(**where, status=503, reason="gone")
    half = generation(encode("on w"), "abort", version=3)
    cut = endings.decide_no_reply(started(), half, status=503, reason="gone")
    assert isinstance(cut, CallCut)
    assert msgspec.structs.replace(cut, sampled=b"", logprobs=b"") == CallCut(
        **where, sampled=b"", logprobs=b"", spans=half.spans, reason="gone"
    )
    assert unpack_ids(cut.sampled).tolist() == list(half.output_ids)
