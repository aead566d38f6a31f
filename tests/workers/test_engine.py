import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest

from gyre.agents.engine_client import Generation, VersionSpan
from gyre.agents.gateway import run_gateway
from gyre.agents.scripted_policy import make_renderer
from gyre.config import Config, EngineConfig, SamplingConfig
from gyre.errors import EngineError
from gyre.events.log import open_writer
from gyre.events.memory import MemoryLog
from gyre.events.server import free_ports
from gyre.events.tokens import unpack_logprobs
from gyre.events.types import (
    CallCompleted,
    CallCut,
    CallFailed,
    CallStarted,
    CellFenced,
    CellJoined,
    CellSwitched,
    RunFinished,
    SessionOpened,
    SessionsRerouted,
)
from gyre.workers.engine import SglangEngine, engine_command, parse_generation, retry_after_s
from gyre.workers.manifest import WeightManifest, combine_digests

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")
pytest.importorskip("mooncake.engine")

from weight_owner import Owner  # noqa: E402

from gyre.workers.sglang_cpu import define_torchvision_ops  # noqa: E402

pytestmark = pytest.mark.stack

END = 1  # <|im_end|>
LONG: dict[str, Any] = {"temperature": 0.0, "max_tokens": 900, "stop_token_ids": ()}
"""Greedy decoding of these random weights runs into a loop, not into an end token."""
CONFIG = EngineConfig(context_tokens=1024, max_total_tokens=16384, max_running_requests=32)


def make_policy(directory: Path, seed: int) -> Any:
    """A random Llama with a byte-level tokenizer; returns the transformers model."""
    define_torchvision_ops()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=specials, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["a line of text"], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=specials[1], pad_token=specials[2])
    fast.save_pretrained(directory)
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
        vocab_size=320, max_position_embeddings=2048, tie_word_embeddings=True, eos_token_id=END, bos_token_id=None,
        pad_token_id=2, initializer_range=0.1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float().eval()
    model.save_pretrained(directory)
    return model


def reference_logprobs(model: Any, prompt: list[int], generation: Generation) -> list[float]:
    ids = torch.tensor([[*prompt, *generation.output_ids]])
    with torch.no_grad():
        table = torch.log_softmax(model(ids).logits[0], dim=-1)
    return [table[len(prompt) - 1 + i, token].item() for i, token in enumerate(generation.output_ids)]


class Stack:
    """A started engine, two sets of weights and the process that offers them."""

    def __init__(self, directory: Path) -> None:
        self.models = {0: make_policy(directory / "v0", 0), 1: make_policy(directory / "v1", 1)}
        self.paths = {v: directory / f"v{v}" / "model.safetensors" for v in self.models}
        self.url, self.process = start_engine(directory / "v0", directory / "engine.log")
        self.owner = Owner()

    def run(self, body: Callable[[SglangEngine], Awaitable[Any]]) -> Any:
        async def inside() -> Any:
            async with SglangEngine(self.url) as engine:
                return await body(engine)

        return asyncio.run(inside())

    def manifest(self, weights: int, version: int) -> WeightManifest:
        return self.owner.load(self.paths[weights], version)

    def pull(self, weights: int, version: int) -> None:
        self.run(lambda engine: engine.pull_weights(self.manifest(weights, version)))


def start_engine(model: Path, log: Path, launcher: tuple[str, ...] = ()) -> tuple[str, subprocess.Popen[bytes]]:
    (port,) = free_ports(1)
    argv, env = engine_command(model, port, CONFIG)
    start = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen([*launcher, *argv], env={**os.environ, **env}, stdout=file, stderr=file)

    async def wait() -> None:
        async with SglangEngine(f"http://127.0.0.1:{port}") as engine:
            while not await engine.ready():
                assert process.poll() is None, f"the engine ended; its log is {log}"
                assert time.monotonic() - start < 200, f"the engine does not start; its log is {log}"
                await asyncio.sleep(0.1)

    asyncio.run(wait())
    print(f"engine ready after {time.monotonic() - start:.1f} s")
    return f"http://127.0.0.1:{port}", process


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("engine"))
    yield stack
    stack.owner.close()
    stack.process.terminate()
    stack.process.wait(60)


