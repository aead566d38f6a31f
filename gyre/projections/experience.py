"""Pure. The log -> what training needs of it: cohorts, and the trees that a batch can be made of.

Invariant: it holds the trees of train executions that no completed or rejected step has consumed, and those of eval
executions until their group is complete; a tree does not grow once its execution is settled. Direction: events ->
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
        names: tuple[str, ...] = ()
        """Groups of which it may let executions go."""
        match event:
            case _ if isinstance(event, tree.TreeEvent):
                self._grow(event)
            case ExecutionStarted():
                names = (event.group,)
            case ExecutionScored() | ExecutionDropped():
                found = self.cohorts.find(event.execution)
                names = () if found is None else (found[0].group,)
            case StepCompleted() | StepRejected():
                names = self.cohorts.consumed.get(event.step, ())
            case _:
                pass
        groups = [self.cohorts.groups[name] for name in names if name in self.cohorts.groups]
        held = [slot.execution for group in groups for slot in group.slots]
        cohorts.evolve(self.cohorts, recorded)
        for execution in held:
            if self.cohorts.find(execution) is None:
                for session in self._sessions.pop(execution, ()):
                    del self.trees[session]

    def _grow(self, event: tree.TreeEvent) -> None:
        found = self.cohorts.find(event.execution)
        # What comes after the score can no longer change what the score is of.
        if found is not None and not found[1].settled:
            if event.session not in self.trees:
                self.trees[event.session] = Tree(event.session)
                self._sessions.setdefault(event.execution, set()).add(event.session)
            tree.evolve(self.trees[event.session], event)
