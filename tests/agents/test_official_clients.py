"""The providers' own Python clients against the gateway on real sockets, in each dialect, streamed and not."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from scripted import BASH, RENDERER, ScriptedEngine, Served, decode, encode, full_ids, serving, tool_call

from gyre.agents import gateway
from gyre.events.types import BranchForked, CallDelivered, CallStarted, ContextCompacted, SubAgentSpawned

ANTHROPIC_BASH: Any = {
    "name": "bash",
    "description": "Runs a command.",
    "input_schema": BASH["function"]["parameters"],  # type: ignore[index]
    "cache_control": {"type": "ephemeral"},
}
RESPONSES_BASH: Any = {"type": "function", "name": "bash", "parameters": BASH["function"]["parameters"], "strict": None}  # type: ignore[index]
IMAGE = "iVBORw0KGgo="


def run(case: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(case, 60))


def messages_client(served: Served, session: str = "s1") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=served.url(session).removesuffix("/v1"), api_key="none", max_retries=0)


def openai_client(served: Served, session: str = "s1") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=served.url(session), api_key="none", max_retries=0)


async def assert_one_chain(served: Served, num_calls: int) -> None:
    """Every call continues the one before it, and its prompt begins with exactly the other's ids."""
    events = await served.events()
    calls = [e for e in events if isinstance(e, CallStarted)]
    assert [c.rule for c in calls] == ["root"] + ["continue"] * (num_calls - 1)
    for n in range(1, num_calls):
        before = full_ids(events, calls[n - 1].call)
        assert list(served.engine.asked[n].input_ids)[: len(before)] == before


SCRIPT = [
    "<think>\nWhere am I?\n</think>\n\nI look." + tool_call("ls") + tool_call("pwd"),
    tool_call("cat a"),
    "done",
]


# ---------------------------------------------------------------- Anthropic's Messages


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("beta", [False, True])
def test_anthropic_client_calls_tools_over_turns(tmp_path: Path, stream: bool, beta: bool) -> None:
    async def case() -> None:
        async with serving(tmp_path, ScriptedEngine(script=lambda n, _: SCRIPT[n])) as served:
            client = messages_client(served)
            api: Any = client.beta.messages if beta else client.messages
            extra = {"betas": ["a-beta-that-nobody-knows"]} if beta else {}
            history: list[Any] = [{"role": "user", "content": "Look."}]
            replies = []
            for _ in range(3):
                fields: dict[str, Any] = {
                    "model": "gyre-policy",
                    "max_tokens": 200,
                    "system": "You are there.",
                    "messages": history,
                    "tools": [ANTHROPIC_BASH, {"type": "web_search_20250305", "name": "web_search"}],
                    "thinking": {"type": "enabled", "budget_tokens": 1024},
                    **extra,
                }
                if stream:
                    async with api.stream(**fields) as events:
                        reply = await events.get_final_message()
                else:
                    reply = await api.create(**fields)
                replies.append(reply)
                history.append({"role": "assistant", "content": [b.model_dump() for b in reply.content]})
                calls = [b for b in reply.content if b.type == "tool_use"]
                results: list[Any] = [
                    {"type": "tool_result", "tool_use_id": c.id, "content": f"rc=0 {c.input['command']}"} for c in calls
                ]
                history.append({"role": "user", "content": results})
            first = replies[0]
            assert [b.type for b in first.content] == ["thinking", "text", "tool_use", "tool_use"]
            assert (first.content[0].thinking, first.content[1].text) == ("Where am I?", "I look.")
            assert [b.input for b in first.content[2:]] == [{"command": "ls"}, {"command": "pwd"}]
            assert [r.stop_reason for r in replies] == ["tool_use", "tool_use", "end_turn"]
            for reply, asked in zip(replies, served.engine.asked, strict=True):
                usage = reply.usage
                assert usage.input_tokens + usage.cache_read_input_tokens == len(asked.input_ids)
                assert usage.cache_read_input_tokens == 8
            assert replies[2].usage.output_tokens == len(encode("done")) + 1
            await assert_one_chain(served, 3)
            assert '"name": "bash"' in decode(served.engine.asked[0].input_ids)
            assert "web_search" not in decode(served.engine.asked[0].input_ids)
            assert len(await served.until(CallDelivered, 3)) == 3

    run(case())


