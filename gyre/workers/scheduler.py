"""Pure. When a cell changes role: `decide` over a prefix of the log.

Invariants: equal prefixes give equal decisions, byte for byte; at most one decision is open; a cell leaves
rollout only while w <= C_R - C_e; the cells in training are a prefix of the fixed order.

Direction: events -> SchedulerState -> Inputs (all that a policy may look at) -> Decided.

The waterlevel policy is that of arXiv 2609.33848: w = executions dispatched - finished never rises within a
burst, so once the capacity that remains covers it, it covers it until the burst ends. Executions that a publish
entitles the dispatcher to, and that it has not dispatched yet, count as unfinished here: otherwise a decision
could slip in between the publish and the dispatch that belongs to it.
"""

import hashlib
from itertools import islice
from typing import Protocol

import msgspec

from gyre.config import Config, PipelineConfig
from gyre.errors import ReplayError
from gyre.events.codec import Recorded
from gyre.events.types import Decided, Role, Value
from gyre.projections import cluster as cluster_fold
from gyre.projections import cohorts as cohorts_fold
from gyre.projections.cluster import Cell, Cluster
from gyre.projections.cohorts import CohortState


class SchedulerState(msgspec.Struct, frozen=True, kw_only=True):
    seq: int = 0
    """The prefix that was folded ends here."""
    cluster: Cluster = Cluster()
    cohorts: CohortState = msgspec.field(default_factory=CohortState)


class Inputs(Value, frozen=True, kw_only=True):
    """Everything a decision depends on; `inputs_digest` is the digest of this."""

    policy: str
    term: int
    cells: tuple[Cell, ...]
    is_decision_open: bool
    step: int
    num_steps: int
    published_version: int
    published_seq: int
    num_unfinished: int
    """w(t), in executions."""
    num_owed: int
    """Executions that the last publish entitles the dispatcher to, not dispatched yet."""
    capacity: int
    """C_R."""
    next_cohort: tuple[str, ...]
    """Groups of the step to come; empty while it is not ready."""


class Move(Value, frozen=True, kw_only=True):
    cell: Cell
    role: Role
    reason: str


class Policy(Protocol):
    def __call__(self, inputs: Inputs) -> Move | None: ...


def initial() -> SchedulerState:
    """Before the first event."""
    return SchedulerState()


def evolve(state: SchedulerState, recorded: Recorded) -> SchedulerState:
    """Takes over its argument, as the fold of the cohorts does: keep only what it returns."""
    return SchedulerState(
        seq=recorded.seq,
        cluster=cluster_fold.evolve(state.cluster, recorded),
        cohorts=cohorts_fold.evolve(state.cohorts, recorded),
    )


def decide(state: SchedulerState, config: Config) -> tuple[Decided, ...]:
    """The decision that the prefix calls for, or none; its envelope's cause is `state.seq`."""
    inputs = read_inputs(state, config)
    if inputs.term == 0 or inputs.is_decision_open:
        return ()
    move = POLICIES[inputs.policy](inputs)
    if move is None:
        return ()
    return (
        Decided(
            term=inputs.term,
            policy=inputs.policy,
            cell=move.cell.cell,
            role=move.role,
            epoch=move.cell.epoch + 1,
            waterlevel=inputs.num_unfinished,
            capacity=inputs.capacity,
            cell_capacity=move.cell.capacity,
            reason=move.reason,
            inputs_digest=hashlib.sha256(msgspec.json.encode(inputs)).hexdigest()[:32],
        ),
    )


def recompute(state_at_cause: SchedulerState, config: Config) -> Decided:
    """The decision that must stand in the log with cause `state_at_cause.seq`. Raises ReplayError for none."""
    decisions = decide(state_at_cause, config)
    if not decisions:
        raise ReplayError(f"scheduler: the log through sequence {state_at_cause.seq} calls for no decision")
    return decisions[0]


