"""The gateway on real sockets; each row of *Gateway* in the list of known faults has a test here."""

import asyncio
import json
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest
from scripted import (
    BASH,
    RENDERER,
    Asked,
    ScriptedEngine,
    config,
    decode,
    encode,
    events_of,
    full_ids,
    generation,
    log_until,
    serving,
    tool_call,
)

from gyre.agents import gateway, reference_harness
from gyre.agents.dialect import ProviderError
from gyre.agents.engine_client import Generation
from gyre.errors import ConfigError, EngineError
from gyre.events.log import Writer
from gyre.events.memory import MemoryLog
from gyre.events.tokens import num_tokens, unpack_ids
from gyre.events.types import (
    BranchForked,
    CallCompleted,
    CallCut,
    CallDelivered,
    CallFailed,
    CallStarted,
    CellLost,
    RunFinished,
    RunResumed,
    SessionsRerouted,
    SubAgentSpawned,
)

USER = {"role": "user", "content": "Do this."}


def run(case: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(case, 60))


def client(url: str, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, **options)


def asked_ids(asked: Asked) -> list[int]:
    return list(asked.input_ids)


# ---------------------------------------------------------------- replies


def test_official_client_gets_a_reply_with_truthful_usage(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path) as served:
            reply = await client(served.url()).chat.completions.create(model="policy", messages=[USER])
            assert reply.choices[0].message.content == "reply 0"
            assert reply.choices[0].finish_reason == "stop"
            assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
            assert reply.usage.prompt_tokens == len(served.engine.asked[0].input_ids)
            assert reply.usage.completion_tokens == len(encode("reply 0")) + 1
            assert reply.usage.prompt_tokens_details.cached_tokens == 8
            await served.until(CallDelivered)
            kinds = [type(e) for e in await served.events((CallStarted, CallCompleted, CallDelivered))]
            assert kinds == [CallStarted, CallCompleted, CallDelivered]

    run(case())


@pytest.mark.parametrize("stream", [False, True])
def test_official_client_calls_tools_over_turns(tmp_path: Path, stream: bool) -> None:
    """Stream and non-stream (agent-lightning refused `stream: true`); ids of call n+1 begin with those of call n."""

    async def case() -> None:
        script = [tool_call("ls"), "thinking" + tool_call("cat a"), "done"]
        async with serving(tmp_path, ScriptedEngine(script=lambda n, _: script[n])) as served:
            api = client(served.url()).chat.completions
            messages: list[Any] = [USER]
            for turn in range(3):
                if stream:
                    content, calls, finish, usage = "", [], None, None
                    async for chunk in await api.create(
                        model="policy",
                        messages=messages,
                        tools=[BASH],
                        stream=True,
                        stream_options={"include_usage": True},
                    ):
                        usage = chunk.usage or usage
                        for choice in chunk.choices:
                            content += choice.delta.content or ""
                            finish = choice.finish_reason or finish
                            calls += [c.model_dump(exclude={"index"}) for c in choice.delta.tool_calls or ()]
                    assert usage is not None and usage.prompt_tokens == len(served.engine.asked[-1].input_ids)
                    echo: dict[str, Any] = {"role": "assistant", "content": content}
                    if calls:
                        echo["tool_calls"] = calls
                else:
                    reply = await api.create(model="policy", messages=messages, tools=[BASH])
                    finish = reply.choices[0].finish_reason
                    echo = reply.choices[0].message.model_dump(exclude_none=True)
                assert finish == ("stop" if turn == 2 else "tool_calls")
                messages.append(echo)
                messages += [
                    {"role": "tool", "tool_call_id": c["id"], "content": f"rc=0 {turn}"}
                    for c in echo.get("tool_calls", ())
                ]
            events = await served.events()
            calls = [e.call for e in events if isinstance(e, CallStarted)]
            for n in (1, 2):
                before = full_ids(events, calls[n - 1])
                assert asked_ids(served.engine.asked[n])[: len(before)] == before
            assert decode(served.engine.asked[2].input_ids) == RENDERER.render_text(messages[:-1], [BASH])
            assert [e.rule for e in events if isinstance(e, CallStarted)] == ["root", "continue", "continue"]
            ids = [c["id"] for m in messages for c in m.get("tool_calls", ())]
            assert len(set(ids)) == 2

    run(case())


