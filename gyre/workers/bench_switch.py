"""Shell. `gyre bench switch`: what a role switch costs, and what moving KV instead of computing it again saves.

Two engines, the store between them and a process that owns weights, all real, on this machine. One engine samples a
long context greedily; it leaves for training in the middle of that, the other goes on; then it comes back with new
weights. Direction: processes -> seconds by phase, tokens, bytes -> figures.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray

from gyre.agents.engine_client import Generation
from gyre.config import EngineConfig
from gyre.errors import EngineError, ProcessError
from gyre.events.codec import Recorded
from gyre.events.log import Writer, open_writer
from gyre.events.memory import MemoryLog
from gyre.events.server import free_ports
from gyre.events.tokens import pack_ids
from gyre.events.types import (
    CallCut,
    CallStarted,
    CellFenced,
    CellJoined,
    CellLeased,
    CellSwitched,
    EngineReleased,
    Event,
    KvMigrated,
    VersionSpan,
)
from gyre.workers.bench import Figure, figure
from gyre.workers.children import Child, last_words, spawn
from gyre.workers.engine import SglangEngine, engine_command, parse_generation
from gyre.workers.kv_mover import KvMover
from gyre.workers.kv_store import READY, KvStore
from gyre.workers.manifest import WeightManifest
from gyre.workers.tiny_policy import TinyShape, init_policy
from gyre.workers.transfer import TransferEndpoint, WeightSink

T = TypeVar("T")
SHAPE = TinyShape(num_layers=2, hidden=128, num_heads=4, num_kv_heads=4, ffn=256, context=16384)
PAGE_TOKENS = 16
NUM_PROMPT, MIN_DECODED, NUM_REST = 8192, 256, 64
MAX_PREFILLED, MIN_RATE = 0.1, 0.7
BULK_TENSORS, BULK_BYTES = 16, 64 << 20
"""1 GiB of weights."""
PULLS = 3
FLUSHES = 50
GREEDY: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "stop_token_ids": ()}
ENV = {"GLOG_minloglevel": "2", "MC_LOG_LEVEL": "ERROR", "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}


def bench_switch(
    folder: Path, *, num_prompt: int = NUM_PROMPT, bulk: tuple[int, int] = (BULK_TENSORS, BULK_BYTES)
) -> dict[str, Figure]:
    """In `folder` (empty). Raises what engines, store and transfers raise."""
    init_policy(folder / "policy", 1, num_demonstrations=200, shape=SHAPE)
    return asyncio.run(_run(folder, num_prompt)) | asyncio.run(_weights(folder, *bulk))


class _Clock:
    """Seconds by name, each from the end of the one before."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    async def time(self, name: str, work: Awaitable[T]) -> T:
        begun = time.monotonic()
        found = await work
        self.seconds[name] = time.monotonic() - begun
        return found


async def _run(folder: Path, num_prompt: int) -> dict[str, Figure]:
    (port,) = free_ports(1)
    address, policy = f"127.0.0.1:{port}", folder / "policy"
    config = EngineConfig(
        context_tokens=SHAPE.context, max_total_tokens=2 * num_prompt + 8192, max_running_requests=4, kv_store=address,
        kv_page_tokens=PAGE_TOKENS,
    )  # fmt: skip
    store_argv = (sys.executable, "-m", "gyre.workers.kv_store", "--port", str(port))
    async with _process(store_argv, folder / "store.log", ready=READY):
        store = KvStore(address)
        try:
            mover = KvMover(store, model=str(policy), page_tokens=PAGE_TOKENS, target_store=KvStore(address))
            async with (
                _engine(policy, config, folder / "a.log") as a,
                _engine(policy, config, folder / "b.log") as b,
                _owner(policy / "model.safetensors", folder / "owner.log") as owner,
            ):
                return await _switch(a, b, mover, owner, num_prompt)
        finally:
            store.close()


async def _flush(engine: SglangEngine) -> None:
    """An engine refuses while it still tidies up after its last call."""
    for _ in range(FLUSHES):
        try:
            await engine.flush_cache()
            return
        except EngineError:
            await asyncio.sleep(0.1)
    await engine.flush_cache()


