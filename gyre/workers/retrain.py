"""Shell. `gyre replay --train`: takes the recorded steps again, from the log and the policy that the run began with.

Invariants: no checkpoint is read and nothing is written; every batch has its recorded digest before it is trained,
and every step must reach its recorded weights. The first that does not is named by its sequence.

Direction: log -> batches, in one pass -> steps of a trainer of its own -> digests, compared with the log's.

A rejected step has left no mark on the weights, so it is passed over. What decides the arithmetic is recorded: the
config with its seed and number of threads, and the versions; the kind of processor is not.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from gyre.config import Config, decode_config
from gyre.errors import PolicyError, ReplayError
from gyre.events.codec import Recorded
from gyre.events.log import Log
from gyre.events.types import (
    BatchAssembled,
    CellJoined,
    ConfigChanged,
    PolicyPublished,
    RunResumed,
    RunStarted,
    StepCompleted,
    Versioned,
)
from gyre.projections.batches import Batch, assemble
from gyre.projections.cohorts import consumed_cohort
from gyre.projections.experience import Experience
from gyre.workers import claims
from gyre.workers.cell import model_digest
from gyre.workers.claims import Claims
from gyre.workers.gathering import apart_from_one_cell, train_again
from gyre.workers.ranks import Ranks
from gyre.workers.step_metrics import StepMetrics
from gyre.workers.trainer import Trainer
from gyre.workers.transfer import tensors_digest

ARITHMETIC = ("gyre", "torch", "megatron-core")
"""Of the recorded versions, those that a step's last bits depend on."""
T = TypeVar("T")


