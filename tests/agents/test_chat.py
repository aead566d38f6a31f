"""The chat dialect and canonical messages, with whatever bytes and spellings come."""

import json

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.agents.chat import parse_request, render_chunks, render_error, render_response
from gyre.agents.dialect import Answer, ProviderError, Request
from gyre.agents.messages import (
    Message,
    ToolCall,
    digest_message,
    is_echo,
    mint_tool_call_id,
    prefix_digests,
    to_wire,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = [
    "messages",
    "role",
    "content",
    "type",
    "text",
    "tool_calls",
    "function",
    "name",
    "arguments",
    "id",
    "tools",
    "n",
    "stream",
    "stream_options",
    "include_usage",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "stop",
    "response_format",
    "reasoning_content",
    "tool_call_id",
    "model",
]
VALUES = st.recursive(
    JSON | st.sampled_from(["user", "assistant", "tool", "text", "function", "system", 1, 0.5]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=6),
    max_leaves=30,
)
MESSAGES = st.builds(
    Message,
    role=st.just("assistant"),
    content=st.text(max_size=20),
    reasoning=st.text(max_size=20),
    tool_calls=st.lists(
        st.builds(
            ToolCall,
            id=st.text(max_size=5),
            name=st.text(max_size=5),
            arguments=st.text(max_size=9) | JSON.map(json.dumps),
        ),
        max_size=2,
    ).map(tuple),
)


def answer(message: Message, **fields: object) -> Answer:
    return Answer(
        **{  # type: ignore[arg-type]
            "call": "s-c0",
            "model": "m",
            "created": 1,
            "message": message,
            "finish": "stop",
            "num_prompt_tokens": 3,
            "num_cached_tokens": 2,
            "num_sampled_tokens": 4,
            **fields,
        }
    )


def refused(body: bytes) -> ProviderError:
    with pytest.raises(ProviderError) as error:
        parse_request(body)
    return error.value


def parsed(**fields: object) -> Request:
    return parse_request(orjson.dumps({"messages": [{"role": "user", "content": "x"}], **fields}))


@given(st.binary(max_size=60) | VALUES.map(lambda v: json.dumps(v).encode()))
def test_any_body_is_a_request_or_the_providers_error(body: bytes) -> None:
    try:
        request = parse_request(body)
    except ProviderError as error:
        assert error.status == 400
        assert orjson.loads(render_error(error))["error"]["message"] == str(error)
    else:
        assert request.messages
        assert len(prefix_digests(request.messages, request.tools)) == len(request.messages)


@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=8), st.lists(VALUES, min_size=1, max_size=4))
def test_any_fields_beside_a_message_are_a_request_or_the_providers_error(
    fields: dict[str, object], messages: list[object]
) -> None:
    first = {"role": "user", "content": "x"}
    try:
        body = orjson.dumps({**fields, "messages": [first, *messages]})
    except TypeError:  # an integer that no JSON parser of ours takes
        return
    try:
        request = parse_request(body)
    except ProviderError as error:
        assert error.code == "invalid_request"
    else:
        digests = prefix_digests(request.messages, request.tools)
        assert len(set(digests)) == len(digests)


@given(MESSAGES)
def test_a_reply_comes_back_as_itself(message: Message) -> None:
    reply = orjson.loads(render_response(parsed(), answer(message)))["choices"][0]["message"]
    echo = parsed(messages=[{"role": "user", "content": "x"}, reply]).messages[1]
    assert is_echo(digest_message(echo), digest_message(message))
    without = {key: value for key, value in reply.items() if key != "reasoning_content"}
    bare = parsed(messages=[{"role": "user", "content": "x"}, without]).messages[1]
    assert is_echo(digest_message(bare), digest_message(message))


@given(MESSAGES, st.booleans())
def test_chunks_add_up_to_the_response(message: Message, include_usage: bool) -> None:
    events = list(render_chunks(parsed(stream_options={"include_usage": include_usage}), answer(message)))
    assert events.pop() == b"data: [DONE]\n\n"
    content, reasoning, calls, usage, finishes = "", "", [], [], []
    for event in events:
        assert event.startswith(b"data: ") and event.endswith(b"\n\n") and event.count(b"\n") == 2
        chunk = orjson.loads(event[6:])
        usage += [chunk["usage"]] if chunk.get("usage") else []
        for choice in chunk["choices"]:
            content += choice["delta"].get("content", "")
            reasoning += choice["delta"].get("reasoning_content", "")
            calls += choice["delta"].get("tool_calls", [])
            finishes += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert (content, reasoning, finishes) == (message.content, message.reasoning, ["stop"])
    assert [{k: v for k, v in c.items() if k != "index"} for c in calls] == to_wire(message).get("tool_calls", [])
    assert len(usage) == include_usage


