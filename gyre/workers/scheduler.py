"""Pure. Which cell changes role next: `decide` over a prefix of the log.

Invariants, whatever the policy: equal prefixes give equal decisions, byte for byte; at most one decision is open; no
cell leaves a role before `scheduler.dwell_s`; the last cell in rollout stays while executions are unfinished; a drained
cell is no policy's to move. What cannot be is a MoveRefused with its reason, and nothing is commanded.

Direction: events -> SchedulerState -> Inputs (all that a policy may look at) -> Move -> Decided or MoveRefused.
"""

import hashlib
from itertools import islice

import msgspec

from gyre.config import Config, PipelineConfig
from gyre.errors import ReplayError
from gyre.events.codec import Recorded
from gyre.events.types import CellJoined, CellLost, Decided, Event, MoveRefused, SilenceNoticed, TermStarted
from gyre.projections import cluster as cluster_fold
from gyre.projections import cohorts as cohorts_fold
from gyre.projections.cluster import Cluster, find_cell
from gyre.projections.cohorts import CohortState
from gyre.workers.scheduler_policies import POLICIES, Inputs, Move, drain, refusal


class SchedulerState(msgspec.Struct, frozen=True, kw_only=True):
    seq: int = 0
    """The prefix that was folded ends here."""
    cluster: Cluster = Cluster()
    cohorts: CohortState = msgspec.field(default_factory=CohortState)
    refused: MoveRefused | None = None
    """The last move that was refused, if nothing was decided since."""
    silent: tuple[SilenceNoticed, ...] = ()
    """In this term, of cells that were neither lost nor joined since."""


def initial() -> SchedulerState:
    """Before the first event."""
    return SchedulerState()


def evolve(state: SchedulerState, recorded: Recorded) -> SchedulerState:
    """Takes over its argument, as the fold of the cohorts does: keep only what it returns."""
    event, refused = recorded.event, state.refused
    if isinstance(event, MoveRefused | Decided):
        refused = event if isinstance(event, MoveRefused) else None
    return SchedulerState(
        seq=recorded.seq,
        cluster=cluster_fold.evolve(state.cluster, recorded),
        cohorts=cohorts_fold.evolve(state.cohorts, recorded),
        refused=refused,
        silent=_silent(state, event),
    )


def _silent(state: SchedulerState, event: Event) -> tuple[SilenceNoticed, ...]:
    match event:
        case TermStarted():
            return ()
        case SilenceNoticed(term=term) if term == state.cluster.term:
            return (*state.silent, event)
        case CellLost(cell=cell) | CellJoined(cell=cell):
            return tuple(noticed for noticed in state.silent if noticed.cell != cell)
    return state.silent


def lost(state: SchedulerState, config: Config) -> CellLost | None:
    """The next satellite whose lease is over. Never the core, without which nothing is trained: it is waited for."""
    for noticed in state.silent:
        cell = find_cell(state.cluster, noticed.cell)
        is_there = cell is not None and cell.index > 0 and cell.state != "LOST"
        if is_there and noticed.seconds >= config.cells.lease_s:
            return CellLost(cell=noticed.cell, reason=f"no sign of life for {noticed.seconds:.0f} s")
    return None


def decide(state: SchedulerState, config: Config) -> tuple[Decided | MoveRefused, ...]:
    """What the prefix calls for: one event or none; its envelope's cause is `state.seq`."""
    inputs = read_inputs(state, config)
    if inputs.term == 0 or inputs.is_decision_open:
        return ()
    move = choose(inputs)
    if move is None or (move.cell.cell in inputs.dwelling and move.role != move.cell.role):
        return ()
    digest = hashlib.sha256(msgspec.json.encode(inputs)).hexdigest()[:32]
    if reason := refusal(inputs, move):
        refused = MoveRefused(
            term=inputs.term,
            policy=inputs.policy,
            cell=move.cell.cell,
            role=move.role,
            reason=reason,
            inputs_digest=digest,
        )
        return () if _is_repeated(refused, state.refused) else (refused,)
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
            inputs_digest=digest,
        ),
    )


def choose(inputs: Inputs) -> Move | None:
    """The operator's drain first; then the policy, which sees no cell that is drained or has no role to change."""
    if move := drain(inputs):
        return move
    cells = tuple(cell for cell in inputs.cells if cell.cell not in (*inputs.drained, *inputs.standalone))
    return POLICIES[inputs.policy](msgspec.structs.replace(inputs, cells=cells))


def recompute(state_at_cause: SchedulerState, config: Config) -> Decided:
    """The decision that must stand in the log with cause `state_at_cause.seq`. Raises ReplayError for none."""
    decisions = [event for event in decide(state_at_cause, config) if isinstance(event, Decided)]
    if not decisions:
        raise ReplayError(f"scheduler: the log through sequence {state_at_cause.seq} calls for no decision")
    return decisions[0]


def is_dwelling(state: SchedulerState, config: Config) -> bool:
    """Whether a decision may follow from a tick alone."""
    return bool(_dwelling(state.cluster, config.scheduler.dwell_s))


def _is_repeated(refused: MoveRefused, before: MoveRefused | None) -> bool:
    def key(event: MoveRefused) -> tuple[str, ...]:
        return (event.policy, event.cell, event.role, event.reason)

    return before is not None and key(before) == key(refused)


def _dwelling(cluster: Cluster, dwell_s: float) -> tuple[str, ...]:
    if not dwell_s:
        return ()
    return tuple(
        cell.cell
        for cell in cluster.cells
        if cell.switched_seq and (cell.switched_s < 0 or cluster.elapsed_s - cell.switched_s < dwell_s)
    )


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
        drained=cluster.drained,
        dwelling=_dwelling(cluster, config.scheduler.dwell_s),
        num_training=config.scheduler.num_training if config.scheduler.policy == "static" else 0,
        standalone=cluster.standalone,
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
