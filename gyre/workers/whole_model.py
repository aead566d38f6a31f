"""Shell. A model that several ranks hold in parts, as one rank would hold it: its weights, and its gradient.

Invariant: addresses are stable, so that others can read what is there. Direction: parts -> collectives -> whole tensors
on every rank; a whole gradient of another cell -> the part of this rank.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gyre.workers import megatron


class WholeModel:
    """Every rank of the model calls each of these."""

    def __init__(self, model: Any) -> None:
        self.weights = {name: weight.clone() for name, weight in megatron.whole_weights(model).items()}
        """Megatron's name -> tensor."""
        self.gradient = torch.zeros(sum(w.numel() for w in self.weights.values()), device=megatron.device())
        """One after the other, in the order of `weights`."""

    def gather_weights(self, model: Any) -> None:
        for name, weight in megatron.whole_weights(model).items():
            self.weights[name].copy_(weight)

    def gather_gradient(self, own: Mapping[str, Tensor]) -> None:
        for mine, piece in zip(megatron.whole_tensors(own).values(), self._pieces(self.gradient).values(), strict=True):
            piece.copy_(mine)

    def own_part(self, gradient: Tensor) -> Tensor:
        """Of a whole gradient, in the same order."""
        return torch.cat([part.reshape(-1) for part in megatron.own_parts(self._pieces(gradient)).values()])

    def _pieces(self, flat: Tensor) -> dict[str, Tensor]:
        sizes = [weight.numel() for weight in self.weights.values()]
        pieces = zip(self.weights.items(), torch.split(flat, sizes), strict=True)
        return {name: piece.view_as(weight) for (name, weight), piece in pieces}
