"""Pure. What the core's trainer does next, and how far the step under way is recorded.

Invariants: a step is taken while the cell has the training role and its burst is not published; a step that a
crash left half done is taken again on the cohort that it consumed, and what it recorded is not recorded twice;
a completed step is published at the end of its burst, whatever became of the cell by then; a step that a guard
rejected is rolled back before anything else is done, and its number is taken again with another cohort.

Direction: events -> Steps -> Deed -> (the shell does it and records it) -> events.
"""

from typing import Literal

import msgspec

from gyre.config import PipelineConfig
from gyre.events.codec import Recorded
from gyre.events.types import (
    BatchAssembled,
    CohortConsumed,
    MicrostepAccepted,
    PolicyRolledBack,
    RunResumed,
    StepCompleted,
    StepRejected,
    Value,
)
from gyre.projections.cluster import Cluster, find_cell
from gyre.projections.cohorts import Cohort, CohortState, consumed_cohort, next_cohort

Deed = Literal["step", "publish", "roll_back", "pause"]


class Steps(Value, frozen=True, kw_only=True):
    """The last completed step, and what the log has of the next one (sequence 0: nothing)."""

    step: int = 0
    step_seq: int = 0
    weights_digest: str = ""
    cohort_digest: str = ""
    cohort_seq: int = 0
    through_seq: int = 0
    batch_digest: str = ""
    batch_seq: int = 0
    last_seq: int = 0
    """The last thing recorded of the step under way: the cause of what follows."""
    rejection: StepRejected | None = None
    """The last one since the last completed step."""
    rejected_seq: int = 0
    rolled_back_seq: int = 0
    """What followed from the rejection; 0: still to be done."""
    num_rejected: int = 0
    """In a row, since the last completed step and since the run was resumed."""


def evolve(steps: Steps, recorded: Recorded) -> Steps:
    """Total. Of what is recorded twice, the first counts."""
    seq, replace = recorded.seq, msgspec.structs.replace
    match recorded.event:
        case StepCompleted(step=step, weights_digest=digest) if step > steps.step:
            return Steps(step=step, step_seq=seq, weights_digest=digest)
        case CohortConsumed(step=step, digest=digest) as event if step == steps.step + 1 and not steps.cohort_seq:
            through_seq = event.through_seq
            return replace(steps, cohort_digest=digest, cohort_seq=seq, through_seq=through_seq, last_seq=seq)
        case BatchAssembled(step=step, digest=digest) if step == steps.step + 1 and not steps.batch_seq:
            return replace(steps, batch_digest=digest, batch_seq=seq, last_seq=seq)
        case MicrostepAccepted(step=step) if step == steps.step + 1:
            return replace(steps, last_seq=seq)
        case StepRejected(step=step) as event if step == steps.step + 1 and steps.cohort_seq:
            kept = Steps(step=steps.step, step_seq=steps.step_seq, weights_digest=steps.weights_digest)
            return replace(kept, rejection=event, rejected_seq=seq, num_rejected=steps.num_rejected + 1)
        case PolicyRolledBack() if steps.rejection is not None and not steps.rolled_back_seq:
            return replace(steps, rolled_back_seq=seq)
        case RunResumed() if steps.rejection is not None:  # whoever resumes has seen the pause
            return replace(steps, rejection=replace(steps.rejection, action="rollback"), num_rejected=0)
    return steps


def rejection_deed(steps: Steps) -> Deed | None:
    """What a rejection still calls for; None: nothing, go on."""
    if steps.rejection is None:
        return None
    if not steps.rolled_back_seq:
        return "roll_back"
    return "pause" if steps.rejection.action == "pause" else None


def is_bursting(cluster: Cluster, cell: str) -> bool:
    """Whether the cell trains, and what it trains since it does is not published."""
    found = find_cell(cluster, cell)
    return found is not None and found.state == "TRAINING" and cluster.published_seq < found.switched_seq


def cohort_of(cohorts: CohortState, step: int, pipeline: PipelineConfig) -> Cohort | None:
    """The cohort that the step has consumed already, or the one that it may consume."""
    return consumed_cohort(cohorts, step) if step in cohorts.consumed else next_cohort(cohorts, pipeline)


def next_deed(cluster: Cluster, cohorts: CohortState, cell: str, pipeline: PipelineConfig) -> Deed | None:
    """What is to be done at this prefix of the log; None: wait."""
    num_unpublished = cluster.step - cluster.published_version  # 1 before version 0 is published
    is_open = is_bursting(cluster, cell) and cluster.step < pipeline.num_steps
    if is_open and num_unpublished < pipeline.steps_per_burst:
        if cohort_of(cohorts, cluster.step + 1, pipeline) is not None:
            return "step"
        if cohorts.waterlevel:
            return None  # other cells are still at it
    return "publish" if num_unpublished > 0 else None