def test_usage_is_what_the_engine_counted() -> None:
    counted = msgspec.structs.replace(answer(Message(role="assistant")), num_reasoning_tokens=3)
    usage = orjson.loads(render_response(parsed(), counted))["usage"]
    assert usage == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }


def test_fields_are_read() -> None:
    request = parsed(max_tokens=5, max_completion_tokens=6, temperature=1, top_p=0.5, stop="a", stream=True, n=1)
    assert (request.max_tokens, request.temperature, request.top_p, request.stop, request.stream) == (
        6,
        1.0,
        0.5,
        ("a",),
        True,
    )
    assert parsed(stop=["a", "", "b"], future_field={"x": 1}).stop == ("a", "b")
    assert parsed(stream_options={"include_usage": True}).include_usage
    assert parsed(response_format={"type": "json_schema"}).structured


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"max_tokens": 0},
        {"max_tokens": True},
        {"temperature": "hot"},
        {"temperature": 3},
        {"tools": [{"type": "code_interpreter"}]},
        {"stop": 5},
    ],
)
def test_what_cannot_be_meant_is_refused(fields: dict[str, object]) -> None:
    error = refused(orjson.dumps({"messages": [{"role": "user", "content": "x"}], **fields}))
    assert (error.status, error.code) == (400, "invalid_request")


def test_other_spellings_have_one_digest() -> None:
    def message(**fields: object) -> str:
        return digest_message(parsed(messages=[{"role": "assistant", **fields}]).messages[0])

    def call(arguments: object, id_: str = "a") -> list[object]:
        return [{"id": id_, "type": "function", "function": {"name": "f", "arguments": arguments}, "status": "done"}]

    assert message(content="x") == message(content=[{"type": "text", "text": "x"}])
    assert message(content=None) == message(content="") == message()
    assert message(tool_calls=call('{"a": 5000.0, "b": "\\u00e9"}')) == message(
        tool_calls=call('{"b":"é","a":5000}', "z")
    )
    assert message(tool_calls=call({"a": 1})) == message(tool_calls=call('{"a":1}'))
    assert message(tool_calls=call('{"a": 1}')) != message(tool_calls=call('{"a": 2}'))
    assert message(tool_calls=call('{"a": 1')) != message(tool_calls=call('{"a": 1}'))
    assert message(content="x") != message(content="x ")
    assert message(content="x", reasoning_content="r") != message(content="x", reasoning_content="s")


def test_whatever_the_policy_is_shown_of_a_message_makes_another_one() -> None:
    """Else a history would go on from tokens that say something else."""

    def calls(name: str, arguments: str) -> dict[str, tuple[ToolCall, ...]]:
        return {"tool_calls": (ToolCall(id="a", name=name, arguments=arguments),)}

    others = [
        *(Message(role=role, content="x") for role in ("system", "user", "assistant", "tool")),
        Message(role="user", content="y"),
        Message(role="assistant", content="x", reasoning="r"),
        *(Message(role="assistant", **calls("f", text)) for text in ('{"n": 1}', '{"n": 1.5}', '{"n": [1.5]}', "{}")),
        Message(role="assistant", **calls("g", "{}")),
    ]
    assert len({digest_message(message) for message in others}) == len(others)
    one, same = (Message(role="assistant", **calls("f", text)) for text in ('{"n": [1, 2]}', '{"n": [1.0, 2e0]}'))
    assert digest_message(one) == digest_message(same)


def test_tool_set_and_shared_turns_are_part_of_a_prefix() -> None:
    user, one, two = Message(role="user"), Message(role="tool", content="1"), Message(role="tool", content="2")
    tool = {"type": "function", "function": {"name": "f"}}
    assert prefix_digests((user,), ()) != prefix_digests((user,), (tool,))
    assert prefix_digests((user, one), ())[1] != prefix_digests((user, one, two), ())[1]
    assert prefix_digests((user, one, user), ())[:2] == prefix_digests((user, one), ())
    assert prefix_digests((user, one), ())[:1] == prefix_digests((user,), ()), "only tool messages share a turn"


def test_minted_ids_are_unique_and_stable() -> None:
    ids = {mint_tool_call_id(f"s-c{n}", index) for n in range(50) for index in range(5)}
    assert len(ids) == 250
    assert mint_tool_call_id("s-c0", 0) in ids
