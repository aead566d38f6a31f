"""Shell. Which task a group gets: (purpose, index) -> Task, of a generated family or of a directory.

Invariant: the same config and the same files give the same task for the same index; `group.dispatched` carries its
digest. A family is one of gyre's own or a function of the user's. Direction: config -> tasks.
"""

from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from random import Random

import msgspec

from gyre.agents.task_folder import load_tasks
from gyre.agents.tasks import FAMILIES, Family, Goal, Task, make_task
from gyre.config import Config
from gyre.errors import GyreError, TaskError
from gyre.events.user_code import load_object


class TaskSource:
    """Raises TaskError at once for a directory that holds a wrong task and for no such family, MissingError for a
    function that is not there."""

    def __init__(self, config: Config) -> None:
        self._tasks, self._evaluation = config.tasks, config.evaluation
        train, heldout = config.tasks.path, config.tasks.heldout_path or config.tasks.path
        self._train = load_tasks(Path(train)) if train else ()
        self._heldout = load_tasks(Path(heldout), "heldout") if heldout else ()
        family, families = find_families(config.tasks.family)
        # Cached, since all executions of a group ask for the same one.
        self._make = lru_cache(maxsize=256)(partial(make_task, family, families=families))
        self.get("train", 0)

    def get(self, purpose: str, index: int) -> Task:
        is_eval = purpose == "eval"
        folders = self._heldout if is_eval and self._evaluation.split == "heldout" else self._train
        if folders:
            return folders[index % len(folders)]
        tasks, evaluation = self._tasks, self._evaluation
        split, seed = (evaluation.split, evaluation.seed) if is_eval else ("train", tasks.seed)
        return self._make(split, seed, index, tasks.num_goals)


def find_families(name: str) -> tuple[str, Mapping[str, Family]]:
    """(name of a family, where to look it up): of `module:function` or `file.py:function` what follows the colon."""
    if ":" not in name:
        return name, FAMILIES
    made = load_object(name, "tasks.family")
    if not callable(made):
        raise TaskError(f"tasks.family {name}: it is no function of (random numbers, number of goals)")

    def family(rng: Random, num_goals: int) -> tuple[Goal, ...]:
        """What the function gives, each field of its type."""
        try:
            return msgspec.convert(msgspec.to_builtins(made(rng, num_goals)), tuple[Goal, ...])
        except GyreError:
            raise
        except Exception as error:  # it is the user's: whatever it raises, the task cannot be made
            raise TaskError(f"tasks.family {name}: {type(error).__name__}: {error}") from error

    own = name.rpartition(":")[2]
    return own, {own: family}
