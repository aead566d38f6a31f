"""Pure. Whether an update may be made, by what was measured of it, and what happens if not.

Invariant: a guard sees only what the forward and backward passes measured, before the optimizer moves a weight; so
what it refuses has not happened. Direction: measures and bounds -> the first breach, or none -> pause or rollback.

Measures that are known before an update are those of the weights that it starts from: entropy and KL beyond a bound
tell of the updates before. A step with several mini-batches is looked at before each of its updates; the logprob
gap counts at the first only, since after it trainer and engine hold different weights, whose distance KL bounds.
"""

import math
from typing import Literal

import msgspec

from gyre.config import GuardsConfig
from gyre.errors import TrainingError
from gyre.events.types import Guard
from gyre.workers.step_metrics import StepMetrics

MEASURES = ("loss", "grad_norm", "logprob_gap_mean", "logprob_gap_max", "kl", "entropy")


class Breach(msgspec.Struct, frozen=True, kw_only=True):
    guard: Guard
    value: float
    bound: float
    detail: str


def find_breach(metrics: StepMetrics, guards: GuardsConfig, *, moved: bool = False) -> Breach | None:
    """The first guard that refuses, in the order of `Guard`; a value at its bound is inside.

    moved: the step has made an update before this one, so that the gap is no error of engine or trainer.
    """
    for name in MEASURES:
        value = getattr(metrics, name)
        if not math.isfinite(value):
            return Breach(guard="non_finite", value=0.0, bound=0.0, detail=f"{name} is {value}")
    if not metrics.num_targets:
        return None
    gaps: tuple[tuple[Guard, float, float], ...] = (
        ("logprob_gap_mean", metrics.logprob_gap_mean, guards.max_logprob_gap_mean),
        ("logprob_gap_max", metrics.logprob_gap_max, guards.max_logprob_gap_max),
    )
    upper: tuple[tuple[Guard, float, float], ...] = (*(() if moved else gaps), ("kl", metrics.kl, guards.max_kl))
    for guard, value, bound in upper:
        if value > bound:
            return _breach(guard, value, "above", bound, f"max_{guard}")
    if metrics.entropy < guards.min_entropy:
        return _breach("entropy", metrics.entropy, "below", guards.min_entropy, "min_entropy")
    return None


def _breach(guard: Guard, value: float, side: str, bound: float, key: str) -> Breach:
    return Breach(
        guard=guard, value=value, bound=bound, detail=f"{guard} is {value:.6g}, {side} guards.{key} {bound:g}"
    )


def check(metrics: StepMetrics, guards: GuardsConfig, *, moved: bool = False) -> None:
    """Raises TrainingError for the first breach."""
    found = find_breach(metrics, guards, moved=moved)
    if found is not None:
        raise TrainingError(found.detail, found.guard, found.value, found.bound)


def action(guards: GuardsConfig, num_rejected: int) -> Literal["pause", "rollback"]:
    """What follows a breach, when `num_rejected` steps in a row were rejected before it."""
    return "rollback" if guards.on_breach == "rollback" and num_rejected < guards.max_rollbacks else "pause"
