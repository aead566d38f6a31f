"""Pure. The log -> groups and their executions: which are settled, which cohort comes next, and w(t).

A slot is settled by the first `execution.scored`, or final `execution.dropped`, of its current attempt. A started
attempt with a higher number replaces an earlier one; what the earlier one still says is passed over. A group is
complete when all its slots are settled; the order of completion is stream order.

Invariant: dispatched, started and finished count slots of train groups and only grow; a refill reuses its slot, so
w(t) = dispatched - finished rises only with `group.dispatched`. Eval groups are in no counter and in no cohort.

The fold takes over its argument: `evolve` changes the state in place and returns it, so keep only what it returns.
It is O(1) an event, and holds the groups that no completed step has consumed.
"""

import hashlib
from collections.abc import Iterator

import msgspec
import orjson

from gyre.config import PipelineConfig
from gyre.events.codec import Recorded
from gyre.events.types import (
    CohortConsumed,
    ExecutionDropped,
    ExecutionFinished,
    ExecutionScored,
    ExecutionStarted,
    ExecutionTimedOut,
    GroupDispatched,
    MilestoneScored,
    SessionOpened,
    StepCompleted,
    StepRejected,
)
from gyre.projections.scores import Ending


class Slot:
    """The current attempt at one place of a group."""

    __slots__ = (
        "attempt",
        "dropped",
        "execution",
        "finished",
        "milestones",
        "score",
        "session",
        "settled",
        "timed_out",
    )

    def __init__(self) -> None:
        self.attempt = -1
        self.execution = ""
        self.settled = False
        self._clear()

    def _clear(self) -> None:
        self.session = ""
        """The session opened last: the one that was scored."""
        self.finished = ""
        self.timed_out = ""
        self.score: float | None = None
        self.dropped = ""
        self.milestones: list[float] = []
        """Scores on the way, in stream order."""

    def restart(self, execution: str, attempt: int) -> None:
        self.execution, self.attempt = execution, attempt
        self._clear()

    @property
    def ending(self) -> Ending:
        return Ending(finished=self.finished, timed_out=self.timed_out, score=self.score, dropped=self.dropped)


class Group:
    __slots__ = ("group", "num_settled", "policy_version", "purpose", "slots", "task")

    def __init__(self, event: GroupDispatched) -> None:
        self.group = event.group
        self.purpose = event.purpose
        self.task = event.task
        self.policy_version = event.policy_version
        self.slots = tuple(Slot() for _ in range(event.num_slots))
        self.num_settled = 0


class Cohort(msgspec.Struct, frozen=True, kw_only=True):
    """What one step trains on. `policy.cohort_consumed` records it."""

    step: int
    groups: tuple[str, ...]
    """In order of completion."""
    executions: tuple[str, ...]
    """The settled attempt of each slot, slots in order, group after group."""
    digest: str
    """Over the above, the dispatch versions, and how each execution ended."""


class CohortState:
    """The fold. Read it; change it only through `evolve`."""

    __slots__ = ("_places", "consumed", "dispatched", "finished", "groups", "ready", "seq", "started", "step")

    def __init__(self) -> None:
        self.seq = 0
        """Sequence of the last event folded."""
        self.step = 0
        """The last step that consumed a cohort and was not rejected."""
        self.dispatched = 0
        """d(t), in executions (slots), as the two below."""
        self.started = 0
        """p(t)"""
        self.finished = 0
        """f(t)"""
        self.groups: dict[str, Group] = {}
        self.ready: dict[str, None] = {}
        """Complete train groups that no step has consumed, in order of completion."""
        self.consumed: dict[int, tuple[str, ...]] = {}
        """Groups of each step that has consumed its cohort and is neither completed nor rejected."""
        self._places: dict[str, tuple[Group, Slot]] = {}
        """Where each execution stands that is the current attempt of a slot."""

    @property
    def waterlevel(self) -> int:
        """w(t): train executions dispatched and not finished."""
        return self.dispatched - self.finished

    def find(self, execution: str) -> tuple[Group, Slot] | None:
        """Where an execution stands, if it is the current attempt of a slot that is remembered."""
        return self._places.get(execution)


