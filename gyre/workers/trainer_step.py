"""Shell. One step of the core's trainer: cohort -> batch -> gradients -> commit -> checkpoint, each recorded.

Invariants: an event is written after what it tells of, and after the ack of the one before; the last of a step
follows its durable checkpoint. What the log has of the step already is done again and compared, and not
recorded again: `gathering.py` sees to that for gradients.
"""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from gyre.config import Config
from gyre.errors import FoldError
from gyre.events.types import (
    BatchAssembled,
    CohortConsumed,
    Event,
    StepCompleted,
)
from gyre.projections.batches import Batch, assemble
from gyre.projections.cluster import Cell
from gyre.projections.cohorts import Cohort
from gyre.projections.experience import Experience
from gyre.workers import guards
from gyre.workers.gathering import Append, Gather, InThread
from gyre.workers.laps import Laps
from gyre.workers.manifest import WeightManifest
from gyre.workers.step_metrics import StepMetrics, merge_updates
from gyre.workers.steps import Steps
from gyre.workers.trainer import Trainer
from gyre.workers.transfer import WeightSource


def checkpoint_path(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step}"


def drop_unfinished_checkpoints(checkpoints: Path) -> None:
    """What a trainer that was killed was writing; it never got its name."""
    for folder in checkpoints.glob(".step-*"):
        shutil.rmtree(folder)


class StepTaking:
    def __init__(
        self,
        *,
        append: Append,
        in_thread: InThread,
        config: Config,
        cell: Cell,
        trainer: Trainer,
        source: WeightSource,
        checkpoints: Path,
        clock: Callable[[], float],
        steps: Steps,
        gather: Gather,
    ) -> None:
        self.append, self.in_thread, self.config, self.cell = append, in_thread, config, cell
        self.trainer, self.source, self.checkpoints, self.clock = trainer, source, checkpoints, clock
        self.steps, self.gather = steps, gather
        self.last_seq = steps.last_seq
        """The last thing recorded of this step."""
        self.through_seq = 0
        """The prefix of the log that its cohort and batch follow from."""

    async def take(self, cohort: Cohort, experience: Experience) -> WeightManifest:
        """Returns where the new weights lie. Raises FoldError; TrainingError for a step that a guard refuses.

        A refused step may have made some of its updates: go back to the checkpoint of the last one.
        """
        step, laps = cohort.step, Laps(self.clock)
        await self.consume(cohort, experience.seq)
        batch = await self.in_thread(lambda: assemble(experience, cohort, self.config, step))
        await self.record_batch(batch)
        laps.end("assemble")
        metrics = await self.train(batch, laps)
        manifest = await self.in_thread(lambda: self.source.manifest(step))
        laps.end("digest")
        await self.in_thread(lambda: self.save_checkpoint(step))
        laps.end("checkpoint")
        completed = StepCompleted(
            step=step,
            weights_digest=manifest.digest,
            loss=metrics.loss,
            grad_norm=metrics.grad_norm,
            entropy=metrics.entropy,
            clip_fraction=metrics.clip_fraction,
            logprob_gap_mean=metrics.logprob_gap_mean,
            logprob_gap_max=metrics.logprob_gap_max,
            kl=metrics.kl,
            staleness_mean=batch.staleness_mean,
            staleness_max=batch.staleness_max,
            learning_rate=metrics.learning_rate,
            score_mean=batch.score_mean,
            num_tokens=metrics.num_tokens,
            num_targets=metrics.num_targets,
            phases=laps.phases,
        )
        await self.append(completed, cause=self.last_seq)
        self.drop_old_checkpoints(step)
        return manifest

    async def record(self, event: Event, *, cause: int = 0) -> None:
        """Something of the step under way; by default it follows from what came before."""
        self.last_seq = await self.append(event, cause=cause or self.last_seq)

    async def consume(self, cohort: Cohort, seq: int) -> None:
        """Raises FoldError when the cohort that was consumed before a crash is not found again."""
        begun = self.steps
        self.through_seq = begun.through_seq or seq
        if begun.cohort_seq:
            self.check_same(f"cohort of step {cohort.step}", begun.cohort_digest, cohort.digest)
            return
        event = CohortConsumed(
            step=cohort.step,
            groups=cohort.groups,
            executions=cohort.executions,
            digest=cohort.digest,
            through_seq=self.through_seq,
        )
        await self.record(event, cause=max(self.cell.switched_seq, begun.step_seq))

    async def record_batch(self, batch: Batch) -> None:
        """Raises FoldError when the batch that was assembled before a crash comes out otherwise."""
        if self.steps.batch_seq:
            self.check_same(f"batch of step {batch.step}", self.steps.batch_digest, batch.digest)
            return
        event = BatchAssembled(
            step=batch.step,
            digest=batch.digest,
            through_seq=self.through_seq,
            seed=batch.seed,
            num_executions=batch.num_executions,
            num_trajectories=len(batch.rows),
            num_tokens=batch.num_tokens,
            num_targets=batch.num_targets,
            num_microsteps=len(batch.microsteps),
        )
        await self.record(event)

    def check_same(self, what: str, recorded: str, found: str) -> None:
        if recorded != found:
            raise FoldError(
                f"trainer: {what} has digest {found[:12]}, sequence {self.steps.last_seq} and before say "
                f"{recorded[:12]}; go on with the version of gyre that began the step"
            )

    async def train(self, batch: Batch, laps: Laps) -> StepMetrics:
        """Gradients of all micro-steps, and one update for each mini-batch, each looked at by the guards before."""
        trainer = self.trainer
        updates: list[StepMetrics] = []
        for minibatch in batch.minibatches:
            trainer.discard()
            self.last_seq = max(self.last_seq, await self.gather(batch.step, minibatch, self.last_seq))
            laps.end("gradients")
            num_executions, is_last = minibatch.num_executions, minibatch is batch.minibatches[-1]
            check = partial(guards.check, guards=self.config.guards, moved=bool(updates))
            updates.append(await self.in_thread(partial(trainer.commit, num_executions, last=is_last, check=check)))
            laps.end("commit")
        await self.in_thread(trainer.published.check)
        return merge_updates(updates)

    def save_checkpoint(self, step: int) -> None:
        """Returns when it is durable."""
        folder = checkpoint_path(self.checkpoints, step)
        self.trainer.save(folder)
        for path in (*sorted(folder.rglob("*")), folder, folder.parent):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def drop_old_checkpoints(self, step: int) -> None:
        num_kept = self.config.trainer.keep_checkpoints
        kept = {checkpoint_path(self.checkpoints, step - i) for i in range(num_kept)}
        for folder in self.checkpoints.glob("step-*") if num_kept else ():
            if folder not in kept:
                shutil.rmtree(folder)
