"""Shell. The score of a workspace: task, workspace -> graded tests in a sandbox of their own -> Grade.

Invariant: a score comes from exit codes that the kernel gave to process 1 of that sandbox, which no graded
program can see into or write to; or, for a task in a folder, from what its verifier reported (`verifier.py`), on a
copy of the workspace. If one of them is missing for any reason, that is an EvaluationError and no score: never 0.
A graded test that hangs or breaks a limit has failed, since the workspace made it so.
"""

import asyncio
import tempfile
from functools import cache
from importlib import metadata
from pathlib import Path, PurePosixPath

import msgspec

from gyre.agents.places import DEFAULT_ENV, AnySandbox, Bind
from gyre.agents.task_folder import lay_out, put_back
from gyre.agents.tasks import FolderTask, Task
from gyre.agents.verifier import MAX_REPORT_BYTES, REPORTS, Grade, read_reports
from gyre.errors import EvaluationError, GraderKilled, GyreError, TaskError

_START_S = 20.0
"""For the start of the sandbox on a busy machine, beside the seconds of the tests."""
_SIGNALLED = 128
"""A shell tells of a program that a signal ended with this and the signal's number."""
_LIBRARY = "/opt/gyre"
GRADING_PACKAGES = ("pytest", "pytest-json-ctrf", "pluggy", "iniconfig", "packaging", "pygments")
"""What a verifier may import beside the standard library: Harbor's usual pytest with a CTRF report."""


async def grade(sandbox: AnySandbox, workspace: Path, task: Task, *, test_s: float = 10.0) -> Grade:
    """Run every graded test in `workspace`, without network, for `test_s` seconds each.

    The workspace is read-only, but for a task in a folder: its verifier may change what it was given, so give it a
    copy. Raises EvaluationError when there is no score, TaskError for a task without tests.
    """
    try:
        # The harness may have shut its own workspace; that must not stop the grading.
        await asyncio.to_thread(workspace.chmod, 0o700)
        if task.folder is not None:
            return await _verify(sandbox, workspace, task.folder)
        if not task.tests:
            raise TaskError(f"task {task.id}: no graded tests: it has no score; give it at least one")
        ended = await sandbox.run(
            [test.command for test in task.tests],
            env={},
            workspace=workspace,
            read_only=True,
            grade_s=test_s,
            deadline_s=_START_S + test_s * len(task.tests),
        )
    except (TaskError, GraderKilled):
        raise
    except (GyreError, OSError) as error:
        raise EvaluationError(f"evaluator: task {task.id}: {error}") from error
    if ended.timed_out or len(ended.codes) != len(task.tests):
        why = "the deadline came" if ended.timed_out else ended.output_tail[-300:] or ended.broken_limit
        raise EvaluationError(f"evaluator: task {task.id}: {len(ended.codes)} of {len(task.tests)} tests ran: {why}")
    parts = tuple((test.name, code == 0) for test, code in zip(task.tests, ended.codes, strict=True))
    return Grade(score=sum(passed for _, passed in parts) / len(parts), parts=parts, wall_s=ended.wall_s)


async def _verify(sandbox: AnySandbox, workspace: Path, folder: FolderTask) -> Grade:
    """Run `tests/test.sh` where it finds the workspace, `/tests` and `/logs/verifier`, and read what it reports."""
    await asyncio.to_thread(put_back, folder, workspace, folder.protected)
    # Beside the workspace, so that it goes with what a dispatcher that was killed was grading.
    with tempfile.TemporaryDirectory(prefix=f".{workspace.name}-verifier-", dir=workspace.parent) as logs:
        reports = Path(logs) / "verifier"
        reports.mkdir()
        ended = await within(sandbox, folder.memory).run(
            ["bash", "/tests/test.sh"],
            env=folder_env(sandbox.python) | {"PYTHONPATH": _LIBRARY},
            workspace=workspace,
            workdir=folder.workdir,
            binds=(
                Bind(source=Path(folder.path) / "tests", target="/tests"),
                Bind(source=Path(logs), target="/logs", writable=True),
                *_library(),
            ),
            deadline_s=folder.verifier_s,
        )
        found = {name: content for name in REPORTS if (content := _read(reports / name)) is not None}
    if ended.timed_out or ended.broken_limit:
        why = (
            f"more {ended.broken_limit} than the limit"
            if ended.broken_limit
            else f"longer than {folder.verifier_s:g} s"
        )
        raise EvaluationError(f"verifier: stopped: {why}: {ended.output_tail.strip()[-300:] or 'it said nothing'}")
    try:
        grade = read_reports(found, folder.num_tests)
    except EvaluationError as error:
        is_killed = not found and (ended.code < 0 or ended.code > _SIGNALLED)
        kind = GraderKilled if is_killed else EvaluationError
        raise kind(f"{error}; it said: {ended.output_tail.strip()[-500:] or 'nothing'}") from None
    return Grade(score=grade.score, parts=grade.parts, wall_s=ended.wall_s)


