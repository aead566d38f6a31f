"""Faults that users of comparable gateways met; `tests/test_fault_rows.py` has the table."""

import asyncio
import json
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import msgspec
import openai
import orjson
import pytest
from scripted import ScriptedEngine, Served, config, serving

from gyre.agents import anthropic_messages
from gyre.agents.gateway import DIALECTS
from gyre.agents.harnesses import find_recipe, launch
from gyre.agents.messages import prefix_digests
from gyre.agents.places import Places
from gyre.errors import EngineError
from gyre.events.log import Item
from gyre.events.memory import MemoryLog
from gyre.events.types import BranchForked, CallCompleted, CallDelivered, CallFailed, CallStarted

USER = {"role": "user", "content": "Do this."}
BODIES: dict[str, Any] = {
    "chat/completions": {"messages": [USER]},
    "messages": {"messages": [USER], "max_tokens": 99},
    "responses": {"input": [USER]},
}
ALL = pytest.mark.parametrize("endpoint", list(DIALECTS))


def run(case: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(case, 60))


async def post(served: Served, endpoint: str, session: str = "s1", **fields: Any) -> tuple[int, dict[str, str], bytes]:
    body = {"model": "m", **BODIES[endpoint], **fields}
    url = f"{served.url(session)}/{endpoint}"
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as response:
        headers = {key.lower(): value for key, value in response.headers.items()}
        return response.status, headers, await response.read()


