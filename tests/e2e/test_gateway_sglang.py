"""`gyre gateway` in front of a real SGLang server: official clients in three dialects, and what the log has of them."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

pytest.importorskip("torch")
pytest.importorskip("sglang")

from gyre.config import EngineConfig
from gyre.events.server import free_ports
from gyre.workers.engine import engine_command
from gyre.workers.tiny_policy import init_policy

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]
CONTEXT = 1024
"""Of the server; the policy's config says 2,048, and so does the gateway."""
TOOL = {"type": "object", "properties": {"command": {"type": "string"}}}


@contextmanager
def process(argv: Any, env: dict[str, str], output: Path) -> Iterator["subprocess.Popen[bytes]"]:
    with output.open("wb") as file:
        child = subprocess.Popen(argv, env=os.environ | env, stdout=file, stderr=file, start_new_session=True)
    try:
        yield child
        child.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            child.wait(30)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def wait_for(found: Any, child: "subprocess.Popen[bytes]", output: Path) -> Any:
    deadline_s = time.monotonic() + 240
    while time.monotonic() < deadline_s and child.poll() is None:
        with suppress(OSError):
            if value := found():
                return value
        time.sleep(0.2)
    raise AssertionError(output.read_text()[-2000:])


def is_healthy(url: str) -> bool:
    with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
        return bool(response.status == 200)


def address(output: Path) -> str:
    words = output.read_text().split()
    return words[1] if words[:1] == ["gateway"] else ""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """(address of the gateway, its run directory)."""
    folder = tmp_path_factory.mktemp("served")
    init_policy(folder / "policy", 1, num_demonstrations=300)
    (port,) = free_ports(1)
    argv, env = engine_command(folder / "policy", port, EngineConfig(context_tokens=CONTEXT, max_total_tokens=8192))
    url = f"http://127.0.0.1:{port}"
    with process(argv, env, folder / "engine.log") as engine:
        wait_for(lambda: is_healthy(url), engine, folder / "engine.log")
        options = ("--engine", url, "--policy", str(folder / "policy"), "--dir", str(folder / "kept"))
        command = (sys.executable, "-m", "gyre.cli", "gateway", *options)
        with process(command, {"PYTHONUNBUFFERED": "1"}, folder / "gateway.log") as gateway:
            yield wait_for(lambda: address(folder / "gateway.log"), gateway, folder / "gateway.log"), folder / "kept"


def rows(run: Path, query: str) -> list[dict[str, Any]]:
    argv = (sys.executable, "-m", "gyre.cli", "sql", str(run), query, "--json")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0 or "no tables yet" in done.stderr, done.stderr  # their process may still be starting
    return [json.loads(line) for line in done.stdout.splitlines()]


def settled_rows(run: Path, query: str, num: int) -> list[dict[str, Any]]:
    give_up_s = time.monotonic() + 120
    while time.monotonic() < give_up_s:
        if len(found := rows(run, query)) >= num:
            return found
        time.sleep(0.5)
    raise AssertionError(f"the tables have {len(found)} of {num} rows")


def test_agents_in_three_dialects_are_recorded_with_the_servers_own_tokens(served: tuple[str, Path]) -> None:
    url, run = served

    async def case() -> None:
        tools: Any = [{"type": "function", "function": {"name": "bash", "parameters": TOOL}}]
        messages: list[Any] = [{"role": "user", "content": "Do this."}]
        async with openai.AsyncOpenAI(base_url=f"{url}/s/chat/v1", api_key="x", max_retries=0) as api:
            for turn in range(3):
                done = await api.chat.completions.create(model="m", messages=messages, tools=tools, max_tokens=16)
                assert done.usage is not None and 0 < done.usage.completion_tokens <= 16
                details = done.usage.prompt_tokens_details
                assert details is not None
                if turn:
                    assert details.cached_tokens, "SGLang found the history in its KV cache"
                messages.append(done.choices[0].message.model_dump(exclude_none=True))
                messages.append({"role": "user", "content": f"rc={turn}"})
        async with openai.AsyncOpenAI(base_url=f"{url}/s/responses/v1", api_key="x", max_retries=0) as api:
            stream = await api.responses.create(model="m", input="Do this.", max_output_tokens=8, stream=True)
            *_, last = [event async for event in stream]
            assert last.type in ("response.completed", "response.incomplete")
            assert last.response.usage is not None and last.response.usage.output_tokens <= 8
        async with anthropic.AsyncAnthropic(base_url=f"{url}/s/messages", api_key="x", max_retries=0) as claude:
            said: Any = [{"role": "user", "content": "Do this."}]
            async with claude.messages.stream(model="m", max_tokens=8, messages=said) as events:
                assert (await events.get_final_message()).usage.output_tokens <= 8

    asyncio.run(case())
    query = "select session, rule, shared, num_sampled, status, base, version_min v from calls order by started_seq"
    found = settled_rows(run, query, 5)
    assert {row["status"] for row in found} == {"completed"}
    assert {row["v"] for row in found} == {0}
    chat = [row for row in found if row["session"] == "chat"]
    assert [row["rule"] for row in chat] == ["root", "continue", "continue"]
    assert {row["session"] for row in found} == {"chat", "responses", "messages"}


def test_what_the_server_cannot_hold_is_an_overflow_in_the_providers_words(served: tuple[str, Path]) -> None:
    url, _ = served
    long: Any = [{"role": "user", "content": " ledger.txt" * (CONTEXT + 50)}]

    async def case() -> None:
        async with anthropic.AsyncAnthropic(base_url=f"{url}/s/long-1", api_key="x", max_retries=0) as claude:
            with pytest.raises(anthropic.BadRequestError, match=rf"prompt is too long: \d+ tokens > {CONTEXT} maximum"):
                await claude.messages.create(model="m", max_tokens=8, messages=long)
        async with openai.AsyncOpenAI(base_url=f"{url}/s/long-2/v1", api_key="x", max_retries=0) as api:
            with pytest.raises(openai.BadRequestError) as refused:
                await api.chat.completions.create(model="m", messages=long, max_tokens=8)
            assert refused.value.code == "context_length_exceeded"

    asyncio.run(case())
