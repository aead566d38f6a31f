"""Losses and measures against a plain NumPy reading of their formulas."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from gyre.workers.algorithms import (  # noqa: E402
    kl_estimate,
    learning_rate,
    logprob_gap,
    policy_loss,
    supervised_loss,
    token_logprobs,
)

pytestmark = pytest.mark.stack


def reading_of_policy_loss(new: float, old: float, advantage: float, low: float, high: float) -> tuple[float, bool]:
    ratio = math.exp(new - old)
    bounded = min(max(ratio, 1 - low), 1 + high)
    loss = -min(ratio * advantage, bounded * advantage)
    return loss, (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(*[st.floats(-3, -0.01)] * 2, st.floats(-3, 3)), min_size=1, max_size=8))
def test_policy_loss_is_the_formula(tokens: list[tuple[float, float, float]]) -> None:
    columns = [torch.tensor(c, dtype=torch.float64) for c in zip(*tokens, strict=True)]
    loss, clipped = policy_loss(*columns, clip_low=0.2, clip_high=0.28)
    for i, token in enumerate(tokens):
        expected, taken = reading_of_policy_loss(*token, 0.2, 0.28)
        assert loss[i].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
        if abs(token[2]) > 1e-6:
            assert bool(clipped[i]) == taken


def test_a_clipped_token_has_no_gradient_and_the_upper_bound_is_its_own() -> None:
    old = torch.zeros(4)
    new = torch.log(torch.tensor([1.25, 1.3, 0.85, 0.75])).requires_grad_()
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss, clipped = policy_loss(new, old, advantage, clip_low=0.2, clip_high=0.28)
    loss.sum().backward()
    assert clipped.tolist() == [False, True, False, True]
    assert new.grad.tolist() == pytest.approx([-1.25, 0, 0.85, 0])


def test_on_policy_the_gradient_is_that_of_reinforce() -> None:
    new = torch.tensor([-1.0, -2.0]).requires_grad_()
    loss, _ = policy_loss(new, new.detach(), torch.tensor([0.7, -0.3]), clip_low=0.2, clip_high=0.28)
    loss.sum().backward()
    assert new.grad.tolist() == pytest.approx([-0.7, 0.3])


def test_a_ratio_without_bound_stays_finite() -> None:
    loss, _ = policy_loss(
        torch.tensor([0.0]), torch.tensor([-200.0]), torch.tensor([-1.0]), clip_low=0.2, clip_high=0.28
    )
    assert torch.isfinite(loss).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy_are_the_formula(temperature: float) -> None:
    rng = np.random.default_rng(0)
    logits, tokens = rng.normal(0, 3, (5, 11)), np.array([0, 3, 10, 7, 7])
    p = np.exp(logits / temperature)
    p /= p.sum(-1, keepdims=True)
    logprob, entropy = token_logprobs(torch.tensor(logits, dtype=torch.float32), torch.tensor(tokens), temperature)
    np.testing.assert_allclose(logprob, np.log(p[np.arange(5), tokens]), rtol=1e-5)
    np.testing.assert_allclose(entropy, -(p * np.log(p)).sum(-1), rtol=1e-5)


def test_gap_and_supervised_loss_are_the_formula() -> None:
    rng = np.random.default_rng(1)
    new, old = rng.normal(size=6), rng.normal(size=6)
    np.testing.assert_allclose(logprob_gap(torch.tensor(new), torch.tensor(old)), np.abs(new - old))
    logits, tokens, weight = rng.normal(size=(6, 9)), rng.integers(0, 9, 6), rng.random(6)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = (weight * -np.log(p[np.arange(6), tokens])).sum()
    found = supervised_loss(*(torch.tensor(x) for x in (logits.astype(np.float32), tokens, weight)))
    assert found.item() == pytest.approx(expected, rel=1e-6)


def test_the_measure_of_kl_is_the_formula_and_no_gradient() -> None:
    rng = np.random.default_rng(2)
    new, old = rng.normal(-1, 1, 50), rng.normal(-1, 1, 50)
    found = kl_estimate(torch.tensor(new, requires_grad=True), torch.tensor(old))
    np.testing.assert_allclose(found, np.exp(new) / np.exp(old) - 1 - (new - old), rtol=1e-9, atol=1e-12)
    assert (found >= 0).all() and not found.requires_grad


def test_warm_up_reaches_the_peak_after_its_steps() -> None:
    assert [learning_rate(3.0, step, 2) for step in range(4)] == pytest.approx([1.0, 2.0, 3.0, 3.0])
    assert learning_rate(3.0, 0, 0) == 3.0
