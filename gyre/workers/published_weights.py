"""Shell. The weights as engines read them: one buffer of the host, with the names and the dtype of the checkpoint.

Invariant: addresses are stable, so engines register them once, and they are read while the engine has the device's
memory; each tensor begins at a multiple of 64 bytes. Direction: parameters of a model -> buffer -> who reads it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gyre.errors import TrainingError
from gyre.workers import megatron
from gyre.workers.checkpoint_map import from_megatron
from gyre.workers.policy_shape import PolicyShape

_ALIGN = 64


class PublishedWeights:
    """Zeros until the first `write`."""

    def __init__(self, shape: PolicyShape, model: Any) -> None:
        self._shape = shape
        dtype: torch.dtype = getattr(torch, shape.dtype)
        step = _ALIGN // dtype.itemsize
        weights = from_megatron(shape, megatron.whole_weights(model))
        starts, end = {}, 0
        for name, weight in weights.items():
            starts[name], end = end, end + -(-weight.numel() // step) * step
        self.buffer = torch.zeros(end, dtype=dtype, pin_memory=megatron.device().type == "cuda")
        self.named: Mapping[str, Tensor] = {
            n: self.buffer[s : s + weights[n].numel()].view(weights[n].shape) for n, s in starts.items()
        }
        """Hugging Face name -> contiguous tensor, in the order of the layers."""

    def write(self, model: Any) -> None:
        """The values that the model has now, in place. Every rank of the model calls it."""
        with torch.no_grad():
            for name, weight in from_megatron(self._shape, megatron.whole_weights(model)).items():
                self.named[name].copy_(weight)

    def check(self) -> None:
        """Raises TrainingError when a weight is not finite: the update was made, go back to before it."""
        if not bool(torch.isfinite(self.buffer).all()):
            raise TrainingError("the update made weights that are not finite; lower trainer.learning_rate")
