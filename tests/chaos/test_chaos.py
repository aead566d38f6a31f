"""Runs that are killed here and there and go on; `make chaos` has many more of them."""

import pytest

from tests.chaos.driver import TARGETS, plan, run_seeds

pytestmark = pytest.mark.timeout(600)
SEEDS = (34, 38)
"""Gateway, engine, then all at once; cell, scheduler, trainer, then a harness."""


def test_consecutive_seeds_kill_each_process_and_repeat_their_kills() -> None:
    assert {plan(seed)[0].target for seed in range(len(TARGETS))} == set(TARGETS)
    assert [plan(seed) for seed in range(50)] == [plan(seed) for seed in range(50)]
    assert len({str(plan(seed)) for seed in range(50)}) == 50


@pytest.mark.stack
@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_completes_whatever_is_killed_and_its_log_holds(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    root = tmp_path_factory.getbasetemp() / "chaos"
    root.mkdir(exist_ok=True)
    (outcome,) = run_seeds([seed], root)
    assert outcome.faults == []
    assert outcome.kills