async def retrain(
    log: Log,
    policy_dir: Path | None,
    *,
    versions: Mapping[str, str],
    show: Callable[[str], None],
    ranks: Ranks | None = None,
) -> int:
    """Number of steps that came out as recorded; `show` gets a line for each. `policy_dir` None: where the run had it.
    `ranks`: as many as a cell of the run had, if several.

    Raises PolicyError for another policy than the run began with, ReplayError at the first difference.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch") as thread:
        again = _Again(policy_dir, versions, show, thread, ranks)
        last = await log.last_seq()
        if last:
            async for recorded in log.read(1, until=last):
                await again.evolve(recorded)
    return again.num_steps


def version_differences(recorded: tuple[Versioned, ...], here: Mapping[str, str]) -> tuple[str, ...]:
    """In words: what was recorded and is another here, of what the arithmetic depends on."""
    return tuple(
        f"{v.name} was {v.version}, is {here.get(v.name) or 'missing'}"
        for v in recorded
        if v.name in ARITHMETIC and here.get(v.name) != v.version
    )


class _Again:
    """A fold of the log that trains as it goes; of torch only what runs in `thread`."""

    def __init__(
        self,
        policy_dir: Path | None,
        versions: Mapping[str, str],
        show: Callable[[str], None],
        thread: ThreadPoolExecutor,
        ranks: Ranks | None,
    ) -> None:
        self.policy_dir, self.versions, self.show, self.thread = policy_dir, versions, show, thread
        self.ranks = ranks
        self.config = Config()
        self.experience, self.claims = Experience(), Claims()
        self.trainer: Trainer | None = None
        self.assembled: tuple[int, BatchAssembled] | None = None
        self.doubts: tuple[str, ...] = ()
        """Why digests may differ although nothing is wrong."""
        self.num_steps = 0

    async def evolve(self, recorded: Recorded) -> None:
        match recorded.event:
            case RunStarted() as event:
                self.config = decode_config(event.config)
                self.doubt(version_differences(event.versions, self.versions))
                if event.num_threads != self.config.trainer.num_threads:
                    wanted = self.config.trainer.num_threads
                    self.doubt((f"{event.num_threads} threads are recorded, the config says {wanted}",))
            case RunResumed(versions=versions):
                self.doubt(version_differences(versions, self.versions))
            case ConfigChanged(config=config):
                self.config = decode_config(config)
            case CellJoined() as event if event.model_digest != (found := model_digest(self.policy)):
                raise PolicyError(_changed(f"{self.policy}/config.json", found, event.model_digest))
            case PolicyPublished(version=0, digest=digest):
                await self.start(digest)
            case BatchAssembled() as event:
                self.assembled = (recorded.seq, event)
            case StepCompleted() as event if event.step > self.claims.cluster.step:  # else it is there twice
                await self.step(recorded.seq, event)
            case _:
                pass
        self.experience.evolve(recorded)
        self.claims = claims.evolve(self.claims, recorded)

    def doubt(self, reasons: tuple[str, ...]) -> None:
        for reason in reasons:
            if reason not in self.doubts:
                self.doubts += (reason,)
                self.show(f"warning: {reason}: digests may differ")

    @property
    def policy(self) -> Path:
        return self.policy_dir or Path(self.config.policy.path)

    async def start(self, recorded: str) -> None:
        """A trainer as the run's was before its first step."""
        config, policy = self.config, self.policy

        def build() -> tuple[Trainer, str]:
            temperature = config.sampling.temperature
            trainer = Trainer(policy, config.trainer, seed=config.seed, temperature=temperature, ranks=self.ranks)
            return trainer, tensors_digest(trainer.published.named)

        self.trainer, found = await self.in_thread(build)
        if found != recorded:
            raise PolicyError(_changed(str(policy), found, recorded))

    async def step(self, seq: int, recorded: StepCompleted) -> None:
        """At the prefix that ends before the step's completion, when its cohort is still in the fold."""
        trainer, began = self.trainer, time.monotonic()
        if trainer is None:
            raise ReplayError(f"sequence {seq}: step {recorded.step} comes before any policy was published")
        batch = self.batch(seq, recorded.step)
        parts = self.claims.parts
        cells = {part.cell for part in parts}

        def train() -> tuple[StepMetrics, str, float]:
            trainer.configure(self.config.trainer)
            apart = apart_from_one_cell(trainer, batch.minibatches[0], parts) if len(cells) > 1 else 0.0
            metrics = train_again(trainer, batch.minibatches, parts)
            return metrics, tensors_digest(trainer.published.named), apart

        metrics, digest, apart = await self.in_thread(train)
        if digest != recorded.weights_digest:
            doubts = f" ({'; '.join(self.doubts)})" if self.doubts else ""
            raise ReplayError(
                f"differs first at sequence {seq}: step {recorded.step} gives weights {digest[:12]} and loss "
                f"{metrics.loss:.6g}, recorded are {recorded.weights_digest[:12]} and {recorded.loss:.6g}{doubts}; "
                "another kind of processor can be the reason as well"
            )
        self.num_steps += 1
        spent = time.monotonic() - began
        several = f", gradient of {len(cells)} cells as of one within {apart:.0e}" if len(cells) > 1 else ""
        line = f"step {recorded.step}: weights {digest[:12]} as recorded, loss {metrics.loss:+.4f}, {spent:.2f} s"
        self.show(line + several)

    def batch(self, seq: int, step: int) -> Batch:
        cohort = consumed_cohort(self.experience.cohorts, step)
        if cohort is None or self.assembled is None or self.assembled[1].step != step:
            raise ReplayError(f"differs first at sequence {seq}: step {step} has no cohort or no batch before it")
        batch = assemble(self.experience, cohort, self.config, step)
        at, recorded = self.assembled
        if batch.digest != recorded.digest:
            raise ReplayError(
                f"differs first at sequence {at}: the batch of step {step} has digest {batch.digest[:12]}, recorded is "
                f"{recorded.digest[:12]}; gyre replay --verify names what was altered"
            )
        return batch

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)


def _changed(what: str, found: str, recorded: str) -> str:
    return (
        f"{what}: has digest {found[:12]}, the run began with {recorded[:12]}; restore it, or name a copy with --policy"
    )