def test_anthropic_client_sees_why_a_reply_ended(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path, ScriptedEngine(script=lambda n, _: "one STOP two")) as served:
            api = messages_client(served).messages
            user: Any = [{"role": "user", "content": "Say."}]
            stopped = await api.create(model="m", max_tokens=99, messages=user, stop_sequences=["two", "STOP"])
            assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP")
            assert stopped.content[0].model_dump()["text"] == "one "
            cut = await api.create(model="m", max_tokens=3, messages=user)
            assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
            assert cut.content[0].model_dump()["text"] == "one"

    run(case())


def test_anthropic_client_counts_tokens_and_lists_models(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path) as served:
            client = messages_client(served)
            fields: Any = {"model": "m", "messages": [{"role": "user", "content": "Say."}], "tools": [ANTHROPIC_BASH]}
            counted = await client.messages.count_tokens(**fields)
            counted_too = await client.beta.messages.count_tokens(**fields)
            assert await served.events(CallStarted) == []
            reply = await client.messages.create(max_tokens=9, **fields)
            usage = reply.usage
            assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
            assert counted.input_tokens == counted_too.input_tokens
            assert [m.id async for m in client.models.list()] == ["gyre-policy", "gyre-small"]
            assert (await client.models.retrieve("gyre-small")).display_name == "gyre-small"
            with pytest.raises(anthropic.NotFoundError):
                await client.models.retrieve("other")
            assert [m.id async for m in openai_client(served).models.list()] == ["gyre-policy", "gyre-small"]

    run(case())


def test_base_answers_whoever_asks_whether_it_is_there(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path) as served, aiohttp.ClientSession() as http:
            base = served.url().removesuffix("/v1")
            for method in ("HEAD", "GET"):
                for path in ("", "/", "/v1", "/api/hello"):
                    async with http.request(method, base + path) as response:
                        assert response.status == 200
            assert await served.events(CallStarted) == []

    run(case())


def test_anthropic_client_gets_its_providers_errors_and_nothing_is_recorded(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path) as served:
            api = messages_client(served).messages
            image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IMAGE}}
            result: Any = {"type": "tool_result", "tool_use_id": "t", "content": [image]}
            for block in (image, result):
                with pytest.raises(anthropic.BadRequestError) as bad:
                    await api.create(model="m", max_tokens=9, messages=[{"role": "user", "content": [block]}])
                assert bad.value.body["type"] == "error"  # type: ignore[index,call-overload]
                assert bad.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index,call-overload]
                assert "messages.0.content.0" in str(bad.value) and "'image'" in str(bad.value)
            long: Any = [{"role": "user", "content": "x" * 5000}]
            counted = await api.count_tokens(model="m", messages=long)
            for stream in (False, True):
                with pytest.raises(anthropic.BadRequestError) as overflow:
                    await api.create(model="m", max_tokens=9, messages=long, stream=stream)
                assert f"prompt is too long: {counted.input_tokens} tokens > 4096 maximum" in str(overflow.value)
            with pytest.raises(anthropic.AuthenticationError):
                await messages_client(served, "forged").messages.create(model="m", max_tokens=9, messages=long)
            with pytest.raises(anthropic.NotFoundError):
                await messages_client(served).messages.batches.list()
            await served.finish("x-s1")
            with pytest.raises(anthropic.APIStatusError) as over:
                await api.create(model="m", max_tokens=9, messages=long)
            assert over.value.status_code == 410
            assert await served.events(CallStarted) == []

    run(case())


def test_session_by_the_key_of_anthropics_client(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path) as served:
            root = f"http://127.0.0.1:{served.port}"
            for credential in ({"api_key": "s1"}, {"auth_token": "s1"}):
                client = anthropic.AsyncAnthropic(base_url=root, max_retries=0, **credential)  # type: ignore[arg-type]
                reply = await client.messages.create(
                    model="m", max_tokens=9, messages=[{"role": "user", "content": "Say."}]
                )
                assert reply.type == "message"

    run(case())


