"""Shell. Whether a task grades rightly: the empty solution, the partial ones and the oracle, each scored for real.

Invariant: a task is right when doing nothing scores what it says (`metadata.gyre.empty_score`), the oracle scores 1,
and `solution/partial_1.sh`, `partial_2.sh`, ... score in between, each more than the one before. Whoever is asked
twice says the same. Direction: task -> workspace -> solution -> verifier -> Checked.
"""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from gyre.agents.evaluator import grade, prepare_workspace, solve
from gyre.agents.places import AnySandbox
from gyre.agents.snapshots import clear
from gyre.agents.task_folder import load_task
from gyre.agents.tasks import FolderTask, Task
from gyre.errors import GyreError, TaskError

_SAME = 1e-6
EMPTY = "empty"
ORACLE = "solve.sh"


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    task: str
    scores: tuple[tuple[str, float], ...]
    """(solution, score), from doing nothing to the oracle."""
    num_tests: int
    wall_s: float
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def line(self) -> str:
        scores = "  ".join(f"{name.removesuffix('.sh')} {score:.2f}" for name, score in self.scores)
        verdict = "ok" if self.ok else "; ".join(self.problems)
        return f"{self.task:<24} {self.num_tests:>3} checks  {scores}  {self.wall_s:.1f} s  {verdict}"


async def check_folder(folder: Path, sandbox: AnySandbox) -> Checked:
    """Never raises for what is wrong with the task, also when it cannot be read: that is in `problems`."""
    try:
        task = load_task(folder)
    except TaskError as error:
        name = folder.name
        return Checked(
            task=name, scores=(), num_tests=0, wall_s=0.0, problems=(str(error).removeprefix(f"task {name}: "),)
        )
    return await check_task(task, sandbox)


async def check_task(task: Task, sandbox: AnySandbox) -> Checked:
    """Never raises for what is wrong with the task: that is in `problems`."""
    begun = time.monotonic()
    scores, failed, num_tests = list[tuple[str, float]](), dict[str, list[str]](), 0
    folder = task.folder
    solutions = [EMPTY]
    if folder is not None:
        solutions += [path.name for path in sorted((Path(folder.path) / "solution").glob("partial_*.sh"))]
    for name in (*solutions, ORACLE):
        try:
            score, parts = await _score(task, folder, name, sandbox)
        except GyreError as error:
            failed.setdefault(str(error), []).append(name)
        else:
            scores.append((name, score))
            num_tests = max(num_tests, len(parts))
    problems = [f"{', '.join(names)}: {reason}" for reason, names in failed.items()]  # most fail alike
    problems += _judge(scores, folder.empty_score if folder else 0.0)
    return Checked(
        task=task.id,
        scores=tuple(scores),
        num_tests=num_tests,
        wall_s=time.monotonic() - begun,
        problems=tuple(problems),
    )


async def _score(
    task: Task, folder: FolderTask | None, name: str, sandbox: AnySandbox
) -> tuple[float, tuple[tuple[str, bool], ...]]:
    root = Path(tempfile.mkdtemp(prefix="gyre-check-"))
    try:
        workspace = root / "workspace"
        await asyncio.to_thread(prepare_workspace, workspace, task)
        if name != EMPTY:
            failure = await (
                _solve_generated(task, workspace, sandbox)
                if folder is None
                else solve(sandbox, workspace, folder, name)
            )
            if failure and name == ORACLE:
                raise GyreError(f"it failed: {failure}")
        found = await grade(sandbox, workspace, task)
        return found.score, found.parts
    finally:
        await asyncio.to_thread(clear, root)


async def _solve_generated(task: Task, workspace: Path, sandbox: AnySandbox) -> str:
    ended = await sandbox.run(["sh", "-ec", "\n".join(task.solution)], env={}, workspace=workspace, deadline_s=60)
    return ended.failure


def _judge(scores: Sequence[tuple[str, float]], empty_score: float) -> list[str]:
    problems = []
    known = dict(scores)
    if EMPTY in known and abs(known[EMPTY] - empty_score) > _SAME:
        problems.append(f"doing nothing scores {known[EMPTY]:g}, task.toml says {empty_score:g}")
    if ORACLE in known and abs(known[ORACLE] - 1) > _SAME:
        problems.append(f"the oracle scores {known[ORACLE]:g}, not 1")
    for (before, low), (after, high) in pairwise(scores):
        if high <= low + _SAME:
            problems.append(f"{after} scores {high:g}, no more than {before} with {low:g}")
    return problems
