"""Shell. The score of a workspace: task, workspace -> graded tests in a sandbox of their own -> Grade.

Invariant: a score comes from exit codes that the kernel gave to process 1 of that sandbox, which no graded
program can see into or write to. If one of them is missing for any reason, that is an EvaluationError
and no score: never 0. A test that hangs or breaks a limit has failed, since the workspace made it so.
"""

import asyncio
from pathlib import Path

import msgspec

from gyre.agents.tasks import Task
from gyre.agents.unsandboxed import AnySandbox
from gyre.errors import EvaluationError, GyreError, TaskError

_START_S = 20.0
"""For the start of the sandbox on a busy machine, beside the seconds of the tests."""


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    score: float
    """Fraction of the parts that passed."""
    parts: tuple[tuple[str, bool], ...]
    """(name of the graded test, whether it passed), in the task's order."""
    wall_s: float = 0.0


async def grade(sandbox: AnySandbox, workspace: Path, task: Task, *, test_s: float = 10.0) -> Grade:
    """Run every graded test in `workspace`, read-only, without network, for `test_s` seconds each.

    Raises EvaluationError when there is no score, TaskError for a task without tests.
    """
    if not task.tests:
        raise TaskError(f"task {task.id}: no graded tests: it has no score; give it at least one")
    try:
        # The harness may have shut its own workspace; that must not stop the grading.
        await asyncio.to_thread(workspace.chmod, 0o700)
        ended = await sandbox.run(
            [test.command for test in task.tests],
            env={},
            workspace=workspace,
            read_only=True,
            grade_s=test_s,
            deadline_s=_START_S + test_s * len(task.tests),
        )
    except (GyreError, OSError) as error:
        raise EvaluationError(f"evaluator: task {task.id}: {error}") from error
    if ended.timed_out or len(ended.codes) != len(task.tests):
        why = "the deadline came" if ended.timed_out else ended.output_tail[-300:] or ended.broken_limit
        raise EvaluationError(f"evaluator: task {task.id}: {len(ended.codes)} of {len(task.tests)} tests ran: {why}")
    parts = tuple((test.name, code == 0) for test, code in zip(task.tests, ended.codes, strict=True))
    return Grade(score=sum(passed for _, passed in parts) / len(parts), parts=parts, wall_s=ended.wall_s)


def prepare_workspace(folder: Path, task: Task) -> None:
    """Write the task's files into `folder`, which is made if need be. Raises TaskError for a path that leaves it."""
    # Closed to other users: a harness may leave set-uid files, and they belong to whoever runs gyre.
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.mkdir(exist_ok=True, mode=0o700)
    inside = folder.resolve()
    for name, content in task.files:
        path = (inside / name).resolve()
        if not path.is_relative_to(inside) or path == inside:
            raise TaskError(f"task {task.id}: file {name!r} is not inside the workspace; use a relative path")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
