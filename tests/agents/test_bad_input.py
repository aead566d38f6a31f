"""Whatever a client does wrong, in every dialect: its provider's error, no call on the log, no other disturbed."""

import asyncio
import itertools
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import orjson
import pytest
from scripted import ScriptedEngine, Served, config, serving

from gyre.agents import chat, gateway
from gyre.agents.gateway import DIALECTS
from gyre.config import Config, GatewayConfig
from gyre.errors import EngineError
from gyre.events.tokens import num_tokens
from gyre.events.types import CallCompleted, CallCut, CallDelivered, CallFailed, CallStarted

USER = {"role": "user", "content": "Do this."}
GOOD: dict[str, Any] = {
    "chat/completions": {"messages": [USER]},
    "messages": {"messages": [USER], "max_tokens": 99},
    "responses": {"input": [USER]},
}
ALL = pytest.mark.parametrize("endpoint", list(DIALECTS))
DEEP = b"[" * 50_000 + b"]" * 50_000


def run(case: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(case, 60))


def with_messages(endpoint: str, *messages: Any, **fields: Any) -> bytes:
    return orjson.dumps({**GOOD[endpoint], "input" if endpoint == "responses" else "messages": messages, **fields})


async def send(served: Served, endpoint: str, body: bytes, session: str = "s1") -> tuple[int, Any]:
    headers = {"anthropic-version": "2023-06-01"} if endpoint == "messages" else {}
    url = f"{served.url(session)}/{endpoint}"
    async with aiohttp.ClientSession(headers=headers) as http, http.post(url, data=body) as response:
        return response.status, orjson.loads(await response.read())


def assert_shape(endpoint: str, reply: Any) -> None:
    error = reply["error"]
    assert isinstance(error["message"], str) and isinstance(error["type"], str)
    assert (reply.get("type") == "error") == (endpoint == "messages")
    assert ("code" in error and "param" in error) == (endpoint != "messages")


async def assert_undisturbed(served: Served) -> None:
    status, _ = await send(served, "chat/completions", orjson.dumps(GOOD["chat/completions"]), "other")
    assert status == 200


BAD: dict[str, Any] = {
    "wrong role": lambda endpoint: with_messages(endpoint, {"role": "robot", "content": "x"}),
    "role as a number": lambda endpoint: with_messages(endpoint, {"role": 7, "content": "x"}),
    "content as a number": lambda endpoint: with_messages(endpoint, {"role": "user", "content": 7}),
    "an image": lambda endpoint: with_messages(
        endpoint,
        {
            "role": "user",
            "content": [{"type": {"messages": "image", "responses": "input_image"}.get(endpoint, "image_url")}],
        },
    ),
    "no messages": lambda endpoint: b'{"model": "m", "messages": [], "input": []}',
    "messages as text": lambda endpoint: b'{"messages": "x", "input": 7}',
    "max_tokens of 0": lambda endpoint: with_messages(endpoint, USER, max_tokens=0, max_output_tokens=0),
    "invalid UTF-8": lambda endpoint: with_messages(endpoint, USER).replace(b"Do", b"\xff\xfe"),
    "deep JSON": lambda endpoint: with_messages(endpoint, USER)[:-1] + b', "new": ' + DEEP + b"}",
    "deep tools": lambda endpoint: (
        with_messages(endpoint, USER)[:-1]
        + b', "tools": [{"type": "function", "name": "f", "input_schema": {"a": %(d)s}, "parameters": {"a": %(d)s}, '
        b'"function": {"name": "f", "parameters": {"a": %(d)s}}}]}' % {b"d": b"[" * 900 + b"]" * 900}
    ),
    "half a body": lambda endpoint: with_messages(endpoint, USER)[:-9],
    "nothing": lambda endpoint: b"",
    "a list": lambda endpoint: b"[]",
}


@ALL
@pytest.mark.parametrize("name", list(BAD))
def test_a_body_that_cannot_be_meant(tmp_path: Path, endpoint: str, name: str) -> None:
    async def case() -> None:
        async with serving(tmp_path, sessions=("s1", "other")) as served:
            status, reply = await send(served, endpoint, BAD[name](endpoint))
            assert status == 400
            assert_shape(endpoint, reply)
            assert await served.events(CallStarted) == []
            await assert_undisturbed(served)

    run(case())


@ALL
def test_unknown_fields_are_no_error(tmp_path: Path, endpoint: str) -> None:
    async def case() -> None:
        async with serving(tmp_path) as served:
            body = orjson.dumps({**GOOD[endpoint], "new_field": {"a": [1]}, "metadata": {"user_id": "x"}, "seed": 3})
            assert (await send(served, endpoint, body))[0] == 200

    run(case())


@ALL
def test_a_body_that_is_too_large(tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "MAX_BODY_BYTES", 10_000)

    async def case() -> None:
        async with serving(tmp_path, sessions=("s1", "other")) as served:
            status, reply = await send(
                served, endpoint, with_messages(endpoint, {"role": "user", "content": "x" * 20_000})
            )
            assert status == 413
            assert_shape(endpoint, reply)
            assert await served.events(CallStarted) == []
            await assert_undisturbed(served)

    run(case())


@ALL
@pytest.mark.parametrize("session", ["unknown", "s1%00", "..%2fs1", "s1 ", "a" * 5000])
def test_sessions_that_nobody_opened(tmp_path: Path, endpoint: str, session: str) -> None:
    async def case() -> None:
        async with serving(tmp_path, sessions=("s1", "other")) as served:
            status, reply = await send(served, endpoint, orjson.dumps(GOOD[endpoint]), session)
            assert status in (401, 404)
            assert_shape(endpoint, reply)
            assert await served.events(CallStarted) == []
            await assert_undisturbed(served)

    run(case())


