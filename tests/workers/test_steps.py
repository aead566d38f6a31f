"""What a trainer does next at a prefix of the log, and what it need not do again."""

import msgspec
from cell_logs import (
    arrival,
    completed,
    consumed,
    departure,
    dispatched,
    fold,
    joined,
    published,
    records,
    small_config,
    whole_group,
)

from gyre.events.types import (
    BatchAssembled,
    CellLeased,
    CellLost,
    CellSwitched,
    Event,
    MicrostepAccepted,
    MicrostepClaimed,
    PolicyRolledBack,
    RunResumed,
    StepRejected,
)
from gyre.projections import cluster, cohorts
from gyre.projections.cluster import Cluster
from gyre.projections.cohorts import CohortState
from gyre.workers import steps
from gyre.workers.steps import Steps, next_deed, rejection_deed

BURST = (published(0), joined(), *arrival("c0", 1, 0), *whole_group(0, 2, 0), *departure("c0", 2, 0))


def deed(*events: Event, cell: str = "c0", **pipeline: int) -> str | None:
    log = records(events)
    state = fold(cluster.evolve, Cluster(), log), fold(cohorts.evolve, CohortState(), log)
    return next_deed(*state, cell, small_config(**pipeline).pipeline)


def after(*events: Event) -> Steps:
    state: Steps = fold(steps.evolve, Steps(), records(events))
    return state


def test_version_0_is_published_first() -> None:
    assert deed() == "publish"
    assert deed(published(0)) is None


def test_a_step_is_taken_in_training_and_published_after() -> None:
    assert deed(*BURST[:-1]) is None
    assert deed(*BURST) == "step"
    assert deed(*BURST, cell="c1") is None
    assert deed(*BURST, consumed(1, (0,))) == "step"
    assert deed(*BURST, consumed(1, (0,)), completed(1)) == "publish"
    assert deed(*BURST, consumed(1, (0,)), completed(1), published(1)) is None


def test_a_burst_of_two_steps_publishes_once() -> None:
    two = {"steps_per_burst": 2, "num_steps": 4}
    log = (*BURST[:-5], *whole_group(1, 2, 0), *BURST[-5:])
    assert deed(*log, **two) == "step"
    assert deed(*log, consumed(1, (0,)), completed(1), **two) == "step"
    taken = (consumed(1, (0,)), completed(1), consumed(2, (1,)), completed(2))
    assert deed(*log, *taken, **two) == "publish"
    assert deed(*log[:-5], *whole_group(2, 2, 0), *log[-5:], *taken, **two) == "publish", (
        "a third would be a burst more"
    )


def test_a_burst_that_finds_no_cohort_waits_for_others_or_ends() -> None:
    two = {"steps_per_burst": 2, "num_steps": 4}
    assert deed(*BURST, consumed(1, (0,)), completed(1), **two) == "publish"
    assert deed(*BURST, dispatched(1, 2, 0), consumed(1, (0,)), completed(1), **two) is None


def test_the_last_step_ends_the_burst() -> None:
    log = (*BURST[:-5], *whole_group(1, 2, 0), *BURST[-5:], consumed(1, (0,)), completed(1))
    assert deed(*log, steps_per_burst=2, num_steps=1) == "publish"


def test_a_step_of_a_cell_that_was_lost_is_published_all_the_same() -> None:
    log = (*BURST, consumed(1, (0,)), completed(1), CellLost(cell="c0", reason="x"))
    assert deed(*log, steps_per_burst=2, num_steps=4) == "publish"


def test_a_renewed_lease_is_a_new_burst() -> None:
    log = (*BURST, consumed(1, (0,)), completed(1), *whole_group(1, 2, 1), published(1))
    assert deed(*log) is None
    renewed = (
        CellLeased(cell="c0", role="train", epoch=3),
        CellSwitched(cell="c0", role="train", epoch=3, version=1, phases=()),
    )
    assert deed(*log, *renewed) == "step"


def claimed(microstep: int, epoch: int) -> MicrostepClaimed:
    return MicrostepClaimed(step=1, microstep=microstep, cell="c0", epoch=epoch)


def accepted(microstep: int) -> MicrostepAccepted:
    return MicrostepAccepted(step=1, microstep=microstep, cell="c0", epoch=2, loss_sum=0.0)


BATCH = BatchAssembled(
    step=1, digest="b", through_seq=9, seed=1, num_executions=1, num_trajectories=1, num_tokens=1, num_targets=1,
    num_microsteps=2,
)  # fmt: skip
COHORT = msgspec.structs.replace(consumed(1, (0,)), digest="c", through_seq=7)


