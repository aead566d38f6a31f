"""`gyre gateway` as a process, in front of a scripted server that speaks SGLang's /generate."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import web

from gyre.agents.dialect import ProviderError
from gyre.agents.gateway import open_name
from gyre.agents.scenarios import LAST_WORD, say
from gyre.agents.scripted_policy import TEMPLATE, make_renderer

pytestmark = pytest.mark.timeout(300)
RENDERER = make_renderer()
TOOLS: Any = [
    {"type": "function", "function": {"name": "bash", "parameters": {"properties": {"command": {"type": "string"}}}}}
]


class Sglang:
    """What gyre asks of a plain SGLang server: one that knows nothing of gyre."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        prompt = RENDERER.tokenizer.decode(body["input_ids"], skip_special_tokens=False)
        ids = [
            *RENDERER.tokenizer.encode(say(prompt, command="ls"), add_special_tokens=False).ids,
            RENDERER.end_of_turn_id,
        ]
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": "stop", "matched": RENDERER.end_of_turn_id},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 3,
            "e2e_latency": 0.01,
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "weight_version": "default",
        }
        return web.json_response({"text": "", "output_ids": ids, "meta_info": meta})

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        application = web.Application()
        application.router.add_post("/generate", self.generate)
        application.router.add_get("/health", lambda request: _nothing())
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


async def _nothing() -> web.Response:
    return web.Response()


def make_policy(folder: Path) -> Path:
    folder.mkdir()
    RENDERER.tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 8192}))
    return folder


def gyre(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "gyre.cli", *map(str, words)]
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=200, check=False)


def start_gateway(engine: str, cwd: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "gyre.cli", "gateway", "--engine", engine, "--policy", "policy", "--dir", "kept"]
    return subprocess.Popen(argv, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@asynccontextmanager
async def gateway(engine: str, cwd: Path) -> AsyncIterator[str]:
    """Its address, while the block lasts; then Ctrl-C, after which it ends well."""
    process = start_gateway(engine, cwd)
    assert process.stdout is not None
    try:
        first = await asyncio.to_thread(process.stdout.readline)
        assert first.startswith("gateway http"), first + process.stdout.read()
        yield first.split()[1]
        process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait, 120) == 0, process.stdout.read()
        assert "ended; all of it is in kept" in process.stdout.read()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def rows(cwd: Path, query: str) -> list[dict[str, Any]]:
    done = gyre("sql", "kept", query, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_agents_are_recorded_and_a_session_goes_on_after_a_restart(tmp_path: Path) -> None:
    make_policy(tmp_path / "policy")
    sglang = Sglang()

    async def talk(url: str, messages: list[Any]) -> Any:
        async with openai.AsyncOpenAI(base_url=f"{url}/s/task-1/v1", api_key="none", max_retries=0) as client:
            done = await client.chat.completions.create(model="any", messages=messages, tools=TOOLS, temperature=0)
            return done.choices[0].message.model_dump(exclude_none=True)

    async def case() -> None:
        async with sglang.serving() as engine:
            messages: list[Any] = [{"role": "user", "content": "go"}]
            async with gateway(engine, tmp_path) as url:
                messages.append(await talk(url, messages))
                async with anthropic.AsyncAnthropic(base_url=url, api_key="sk-secret", max_retries=0) as client:
                    said = [{"role": "user", "content": "hello"}]
                    await asyncio.gather(
                        *(client.messages.create(model="m", messages=said, max_tokens=99) for _ in "ab")
                    )  # type: ignore[arg-type]
                    assert [model.id async for model in client.models.list()] == ["gyre-policy", "gyre-small"]
                found: list[int] = []
                async with asyncio.timeout(200):  # rows are those of the log half a second ago
                    while sum(found) < 3:
                        query = "select session, count(*) n from calls group by 1"
                        told = await asyncio.to_thread(gyre, "sql", "kept", query, "--json", cwd=tmp_path)
                        assert told.returncode == 0 or "no tables yet" in told.stderr, told.stderr
                        found = [json.loads(line)["n"] for line in told.stdout.splitlines()]
                assert sorted(found) == [1, 2]
            call = messages[1]["tool_calls"][0]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "a.txt"})
            async with gateway(engine, tmp_path) as again:
                assert again == url, "agents find it where it was"
                assert (await talk(again, messages))["content"] == LAST_WORD
        first, second = (a["input_ids"] for a in sglang.asked if a["rid"].startswith("task-1"))
        assert second[: len(first)] == first
        assert sglang.asked[0]["sampling_params"]["temperature"] == 1.0

    asyncio.run(case())
    tree = gyre("tree", "kept", "task-1", cwd=tmp_path).stdout
    assert "session task-1: 2 calls, 1 leaf" in tree
    (run,) = rows(tmp_path, "select state, num_resumed from runs")
    assert run == {"state": "interrupted", "num_resumed": 1}
    assert {row["status"] for row in rows(tmp_path, "select status from calls")} == {"completed"}
    everything = gyre("tail", "kept", "--no-follow", cwd=tmp_path).stdout
    assert "sk-secret" not in everything
    assert gyre("log", "verify", "kept", cwd=tmp_path).returncode == 0


def test_an_engine_that_is_not_there_is_said_in_one_line(tmp_path: Path) -> None:
    make_policy(tmp_path / "policy")
    done = gyre("gateway", "--engine", "http://127.0.0.1:9", "--policy", "policy", "--dir", "kept", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("gyre: engine http://127.0.0.1:9/health:")
    assert done.stderr.count("\n") == 1 and not (tmp_path / "kept").exists()
    done = gyre("gateway", "--engine", "http://127.0.0.1:9", "--policy", "none", cwd=tmp_path)
    assert "config.json: missing" in done.stderr


def test_the_name_of_a_session_that_anybody_may_open() -> None:
    assert open_name("/s/task-1/v1/messages", "task-1") == "task-1"
    assert open_name("/v1/messages", "") == "default"
    assert open_name("/v1/messages", "sk-1").startswith("key-")
    assert open_name("/v1/messages", "sk-1") != open_name("/v1/messages", "sk-2")
    with pytest.raises(ProviderError, match="letters"):
        open_name("/s/a.b/v1/messages", "a.b")
