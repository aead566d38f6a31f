"""The warm start trains through the Megatron trainer; here with a few steps only."""

import subprocess
import sys
from pathlib import Path

import pytest

from gyre.workers.policy_files import load_demonstrations

pytestmark = pytest.mark.stack

# One trainer a process: each warm start gets its own.
_SCRIPT = """
import sys
from gyre.errors import PolicyError
from gyre.workers.warm_start import Stage, warm_policy
stages = (
    Stage(name="copy", num_steps=3, rate=3e-3),
    Stage(name="one", num_steps=30, rate=3e-3, num_goals=1, checked=sys.argv[2] == "checked"),
)
try:
    print(warm_policy(sys.argv[1], 1, num_threads=1, stages=stages, show=lambda text: print(text, file=sys.stderr)))
except PolicyError as error:
    print("PolicyError:", error)
"""


def warm(folder: Path, kind: str = "plain") -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", _SCRIPT, str(folder), kind]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=240)


def test_same_seed_same_policy_and_it_has_learned(tmp_path: Path) -> None:
    first, second = warm(tmp_path / "a"), warm(tmp_path / "b")
    assert first.stdout == second.stdout
    assert len(first.stdout.strip()) == 64
    losses = [float(line.rsplit(" ", 1)[1]) for line in first.stderr.splitlines() if "loss" in line]
    assert losses[-1] < 0.5 * losses[0]
    assert {path.name for path in (tmp_path / "a").iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "demonstrations.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    copy, one = load_demonstrations(tmp_path / "a")
    assert (copy.stage, copy.num_steps, copy.num_demonstrations) == ("copy", 3, 0)
    assert (one.stage, one.num_steps, one.num_demonstrations) == ("one", 30, 30 * 16)
    assert 0 < one.num_targets < one.num_tokens and one.loss == pytest.approx(losses[-1], abs=1e-3)
    assert copy.digest != one.digest


def test_imprecise_copying_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    done = warm(tmp_path / "a", "checked")
    assert "PolicyError: warm start: seed 1: token accuracy is below" in done.stdout
    assert list(tmp_path.iterdir()) == []