def test_what_is_recorded_of_a_step_is_remembered_until_it_is_completed() -> None:
    begun = after(COHORT, BATCH, claimed(0, 2), accepted(0), claimed(1, 2), claimed(1, 4))
    assert (begun.cohort_seq, begun.cohort_digest, begun.through_seq) == (1, "c", 7)
    assert (begun.batch_seq, begun.batch_digest, begun.last_seq) == (2, "b", 4)
    assert (after(COHORT).last_seq, after(COHORT, BATCH).last_seq) == (1, 2)
    assert after(COHORT, BATCH, completed(1)) == Steps(step=1, step_seq=3, weights_digest="d1")


REJECTED = StepRejected(step=1, guard="kl", value=2.0, bound=1.0, detail="kl", action="pause")
BACK = PolicyRolledBack(from_step=1, to_version=0, reason="kl")


def test_what_does_not_fit_changes_nothing() -> None:
    """It is late, there twice, or of nothing that is under way: of what is taken again the first word counts."""
    second = [msgspec.structs.replace(event, step=2) for event in (COHORT, BATCH)]
    for log in ((completed(1),), (completed(1), *second)):
        before = after(*log)
        for late in (COHORT, BATCH, accepted(0), completed(1), REJECTED, BACK, RunResumed(versions=())):
            assert after(*log, late) == before, late
    once = after(completed(1), *second)
    assert (once.cohort_seq, once.batch_seq) == (2, 3)
    assert after(completed(1), *second, *(msgspec.structs.replace(e, digest="other") for e in second)) == once
    rejected = msgspec.structs.replace(REJECTED, step=2)
    assert after(completed(1), rejected) == after(completed(1)), "of a cohort that was never consumed"
    back = after(COHORT, REJECTED, BACK)
    assert back.rolled_back_seq == 3 and after(COHORT, REJECTED, BACK, BACK) == back


def test_a_rejection_leaves_the_completed_step_as_it_was() -> None:
    second = msgspec.structs.replace(COHORT, step=2)
    found = after(completed(1), second, msgspec.structs.replace(REJECTED, step=2))
    assert (found.step, found.step_seq, found.weights_digest) == (1, 1, "d1")
    assert (found.cohort_seq, found.last_seq, found.rejected_seq) == (0, 0, 3)


def test_a_rejected_step_is_rolled_back_and_then_paused() -> None:
    begun = (consumed(1, (0,)), claimed(0, 2), accepted(0))
    assert rejection_deed(after(*begun)) is None
    rejected = after(*begun, REJECTED)
    assert rejection_deed(rejected) == "roll_back"
    assert (rejected.cohort_seq, rejected.last_seq, rejected.num_rejected) == (0, 0, 1)
    assert rejection_deed(after(*begun, REJECTED, BACK)) == "pause"


def test_after_a_resume_the_rejection_calls_for_no_second_pause() -> None:
    begun, resumed = (consumed(1, (0,)), REJECTED), RunResumed(versions=())
    assert rejection_deed(after(*begun, BACK, resumed)) is None
    assert rejection_deed(after(*begun, resumed)) == "roll_back"
    assert rejection_deed(after(*begun, resumed, BACK)) is None
    assert after(*begun, BACK, resumed).num_rejected == 0


def test_rejections_in_a_row_are_counted_until_a_step_is_completed() -> None:
    one = (consumed(1, (0,)), REJECTED, BACK)
    assert after(*one, *one).num_rejected == 2
    assert after(*one, *one, consumed(1, (0,)), completed(1)).num_rejected == 0


def test_a_rollback_that_leaves_nothing_to_publish_ends_the_burst() -> None:
    assert deed(*BURST, consumed(1, (0,)), REJECTED) is None
    log = (*BURST[:-5], *whole_group(1, 2, 0), *BURST[-5:], consumed(1, (0,)), REJECTED, BACK)
    assert deed(*log) is None, "the next cohort is ready, but the burst is over"
    renewed = (
        CellLeased(cell="c0", role="train", epoch=3),
        CellSwitched(cell="c0", role="train", epoch=3, version=0, phases=()),
    )
    assert deed(*log, *renewed) == "step"


def test_a_rollback_within_a_burst_leaves_the_completed_steps_to_be_published() -> None:
    two = {"steps_per_burst": 2, "num_steps": 4}
    log = (*BURST[:-5], *whole_group(1, 2, 0), *BURST[-5:], consumed(1, (0,)), completed(1), consumed(2, (1,)))
    second = msgspec.structs.replace(REJECTED, step=2)
    assert deed(*log, second, PolicyRolledBack(from_step=2, to_version=1, reason="kl"), **two) == "publish"
