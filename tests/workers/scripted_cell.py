"""Shell. A cell's surroundings by script, for tests of its hops: engine, children, gateway, a log in memory."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from cell_logs import published

from gyre.config import Config, EngineConfig, SchedulerConfig
from gyre.errors import EngineError
from gyre.events.codec import Recorded
from gyre.events.log import Log, Writer, open_writer
from gyre.events.memory import MemoryLog
from gyre.events.types import (
    CellFenced,
    Event,
    RunFinished,
    SessionsRerouted,
    SwitchRequested,
    TermStarted,
    WeightsLocated,
)
from gyre.workers.cell import keep_cell
from gyre.workers.engine import PullReport
from gyre.workers.hops import Hops
from gyre.workers.kv_mover import KvMover
from gyre.workers.manifest import WeightManifest


class ScriptedChild:
    def __init__(self) -> None:
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.stopped = False

    def die(self, code: int = -9) -> None:
        self.code.set_result(code)

    async def wait(self) -> int:
        return await asyncio.shield(self.code)

    async def stop(self) -> None:
        self.stopped = True
        if not self.code.done():
            self.code.set_result(-15)


class ScriptedEngine:
    """Loses its weights with its process, and refuses what a real engine refuses."""

    base_url = "http://127.0.0.1:9"

    def __init__(self) -> None:
        self.children: list[ScriptedChild] = []
        self.version = 0
        self.num_running = 0
        self.is_released = False
        self.did: list[str] = []
        self.before_pull: Callable[[], None] = lambda: None

    async def start(self) -> ScriptedChild:
        self.version, self.is_released = 0, False
        self.children.append(ScriptedChild())
        return self.children[-1]

    def _check(self) -> None:
        if not self.children or self.children[-1].code.done():
            raise EngineError("engine: gone")

    async def wait_ready(self, timeout_s: float) -> None:
        self._check()

    async def idle(self) -> bool:
        self._check()
        return self.num_running == 0

    async def release(self) -> None:
        self._check()
        if self.num_running:
            raise EngineError("engine: 409: drain first")
        self.is_released = True
        self.did.append("release")

    async def restore(self) -> None:
        self._check()
        self.is_released = False

    async def pull_weights(self, manifest: WeightManifest) -> PullReport:
        self.before_pull()
        self._check()
        self.version = manifest.version
        self.did.append(f"pull {manifest.version}")
        return PullReport(version=manifest.version, digest=manifest.digest, num_bytes=4, seconds={"fetch": 0.1})


class Stage:
    """One cell on a log in memory, and a hand to write what other processes would."""

    def __init__(self, log: Log, run_dir: Path, config: Config) -> None:
        self.log, self.run_dir, self.config = log, run_dir, config
        self.engine = ScriptedEngine()
        self.trainers: list[ScriptedChild] = []
        self.name = "c0"
        self.answers = True
        """Whether the gateway answers fences."""
        self.mover: KvMover | None = None

    async def start_trainer(self) -> ScriptedChild:
        self.trainers.append(ScriptedChild())
        return self.trainers[-1]

    async def write(self, *events: Event) -> None:
        writer = await open_writer(self.log, "hand", time.time_ns)
        for event in events:
            await writer.append(event)

    async def publish(self, version: int, *, located: bool = True) -> None:
        """As a trainer does: where they lie comes first."""
        event = published(version)
        if located:
            manifest = WeightManifest(session="s", version=version, digest=event.digest, tensors=())
            text = msgspec.json.encode(manifest).decode()
            await self.write(WeightsLocated(version=version, digest=event.digest, num_bytes=0, manifest=text))
        await self.write(event)

    async def command(self, role: str, epoch: int, term: int = 1) -> None:
        command = SwitchRequested(cell="c0", role=role, epoch=epoch, term=term)  # type: ignore[arg-type]
        await self.write(command)

    async def answer_fences(self) -> None:
        async for recorded in self.log.read(1):
            if isinstance(recorded.event, CellFenced) and self.answers:
                fence = recorded.event
                writer = await open_writer(self.log, "gateway", time.time_ns)
                answer = SessionsRerouted(cell=fence.cell, epoch=fence.epoch, num_sessions=0, num_calls_moved=0)
                await writer.append(answer, cause=recorded.seq)

    def hops(self, writer: Writer) -> Hops:
        return Hops(
            self.log,
            writer,
            self.config,
            cell_id=self.name,
            index=self.config.cells.names.index(self.name),
            run_dir=self.run_dir,
            model_digest="m",
            engine=self.engine,
            clock=time.monotonic,
            mover=self.mover,
        )

    @asynccontextmanager
    async def cell(self) -> AsyncIterator[asyncio.Task[None]]:
        """The cell process; cancelled at the end, as by a signal."""
        writer = await open_writer(self.log, "cell", time.time_ns)
        trainer = None if self.name in self.config.cells.standalone else self.start_trainer
        cell = asyncio.create_task(keep_cell(self.hops(writer), start_engine=self.engine.start, start_trainer=trainer))
        gateway = asyncio.create_task(self.answer_fences())
        try:
            yield cell
        finally:
            cell.cancel()
            gateway.cancel()
            await asyncio.gather(cell, gateway, return_exceptions=True)

    async def until(self, kind: type[Event], num: int = 1, **fields: object) -> Recorded:
        """The `num`-th event of that kind with those fields."""
        async with asyncio.timeout(120):
            async for recorded in self.log.read(1):
                event = recorded.event
                if isinstance(event, kind) and all(getattr(event, k) == v for k, v in fields.items()):
                    num -= 1
                    if not num:
                        return recorded
        raise AssertionError("unreachable")

    async def names(self, prefix: str = "cell.") -> list[str]:
        """Names of the events so far, without their versions."""
        found = [r.event async for r in self.log.read(1, until=await self.log.last_seq())]
        tags = [str(type(e).__struct_config__.tag).removesuffix(".v1") for e in found]
        return [tag.removeprefix(prefix) for tag in tags if tag.startswith(prefix)]


async def serving(run_dir: Path, *, deadline_s: float = 5.0) -> Stage:
    """A stage whose log says that a scheduler is there and version 0 is published."""
    config = Config(
        engine=EngineConfig(capacity=4, start_timeout_s=2), scheduler=SchedulerConfig(switch_deadline_s=deadline_s)
    )
    stage = Stage(MemoryLog("r"), run_dir, config)
    await stage.write(TermStarted(term=1))
    await stage.publish(0)
    return stage


FINISHED = RunFinished(reason="completed")
