"""Pure. The log -> what training needs of it: cohorts, and the trees that a batch can be made of.

Invariant: it holds the trees of train executions that no completed or rejected step has consumed, and those of eval
executions until they are settled; a tree does not grow once its execution is settled. Direction: events ->
`Experience` -> cohorts and trees, for whoever assembles a batch.
"""

from gyre.events.codec import Recorded
from gyre.events.types import ExecutionDropped, ExecutionScored, ExecutionStarted, StepCompleted, StepRejected
from gyre.projections import cohorts, tree
from gyre.projections.cohorts import CohortState
from gyre.projections.tree import Tree


class Experience:
    """The fold of what training needs. Read it; `evolve` changes it in place."""

    __slots__ = ("_sessions", "cohorts", "trees")

    def __init__(self) -> None:
        self.cohorts = CohortState()
        self.trees: dict[str, Tree] = {}
        """By session."""
        self._sessions: dict[str, set[str]] = {}

    @property
    def seq(self) -> int:
        return self.cohorts.seq

    def evolve(self, recorded: Recorded) -> None:
        """Fold one event. Total."""
        event = recorded.event
        match event:
            case _ if isinstance(event, tree.TreeEvent):
                found = self.cohorts.find(event.execution)
                # What comes after the score can no longer change what the score is of.
                if found is not None and not found[1].settled:
                    if event.session not in self.trees:
                        self.trees[event.session] = Tree(event.session)
                        self._sessions.setdefault(event.execution, set()).add(event.session)
                    tree.evolve(self.trees[event.session], event)
            case ExecutionStarted():
                group = self.cohorts.groups.get(event.group)
                if group is not None and 0 <= event.slot < len(group.slots):
                    before = group.slots[event.slot].execution
                    cohorts.evolve(self.cohorts, recorded)
                    if before and group.slots[event.slot].execution != before:
                        self._forget(before)
            case StepCompleted() | StepRejected():
                for name in self.cohorts.consumed.get(event.step, ()):
                    for slot in self.cohorts.groups[name].slots if name in self.cohorts.groups else ():
                        self._forget(slot.execution)
            case ExecutionScored() | ExecutionDropped():
                found = self.cohorts.find(event.execution)
                cohorts.evolve(self.cohorts, recorded)
                if found is not None and found[0].purpose == "eval" and found[1].settled:
                    self._forget(event.execution)
            case _:
                pass
        if self.cohorts.seq != recorded.seq:
            cohorts.evolve(self.cohorts, recorded)

    def _forget(self, execution: str) -> None:
        for session in self._sessions.pop(execution, ()):
            self.trees.pop(session, None)
