"""Pure. The cells as the log tells of them: state, role and version of each, and what the scheduler asked for.

Invariants: `evolve` is total, so a late or repeated event changes nothing that a newer epoch has settled;
an epoch belongs to the first lease that took it; at most one decision is open at any sequence.

Direction: events -> Cluster -> scheduler, dashboard.

    LOADING --switched(rollout)--> SERVING --fenced--> FENCED --re-routed--> DRAINING --released--> EMPTY
       ^                              ^                                                               |
       |                              +--rolled back (rollout)---                                     |
       +--leased(rollout)-- TRAINING <------------------------------------switched(train)-------------+

A cell that is SERVING stays it while it pulls what was published meanwhile.
`cell.lost` leads from every state to LOST, and `cell.joined` from there to LOADING.
"""

from typing import Literal

import msgspec

from gyre.events.codec import Recorded
from gyre.events.types import (
    AdmissionResumed,
    AdmissionStopped,
    CellFenced,
    CellJoined,
    CellLeased,
    CellLost,
    CellSwitched,
    CohortConsumed,
    Decided,
    DrainLifted,
    DrainRequested,
    EngineReleased,
    Event,
    PolicyPublished,
    PolicyRolledBack,
    Role,
    SessionsRerouted,
    StepCompleted,
    StepRejected,
    SwitchRequested,
    SwitchRolledBack,
    TermStarted,
    Ticked,
    Value,
    WeightsPulled,
)

CellState = Literal["LOADING", "SERVING", "FENCED", "DRAINING", "EMPTY", "TRAINING", "LOST"]


class Cell(Value, frozen=True, kw_only=True):
    cell: str
    index: int
    """Place in the fixed order; the core is 0."""
    capacity: int
    engine_url: str
    state: CellState = "LOADING"
    role: Role | None = None
    """The role it last arrived in; None before the first and after a loss."""
    epoch: int = 0
    """Of its newest lease; never falls."""
    settled_epoch: int = 0
    """Of the last switch that ended, by an arrival or a rollback: what still comes of it is late, or there twice."""
    version: int = -1
    """Policy version that it serves or began to train from; -1 before the first."""
    switched_seq: int = 0
    """When it arrived in its role."""
    switched_s: float = -1.0
    """`Cluster.elapsed_s` at the first tick after it arrived; -1 before that tick."""


class Decision(Value, frozen=True, kw_only=True):
    """A decision on its way: decided, perhaps commanded, not yet arrived, rolled back or overtaken."""

    seq: int
    decided: Decided
    commanded_seq: int = 0
    """0 while no command follows from it."""


class Cluster(Value, frozen=True, kw_only=True):
    cells: tuple[Cell, ...] = ()
    """In their fixed order."""
    term: int = 0
    now_s: float = 0.0
    """What the newest tick of this term said; 0 before its first."""
    elapsed_s: float = 0.0
    """Seconds that ticks have counted, each within its term: clocks of two schedulers are never compared."""
    drain_orders: tuple[str, ...] = ()
    """Cells that the operator wants no work on, whether they are there or not."""
    standalone: tuple[str, ...] = ()
    """Of the cells, engines without a trainer; in the order in which they joined."""
    decision: Decision | None = None
    step: int = 0
    """Last completed step."""
    published_version: int = -1
    """-1 before the first publish."""
    published_seq: int = 0
    """Where the last burst ended: at its publish, or at a rollback that left nothing to publish."""
    consumed_step: int = 0
    """Whose cohort was consumed and is not rejected yet: what rejects it counts once, however often it is said."""
    num_rejected: int = 0
    """Cohorts that a guard rejected."""
    num_replaced: int = 0
    """Of those, before the last burst ended: fresh groups are dispatched in their place."""
    admitting: bool = True
    """False while admission is stopped: nothing that is owed will be dispatched."""

    @property
    def rollout_capacity(self) -> int:
        """C_R: executions that all serving cells hold at once; a drained one holds none."""
        drained = self.drained
        return sum(cell.capacity for cell in self.cells if cell.state == "SERVING" and cell.cell not in drained)

    @property
    def drained(self) -> tuple[str, ...]:
        """In their fixed order; never the core, without which nothing is trained, nor an engine that only serves."""
        named = (cell.cell for cell in self.cells if cell.index > 0 and cell.cell in self.drain_orders)
        return tuple(name for name in named if name not in self.standalone)


