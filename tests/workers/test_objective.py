"""The objective against plain NumPy readings of the formulas: values, and gradients by finite differences."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

torch = pytest.importorskip("torch")

from gyre.config import Config, TrainerConfig, load_config  # noqa: E402
from gyre.errors import ConfigError  # noqa: E402
from gyre.workers.algorithms import policy_loss  # noqa: E402
from gyre.workers.objective import LOSSES, Terms, objective  # noqa: E402

pytestmark = pytest.mark.stack
Array = NDArray[np.float64]
KINDS = [
    (loss, correction, kl)
    for loss in LOSSES
    for correction in ("none", "truncated", "masked")
    for kl in ("none", "k1", "k3")
]


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of N targets; `frozen` is the log-probability that carries no gradient, equal to `new` in value."""

    new: Array
    engine: Array
    proximal: Array
    reference: Array
    advantage: Array
    sequence: NDArray[np.int64]


def random_case(seed: int, spread: float = 0.4) -> Case:
    rng = np.random.default_rng(seed)
    sequence = np.repeat(np.arange(4), rng.integers(1, 7, 4))
    new = -3 + rng.normal(0, 1, len(sequence))
    near = [new + rng.normal(0, spread, len(sequence)) for _ in range(3)]
    return Case(
        new=new,
        engine=near[0],
        proximal=near[1],
        reference=near[2],
        advantage=rng.normal(0, 1, 4)[sequence],
        sequence=sequence,
    )


def numpy_reading(case: Case, new: Array, config: TrainerConfig) -> Array:
    """The loss a target as the papers write it, token by token; `case.new` stands wherever they stop the gradient."""
    out = np.zeros(len(new))
    for t in range(len(new)):
        old = case.engine if config.correction == "none" else case.proximal
        advantage = case.advantage[t]
        if config.kl == "k1":
            advantage -= config.kl_weight * (case.new[t] - case.reference[t])
        low, high = 1 - config.clip_low, 1 + config.clip_high
        match config.loss:
            case "ppo":
                ratio = np.exp(new[t]) / np.exp(old[t])
                value = -min(ratio * advantage, min(max(ratio, low), high) * advantage)
            case "gspo":
                mine = np.flatnonzero(case.sequence == case.sequence[t])
                product = np.prod([np.exp(new[i]) / np.exp(old[i]) for i in mine])
                ratio = product ** (1 / len(mine))
                value = -min(ratio * advantage, min(max(ratio, low), high) * advantage)
            case "cispo":
                value = -min(max(np.exp(case.new[t]) / np.exp(old[t]), low), high) * advantage * new[t]
            case _:
                value = -advantage * new[t]
        weight = np.exp(case.proximal[t]) / np.exp(case.engine[t])
        if config.correction == "truncated":
            value *= min(weight, config.correction_high)
        if config.correction == "masked":
            value *= weight if config.correction_low <= weight <= config.correction_high else 0.0
        if config.kl == "k3":
            ratio = np.exp(case.reference[t]) / np.exp(new[t])
            value += config.kl_weight * (ratio - 1 - np.log(ratio))
        out[t] = value
    return out


def tensors(case: Case, **changes: Any) -> Terms:
    new = torch.tensor(case.new, requires_grad=True)
    fields: dict[str, Any] = {
        "logprob_N": new,
        "behaviour_N": torch.tensor(case.engine),
        "advantage_N": torch.tensor(case.advantage),
        "sequence_N": torch.tensor(case.sequence),
        "proximal_N": torch.tensor(case.proximal),
        "reference_N": torch.tensor(case.reference),
    }
    return Terms(**fields | changes)


@pytest.mark.parametrize(("loss", "correction", "kl"), KINDS)
def test_the_objective_is_the_formula(loss: str, correction: str, kl: str) -> None:
    config = TrainerConfig(loss=loss, correction=correction, kl=kl, kl_weight=0.3, correction_high=1.3)  # type: ignore[arg-type]
    num_clipped = 0
    for seed in range(6):
        case = random_case(seed)
        found, clipped = objective(tensors(case), config)
        np.testing.assert_allclose(found.detach().numpy(), numpy_reading(case, case.new, config), rtol=1e-9, atol=1e-12)
        num_clipped += int(clipped.sum())
    assert (num_clipped > 0) == (loss != "policy_gradient")


