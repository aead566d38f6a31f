"""Pure. Progress in words: the status line of the live view and the closing report of a run."""

from shlex import quote
from typing import Any

from gyre.config import Config
from gyre.projections.progress import Progress


def phase(progress: Progress) -> str:
    """One word for what the run is doing."""
    if progress.finished:
        return progress.finished.reason
    if progress.role == "rollout" and progress.counts["SwitchRequested"] > progress.counts["CellSwitched"] - 1:
        return "switching"
    return {"starting": "starting", "rollout": "rollout", "train": "training"}[progress.role]


def status_line(progress: Progress, config: Config) -> str:
    """Phase, steps, executions, score, loss, version: what a user watches a run by."""
    step = progress.last_step
    score = progress.scores[max(progress.scores)].value if progress.scores else progress.evals_mean
    return (
        f"{phase(progress):<10} step {progress.counts['StepCompleted']}/{config.pipeline.num_steps}"
        f"  executions {progress.num_done}/{progress.counts['slots']}"
        f"  score {_figure(score)}"
        f"  loss {_figure(step.loss if step else None, '+.4f')}"
        f"  version {max(progress.version, 0)}"
        f"  calls {progress.counts['CallCompleted']}"
    )


def failures(progress: Progress) -> str:
    """What to say when harness after harness fails: the run goes on, but their workspaces are worth nothing."""
    last = progress.last_failure
    if last is None:
        return ""
    why = last.detail.strip().rpartition("\n")[2]
    return (
        f"{progress.num_failed_in_a_row} harnesses in a row failed, the last one ({last.execution}) with: {why:.200}; "
        "what they leave is scored all the same"
    )


def closing(summary: dict[str, Any], run_dir: str) -> str:
    """What happened, and what to type next."""
    calls, executions, tokens = summary["calls"], summary["executions"], summary["tokens"]
    lines = [
        "",
        f"run {summary['run']}: {summary['state']} in {summary['wall_s']:.0f} s" + _detail(summary["detail"]),
        f"  executions  {executions['started']} started, {executions['scored']} scored, "
        f"{executions['timed_out']} timed out, {executions['harness_failed']} with a harness that failed, "
        f"{sum(executions['dropped'].values())} dropped",
        f"  calls       {calls['completed']} completed, {calls['cut']} cut, {calls['failed']} failed",
        f"  tokens      {tokens['sampled']:,} sampled, {tokens['context']:,} of context",
        f"  trees       {summary['trees']}",
        f"  events      {summary['events']:,}" + _gaps(summary["gaps"]),
        f"  switches    {summary['switches']} ({summary['switches_rolled_back']} rolled back)",
        f"  steps       {summary['steps']}, version {summary['version']}"
        + (f", {summary['rejected_steps']} rejected by guards" if summary["rejected_steps"] else ""),
        f"  scores      {_scores(summary)}",
    ]
    lines += [_held_out(item) for item in summary["evaluations"]]
    return "\n".join(
        [
            *lines,
            "",
            "next:",
            f'  gyre sql {quote(run_dir)} "select step, score_mean, loss, grad_norm from steps order by step"',
            f"  gyre tree {quote(run_dir)}",
            f"  gyre replay {quote(run_dir)} --verify",
        ]
    )


def _scores(summary: dict[str, Any]) -> str:
    parts = [f"{item['score']:.3f}" for item in summary["scores"]]
    return " -> ".join(parts) + " (training executions, by policy version)" if parts else "none"


def _held_out(item: dict[str, Any]) -> str:
    what = f"  held-out    version {item['version']}, {way_of_sampling(item['temperature'])}: {_figure(item['score'])}"
    low, high = item["score_interval"] or (None, None)
    return f"{what} [{_figure(low)}, {_figure(high)}] over {item['tasks']} tasks, {item['executions']} executions"


def way_of_sampling(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"sampled at {temperature:g}"


def _figure(value: float | None, spec: str = ".3f") -> str:
    return "-" if value is None else format(value, spec)


def _gaps(gaps: list[str]) -> str:
    """What a process that was killed had numbered, and nobody stored."""
    return f", not there: {'; '.join(gaps)}" if gaps else ""


def _detail(detail: str) -> str:
    return f" ({detail})" if detail else ""