def find_cell(cluster: Cluster, name: str) -> Cell | None:
    return next((cell for cell in cluster.cells if cell.cell == name), None)


def evolve(cluster: Cluster, recorded: Recorded) -> Cluster:
    """The cluster after one more event; the same object when the event says nothing of it."""
    match recorded.event:
        case CellJoined() as event:
            return _join(cluster, event)
        case CellLeased() | CellFenced() | SessionsRerouted() | EngineReleased() | CellSwitched() as event:
            return _move(cluster, event, recorded.seq)
        case SwitchRolledBack() | CellLost() | WeightsPulled() as event:
            return _move(cluster, event, recorded.seq)
        case TermStarted(term=term) if term > cluster.term:
            return msgspec.structs.replace(cluster, term=term, now_s=0.0)
        case Ticked(term=term, now_s=now_s) if term == cluster.term:
            return _tick(cluster, now_s)
        case DrainRequested(cell=cell) if cell not in cluster.drain_orders:
            return msgspec.structs.replace(cluster, drain_orders=(*cluster.drain_orders, cell))
        case DrainLifted(cell=cell) if cell in cluster.drain_orders:
            return msgspec.structs.replace(cluster, drain_orders=tuple(c for c in cluster.drain_orders if c != cell))
        case Decided() as decided:
            return _decide(cluster, decided, recorded.seq)
        case SwitchRequested() as command:
            return _command(cluster, command, recorded.seq)
        case AdmissionStopped():
            return msgspec.structs.replace(cluster, admitting=False)
        case AdmissionResumed():
            return msgspec.structs.replace(cluster, admitting=True)
        case StepCompleted(step=step):
            return msgspec.structs.replace(cluster, step=max(step, cluster.step))
        case CohortConsumed(step=step):
            return msgspec.structs.replace(cluster, consumed_step=step)
        case StepRejected(step=step) if step == cluster.consumed_step:
            return msgspec.structs.replace(cluster, num_rejected=cluster.num_rejected + 1, consumed_step=0)
        case PolicyPublished(version=version) if version > cluster.published_version:
            return _end_burst(cluster, version, recorded.seq)
        case PolicyRolledBack(to_version=version) if version == cluster.published_version:
            return _end_burst(cluster, version, recorded.seq)
    return cluster


def _tick(cluster: Cluster, now_s: float) -> Cluster:
    elapsed_s = cluster.elapsed_s + (max(0.0, now_s - cluster.now_s) if cluster.now_s else 0.0)
    cells = tuple(
        msgspec.structs.replace(c, switched_s=elapsed_s) if c.switched_seq and c.switched_s < 0 else c
        for c in cluster.cells
    )
    return msgspec.structs.replace(cluster, now_s=max(now_s, cluster.now_s), elapsed_s=elapsed_s, cells=cells)


def _end_burst(cluster: Cluster, version: int, seq: int) -> Cluster:
    return msgspec.structs.replace(
        cluster, published_version=version, published_seq=seq, num_replaced=cluster.num_rejected
    )


def _join(cluster: Cluster, event: CellJoined) -> Cluster:
    before = find_cell(cluster, event.cell)
    cell = Cell(
        cell=event.cell,
        index=event.index,
        capacity=event.capacity,
        engine_url=event.engine_url,
        epoch=before.epoch if before else 0,
    )
    others = [other for other in cluster.cells if other.cell != event.cell]
    cells = tuple(sorted([*others, cell], key=lambda c: (c.index, c.cell)))
    standalone = cluster.standalone
    if event.standalone and event.cell not in standalone:
        standalone = (*standalone, event.cell)
    decision = _unless_about(cluster.decision, event.cell)
    return msgspec.structs.replace(cluster, cells=cells, decision=decision, standalone=standalone)


