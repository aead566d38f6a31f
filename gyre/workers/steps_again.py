"""Shell. Brings a trainer to the last completed step: from its checkpoint or, if that is torn, by taking steps again.

Invariants: the weights that come out have the digest that the log has of the step; nothing is recorded. A checkpoint
is a shortcut and no more: the policy that the run began with and the log are enough to make it again.

Direction: newest whole checkpoint, or the policy -> the recorded steps after it, in the log's order -> weights.
"""

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from gyre.config import Config, decode_config
from gyre.errors import FoldError, MissingError, PolicyError
from gyre.events.log import Log
from gyre.events.types import ConfigChanged, Event, PolicyPublished, RunStarted, StepCompleted
from gyre.projections.batches import Minibatch
from gyre.projections.cluster import Cell
from gyre.projections.experience import Experience
from gyre.workers import claims as claims_fold
from gyre.workers import steps as steps_fold
from gyre.workers.claims import Claims
from gyre.workers.gathering import InThread, add_accepted
from gyre.workers.manifest import WeightManifest
from gyre.workers.steps import Steps, cohort_of
from gyre.workers.trainer import Trainer
from gyre.workers.trainer_step import StepTaking, checkpoint_path
from gyre.workers.transfer import WeightSource


async def restore(
    log: Log,
    trainer: Trainer,
    source: WeightSource,
    config: Config,
    *,
    step: int,
    checkpoints: Path,
    in_thread: InThread,
    clock: Callable[[], float] = time.monotonic,
) -> WeightManifest:
    """`trainer` is fresh from the run's policy; afterwards it stands after `step`, the last one that the log has.

    Raises PolicyError when the weights are not those that the log tells of.
    """
    reached = await in_thread(lambda: _load_newest(trainer, checkpoints, step))
    manifest = await in_thread(lambda: source.manifest(reached))
    if reached < step:
        again = _Again(trainer, source, config, checkpoints, in_thread, clock)
        manifest = await again.take(log, manifest, step)
    return manifest


def _load_newest(trainer: Trainer, checkpoints: Path, step: int) -> int:
    """The step of the newest whole checkpoint that is not after `step`; 0: the policy that the run began with."""
    kept = sorted((int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-*")), reverse=True)
    if step and step not in kept:
        _say(f"{checkpoint_path(checkpoints, step)}: is not there")
    for number in (number for number in kept if number <= step):
        try:
            trainer.load(checkpoint_path(checkpoints, number))
        except (PolicyError, MissingError) as error:
            _say(str(error))
        else:
            return number
    return 0


class _Again:
    """Folds the log as the trainer did, and takes each step at the place where it was completed."""

    def __init__(
        self,
        trainer: Trainer,
        source: WeightSource,
        config: Config,
        checkpoints: Path,
        in_thread: InThread,
        clock: Callable[[], float],
    ) -> None:
        self.trainer, self.source, self.config, self.checkpoints = trainer, source, config, checkpoints
        self.in_thread, self.clock = in_thread, clock
        self.experience, self.steps, self.claims = Experience(), Steps(), Claims()

    async def take(self, log: Log, manifest: WeightManifest, through: int) -> WeightManifest:
        now, begun = self.config, manifest.version
        _say(f"steps {begun + 1} to {through} are taken again from the log, after step {begun}")
        async for recorded in log.read(1, until=await log.last_seq()):
            match recorded.event:
                case RunStarted() | ConfigChanged() as event:
                    self.config = decode_config(event.config)
                case PolicyPublished(version=0, digest=digest) if begun == 0 and digest != manifest.digest:
                    raise PolicyError(
                        f"policy.path: {now.policy.path}: has digest {manifest.digest[:12]}, the run began with "
                        f"{digest[:12]}; restore it, or a checkpoint of the run"
                    )
                case StepCompleted(step=step, weights_digest=digest) if step == begun and digest != manifest.digest:
                    raise PolicyError(_differs(self.checkpoints, step, manifest.digest, digest))
                case StepCompleted() as event if event.step > max(begun, self.steps.step):  # else it is there twice
                    manifest = await self._step(event)
                case _:
                    pass
            self.experience.evolve(recorded)
            self.steps = steps_fold.evolve(self.steps, recorded)
            self.claims = claims_fold.evolve(self.claims, recorded)
        self.trainer.configure(now.trainer)
        return manifest

    async def _step(self, recorded: StepCompleted) -> WeightManifest:
        cohort = cohort_of(self.experience.cohorts, recorded.step, self.config.pipeline)
        if cohort is None:
            raise FoldError(f"trainer: step {recorded.step}: its cohort is not in the log before its end")
        self.trainer.configure(self.config.trainer)

        async def compare(*events: Event, cause: int) -> int:
            """In place of an append: whatever the step records is on the log already."""
            (event,) = events
            if isinstance(event, StepCompleted) and event.weights_digest != recorded.weights_digest:
                folder = checkpoint_path(self.checkpoints, recorded.step)
                shutil.rmtree(folder)
                raise PolicyError(
                    f"{folder}: torn, and step {recorded.step} taken again gives digest {event.weights_digest[:12]}, "
                    f"the log says {recorded.weights_digest[:12]}; restore the checkpoint, or go on with the hardware, "
                    "the versions and the number of threads that made it"
                )
            return cause

        async def gather(step: int, minibatch: Minibatch, cause: int) -> int:
            """As it was accepted: nothing is claimed."""
            rows = {m.index: m.rows for m in minibatch.microsteps}
            await self.in_thread(lambda: add_accepted(self.trainer, self.claims.parts, rows))
            return cause

        taking = StepTaking(
            append=compare,
            in_thread=self.in_thread,
            config=self.config,
            cell=Cell(cell="", index=0, capacity=1, engine_url=""),
            trainer=self.trainer,
            source=self.source,
            checkpoints=self.checkpoints,
            clock=self.clock,
            steps=self.steps,
            gather=gather,
        )
        manifest = await taking.take(cohort, self.experience)
        self.trainer.publish()
        return manifest


def _differs(checkpoints: Path, step: int, found: str, recorded: str) -> str:
    return (
        f"{checkpoint_path(checkpoints, step)}: has digest {found[:12]}, the log says {recorded[:12]}; "
        "restore the run's own checkpoints"
    )


def _say(text: str) -> None:
    print(f"trainer: {text}", file=sys.stderr, flush=True)
