"""Pure. What a micro-step and an optimizer update report.

Invariant: a micro-step reports sums, so that any order and any division into cells gives the same means (but for the
last bits of float). Direction: micro-steps -> sums -> the means of one update.
"""

from collections.abc import Sequence

import msgspec


class MicrostepResult(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the targets of one micro-step; they add up over micro-steps. `loss` is the sum of execution means."""

    loss: float = 0.0
    entropy: float = 0.0
    num_clipped: int = 0
    logprob_gap: float = 0.0
    logprob_gap_max: float = 0.0
    kl: float = 0.0
    num_tokens: int = 0
    num_targets: int = 0

    def plus(self, other: "MicrostepResult") -> "MicrostepResult":
        return MicrostepResult(
            loss=self.loss + other.loss,
            entropy=self.entropy + other.entropy,
            num_clipped=self.num_clipped + other.num_clipped,
            logprob_gap=self.logprob_gap + other.logprob_gap,
            logprob_gap_max=max(self.logprob_gap_max, other.logprob_gap_max),
            kl=self.kl + other.kl,
            num_tokens=self.num_tokens + other.num_tokens,
            num_targets=self.num_targets + other.num_targets,
        )


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Of an optimizer update or a step: means over its targets, the loss over its executions. Gaps are in nats."""

    step: int
    """Counted from 1."""
    loss: float
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    entropy: float
    clip_fraction: float
    logprob_gap_mean: float
    logprob_gap_max: float
    kl: float
    """By `algorithms.kl_estimate`."""
    num_tokens: int
    num_targets: int
    num_executions: int


def step_metrics(
    result: MicrostepResult, *, step: int, num_executions: int, grad_norm: float, rate: float
) -> StepMetrics:
    """The means of one update. Without targets or executions they are 0."""
    num_targets = max(result.num_targets, 1)
    return StepMetrics(
        step=step,
        loss=result.loss / max(num_executions, 1),
        grad_norm=grad_norm,
        learning_rate=rate,
        entropy=result.entropy / num_targets,
        clip_fraction=result.num_clipped / num_targets,
        logprob_gap_mean=result.logprob_gap / num_targets,
        logprob_gap_max=result.logprob_gap_max,
        kl=result.kl / num_targets,
        num_tokens=result.num_tokens,
        num_targets=result.num_targets,
        num_executions=num_executions,
    )


def merge_updates(updates: Sequence[StepMetrics]) -> StepMetrics:
    """The metrics of a step from those of its updates: the same means over all of them; the largest gradient norm."""
    num_targets = max(sum(u.num_targets for u in updates), 1)
    num_executions = sum(u.num_executions for u in updates)
    return StepMetrics(
        step=updates[-1].step,
        loss=sum(u.loss * u.num_executions for u in updates) / max(num_executions, 1),
        grad_norm=max(u.grad_norm for u in updates),
        learning_rate=updates[-1].learning_rate,
        entropy=sum(u.entropy * u.num_targets for u in updates) / num_targets,
        clip_fraction=sum(u.clip_fraction * u.num_targets for u in updates) / num_targets,
        logprob_gap_mean=sum(u.logprob_gap_mean * u.num_targets for u in updates) / num_targets,
        logprob_gap_max=max(u.logprob_gap_max for u in updates),
        kl=sum(u.kl * u.num_targets for u in updates) / num_targets,
        num_tokens=sum(u.num_tokens for u in updates),
        num_targets=sum(u.num_targets for u in updates),
        num_executions=num_executions,
    )