def generate(engine: SglangEngine, rid: str, prompt: list[int], **changes: Any) -> Awaitable[Generation]:
    options = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 16, "stop_token_ids": (END,), "extra_key": "0"}
    return engine.generate(rid, prompt, **(options | changes))


def test_tokens_and_logprobs_are_those_of_the_model(stack: Stack) -> None:
    stack.pull(0, 10)
    prompt = list(range(10, 40))
    found = stack.run(lambda e: generate(e, "one", prompt, stop_token_ids=()))
    assert len(found.output_ids) == 16 or found.output_ids[-1] == END
    assert found.num_prompt_tokens == 30
    assert found.spans == (VersionSpan(version=10, start=0, end=len(found.output_ids)),)
    assert found.logprobs == pytest.approx(reference_logprobs(stack.models[0], prompt, found), abs=1e-4)


def test_greedy_is_the_argmax(stack: Stack) -> None:
    stack.pull(0, 11)
    prompt = [5, 6, 7, 8]
    found = stack.run(lambda e: generate(e, "greedy", prompt, temperature=0.0, max_tokens=12))
    ids = list(prompt)
    with torch.no_grad():
        for token in found.output_ids:
            assert token == stack.models[0](torch.tensor([ids])).logits[0, -1].argmax().item()
            ids.append(token)
    assert found.logprobs == pytest.approx(reference_logprobs(stack.models[0], prompt, found), abs=1e-4)


def test_the_stop_token_is_kept(stack: Stack) -> None:
    stack.pull(0, 12)
    prompt = [5, 6, 7, 8]
    full = stack.run(lambda e: generate(e, "full", prompt, temperature=0.0))
    wanted = full.output_ids[3]
    cut = stack.run(lambda e: generate(e, "cut", prompt, temperature=0.0, stop_token_ids=(wanted,)))
    end = full.output_ids.index(wanted) + 1
    assert cut.finish == "stop"
    assert cut.output_ids == full.output_ids[:end]
    assert cut.logprobs == pytest.approx(full.logprobs[:end], abs=1e-4)


def test_a_batch_of_mixed_lengths_shares_prefixes_and_stays_exact(stack: Stack) -> None:
    stack.pull(0, 13)
    lengths = [3, 200, 7, 90, 150, 31, 33, 64, 5, 120, 4, 80, 60, 2, 256, 17]
    prompts = [[(7 * i + 3) % 250 + 5 for i in range(n)] for n in lengths]

    async def all_of(engine: SglangEngine) -> list[Generation]:
        async with asyncio.TaskGroup() as group:
            calls = [
                group.create_task(generate(engine, f"mixed-{i}", prompt, max_tokens=40))  # type: ignore[arg-type]
                for i, prompt in enumerate(prompts)
            ]
        return [call.result() for call in calls]

    first, second = stack.run(all_of), stack.run(all_of)
    assert sum(g.num_cached_tokens for g in second) > sum(lengths) // 2
    for prompt, found in zip(prompts * 2, first + second, strict=True):
        assert found.logprobs == pytest.approx(reference_logprobs(stack.models[0], prompt, found), abs=1e-4)


def test_new_weights_are_served_and_old_kv_is_not(stack: Stack) -> None:
    stack.pull(0, 20)
    prompt = list(range(30, 130))
    old = stack.run(lambda e: generate(e, "old", prompt, extra_key="20"))
    manifest = stack.manifest(1, 21)
    report = stack.run(lambda e: e.pull_weights(manifest))
    print(f"weight sync: {report}")
    assert (report.version, report.digest, report.num_bytes) == (21, manifest.digest, manifest.num_bytes)
    assert set(report.seconds) == {"fetch", "verify", "pause", "load"}
    new = stack.run(lambda e: generate(e, "new", prompt, extra_key="21"))
    info = stack.run(lambda e: e.info())
    assert (info.version, info.digest) == (21, manifest.digest)
    assert new.num_cached_tokens == 0
    assert new.spans[0].version == 21
    assert old.logprobs == pytest.approx(reference_logprobs(stack.models[0], prompt, old), abs=1e-4)
    assert new.logprobs == pytest.approx(reference_logprobs(stack.models[1], prompt, new), abs=1e-4)


