"""A whole cell for real: SGLang, Megatron-Core and Mooncake under one scheduler, over a log in memory.

The gateway and the executions are written by hand; the trainer runs in this process.
"""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")
pytest.importorskip("megatron.core")
pytest.importorskip("mooncake.engine")

from test_engine import make_policy  # noqa: E402
from test_trainer_loop import config, groups, write  # noqa: E402

from gyre.config import Config, EngineConfig, GuardsConfig, PolicyConfig, config_digest, encode_config  # noqa: E402
from gyre.events.log import open_writer  # noqa: E402
from gyre.events.memory import MemoryLog  # noqa: E402
from gyre.events.server import free_ports  # noqa: E402
from gyre.events.types import (  # noqa: E402
    CellFenced,
    CellLost,
    CellSwitched,
    Event,
    RunFinished,
    RunStarted,
    SessionsRerouted,
    StepCompleted,
    WeightsPulled,
)
from gyre.projections.replay import verify  # noqa: E402
from gyre.workers import scheduler  # noqa: E402
from gyre.workers.cell import keep_cell  # noqa: E402
from gyre.workers.children import Child, spawn  # noqa: E402
from gyre.workers.engine import SglangEngine, engine_command  # noqa: E402
from gyre.workers.hops import Hops  # noqa: E402
from gyre.workers.scheduler_loop import run_scheduler  # noqa: E402
from gyre.workers.trainer_loop import run_trainer  # noqa: E402

pytestmark = pytest.mark.stack


class TrainerTask:
    """The trainer as a child of the cell, but in this process."""

    def __init__(self, task: "asyncio.Task[None]") -> None:
        self.task = task

    async def wait(self) -> int:
        await asyncio.wait([self.task])
        return int(self.task.cancelled() or self.task.exception() is not None)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class Scene:
    def __init__(self, path: Path) -> None:
        self.path, self.policy = path, path / "policy"
        make_policy(self.policy, 0)
        engine = EngineConfig(context_tokens=256, max_total_tokens=4096, max_running_requests=4, capacity=8)
        base = config(num_steps=1)
        guards = GuardsConfig(max_logprob_gap_mean=10.0)  # its calls carry made-up log-probabilities
        self.config: Config = msgspec.structs.replace(
            base, engine=engine, guards=guards, policy=PolicyConfig(path=str(self.policy))
        )
        self.log = MemoryLog("r")
        self.engines: list[Child] = []
        (self.port,) = free_ports(1)

    def started(self) -> RunStarted:
        text, digest = encode_config(self.config), config_digest(self.config)
        return RunStarted(run="r", config=text, config_digest=digest, seed=1, versions=(), num_threads=1)

    async def start_engine(self) -> Child:
        argv, env = engine_command(self.policy, self.port, self.config.engine)
        self.engines.append(await spawn(argv, env=env, log_file=self.path / "engine.log"))
        return self.engines[-1]

    async def start_trainer(self) -> TrainerTask:
        writer = await open_writer(self.log, "trainer", time.time_ns)
        run = run_trainer(self.log, writer, self.config, cell_id="c0", run_dir=self.path, policy_dir=self.policy)
        return TrainerTask(asyncio.create_task(run))

    async def cell(self, engine: SglangEngine) -> None:
        writer = await open_writer(self.log, "cell", time.time_ns)
        hops = Hops(
            self.log, writer, self.config, cell_id="c0", index=0, run_dir=self.path, model_digest="m", engine=engine,
            clock=time.monotonic,
        )  # fmt: skip
        await keep_cell(hops, start_engine=self.start_engine, start_trainer=self.start_trainer)

    async def scheduler(self) -> None:
        await run_scheduler(self.log, await open_writer(self.log, "scheduler", time.time_ns), self.config)

    async def gateway(self) -> None:
        writer = await open_writer(self.log, "gateway", time.time_ns)
        async for recorded in self.log.read(1):
            if isinstance(recorded.event, RunFinished):
                return
            if isinstance(recorded.event, CellFenced):
                fence = recorded.event
                answer = SessionsRerouted(cell=fence.cell, epoch=fence.epoch, num_sessions=0, num_calls_moved=0)
                await writer.append(answer, cause=recorded.seq)

    async def until(self, kind: type[Event], **fields: object) -> Any:
        async with asyncio.timeout(120):
            async for recorded in self.log.read(1):
                if isinstance(recorded.event, kind) and all(getattr(recorded.event, k) == v for k, v in fields.items()):
                    return recorded.event


@pytest.mark.timeout(280)
def test_a_cell_trains_and_serves_what_it_trained_also_after_its_engine_died(tmp_path: Path) -> None:
    scene = Scene(tmp_path)

    async def play(engine: SglangEngine) -> None:
        await scene.until(CellSwitched, role="rollout", epoch=1, version=0)
        first = await scene.until(WeightsPulled, version=0)
        assert (await engine.info()).digest == first.digest
        prompt = {"temperature": 0.0, "top_p": 1.0, "max_tokens": 8, "stop_token_ids": (), "extra_key": "0"}
        before = await engine.generate("a", [5, 6, 7], **prompt)
        await write(scene.log, *groups(0, 1))
        switched = await scene.until(CellSwitched, role="train", epoch=2)
        assert [phase.name for phase in switched.phases] == ["fence", "drain", "release"]
        step = await scene.until(StepCompleted, step=1)
        await scene.until(CellSwitched, role="rollout", epoch=3, version=1)
        pulled = await scene.until(WeightsPulled, version=1)
        assert pulled.digest == step.weights_digest == (await engine.info()).digest != first.digest
        after = await engine.generate("b", [5, 6, 7], **prompt | {"extra_key": "1"})
        assert {span.version for span in after.spans} == {1} and {span.version for span in before.spans} == {0}
        assert before.logprobs != after.logprobs
        os.kill(scene.engines[-1].pid, signal.SIGKILL)
        await scene.until(CellLost)
        await scene.until(CellSwitched, role="rollout", epoch=4, version=1)
        again = await engine.generate("c", [5, 6, 7], **prompt | {"extra_key": "1"})
        assert again.output_ids == after.output_ids
        await write(scene.log, RunFinished(reason="completed"))

    async def main() -> None:
        async with SglangEngine(f"http://127.0.0.1:{scene.port}") as engine, asyncio.TaskGroup() as group:
            await write(scene.log, scene.started())
            for work in (scene.cell(engine), scene.scheduler(), scene.gateway(), play(engine)):
                group.create_task(work)

        verdict = await verify(scene.log, scheduler=scheduler)
        assert not verdict.differences
        assert dict(verdict.num_checked) == {"batches": 1, "cohorts": 1, "decisions": 2}

    asyncio.run(main())
    assert all(not Path(f"/proc/{child.pid}").exists() for child in scene.engines)
