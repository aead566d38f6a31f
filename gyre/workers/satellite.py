"""Shell. The trainer of a satellite: micro-steps of the core's batch in, a gradient out. It commits nothing.

Invariants: a gradient is of the weights whose digest its offer names, all of which were verified before the first of
them was used; what it sums is what the log says that its cell holds, in the order of the claims. Whatever it holds
in memory can be thrown away: the claims, or what became of them, say what is to be computed.

Consumes: the log (executions, the role of its cell, weights exposed, claims) and the core's weights over Mooncake.
Produces: `policy.microstep_claimed`, `gradient_offered`, `claims_returned`. Waits for: the next event. Is unblocked by:
`run.finished`, a cancel.

Everything of torch runs in one thread, so that the log's connection stays alive during a micro-step.
"""

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from gyre.config import Config, decode_config
from gyre.errors import FoldError, TrainingError, TransferError
from gyre.events.codec import Recorded
from gyre.events.follow import catch_up
from gyre.events.log import Log, Writer
from gyre.events.server import LOOPBACK
from gyre.events.types import (
    ClaimsReturned,
    ConfigChanged,
    Event,
    GradientOffered,
    GradientSums,
    MicrostepClaimed,
    RunFinished,
    WeightsExposed,
)
from gyre.projections.batches import Batch, Row, assemble
from gyre.projections.cluster import find_cell
from gyre.projections.cohorts import consumed_cohort
from gyre.projections.experience import Experience
from gyre.workers import claims as claims_fold
from gyre.workers.claims import Claims, Sum, next_duty
from gyre.workers.manifest import WeightManifest, check_manifest
from gyre.workers.memory import Tenancy, TrainerMemory
from gyre.workers.objective import needs_proximal
from gyre.workers.ranks import Ranks
from gyre.workers.trainer import Trainer
from gyre.workers.transfer import BufferSource, TransferEndpoint, WeightSink

T = TypeVar("T")