async def solve(sandbox: AnySandbox, workspace: Path, folder: FolderTask, name: str = "solve.sh") -> str:
    """Run a solution of a task in a folder in `workspace`; what went wrong, or nothing. Raises SandboxError."""
    solution = Path(folder.path) / "solution"
    if not (solution / name).is_file():
        raise TaskError(
            f"task {solution.parent.name}: solution/{name} is missing: nobody knows whether it can be solved"
        )
    ended = await sandbox.run(
        ["bash", f"/solution/{name}"],
        env=folder_env(sandbox.python),
        workspace=workspace,
        workdir=folder.workdir,
        binds=(Bind(source=solution, target="/solution"),),
        deadline_s=folder.agent_s,
    )
    return f"longer than {folder.agent_s:g} s" if ended.timed_out else ended.failure


def within(sandbox: AnySandbox, memory: int) -> AnySandbox:
    """The same, with no more than this for all processes together; 0: as it is."""
    if not 0 < memory < sandbox.limits.max_memory:
        return sandbox
    return sandbox.with_limits(msgspec.structs.replace(sandbox.limits, max_memory=memory))


def folder_env(python: str) -> dict[str, str]:
    """The agent and the verifier of a task in a folder find the same `python3`: that of the sandbox."""
    first = [str(PurePosixPath(python).parent)] if python.startswith("/") else []
    return {"PATH": ":".join([*first, DEFAULT_ENV["PATH"]])}


def prepare_workspace(folder: Path, task: Task) -> None:
    """Write the task's files into `folder`, which is made if need be. Raises TaskError for a path that leaves it."""
    # Closed to other users: a harness may leave set-uid files, and they belong to whoever runs gyre.
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.mkdir(exist_ok=True, mode=0o700)
    if task.folder is not None:
        lay_out(task.folder, folder)
        return
    inside = folder.resolve()
    for name, content in task.files:
        path = (inside / name).resolve()
        if not path.is_relative_to(inside) or path == inside:
            raise TaskError(f"task {task.id}: file {name!r} is not inside the workspace; use a relative path")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


@cache
def _library() -> tuple[Bind, ...]:
    """Each module of the grading packages, and their metadata, by which pytest finds its plugins."""
    binds = []
    for package in GRADING_PACKAGES:
        try:
            found = metadata.distribution(package)
        except metadata.PackageNotFoundError:
            raise EvaluationError(f"evaluator: {package} is not installed: pip install {package}") from None
        names = {path.parts[0] for path in found.files or () if path.parts[0] not in ("..", "__pycache__")}
        binds += [
            Bind(source=Path(str(found.locate_file(name))), target=f"{_LIBRARY}/{name}") for name in sorted(names)
        ]
    return tuple(binds)


def _read(path: Path) -> bytes | None:
    """A report, unless it is a link or no file: the verifier ran programs of the agent."""
    if path.is_symlink() or not path.is_file():
        return None
    if path.stat().st_size > MAX_REPORT_BYTES:
        raise EvaluationError(f"verifier: {path.name}: {path.stat().st_size} bytes, at most {MAX_REPORT_BYTES}")
    return path.read_bytes()
