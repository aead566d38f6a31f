"""Pure. Which groups and executions are wanted next: a fold of the log, and what follows from it.

Groups are dispatched at boundaries only (the start, each publish, and a rollback that ends a burst), up to
the depth Q_b = (phi + mu) * B, so the waterlevel never rises within a burst. For each cohort that was rejected
before the boundary as many groups more are dispatched. A slot is done when its execution
is scored, or dropped for good; a drop that is not final is refilled by the next attempt. Train groups walk through
the tasks in order, and pass over those that rest (`curriculum.py`).
"""

import msgspec

from gyre.agents.curriculum import Curriculum
from gyre.config import Config
from gyre.events.codec import Recorded
from gyre.events.types import (
    AdmissionResumed,
    AdmissionStopped,
    CohortConsumed,
    Event,
    ExecutionDropped,
    ExecutionScored,
    ExecutionStarted,
    GroupDispatched,
    GroupSkipped,
    PolicyPublished,
    PolicyRolledBack,
    Purpose,
    RunFinished,
    RunResumed,
    StepRejected,
)

MAX_ATTEMPTS = 3


class Slot(msgspec.Struct):
    """One wanted execution of a group and how far it has come."""

    group: str
    slot: int
    attempt: int = 0
    """Of the execution that is live or was last; the next one after a drop."""
    execution: str = ""
    is_live: bool = False
    """It was started, and not dropped since: nothing is to be started for it."""


class Dispatch:
    """Fold of the log. `evolve` is total and deterministic; it changes this object in place, O(1) an event.

    What a dispatcher that died had written may be heard after its successor: of a group and of an attempt the first
    word counts, and of a slot the newest attempt, as `cohorts.py` has it. Else a slot that a cohort waits for could
    be wanted no more.
    """

    def __init__(self) -> None:
        self.groups: dict[str, GroupDispatched] = {}
        self.slots: dict[tuple[str, int], Slot] = {}
        self.open: dict[tuple[str, int], Slot] = {}
        """Slots that are not done, in dispatch order."""
        self.num_groups: dict[str, int] = {"train": 0, "eval": 0}
        self.version = -1
        """Last published policy version; -1 before there is one."""
        self.consumed = 0
        """Groups consumed by steps."""
        self.rejected = 0
        """Of those, by steps that a guard rejected."""
        self.consumed_at_publish = 0
        self.rejected_at_publish = 0
        self.admission_stopped = False
        self.finished: RunFinished | None = None
        self.curriculum = Curriculum()
        self._scores: dict[str, list[float]] = {}
        self._num_open: dict[str, int] = {}
        """Slots of each group that are not done."""
        self._slot_of: dict[str, tuple[str, int]] = {}
        self._consumed: set[str] = set()
        self._last_cohort = 0
        """Groups of the cohort that was consumed last; 0 once it was rejected."""

    def evolve(self, recorded: Recorded) -> None:
        match recorded.event:
            case GroupDispatched() as event if event.group not in self.groups:
                self.groups[event.group] = event
                self.num_groups[event.purpose] += 1
                self._num_open[event.group] = event.num_slots
                for index in range(event.num_slots):
                    slot = Slot(group=event.group, slot=index)
                    self.slots[event.group, index] = self.open[event.group, index] = slot
            case ExecutionStarted() as event if (event.group, event.slot) in self.slots:
                self._start(event)
            case ExecutionScored() as event if event.execution in self._slot_of:
                self._done(event.execution, event.score)
            case GroupSkipped() as event:
                self.curriculum.skip(event)
            case ExecutionDropped() as event if event.execution in self._slot_of:
                if event.final:
                    self._done(event.execution)
                elif (slot := self.slots[self._slot_of[event.execution]]).is_live:
                    slot.is_live, slot.attempt = False, slot.attempt + 1
            case CohortConsumed() as event:
                # A trainer that died may have said it already, and is heard after its successor.
                if fresh := [group for group in event.groups if group not in self._consumed]:
                    self._consumed.update(fresh)
                    self.consumed += len(fresh)
                    self._last_cohort = len(fresh)
            case StepRejected():
                self.rejected += self._last_cohort
                self._last_cohort = 0
            case PolicyPublished() as event:
                self._boundary(event.version)
            case PolicyRolledBack() as event if event.to_version == self.version:
                self._boundary(event.to_version)
            case AdmissionStopped():
                self.admission_stopped = True
            case AdmissionResumed():
                self.admission_stopped = False
            case RunFinished() as event:
                self.finished = event
            case RunResumed():
                self.finished = None
            case _:
                pass

    def _boundary(self, version: int) -> None:
        self.version = version
        self.consumed_at_publish, self.rejected_at_publish = self.consumed, self.rejected

    def _start(self, event: ExecutionStarted) -> None:
        """What is said of an earlier attempt from now on is late, and says nothing of the slot: as for the cohorts."""
        slot = self.slots[event.group, event.slot]
        if event.attempt >= slot.attempt:
            self._slot_of.pop(slot.execution, None)
            self._slot_of[event.execution] = (event.group, event.slot)
            slot.execution, slot.attempt, slot.is_live = event.execution, event.attempt, True

    def _done(self, execution: str, score: float | None = None) -> None:
        key = self._slot_of[execution]
        if self.open.pop(key, None) is None:
            return
        scores = self._scores.setdefault(key[0], [])
        if score is not None:
            scores.append(score)
        self._num_open[key[0]] -= 1
        if not self._num_open[key[0]]:
            del self._num_open[key[0]], self._scores[key[0]]
            group = self.groups[key[0]]
            if group.purpose == "train":
                self.curriculum.settle(group.group, group.task, scores)