@pytest.mark.parametrize(("loss", "correction", "kl"), KINDS)
def test_its_gradient_is_the_slope_of_the_formula(loss: str, correction: str, kl: str) -> None:
    config = TrainerConfig(loss=loss, correction=correction, kl=kl, kl_weight=0.3)  # type: ignore[arg-type]
    case, step = random_case(5), 1e-6
    weight = np.random.default_rng(9).random(len(case.new))
    terms = tensors(case)
    (objective(terms, config)[0] * torch.tensor(weight)).sum().backward()
    for t in range(len(case.new)):
        nudge = step * (np.arange(len(case.new)) == t)
        up, down = (numpy_reading(case, case.new + sign * nudge, config) @ weight for sign in (1, -1))
        assert terms.logprob_N.grad[t].item() == pytest.approx((up - down) / (2 * step), rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("loss", LOSSES)
def test_on_policy_every_loss_has_the_gradient_of_reinforce(loss: str) -> None:
    case = random_case(1, spread=0.0)
    if loss == "gspo":  # its gradient is the same over a sequence, not a token
        case = msgspec.structs.replace(case, sequence=np.arange(len(case.new)))
    terms = tensors(case)
    objective(terms, TrainerConfig(loss=loss))[0].sum().backward()  # type: ignore[arg-type]
    np.testing.assert_allclose(terms.logprob_N.grad, -case.advantage, rtol=1e-9)


@pytest.mark.parametrize(("loss", "correction"), [(loss, c) for loss, c, kl in KINDS if kl == "none"])
def test_no_advantage_is_no_loss_and_no_gradient(loss: str, correction: str) -> None:
    case = random_case(2)
    terms = tensors(case, advantage_N=torch.zeros(len(case.new), dtype=torch.float64))
    found, _ = objective(terms, TrainerConfig(loss=loss, correction=correction))  # type: ignore[arg-type]
    found.sum().backward()
    assert not found.any() and not terms.logprob_N.grad.any()


def test_the_default_is_ppo_on_the_engines_logprobs_to_the_bit() -> None:
    """A config that asks for nothing new must reach the weights that it always did."""
    terms, alone = tensors(random_case(4)), torch.tensor(random_case(4).new, requires_grad=True)
    found, clipped = objective(terms, TrainerConfig())
    expected = policy_loss(alone, terms.behaviour_N, terms.advantage_N, clip_low=0.2, clip_high=0.28)
    assert torch.equal(found, expected[0]) and torch.equal(clipped, expected[1])
    found.sum().backward()
    expected[0].sum().backward()
    assert torch.equal(terms.logprob_N.grad, alone.grad)


def test_before_a_step_has_made_an_update_its_own_weights_are_the_proximal_ones() -> None:
    case = random_case(3)
    for loss in LOSSES:
        config = TrainerConfig(loss=loss, correction="truncated")  # type: ignore[arg-type]
        none, given_ = tensors(case, proximal_N=None), tensors(case, proximal_N=torch.tensor(case.new))
        for terms in (none, given_):
            objective(terms, config)[0].sum().backward()
        assert torch.equal(none.logprob_N.grad, given_.logprob_N.grad)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6))
def test_gspo_does_not_see_how_targets_of_other_sequences_change(seed: int) -> None:
    case = random_case(seed)
    other = case.sequence != case.sequence[0]
    changed = msgspec.structs.replace(case, new=case.new + 0.5 * other)
    config = TrainerConfig(loss="gspo")
    before, after = (objective(tensors(c), config)[0].detach().numpy() for c in (case, changed))
    np.testing.assert_array_equal(before[~other], after[~other])


