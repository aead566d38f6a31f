"""Every dialect under whatever comes: a request, or the provider's error; never anything else, and no record of it."""

import asyncio
import json
import types
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import RENDERER, TEMPLATE, config, serving

from gyre.agents import anthropic_messages, chat, responses
from gyre.agents.dialect import Answer, ContextOverflow, ProviderError, Request
from gyre.agents.gateway import COUNT_TOKENS, DIALECTS
from gyre.agents.messages import Message, ToolCall, digest_message, prefix_digests
from gyre.agents.renderer import Renderer
from gyre.agents.session import Session, decide_start, find_prompt
from gyre.events.types import CallStarted

FIELDS = """messages input role content type text tool_calls function name arguments id tools stream max_tokens
    max_output_tokens temperature top_p stop stop_sequences response_format reasoning_content tool_call_id model
    system tool_use_id thinking signature input_schema output_config format summary call_id output instructions
    parameters description cache_control""".split()  # noqa: SIM905
WORDS = """user assistant tool system developer text function tool_use tool_result thinking redacted_thinking image
    tool_reference message reasoning function_call function_call_output custom_tool_call custom_tool_call_output
    input_text output_text summary_text reasoning_text input_image refusal custom namespace web_search
    json_schema""".split()  # noqa: SIM905
SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=6)
VALUES = st.recursive(
    SCALARS | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5),
    max_leaves=25,
)
PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(WORDS)},
    optional=dict.fromkeys(("text", "thinking", "content", "name", "input"), VALUES),
)
TURNS = st.fixed_dictionaries(
    {"role": st.sampled_from(WORDS[:5]), "content": st.text(max_size=6) | st.lists(PARTS, max_size=3)},
    optional={"type": st.sampled_from(WORDS), "call_id": VALUES, "arguments": VALUES, "output": VALUES, "name": VALUES},
)
USER = {"role": "user", "content": "x"}
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6) | st.builds(
    lambda turns, fields: {**fields, "messages": [USER, *turns], "input": [USER, *turns]},
    st.lists(TURNS | VALUES, max_size=3),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4),
)
ALL = pytest.mark.parametrize("dialect", [chat, anthropic_messages, responses], ids=lambda d: d.__name__.split(".")[-1])
SESSION = Session(execution="x", session="s", temperature=1.0, top_p=1.0)
ARGUMENTS = st.dictionaries(st.text(max_size=5), SCALARS.filter(lambda v: v == v), max_size=3).map(json.dumps)
REPLIES = st.builds(
    Message,
    role=st.just("assistant"),
    content=st.text(max_size=20),
    reasoning=st.text(max_size=20),
    tool_calls=st.lists(
        st.builds(
            ToolCall,
            id=st.text("abc", min_size=1, max_size=5),
            name=st.text(min_size=1, max_size=5),
            arguments=st.text(max_size=9) | ARGUMENTS,
        ),
        max_size=2,
    ).map(tuple),
)


def check(dialect: Any, body: bytes) -> None:
    """A request that the session takes or refuses, or an error that has the provider's shape."""
    try:
        request = dialect.parse_request(body)
        assert request.messages
        started = decide_start(SESSION, request, RENDERER, cell="c0", config=config())
        assert len(started.input_ids) == find_prompt(SESSION, request, RENDERER).num_tokens
    except ProviderError as error:
        assert 400 <= error.status < 500
        check_error(orjson.loads(dialect.render_error(error)), dialect)


def check_error(tree: Any, dialect: Any) -> None:
    assert isinstance(tree["error"]["message"], str) and tree["error"]["type"]
    assert (tree.get("type") == "error") == (dialect is anthropic_messages)
    assert ("code" in tree["error"]) == (dialect is not anthropic_messages)


@ALL
@given(body=st.binary(max_size=60) | VALUES.map(lambda v: json.dumps(v).encode()))
def test_any_bytes(dialect: Any, body: bytes) -> None:
    check(dialect, body)


@ALL
@given(body=BODIES)
def test_any_fields(dialect: Any, body: dict[str, Any]) -> None:
    check(dialect, json.dumps(body).encode())


