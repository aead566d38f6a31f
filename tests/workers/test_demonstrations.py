"""Demonstrations are what the reference harness would really have recorded."""

from pathlib import Path

import numpy as np
import pytest

from gyre.agents.checkpoint import load_renderer
from gyre.agents.reference_harness import run_command
from gyre.agents.renderer import Renderer
from gyre.errors import TaskError
from gyre.workers.demonstrations import make_demonstration, make_messages, make_rows, simulate
from gyre.workers.tiny_policy import init_policy


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