def test_ratios_without_bound_stay_finite() -> None:
    far = torch.tensor([-200.0, -200.0]), torch.tensor([0.0, 0.0])
    for loss, correction, kl in KINDS:
        config = TrainerConfig(loss=loss, correction=correction, kl=kl)  # type: ignore[arg-type]
        for one, other in (far, far[::-1]):
            terms = Terms(
                logprob_N=one,
                behaviour_N=other,
                advantage_N=torch.tensor([1.0, -1.0]),
                sequence_N=torch.tensor([0, 0]),
                reference_N=other,
            )
            assert torch.isfinite(objective(terms, config)[0]).all(), (loss, correction, kl)


def test_a_kl_term_without_its_reference_is_an_error() -> None:
    with pytest.raises(ValueError, match="reference"):
        objective(tensors(random_case(0), reference_N=None), TrainerConfig(kl="k3"))


def test_a_range_that_leaves_out_equal_logprobs_is_refused() -> None:
    for text in ("correction_low: 1.5", "correction_high: 0.9"):
        with pytest.raises(ConfigError, match="correction"):
            load_config(f"trainer: {{correction: masked, {text}}}")
    assert Config().trainer.correction == "none"


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    from tiny_policies import write_tiny_policy

    return write_tiny_policy(tmp_path / "policy")


def test_the_trainer_knows_what_its_step_and_its_run_began_with(policy: Path) -> None:
    """Two mini-batches: what the second one calls proximal and reference are the weights of the start, which stay."""
    from tiny_policies import minibatches, random_rows

    from gyre.workers.trainer import Trainer

    rows = random_rows(4)
    config = TrainerConfig(learning_rate=1e-2, num_minibatches=2, correction="truncated", correction_high=50.0, kl="k3")
    trainer = Trainer(policy, config, seed=1)
    start = {name: weight.clone() for name, weight in trainer.published.named.items()}
    first, second = minibatches(rows, 2)

    def means(kl_weight: float) -> float:
        trainer.config = msgspec.structs.replace(config, kl_weight=kl_weight)
        loss = sum(trainer.gradients(microstep.rows).loss for microstep in second.microsteps)
        trainer.discard()
        return loss

    def num_clipped() -> int:
        trainer.config = msgspec.structs.replace(config, clip_low=1e-6, clip_high=1e-6)
        num = sum(trainer.gradients(microstep.rows).num_clipped for microstep in second.microsteps)
        trainer.discard()
        return num

    assert means(1.0) == pytest.approx(means(0.0)), "nothing has moved yet: KL is 0"
    assert num_clipped() == 0
    trainer.config = config
    for microstep in first.microsteps:
        trainer.gradients(microstep.rows)
    trainer.commit(first.num_executions, last=False)
    moved = {name: weight.clone() for name, weight in trainer.published.named.items()}
    assert any(not torch.equal(moved[name], start[name]) for name in start)
    with_kl, without = means(1.0), means(0.0)
    assert with_kl > without + 1e-4, "the policy has left its reference"
    assert num_clipped() > 0, "and what the step began with, which the clip is about"
    trainer.config = msgspec.structs.replace(config, kl="none", correction="none")
    plain = sum(trainer.gradients(microstep.rows).loss for microstep in second.microsteps)
    trainer.discard()
    assert plain != pytest.approx(without), "the ratio is to the proximal policy, not to the engine"
    assert all(torch.equal(trainer.published.named[name], moved[name]) for name in moved)
    trainer.config = config
    for microstep in second.microsteps:
        trainer.gradients(microstep.rows)
    trainer.commit(second.num_executions)
    assert trainer.step == 1 and trainer._earlier.proximal is None


@pytest.mark.parametrize("loss", ["gspo", "cispo", "policy_gradient"])
def test_another_loss_trains_and_repeats_to_the_byte(policy: Path, loss: str) -> None:
    from tiny_policies import minibatches, random_rows

    from gyre.workers.trainer import Trainer

    digests = []
    for _ in range(2):
        config = TrainerConfig(learning_rate=1e-3, loss=loss, correction="masked", kl="k1", num_minibatches=2)  # type: ignore[arg-type]
        trainer = Trainer(policy, config, seed=1)
        before = trainer.published.buffer.clone()
        trainer.train_step(minibatches(random_rows(6), 2))
        assert not torch.equal(trainer.published.buffer, before)
        digests.append(trainer.published.buffer.clone())
    assert torch.equal(*digests)