def evil_bodies() -> dict[str, bytes]:
    deep = {n: b"[" * n + b"]" * n for n in (200, 250, 260, 900, 1100, 100_000)}
    wrap = b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "input": "x", %s}'
    call = b'{"messages": [%(m)s], "input": [{"type": "function_call", "name": "f", "arguments": "%(a)s"}]}' % {
        b"m": b'{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "%s"}}],'
        b' "content": [{"type": "tool_use", "name": "f", "input": {"a": %s}}]}' % (deep[100_000], deep[900]),
        b"a": deep[100_000],
    }
    bodies = {
        "empty": b"",
        "not JSON": b"{",
        "a number": b"1",
        "null": b"null",
        "NaN": wrap % b'"temperature": NaN',
        "invalid UTF-8": b'{"messages": [{"role": "user", "content": "\xff\xfe"}], "input": "\xff"}',
        "half a surrogate pair": rb'{"messages": [{"role": "user", "content": "\ud800"}], "input": "\ud800"}',
        "no messages": b'{"model": "m"}',
        "wrong role": b'{"messages": [{"role": "robot", "content": "x"}], "input": [{"role": "robot"}]}',
        "a number as a role": b'{"messages": [{"role": 7, "content": "x"}], "input": [{"role": 7, "content": "x"}]}',
        "messages as an object": b'{"messages": {"role": "user"}, "input": {"role": "user"}}',
        "messages of text": b'{"messages": ["x"], "input": ["x"]}',
        "deep arguments as text": call,
    }
    for num, value in deep.items():
        tool = b'"tools": [{"type": "function", "name": "f", "input_schema": {"a": %s}, "parameters": %s,'
        tool += b' "function": {"name": "f", "parameters": %s}}]'
        bodies[f"tools {num} deep"] = wrap % (tool % (value, value, value))
        bodies[f"unknown field {num} deep"] = wrap % (b'"new": %s' % value)
    return bodies


@ALL
@pytest.mark.parametrize("name", list(evil_bodies()))
def test_evil_bodies(dialect: Any, name: str) -> None:
    check(dialect, evil_bodies()[name])


@pytest.mark.parametrize("num", [250, 900, 990, 100_000])
def test_deep_arguments_under_a_template_that_takes_objects(num: int) -> None:
    renderer = Renderer(RENDERER.tokenizer, TEMPLATE.replace("function.arguments is string", "false"))
    call = {"function": {"name": "f", "arguments": '{"a": ' + "[" * num + "]" * num + "}"}}
    body = {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}
    request = chat.parse_request(orjson.dumps(body))
    try:
        assert find_prompt(SESSION, request, renderer).num_tokens > num
    except ProviderError as error:
        assert error.status == 400


def test_the_gateway_answers_evil_bodies_in_shape_and_records_none_that_it_refuses(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path) as served, aiohttp.ClientSession() as http:
            taken = 0
            for endpoint in (*DIALECTS, COUNT_TOKENS):
                dialect = DIALECTS.get(endpoint, anthropic_messages)
                for name, body in evil_bodies().items():
                    async with http.post(f"{served.url()}/{endpoint}", data=body) as response:
                        assert response.status in (200, 400), name
                        reply = await response.json()
                    if response.status == 400:
                        check_error(reply, dialect)
                    taken += response.status == 200 and endpoint != COUNT_TOKENS
            assert len(await served.events(CallStarted)) == taken < 20
            assert (await served.say(USER))["content"].startswith("reply")

    asyncio.run(asyncio.wait_for(case(), 60))


def answer(message: Message, **fields: Any) -> Answer:
    fixed: dict[str, Any] = {"num_prompt_tokens": 3, "num_cached_tokens": 2, "num_sampled_tokens": 4}
    return Answer(
        **{"call": "s-c0", "model": "m", "created": 1, "message": message, "finish": "stop", **fixed, **fields}
    )


def echoed(dialect: types.ModuleType, reply: dict[str, Any]) -> Message:
    """What the next request says of the reply."""
    if dialect is chat:
        body: dict[str, Any] = {"messages": [USER, reply["choices"][0]["message"]]}
    elif dialect is anthropic_messages:
        body = {"messages": [USER, {"role": "assistant", "content": reply["content"]}]}
    else:
        body = {"input": [USER, *reply["output"]]}
    request: Request = dialect.parse_request(orjson.dumps(body))
    assert len(request.messages) == 2
    return request.messages[1]


@ALL
@given(message=REPLIES)
def test_a_reply_comes_back_as_itself(dialect: Any, message: Message) -> None:
    reply = orjson.loads(dialect.render_response(Request(messages=()), answer(message)))
    echo = echoed(dialect, reply)
    assert digest_message(echo) == digest_message(message)
    assert [call.id for call in echo.tool_calls] == [call.id for call in message.tool_calls]