def test_weights_that_are_not_whole_change_nothing(stack: Stack) -> None:
    stack.pull(0, 30)
    good = stack.manifest(1, 31)
    first = good.tensors[0]

    def refused(manifest: WeightManifest, reason: str) -> None:
        with pytest.raises(EngineError, match=reason) as caught:
            stack.run(lambda e: e.pull_weights(manifest))
        assert caught.value.status == 409

    refused(msgspec.structs.replace(good, digest="0" * 64), "make a new manifest")
    fewer = msgspec.structs.replace(good, tensors=good.tensors[1:])
    refused(fewer, "make a new manifest")
    fewer = msgspec.structs.replace(
        fewer, digest=combine_digests((e.name, e.dtype, e.shape, e.digest) for e in fewer.tensors)
    )
    refused(fewer, f"{first.name} is missing")
    stack.owner.ask(f"tear {first.name}")
    refused(good, f"{first.name} arrived with checksum")
    prompt = [9, 8, 7]
    found = stack.run(lambda e: generate(e, "still", prompt, extra_key="30"))
    assert found.spans[0].version == 30
    assert found.logprobs == pytest.approx(reference_logprobs(stack.models[0], prompt, found), abs=1e-4)
    assert stack.run(lambda e: e.info()).version == 30


def test_one_version_has_one_digest(stack: Stack) -> None:
    stack.pull(0, 40)
    stack.pull(0, 40)
    with pytest.raises(EngineError, match="another version"):
        stack.pull(1, 40)


async def busy(engine: SglangEngine) -> None:
    """Until it has a call."""
    while await engine.idle():  # noqa: ASYNC110 - the server cannot call back
        await asyncio.sleep(0.01)


def test_calls_in_flight_survive_an_update(stack: Stack) -> None:
    stack.pull(0, 50)
    manifest = stack.manifest(1, 51)
    prompt = [11, 12, 13]

    async def body(engine: SglangEngine) -> list[Generation]:
        async with asyncio.TaskGroup() as group:
            calls = [
                group.create_task(  # type: ignore[var-annotated]
                    generate(engine, f"long-{i}", prompt, max_tokens=600, stop_token_ids=())  # type: ignore[arg-type]
                )
                for i in range(8)
            ]
            await busy(engine)
            await asyncio.sleep(0.3)
            await engine.pull_weights(manifest)
        assert await engine.idle()
        return [call.result() for call in calls]

    spanning = 0
    for found in stack.run(body):
        assert found.finish in ("length", "stop")
        assert [span.version for span in found.spans] in ([50], [50, 51], [51]), "on a busy machine some begin late"
        if len(found.spans) == 2:
            spanning += 1
            cut = found.spans[0].end
            assert found.spans[1] == VersionSpan(version=51, start=cut, end=len(found.output_ids))
            head = msgspec.structs.replace(found, output_ids=found.output_ids[:cut])
            assert found.logprobs[:cut] == pytest.approx(reference_logprobs(stack.models[0], prompt, head), abs=1e-4)
    assert spanning >= 1


def test_pause_holds_calls_and_an_update_keeps_the_pause(stack: Stack) -> None:
    stack.pull(0, 60)

    async def body(engine: SglangEngine) -> Generation:
        await engine.pause()
        async with asyncio.TaskGroup() as group:
            call = group.create_task(generate(engine, "held", [3, 4, 5], extra_key="61"))  # type: ignore[arg-type]
            await engine.pull_weights(stack.manifest(1, 61))
            await asyncio.sleep(0.3)
            assert not call.done()
            assert (await engine.info()).paused
            await engine.resume()
        return call.result()

    assert stack.run(body).spans[0].version == 61


