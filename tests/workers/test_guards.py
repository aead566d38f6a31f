"""Which measures refuse an update, and what follows."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.config import GuardsConfig
from gyre.errors import TrainingError
from gyre.workers.guards import MEASURES, action, check, find_breach
from gyre.workers.step_metrics import StepMetrics

HEALTHY = StepMetrics(
    step=1, loss=-0.1, grad_norm=0.3, learning_rate=5e-4, entropy=0.4, clip_fraction=0.01, logprob_gap_mean=0.01,
    logprob_gap_max=0.8, kl=0.002, num_tokens=100, num_targets=40, num_executions=8,
)  # fmt: skip
FINITE = st.floats(0, 50)


def with_(**measures: float) -> StepMetrics:
    return msgspec.structs.replace(HEALTHY, **measures)


@given(entropy=FINITE, kl=FINITE, mean=FINITE, most=FINITE, bounds=st.tuples(*[st.floats(1e-3, 50)] * 4))
def test_an_update_is_refused_exactly_when_a_measure_is_outside_its_bound(
    entropy: float, kl: float, mean: float, most: float, bounds: tuple[float, ...]
) -> None:
    guards = GuardsConfig(
        min_entropy=bounds[0], max_kl=bounds[1], max_logprob_gap_mean=bounds[2], max_logprob_gap_max=bounds[3]
    )
    found = find_breach(with_(entropy=entropy, kl=kl, logprob_gap_mean=mean, logprob_gap_max=most), guards)
    outside = {
        "entropy": entropy < bounds[0],
        "kl": kl > bounds[1],
        "logprob_gap_mean": mean > bounds[2],
        "logprob_gap_max": most > bounds[3],
    }
    assert (found is not None) == any(outside.values())
    if found is not None:
        assert outside[found.guard]
        assert f"{found.guard} is" in found.detail and "guards." in found.detail


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_whatever_the_bounds(name: str, value: float) -> None:
    wide = GuardsConfig(min_entropy=0, max_kl=math.inf, max_logprob_gap_mean=math.inf, max_logprob_gap_max=math.inf)
    found = find_breach(with_(**{name: value}), wide)
    assert found is not None
    assert (found.guard, found.value, found.bound, found.detail) == ("non_finite", 0, 0, f"{name} is {value}")


def test_a_healthy_update_and_one_without_targets_pass_the_defaults() -> None:
    check(HEALTHY, GuardsConfig())
    check(with_(num_targets=0, entropy=0.0), GuardsConfig())


def test_the_error_carries_the_breach() -> None:
    with pytest.raises(TrainingError, match=r"kl is 5.5, above guards.max_kl 5") as caught:
        check(with_(kl=5.5), GuardsConfig())
    assert (caught.value.guard, caught.value.value, caught.value.bound) == ("kl", 5.5, 5.0)


def test_a_measure_at_its_bound_is_inside() -> None:
    at = GuardsConfig(
        min_entropy=HEALTHY.entropy,
        max_kl=HEALTHY.kl,
        max_logprob_gap_mean=HEALTHY.logprob_gap_mean,
        max_logprob_gap_max=HEALTHY.logprob_gap_max,
    )
    check(HEALTHY, at)


@given(st.integers(0, 5), st.integers(0, 9))
def test_rollbacks_in_a_row_end_in_a_pause(most: int, before: int) -> None:
    assert action(GuardsConfig(on_breach="pause", max_rollbacks=most), before) == "pause"
    expected = "rollback" if before < most else "pause"
    assert action(GuardsConfig(on_breach="rollback", max_rollbacks=most), before) == expected


def test_after_an_update_of_the_same_step_the_gap_is_no_fault_and_kl_still_is() -> None:
    moved = with_(logprob_gap_mean=1.0, logprob_gap_max=30.0)
    first = find_breach(moved, GuardsConfig())
    assert first is not None and first.guard == "logprob_gap_mean"
    assert find_breach(moved, GuardsConfig(), moved=True) is None
    check(moved, GuardsConfig(), moved=True)
    far = find_breach(with_(kl=5.5), GuardsConfig(), moved=True)
    assert far is not None and far.guard == "kl"
