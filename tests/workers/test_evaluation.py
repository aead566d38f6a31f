"""The config of an evaluation, and what is refused before anything starts."""

from typing import Any

import pytest

from gyre.config import Config, load_config
from gyre.errors import ConfigError
from gyre.workers.evaluation import evaluation_config

ASKED: dict[str, Any] = {
    "policy": "p", "num_tasks": 8, "seed": 5, "split": "heldout", "temperature": 0.0, "num_samples": 1,
}  # fmt: skip


def test_it_is_a_run_without_steps_that_keeps_what_is_not_asked_for() -> None:
    base = load_config("tasks: {num_goals: 3}\nharness: {name: mini-swe-agent, max_turns: 5}")
    config = evaluation_config(base, **ASKED)
    assert config.pipeline.num_steps == 0
    assert (config.policy.path, config.policy.init) == ("p", False)
    assert (config.harness.name, config.harness.max_turns, config.tasks.num_goals) == ("mini-swe-agent", 5, 3)
    assert (config.evaluation.num_tasks, config.evaluation.seed, config.evaluation.temperatures) == (8, 5, (0.0,))
    assert evaluation_config(base, **ASKED | {"harness": "reference"}).harness.max_turns == 5


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"num_samples": 2, "temperature": 1.0, "pass_at": 3}, "--pass-at 3 .* --samples 3"),
        ({"num_samples": 2}, "greedy"),
        ({"num_tasks": 0}, "at least 1"),
        ({"temperature": -1.0}, "--temperature -1"),
        ({"split": "test"}, "heldout or train"),
        ({"seed": -1}, r"gyre eval: evaluation\.seed: Expected `int` >= 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        evaluation_config(Config(), **ASKED | asked)