def read_inputs(state: SchedulerState, config: Config) -> Inputs:
    cluster, cohorts = state.cluster, state.cohorts
    return Inputs(
        policy=config.scheduler.policy,
        term=cluster.term,
        cells=cluster.cells,
        is_decision_open=cluster.decision is not None,
        step=cluster.step,
        num_steps=config.pipeline.num_steps,
        published_version=cluster.published_version,
        published_seq=cluster.published_seq,
        num_unfinished=cohorts.waterlevel,
        num_owed=_num_owed(cluster, cohorts, config.pipeline),
        capacity=cluster.rollout_capacity,
        next_cohort=_next_groups(cluster, cohorts, config.pipeline),
    )


def _num_owed(cluster: Cluster, cohorts: CohortState, pipeline: PipelineConfig) -> int:
    """Executions up to the boundary dispatch depth Q_b of the last publish that are not dispatched yet."""
    if not cluster.admitting:
        return 0
    used_up = (max(cluster.published_version, 0) + cluster.num_replaced) * pipeline.groups_per_step
    needed = (pipeline.num_steps + cluster.num_replaced) * pipeline.groups_per_step
    num_groups = min(used_up + pipeline.dispatch_depth, needed)
    return max(0, num_groups * pipeline.executions_per_group - cohorts.dispatched)


def _next_groups(cluster: Cluster, cohorts: CohortState, pipeline: PipelineConfig) -> tuple[str, ...]:
    """Of the step to come; a step that a crash left half done has its cohort already."""
    begun = cohorts.consumed.get(cluster.step + 1)
    if begun is not None:
        return begun
    ready = tuple(islice(cohorts.ready, pipeline.groups_per_step))
    return ready if len(ready) == pipeline.groups_per_step else ()


def waterlevel(inputs: Inputs) -> Move | None:
    """One move at a time: the training prefix grows during a burst and is given back after its publish."""
    core = next((cell for cell in inputs.cells if cell.index == 0), None)
    if core is None:
        return None
    is_training = core.state == "TRAINING"
    if not is_training or inputs.published_seq > core.switched_seq:
        # No burst is running: satellites come back, the last to leave first, so that the rest stays a prefix.
        last = next((cell for cell in reversed(inputs.cells) if cell.state == "TRAINING" and cell.index > 0), None)
        if last is not None:
            return Move(cell=last, role="rollout", reason=f"the burst ended with version {inputs.published_version}")
        return _after_burst(inputs, core) if is_training else _leave(inputs, core)
    satellite = next((cell for cell in inputs.cells if cell.state not in ("TRAINING", "LOST")), None)
    return _leave(inputs, satellite) if satellite is not None else None


def _leave(inputs: Inputs, cell: Cell) -> Move | None:
    """The next cell of the prefix, when a step is there to be trained and the others can do without it."""
    pending, rest = inputs.num_unfinished + inputs.num_owed, inputs.capacity - cell.capacity
    if cell.state != "SERVING" or pending > rest or (cell.index == 0 and not _is_step_ready(inputs)):
        return None
    what = f"step {inputs.step + 1} is ready" if cell.index == 0 else f"joins step {inputs.step + 1}"
    return Move(cell=cell, role="train", reason=f"{what}; {pending} unfinished <= C_R - C_e = {rest}")


def _after_burst(inputs: Inputs, core: Cell) -> Move:
    """The core stays, under a new epoch, only if it is not missed in rollout and has something to train."""
    pending = inputs.num_unfinished + inputs.num_owed
    if _is_step_ready(inputs) and pending <= inputs.capacity:
        reason = f"step {inputs.step + 1} is ready; {pending} unfinished <= C_R = {inputs.capacity}"
        return Move(cell=core, role="train", reason=reason)
    return Move(cell=core, role="rollout", reason=f"the burst ended with version {inputs.published_version}")


def _is_step_ready(inputs: Inputs) -> bool:
    return bool(inputs.next_cohort) and inputs.step < inputs.num_steps


POLICIES: dict[str, Policy] = {"waterlevel": waterlevel}
