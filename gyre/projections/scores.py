"""Pure. How an execution ended -> two flags; the scores of a group -> advantages.

The one table of end reason x score (the first row that fits):

    ended by                    score                in_baseline  in_loss   reason
    --------------------------  -------------------  -----------  -------   -----------------
    overall timeout             any                  no           no        overall_timeout
    interruption of the run     any                  no           no        interrupted
    completion, harness         a finite number      yes          yes
    timeout, harness failure
    any                         not finite           no           no        invalid_score
    nothing: dropped before     none, mode `drop`    no           no        no_product
    it finished                 none, mode `paper`   yes, as 0    no        no_product
    any, then dropped           none                 no           no        evaluation_failed
    anything else               none                 no           no        no_score

What is scored is the product that was kept, not the exit status. No score is not a score of 0. An
execution that is too stale keeps its place in the baseline and leaves the loss (`batches.py`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

EQUAL = 1e-9
"""Scores that differ by less are equal: no advantage is made of rounding."""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """What the log says of how an execution ended; empty where it says nothing."""

    finished: str = ""
    """The reason of `execution.finished`."""
    timed_out: str = ""
    """The kind of `execution.timed_out`."""
    score: float | None = None
    dropped: str = ""
    """The reason of the `execution.dropped` that was final."""


class Flags(msgspec.Struct, frozen=True, kw_only=True):
    in_baseline: bool
    in_loss: bool
    score: float | None
    """What the baseline counts; None when the execution is not in it."""
    reason: str
    """Why it is not in the loss; empty when it is."""


def flags(ending: Ending, no_product: Literal["drop", "paper"]) -> Flags:
    """The table above."""
    if ending.timed_out == "overall":
        return _out("overall_timeout")
    if ending.finished == "interrupted":
        return _out("interrupted")
    if ending.score is not None:
        if not math.isfinite(ending.score):
            return _out("invalid_score")
        return Flags(in_baseline=True, in_loss=True, score=ending.score, reason="")
    if ending.dropped and ending.finished:
        return _out("evaluation_failed")
    if ending.dropped and no_product == "paper":
        return Flags(in_baseline=True, in_loss=False, score=0.0, reason="no_product")
    return _out("no_product" if ending.dropped else "no_score")


def reward(score: float, milestones: Sequence[float], weight: float) -> float:
    """What the baseline counts: `(1 - w) * score + w * mean(milestones and score)`, so that of two executions that end
    alike the one that got there earlier is worth more. `weight` 0, the default, is the score itself."""
    if not weight or not milestones:
        return score
    return (1 - weight) * score + weight * math.fsum([*milestones, score]) / (len(milestones) + 1)


def _out(reason: str) -> Flags:
    return Flags(in_baseline=False, in_loss=False, score=None, reason=reason)


def advantages(scores: Mapping[str, float], kind: Literal["grpo", "grpo_no_std", "rloo", "zero"]) -> dict[str, float]:
    """Advantage of each execution in one group's baseline of N scores r.

    `grpo`: `(r_i - mean(r)) / std(r)`, the standard deviation over N (Shao et al. 2024, arXiv:2402.03300).
    `grpo_no_std`: `r_i - mean(r)` (Liu et al. 2025, arXiv:2503.20783, Dr. GRPO). `rloo`: `r_i` minus the mean
    of the other N - 1 (Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740), which is N / (N - 1) times
    `grpo_no_std`. Fewer than two executions, or equal scores, give exactly 0. Sums are exact, so the order of the
    executions does not matter.
    """
    values = tuple(scores.values())
    num = len(values)
    if kind == "zero" or num < 2 or max(values) - min(values) < EQUAL:
        return dict.fromkeys(scores, 0.0)
    mean = math.fsum(values) / num
    scale = 1.0
    if kind == "grpo":
        scale = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / num)
    elif kind == "rloo":
        scale = (num - 1) / num
    return {execution: (score - mean) / scale for execution, score in scores.items()}