@ALL
def test_a_request_after_the_end_of_its_execution(tmp_path: Path, endpoint: str) -> None:
    async def case() -> None:
        async with serving(tmp_path, sessions=("s1", "other")) as served:
            await served.finish("x-s1")
            await asyncio.sleep(0.05)
            status, reply = await send(served, endpoint, orjson.dumps(GOOD[endpoint]))
            assert status == 410
            assert_shape(endpoint, reply)
            assert await served.events(CallStarted) == []
            await assert_undisturbed(served)

    run(case())


@ALL
def test_a_client_that_sends_slowly_is_left(tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "READ_S", 0.3)

    async def case() -> None:
        async with serving(tmp_path, sessions=("s1", "other")) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            head = f"POST /s/s1/v1/{endpoint} HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n"
            writer.write(head.encode() + b'{"messages": [')
            await assert_undisturbed(served)
            answer = await reader.read(4000)
            assert answer.startswith(b"HTTP/1.1 408")
            assert_shape(endpoint, orjson.loads(answer.partition(b"\r\n\r\n")[2]))
            writer.close()
            assert len(await served.events(CallStarted)) == 1, "the other's"

    run(case())


def test_a_client_that_does_not_read_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "WRITE_S", 0.3)
    monkeypatch.setattr(chat, "render_response", lambda request, answer: b"x" * 32_000_000)

    async def case() -> None:
        async with serving(tmp_path) as served:
            _, writer = await asyncio.open_connection("127.0.0.1", served.port)
            body = orjson.dumps(GOOD["chat/completions"])
            head = f"POST /s/s1/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            (told,) = await served.until(CallDelivered)
            assert not told.delivered, "and nothing that was sampled is lost"
            assert len(await served.events(CallCompleted)) == 1
            writer.close()

    run(case())


@ALL
def test_a_stream_that_has_begun_is_aborted_when_its_engine_fails(
    tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clean end would pass for a whole reply."""
    monkeypatch.setattr(gateway, "KEEP_ALIVE_S", 0.02)

    async def case() -> None:
        engine = ScriptedEngine(script=lambda n, _: EngineError("engine: gone"), delay_s=0.1)
        impatient = msgspec.structs.replace(config().engine, call_timeout_s=0.9)
        settings = msgspec.structs.replace(config(), engine=impatient)
        async with serving(tmp_path, engine, settings=settings) as served, aiohttp.ClientSession() as http:
            body = {**GOOD[endpoint], "stream": True}
            async with http.post(f"{served.url()}/{endpoint}", json=body) as response:
                assert response.status == 200
                with pytest.raises(aiohttp.ClientPayloadError):
                    await response.read()
            (failed,) = await served.events(CallFailed)
            assert failed.status == 503
            engine.script = lambda n, _: "here"
            assert (await send(served, endpoint, orjson.dumps(GOOD[endpoint])))[0] == 200

    run(case())


# ---------------------------------------------------------------- deadlines


def limited(**limits: float) -> Config:
    return msgspec.structs.replace(config(), gateway=GatewayConfig(**limits))  # type: ignore[arg-type]


@ALL
def test_a_call_that_samples_for_too_long_is_ended_and_what_it_has_is_kept(tmp_path: Path, endpoint: str) -> None:
    async def case() -> None:
        engine = ScriptedEngine(hold=asyncio.Event())
        async with serving(tmp_path, engine, settings=limited(call_deadline_s=0.3)) as served:
            status, reply = await send(served, endpoint, orjson.dumps(GOOD[endpoint]))
            assert status == 504
            assert_shape(endpoint, reply)
            (cut,) = await served.events(CallCut)
            assert num_tokens(cut.sampled) == 2 and "deadline" in cut.reason
            assert len(engine.asked) == 1

    run(case())


@ALL
def test_a_call_that_waits_for_a_cell_for_too_long_is_no_call(tmp_path: Path, endpoint: str) -> None:
    async def case() -> None:
        async with serving(tmp_path, settings=limited(call_deadline_s=0.9)) as served:
            await served.fence()
            status, reply = await send(served, endpoint, orjson.dumps(GOOD[endpoint]))
            assert status == 504
            assert_shape(endpoint, reply)
            await served.resume()
            assert (await send(served, endpoint, orjson.dumps(GOOD[endpoint])))[0] == 200
            assert len(await served.events(CallStarted)) == 1

    run(case())


def test_an_engine_that_takes_no_abort_is_left_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre.agents.calls.ABORT_TIMEOUT_S", 0.2)

    class Deaf(ScriptedEngine):
        async def abort(self, rid: str) -> None:
            await asyncio.sleep(60)

    async def case() -> None:
        async with serving(tmp_path, Deaf(hold=asyncio.Event()), settings=limited(call_deadline_s=0.2)) as served:
            status, _ = await send(served, "messages", orjson.dumps(GOOD["messages"]))
            assert status == 504
            (failed,) = await served.events(CallFailed)
            assert failed.status == 504

    run(case())


@ALL
def test_a_session_has_a_deadline_too(tmp_path: Path, endpoint: str) -> None:
    async def case() -> None:
        now_s = itertools.chain([10.0, 10.0, 10.0], itertools.repeat(500.0))
        settings = limited(session_deadline_s=100.0)
        async with serving(tmp_path, settings=settings, clock_s=lambda: next(now_s)) as served:
            # The test's log has begun at 0.
            assert (await send(served, endpoint, orjson.dumps(GOOD[endpoint])))[0] == 200
            status, reply = await send(served, endpoint, orjson.dumps(GOOD[endpoint]))
            assert (status, len(await served.events(CallStarted))) == (410, 1)
            assert_shape(endpoint, reply)
            assert "opened more than 100 s ago" in reply["error"]["message"]

    run(case())
