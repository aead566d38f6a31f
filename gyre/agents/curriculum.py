"""Pure. Which tasks rest: a fold of settled groups, and whether the next task of the walk is passed over.

A group whose executions all passed or all failed has no advantage to learn from; with `tasks.curriculum` its task is
passed over for the next `tasks.curriculum_rounds` walks through the tasks, and then tried again. Invariant: what is
passed over follows from the log alone, and each time is an event (`group.skipped`) that names the group whose scores
it follows from. A task is passed over so many times at most before it is dispatched, so a walk always comes to an end.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from gyre.config import TasksConfig
from gyre.events.types import GroupSkipped

_EQUAL = 1e-9


class Rest(msgspec.Struct):
    """Of a task: the group that says nothing, and how often the task has been passed over since."""

    group: str
    reason: Literal["all_passed", "all_failed"]
    num_skipped: int = 0


class Curriculum:
    """Fold. `settle` and `skip` change this object in place, O(1)."""

    def __init__(self) -> None:
        self.resting: dict[str, Rest] = {}
        """By the id of the task; the last group that was settled counts."""
        self.num_skipped = 0
        """Places of the walk that were passed over, in all."""

    def settle(self, group: str, task: str, scores: Sequence[float]) -> None:
        """Of a train group whose executions have all ended; `scores` are those that there are."""
        self.resting.pop(task, None)
        if len(scores) > 1 and max(scores) - min(scores) < _EQUAL:
            if abs(scores[0]) < _EQUAL:
                self.resting[task] = Rest(group=group, reason="all_failed")
            elif abs(scores[0] - 1) < _EQUAL:
                self.resting[task] = Rest(group=group, reason="all_passed")

    def skip(self, event: GroupSkipped) -> None:
        self.num_skipped += 1
        rest = self.resting.get(event.task)
        if rest is not None and rest.group == event.because:
            rest.num_skipped += 1


def skip_wanted(
    state: Curriculum, config: TasksConfig, task_index: int, task_at: Callable[[int], str]
) -> GroupSkipped | None:
    """The event that passes over `task_index`, where the next train group would be, if its task rests.

    task_at: id of the task at a place in the task set.
    """
    if not config.curriculum:
        return None
    task = task_at(task_index)
    rest = state.resting.get(task)
    if rest is None or rest.num_skipped >= config.curriculum_rounds:
        return None
    return GroupSkipped(task=task, task_index=task_index, reason=rest.reason, because=rest.group)
