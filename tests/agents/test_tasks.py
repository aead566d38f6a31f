"""Every task is scored by really running its tests: 1.0 for the oracle, 0.0 for doing nothing."""

import subprocess
from pathlib import Path

import pytest

from gyre.agents.tasks import FAMILIES, GradedTest, Task, make_task, task_digest
from gyre.errors import TaskError

NUM_SEEDS = 200


def lay_out(task: Task, workspace: Path) -> None:
    workspace.mkdir(parents=True)
    for name, content in task.files:
        (workspace / name).write_text(content)


def run_all(commands: list[str], workspace: Path) -> list[int]:
    """Exit statuses of commands, each in a shell of its own."""
    script = "\n".join(f'sh -c "${{{number}}}" >&2; echo $?' for number in range(1, len(commands) + 1))
    done = subprocess.run(
        ["sh", "-c", script, "sh", *commands], cwd=workspace, capture_output=True, text=True, timeout=30, check=True
    )
    return [int(line) for line in done.stdout.split()]


def test_oracle_scores_one_and_nothing_scores_zero(tmp_path: Path) -> None:
    for seed in range(NUM_SEEDS):
        task = make_task("files", "heldout" if seed % 2 else "train", seed, seed % 7, 2 + seed % 4)
        assert len(task.tests) >= 4
        tests = [test.command for test in task.tests]
        lay_out(task, tmp_path / f"{seed}")
        assert all(rc != 0 for rc in run_all(tests, tmp_path / f"{seed}")), task
        assert run_all(list(task.solution), tmp_path / f"{seed}") == [0] * len(task.solution), task
        assert run_all(tests, tmp_path / f"{seed}") == [0] * len(tests), task


def test_commands_travel_as_json_strings_without_escapes() -> None:
    for index in range(500):
        for command in make_task("files", "train", 1, index, 3).solution:
            assert '"' not in command
            assert "\\" not in command


def test_same_arguments_same_task_and_no_shared_tasks() -> None:
    train = [make_task("files", "train", 1, index, 2) for index in range(300)]
    assert train == [make_task("files", "train", 1, index, 2) for index in range(300)]
    heldout = {make_task("files", "heldout", 1, index, 2).instruction for index in range(300)}
    assert len({task_digest(task) for task in train}) == 300
    assert not heldout & {task.instruction for task in train}


def test_digest_is_stable() -> None:
    assert task_digest(make_task("files", "train", 1, 0, 2)) == (
        "93215cbe87c6e75f6678a24aea77a07f5193b2ff9ead4c2af15bd390d061f54a"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nope", "train", 1, 0, 2), "no family 'nope'"),
        (("files", "test", 1, 0, 2), "no split 'test'"),
        (("files", "train", 1, 0, 0), "0 goals"),
        (("files", "train", 1, 0, 7), "at most 6"),
    ],
)
def test_arguments_that_name_no_task(arguments: tuple[str, str, int, int, int], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        make_task(*arguments)  # type: ignore[arg-type]


def test_a_task_that_cannot_be_graded_is_refused() -> None:
    with pytest.raises(TaskError, match="no graded tests"):
        Task(id="t", family="files", split="train", instruction="x", files=(), tests=())
    with pytest.raises(TaskError, match="not inside the workspace"):
        Task(
            id="t",
            family="files",
            split="train",
            instruction="x",
            files=(("../x", ""),),
            tests=(GradedTest(name="a", command="true"),),
        )


def test_every_family_makes_tasks_of_one_goal() -> None:
    for family in FAMILIES:
        assert make_task(family, "train", 0, 0, 1).tests
