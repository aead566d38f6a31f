"""Demonstrations are what the reference harness would really have recorded."""

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gyre.agents.checkpoint import load_renderer
from gyre.agents.reference_harness import Agent, first_messages, run_command
from gyre.agents.renderer import Renderer
from gyre.agents.tasks import make_task
from gyre.errors import TaskError
from gyre.workers.demonstrations import (
    FINAL_REPLY,
    TEAM_TURNS,
    make_demonstration,
    make_messages,
    make_rows,
    make_team_history,
    simulate,
)
from gyre.workers.tiny_policy import init_policy

NUM_GOALS = 4


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder = tmp_path_factory.mktemp("policies") / "tiny"
    init_policy(folder, 1, num_demonstrations=300)
    return load_renderer(folder)


@pytest.mark.parametrize("noise", [0.0, 0.7])
def test_simulated_commands_do_what_the_shell_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noise: float
) -> None:
    kinds = set()
    for index in range(120):
        demonstration = make_demonstration("files", 3, index, 3, noise)
        workspace = tmp_path / f"{index}"
        workspace.mkdir()
        for name, content in demonstration.task.files:
            (workspace / name).write_text(content)
        monkeypatch.chdir(workspace)
        files = dict(demonstration.task.files)
        told = [m["content"] for m in make_messages(demonstration) if m["role"] == "tool"]
        assert told == [run_command(command, 10) for command in demonstration.commands], demonstration
        for command in demonstration.commands:
            simulate(command, files)
            kinds.add(tuple(word for word in command.split() if not word[0].isalpha() or word in ("mv", "cp", "cat")))
        assert files == {path.name: path.read_text() for path in workspace.iterdir()}, demonstration
    assert len(kinds) >= 7


def test_noise_is_as_frequent_as_asked() -> None:
    made = [make_demonstration("files", 1, index, 2, 0.5) for index in range(1000)]
    clean = sum(demonstration.commands == demonstration.task.solution for demonstration in made)
    assert 200 < clean < 300
    assert made == [make_demonstration("files", 1, index, 2, 0.5) for index in range(1000)]
    assert all(demonstration.task.split == "train" for demonstration in made)


def test_targets_are_what_the_assistant_says(renderer: Renderer) -> None:
    demonstration = make_demonstration("files", 1, 0, 2)
    (row,) = make_rows(renderer, [make_messages(demonstration)])
    said = renderer.tokenizer.decode(row.ids_T[row.target_T].tolist(), skip_special_tokens=False)
    calls = [
        f'<tool_call>\n{{"name": "bash", "arguments": {{"command": "{command}"}}}}\n</tool_call><|im_end|>'
        for command in demonstration.commands
    ]
    assert said == "".join([*calls, "Done.<|im_end|>"])
    assert not row.target_T[0]
    starts = np.flatnonzero(np.diff(row.target_T.astype(int)) == 1) + 1
    for start in starts:
        reply = row.ids_T[start : start + int(np.argmin(row.target_T[start:]))].tolist()
        assert renderer.parse_reply(reply).ok


def test_an_unknown_command_is_refused() -> None:
    with pytest.raises(TaskError, match="no known shape"):
        simulate("ls", {})
    with pytest.raises(TaskError, match="no file 'a'"):
        simulate("rm a", {})


class Oracle:
    """Answers as the demonstration does whose history it is asked to go on with."""

    def __init__(self, index: int) -> None:
        size = NUM_GOALS + -(-NUM_GOALS // TEAM_TURNS)
        self.histories = [make_team_history("files", 3, index, NUM_GOALS, which=which) for which in range(size)]
        self.purposes: list[str] = []

    def reply(self, messages: list[Any], purpose: str = "") -> Any:
        self.purposes.append(purpose)
        said = [(m["role"], m.get("content"), m.get("tool_calls", [])) for m in messages]
        for history in self.histories:
            known = [(m["role"], m.get("content"), m.get("tool_calls", [])) for m in history]
            if known[: len(said)] == said:
                return history[len(said)]
        raise AssertionError(f"no demonstration begins like this: {said}")


@pytest.mark.parametrize("index", range(5))
def test_demonstrations_of_a_team_are_what_its_harness_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    task = make_task("files", "train", 3, index, NUM_GOALS)
    for name, content in task.files:
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    agent = Agent({"OPENAI_BASE_URL": "http://nowhere/v1", "GYRE_TEAM": "1", "GYRE_COMPACT_AFTER": str(TEAM_TURNS)})
    agent.client = oracle = Oracle(index)  # type: ignore[assignment]
    assert agent.work(first_messages(task.instruction)) == FINAL_REPLY
    assert oracle.purposes.count("compaction") == 2 and oracle.purposes.count("subagent") >= 2 * NUM_GOALS
    for graded in task.tests:
        assert subprocess.run(["sh", "-c", graded.command], check=False).returncode == 0, graded
