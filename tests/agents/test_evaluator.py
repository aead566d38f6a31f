"""Scores come from exit codes that a graded workspace cannot forge; what cannot be graded has none."""

import asyncio
import shutil
import time
from pathlib import Path

import pytest

from gyre.agents.evaluator import Grade, grade, prepare_workspace
from gyre.agents.places import Limits
from gyre.agents.process import base_python
from gyre.agents.sandbox import Sandbox, check_sandbox
from gyre.agents.tasks import GradedTest, Task, make_task
from gyre.agents.unsandboxed import NoSandbox
from gyre.errors import EvaluationError, TaskError

MISSING = check_sandbox()
needs_sandbox = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def make(*commands: str, files: tuple[tuple[str, str], ...] = ()) -> Task:
    tests = tuple(GradedTest(name=f"t{n}", command=command) for n, command in enumerate(commands))
    return Task(id="t", family="files", split="train", instruction="Do", files=files, tests=tests)


def score(workspace: Path, *commands: str, **options: float) -> Grade:
    return asyncio.run(grade(Sandbox(), workspace, make(*commands), **options))


@needs_sandbox
def test_fraction_of_tests(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x\n")
    graded = score(tmp_path, "grep -qx x a", "test -e b", "grep -q x a && ! grep -q y a", "exit 3")
    assert graded.parts == (("t0", True), ("t1", False), ("t2", True), ("t3", False))
    assert graded.score == 0.5


@needs_sandbox
def test_oracle_scores_one_and_nothing_scores_zero(tmp_path: Path) -> None:
    sandbox = Sandbox()
    for index in range(6):
        task = make_task("files", "train", 1, index, 2)
        workspace = tmp_path / str(index)
        prepare_workspace(workspace, task)
        assert asyncio.run(grade(sandbox, workspace, task)).score == 0
        for command in task.solution:
            asyncio.run(sandbox.run(["sh", "-c", command], env={}, workspace=workspace, deadline_s=60))
        assert asyncio.run(grade(sandbox, workspace, task)).score == 1


@needs_sandbox
def test_workspace_is_not_changed_and_has_no_network(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    graded = score(tmp_path, "echo y > a", "echo y > b", "test $(wc -l < /proc/net/route) -gt 1", "echo y > /tmp/c")
    assert [passed for _, passed in graded.parts] == [False, False, False, True]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@needs_sandbox
def test_report_cannot_be_forged(tmp_path: Path) -> None:
    """A program of the workspace tries every way to the report of process 1 and to the later tests."""
    (tmp_path / "forge").write_text(
        "for fd in /proc/1/fd/* /proc/*/fd/*; do printf '0\\n0\\n0\\n' > $fd; done 2>/dev/null\n"
        "ls -l /proc/1/fd > /tmp/seen 2>&1; cat /proc/1/mem > /dev/null 2>> /tmp/seen\n"
        "kill -KILL 1; kill -STOP 1\n"
        "(setsid sh -c 'while :; do for p in /proc/[0-9]*; do kill -KILL ${p#/proc/}; done; done' &) >/dev/null 2>&1\n"
        "exit 1\n"
    )
    graded = score(tmp_path, "sh forge", "grep -q 'ermission denied' /tmp/seen && ! grep -q pipe /tmp/seen", "false")
    assert [passed for _, passed in graded.parts] == [False, True, False]
    ptrace = (
        "import ctypes; libc = ctypes.CDLL(None, use_errno=True); PTRACE_SEIZE = 0x4206;"
        " raise SystemExit(libc.ptrace(PTRACE_SEIZE, 1, 0, 0) == -1)"
    )
    (tmp_path / "ptrace.py").write_text(ptrace)
    assert score(tmp_path, f"{base_python()} -I ptrace.py").score == 0


@needs_sandbox
def test_what_a_test_leaves_running_is_gone_before_the_next(tmp_path: Path) -> None:
    graded = score(tmp_path, "setsid sleep 77 >/dev/null 2>&1 & exit 0", "! grep -aq sleep /proc/[0-9]*/comm")
    assert graded.score == 1


@needs_sandbox
def test_hanging_test_fails_and_the_others_count(tmp_path: Path) -> None:
    began = time.monotonic()
    graded = score(tmp_path, "mkfifo /tmp/f && cat /tmp/f", "sleep 100", "true", "yes", test_s=2.0)
    assert [passed for _, passed in graded.parts] == [False, False, True, False]
    assert time.monotonic() - began < 60


@needs_sandbox
def test_broken_limit_fails_its_test_only(tmp_path: Path) -> None:
    sandbox = Sandbox(limits=Limits(max_processes=40))
    bomb = "while :; do sleep 9 & done"
    graded = asyncio.run(grade(sandbox, tmp_path, make(bomb, "true")))
    assert [passed for _, passed in graded.parts] == [False, True]


@needs_sandbox
def test_shut_workspace_is_graded(tmp_path: Path) -> None:
    """A harness that takes its workspace's permissions away gets the score that it deserves, not another try."""
    workspace = tmp_path / "w"
    workspace.mkdir()
    workspace.chmod(0)
    assert score(workspace, "test -e a", "true").score == 0.5


@needs_sandbox
def test_failure_of_the_grader_is_no_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EvaluationError, match="task t"):
        score(tmp_path / "gone", "true")
    with pytest.raises(EvaluationError, match="was not started"):
        asyncio.run(grade(Sandbox(python="/usr/bin/false"), tmp_path, make("true")))
    monkeypatch.setattr("gyre.agents.evaluator._START_S", 2.0)
    with pytest.raises(EvaluationError, match="the deadline came"):
        asyncio.run(grade(_Slow(), tmp_path, make("true", "sleep 60", "true"), test_s=0.1))


class _Slow(Sandbox):
    """A grader whose own seconds for a test are longer than its deadline."""

    async def run(self, argv, **options):  # type: ignore[no-untyped-def,override]
        return await super().run(argv, **(options | {"grade_s": 30.0}))


def test_task_without_tests_cannot_be_graded(tmp_path: Path) -> None:
    class Empty:
        id, tests, files, folder = "t", (), (), None

    with pytest.raises(TaskError, match="no graded tests"):
        asyncio.run(grade(NoSandbox(), tmp_path, Empty()))  # type: ignore[arg-type]


def test_grading_without_a_sandbox(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x\n")
    graded = asyncio.run(grade(NoSandbox(), tmp_path, make("grep -q x a", "sleep 50", "true"), test_s=2.0))
    assert [passed for _, passed in graded.parts] == [True, False, True]
    shutil.rmtree(tmp_path)
    with pytest.raises(EvaluationError):
        asyncio.run(grade(NoSandbox(), tmp_path, make("true")))


def test_files_stay_inside_the_workspace(tmp_path: Path) -> None:
    class Escaping:
        id, tests, folder = "t", (GradedTest(name="n", command="true"),), None

        def __init__(self, name: str) -> None:
            self.files = ((name, "x"),)

    workspace = tmp_path / "w"
    for name in ("../out", "/etc/gyre-out", "a/../../out", ".", ""):
        with pytest.raises(TaskError, match="not inside"):
            prepare_workspace(workspace, Escaping(name))  # type: ignore[arg-type]
    (workspace / "link").symlink_to(tmp_path)
    with pytest.raises(TaskError, match="not inside"):
        prepare_workspace(workspace, Escaping("link/out"))  # type: ignore[arg-type]
    prepare_workspace(workspace, make("true", files=(("deep/in/side.txt", "x"),)))
    assert (workspace / "deep/in/side.txt").read_text() == "x"
    assert not (tmp_path / "out").exists()
