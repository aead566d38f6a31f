"""A run on tasks in folders with a short deadline, and every command and query of docs/tasks.md on it."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tasks.md").read_text()
CONFIG = """
seed: 3
tasks: {path: examples/tasks}
harness:
  name: command
  command: [sh, -c, "sed -i 's/.days + 1/.days/' booking.py 2> /dev/null; sleep 60"]
  deadline_s: 8
grading: {milestones_s: [1.5]}
policy: {path: policy, warm_start: false}
pipeline: {num_steps: 1, groups_per_step: 1, executions_per_group: 2}
log: {min_free_gb: 0}
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tasks")
    (directory / "examples").symlink_to(ROOT / "examples")
    (directory / "tasks.yaml").write_text(CONFIG)
    done = call("gyre run tasks.yaml --dir runs/tasks", directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


def call(command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "gyre.cli", *shlex.split(command)[1:]]
    return subprocess.run(argv, cwd=directory, capture_output=True, text=True, timeout=400, check=False)


def test_the_commands_of_the_page(directory: Path) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.S)
    commands = [line for block in blocks for line in block.splitlines() if line.startswith("gyre ")]
    assert len(commands) >= 3
    for command in commands:
        done = call(command, directory)
        assert done.returncode == 0, done.stdout + done.stderr


def test_timeouts_carry_progress_and_the_queries_of_the_page_show_it(directory: Path) -> None:
    block, curriculum = (re.sub(r"--.*", "", found) for found in re.findall(r"```sql\n(.*?)```", PAGE, re.S))
    timeouts, milestones = (query.strip() for query in block.split(";")[:2])
    found = call(f"gyre sql runs/tasks --json {shlex.quote(timeouts)}", directory)
    assert found.returncode == 0, found.stderr
    assert '"timeouts":2' in found.stdout.replace(" ", "")
    assert '"with_progress":2' in found.stdout.replace(" ", "")
    found = call(f"gyre sql runs/tasks --json {shlex.quote(milestones)}", directory)
    assert found.stdout.count('"after_s"') == 2, found.stdout
    found = call(f"gyre sql runs/tasks --json {shlex.quote(curriculum.strip().rstrip(';'))}", directory)
    assert found.returncode == 0, found.stderr


def test_a_finished_run_is_graded_with_other_tests(directory: Path) -> None:
    """From its snapshots: the rows of `regrades` are new, scores and batches are what they were."""
    ask = "gyre sql runs/tasks --json"
    scores = f'{ask} "select execution, score from executions order by all"'
    before = call(scores, directory).stdout
    names = re.findall(r'"task":"([^"]+)"', call(f'{ask} "select distinct task from groups"', directory).stdout)
    for name in names:
        shutil.copytree(directory / "examples/tasks" / name, directory / "others" / name)
        (directory / "others" / name / "task.toml").write_text("")
        (directory / "others" / name / "tests/test.sh").write_text("echo 0.125 > /logs/verifier/reward.txt\n")
    done = call("gyre grade runs/tasks --with others", directory)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "2 of 2 graded with others, mean 0.125"
    rows = call("gyre sql runs/tasks --json \"select grader, score from regrades where grader = 'others'\"", directory)
    assert rows.stdout.splitlines() == ['{"grader":"others","score":0.125}'] * 2
    assert call(scores, directory).stdout == before != ""
    shutil.rmtree(directory / "others" / names[0])
    shutil.copytree(directory / "examples/tasks/ini-format", directory / "others/another")
    done = call("gyre grade runs/tasks --with others", directory)
    assert done.returncode == 1
    assert f"--with others: it has no task {names[0]}, which the run has" in done.stderr


def test_the_run_replays(directory: Path) -> None:
    done = call("gyre replay runs/tasks --verify", directory)
    assert done.returncode == 0, done.stdout + done.stderr