async def _switch(
    a: SglangEngine, b: SglangEngine, mover: KvMover, owner: "_Owner", num_prompt: int
) -> dict[str, Figure]:
    log = _Log(mover)
    prompt = np.random.default_rng(1).integers(10, SHAPE.vocab - 10, num_prompt, dtype=np.int32)
    for engine in (a, b):
        await engine.generate("warm", prompt[:64], max_tokens=8, extra_key="warm", **GREEDY)
    leaving, cut = await _leave(a, log, prompt)
    full = np.concatenate((prompt, np.array(cut.output_ids, dtype=np.int32)))
    moved = await log.move("s", target="c1")
    await leaving.time("release", a.release())
    leaving.seconds |= log.seconds
    await log.append(EngineReleased(cell="c0", epoch=2, seconds=leaving.seconds["release"]))

    await _flush(b)
    warm, cold = _Clock(), _Clock()
    first = await warm.time("first token", b.generate("moved", full, max_tokens=1, extra_key="0", **GREEDY))
    rest = await b.generate("rest", full, max_tokens=NUM_REST, extra_key="0", **GREEDY)
    await _flush(b)
    again = await cold.time("first token", b.generate("again", full, max_tokens=1, extra_key="again", **GREEDY))

    back = _Clock()
    await back.time("restore", a.restore())
    pulled = await a.pull_weights(owner.manifest(1))
    back.seconds |= pulled.seconds
    num_all = len(cut.output_ids) + NUM_REST
    straight = await a.generate("straight", prompt, max_tokens=num_all, extra_key="straight", **GREEDY)
    differing = sum(x != y for x, y in zip((*cut.output_ids, *rest.output_ids), straight.output_ids, strict=True))
    num_cold = again.num_prompt_tokens - again.num_cached_tokens
    return {
        "context": figure(len(full), "tokens", min_value=min(NUM_PROMPT, num_prompt)),
        "decoded_before_the_switch": figure(len(cut.output_ids), "tokens"),
        "kv_moved": figure(moved.num_tokens, "tokens", reference=len(full)),
        "kv_moved_bytes": figure(moved.num_bytes / 1e6, "MB"),
        "prefilled_again": figure(
            first.num_prompt_tokens - first.num_cached_tokens, "tokens", reference=num_cold, max_ratio=MAX_PREFILLED
        ),
        "prefilled_again_without_migration": figure(num_cold, "tokens", reference=len(full)),
        "first_token": figure(warm.seconds["first token"], "s", reference=cold.seconds["first token"]),
        "tokens_that_differ_from_a_run_without_a_switch": figure(differing, "tokens", max_value=0),
        "to_training": figure(sum(leaving.seconds.values()), "s"),
        **{f"to_training_{name}": figure(seconds, "s") for name, seconds in leaving.seconds.items()},
        "to_rollout": figure(sum(back.seconds.values()), "s"),
        **{f"to_rollout_{name}": figure(seconds, "s") for name, seconds in back.seconds.items()},
    }


async def _leave(engine: SglangEngine, log: "_Log", prompt: NDArray[np.int32]) -> tuple[_Clock, Generation]:
    """A call that is cut in the middle, by the abort of a fence, once it has decoded enough."""
    clock = _Clock()
    await log.start(prompt)
    is_due, cut_s = asyncio.Event(), 0.0

    def decoded(num: int) -> None:
        if num >= MIN_DECODED:
            is_due.set()

    async with asyncio.TaskGroup() as group:
        call = group.create_task(_stream(engine, "cut", prompt, decoded))
        due = asyncio.ensure_future(is_due.wait())
        await asyncio.wait((call, due), return_when=asyncio.FIRST_COMPLETED)
        due.cancel()
        log.fence_seq = await log.append(CellFenced(cell="c0", epoch=2))
        begun = time.monotonic()
        await engine.abort("cut")
        generation = await call
        cut_s = time.monotonic() - begun
    clock.seconds["cut"] = cut_s
    if generation.finish != "abort":
        raise EngineError(f"gyre bench switch: the call ended by itself ({generation.finish}) before it was cut")
    await log.cut(generation)
    return clock, generation


async def _stream(
    engine: SglangEngine, rid: str, prompt: NDArray[np.int32], decoded: Callable[[int], None]
) -> Generation:
    """A greedy call of which one hears how far it is."""
    body = {
        "rid": rid, "input_ids": prompt.tolist(), "extra_key": "0", "return_logprob": True, "logprob_start_len": -1,
        "stream": True,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 4096, "ignore_eos": True},
    }  # fmt: skip
    last: Any = None
    async with (
        aiohttp.ClientSession(read_bufsize=1 << 24) as session,
        session.post(f"{engine.base_url}/generate", json=body) as answer,
    ):
        async for line in answer.content:
            if line.startswith(b"data: {"):
                last = msgspec.json.decode(line[6:])
                decoded(len(last["output_ids"]))
    return parse_generation(last)