def test_anthropic_stream_that_waits_gets_pings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "KEEP_ALIVE_S", 0.02)

    async def case() -> None:
        async with serving(tmp_path, ScriptedEngine(delay_s=0.1)) as served:
            user: Any = [{"role": "user", "content": "Say."}]
            api = messages_client(served).messages
            async with api.stream(model="m", max_tokens=99, messages=user) as events:
                assert await events.get_final_text() == "reply 0"
            raw = await api.with_raw_response.create(model="m", max_tokens=99, messages=user, stream=True)
            text = (await raw.http_response.aread()).decode()
            assert text.startswith('event: ping\ndata: {"type": "ping"}\n\n') and "message_stop" in text

    run(case())


def test_what_claude_code_changes_between_turns_changes_no_history(tmp_path: Path) -> None:
    """Markers move, text becomes blocks and back, the billing block changes; a summary is asked for in a block
    that is appended to the last message, and messages of one role follow each other."""

    async def case() -> None:
        async with serving(tmp_path, ScriptedEngine(script=lambda n, _: [tool_call("ls"), "done", "sum"][n])) as served:
            api = messages_client(served).messages
            mark = {"cache_control": {"type": "ephemeral"}}

            def system(billing: str) -> Any:
                return [
                    {"type": "text", "text": f"x-anthropic-billing-header: {billing}"},
                    {"type": "text", "text": "You are there.", **mark},
                ]

            fields: Any = {"model": "m", "max_tokens": 99, "tools": [ANTHROPIC_BASH]}
            asked: Any = [{"type": "text", "text": "Reminder."}, {"type": "text", "text": "Look.", **mark}]
            late: Any = {"role": "system", "content": [{"type": "text", "text": "Late.", **mark}]}
            first = await api.create(system=system("a"), messages=[{"role": "user", "content": asked}, late], **fields)
            call = first.content[0]
            assert call.type == "tool_use"
            echo = {"role": "assistant", "content": [call.model_dump()]}
            result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "a b", **mark}
            kept: Any = [
                {"role": "user", "content": "Reminder."},
                {"role": "user", "content": "Look."},
                {"role": "system", "content": "Late."},
                echo,
            ]
            await api.create(system=system("b"), messages=[*kept, {"role": "user", "content": [result]}], **fields)
            await assert_one_chain(served, 2)
            asks_summary: Any = [
                {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "a b"}]}
            ]
            asks_summary.append({"type": "text", "text": "Summarise."})
            await api.create(system=system("c"), messages=[*kept, {"role": "user", "content": asks_summary}], **fields)
            started = (await served.events(CallStarted))[2]
            shared = decode(served.engine.asked[2].input_ids[: started.shared])
            assert "a b" in shared and "Summarise." not in shared
            assert decode(served.engine.asked[2].input_ids).count("Reminder.") == 1

    run(case())


def test_trailing_assistant_message_is_accepted(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path) as served:
            api = messages_client(served).messages
            history: Any = [{"role": "user", "content": "Say."}]
            reply = await api.create(model="m", max_tokens=99, messages=history)
            history.append({"role": "assistant", "content": [b.model_dump() for b in reply.content]})
            again = await api.create(model="m", max_tokens=99, messages=history)
            assert again.content[0].model_dump()["text"] == "reply 1"
            await assert_one_chain(served, 2)

    run(case())


def test_sub_agent_and_compaction_are_recorded_with_what_they_came_from(tmp_path: Path) -> None:
    async def case() -> None:
        spawn = '<tool_call>{"name": "agent", "arguments": {"prompt": "Count the files."}}</tool_call>'
        script = [spawn, "There are two.", "The user wants files counted.", "Two."]
        async with serving(tmp_path, ScriptedEngine(script=lambda n, _: script[n])) as served:
            api = messages_client(served).messages
            agent: Any = {"name": "agent", "input_schema": {"type": "object"}}

            async def ask(messages: Any, request_class: str, **fields: Any) -> Any:
                headers = {"x-claude-code-request-class": request_class}
                reply = await api.create(model="m", max_tokens=99, messages=messages, extra_headers=headers, **fields)
                return {"role": "assistant", "content": [b.model_dump() for b in reply.content]}

            task: Any = [{"role": "user", "content": "How many files?"}]
            call = await ask(task, "main", tools=[agent], system="Main.")
            child = await ask([{"role": "user", "content": "Count the files."}], "subagent", system="Sub.")
            result = {"type": "tool_result", "tool_use_id": call["content"][0]["id"], "content": child["content"]}
            result["content"] = child["content"][0]["text"]
            asks = {"role": "user", "content": [result, {"type": "text", "text": "Summarise."}]}
            summary = await ask([*task, call, asks], "compaction", tools=[agent], system="Main.")
            text = "So far: " + summary["content"][0]["text"]
            await ask([{"role": "user", "content": text}], "main", tools=[agent], system="Main.")
            calls = await served.events(CallStarted)
            assert [c.role_class for c in calls] == ["main", "sub-agent", "main-summary", "main"]
            spawned, compacted = await served.events((SubAgentSpawned, ContextCompacted))
            assert (spawned.call, spawned.parent_call) == (calls[1].call, calls[0].call)
            assert (compacted.call, compacted.summary_call) == (calls[3].call, calls[2].call)
            assert [e.kind for e in await served.events(BranchForked)] == ["compaction"]

    run(case())


