"""Shell. The optimizer of a core: parameters and config -> AdamW.

Invariant: its moments exist from the start, so that a checkpoint can be loaded into them.
"""

from collections.abc import Sequence

import torch
from torch.nn import Parameter

from gyre.config import TrainerConfig


def build_optimizer(parameters: Sequence[Parameter], config: TrainerConfig, *, has_moments: bool) -> torch.optim.AdamW:
    """Norms and biases do not decay. A satellite's has no moments, and never steps."""
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=1e-8, foreach=True)
    for parameter in parameters if has_moments else ():
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
    return optimizer