@given(message=REPLIES)
def test_a_custom_call_comes_back_as_itself(message: Message) -> None:
    request = Request(messages=(), custom_tools=tuple(call.name for call in message.tool_calls))
    calls = tuple(
        ToolCall(id=call.id, name=call.name, arguments=json.dumps({"input": call.arguments}))
        for call in message.tool_calls
    )
    message = Message(role="assistant", content=message.content, tool_calls=calls)
    reply = orjson.loads(responses.render_response(request, answer(message)))
    assert digest_message(echoed(responses, reply)) == digest_message(message)


@pytest.mark.parametrize("text", ['{"input": "x", "more": 1}', '{"other": "x"}', '{"input": 1}', '["x"]', '"x"', "{"])
def test_what_is_no_single_text_reaches_a_custom_tool_as_it_was_written(text: str) -> None:
    call = ToolCall(id="a", name="patch", arguments=text)
    said = answer(Message(role="assistant", tool_calls=(call,)))
    reply = orjson.loads(responses.render_response(Request(messages=(), custom_tools=("patch",)), said))
    assert [item["input"] for item in reply["output"]] == [text]


@pytest.mark.parametrize(
    ("dialect", "usage"),
    [
        (chat, {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}),
        (anthropic_messages, {"input_tokens": 6, "cache_read_input_tokens": 4, "output_tokens": 5}),
        (responses, {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15}),
    ],
)
def test_usage_is_what_the_engine_counted_in_each_providers_words(dialect: Any, usage: dict[str, int]) -> None:
    """Harnesses decide by it when to compact their history."""
    counts = {"num_prompt_tokens": 10, "num_cached_tokens": 4, "num_sampled_tokens": 5, "num_reasoning_tokens": 2}
    said = answer(Message(role="assistant", content="x"), **counts)
    assert orjson.loads(dialect.render_response(Request(messages=()), said))["usage"].items() >= usage.items()


@pytest.mark.parametrize(
    ("dialect", "asked"),
    [
        (chat, {"response_format": {"type": "json_schema"}}),
        (anthropic_messages, {"output_config": {"format": {"type": "json_schema"}}}),
        (responses, {"text": {"format": {"type": "json_schema"}}}),
    ],
)
def test_a_schema_that_is_asked_for_is_seen(dialect: Any, asked: dict[str, Any]) -> None:
    """It tells a title or a summary for the harness's own use from the work itself."""
    body = {"messages": [USER], "input": [USER]}
    assert not dialect.parse_request(orjson.dumps(body)).structured
    assert dialect.parse_request(orjson.dumps(body | asked)).structured


def events(chunks: Any) -> list[dict[str, Any]]:
    parsed = []
    for chunk in chunks:
        head, data = chunk.decode().removesuffix("\n\n").split("\n")
        parsed.append(orjson.loads(data.removeprefix("data: ")))
        assert head == f"event: {parsed[-1]['type']}"
    return parsed


@given(message=REPLIES, finish=st.sampled_from(["stop", "length", "tool_calls"]))
def test_chunks_of_messages_add_up_to_the_response(message: Message, finish: str) -> None:
    request, said = Request(messages=()), answer(message, finish=finish)
    whole = orjson.loads(anthropic_messages.render_response(request, said))
    built: dict[str, Any] = {}
    for event in events(anthropic_messages.render_chunks(request, said)):
        match event["type"]:
            case "message_start":
                built = event["message"]
            case "content_block_start":
                built["content"].append({**event["content_block"], "json": ""})
            case "content_block_delta":
                block, delta = built["content"][event["index"]], event["delta"]
                kind = delta["type"].removesuffix("_delta")
                block["json" if kind == "input_json" else kind] += delta.get(kind) or delta.get("partial_json") or ""
            case "content_block_stop":
                block = built["content"][event["index"]]
                text = block.pop("json")
                if block["type"] == "tool_use":
                    block["input"] = orjson.loads(text)
            case "message_delta":
                built |= event["delta"] | {"usage": event["usage"]}
    assert built == whole


@given(message=REPLIES, finish=st.sampled_from(["stop", "length", "tool_calls"]))
def test_chunks_of_responses_add_up_to_the_response(message: Message, finish: str) -> None:
    request, said = Request(messages=()), answer(message, finish=finish)
    whole = orjson.loads(responses.render_response(request, said))
    seen = events(responses.render_chunks(request, said))
    assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
    assert seen[-1]["response"] == whole
    assert [event["item"] for event in seen if event["type"] == "response.output_item.done"] == whole["output"]
    text = "".join(event["delta"] for event in seen if event["type"] == "response.output_text.delta")
    assert text == message.content
    arguments = [e["delta"] for e in seen if e["type"] == "response.function_call_arguments.delta"]
    assert arguments == [call.arguments for call in message.tool_calls]