async def run_satellite(
    log: Log,
    writer: Writer,
    config: Config,
    *,
    cell_id: str,
    run_dir: Path,
    policy_dir: Path,
    ranks: Ranks | None = None,
    host: str = LOOPBACK,
) -> None:
    """Runs until the run is finished. `ranks`: of a cell that has several; `host`: where the core finds its gradients.

    Raises PolicyError, FoldError.
    """
    with Tenancy(run_dir, cell_id) as tenancy, ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch") as thread:
        process = _Process(log, writer, config, cell_id, policy_dir, tenancy, thread, ranks, host)
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
        policy_dir: Path,
        tenancy: Tenancy,
        thread: ThreadPoolExecutor,
        ranks: Ranks | None,
        host: str,
    ) -> None:
        self.log, self.writer, self.config, self.cell = log, writer, config, cell
        self.policy_dir, self.tenancy, self.thread, self.ranks, self.host = policy_dir, tenancy, thread, ranks, host
        self.experience, self.claims = Experience(), Claims()
        self.appended_seq = 0
        """The last event of this process; nothing is looked at before it is read back."""
        self.batch: Batch | None = None
        self.sum = Sum()
        self.losses: tuple[float, ...] = ()
        self.useless: WeightsExposed | None = None
        """Weights that could not be read: they had changed, or their process was gone."""
        self.trainer: Trainer
        self.sink: WeightSink
        self.source: BufferSource
        self.memory: TrainerMemory

    async def load(self) -> None:
        config = self.config

        def build() -> tuple[Trainer, TransferEndpoint]:
            trainer = Trainer(
                self.policy_dir,
                config.trainer,
                seed=config.seed,
                temperature=config.sampling.temperature,
                commits=False,
                ranks=self.ranks,
            )
            return trainer, TransferEndpoint(self.host)

        def show() -> None:
            self.source = BufferSource(self.trainer.gradient, endpoint)

        def hide() -> None:
            self.source.close()

        self.trainer, endpoint = await self.in_thread(build)
        self.sink = WeightSink(endpoint)
        await self.in_thread(show)
        self.memory = TrainerMemory(self.tenancy, self.trainer, self.in_thread, show=show, hide=hide)

    async def follow(self) -> None:
        await self.act()
        async for recorded in self.log.read(self.claims.seq + 1):
            self.fold(recorded)
            if isinstance(recorded.event, RunFinished):
                return
            if self.claims.seq >= self.appended_seq:
                await self.act()

    def fold(self, recorded: Recorded) -> None:
        if isinstance(recorded.event, ConfigChanged):
            self.config = decode_config(recorded.event.config)
        self.experience.evolve(recorded)
        self.claims = claims_fold.evolve(self.claims, recorded)

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    async def append(self, event: Event, *, cause: int) -> None:
        self.appended_seq = await self.writer.append(event, cause=cause)

    async def act(self) -> None:
        """What the folded prefix calls for, until something has to be read back."""
        await (self.memory.take() if self.trains() else self.memory.let_go())
        while (exposed := self.claims.exposed) is not None:
            rows = self.rows(exposed) if self.trains() else {}
            duty = next_duty(self.claims, self.cell, self.sum, rows)
            match duty:
                case "pull" if self.may_join(exposed):
                    await self.pull(exposed)
                case "discard":
                    await self.discard()
                case "compute":
                    await self.compute(rows)
                    if self.claims.seq < self.appended_seq:
                        return
                case "claim":
                    await self.claim(exposed, self.claims.free(rows)[0])
                    return
                case "offer":
                    await self.offer(exposed)
                    return
                case _:
                    return

    def trains(self) -> bool:
        found = find_cell(self.claims.cluster, self.cell)
        return found is not None and found.state == "TRAINING"

    def epoch(self) -> int:
        found = find_cell(self.claims.cluster, self.cell)
        return found.epoch if found is not None else 0

    def rows(self, exposed: WeightsExposed) -> "Rows":
        """Of the micro-steps of the update under way. Raises FoldError for another batch than the core's."""
        if self.batch is None or (self.batch.step, self.batch.digest) != (exposed.step, self.claims.batch_digest):
            cohort = consumed_cohort(self.experience.cohorts, exposed.step)
            if cohort is None:
                raise FoldError(f"satellite {self.cell}: step {exposed.step} has no cohort; fold from sequence 1")
            self.batch = assemble(self.experience, cohort, self.config, exposed.step)
            if self.batch.digest != self.claims.batch_digest:
                raise FoldError(
                    f"satellite {self.cell}: the batch of step {exposed.step} has digest {self.batch.digest[:12]}, the "
                    f"core's {self.claims.batch_digest[:12]}; let all cells run the same version of gyre"
                )
        minibatch = self.batch.minibatches[exposed.minibatch]
        return {microstep.index: microstep.rows for microstep in minibatch.microsteps}

    def may_join(self, exposed: WeightsExposed) -> bool:
        """Not with weights that could not be read, nor where those before them are needed that it never had."""
        has_begun = self.sum.base != "" and self.sum.step == exposed.step
        is_late = exposed.minibatch > 0 and needs_proximal(self.config.trainer) and not has_begun
        return exposed is not self.useless and not is_late

    async def pull(self, exposed: WeightsExposed) -> None:
        """All of them into a shadow buffer; they are used once every digest is right."""
        manifest = msgspec.json.decode(exposed.manifest, type=WeightManifest)
        is_first = exposed.minibatch == 0

        def take() -> None:
            shapes = {name: tuple(weight.shape) for name, weight in self.trainer.own_weights().items()}
            check_manifest(manifest, shapes)
            self.trainer.take_weights(self.sink.pull(manifest), is_first=is_first)

        try:
            await self.in_thread(take)
        except TransferError as error:
            print(f"satellite {self.cell}: {error}", file=sys.stderr, flush=True)
            self.useless = exposed
            return
        self.sum, self.losses = Sum(step=exposed.step, minibatch=exposed.minibatch, base=exposed.digest), ()

    async def discard(self) -> None:
        """What was accepted, or returned: the next gradient begins at zero."""
        await self.in_thread(self.trainer.discard)
        self.sum = msgspec.structs.replace(self.sum, microsteps=(), is_offered=False)
        self.losses = ()

    async def claim(self, exposed: WeightsExposed, microstep: int) -> None:
        claim = MicrostepClaimed(step=exposed.step, microstep=microstep, cell=self.cell, epoch=self.epoch())
        await self.append(claim, cause=self.claims.seq)

    async def compute(self, rows: "Rows") -> None:
        """The next one that it holds. One whose gradient is not finite is left to the core, whose guards judge it."""
        held = self.claims.held_by(self.cell)
        microstep = held[len(self.sum.microsteps)]
        try:
            result = await self.in_thread(lambda: self.trainer.gradients(rows[microstep]))
        except TrainingError as error:
            exposed, self.sum, self.losses = self.claims.exposed, Sum(), ()
            self.useless = exposed
            if exposed is not None:
                returned = ClaimsReturned(
                    step=exposed.step, cell=self.cell, epoch=self.epoch(), microsteps=held, reason=str(error)
                )
                await self.append(returned, cause=self.claims.seq)
            return
        self.sum = msgspec.structs.replace(self.sum, microsteps=(*self.sum.microsteps, microstep), is_offered=False)
        self.losses = (*self.losses, result.loss)

    async def offer(self, exposed: WeightsExposed) -> None:
        digest = await self.in_thread(self.digest)
        offered = GradientOffered(
            step=exposed.step,
            minibatch=exposed.minibatch,
            cell=self.cell,
            epoch=self.epoch(),
            base=self.sum.base,
            microsteps=self.sum.microsteps,
            losses=self.losses,
            sums=GradientSums(**msgspec.structs.asdict(self.trainer.result)),
            session=self.source.session,
            address=self.source.address,
            num_bytes=self.source.num_bytes,
            digest=digest,
        )
        self.sum = msgspec.structs.replace(self.sum, is_offered=True)
        await self.append(offered, cause=self.claims.seq)

    def digest(self) -> str:
        """Of the sum, which ranks that hold parts of the model bring together first."""
        _ = self.trainer.gradient
        return self.source.digest()


Rows = dict[int, tuple[Row, ...]]
