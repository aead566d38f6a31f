"""Shell. Which task a group gets: (purpose, index) -> Task, of a generated family or of a directory.

Invariant: the same config and the same files give the same task for the same index; `group.dispatched` carries its
digest. Direction: config -> tasks.
"""

from pathlib import Path

from gyre.agents.task_folder import load_tasks
from gyre.agents.tasks import Task, make_task
from gyre.config import Config


class TaskSource:
    """Raises TaskError at once for a directory that holds a wrong task, ConfigError for no such family."""

    def __init__(self, config: Config) -> None:
        self._tasks, self._evaluation = config.tasks, config.evaluation
        train, heldout = config.tasks.path, config.tasks.heldout_path or config.tasks.path
        self._train = load_tasks(Path(train)) if train else ()
        self._heldout = load_tasks(Path(heldout), "heldout") if heldout else ()
        self.get("train", 0)

    def get(self, purpose: str, index: int) -> Task:
        is_eval = purpose == "eval"
        folders = self._heldout if is_eval and self._evaluation.split == "heldout" else self._train
        if folders:
            return folders[index % len(folders)]
        tasks = self._tasks
        if is_eval:
            return make_task(tasks.family, self._evaluation.split, self._evaluation.seed, index, tasks.num_goals)
        return make_task(tasks.family, "train", tasks.seed, index, tasks.num_goals)
