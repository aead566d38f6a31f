"""Pure. Held-out executions -> figures with intervals, and two evaluations of the same tasks compared.

One Evaluation is one round: all eval groups of one policy version at one temperature. Invariant: a task counts once
however many samples it has; an execution without a score counts nowhere but in `missing`, since NULL is not 0.

Direction: scored executions -> Evaluation -> figures (JSON-ready) -> report.
"""

from typing import Any

from gyre.errors import ConfigError
from gyre.events.types import ExecutionScored, GroupDispatched
from gyre.projections.intervals import Estimate, estimate, paired_difference, pass_at_k

SHOWN_TASKS = 20
"""Changed tasks that a comparison lists."""


class Evaluation:
    """Changed in place by `dispatch` and `score`, which a fold of the log calls."""

    def __init__(self) -> None:
        self.tasks: dict[str, str] = {}
        """Task id -> digest."""
        self.scores: dict[str, list[float]] = {}
        """Task id -> scores of its executions, in the order of the log."""
        self.goals: dict[str, list[bool]] = {}
        """Kind of goal -> whether all parts of each passed."""
        self.num_slots = 0

    def dispatch(self, group: GroupDispatched) -> None:
        self.tasks[group.task] = group.task_digest
        self.num_slots += group.num_slots

    def score(self, task: str, event: ExecutionScored) -> None:
        self.scores.setdefault(task, []).append(event.score)
        goals: dict[tuple[str, str], bool] = {}
        for part in event.parts:
            number, _, rest = part.name.partition("-")
            key = number, rest.rpartition("-")[0]
            if key[1]:  # a part that is not named <goal>-<kind>-<part> belongs to no kind
                goals[key] = goals.get(key, True) and part.passed
        for (_, kind), passed in goals.items():
            self.goals.setdefault(kind, []).append(passed)

    @property
    def mean(self) -> float | None:
        """Of the tasks' means; None without a score."""
        means = task_means(self)
        return sum(means) / len(means) if means else None

    @property
    def num_scored(self) -> int:
        return sum(map(len, self.scores.values()))

    def figures(self, pass_at: int = 0) -> dict[str, Any]:
        """`score`: mean of the tasks' mean scores; `pass_at`: by k, over the tasks that have at least k samples.

        k is 1, the powers of two, the largest number of samples, and `pass_at`.
        """
        scores = self.scores.values()
        most = max(map(len, scores), default=0)
        ks = sorted({2**i for i in range(most.bit_length())} | {k for k in (most, pass_at) if 1 <= k <= most})
        passed = [(len(task), sum(score == 1.0 for score in task)) for task in scores]
        score = estimate(task_means(self))
        return {
            "tasks": len(self.tasks),
            "executions": self.num_scored,
            "missing": self.num_slots - self.num_scored,
            "score": round(score.mean, 4) if score else None,
            "score_interval": _interval(score),
            "pass_at": {str(k): _figure(estimate([pass_at_k(n, c, k) for n, c in passed if n >= k])) for k in ks},
            "goals": {kind: {"passed": sum(found), "of": len(found)} for kind, found in sorted(self.goals.items())},
        }


def task_means(evaluation: Evaluation) -> list[float]:
    """In the order of the tasks' first scores."""
    return [sum(scores) / len(scores) for scores in evaluation.scores.values()]


def compare(before: Evaluation, after: Evaluation) -> dict[str, Any]:
    """The paired difference of two evaluations, JSON-ready. Raises ConfigError unless both have the same tasks."""
    if before.tasks != after.tasks:
        only = (len(before.tasks.keys() - after.tasks.keys()), len(after.tasks.keys() - before.tasks.keys()))
        what = f"{only[0]} only in the first, {only[1]} only in the second" if any(only) else "same ids, other content"
        raise ConfigError(f"gyre eval --compare: not the same tasks: {what}; give both the same --tasks and --seed")
    both = [task for task in before.tasks if before.scores.get(task) and after.scores.get(task)]
    if not both:
        raise ConfigError("gyre eval --compare: no task has a score in both; were the evaluations interrupted?")
    was, now = ([_mean(found.scores[task]) for task in both] for found in (before, after))
    changed = sorted(
        ((task, old, new) for task, old, new in zip(both, was, now, strict=True) if new != old),
        key=lambda change: change[1] - change[2],
    )
    return {
        "tasks": len(both),
        "before": round(_mean(was), 4),
        "after": round(_mean(now), 4),
        "difference": _figure(paired_difference(was, now)),
        "better": sum(new > old for _, old, new in changed),
        "worse": sum(new < old for _, old, new in changed),
        "changed": [{"task": task, "before": round(old, 4), "after": round(new, 4)} for task, old, new in changed],
    }


def evaluation_lines(figures: dict[str, Any]) -> list[str]:
    """What a reader wants of `figures`, in lines."""
    if figures["score"] is None:
        return ["no execution was scored"]
    low, high = figures["score_interval"]
    lines = [f"score     {figures['score']:.3f}  95% [{low:.3f}, {high:.3f}]  over {figures['tasks']} tasks"]
    for k, found in figures["pass_at"].items():
        low, high = found["interval"]
        lines.append(f"pass@{k:<4} {found['mean']:.3f}  95% [{low:.3f}, {high:.3f}]")
    if figures["missing"]:
        lines.append(f"missing   {figures['missing']} executions without a score: they count nowhere")
    if figures["goals"]:
        goals = ", ".join(f"{kind} {found['passed']}/{found['of']}" for kind, found in figures["goals"].items())
        lines.append(f"goals     {goals}")
    return lines


def comparison_lines(comparison: dict[str, Any]) -> list[str]:
    """What a reader wants of `compare`, in lines."""
    difference = comparison["difference"]
    low, high = difference["interval"]
    lines = [
        f"score       {comparison['before']:.3f} -> {comparison['after']:.3f} over {comparison['tasks']} tasks of both",
        f"difference  {difference['mean']:+.3f}  95% [{low:+.3f}, {high:+.3f}]"
        + ("" if low <= 0 <= high else "  (0 is outside)"),
        f"tasks       {comparison['better']} better, {comparison['worse']} worse",
    ]
    changed = comparison["changed"]
    lines += [f"  {item['task']:<32} {item['before']:.2f} -> {item['after']:.2f}" for item in changed[:SHOWN_TASKS]]
    return lines + ([f"  and {len(changed) - SHOWN_TASKS} more: --json"] if len(changed) > SHOWN_TASKS else [])


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _interval(found: Estimate | None) -> list[float] | None:
    return [round(found.low, 4), round(found.high, 4)] if found else None


def _figure(found: Estimate | None) -> dict[str, Any]:
    return {"mean": round(found.mean, 4) if found else None, "interval": _interval(found)}