def _move(
    cluster: Cluster,
    event: CellLeased
    | CellFenced
    | SessionsRerouted
    | EngineReleased
    | CellSwitched
    | SwitchRolledBack
    | CellLost
    | WeightsPulled,
    seq: int,
) -> Cluster:
    before = find_cell(cluster, event.cell)
    if before is None:
        return cluster
    after, decision = _arrive(before, event, seq), cluster.decision
    if decision is not None and _ends(decision, event):
        decision = None
    if after is before and decision is cluster.decision:
        return cluster
    cells = tuple(after if cell is before else cell for cell in cluster.cells)
    return msgspec.structs.replace(cluster, cells=cells, decision=decision)


def _arrive(cell: Cell, event: Event, seq: int) -> Cell:
    """The cell after one event of its own; an event of an epoch that is not its newest changes nothing."""
    replace = msgspec.structs.replace
    match event:
        case CellLost():
            return replace(cell, state="LOST", role=None)
        case CellLeased(role=role, epoch=epoch) if epoch > cell.epoch:
            loads = role == "rollout" and cell.state != "LOST"
            return replace(cell, epoch=epoch, state="LOADING" if loads else cell.state)
        case WeightsPulled(epoch=epoch, version=version) if cell.state == "SERVING" and epoch == cell.epoch:
            return replace(cell, version=max(version, cell.version))
    if getattr(event, "epoch", 0) != cell.epoch or cell.epoch == cell.settled_epoch or cell.state == "LOST":
        return cell
    match event:
        case CellFenced() if cell.state == "SERVING":
            return replace(cell, state="FENCED")
        case SessionsRerouted() if cell.state == "FENCED":
            return replace(cell, state="DRAINING")
        case EngineReleased():
            return replace(cell, state="EMPTY")
        case CellSwitched(role=role, version=version):
            state: CellState = "SERVING" if role == "rollout" else "TRAINING"
            since_s = cell.switched_s if role == cell.role else -1.0  # a lease that is renewed is no flip
            cell = replace(cell, settled_epoch=cell.epoch, switched_seq=seq, switched_s=since_s)
            return replace(cell, state=state, role=role, version=version)
        case SwitchRolledBack(role=role):
            state = "SERVING" if role == "rollout" else "TRAINING"
            return replace(cell, settled_epoch=cell.epoch, state=state, role=role)
    return cell


def _decide(cluster: Cluster, decided: Decided, seq: int) -> Cluster:
    """A deposed scheduler's decision, one beside an open one or one about an old epoch is void."""
    cell = find_cell(cluster, decided.cell)
    if cluster.decision is not None or decided.term != cluster.term or cell is None or decided.epoch <= cell.epoch:
        return cluster
    return msgspec.structs.replace(cluster, decision=Decision(seq=seq, decided=decided))


def _command(cluster: Cluster, command: SwitchRequested, seq: int) -> Cluster:
    open_ = cluster.decision
    if open_ is None or open_.commanded_seq or command.term != cluster.term:
        return cluster
    if (command.cell, command.epoch, command.role) != (open_.decided.cell, open_.decided.epoch, open_.decided.role):
        return cluster
    return msgspec.structs.replace(cluster, decision=msgspec.structs.replace(open_, commanded_seq=seq))


def _ends(decision: Decision, event: Event) -> bool:
    """Whether a cell's event answers the decision, or overtakes it."""
    decided = decision.decided
    match event:
        case CellSwitched(cell=cell, epoch=epoch) | SwitchRolledBack(cell=cell, epoch=epoch):
            return cell == decided.cell and epoch >= decided.epoch
        case CellLeased(cell=cell, epoch=epoch):
            # Without a command the cell took this epoch for a lease of its own.
            overtaken = epoch > decided.epoch or (epoch == decided.epoch and not decision.commanded_seq)
            return cell == decided.cell and overtaken
        case CellLost(cell=cell):
            return cell == decided.cell
    return False


def _unless_about(decision: Decision | None, cell: str) -> Decision | None:
    return None if decision is not None and decision.decided.cell == cell else decision