def evolve(state: CohortState, recorded: Recorded) -> CohortState:
    """Fold one event. Total: what does not fit is passed over."""
    state.seq = recorded.seq
    match recorded.event:
        case GroupDispatched() as event if event.group not in state.groups:
            state.groups[event.group] = Group(event)
            if event.purpose == "train":
                state.dispatched += event.num_slots
        case ExecutionStarted() as event:
            _start(state, event)
        case SessionOpened() as event:
            for _, slot in _open(state, event.execution):
                slot.session = event.session
        case ExecutionTimedOut() as event:
            for _, slot in _open(state, event.execution):
                if slot.timed_out != "overall":
                    slot.timed_out = event.kind
        case ExecutionFinished() as event:
            for _, slot in _open(state, event.execution):
                slot.finished = event.reason
        case MilestoneScored() as event:
            for _, slot in _open(state, event.execution):
                slot.milestones.append(event.score)
        case ExecutionScored() as event:
            for group, slot in _open(state, event.execution):
                slot.score = event.score
                _settle(state, group, slot)
        case ExecutionDropped() as event if event.final:
            for group, slot in _open(state, event.execution):
                slot.dropped = event.reason or "dropped"
                _settle(state, group, slot)
        case CohortConsumed() as event:
            state.step = max(state.step, event.step)
            state.consumed[event.step] = event.groups
            for name in event.groups:
                state.ready.pop(name, None)
        case StepCompleted() | StepRejected() as event:
            if isinstance(event, StepRejected) and event.step in state.consumed:
                state.step = event.step - 1  # the number is free again, the groups are not
            for name in state.consumed.pop(event.step, ()):
                _forget(state, name)
        case _:
            pass
    return state


def _start(state: CohortState, event: ExecutionStarted) -> None:
    group = state.groups.get(event.group)
    if group is None or not 0 <= event.slot < len(group.slots):
        return
    slot = group.slots[event.slot]
    if slot.settled or event.attempt <= slot.attempt:
        return
    if slot.attempt < 0 and group.purpose == "train":
        state.started += 1
    state._places.pop(slot.execution, None)
    slot.restart(event.execution, event.attempt)
    state._places[event.execution] = (group, slot)


def _open(state: CohortState, execution: str) -> Iterator[tuple[Group, Slot]]:
    """The slot that the execution holds, unless it is settled: nothing or one."""
    found = state.find(execution)
    if found is not None and not found[1].settled:
        yield found


def _settle(state: CohortState, group: Group, slot: Slot) -> None:
    slot.settled = True
    group.num_settled += 1
    if group.purpose == "train":
        state.finished += 1
    if group.num_settled == len(group.slots):
        if group.purpose == "train":
            state.ready[group.group] = None
        else:
            _forget(state, group.group)


def _forget(state: CohortState, name: str) -> None:
    group = state.groups.pop(name, None)
    if group is not None:
        for slot in group.slots:
            state._places.pop(slot.execution, None)


def num_ready(state: CohortState) -> int:
    """Complete train groups that wait for a step."""
    return len(state.ready)


def next_cohort(state: CohortState, config: PipelineConfig) -> Cohort | None:
    """The next step's cohort: the B train groups that were complete first; None while there are fewer."""
    wanted = config.groups_per_step
    if len(state.ready) < wanted:
        return None
    return _cohort(state, state.step + 1, tuple(state.ready)[:wanted])


def consumed_cohort(state: CohortState, step: int) -> Cohort | None:
    """The cohort that a step consumed and has not completed: what a restarted trainer goes on with."""
    groups = state.consumed.get(step)
    if groups is None or any(name not in state.groups for name in groups):
        return None
    return _cohort(state, step, groups)


def _described(slot: Slot) -> list[object]:
    way = [slot.milestones] if slot.milestones else []
    return [slot.execution, slot.session, msgspec.to_builtins(slot.ending), *way]


def _cohort(state: CohortState, step: int, names: tuple[str, ...]) -> Cohort:
    groups = [state.groups[name] for name in names]
    described = [[g.group, g.task, g.policy_version, [_described(slot) for slot in g.slots]] for g in groups]
    content = orjson.dumps([step, described], option=orjson.OPT_SORT_KEYS)
    return Cohort(
        step=step,
        groups=names,
        executions=tuple(s.execution for g in groups for s in g.slots),
        digest=hashlib.sha256(content).hexdigest()[:32],
    )
