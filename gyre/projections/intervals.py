"""Pure. Figures of an evaluation with their 95% intervals: values of tasks -> Estimate.

Tasks are the unit: executions of one task are not independent, so each task gives one value, and the interval says
how far the mean could be from that of all tasks of the kind. Invariant: equal values, in equal order, give equal
intervals, since the resampling is seeded by a constant.
"""

from collections.abc import Sequence
from math import comb, sqrt
from random import Random

import msgspec

Z_95 = 1.959963984540054
"""Of the standard normal, two-sided 95%."""
NUM_RESAMPLES = 4000
SEED = 95


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over `num` tasks, and where 95% of such evaluations would have it."""

    mean: float
    low: float
    high: float
    num: int


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Chance that at least one of k draws without replacement passes: 1 - C(n-c, k) / C(n, k).

    The unbiased estimator of Chen et al., "Evaluating Large Language Models Trained on Code" (arXiv 2107.03374), eq. 1.
    Raises ValueError unless 0 <= num_passed <= num_samples and 1 <= k <= num_samples.
    """
    if not (0 <= num_passed <= num_samples and 1 <= k <= num_samples):
        raise ValueError(f"pass@{k} of {num_passed} passed in {num_samples}: needs 1 <= k <= samples")
    return 1.0 - comb(num_samples - num_passed, k) / comb(num_samples, k)


def wilson(num_passed: int, num: int, z: float = Z_95) -> tuple[float, float]:
    """Score interval of a proportion (Wilson 1927, JASA 22:209): it holds its level at 0 and 1, too."""
    if num == 0:
        return 0.0, 1.0
    share, z2 = num_passed / num, z * z / num
    middle = (share + z2 / 2) / (1 + z2)
    half = z / (1 + z2) * sqrt(share * (1 - share) / num + z2 / (4 * num))
    # At the ends the formula gives exactly 0 and 1, but for rounding.
    return (0.0 if num_passed == 0 else middle - half), (1.0 if num_passed == num else middle + half)


def bootstrap(values: Sequence[float], num_resamples: int = NUM_RESAMPLES) -> tuple[float, float]:
    """Percentile interval of the mean (Efron and Tibshirani, "An Introduction to the Bootstrap", ch. 13)."""
    if not values:
        return 0.0, 0.0
    rng, num = Random(SEED), len(values)
    means = sorted(sum(rng.choices(values, k=num)) / num for _ in range(num_resamples))
    rank = round(0.025 * num_resamples)
    return means[rank], means[num_resamples - 1 - rank]


def estimate(values: Sequence[float]) -> Estimate | None:
    """Of one value a task: Wilson where each is 0 or 1, else the bootstrap. None without a task."""
    if not values:
        return None
    is_binary = all(value in (0.0, 1.0) for value in values)
    low, high = wilson(round(sum(values)), len(values)) if is_binary else bootstrap(values)
    return Estimate(mean=sum(values) / len(values), low=low, high=high, num=len(values))


def paired_difference(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """Of the means, after - before, over the same tasks in the same order: the bootstrap of their differences.

    Raises ValueError without a task, or when there are not as many of both.
    """
    differences = [new - old for old, new in zip(before, after, strict=True)]
    if not differences:
        raise ValueError("paired difference: no task")
    low, high = bootstrap(differences)
    return Estimate(mean=sum(differences) / len(differences), low=low, high=high, num=len(differences))
