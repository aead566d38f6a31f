"""Shell. Weights that the trained policy had before, for a loss that is told what they would say now.

Invariant: both are kept only where the config asks for them; the proximal ones only within a step, once it has made an
update. While they are asked the parameters hold them, and their own again afterwards, whatever is raised.
Direction: parameters -> copies; copies and a pass -> log-probabilities of its targets (`Terms` of `objective.py`).
"""

from typing import Any

import torch
from torch import Tensor

from gyre.config import TrainerConfig
from gyre.workers.batch_tensors import BatchTensors
from gyre.workers.forward import target_logprobs
from gyre.workers.objective import needs_proximal, needs_reference


class EarlierWeights:
    def __init__(self, model: Any, config: TrainerConfig) -> None:
        self._model = model
        self.reference = self._copy() if needs_reference(config) else None
        """The policy that the run began with, for a KL term."""
        self.proximal: tuple[Tensor, ...] | None = None
        """The weights that the step began with, once it has made an update that a correction must know of."""

    @property
    def copies(self) -> tuple[Tensor, ...]:
        return (*(self.reference or ()), *(self.proximal or ()))

    def keep(self, config: TrainerConfig) -> None:
        """Of the first call in a step, the weights as they are; called before each change of them within it."""
        if self.proximal is None and needs_proximal(config):
            self.proximal = self._copy()

    def forget(self) -> None:
        """Another step begins."""
        self.proximal = None

    def logprobs(self, batch: BatchTensors, temperature: float) -> tuple[Tensor | None, Tensor | None]:
        """Of the targets [N], under the proximal weights and under the reference; None for what is not kept."""
        return self._under(self.proximal, batch, temperature), self._under(self.reference, batch, temperature)

    def _under(self, weights: tuple[Tensor, ...] | None, batch: BatchTensors, temperature: float) -> Tensor | None:
        if weights is None:
            return None
        parameters = tuple(self._model.parameters())
        own = [parameter.data for parameter in parameters]
        try:
            for parameter, weight in zip(parameters, weights, strict=True):
                parameter.data = weight
            with torch.no_grad():
                return target_logprobs(self._model, batch, temperature)[0]
        finally:
            for parameter, weight in zip(parameters, own, strict=True):
                parameter.data = weight

    def _copy(self) -> tuple[Tensor, ...]:
        return tuple(parameter.detach().clone() for parameter in self._model.parameters())