def test_release_waits_for_idle_and_restores(stack: Stack) -> None:
    stack.pull(0, 70)

    prompt = list(range(30, 130))

    async def body(engine: SglangEngine) -> Generation:
        async with asyncio.TaskGroup() as group:
            group.create_task(generate(engine, "busy", [3, 4, 5], **LONG))  # type: ignore[arg-type]
            await busy(engine)
            with pytest.raises(EngineError, match="drain first"):
                await engine.release()
            await engine.abort("busy")
        await generate(engine, "before", prompt)
        assert (await generate(engine, "again", prompt)).num_cached_tokens > len(prompt) // 2
        for number in range(10):  # at once after an answer: the scheduler may not have put its batch away
            await generate(engine, f"last-{number}", [3, 4, 5], max_tokens=2)
            for ask in (engine.release, engine.restore):  # as often as who asks has lost the answer, or is two
                await asyncio.gather(*(ask() for _ in range(4)))
                await ask()
        await engine.pull_weights(stack.manifest(0, 70))
        return await generate(engine, "after", prompt)

    found = stack.run(body)
    assert found.num_cached_tokens == 0, "its KV is what it gave back"
    assert found.logprobs == pytest.approx(reference_logprobs(stack.models[0], prompt, found), abs=1e-4)


def test_abort_returns_what_there_is(stack: Stack) -> None:
    stack.pull(0, 71)

    async def body(engine: SglangEngine) -> Generation:
        async with asyncio.TaskGroup() as group:
            call = group.create_task(  # type: ignore[var-annotated]
                generate(engine, "cut-short", [3, 4, 5], **LONG)  # type: ignore[arg-type]
            )
            await busy(engine)
            await asyncio.sleep(0.2)
            await engine.abort("cut-short")
        return call.result()

    found = stack.run(body)
    assert found.finish == "abort"
    assert 0 < len(found.output_ids) < 900


def test_a_call_that_moves_between_cells_says_what_it_would_have_said(stack: Stack, tmp_path: Path) -> None:
    """Two cells at one engine: the fence cuts the call short, and it goes on from prompt and partial output."""
    stack.pull(0, 72)

    async def body(engine: SglangEngine) -> list[CallCompleted]:
        log = MemoryLog("r")
        world, writer = await open_writer(log, "world", time.time_ns), await open_writer(log, "gateway", time.time_ns)
        for index, cell in enumerate(("c0", "c1")):
            await world.append(
                CellJoined(cell=cell, index=index, capacity=8, engine_url=engine.base_url, model_digest="")
            )
            await world.append(CellSwitched(cell=cell, role="rollout", epoch=1, version=72, phases=()))
        for name in ("stays", "moves"):
            await world.append(SessionOpened(execution=name, session=name, temperature=0.0, top_p=1.0))
        ports: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        settings = Config(sampling=SamplingConfig(max_tokens=700), engine=CONFIG)
        gateway = asyncio.create_task(
            run_gateway(
                log, writer, settings, engine_for=lambda url: engine, renderer=make_renderer(), host="127.0.0.1",
                ready=ports.set_result,
            )
        )  # fmt: skip
        port = await ports

        async def say(session: str) -> None:
            question = {"model": "policy", "messages": [{"role": "user", "content": "tell me a long story"}]}
            url = f"http://127.0.0.1:{port}/s/{session}/v1/chat/completions"
            async with aiohttp.ClientSession() as http, http.post(url, json=question) as response:
                assert response.status == 200, await response.text()

        await say("stays")
        moving = asyncio.create_task(say("moves"))
        await busy(engine)
        await asyncio.sleep(0.1)
        started = [r.event async for r in log.read(1, until=await log.last_seq()) if isinstance(r.event, CallStarted)]
        await world.append(CellFenced(cell=started[-1].cell, epoch=2))
        await moving
        events = [r.event async for r in log.read(1, until=await log.last_seq())]
        moved = [e.num_calls_moved for e in events if isinstance(e, SessionsRerouted)]
        assert moved == [1] and not any(isinstance(e, CallCut | CallFailed) for e in events)
        await world.append(RunFinished(reason="completed"))
        await gateway
        return [e for e in events if isinstance(e, CallCompleted)]

    stays, moves = stack.run(body)
    assert (stays.num_retries, moves.num_retries) == (0, 1)
    assert moves.sampled == stays.sampled and len(moves.sampled) > 4 * 100
    assert unpack_logprobs(moves.logprobs) == pytest.approx(unpack_logprobs(stays.logprobs), abs=1e-4)


