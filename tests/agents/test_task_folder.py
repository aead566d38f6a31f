"""Tasks in the Harbor format: what a folder says, what is wrong with it, and where its files go."""

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gyre.agents.evaluator import grade, prepare_workspace
from gyre.agents.sandbox import Sandbox
from gyre.agents.task_check import check_task
from gyre.agents.task_folder import load_task, load_tasks, original, put_back
from gyre.errors import EvaluationError, TaskError

EXAMPLES = Path(__file__).parents[2] / "examples/tasks"
needs_sandbox = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


def make(root: Path, **files: str) -> Path:
    """A task whose files are given by path, or by the short names below."""
    folder = root / "task"
    texts = {"task.toml": "", "instruction.md": "Do it.\n", "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n"}
    for name, text in (texts | files).items():
        path = folder / {
            "toml": "task.toml",
            "instruction": "instruction.md",
            "dockerfile": "environment/Dockerfile",
        }.get(name, {"test": "tests/test.sh", "solve": "solution/solve.sh"}.get(name, name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_limits_and_resources(tmp_path: Path) -> None:
    folder = make(
        tmp_path,
        toml='version = "1.0"\n[metadata]\nauthor_name = "x"\n[metadata.gyre]\nnum_tests = 5\nprotected = ["a"]\n'
        '[agent]\ntimeout_sec = 90\n[verifier]\ntimeout_sec = 7.5\n[environment]\nmemory = "2G"\ncpus = 2\n',
    )
    found = load_task(folder).folder
    assert found is not None
    assert (found.agent_s, found.verifier_s, found.memory) == (90, 7.5, 2 << 30)
    assert (found.num_tests, found.protected) == (5, ("a",))


@needs_sandbox
def test_the_memory_of_the_task_holds_for_its_verifier(tmp_path: Path) -> None:
    eat = "python3 -c \"import time; x=bytearray(300 << 20); x[::4096]=b'x'*len(x[::4096]); time.sleep(9)\""
    task = load_task(make(tmp_path, toml="[environment]\nmemory_mb = 100\n", test=eat))
    prepare_workspace(tmp_path / "w", task)
    with pytest.raises(EvaluationError, match="more memory than the limit"):
        asyncio.run(grade(Sandbox(), tmp_path / "w", task))


def test_any_file_changes_the_digest(tmp_path: Path) -> None:
    folder = make(tmp_path)
    before = load_task(folder).folder
    (folder / "tests/test.sh").write_text("exit 1\n")
    after = load_task(folder).folder
    assert before is not None and after is not None
    assert before.digest != after.digest


def test_the_dockerfile_says_what_goes_where(tmp_path: Path) -> None:
    folder = make(
        tmp_path,
        dockerfile="FROM x\nWORKDIR /app\nRUN true\nCOPY src/ /app/src/\nCOPY --chown=1 a.txt \\\n  b.txt ./\n",
    )
    environment = folder / "environment"
    (environment / "src").mkdir(exist_ok=True)
    (environment / "src/m.py").write_text("m")
    for name in ("a.txt", "b.txt"):
        (environment / name).write_text(name)
    task = load_task(folder)
    assert task.folder is not None
    assert task.folder.workdir == "/app"
    workspace = tmp_path / "w"
    prepare_workspace(workspace, task)
    assert {str(p.relative_to(workspace)) for p in workspace.rglob("*") if p.is_file()} == {
        "src/m.py",
        "a.txt",
        "b.txt",
    }
    assert original(task.folder, "src/m.py") == environment / "src/m.py"


WRONG = {
    "a broken toml": ({"toml": "[agent\n"}, "task.toml: Expected"),
    "a wrong type": ({"toml": '[agent]\ntimeout_sec = "long"\n'}, "agent.timeout_sec: Expected"),
    "no time": ({"toml": "[verifier]\ntimeout_sec = 0\n"}, "verifier.timeout_sec"),
    "a wrong key of gyre's own": ({"toml": "[metadata.gyre]\nnum_test = 1\n"}, "num_test"),
    "a path that leads out": ({"toml": '[metadata.gyre]\nprotected = ["../x"]\n'}, "protected: '../x'"),
    "a size that is none": ({"toml": '[environment]\nmemory = "much"\n'}, "environment.memory"),
    "copy from elsewhere": ({"dockerfile": "COPY ../x y\n"}, r"line 1: \.\./x: not in environment"),
    "copy to elsewhere": ({"dockerfile": "FROM x\nCOPY Dockerfile /etc/\n"}, "line 2: /etc/ is not in WORKDIR"),
    "copy from a stage": ({"dockerfile": "COPY --from=b a c\n"}, "not supported"),
    "services": ({"environment/docker-compose.yaml": "x"}, "container runtime"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(tmp_path: Path, name: str) -> None:
    files, reason = WRONG[name]
    with pytest.raises(TaskError, match=reason):
        load_task(make(tmp_path, **files))


@pytest.mark.parametrize("name", ["instruction.md", "tests/test.sh"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = make(tmp_path)
    (folder / name).unlink()
    with pytest.raises(TaskError, match=f"{name} is missing"):
        load_task(folder)


def test_a_directory_without_tasks(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"no folder in it has a task\.toml"):
        load_tasks(tmp_path)


def test_protected_paths_are_put_back_and_no_link_leads_out(tmp_path: Path) -> None:
    folder = make(tmp_path, dockerfile="WORKDIR /workspace\nCOPY w/ ./\n", **{"environment/w/pkg/test_a.py": "good"})
    task = load_task(folder)
    assert task.folder is not None
    outside, workspace = tmp_path / "outside", tmp_path / "w"
    outside.mkdir()
    prepare_workspace(workspace, task)
    shutil.rmtree(workspace / "pkg")
    (workspace / "pkg").symlink_to(outside)
    (workspace / "new").mkdir()
    put_back(task.folder, workspace, ("pkg/test_a.py", "new"))
    assert not list(outside.iterdir())
    assert (workspace / "pkg/test_a.py").read_text() == "good"
    assert not (workspace / "new").exists()


@needs_sandbox
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 3", "no reward.txt"),
        ("echo nan > /logs/verifier/reward.txt", "not in"),
        ("ln -s /etc/passwd /logs/verifier/reward.txt", "no reward.txt"),
        ("sleep 600", "longer than 1 s"),
        ("head -c 9000000 /dev/zero > /logs/verifier/reward.txt", "bytes, at most"),
    ],
)
def test_a_verifier_that_fails_gives_no_score(tmp_path: Path, script: str, reason: str) -> None:
    task = load_task(make(tmp_path, test=script, toml=f"[verifier]\ntimeout_sec = {1 if 'longer' in reason else 60}\n"))
    workspace = tmp_path / "w"
    prepare_workspace(workspace, task)
    with pytest.raises(EvaluationError, match=reason):
        asyncio.run(grade(Sandbox(), workspace, task))


@needs_sandbox
def test_a_check_says_what_is_wrong_with_a_task(tmp_path: Path) -> None:
    checked = asyncio.run(check_task(load_task(make(tmp_path, solve="true")), Sandbox()))
    assert not checked.ok
    assert "doing nothing scores 1, task.toml says 0" in checked.line()


def test_twelve_tasks_are_shipped_each_with_its_solutions() -> None:
    tasks = load_tasks(EXAMPLES)
    assert len(tasks) >= 12
    for task in tasks:
        assert task.folder is not None
        assert task.folder.num_tests >= 5
        assert len(list((Path(task.folder.path) / "solution").glob("partial_*.sh"))) == 3


def check(directory: Path) -> tuple[int, list[str]]:
    """What `gyre tasks check` ends with and says."""
    argv = [sys.executable, "-m", "gyre.cli", "tasks", "check", str(directory)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=500, check=False)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


@needs_sandbox
@pytest.mark.timeout(600)
def test_the_shipped_tasks_grade_right() -> None:
    """Nothing, three partial solutions and the oracle of each: they rise from what nothing is worth to 1."""
    code, (*lines, last) = check(EXAMPLES)
    assert (code, last) == (0, f"{len(load_tasks(EXAMPLES))} checked, 0 wrong"), lines
    for line in lines:
        for said in ("empty", "partial_1", "partial_2", "partial_3", "solve 1.00", " s  ok"):
            assert said in line


@needs_sandbox
def test_a_check_goes_on_behind_a_task_that_is_broken(tmp_path: Path) -> None:
    """Each is told once, with its reason, in text that a terminal can show."""
    shown = "head -c 900 /dev/urandom; printf '\\033[2J\\001'"
    make(tmp_path / "a", toml="[agent\n")
    make(tmp_path / "b", test=shown)
    make(tmp_path / "c", test="echo '\033[31m'five; echo -1 > /logs/verifier/reward.txt", solve="true")
    make(tmp_path / "d", solve="echo > it", test="test ! -e /workspace/it; echo $? > /logs/verifier/reward.txt")
    make(tmp_path / "e")
    for name in "abcde":
        (tmp_path / name / "task").rename(tmp_path / f"task-{name}")
    (tmp_path / "task-e/tests/test.sh").unlink()
    code, lines = check(tmp_path)
    found = {line.split()[0]: line for line in lines}
    assert (code, lines[-1]) == (1, "5 checked, 4 wrong")
    assert "task.toml: Expected" in found["task-a"]
    assert "empty: evaluator: task task-b: verifier: no reward.txt" in found["task-b"]
    assert found["task-b"].count("it said: what is no text") == 1
    assert (
        "empty, solve.sh: evaluator: task task-c: verifier: reward -1.0 is not in [0, 1]; it said:" in found["task-c"]
    )
    assert found["task-d"].endswith("ok")
    assert "tests/test.sh is missing" in found["task-e"]
    assert all(line.isprintable() for line in lines)