class GroupWanted(msgspec.Struct, frozen=True, kw_only=True):
    """A group to dispatch: everything but the task itself."""

    purpose: Purpose
    index: int
    task_index: int
    num_slots: int
    policy_version: int
    temperature: float

    @property
    def group(self) -> str:
        return f"{'g' if self.purpose == 'train' else 'e'}{self.index:05d}"


def groups_wanted(state: Dispatch, config: Config) -> tuple[GroupWanted, ...]:
    """What the last boundary allows and has not been dispatched yet; evaluations first."""
    if state.version < 0 or state.finished or state.admission_stopped:
        return ()
    pipeline, evaluation = config.pipeline, config.evaluation
    rounds = tuple((t, i) for t in evaluation.temperatures for i in range(evaluation.num_tasks))
    is_trained = state.version >= pipeline.num_steps > 0
    evals = rounds * (2 if is_trained else 1)
    needed = pipeline.num_steps * pipeline.groups_per_step + state.rejected_at_publish
    trains = min(state.consumed_at_publish + pipeline.dispatch_depth, needed)
    return tuple(
        GroupWanted(
            purpose="eval",
            index=index,
            task_index=evals[index][1],
            num_slots=evaluation.executions_per_task,
            policy_version=state.version,
            temperature=evals[index][0],
        )
        for index in range(state.num_groups["eval"], len(evals))
    ) + tuple(
        GroupWanted(
            purpose="train",
            index=index,
            task_index=(index + state.curriculum.num_skipped) % config.tasks.num_tasks,
            num_slots=pipeline.executions_per_group,
            policy_version=state.version,
            temperature=config.sampling.temperature,
        )
        for index in range(state.num_groups["train"], trains)
    )


def executions_wanted(state: Dispatch, room: int) -> tuple[Slot, ...]:
    """At most `room` slots to start now, in dispatch order."""
    wanted = (slot for slot in state.open.values() if not slot.is_live)
    return tuple(slot for _, slot in zip(range(room), wanted, strict=False))


def execution_name(slot: Slot) -> str:
    return f"{slot.group}-{slot.slot}" + (f"-r{slot.attempt}" if slot.attempt else "")


def drop(slot: Slot, reason: str) -> Event:
    """The event that gives up the slot's execution, and the slot itself once its attempts are used up."""
    return ExecutionDropped(execution=slot.execution, reason=reason, final=slot.attempt + 1 >= MAX_ATTEMPTS)


def interrupt(slot: Slot) -> Event:
    """The event that gives up an execution whose dispatcher ended: no fault of its own, so it is always refilled."""
    reason = "interrupted: the process that ran it ended"
    return ExecutionDropped(execution=slot.execution, reason=reason, final=False)


def work_done(state: Dispatch, config: Config) -> bool:
    """Every step is published and every dispatched execution has ended."""
    return state.version >= config.pipeline.num_steps and not state.open and not groups_wanted(state, config)
