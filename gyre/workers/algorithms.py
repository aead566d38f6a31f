"""Pure. What is minimised and what is measured, as functions of tensors.

Invariant: one value a target token in, one value out; nothing here averages, because a mean over two levels needs
to know the executions. Weights carry it: `1 / (targets of the execution)` for each target, summed over micro-steps,
divided once by the number of executions. Direction: logits -> log-probabilities -> loss and measures.

N is the number of target tokens, V the vocabulary. `old` is the log-probability under the policy that the ratio is
taken to, A the advantage, sg() what carries no gradient. `objective.py` says which of these a config asks for.
"""

import torch
from torch import Tensor
from torch.nn import functional

# exp(20) = 5e8 is far outside any clip; beyond it a float32 ratio could overflow and poison a whole step.
_MAX_LOG_RATIO = 20.0


def token_logprobs(logits_NV: Tensor, token_N: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability of each token [N], and the entropy [N] of the distribution that it was drawn from.

    `z = logits / temperature`, as the engine samples; `log p(x) = z_x - logsumexp(z)`; `H = -sum_v p_v log p_v`.
    The entropy is a measure: it carries no gradient. Computed in float32, or in float64 if the logits are.
    """
    wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    z_NV = wide_NV if temperature == 1.0 else wide_NV / temperature
    logprob_NV = functional.log_softmax(z_NV, dim=-1)
    with torch.no_grad():
        entropy_N = -(logprob_NV.exp() * logprob_NV).sum(-1)
    return logprob_NV.gather(-1, token_N.unsqueeze(-1)).squeeze(-1), entropy_N


def policy_loss(
    logprob_N: Tensor, old_N: Tensor, advantage_N: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Clipped policy-gradient loss [N], and whether the clip took the gradient away [N].

    `r = exp(logprob - old)`; `loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`. PPO (Schulman et al.
    2017, arXiv:1707.06347) with the upper bound raised apart from the lower: DAPO's clip-higher (Yu et al.
    2025, arXiv:2503.14476).
    """
    return _clipped(_ratio(logprob_N - old_N), advantage_N, clip_low, clip_high)


def gspo_loss(
    logprob_N: Tensor, old_N: Tensor, advantage_N: Tensor, sequence_N: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """As `policy_loss`, with one ratio a sequence: every target gets the loss of its sequence.

    `s = exp(mean over the sequence's targets of (logprob - old))`; `loss = -min(s A, clip(s) A)`. GSPO (Zheng et al.
    2025, arXiv:2507.18071). A sequence is one reply of the policy to its context (`batch_tensors.sequences`);
    `sequence_N` numbers them from 0, and one lies in one forward pass as a whole.
    """
    gap_N = logprob_N - old_N
    num = int(sequence_N[-1]) + 1 if len(sequence_N) else 0
    sums_S = torch.zeros(num, dtype=gap_N.dtype, device=gap_N.device).index_add(0, sequence_N, gap_N)
    counts_S = torch.bincount(sequence_N, minlength=num).clamp(min=1)
    ratio_N = _ratio(sums_S / counts_S).index_select(0, sequence_N)
    return _clipped(ratio_N, advantage_N, clip_low, clip_high)


def cispo_loss(
    logprob_N: Tensor, old_N: Tensor, advantage_N: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Policy gradient whose weight is clipped, not its gradient [N], and where the weight was at a bound [N].

    `loss = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprob`. CISPO (MiniMax 2025, arXiv:2506.13585).
    """
    ratio_N = _ratio(logprob_N - old_N).detach()
    bounded_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    return -bounded_N * advantage_N * logprob_N, bounded_N != ratio_N


def policy_gradient_loss(logprob_N: Tensor, advantage_N: Tensor) -> tuple[Tensor, Tensor]:
    """`loss = -A logprob` [N], and that nothing is clipped [N]. REINFORCE (Williams 1992).

    It knows no ratio: what was sampled by another policy is corrected by `truncated_weight` or not at all.
    """
    return -advantage_N * logprob_N, torch.zeros_like(logprob_N, dtype=torch.bool)


def _ratio(gap: Tensor) -> Tensor:
    return gap.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def _clipped(ratio_N: Tensor, advantage_N: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    plain_N = ratio_N * advantage_N
    bounded_N = ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantage_N
    return -torch.minimum(plain_N, bounded_N), (bounded_N < plain_N).detach()


def truncated_weight(trainer_N: Tensor, engine_N: Tensor, *, high: float) -> Tensor:
    """`sg(min(exp(trainer - engine), high))` [N]: truncated importance sampling (Ionides 2008), a token at a time.

    Of one policy's weights, or of the trainer's and those that the engine sampled with (Yao et al. 2025, "Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training"). It multiplies the loss of the target.
    """
    return _ratio(trainer_N - engine_N).detach().clamp(max=high)


def masked_weight(trainer_N: Tensor, engine_N: Tensor, *, low: float, high: float) -> Tensor:
    """`c = sg(exp(trainer - engine))` where `low <= c <= high`, else 0 [N].

    IcePop, as in INTELLECT-3 (2025, arXiv:2512.16144). A masked target still counts in the mean over its
    execution's targets: the others gain no weight by it.
    """
    weight_N = _ratio(trainer_N - engine_N).detach()
    return torch.where((weight_N >= low) & (weight_N <= high), weight_N, torch.zeros_like(weight_N))


def k1_penalty(logprob_N: Tensor, reference_N: Tensor) -> Tensor:
    """`sg(logprob - reference)` [N], in nats, what the advantage loses, times its weight.

    Its mean over tokens of the policy is KL(policy || reference); so is the gradient when it is part of the reward
    (Ouyang et al. 2022, arXiv:2203.02155). As a term of the loss its gradient would be 0 in the mean.
    """
    return (logprob_N - reference_N).detach()


def k3_penalty(logprob_N: Tensor, reference_N: Tensor) -> Tensor:
    """`exp(d) - 1 - d` with `d = reference - logprob` [N], in nats, never negative, with its gradient.

    The term that GRPO adds to the loss (Shao et al. 2024, arXiv:2402.03300); k3 of Schulman (2020).
    """
    gap_N = (reference_N - logprob_N).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return torch.expm1(gap_N) - gap_N


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
