"""Estimators against values from elsewhere, and what must hold for any input."""

from itertools import combinations
from math import isclose, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.projections.intervals import Z_95, bootstrap, estimate, paired_difference, pass_at_k, wilson


@pytest.mark.parametrize(
    ("passed", "num", "low", "high"),
    [(0, 10, 0.0, 0.27753), (81, 263, 0.25527, 0.36621), (10, 10, 0.72247, 1.0), (1, 29, 0.00611, 0.17176)],
)
def test_wilson_gives_the_published_intervals(passed: int, num: int, low: float, high: float) -> None:
    """81/263, 1/29: Newcombe 1998 (Statistics in Medicine 17:857), table I, method 3."""
    found = wilson(passed, num)
    assert found == pytest.approx((low, high), abs=2e-5)


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_that_hold_a_pass(case: tuple[int, int, int]) -> None:
    num, passed, k = case
    draws = list(combinations([True] * passed + [False] * (num - passed), k))
    assert isclose(pass_at_k(num, passed, k), sum(map(any, draws)) / len(draws), abs_tol=1e-12)


@pytest.mark.parametrize(("num", "passed", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_refuses_what_was_not_drawn(num: int, passed: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(num, passed, k)


def test_the_bootstrap_agrees_with_the_normal_interval_on_many_values() -> None:
    values = [(i * 37 % 100) / 100 for i in range(400)]
    mean = sum(values) / 400
    half = Z_95 * sqrt(sum((v - mean) ** 2 for v in values) / 400) / sqrt(400)
    assert bootstrap(values) == pytest.approx((mean - half, mean + half), abs=0.1 * half)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_an_estimate_lies_in_its_interval_and_is_repeatable(values: list[float]) -> None:
    found = estimate(values)
    assert found is not None
    assert found.low - 1e-9 <= found.mean <= found.high + 1e-9
    assert found == estimate(values)
    assert found.num == len(values)


def test_all_tasks_failing_is_not_certainty() -> None:
    found = estimate([0.0] * 64)
    assert found is not None
    assert found.low == 0.0
    assert 0.05 < found.high < 0.06
    assert estimate([]) is None


def test_values_between_0_and_1_are_resampled_and_not_counted_as_passes() -> None:
    found = estimate([0.5] * 10)
    assert found is not None
    assert (found.low, found.mean, found.high) == (0.5, 0.5, 0.5), "nothing varies"
    assert wilson(0, 0) == (0.0, 1.0), "nothing is known"


def test_a_paired_difference_is_narrower_than_its_parts() -> None:
    before = [i % 10 / 10 for i in range(50)]
    found = paired_difference(before, [value + 0.1 for value in before])
    assert found.mean == pytest.approx(0.1)
    assert found.low == pytest.approx(found.high), "every task gained the same"
    with pytest.raises(ValueError):
        paired_difference([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="no task"):
        paired_difference([], [])
