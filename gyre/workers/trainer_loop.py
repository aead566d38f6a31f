"""Shell. The core's trainer process: cohorts of the log in, steps, checkpoints and weights out.

Invariants: `policy.step_completed` follows only when the checkpoint of the step is durable; the same log, config
and hardware give the same weights, also when a step is taken again after a crash; a step that a guard refuses
leaves weights and optimizer as they were before it.

Consumes: the log (executions, and the role of its cell). Produces: `policy.*` events, which also say where published
weights lie, and checkpoints. Waits for: the next event; a trainer without the role does nothing else. Is unblocked by:
`run.finished`, a cancel.

Everything of torch runs in one thread, so that the log's connection stays alive during a step.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar, cast

import msgspec

from gyre.config import Config
from gyre.errors import FoldError, PolicyError, TrainingError
from gyre.events.codec import Recorded
from gyre.events.follow import catch_up
from gyre.events.log import Log, Writer
from gyre.events.server import LOOPBACK
from gyre.events.types import Event, Guard, PolicyPublished, PolicyRolledBack, RunFinished, StepRejected, WeightsLocated
from gyre.projections.cluster import Cluster, find_cell
from gyre.projections.experience import Experience
from gyre.workers import claims as claims_fold
from gyre.workers import guards
from gyre.workers import steps as steps_fold
from gyre.workers.claims import Claims
from gyre.workers.gathering import Exchange, Gathering
from gyre.workers.manifest import WeightManifest
from gyre.workers.memory import Tenancy, TrainerMemory
from gyre.workers.policy_files import load_demonstrations
from gyre.workers.ranks import Ranks
from gyre.workers.steps import Steps, cohort_of, next_deed, rejection_deed
from gyre.workers.steps_again import restore
from gyre.workers.trainer import Trainer
from gyre.workers.trainer_step import StepTaking, checkpoint_path, drop_unfinished_checkpoints
from gyre.workers.transfer import BufferSink, TransferEndpoint, WeightSource

T = TypeVar("T")


async def run_trainer(
    log: Log,
    writer: Writer,
    config: Config,
    *,
    cell_id: str,
    run_dir: Path,
    policy_dir: Path,
    clock: Callable[[], float] = time.monotonic,
    ranks: Ranks | None = None,
    host: str = LOOPBACK,
) -> None:
    """Runs until the run is finished. `ranks`: of a cell that has several; `host`: where others find its weights.

    Raises PolicyError, FoldError.
    """
    with Tenancy(run_dir, cell_id) as tenancy, ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch") as thread:
        process = _Process(log, writer, config, cell_id, run_dir, policy_dir, tenancy, thread, clock, ranks, host)
        if not await catch_up(log, process.fold):
            await process.load()
            await process.follow()


class _Process:
    def __init__(
        self,
        log: Log,
        writer: Writer,
        config: Config,
        cell: str,
        run_dir: Path,
        policy_dir: Path,
        tenancy: Tenancy,
        thread: ThreadPoolExecutor,
        clock: Callable[[], float],
        ranks: Ranks | None,
        host: str,
    ) -> None:
        self.log, self.writer, self.config, self.cell = log, writer, config, cell
        self.run_dir, self.policy_dir, self.thread, self.clock = run_dir, policy_dir, thread, clock
        self.ranks, self.host, self.tenancy = ranks, host, tenancy
        self.experience, self.steps, self.claims = Experience(), Steps(), Claims()
        self.seq = 0
        self.appended_seq = 0
        """The last event of this process; nothing is looked at before it is read back."""
        self.checkpoints = run_dir / "checkpoints"
        self.trainer: Trainer
        self.source: WeightSource
        self.exchange: Exchange | None = None
        self.memory: TrainerMemory
        self.manifest: WeightManifest

    # ------------------------------------------------------------ the log

    async def follow(self) -> None:
        await self.act()
        async for recorded in self.log.read(self.seq + 1):
            self.fold(recorded)
            if isinstance(recorded.event, RunFinished):
                return
            if self.seq >= self.appended_seq:
                await self.act()

    def fold(self, recorded: Recorded) -> None:
        self.experience.evolve(recorded)
        self.claims = claims_fold.evolve(self.claims, recorded)
        self.steps = steps_fold.evolve(self.steps, recorded)
        self.seq = recorded.seq

    @property
    def cluster(self) -> Cluster:
        return self.claims.cluster

    async def append(self, *events: Event, cause: int) -> int:
        self.appended_seq = await self.writer.append_all(events, cause=cause)
        return self.appended_seq

    async def act(self) -> None:
        """The one deed that the folded prefix calls for, if any."""
        await self.share_memory()
        if self.trainer.step < self.steps.step:
            # A predecessor's last append came to the log after this process had read it to its end.
            await self.start_over()
        deed = rejection_deed(self.steps)
        match deed or next_deed(self.cluster, self.experience.cohorts, self.cell, self.config.pipeline):
            case "roll_back":
                await self.roll_back()
            case "pause":
                await self.pause()
            case "step":
                await self.step()
            case "publish":
                await self.publish()

    async def share_memory(self) -> None:
        """With the engine: it is this one's while the cell trains, and while there is something to repair."""
        cell = find_cell(self.cluster, self.cell)
        is_repairing = self.trainer.step < self.steps.step or rejection_deed(self.steps) == "roll_back"
        if (cell is not None and cell.state == "TRAINING") or (is_repairing and self.memory.is_away):
            await self.memory.take()
        elif not is_repairing:
            await self.memory.let_go()

    async def step(self) -> None:
        """Of the cohort that is next, or that was consumed before a crash."""
        number = self.steps.step + 1
        cohort = cohort_of(self.experience.cohorts, number, self.config.pipeline)
        cell = find_cell(self.cluster, self.cell)
        if cohort is None or cell is None:
            raise FoldError(f"trainer: step {number}: its cohort or its cell is not in the fold; fold from sequence 1")
        gathering = Gathering(
            self.log,
            self.append,
            self.in_thread,
            cell=cell,
            trainer=self.trainer,
            claims=self.claims,
            exchange=self.exchange,
            deadline_s=self.config.cells.claim_deadline_s,
        )
        taking = StepTaking(
            append=self.append,
            in_thread=self.in_thread,
            config=self.config,
            cell=cell,
            trainer=self.trainer,
            source=self.source,
            checkpoints=self.checkpoints,
            clock=self.clock,
            steps=self.steps,
            gather=gathering.gather,
        )
        try:
            async with gathering:
                self.manifest = await taking.take(cohort, self.experience)
        except TrainingError as error:
            rejected = StepRejected(
                step=number,
                guard=cast(Guard, error.guard),
                value=error.value,
                bound=error.bound,
                detail=str(error),
                action=guards.action(self.config.guards, self.steps.num_rejected),
            )
            await self.append(rejected, cause=taking.last_seq)

    async def roll_back(self) -> None:
        """The last completed step again, from its checkpoint: a rejected step may have made some of its updates."""
        step, rejection = self.steps.step, self.steps.rejection
        if rejection is None:
            raise FoldError("trainer: there is no rejected step to roll back")

        before = self.manifest.digest
        await self.start_over()
        self.check_restored(self.manifest, before)
        event = PolicyRolledBack(from_step=rejection.step, to_version=step, reason=rejection.detail)
        await self.append(event, cause=self.steps.rejected_seq)

    async def start_over(self) -> None:
        """The last completed step of the log, from the policy or its checkpoint on."""
        await self.in_thread(lambda: self.trainer.restart(self.policy_dir))
        self.manifest = await self.restore()
        if self.steps.step:
            self.check_restored(self.manifest, self.steps.weights_digest)

    async def pause(self) -> None:
        """The run ends, to be gone on with when somebody has looked at it."""
        rejection = self.steps.rejection
        detail = f"step {rejection.step} rejected: {rejection.detail}" if rejection else ""
        await self.append(RunFinished(reason="paused", detail=detail), cause=self.steps.rolled_back_seq)

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    # ------------------------------------------------------------ weights

    async def load(self) -> None:
        """The policy of the last completed step, and its weights where others can read them.

        A torn checkpoint is made again. Raises PolicyError when the weights are not those that the log tells of.
        """
        step, config = self.steps.step, self.config

        def build() -> tuple[Trainer, WeightSource, TransferEndpoint]:
            trainer = Trainer(
                self.policy_dir,
                config.trainer,
                seed=config.seed,
                temperature=config.sampling.temperature,
                ranks=self.ranks,
            )
            endpoint = TransferEndpoint(self.host)
            return trainer, WeightSource(trainer.published.named, endpoint), endpoint

        def show() -> None:
            if config.cells.count > 1:
                own = WeightSource(self.trainer.own_weights(), endpoint)
                self.exchange = Exchange(own, BufferSink(self.trainer.gradient, endpoint))

        def hide() -> None:
            if self.exchange is not None:
                self.exchange.close()
            self.exchange = None

        self.trainer, self.source, endpoint = await self.in_thread(build)
        await self.in_thread(show)
        self.memory = TrainerMemory(self.tenancy, self.trainer, self.in_thread, show=show, hide=hide)
        drop_unfinished_checkpoints(self.checkpoints)
        self.manifest = await self.restore()
        if step:
            self.check_restored(self.manifest, self.steps.weights_digest)
        if step == self.cluster.published_version:
            await self.locate()

    async def restore(self) -> WeightManifest:
        """A trainer that is fresh from the policy, brought to the last completed step."""
        return await restore(
            self.log,
            self.trainer,
            self.source,
            self.config,
            step=self.steps.step,
            checkpoints=self.checkpoints,
            in_thread=self.in_thread,
            clock=self.clock,
        )

    def check_restored(self, manifest: WeightManifest, digest: str) -> None:
        """Raises PolicyError when what was loaded is not the last completed step."""
        step = self.steps.step
        if (self.trainer.step, manifest.digest) != (step, digest):
            source = checkpoint_path(self.checkpoints, step) if step else self.policy_dir
            raise PolicyError(
                f"{source}: holds step {self.trainer.step} with digest {manifest.digest[:12]}, the log says step "
                f"{step} with {digest[:12]}; restore the run's own checkpoints and policy"
            )

    async def locate(self) -> None:
        """Where engines read the weights of the last completed step."""
        manifest = self.manifest
        event = WeightsLocated(
            version=manifest.version,
            digest=manifest.digest,
            num_bytes=manifest.num_bytes,
            manifest=msgspec.json.encode(manifest).decode(),
        )
        await self.append(event, cause=self.steps.step_seq)

    async def publish(self) -> None:
        """The weights of the last completed step become a version; with the first, what they were made from is told."""
        version = self.trainer.publish()
        await self.locate()
        event = PolicyPublished(
            version=version,
            digest=self.manifest.digest,
            num_bytes=self.manifest.num_bytes,
            checkpoint=str(checkpoint_path(self.checkpoints, version).relative_to(self.run_dir)) if version else "",
        )
        learned = () if version else load_demonstrations(self.policy_dir)
        await self.append(*learned, event, cause=self.steps.step_seq)
