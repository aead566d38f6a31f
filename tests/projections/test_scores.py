import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.projections.recorded_batches import MEANINGS
from gyre.projections.scores import Ending, Flags, advantages, flags, reward

IN = (True, True)
BASELINE_ONLY = (True, False)
OUT = (False, False)


CASES = [
    (Ending(finished="completed", score=0.5), "drop", IN, ""),
    (Ending(finished="completed", score=0.0), "drop", IN, ""),
    (Ending(finished="timed_out", timed_out="harness", score=0.5), "drop", IN, ""),
    (Ending(finished="harness_failed", score=0.25), "drop", IN, ""),
    (Ending(finished="timed_out", timed_out="overall", score=0.5), "paper", OUT, "overall_timeout"),
    (Ending(finished="interrupted", score=0.5), "paper", OUT, "interrupted"),
    (Ending(finished="completed", score=math.nan), "paper", OUT, "invalid_score"),
    (Ending(finished="completed", score=math.inf), "drop", OUT, "invalid_score"),
    (Ending(dropped="no image"), "drop", OUT, "no_product"),
    (Ending(dropped="no image"), "paper", BASELINE_ONLY, "no_product"),
    (Ending(finished="completed", dropped="tests do not start"), "paper", OUT, "evaluation_failed"),
    (Ending(finished="completed"), "paper", OUT, "no_score"),
]


def test_the_page_has_the_table() -> None:
    """Row by row: its flags and its reason, of which a case above is an example."""
    page = (Path(__file__).parents[2] / "docs/tasks.md").read_text()
    rows = re.findall(r"^\| .* \| .* \| (no|yes)(.*?) \| (no|yes) \| `?(\w*)`? ?\|$", page, re.M)
    shown = {(IN if in_loss == "yes" else OUT, reason) for _, _, in_loss, reason in rows}
    shown |= {(BASELINE_ONLY, reason) for _, more, _, reason in rows if "yes, as 0" in more}
    assert shown == {(expected, reason) for _, _, expected, reason in CASES}
    assert {reason for _, reason in shown} - {""} <= MEANINGS.keys(), "`gyre batch show` says each in words"


@pytest.mark.parametrize(("ending", "mode", "expected", "reason"), CASES)
def test_the_table(ending: Ending, mode: str, expected: tuple[bool, bool], reason: str) -> None:
    found = flags(ending, mode)  # type: ignore[arg-type]
    assert (found.in_baseline, found.in_loss) == expected
    assert found.reason == reason


def test_no_score_is_not_a_score_of_zero() -> None:
    """OpenEnv#1025."""
    missing = flags(Ending(finished="completed", dropped="tests do not start"), "drop")
    zero = flags(Ending(finished="completed", score=0.0), "drop")
    assert missing.score is None
    assert zero.score == 0.0
    assert missing != zero


def test_a_placeholder_counts_as_zero_only_in_paper_mode() -> None:
    assert flags(Ending(dropped="no image"), "paper") == Flags(
        in_baseline=True, in_loss=False, score=0.0, reason="no_product"
    )


def test_invalid_scores_enter_no_baseline() -> None:
    """NeMo-RL#431, #2207, verl#4417."""
    assert not flags(Ending(finished="completed", score=math.nan), "drop").in_baseline


@pytest.mark.parametrize("kind", ["grpo", "grpo_no_std", "rloo", "zero"])
@pytest.mark.parametrize("score", [5.0, 0.1, 1 / 3])
def test_equal_rewards_give_exactly_zero(kind: str, score: float) -> None:
    """slime#2230: three equal rewards of 5.0 once got -1.09."""
    assert set(advantages({"a": score, "b": score, "c": score}, kind).values()) == {0.0}  # type: ignore[arg-type]


def test_fewer_than_two_give_zero() -> None:
    assert advantages({"a": 0.7}, "grpo") == {"a": 0.0}
    assert advantages({}, "grpo") == {}


def test_a_reward_is_the_score_unless_milestones_shape_it() -> None:
    """(1 - w) * score + w * mean(milestones and score)."""
    assert reward(0.5, [0.0, 1.0], 0.0) == reward(0.5, [], 0.75) == 0.5
    assert reward(0.5, [0.0, 0.25], 1.0) == 0.25
    assert reward(0.5, [0.0, 0.25], 0.5) == 0.375


def test_values_by_hand() -> None:
    scores = {"a": 1.0, "b": 0.0, "c": 0.0, "d": 0.0}
    assert advantages(scores, "grpo_no_std") == {"a": 0.75, "b": -0.25, "c": -0.25, "d": -0.25}
    std = math.sqrt(0.75 * 0.25)
    assert advantages(scores, "grpo")["a"] == pytest.approx(0.75 / std)
    assert set(advantages(scores, "zero").values()) == {0.0}


unit_scores = st.dictionaries(st.text(min_size=1, max_size=3), st.integers(0, 12).map(lambda n: n / 12), min_size=2)


@given(unit_scores, st.sampled_from(["grpo", "grpo_no_std", "rloo"]))
def test_advantages_sum_to_zero_in_any_order(scores: dict[str, float], kind: str) -> None:
    found = advantages(scores, kind)  # type: ignore[arg-type]
    assert math.fsum(found.values()) == pytest.approx(0, abs=1e-9)
    assert advantages(dict(reversed(scores.items())), kind) == found  # type: ignore[arg-type]
    if kind == "grpo" and len(set(scores.values())) > 1:
        assert math.fsum(a * a for a in found.values()) / len(found) == pytest.approx(1)


@given(unit_scores)
def test_rloo_leaves_one_out(scores: dict[str, float]) -> None:
    found = advantages(scores, "rloo")
    for execution, score in scores.items():
        others = [s for e, s in scores.items() if e != execution]
        assert found[execution] == pytest.approx(score - sum(others) / len(others), abs=1e-9)


@given(unit_scores)
def test_advantages_are_the_formulas(scores: dict[str, float]) -> None:
    r = np.array(list(scores.values()))
    others = np.array([np.delete(r, i).mean() for i in range(len(r))])
    spread = r.std() if len(set(scores.values())) > 1 else 1.0
    readings = {"grpo": (r - r.mean()) / spread, "grpo_no_std": r - r.mean(), "rloo": r - others, "zero": 0 * r}
    for kind, expected in readings.items():
        found = advantages(scores, kind)  # type: ignore[arg-type]
        np.testing.assert_allclose([found[e] for e in scores], expected, rtol=1e-9, atol=1e-9)