def test_an_overflow_is_told_in_each_providers_words() -> None:
    error = ContextOverflow(5000, 4096)
    assert orjson.loads(anthropic_messages.render_error(error)) == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "prompt is too long: 5000 tokens > 4096 maximum"},
    }
    for dialect in (chat, responses):
        told = orjson.loads(dialect.render_error(error))["error"]
        assert told["code"] == "context_length_exceeded" and "4096 tokens" in told["message"]
    request = Request(messages=(), stream=True)
    assert [bool(d.render_stream_error(request, error)) for d in (chat, anthropic_messages, responses)] == [0, 0, 1]
    assert not responses.render_stream_error(request, ProviderError(503, "engine_failed", "x"))


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (401, "authentication_error"), (413, "request_too_large"), (503, "api_error")],
)
def test_error_types_of_messages(status: int, kind: str) -> None:
    assert orjson.loads(anthropic_messages.render_error(ProviderError(status, "x", "y")))["error"]["type"] == kind


# ---------------------------------------------------------------- canonical form


def canonical(dialect: Any, **fields: Any) -> tuple[str, ...]:
    request = dialect.parse_request(orjson.dumps(fields))
    return prefix_digests(request.messages, request.tools)


def test_spellings_of_messages_that_mean_the_same() -> None:
    def digests(*messages: Any, **fields: Any) -> tuple[str, ...]:
        return canonical(anthropic_messages, messages=list(messages), **fields)

    mark = {"cache_control": {"type": "ephemeral"}}
    text, two = {"type": "text", "text": "x", **mark}, {"type": "text", "text": "y"}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "r"}
    other = {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "r", **mark}], **mark}

    def use(**fields: Any) -> Any:
        return {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", **fields}]}

    def user(*blocks: Any) -> Any:
        return {"role": "user", "content": list(blocks)}

    assert digests(USER) == digests(user(text))
    assert digests(user(text, two)) == digests(USER, user(two))
    assert digests(user(text, two))[0] == digests(USER)[0]
    assert digests(user(result, two)) == digests(user(other), user(two))
    assert digests(USER, use(input={"a": 5000.0})) == digests(USER, use(input={"a": 5000}, **mark))
    assert digests(USER, use(input={"a": 1})) != digests(USER, use(input={"a": 2}))
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=abc;"}
    system = [billing, {"type": "text", "text": "You.", **mark}]
    assert digests(USER, system=system) == digests(USER, system="You.") == digests(USER, system=[system[1]])
    tool = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
    assert digests(USER, tools=[tool]) == digests(USER, tools=[{**tool, **mark, "type": "custom"}])
    assert digests(USER, tools=[tool]) != digests(USER)
    assert digests(USER, tools=[{"type": "web_search_20250305", "name": "web_search"}]) == digests(USER)


def test_spellings_of_responses_that_mean_the_same() -> None:
    def digests(*items: Any, **fields: Any) -> tuple[str, ...]:
        return canonical(responses, input=list(items), **fields)

    text = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}], "id": "i"}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "s"}]}
    thought = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "t"}]}
    call = {"type": "function_call", "name": "f", "arguments": '{"a": 1}', "call_id": "c"}
    assert canonical(responses, input="x") == digests(USER) == digests(text)
    assert digests(USER, thought, said, call) == digests(
        text,
        {**thought, "id": "z", "content": None, "encrypted_content": None},
        {**said, "id": "m", "status": "completed"},
        {**call, "id": "f", "status": "completed", "arguments": '{"a":1}'},
    )
    two, more = ([{"type": kind, "text": t} for t in ("x", "y")] for kind in ("input_text", "output_text"))
    assert digests({"role": "user", "content": two}) == digests(USER, {"role": "user", "content": "y"})
    assert digests(USER, {**said, "content": more}) == digests(USER, {**said, "content": "xy"})
    assert len(digests(USER, thought, said, call, call)) == 2
    assert len(digests(USER, said, said)) == 3
    assert len(digests(USER, call, said)) == 3
    assert digests(USER, instructions="You.") == digests({"role": "developer", "content": "You."}, USER)