def test_prompt_of_every_call_is_what_its_events_say(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path) as served:
            history: list[Any] = [USER]
            for turn in range(4):
                history += [await served.say(*history), {"role": "user", "content": f"go on {turn}"}]
            await served.say(history[0], {"role": "user", "content": "another way"})
            events = await served.events()
            for asked in served.engine.asked:
                assert full_ids(events, asked.rid)[: len(asked.input_ids)] == asked_ids(asked)

    run(case())


def test_started_and_completed_are_on_the_log_before_engine_and_client_see_anything(tmp_path: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine()
        async with serving(tmp_path, engine) as served:
            seen = []

            def script(n: int, prompt: str) -> str:
                seen.append(any(b"call.started" in body for _, body in served.log._stored))
                return "ok"

            engine.script = script
            await served.say(USER)
            assert seen == [True]
            assert len(await served.events(CallCompleted)) == 1

    run(case())


def test_session_by_api_key_and_over_the_socket_file(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path) as served:
            connector = aiohttp.UnixConnector(path=served.socket_path)
            async with aiohttp.ClientSession(connector=connector) as http:
                for path, headers in (("/v1", {"authorization": "Bearer s1"}), ("/s/s1/v1", {}), ("/s/s1", {})):
                    body = {"messages": [USER]}
                    async with http.post(f"http://g{path}/chat/completions", json=body, headers=headers) as response:
                        assert response.status == 200
            assert {e.session for e in await served.events(CallStarted)} == {"s1"}

    run(case())


def test_stop_text_is_not_shown_but_its_tokens_are_kept(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path, ScriptedEngine(script=lambda n, _: "a b STOP")) as served:
            message = await served.say(USER, stop="STOP")
            assert message["content"] == "a b "
            (completed,) = await served.events(CallCompleted)
            assert decode(unpack_ids(completed.sampled)) == "a b STOP<|im_end|>"
            await served.say(USER, message, USER)
            assert (await served.events(CallStarted))[1].rule == "continue"

    run(case())


def test_sampling_is_the_sessions_and_a_smaller_bound_is_kept(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path) as served:
            await served.open_session("e1", temperature=0.0)
            await served.say(USER, temperature=0.5, max_tokens=7)
            await served.say(USER, temperature=0.5, session="e1")
            assert [a.temperature for a in served.engine.asked] == [1.0, 0.0]
            assert [a.max_tokens for a in served.engine.asked] == [7, 256]

    run(case())


# ---------------------------------------------------------------- histories that harnesses really send


def test_nonce_free_prefix_survives_another_spelling_of_the_history(tmp_path: Path) -> None:
    """vllm#36829, claude-code#68900: what the policy does not see must not break the prefix."""

    async def case() -> None:
        async with serving(tmp_path, ScriptedEngine(script=lambda n, _: tool_call("ls"))) as served:
            reply = await served.say(USER, tools=[BASH])
            call = reply["tool_calls"][0]
            respelled = {
                "role": "assistant",
                "content": [{"type": "text", "text": ""}],
                "tool_calls": [
                    {**call, "id": "other", "function": {"name": "bash", "arguments": '{ "command" : "ls" }'}}
                ],
            }
            block = [{"type": "text", "text": "Do this.", "cache_control": {"type": "ephemeral"}}]
            result = {"role": "tool", "tool_call_id": "other", "content": "rc=0"}
            await served.say({"role": "user", "content": block}, respelled, result, tools=[BASH])
            started = await served.events(CallStarted)
            assert [e.rule for e in started] == ["root", "continue"]
            assert started[1].base == started[0].call

    run(case())


def test_echo_that_differs_is_context_on_a_branch_of_its_own(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path, ScriptedEngine(script=lambda n, _: "sampled text")) as served:
            await served.say(USER)
            other = {"role": "assistant", "content": "edited text"}
            await served.say(USER, other, USER)
            started = await served.events(CallStarted)
            assert started[1].rule == "fork"
            assert "edited text" in decode(unpack_ids(started[1].context))
            assert decode(served.engine.asked[1].input_ids) == RENDERER.render_text([USER, other, USER])
            (forked,) = await served.events(BranchForked)
            assert forked.kind == "drift"

    run(case())


def test_harness_that_drops_the_reply_forks_at_the_last_common_message(tmp_path: Path) -> None:
    """mini-swe-agent after a format error."""

    async def case() -> None:
        async with serving(tmp_path) as served:
            error = {"role": "user", "content": "format error"}
            await served.say(USER)
            await served.say(USER, error)
            started = await served.events(CallStarted)
            assert (started[1].rule, started[1].base) == ("fork", started[0].call)
            assert started[1].shared == started[0].marks[-1].end
            assert decode(served.engine.asked[1].input_ids) == RENDERER.render_text([USER, error])
            assert [e.kind for e in await served.events(BranchForked)] == ["edit"]

    run(case())


def test_reply_cut_by_length_is_closed_by_context(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path, ScriptedEngine(script=lambda n, _: "a long reply")) as served:
            message = await served.say(USER, max_tokens=6)
            assert message["content"] == "a long"
            await served.say(USER, message, USER)
            assert decode(served.engine.asked[1].input_ids) == RENDERER.render_text([USER, message, USER])
            started = await served.events(CallStarted)
            assert decode(unpack_ids(started[1].context)).startswith("<|im_end|>")
            assert (await served.events(CallCompleted))[0].finish == "length"

    run(case())


def test_other_tools_are_another_history(tmp_path: Path) -> None:
    """verifiers#955."""

    async def case() -> None:
        async with serving(tmp_path) as served:
            reply = await served.say(USER, tools=[BASH])
            await served.say(USER, reply, USER)
            assert [e.rule for e in await served.events(CallStarted)] == ["root", "root"]

    run(case())


def test_calls_overlap_and_an_open_call_is_a_base(tmp_path: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine(hold=asyncio.Event())
        async with serving(tmp_path, engine) as served:
            first = asyncio.create_task(served.say(USER))
            await served.until(CallStarted)
            second = asyncio.create_task(served.say(USER, {"role": "user", "content": "more"}))
            third = asyncio.create_task(served.say(USER))
            started = await served.until(CallStarted, 3)
            assert {e.base for e in started[1:]} == {started[0].call}
            assert engine.hold is not None
            engine.hold.set()
            replies = await asyncio.gather(first, second, third)
            assert len({r["content"] for r in replies}) == 3
            assert engine.most_running == 3
            events = await served.events()
            for asked in engine.asked:
                assert full_ids(events, asked.rid)[: len(asked.input_ids)] == asked_ids(asked)

    run(case())


def test_same_request_again_gets_a_new_reply_and_shares_the_whole_prompt(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path) as served:
            replies = [(await served.say(USER))["content"] for _ in range(3)]
            assert replies == ["reply 0", "reply 1", "reply 2"]
            started = await served.events(CallStarted)
            assert [num_tokens(e.context) for e in started[1:]] == [0, 0]
            assert {e.base for e in started[1:]} == {started[0].call}
            assert {e.kind for e in await served.events(BranchForked)} == {"retry"}
            assert asked_ids(served.engine.asked[2]) == asked_ids(served.engine.asked[0])

    run(case())


def test_twin_sub_agents_are_two_also_after_a_restart(tmp_path: Path) -> None:
    """The same request twice is a retry, unless two spawns asked for it."""

    async def case() -> None:
        spawn = '<tool_call>{"name": "agent", "arguments": {"prompt": "Count the files, please."}}</tool_call>'
        engine = ScriptedEngine(script=lambda n, _: spawn * 2 if n == 0 else f"there are {n}")
        child = {"role": "user", "content": "Count the files, please."}
        async with serving(tmp_path, engine) as served:
            await served.say(USER)
            await served.say(child)
            log = await log_until(served.log, await served.log.last_seq())
        async with serving(tmp_path, engine, log=log) as served:
            for _ in range(2):
                await served.say(child)
            spawned = await served.events(SubAgentSpawned)
            assert [(event.call, event.parent_call) for event in spawned] == [("s1-c1", "s1-c0"), ("s1-c2", "s1-c0")]
            assert [event.classed_by for event in await served.events(CallStarted)][2:] == ["spawn", "same-request"]

    run(case())


def test_helper_model_and_its_followers_are_auxiliary(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path) as served:
            title = {"type": "json_schema", "json_schema": {"name": "title", "schema": {}}}
            await served.say(USER, response_format=title)
            system = {"role": "system", "content": "titles"}
            reply = await served.say(system, model="gyre-small")
            await served.say(system, reply, USER)
            await served.say({"role": "user", "content": "main"})
            classes = [e.role_class for e in await served.events(CallStarted)]
            assert classes == ["auxiliary", "auxiliary", "auxiliary", "main"]

    run(case())


@pytest.mark.parametrize("stream", ["0", "1"])
def test_reference_harness_runs_to_its_end(tmp_path: Path, stream: str) -> None:
    """An unmodified program on the other side: its history is the token history, call after call."""

    async def case() -> None:
        script = [tool_call("printf hi > a.txt"), "look" + tool_call("cat a.txt"), tool_call(reference_harness.SUBMIT)]
        workspace = tmp_path / "workspace"
        workspace.mkdir()
        async with serving(tmp_path, ScriptedEngine(script=lambda n, _: script[n])) as served:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                reference_harness.__file__,
                cwd=workspace,
                env={"OPENAI_BASE_URL": served.url(), "GYRE_TASK": "Write a file.", "GYRE_STREAM": stream},
            )
            assert await process.wait() == 0
            assert (workspace / "a.txt").read_text() == "hi"
            events = await served.events()
            assert [e.rule for e in events if isinstance(e, CallStarted)] == ["root", "continue", "continue"]
            assert "<tool_response>rc=0\nhi</tool_response>" in decode(served.engine.asked[2].input_ids)
            assert [e.delivered for e in await served.until(CallDelivered, 3)] == [True] * 3

    run(case())


# ---------------------------------------------------------------- refusals


def test_errors_have_the_providers_shape_and_record_nothing(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path) as served:
            api = client(served.url()).chat.completions
            with pytest.raises(openai.BadRequestError) as bad:
                await api.create(model="policy", messages=[USER], n=2)
            assert "'n' must be 1" in str(bad.value)
            with pytest.raises(openai.BadRequestError) as long:
                await api.create(model="policy", messages=[{"role": "user", "content": "x" * 5000}])
            assert long.value.code == "context_length_exceeded"
            assert long.value.type == "invalid_request_error"
            with pytest.raises(openai.AuthenticationError):
                await client(served.url("unknown")).chat.completions.create(model="policy", messages=[USER])
            with pytest.raises(openai.NotFoundError):
                await client(served.url()).embeddings.create(model="policy", input="x")
            assert await served.events(CallStarted) == []

    run(case())


def test_body_that_is_too_large_is_413(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "MAX_BODY_BYTES", 1000)

    async def case() -> None:
        async with serving(tmp_path) as served:
            status, reply = await served.post({"messages": [{"role": "user", "content": "x" * 2000}]})
            assert (status, reply["error"]["code"]) == (413, "request_too_large")

    run(case())


def test_room_in_the_context_bounds_the_reply(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path) as served:
            await served.say({"role": "user", "content": "x" * 4000})
            asked = served.engine.asked[0]
            assert len(asked.input_ids) + asked.max_tokens == 4096

    run(case())


def test_session_opened_a_moment_ago_is_known(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path) as served:
            for number in range(20):
                await served.open_session(f"n{number}")
                await served.say(USER, session=f"n{number}")

    run(case())


def test_finished_execution_takes_no_calls_and_cuts_open_ones(tmp_path: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine(hold=asyncio.Event())
        async with serving(tmp_path, engine) as served:
            call = asyncio.create_task(served.post({"messages": [USER]}))
            (started,) = await served.until(CallStarted)
            while not engine.running:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            await served.finish("x-s1")
            status, reply = await call
            assert (status, reply["error"]["code"]) == (410, "session_finished")
            assert engine.aborted == [started.call]
            (cut,) = await served.events(CallCut)
            assert num_tokens(cut.sampled) == 2
            status, reply = await served.post({"messages": [USER]})
            assert (status, reply["error"]["code"]) == (410, "session_finished")
            assert len(await served.events(CallStarted)) == 1

    run(case())


def test_too_many_open_calls_of_one_session_are_429(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre.agents.calls.MAX_OPEN_CALLS", 2)

    async def case() -> None:
        engine = ScriptedEngine(hold=asyncio.Event())
        async with serving(tmp_path, engine) as served:
            calls = [asyncio.create_task(served.post({"messages": [USER]})) for _ in range(2)]
            await served.until(CallStarted, 2)
            with pytest.raises(openai.RateLimitError) as limited:
                await client(served.url()).chat.completions.create(model="policy", messages=[USER])
            assert limited.value.response.headers["retry-after"] == "1"
            assert engine.hold is not None
            engine.hold.set()
            assert [status for status, _ in await asyncio.gather(*calls)] == [200, 200]

    run(case())


# ---------------------------------------------------------------- engines that fail


def test_engine_errors_are_retried_inside_the_gateway(tmp_path: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine(script=lambda n, _: EngineError("engine: gone") if n < 2 else "here")
        async with serving(tmp_path, engine) as served:
            assert (await served.say(USER))["content"] == "here"
            (completed,) = await served.events(CallCompleted)
            assert completed.num_retries == 2
            assert len({a.rid for a in engine.asked}) == 3
            assert len({a.input_ids for a in engine.asked}) == 1

    run(case())


def test_engine_failure_for_good_is_relayed_with_status_and_retry_after(tmp_path: Path) -> None:
    """verifiers#1756: SDKs retry by the status."""

    async def case() -> None:
        engine = ScriptedEngine(script=lambda n, _: EngineError("engine: gone"))
        settings = msgspec.structs.replace(
            config(), engine=msgspec.structs.replace(config().engine, call_timeout_s=0.3)
        )
        async with serving(tmp_path, engine, settings=settings) as served:
            with pytest.raises(openai.InternalServerError) as failed:
                await client(served.url()).chat.completions.create(model="policy", messages=[USER])
            assert failed.value.status_code == 503
            assert failed.value.response.headers["retry-after"] == "1"
            assert failed.value.type == "server_error"
            (event,) = await served.events(CallFailed)
            assert (event.status, event.reason) == (503, "engine: gone")
            engine.script = lambda n, _: "again"
            retried = await client(served.url()).chat.completions.create(model="policy", messages=[USER])
            assert retried.choices[0].message.content == "again"

    run(case())


def test_engine_that_refuses_is_not_asked_again(tmp_path: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine(script=lambda n, _: EngineError("engine: 400: no such parameter", 400))
        async with serving(tmp_path, engine) as served:
            status, reply = await served.post({"messages": [USER]})
            assert (status, reply["error"]["code"]) == (400, "engine_refused")
            assert len(engine.asked) == 1
            assert [e.status for e in await served.events(CallFailed)] == [400]

    run(case())


def test_engine_that_has_less_room_than_was_thought_is_told_as_the_context_being_full(tmp_path: Path) -> None:
    """In SGLang's words; its harness compacts, as it does when the gateway itself says so."""
    said = "The input (600 tokens) is longer than the model's context length (512 tokens)."

    async def case() -> None:
        engine = ScriptedEngine(script=lambda n, _: EngineError(f"engine http://c0: 400: {said}", 400))
        async with serving(tmp_path, engine) as served:
            status, reply = await served.post({"messages": [USER]})
            assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
            num = len(engine.asked[0].input_ids)
            assert f"maximum context length is 512 tokens. However, your messages resulted in {num} tokens" in str(
                reply
            )
            assert len(engine.asked) == 1

    run(case())


def test_engine_that_hangs_is_left_after_the_call_timeout(tmp_path: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine(hold=asyncio.Event())
        settings = msgspec.structs.replace(
            config(), engine=msgspec.structs.replace(config().engine, call_timeout_s=0.2)
        )
        async with serving(tmp_path, engine, settings=settings) as served:
            status, reply = await served.post({"messages": [USER]})
            assert (status, reply["error"]["code"]) == (503, "engine_failed")

    run(case())


def test_aborted_generation_goes_on_from_its_tokens_with_a_span_a_version(tmp_path: Path) -> None:
    """miles#2589, slime#2092."""

    async def case() -> None:
        def script(n: int, prompt: str) -> str | Generation:
            return generation(encode("first "), "abort", version=3) if n == 0 else "second"

        engine = ScriptedEngine(script=script, version=4)
        async with serving(tmp_path, engine) as served:
            assert (await served.say(USER))["content"] == "first second"
            (completed,) = await served.events(CallCompleted)
            assert [(s.version, s.start, s.end) for s in completed.spans] == [(3, 0, 6), (4, 6, 13)]
            assert decode(engine.asked[1].input_ids).endswith("first ")
            assert engine.asked[1].max_tokens == engine.asked[0].max_tokens - 6

    run(case())


def test_engine_that_breaks_its_contract_is_not_believed(tmp_path: Path) -> None:
    async def case() -> None:
        def script(n: int, prompt: str) -> str | Generation:
            whole = generation(encode("x"), "stop")
            return msgspec.structs.replace(whole, logprobs=(float("nan"),)) if n == 0 else "y"

        async with serving(tmp_path, ScriptedEngine(script=script)) as served:
            assert (await served.say(USER))["content"] == "y"

    run(case())


# ---------------------------------------------------------------- fences


def test_calls_wait_through_a_switch_and_the_fence_is_answered_when_they_are_gone(tmp_path: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine(hold=asyncio.Event())
        async with serving(tmp_path, engine) as served:
            before = asyncio.create_task(served.say(USER))
            await served.until(CallStarted)
            seq = await served.fence(epoch=2)
            waiting = asyncio.create_task(served.say(USER))
            await asyncio.sleep(0.05)
            assert await served.events(SessionsRerouted) == []
            assert len(engine.asked) == 1
            assert engine.hold is not None
            engine.hold.set()
            await before
            (answer,) = await served.until(SessionsRerouted)
            assert (answer.cell, answer.epoch, answer.num_sessions) == ("c0", 2, 1)
            recorded = [r async for r in served.log.read(1, until=await served.log.last_seq())]
            assert [r.envelope.cause for r in recorded if isinstance(r.event, SessionsRerouted)] == [seq]
            await asyncio.sleep(0.05)
            assert len(engine.asked) == 1 and not waiting.done()
            await served.resume(epoch=3, version=1)
            await waiting
            assert [a.extra_key for a in engine.asked] == ["0", "1"]
            assert len(await served.events(SessionsRerouted)) == 1

    run(case())


def test_calls_go_to_the_cell_that_is_open_and_stay_there(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path, cells=("c0", "c1")) as served:
            reply = await served.say(USER)
            await served.fence("c0")
            reply2 = await served.say(USER, reply, USER)
            await served.resume("c0")
            await served.say(USER, reply, USER, reply2, USER)
            assert [e.cell for e in await served.events(CallStarted)] == ["c0", "c1", "c1"]

    run(case())


def test_retry_leaves_a_fenced_cell(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path, ScriptedEngine(hold=asyncio.Event()), cells=("c0", "c1")) as served:
            engine = served.engine
            engine.script = lambda n, _: EngineError("engine: released") if n == 0 else "moved"
            call = asyncio.create_task(served.say(USER))
            await served.until(CallStarted)
            await served.fence("c0")
            assert engine.hold is not None
            engine.hold.set()
            assert (await call)["content"] == "moved"
            (answer,) = await served.until(SessionsRerouted)
            assert answer.num_calls_moved == 1

    run(case())


def test_a_call_in_flight_at_a_fenced_cell_goes_on_at_another_from_what_it_has_sampled(tmp_path: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine(hold=asyncio.Event(), script=lambda n, _: "abcdef" if n == 0 else "cdef")
        async with serving(tmp_path, engine, cells=("c0", "c1", "c2")) as served:
            call = asyncio.create_task(served.say(USER))
            await served.until(CallStarted)
            await served.fence("c0")
            assert (await call)["content"] == "abcdef"
            first, second = engine.asked
            assert second.input_ids == (*first.input_ids, *encode("ab"))
            assert second.max_tokens == first.max_tokens - 2
            (answer,) = await served.until(SessionsRerouted)
            assert (answer.cell, answer.num_calls_moved) == ("c0", 1)
            (completed,) = await served.events(CallCompleted)
            assert completed.num_retries == 1 and decode(unpack_ids(completed.sampled)).startswith("abcdef")
            assert not await served.events((CallCut, CallFailed))

    run(case())


class GoneEngine(ScriptedEngine):
    """Does not answer its first request, and nobody is there to be asked to end it."""

    num_silent = 1

    async def generate(self, *args: Any, **options: Any) -> Any:
        if self.num_silent:
            self.num_silent -= 1
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.5)  # a connection to nobody takes its time to be left
        return await super().generate(*args, **options)

    async def abort(self, rid: str) -> None:
        raise AssertionError("it is lost")


def test_a_call_at_a_cell_that_is_lost_goes_on_elsewhere_and_is_not_waited_for(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path, GoneEngine(), cells=("c0", "c1")) as served:
            call = asyncio.create_task(served.say(USER))
            await served.until(CallStarted)
            await served.world.append(CellLost(cell="c0", reason="no sign of life for 20 s"))
            assert (await call)["content"] == "reply 0"
            (completed,) = await served.events(CallCompleted)
            assert completed.num_retries == 1
            assert not await served.events((CallCut, CallFailed))

    run(case())


# ---------------------------------------------------------------- clients that leave, gateways that end


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_loses_nothing(tmp_path: Path, stream: bool) -> None:
    """verifiers#2211, miles#1714: generated and delivered are recorded apart; a retry of the client works."""

    async def case() -> None:
        engine = ScriptedEngine(hold=asyncio.Event())
        async with serving(tmp_path, engine) as served:
            async with aiohttp.ClientSession() as http:
                body = {"messages": [USER], "stream": stream}
                call = asyncio.create_task(http.post(served.url() + "/chat/completions", json=body))
                await served.until(CallStarted)
                call.cancel()
            await asyncio.sleep(0.05)
            assert engine.hold is not None
            engine.hold.set()
            (delivered,) = await served.until(CallDelivered)
            (completed,) = await served.events(CallCompleted)
            assert delivered.call == completed.call and not delivered.delivered
            assert decode(unpack_ids(completed.sampled)) == "reply 0<|im_end|>"
            assert (await served.say(USER))["content"] == "reply 1"
            assert (await served.until(CallDelivered, 2))[1].delivered

    run(case())


def test_client_that_left_before_admission_starts_no_call(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path) as served:
            await served.fence()
            async with aiohttp.ClientSession() as http:
                call = asyncio.create_task(http.post(served.url() + "/chat/completions", json={"messages": [USER]}))
                await asyncio.sleep(0.05)
                call.cancel()
            await asyncio.sleep(0.05)
            await served.resume()
            await served.say(USER)
            assert len(await served.events(CallStarted)) == 1

    run(case())


def test_stream_that_waits_gets_comments_and_a_failure_aborts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "KEEP_ALIVE_S", 0.02)

    async def case() -> None:
        engine = ScriptedEngine(delay_s=0.1)
        settings = msgspec.structs.replace(
            config(), engine=msgspec.structs.replace(config().engine, call_timeout_s=1.5)
        )
        async with serving(tmp_path, engine, settings=settings) as served, aiohttp.ClientSession() as http:
            body = {"messages": [USER], "stream": True}
            async with http.post(served.url() + "/chat/completions", json=body) as response:
                text = await response.text()
            assert text.startswith(": waiting\n\n") and text.endswith("data: [DONE]\n\n")
            engine.script = lambda n, _: EngineError("engine: gone")
            with pytest.raises(aiohttp.ClientPayloadError):
                async with http.post(served.url() + "/chat/completions", json=body) as response:
                    await response.text()
            engine.script = lambda n, _: "fine"
            chunks = await client(served.url()).chat.completions.create(model="p", messages=[USER], stream=True)
            assert "".join([c.choices[0].delta.content or "" async for c in chunks]) == "fine"

    run(case())


def test_killed_gateway_starts_again_from_any_prefix_of_the_log(tmp_path: Path) -> None:
    async def case() -> None:
        script = [tool_call("ls"), tool_call("cat a"), "done"]
        async with serving(tmp_path, ScriptedEngine(script=lambda n, _: script[n])) as served:
            histories: list[list[Any]] = [[USER]]
            for _ in range(3):
                reply = await served.say(*histories[-1], tools=[BASH])
                result = {"role": "tool", "tool_call_id": "x", "content": "rc=0"}
                histories.append([*histories[-1], reply, result])
            whole = await served.events()
            log, asked = served.log, served.engine.asked
        ends = [n for n, e in enumerate(whole, 1) if isinstance(e, CallCompleted)]
        for turn, end in enumerate(ends[:2]):
            async with serving(tmp_path, log=await log_until(log, end)) as again:
                await again.say(*histories[turn + 1], tools=[BASH])
                assert again.engine.asked[0].input_ids == asked[turn + 1].input_ids
                assert (await again.events(CallStarted))[-1].rule == "continue"
        starts = [n for n, e in enumerate(whole, 1) if isinstance(e, CallStarted)]
        async with serving(tmp_path, log=await log_until(log, starts[1])) as again:
            (cut,) = await again.events(CallCut)
            assert cut.reason == "the gateway ended during the call"
            await again.say(*histories[1], tools=[BASH])
            assert again.engine.asked[0].input_ids == asked[1].input_ids
            assert (await again.events(CallStarted))[-1].call == "s1-c2"

    run(case())


def test_fence_that_a_killed_gateway_left_is_answered(tmp_path: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine(hold=asyncio.Event())
        async with serving(tmp_path, engine) as served:
            call = asyncio.create_task(served.post({"messages": [USER]}))
            await served.until(CallStarted)
            last = await served.fence(epoch=5)
            log = await log_until(served.log, last)
            assert engine.hold is not None
            engine.hold.set()
            await call
        async with serving(tmp_path, log=log) as again:
            (answer,) = await again.until(SessionsRerouted)
            assert answer.epoch == 5
            kinds = [type(e) for e in await again.events((CallCut, SessionsRerouted))]
            assert kinds == [CallCut, SessionsRerouted]

    run(case())


def test_cancelled_gateway_finishes_what_is_in_flight(tmp_path: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine(delay_s=0.2)
        async with serving(tmp_path, engine) as served:
            call = asyncio.create_task(served.say(USER))
            await served.until(CallStarted)
            log = served.log
        assert (await call)["content"] == "reply 0"
        assert [e.delivered for e in await events_of(log, CallDelivered)] == [True]

    run(case())


def test_gateway_ends_with_the_run_but_not_with_one_that_was_resumed(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path) as served:
            await served.say(USER)
            await served.world.append(RunFinished(reason="interrupted"))
            await asyncio.wait_for(served.gateway, 30)
            await served.world.append(RunResumed(versions=()))
        async with serving(tmp_path, log=served.log) as again:
            await again.say(USER)
            assert len(await again.events(CallStarted)) == 2

    run(case())


# ---------------------------------------------------------------- load


def test_sessions_run_side_by_side(tmp_path: Path) -> None:
    """NeMo-Gym#1349: the engine has the calls of 64 sessions at once."""

    async def case() -> None:
        names = tuple(f"n{number}" for number in range(64))
        engine = ScriptedEngine(hold=asyncio.Event())
        async with serving(tmp_path, engine, sessions=names) as served:
            calls = [asyncio.create_task(served.say(USER, session=name)) for name in names]
            while engine.running < len(names):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            assert engine.hold is not None
            engine.hold.set()
            await asyncio.gather(*calls)

    run(case())


def test_paths() -> None:
    assert gateway.split_path("/s/abc/v1/chat/completions", "") == ("abc", "chat/completions")
    assert gateway.split_path("/s/abc/chat/completions", "Bearer other") == ("abc", "chat/completions")
    assert gateway.split_path("/v1/chat/completions", "Bearer abc") == ("abc", "chat/completions")
    assert gateway.split_path("/s/abc/v1/messages", "") == ("abc", "messages")
    assert gateway.split_path("/s/abc/v1/messages/count_tokens", "") == ("abc", "messages/count_tokens")
    assert gateway.split_path("/s/abc", "") == gateway.split_path("/s/abc/v1/", "") == ("abc", "")
    assert gateway.split_path("/", "") == ("", "")
    assert json.loads(gateway.chat.render_error(ProviderError(500, "bug", "x")))["error"]["type"] == "server_error"


def test_a_port_in_use_is_named_with_its_remedy(tmp_path: Path) -> None:
    async def case() -> None:
        taken = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
        port = taken.sockets[0].getsockname()[1]
        log = MemoryLog("r")
        serving_it = gateway.run_gateway(
            log,
            Writer(log, "gateway", 1, lambda: 0),
            config(),
            engine_for=lambda url: ScriptedEngine(),
            renderer=RENDERER,
            host="127.0.0.1",
            port=port,
        )
        with pytest.raises(ExceptionGroup) as raised:
            await serving_it
        taken.close()
        assert raised.group_contains(ConfigError, match=f"{port}: .*gateway.port")

    run(case())


def test_a_gateway_that_starts_again_takes_its_port_or_else_another(tmp_path: Path) -> None:
    async def listens(last_port: int) -> int:
        log, ports = MemoryLog("r"), asyncio.get_running_loop().create_future()
        serving_it = asyncio.create_task(
            gateway.run_gateway(
                log,
                Writer(log, "gateway", 1, lambda: 0),
                config(),
                engine_for=lambda url: ScriptedEngine(),
                renderer=RENDERER,
                host="127.0.0.1",
                last_port=last_port,
                ready=ports.set_result,
            )
        )
        try:
            return int(await ports)
        finally:
            serving_it.cancel()
            await asyncio.gather(serving_it, return_exceptions=True)

    async def case() -> None:
        first = await listens(0)
        assert await listens(first) == first
        taken = await asyncio.start_server(lambda r, w: None, "127.0.0.1", first)
        assert await listens(first) not in (0, first)
        taken.close()

    run(case())
