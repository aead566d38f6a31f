"""Pure. What one target contributes to the loss, as the config asks for it: the only table of losses.

Invariant: `loss = correction * table(ratio, advantage - k1) + k3`, a value a target, where each part that is off is
left out and not multiplied by one; so the default is PPO-clip on the engine's log-probabilities, bit for bit.
Direction: log-probabilities of a forward pass -> loss and where it was clipped.

Three policies may stand behind the one that is trained. `behaviour`: the engine, when it sampled. `proximal`: the
trainer, with the weights that the step began with; asked for by a correction. `reference`: the policy that the run
began with; asked for by a KL term. Without a correction the ratio is taken to the engine's, which so corrects for
staleness, numerics and earlier mini-batches at once (and is clipped for all of them); with one, the clip is about
this step's updates alone, and the weight about the rest.
"""

from collections.abc import Callable, Mapping

import msgspec
from torch import Tensor

from gyre.config import TrainerConfig
from gyre.workers.algorithms import (
    cispo_loss,
    gspo_loss,
    k1_penalty,
    k3_penalty,
    masked_weight,
    policy_gradient_loss,
    policy_loss,
    truncated_weight,
)


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """Of each of N targets."""

    logprob_N: Tensor
    """Of the policy that is trained; the only one with a gradient."""
    behaviour_N: Tensor
    advantage_N: Tensor
    sequence_N: Tensor
    """Which sequence it is of, counted from 0 and never falling."""
    proximal_N: Tensor | None = None
    """None: the step has made no update yet, so it is the trained policy itself."""
    reference_N: Tensor | None = None
    """None: no KL term."""


Loss = Callable[[Terms, Tensor, Tensor, TrainerConfig], tuple[Tensor, Tensor]]
"""(terms, old [N], advantage [N], config) -> (loss [N], clipped [N])"""

LOSSES: Mapping[str, Loss] = {
    "ppo": lambda t, old_N, advantage_N, c: policy_loss(
        t.logprob_N, old_N, advantage_N, clip_low=c.clip_low, clip_high=c.clip_high
    ),
    "gspo": lambda t, old_N, advantage_N, c: gspo_loss(
        t.logprob_N, old_N, advantage_N, t.sequence_N, clip_low=c.clip_low, clip_high=c.clip_high
    ),
    "cispo": lambda t, old_N, advantage_N, c: cispo_loss(
        t.logprob_N, old_N, advantage_N, clip_low=c.clip_low, clip_high=c.clip_high
    ),
    "policy_gradient": lambda t, old_N, advantage_N, c: policy_gradient_loss(t.logprob_N, advantage_N),
}
"""`trainer.loss` -> its formula."""


def needs_proximal(config: TrainerConfig) -> bool:
    """Whether later updates of a step need the weights that it began with."""
    return config.correction != "none" and config.num_minibatches > 1


def needs_reference(config: TrainerConfig) -> bool:
    return config.kl != "none"


def objective(terms: Terms, config: TrainerConfig) -> tuple[Tensor, Tensor]:
    """Loss [N], and whether its ratio was clipped [N]. Raises ValueError when a KL term has no reference."""
    old_N, advantage_N = terms.behaviour_N, terms.advantage_N
    if config.correction != "none":
        old_N = terms.logprob_N.detach() if terms.proximal_N is None else terms.proximal_N
    if config.kl == "k1":
        advantage_N = advantage_N - config.kl_weight * k1_penalty(terms.logprob_N, _reference(terms))
    loss_N, clipped_N = LOSSES[config.loss](terms, old_N, advantage_N, config)
    if config.correction == "truncated":
        loss_N = loss_N * truncated_weight(old_N, terms.behaviour_N, high=config.correction_high)
    elif config.correction == "masked":
        low, high = config.correction_low, config.correction_high
        loss_N = loss_N * masked_weight(old_N, terms.behaviour_N, low=low, high=high)
    if config.kl == "k3":
        loss_N = loss_N + config.kl_weight * k3_penalty(terms.logprob_N, _reference(terms))
    return loss_N, clipped_N


def _reference(terms: Terms) -> Tensor:
    if terms.reference_N is None:
        raise ValueError("objective: trainer.kl asks for log-probabilities of the reference, but there are none")
    return terms.reference_N