class _Log:
    """What the gateway and the cell would write, on a log in memory that the mover follows."""

    def __init__(self, mover: KvMover) -> None:
        self.log, self.mover, self.seq = MemoryLog("bench"), mover, 0
        self.seconds: dict[str, float] = {}
        self.fence_seq = 0
        """The last event on the subject of the cell that leaves."""
        self._writer: Writer | None = None

    async def append(self, event: Event, *, expect_last: int | None = None) -> int:
        self._writer = self._writer or await open_writer(self.log, "bench", time.time_ns)
        seq = await self._writer.append(event, expect_last=expect_last)
        async for recorded in self.log.read(self.seq + 1, until=seq):
            self._fold(recorded)
        return seq

    def _fold(self, recorded: Recorded) -> None:
        self.mover.evolve(recorded)
        self.seq = recorded.seq

    async def start(self, prompt: NDArray[np.int32]) -> None:
        """Two cells in rollout, and a call at the first."""
        for index, cell in enumerate(("c0", "c1")):
            await self.append(CellJoined(cell=cell, index=index, capacity=1, engine_url="", model_digest=""))
            await self.append(CellLeased(cell=cell, role="rollout", epoch=1))
            await self.append(CellSwitched(cell=cell, role="rollout", epoch=1, version=0, phases=()))
        started = CallStarted(
            execution="e", session="s", call="s-1", base="", shared=0, context=pack_ids(prompt), role_class="main",
            rule="root", marks=(), temperature=0.0, top_p=1.0, max_tokens=4096, cell="c0",
        )  # fmt: skip
        await self.append(started)

    async def cut(self, generation: Generation) -> None:
        num = len(generation.output_ids)
        cut = CallCut(
            execution="e", session="s", call="s-1", sampled=pack_ids(generation.output_ids), logprobs=b"",
            spans=(VersionSpan(version=0, start=0, end=num),), reason="its cell leaves rollout",
        )  # fmt: skip
        await self.append(cut)

    async def move(self, session: str, *, target: str) -> KvMigrated:
        """As a cell does it: checked on both sides, then the compare-and-set. Raises ProcessError for a miss."""
        clock = _Clock()
        event = await clock.time("kv", self.mover.decide(session, cell="c0", epoch=2))
        if not isinstance(event, KvMigrated):
            raise ProcessError(f"gyre bench switch: the KV was not moved: {event.reason}")
        await clock.time("owner", self.append(event, expect_last=self.fence_seq))
        if self.mover.owners.owner(session) != target or self.mover.owners.unsettled("c0"):
            raise ProcessError("gyre bench switch: the log does not say that the KV has moved")
        self.seconds = clock.seconds
        return event


# ---------------------------------------------------------------- weights


async def _weights(folder: Path, num_tensors: int, num_bytes: int) -> dict[str, Figure]:
    """A pull of much more than caches hold, next to Mooncake alone moving the same bytes."""
    async with _owner(Path(f"{num_tensors}x{num_bytes}"), folder / "bulk.log") as owner:
        manifest = owner.manifest(1)
        endpoint = TransferEndpoint()
        sink = WeightSink(endpoint)
        sink.pull(manifest)  # the first registers the buffer, and maps its pages
        raw, whole = [], []
        for _ in range(PULLS):
            begun = time.monotonic()
            sink.fetch(manifest)
            raw.append(time.monotonic() - begun)
            begun = time.monotonic()
            sink.pull(manifest)
            whole.append(time.monotonic() - begun)
        gigabytes = manifest.num_bytes / 1e9
        return {
            "weights": figure(gigabytes, "GB"),
            "weight_pull": figure(gigabytes / min(whole), "GB/s", reference=gigabytes / min(raw), min_ratio=MIN_RATE),
        }


class _Owner:
    """A process that holds weights: what its manifests say."""

    def __init__(self, log_file: Path) -> None:
        self._log_file = log_file

    def manifest(self, version: int) -> WeightManifest:
        line = next(line for line in self._log_file.read_text().splitlines() if line.startswith("{"))
        found = msgspec.json.decode(line, type=WeightManifest)
        return msgspec.structs.replace(found, version=version)


@asynccontextmanager
async def _owner(weights: Path, log_file: Path) -> AsyncIterator[_Owner]:
    argv = (sys.executable, "-m", "gyre.workers.bench_weights", str(weights))
    async with _process(argv, log_file, ready="{"):
        yield _Owner(log_file)


@asynccontextmanager
async def _engine(policy: Path, config: EngineConfig, log_file: Path) -> AsyncIterator[SglangEngine]:
    (port,) = free_ports(1)
    argv, env = engine_command(policy, port, config)
    async with (
        _process(argv, log_file, env=env),
        SglangEngine(f"http://127.0.0.1:{port}", call_timeout_s=600) as engine,
    ):
        await engine.wait_ready(config.start_timeout_s)
        yield engine


@asynccontextmanager
async def _process(
    argv: tuple[str, ...], log_file: Path, *, env: Mapping[str, str] | None = None, ready: str = ""
) -> AsyncIterator[Child]:
    child = await spawn(argv, env={**ENV, **(env or {})}, log_file=log_file)
    ended = asyncio.ensure_future(child.wait())
    try:
        while ready and not _has_line(log_file, ready):
            if ended.done():
                raise ProcessError(f"gyre bench switch: {argv[2]} ended: {last_words(log_file)}")
            await asyncio.sleep(0.05)
        yield child
    finally:
        await child.stop()
        ended.cancel()


def _has_line(log_file: Path, start: str) -> bool:
    return any(line.startswith(start) for line in log_file.read_text(errors="replace").splitlines())
