"""Shell. One forward pass of a model, and the backward pass of its loss: tensors of a pass in, sums out.

Invariant: the loss is a sum over targets, each with its weight, so passes add up whatever rows each of them holds; the
layout of a pass shows in its tensors only. Direction: `BatchTensors` -> hidden states -> log-probabilities -> loss ->
gradients of the model's parameters.
"""

from typing import Any

import torch
from torch import Tensor

from gyre.config import TrainerConfig
from gyre.workers import megatron
from gyre.workers.algorithms import kl_estimate, logprob_gap, token_logprobs
from gyre.workers.batch_tensors import BatchTensors
from gyre.workers.objective import Terms, objective
from gyre.workers.step_metrics import MicrostepResult


def predictions(model: Any, batch: BatchTensors) -> Tensor:
    """Logits of each prediction [P, V]."""
    hidden_TBH = megatron.hidden_states(model, batch.ids_BT, batch.position_T, batch.mask)
    return megatron.logits_at(model, hidden_TBH.flatten(0, 1).index_select(0, batch.place_P))


def target_logprobs(model: Any, batch: BatchTensors, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of each target [N]."""
    logprob_P, entropy_P = token_logprobs(predictions(model, batch), batch.token_P, temperature)
    if batch.pick_N is None:
        return logprob_P, entropy_P
    return logprob_P.index_select(0, batch.pick_N), entropy_P.index_select(0, batch.pick_N)


def backward(
    model: Any,
    batch: BatchTensors,
    config: TrainerConfig,
    temperature: float,
    *,
    proximal_N: Tensor | None = None,
    reference_N: Tensor | None = None,
) -> MicrostepResult:
    """Adds the gradient of the pass to the parameters' own; the sums over its targets."""
    logprob_N, entropy_N = target_logprobs(model, batch, temperature)
    terms = Terms(
        logprob_N=logprob_N,
        behaviour_N=batch.behaviour_N,
        advantage_N=batch.advantage_N,
        sequence_N=batch.sequence_N,
        proximal_N=proximal_N,
        reference_N=reference_N,
    )
    loss_N, clipped_N = objective(terms, config)
    loss = (loss_N * batch.weight_N).sum()
    torch.autograd.backward(loss)
    gap_N = logprob_gap(logprob_N, batch.behaviour_N)
    return MicrostepResult(
        loss=float(loss.detach()),
        entropy=float(entropy_N.sum()),
        num_clipped=int(clipped_N.sum()),
        logprob_gap=float(gap_N.sum()),
        logprob_gap_max=float(gap_N.max()),
        kl=float(kl_estimate(logprob_N, batch.behaviour_N).sum()),
        num_targets=len(gap_N),
    )