# ---------------------------------------------------------------- OpenAI's Responses


@pytest.mark.parametrize("stream", [False, True])
def test_responses_client_calls_tools_over_turns(tmp_path: Path, stream: bool) -> None:
    async def case() -> None:
        async with serving(tmp_path, ScriptedEngine(script=lambda n, _: SCRIPT[n])) as served:
            api: Any = openai_client(served).responses
            history: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Look."}]
            replies = []
            for _ in range(3):
                fields: dict[str, Any] = {
                    "model": "gyre-policy",
                    "instructions": "You are there.",
                    "input": history,
                    "tools": [RESPONSES_BASH, {"type": "web_search"}],
                    "store": False,
                    "include": ["reasoning.encrypted_content"],
                    "parallel_tool_calls": True,
                    "reasoning": {"effort": "low"},
                }
                if stream:
                    async with api.stream(**fields) as events:
                        reply = await events.get_final_response()
                else:
                    reply = await api.create(**fields)
                replies.append(reply)
                # As harnesses send it back: without ids and status, with an empty content.
                for item in reply.output:
                    echo = item.model_dump(exclude={"id", "status", "parsed", "parsed_arguments"})
                    history.append(echo | ({"content": None} if item.type == "reasoning" else {}))
                history += [
                    {"type": "function_call_output", "call_id": i.call_id, "output": f"rc=0 {i.arguments}"}
                    for i in reply.output
                    if i.type == "function_call"
                ]
            first = replies[0]
            assert [i.type for i in first.output] == ["reasoning", "message", "function_call", "function_call"]
            assert first.output[0].summary[0].text == "Where am I?"
            assert first.output_text == "I look."
            assert [i.arguments for i in first.output[2:]] == ['{"command": "ls"}', '{"command": "pwd"}']
            assert {r.status for r in replies} == {"completed"}
            for reply, asked in zip(replies, served.engine.asked, strict=True):
                assert reply.usage.input_tokens == len(asked.input_ids)
                assert reply.usage.input_tokens_details.cached_tokens == 8
            details = first.usage.output_tokens_details
            assert details.reasoning_tokens == len(encode("<think>\nWhere am I?\n</think>"))
            assert replies[2].usage.output_tokens == len(encode("done")) + 1
            await assert_one_chain(served, 3)
            assert "You are there." in decode(served.engine.asked[0].input_ids)
            assert len(await served.until(CallDelivered, 3)) == 3

    run(case())


def test_responses_events_are_numbered_and_named(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path, ScriptedEngine(script=lambda n, _: SCRIPT[n])) as served:
            api = openai_client(served).responses
            events = [e async for e in await api.create(model="m", input="Look.", stream=True)]
            assert [e.sequence_number for e in events] == list(range(len(events)))
            kinds = [e.type for e in events]
            assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
            assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4

    run(case())


def test_responses_client_sees_that_a_reply_was_cut(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path, ScriptedEngine(script=lambda n, _: "one two three")) as served:
            api = openai_client(served).responses
            reply = await api.create(model="m", input="Say.", max_output_tokens=3)
            assert reply.status == "incomplete" and reply.output_text == "one"
            assert reply.incomplete_details is not None
            assert reply.incomplete_details.reason == "max_output_tokens"
            events = [e async for e in await api.create(model="m", input="Say.", max_output_tokens=3, stream=True)]
            assert events[-1].type == "response.incomplete"

    run(case())