def test_vllm_36829_a_nonce_in_the_system_prompt_is_no_part_of_the_history() -> None:
    """claude-code#68900: and the flag that turns it off stands in the recipe."""

    def digests(nonce: str) -> tuple[str, ...]:
        system = [{"type": "text", "text": f"x-anthropic-billing-header: cch={nonce}"}, {"type": "text", "text": "Hi."}]
        request = anthropic_messages.parse_request(orjson.dumps({"system": system, "messages": [USER]}))
        return prefix_digests(request.messages, request.tools)

    assert digests("1") == digests("2")
    places = Places(workspace="/w", config="/c", home="/h", gateway="http://127.0.0.1:1")
    started = launch(
        find_recipe("claude-code"),
        base_url="http://127.0.0.1:1/s/s1/v1",
        instruction="x",
        places=places,
        max_turns=1,
        model="m",
        python="python3",
    )
    assert started.env["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"


@ALL
def test_miles_1714_a_retry_of_a_reply_that_nobody_saw_is_answered(tmp_path: Path, endpoint: str) -> None:
    async def case() -> None:
        engine = ScriptedEngine(hold=asyncio.Event())
        async with serving(tmp_path, engine) as served:
            call = asyncio.create_task(post(served, endpoint))
            await served.until(CallStarted)
            call.cancel()
            await asyncio.sleep(0.05)
            assert engine.hold is not None
            engine.hold.set()
            (told,) = await served.until(CallDelivered)
            assert not told.delivered and len(await served.events(CallCompleted)) == 1
            status, _, _ = await post(served, endpoint)
            assert status == 200
            assert [event.kind for event in await served.events(BranchForked)] == ["retry"]
            assert [event.delivered for event in await served.until(CallDelivered, 2)] == [False, True]

    run(case())


@ALL
@pytest.mark.parametrize("stream", [False, True])
def test_verifiers_2211_the_log_has_a_reply_before_its_client_sees_a_byte(
    tmp_path: Path, endpoint: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may leave at any moment after: the turn is there."""
    acked: list[str] = []
    publish_all = MemoryLog.publish_all

    async def slow(self: MemoryLog, items: Sequence[Item], **options: Any) -> Any:
        completed = [item.msg_id for item in items if b"call.completed" in item.body]
        if completed:
            await asyncio.sleep(0.1)
        ack = await publish_all(self, items, **options)
        acked.extend(completed)
        return ack

    async def case() -> None:
        monkeypatch.setattr(MemoryLog, "publish_all", slow)
        async with serving(tmp_path) as served, aiohttp.ClientSession() as http:
            body = {"model": "m", **BODIES[endpoint], "stream": stream}
            async with http.post(f"{served.url()}/{endpoint}", json=body) as response:
                assert await response.content.readany()
                assert len(acked) == 1
                response.close()
            assert len(await served.events(CallCompleted)) == 1

    run(case())


@ALL
@pytest.mark.parametrize(
    ("status", "retry_after"), [(429, 7), (500, 0), (502, 0), (503, 3), (529, 0), (401, 0), (400, 0), (413, 0)]
)
def test_verifiers_1756_upstream_status_and_retry_after_are_relayed(
    tmp_path: Path, endpoint: str, status: int, retry_after: int
) -> None:
    async def case() -> None:
        engine = ScriptedEngine(script=lambda n, _: EngineError("engine: no", status, retry_after))
        impatient = msgspec.structs.replace(config().engine, call_timeout_s=0.1)
        settings = msgspec.structs.replace(config(), engine=impatient)
        async with serving(tmp_path, engine, settings=settings) as served:
            got, headers, content = await post(served, endpoint)
            assert got == status
            told = headers.get("retry-after")
            assert told == (str(retry_after or 1) if status not in (400, 413) else None)
            error = orjson.loads(content)["error"]
            assert error["message"] == "engine: no"
            kinds = {429: "rate_limit_error", 401: "authentication_error"}
            assert error["type"] == kinds.get(status, error["type"])
            (failed,) = await served.events(CallFailed)
            assert failed.status == status

    run(case())


@pytest.mark.parametrize("status", [429, 500, 503])
def test_verifiers_1756_official_clients_try_again_and_get_through(tmp_path: Path, status: int) -> None:
    async def case() -> None:
        failing = [EngineError("engine: no", status, 1)]
        engine = ScriptedEngine(script=lambda n, _: failing[0] if n == 0 else "here")
        impatient = msgspec.structs.replace(config().engine, call_timeout_s=0.9)
        async with serving(tmp_path, engine, settings=msgspec.structs.replace(config(), engine=impatient)) as served:
            api = openai.AsyncOpenAI(base_url=served.url(), api_key="none", max_retries=1)
            reply = await api.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
            assert reply.choices[0].message.content == "here"
            assert [event.rule for event in await served.events(CallStarted)] == ["root", "fork"]

    run(case())


def test_nemo_gym_1349_sessions_run_side_by_side(tmp_path: Path) -> None:
    async def case() -> None:
        names = tuple(f"n{number}" for number in range(32))
        engine = ScriptedEngine(hold=asyncio.Event())
        async with serving(tmp_path, engine, sessions=names) as served:
            calls = [asyncio.create_task(post(served, "messages", name)) for name in names]
            async with asyncio.timeout(60):
                while engine.running < len(names):  # noqa: ASYNC110 - the engine has no event for it
                    await asyncio.sleep(0.01)
            assert engine.hold is not None
            engine.hold.set()
            assert {status for status, _, _ in await asyncio.gather(*calls)} == {200}
            assert engine.most_running == len(names), "none waited for another"

    run(case())


@ALL
def test_agent_lightning_every_dialect_streams_and_does_not(tmp_path: Path, endpoint: str) -> None:
    async def case() -> None:
        async with serving(tmp_path) as served:
            for stream in (False, True):
                status, headers, content = await post(served, endpoint, stream=stream)
                assert status == 200
                assert headers["content-type"].startswith("text/event-stream" if stream else "application/json")
                assert b"reply" in content
                if not stream:
                    assert isinstance(json.loads(content), dict)

    run(case())


def test_verifiers_1756_anthropic_clients_know_an_overloaded_engine(tmp_path: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine(script=lambda n, _: EngineError("engine: full", 529))
        impatient = msgspec.structs.replace(config().engine, call_timeout_s=0.1)
        async with serving(tmp_path, engine, settings=msgspec.structs.replace(config(), engine=impatient)) as served:
            api = anthropic.AsyncAnthropic(base_url=served.url().removesuffix("/v1"), api_key="x", max_retries=0)
            with pytest.raises(anthropic.APIStatusError) as failed:
                await api.messages.create(model="m", max_tokens=9, messages=[USER])  # type: ignore[list-item]
            assert failed.value.status_code == 529
            assert failed.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]

    run(case())
