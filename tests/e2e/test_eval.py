"""`gyre eval` with everything real: its executions are on a log of its own, and nothing is trained."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.timeout(400)]

CONFIG = """
harness: {max_turns: 2, max_concurrent: 4}
sampling: {max_tokens: 16}
log: {min_free_gb: 0}
"""


def gyre(*args: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "gyre.cli", *args], cwd=cwd, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == code, f"gyre {' '.join(args)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random policy, evaluated at three tasks with two samples each."""
    directory = tmp_path_factory.mktemp("eval")
    gyre("policy", "init", "policy", "--random", cwd=directory)
    (directory / "limits.yaml").write_text(CONFIG)
    done = gyre(
        "eval", "policy", "--config", "limits.yaml", "--tasks", "3", "--samples", "2", "--temperature", "1",
        "--dir", "runs/one", "--json", cwd=directory,
    )  # fmt: skip
    (directory / "one.json").write_text(done.stdout)
    return directory


def test_figures_are_one_json_object_and_stand_in_the_summary(evaluated: Path) -> None:
    figures = json.loads((evaluated / "one.json").read_text())
    assert (figures["tasks"], figures["executions"], figures["missing"]) == (3, 6, 0)
    assert set(figures["pass_at"]) == {"1", "2"}
    assert figures["score_interval"][0] <= figures["score"] <= figures["score_interval"][1]
    summary = json.loads((evaluated / "runs/one/summary.json").read_text())
    assert summary["state"] == "completed"
    assert summary["evaluations"][0]["score"] == figures["score"]


def test_nothing_was_trained_and_the_log_verifies(evaluated: Path) -> None:
    summary = json.loads((evaluated / "runs/one/summary.json").read_text())
    assert (summary["steps"], summary["version"], summary["switches"]) == (0, 0, 1)
    asked = gyre("sql", "runs/one", "select distinct purpose from groups", "--json", cwd=evaluated)
    assert json.loads(asked.stdout) == {"purpose": "eval"}
    gyre("replay", "runs/one", "--verify", cwd=evaluated)


def test_a_checkpoint_of_a_run_brings_the_config_of_its_run(evaluated: Path) -> None:
    training = """
harness: {max_turns: 2, max_concurrent: 4}
sampling: {max_tokens: 16}
policy: {path: policy, init: false}
pipeline: {num_steps: 1, groups_per_step: 1, executions_per_group: 2}
log: {min_free_gb: 0}
"""
    (evaluated / "train.yaml").write_text(training)
    gyre("run", "train.yaml", "--dir", "runs/trained", cwd=evaluated)
    refused = gyre("eval", "runs/trained", "--harness", "nope", "--dir", "runs/after", cwd=evaluated, code=1)
    assert "there is no harness 'nope'" in refused.stderr
    assert not (evaluated / "runs/after").exists(), "nothing was exported before"
    done = gyre("eval", "runs/trained", "--tasks", "1", "--dir", "runs/after", "--json", cwd=evaluated)
    figures = json.loads(done.stdout)
    assert (figures["step"], figures["executions"]) == (1, 1)
    asked = gyre("sql", "runs/after", "select config from runs", "--json", cwd=evaluated)
    config = json.loads(json.loads(asked.stdout)["config"])
    assert (config["sampling"]["max_tokens"], config["pipeline"]["num_steps"]) == (16, 0)
    assert (evaluated / "runs/after/policy/model.safetensors").exists()
    summary = json.loads((evaluated / "runs/after/summary.json").read_text())
    assert summary["policy_of"] == {"run": "trained", "step": 1}
    lines = gyre("eval", "--compare", "runs/after", "runs/after", cwd=evaluated).stdout.splitlines()
    assert lines[0] == "before      runs/after: step 1 of trained, reference, greedy"


def test_the_same_tasks_compare_and_others_do_not(evaluated: Path) -> None:
    found = json.loads(gyre("eval", "--compare", "runs/one", "runs/one", "--json", cwd=evaluated).stdout)
    assert found["difference"] == {"mean": 0.0, "interval": [0.0, 0.0]}
    assert found["tasks"] == 3
    lines = gyre("eval", "--compare", "runs/one", "runs/one", cwd=evaluated).stdout.splitlines()
    assert lines[:2] == [f"{which:<12}runs/one: policy, reference, sampled at 1" for which in ("before", "after")]
    gyre("eval", "policy", "--config", "limits.yaml", "--tasks", "2", "--dir", "runs/two", cwd=evaluated)
    refused = gyre("eval", "--compare", "runs/one", "runs/two", cwd=evaluated, code=1)
    assert "not the same tasks" in refused.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("nowhere",), "neither a policy"),
        (("policy", "--pass-at", "2"), "--samples 2"),
        (("policy", "--step", "3"), "not a run"),
        (("runs/one", "--step", "7"), "no checkpoint of step 7"),
        (("--compare", "policy", "runs/one"), "no run here"),
        (("bare",), "chat template"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_one_line(evaluated: Path, args: tuple[str, ...], said: str) -> None:
    bare = evaluated / "bare"
    if not bare.exists():
        bare.mkdir()
        for path in (evaluated / "policy").iterdir():
            (bare / path.name).write_bytes(path.read_bytes())
        # Turns without an end: nobody could tell where a reply is over.
        (bare / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    refused = gyre("eval", *args, cwd=evaluated, code=1)
    assert said in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1