def test_responses_client_calls_custom_tools_and_namespaces(tmp_path: Path) -> None:
    async def case() -> None:
        patch = '<tool_call>{"name": "apply_patch", "arguments": {"input": "*** Begin\\n+x"}}</tool_call>'
        spawn = '<tool_call>{"name": "spawn_agent", "arguments": {"message": "go"}}</tool_call>'
        async with serving(tmp_path, ScriptedEngine(script=lambda n, _: [patch + spawn, "done"][n])) as served:
            api: Any = openai_client(served).responses
            grammar = {"type": "grammar", "syntax": "lark", "definition": "start: hunk"}
            spawn_tool = {"type": "function", "name": "spawn_agent", "parameters": {"type": "object"}}
            tools = [
                {"type": "custom", "name": "apply_patch", "description": "Patches.", "format": grammar},
                {"type": "namespace", "name": "agents", "tools": [spawn_tool]},
            ]
            history: list[Any] = [{"role": "user", "content": "Patch."}]
            async with api.stream(model="m", input=history, tools=tools) as events:
                reply = await events.get_final_response()
            custom, call = (item.model_dump() for item in reply.output)
            assert (custom["type"], custom["input"]) == ("custom_tool_call", "*** Begin\n+x")
            assert (call["type"], call["name"], call["namespace"]) == ("function_call", "spawn_agent", "agents")
            prompt = decode(served.engine.asked[0].input_ids)
            assert "start: hunk" in prompt and '"name": "spawn_agent"' in prompt
            history += [
                custom,
                call,
                {"type": "custom_tool_call_output", "call_id": custom["call_id"], "output": "ok"},
                {"type": "function_call_output", "call_id": call["call_id"], "output": "ok"},
            ]
            assert (await api.create(model="m", input=history, tools=tools)).output_text == "done"
            await assert_one_chain(served, 2)

    run(case())


def test_responses_client_gets_its_providers_errors_and_nothing_is_recorded(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path) as served:
            api = openai_client(served).responses
            image: Any = {"type": "input_image", "detail": "auto", "image_url": f"data:image/png;base64,{IMAGE}"}
            with pytest.raises(openai.BadRequestError) as bad:
                await api.create(model="m", input=[{"role": "user", "content": [image]}])
            assert bad.value.type == "invalid_request_error" and "input[0].content[0]" in str(bad.value)
            with pytest.raises(openai.BadRequestError) as stored:
                await api.create(model="m", input="x", previous_response_id="resp_1")
            assert "previous_response_id" in str(stored.value)
            with pytest.raises(openai.BadRequestError) as overflow:
                await api.create(model="m", input="x" * 5000)
            assert (overflow.value.code, overflow.value.param) == ("context_length_exceeded", "input")
            events = [e async for e in await api.create(model="m", input="x" * 5000, stream=True)]
            assert [e.type for e in events] == ["response.created", "response.failed"]
            failed: Any = events[-1]
            assert failed.response.error.code == "context_length_exceeded"
            with pytest.raises(openai.AuthenticationError):
                await openai_client(served, "forged").responses.create(model="m", input="x")
            assert await served.events(CallStarted) == []

    run(case())


def test_responses_stream_that_waits_is_kept_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "KEEP_ALIVE_S", 0.02)

    async def case() -> None:
        async with serving(tmp_path, ScriptedEngine(delay_s=0.1)) as served:
            async with openai_client(served).responses.stream(model="m", input="Say.") as events:
                reply = await events.get_final_response()
            assert reply.output_text == "reply 0"

    run(case())


def test_one_session_in_three_dialects_is_one_history(tmp_path: Path) -> None:
    """The canonical form knows no dialect."""

    async def case() -> None:
        async with serving(tmp_path) as served:
            first = await served.say({"role": "user", "content": "Say."})
            turn: list[Any] = [
                {"role": "user", "content": "Say."},
                {"role": "assistant", "content": first["content"]},
                {"role": "user", "content": "More."},
            ]
            second = await messages_client(served).messages.create(model="m", max_tokens=99, messages=turn)
            text = second.content[0].model_dump()["text"]
            turn += [{"role": "assistant", "content": text}, {"role": "user", "content": "More."}]
            await openai_client(served).responses.create(model="m", input=turn)
            await assert_one_chain(served, 3)
            assert await served.events(BranchForked) == []
            assert decode(served.engine.asked[2].input_ids) == RENDERER.render_text(turn)

    run(case())