def test_a_late_or_cancelled_call_leaves_nothing_running(stack: Stack) -> None:
    stack.pull(0, 72)

    async def body(engine: SglangEngine) -> None:
        engine.call_timeout_s = 0.2
        with pytest.raises(EngineError, match=r"no answer to late in 0\.2 s"):
            await generate(engine, "late", [3, 4, 5], **LONG)
        engine.call_timeout_s = 60
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await generate(engine, "cancelled", [3, 4, 5], **LONG)
        async with asyncio.timeout(120):
            while not await engine.idle():  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    stack.run(body)


def test_a_refusal_carries_status_and_reason(stack: Stack) -> None:
    with pytest.raises(EngineError, match="context length") as caught:
        stack.run(lambda e: generate(e, "too-long", list(range(5, 255)) * 5))
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7),
        ("", 0),
        ("soon", 0),
        ("-3", 0),
        ("Sun, 09 Sep 2001 01:47:10 GMT", 30),
        ("Sun, 09 Sep 2001 01:46:00 GMT", 0),
    ],
)
def test_retry_after_is_seconds_or_a_date(value: str, seconds: int) -> None:
    assert retry_after_s(value, 1_000_000_000.0) == seconds


def test_an_engine_that_is_not_there_is_an_engine_error() -> None:
    async def body() -> None:
        async with SglangEngine(f"http://127.0.0.1:{free_ports(1)[0]}") as engine:
            assert not await engine.ready()
            with pytest.raises(EngineError, match="is its process alive") as caught:
                await generate(engine, "x", [1, 2])
            assert caught.value.status is None
            with pytest.raises(EngineError, match=r"not ready after 0\.5 s"):
                await engine.wait_ready(0.5)

    asyncio.run(body())


def test_an_answer_that_does_not_fit_together_is_refused() -> None:
    meta = {
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None]],
        "weight_versions": [{"version": "3", "start": 0, "end": 1}],
        "finish_reason": {"type": "stop", "matched": 8},
        "prompt_tokens": 4,
        "cached_tokens": 0,
        "e2e_latency": 0.1,
    }
    with pytest.raises(EngineError, match="do not fit"):
        parse_generation({"output_ids": [7, 8], "meta_info": meta})
    with pytest.raises(EngineError, match="without what is needed"):
        parse_generation({"output_ids": [7, 8], "meta_info": meta | {"finish_reason": None}})


def gone_soon(family: list[psutil.Process]) -> bool:
    deadline = time.monotonic() + 120
    while alive(family) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(family)


def test_a_stop_signal_ends_every_process_at_once(stack: Stack, tmp_path: Path) -> None:
    _, process = start_engine(stack.paths[0].parent, tmp_path / "engine.log")
    family = descendants(process.pid)
    assert len(family) >= 2
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0
    print(f"engine stopped after {time.monotonic() - start:.2f} s")
    assert gone_soon(family)


def test_an_engine_ends_with_its_parent(stack: Stack, tmp_path: Path) -> None:
    parent = (sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])")
    _, process = start_engine(stack.paths[0].parent, tmp_path / "engine.log", parent)
    family = descendants(process.pid)
    assert len(family) >= 3
    process.kill()
    process.wait()
    assert gone_soon(family)


def test_workers_end_with_a_killed_engine(stack: Stack, tmp_path: Path) -> None:
    _, process = start_engine(stack.paths[0].parent, tmp_path / "engine.log")
    family = descendants(process.pid)
    process.kill()
    process.wait()
    assert gone_soon(family)
