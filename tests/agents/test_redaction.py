"""Secrets in harness traffic: none in the log, none for the policy, and the history is known all the same."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from hypothesis import given
from hypothesis import strategies as st
from scripted import BASH, ScriptedEngine, config, decode, full_ids, serving, tool_call

from gyre.agents.dialect import Request
from gyre.agents.messages import Message, ToolCall
from gyre.agents.redaction import MARK, Redactor
from gyre.config import SECRETS, GatewayConfig
from gyre.events.codec import encode
from gyre.events.types import BranchForked, CallStarted
from tests.events.events import envelope

KEY = "sk-abcDEF0123456789_abcdef"
GITHUB = "ghp_" + "a1B2" * 9
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIB\nAAA=\n-----END RSA PRIVATE KEY-----"
REDACTOR = Redactor(SECRETS)


def run(case: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(case, 60))


def test_keys_are_found_and_words_are_left_alone() -> None:
    keys = (KEY, GITHUB, PEM, "AKIA" + "Z9" * 8, "AIza" + "x" * 35, "xoxb-123456789-abc", "github_pat_" + "1a" * 20)
    for key in keys:
        assert REDACTOR.text(f"KEY={key};") == f"KEY={MARK};"
    plain = "task-abcdefghijklmnopqrstuvwxyz disk-utilization-of-the-machine sk-short AKIAN and ghp_"
    assert REDACTOR.text(plain) == plain


@given(st.text() | st.lists(st.sampled_from((KEY, PEM, " ", "x", "-", "\n"))).map("".join))
def test_what_is_redacted_stays_so(text: str) -> None:
    once = REDACTOR.text(text)
    assert REDACTOR.text(once) == once
    assert Redactor().text(text) == text


def test_every_text_of_a_request_is_covered() -> None:
    call = ToolCall(id="1", name="bash", arguments=f'{{"command": "export K={KEY}"}}')
    messages = (
        Message(role="system", content=KEY),
        Message(role="assistant", content=PEM, reasoning=KEY, tool_calls=(call,)),
        Message(role="tool", content=f"a {KEY} b {GITHUB}", tool_call_id="1"),
    )
    tools = ({"type": "function", "function": {"name": "f", "description": KEY, "enum": [KEY, 1]}},)
    request = REDACTOR.request(Request(messages=messages, tools=tools))
    assert not any(secret in str(msgspec.to_builtins(request)) for secret in (KEY, GITHUB, "MIIB"))
    assert request.messages[1].tool_calls[0].arguments == f'{{"command": "export K={MARK}"}}'
    assert request.messages[2].content == f"a {MARK} b {MARK}"


def test_neither_log_nor_policy_sees_a_secret_and_the_history_goes_on(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path) as served:
            user = {"role": "user", "content": f"Use {KEY} for it."}
            first = await served.say(user)
            more = {"role": "user", "content": f"It is\n{PEM}"}
            await served.say(user, first, more)
            await served.say(user, first, more)
            started = await served.events(CallStarted)
            assert [e.rule for e in started] == ["root", "continue", "fork"]
            assert [e.kind for e in await served.events(BranchForked)] == ["retry"]
            for asked, call in zip(served.engine.asked, started, strict=True):
                ids = [*asked.input_ids]
                assert full_ids(await served.events(), call.call)[: len(ids)] == ids
                assert "sk-" not in decode(ids) and "MIIB" not in decode(ids)
                assert f"Use {MARK} for it." in decode(ids)
            bodies = b"".join([stored.body async for stored in served.log.stored(until=await served.log.last_seq())])
            assert KEY.encode() not in bodies and b"MIIB" not in bodies

    run(case())


def test_a_reply_that_looks_like_a_key_comes_back_as_the_reply_that_it_is(tmp_path: Path) -> None:
    """It was sampled, so it is no secret: recorded and shown as it is, and no drift when it is echoed."""

    async def case() -> None:
        said = f"{KEY} " + tool_call(f"echo {KEY}")
        async with serving(tmp_path, ScriptedEngine(script=lambda n, prompt: "done" if n else said)) as served:
            user = {"role": "user", "content": "Do this."}
            first = await served.say(user, tools=[BASH])
            assert first["content"].strip() == KEY
            assert KEY in first["tool_calls"][0]["function"]["arguments"]
            result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": f"{KEY}\n"}
            await served.say(user, first, result, tools=[BASH])
            started = await served.events(CallStarted)
            assert [e.rule for e in started] == ["root", "continue"]
            history = decode(full_ids(await served.events(), started[1].call))
            assert history.count(KEY) == 2 and history.count(MARK) == 1

    run(case())


def test_headers_are_never_recorded(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path) as served:
            headers = {"authorization": "Bearer header-secret", "x-api-key": "header-secret", "cookie": "header-secret"}
            body = {"model": "policy", "messages": [{"role": "user", "content": "Do this."}]}
            url = f"{served.url()}/chat/completions?key=header-secret"
            async with aiohttp.ClientSession(headers=headers) as http, http.post(url, json=body) as response:
                assert response.status == 200
            for event in await served.events():
                assert b"header-secret" not in encode(envelope(event))

    run(case())


def test_patterns_are_of_the_config_and_may_be_none(tmp_path: Path) -> None:
    async def shown(patterns: tuple[str, ...], folder: Path) -> str:
        folder.mkdir()
        settings = msgspec.structs.replace(config(), gateway=GatewayConfig(redact=patterns))
        async with serving(folder, settings=settings) as served:
            await served.say({"role": "user", "content": f"{KEY} badge-77"})
            return decode(served.engine.asked[0].input_ids)

    async def case() -> None:
        assert f"{KEY} badge-77" in await shown((), tmp_path / "off")
        assert f"{KEY} {MARK}" in await shown((r"badge-\d+",), tmp_path / "own")

    run(case())
