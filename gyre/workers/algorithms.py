"""Pure. What is minimised and what is measured, as functions of tensors.

Invariant: one value a target token in, one value out; nothing here averages, because a mean over two levels needs
to know the executions. Weights carry it: `1 / (targets of the execution)` for each target, summed over micro-steps,
divided once by the number of executions. Direction: logits -> log-probabilities -> loss and measures.

N is the number of target tokens, V the vocabulary.
"""

import torch
from torch import Tensor
from torch.nn import functional

# exp(20) = 5e8 is far outside any clip; beyond it a float32 ratio could overflow and poison a whole step.
_MAX_LOG_RATIO = 20.0


def token_logprobs(logits_NV: Tensor, token_N: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability of each token [N], and the entropy [N] of the distribution that it was drawn from.

    `z = logits / temperature`, as the engine samples; `log p(x) = z_x - logsumexp(z)`; `H = -sum_v p_v log p_v`.
    The entropy is a measure: it carries no gradient.
    """
    z_NV = logits_NV.float() if temperature == 1.0 else logits_NV.float() / temperature
    logprob_NV = functional.log_softmax(z_NV, dim=-1)
    with torch.no_grad():
        entropy_N = -(logprob_NV.exp() * logprob_NV).sum(-1)
    return logprob_NV.gather(-1, token_N.unsqueeze(-1)).squeeze(-1), entropy_N


def policy_loss(
    logprob_N: Tensor, behaviour_N: Tensor, advantage_N: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Clipped policy-gradient loss [N], and whether the clip took the gradient away [N].

    `r = exp(logprob - behaviour)`; `loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`. PPO (Schulman et al.
    2017, arXiv:1707.06347, eq. 7) with the upper bound raised apart from the lower: DAPO's clip-higher (Yu et al.
    2025, arXiv:2503.14476, eq. 10). `behaviour` is the engine's log-probability of the token it sampled.
    """
    ratio_N = (logprob_N - behaviour_N).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    plain_N = ratio_N * advantage_N
    bounded_N = ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantage_N
    return -torch.minimum(plain_N, bounded_N), (bounded_N < plain_N).detach()


def logprob_gap(logprob_N: Tensor, behaviour_N: Tensor) -> Tensor:
    """`|trainer - engine|` [N], in nats: numerics, staleness and, from the second mini-batch on, the step itself."""
    return (logprob_N - behaviour_N).detach().abs()


def kl_estimate(logprob_N: Tensor, behaviour_N: Tensor) -> Tensor:
    """`exp(d) - 1 - d` with `d = logprob - behaviour` [N], in nats, never negative; its mean estimates a KL divergence.

    Of the policy that sampled (the engine's, at its version) from the one that is trained: the tokens are drawn from
    the first. It is k3 of Schulman, "Approximating KL Divergence" (2020, joschu.net/blog/kl-approx.html).
    """
    gap_N = (logprob_N - behaviour_N).detach().clamp(max=_MAX_LOG_RATIO)
    return torch.expm1(gap_N) - gap_N


def supervised_loss(logits_NV: Tensor, token_N: Tensor, weight_N: Tensor) -> Tensor:
    """Weighted cross-entropy, a scalar: `sum(w * -log p(token))`; the caller divides by the sum of all weights."""
    return (weight_N * functional.cross_entropy(logits_NV.float(), token_N, reduction="none")).sum()


def learning_rate(peak: float, step: int, warmup_steps: int) -> float:
    """Linear warm-up: `peak * (step + 1) / (warmup_steps + 1)` for the first steps, `peak` from then on."""
    return peak * min(1.0, (step + 1) / (warmup_steps + 1))
