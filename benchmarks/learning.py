"""Learning curves: the quickstart with three seeds, a control whose advantages are zero, and mini-swe-agent.

    make learning                                   # all arms, then docs/learning/{curves.json,curves.svg,README.md}
    python benchmarks/learning.py --arms seed-2     # one arm again, the others as they are
    python benchmarks/learning.py --arms none       # plot and table again from curves.json

Each arm is `gyre run` on a file of examples/ with its own seed (own policy, own warm start, own tasks) and held-out
tasks that no arm was tuned on. Everything that is plotted is asked of the run in SQL.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from gyre.projections.intervals import bootstrap, paired_difference

ROOT = Path(__file__).parent.parent
OUT = ROOT / "docs/learning"
WORK = ROOT / "runs/learning"
HELDOUT_SEED = 20261130
NUM_HELDOUT = 128
NUM_SAMPLES = 4
"""Executions of a held-out task at temperature 1; one at temperature 0."""
ARMS: dict[str, dict[str, Any]] = {
    "seed-1": {"seed": 1},
    "seed-2": {"seed": 2},
    "seed-3": {"seed": 3},
    "control": {"seed": 1, "trainer": {"advantage": "zero"}},
    "mini-swe-agent": {"seed": 1},
}
EXAMPLES = {"mini-swe-agent": "mini-swe-agent.yaml"}
"""Of an arm that is not the quickstart."""
CURVE = """
select policy_version as version, avg(score_mean) as score, list(score_mean order by "index") as groups
from groups where purpose = 'train' group by policy_version order by policy_version
"""
HELDOUT = """
select g.policy_version as version, g.temperature, g.task_index, avg(e.score) as score
from executions e join groups g using (group_id) where g.purpose = 'eval' and e.score is not null
group by all order by version, temperature, task_index
"""
STEPS = """
select step, loss, grad_norm, entropy, clip_fraction, logprob_gap_mean, logprob_gap_max from steps order by step
"""


def make_config(name: str) -> dict[str, Any]:
    """The example with the arm's changes; policies are shared by arms of one seed."""
    example = ROOT / "examples" / EXAMPLES.get(name, "quickstart.yaml")
    config: dict[str, Any] = yaml.safe_load(example.read_text())
    for key, value in ARMS[name].items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    config["policy"] = {"path": str(policy_of(name))}
    num_tasks = NUM_HELDOUT if name not in EXAMPLES else 64
    config["evaluation"] = {**config.get("evaluation", {}), "num_tasks": num_tasks, "seed": HELDOUT_SEED}
    return config


def run_arm(name: str) -> dict[str, Any]:
    """Run one arm to its end (or go on with it), and ask it for its curves."""
    WORK.mkdir(parents=True, exist_ok=True)
    path, run_dir = WORK / f"{name}.yaml", WORK / name
    path.write_text(yaml.safe_dump(make_config(name)))
    figures = run_dir / "summary.json"
    if not figures.exists() or json.loads(figures.read_text())["state"] != "completed":
        subprocess.run([sys.executable, "-m", "gyre.cli", "run", str(path), "--dir", str(run_dir)], check=True)
    summary = json.loads(figures.read_text())
    curve = [
        {"version": row["version"], "score": row["score"], "interval": bootstrap(row["groups"])}
        for row in ask(run_dir, CURVE)
    ]
    return {
        "config": make_config(name) | {"policy": f"own warm start, seed {ARMS[name]['seed']}"},
        "wall_s": summary["wall_s"],
        "calls": summary["calls"],
        "train": curve,
        "steps": ask(run_dir, STEPS),
        "heldout": [
            heldout("sampled", *(sampled(name, source) for source in (policy_of(name), run_dir)))
            if name not in EXAMPLES
            else heldout("sampled", *first_and_last(ask(run_dir, HELDOUT), 1.0)),
            heldout("greedy", *first_and_last(ask(run_dir, HELDOUT), 0.0)),
        ],
    }


KINDS = ("sampled", "greedy")


def policy_of(name: str) -> Path:
    return WORK / f"policy-{ARMS[name]['seed']}"


def first_and_last(rows: list[dict[str, Any]], temperature: float) -> list[dict[int, float]]:
    """Scores by task of the first and of the last version, as the run itself evaluated them: one execution a task."""
    versions = sorted({row["version"] for row in rows})
    return [
        {
            row["task_index"]: row["score"]
            for row in rows
            if row["version"] == version and row["temperature"] == temperature
        }
        for version in (versions[0], versions[-1])
    ]


def sampled(name: str, source: Path) -> dict[int, float]:
    """Mean score by task over NUM_SAMPLES executions, by `gyre eval`: one alone is mostly noise."""
    harness = make_config(name)["harness"]["name"]
    run_dir = WORK / f"eval-{source.name}-{harness}"
    if not (run_dir / "summary.json").exists():
        argv = ["eval", str(source), "--dir", str(run_dir), "--harness", harness, "--seed", str(HELDOUT_SEED)]
        argv += ["--tasks", str(NUM_HELDOUT), "--temperature", "1", "--samples", str(NUM_SAMPLES)]
        subprocess.run([sys.executable, "-m", "gyre.cli", *argv], check=True)
    return {row["task_index"]: row["score"] for row in ask(run_dir, HELDOUT)}


def heldout(kind: str, first: dict[int, float], last: dict[int, float]) -> dict[str, Any]:
    """Before and after on the same tasks: scores, and their paired difference, with 95% intervals."""
    tasks = sorted(first.keys() & last.keys())
    before, after = ([scores[t] for t in tasks] for scores in (first, last))
    gain = paired_difference(before, after)
    return {
        "kind": kind,
        "tasks": len(tasks),
        "before": {"score": sum(before) / len(before), "interval": bootstrap(before)},
        "after": {"score": sum(after) / len(after), "interval": bootstrap(after)},
        "gain": {"score": gain.mean, "interval": (gain.low, gain.high)},
    }


def ask(run_dir: Path, query: str) -> list[dict[str, Any]]:
    argv = [sys.executable, "-m", "gyre.cli", "sql", str(run_dir), query, "--json"]
    lines = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.splitlines()
    return [json.loads(line) for line in lines]


def plot(arms: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "gyre"
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), width_ratios=(3, 2), layout="constrained")
    colours = dict(zip(ARMS, ("#1b6ca8", "#2a9d8f", "#7b4fa3", "#888888", "#d1711f"), strict=True))
    for name, arm in arms.items():
        xs = [point["version"] for point in arm["train"]]
        left.plot(xs, [point["score"] for point in arm["train"]], color=colours[name], label=name, linewidth=1.8)
        low, high = zip(*(point["interval"] for point in arm["train"]), strict=True)
        left.fill_between(xs, low, high, color=colours[name], alpha=0.12, linewidth=0)
    left.set(xlabel="policy version", ylabel="score", title="training executions (95% over groups)", ylim=(0, 1))
    left.legend(frameon=False, loc="lower right", ncols=3, fontsize="small")
    for k in range(len(KINDS)):
        for i, (name, arm) in enumerate(arms.items()):
            result = arm["heldout"][k]
            x = k * (len(arms) + 1) + i
            for at, value, marker in ((x - 0.15, result["before"], "o"), (x + 0.15, result["after"], "s")):
                low, high = value["interval"]
                right.plot([at, at], [low, high], color=colours[name], linewidth=1.5)
                right.plot(at, value["score"], marker, color=colours[name], markersize=5)
    right.set(title="held-out: before (circle), after (square)", ylim=(0, 1))
    right.set_xticks([k * (len(arms) + 1) + (len(arms) - 1) / 2 for k in range(2)], KINDS)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.25)
    figure.savefig(OUT / "curves.svg", metadata={"Date": None})


def table(arms: dict[str, Any]) -> str:
    """The README beside the plot."""
    lines = [
        "# Learning curves",
        "",
        "Made by `make learning`: `examples/quickstart.yaml` for three seeds, each with its own warm start; a control",
        "with `trainer.advantage: zero`, in which everything runs and nothing is reinforced; and mini-swe-agent,",
        "unmodified, through `examples/mini-swe-agent.yaml` on the warm start of seed 1 (64 tasks, one sample a task:",
        "an execution costs seven times as much).",
        "",
        f"Held-out scores are over {NUM_HELDOUT} tasks of seed {HELDOUT_SEED}, on which nothing of the recipe was",
        f"chosen: greedy, or the mean of {NUM_SAMPLES} samples a task. Intervals are 95% (bootstrap over tasks, paired",
        "for the gain). The data is in [curves.json](curves.json).",
        "",
        "![curves](curves.svg)",
        "",
        "| Arm | Held-out | Before | After | Gain | Run |",
        "|---|---|---|---|---|---|",
    ]
    for name, arm in arms.items():
        for result in arm["heldout"]:
            cells = (_percent(result[key]) for key in ("before", "after", "gain"))
            lines.append(f"| {name} | {result['kind']} | {' | '.join(cells)} | {arm['wall_s']:.0f} s |")
    return "\n".join(lines) + "\n"


def _percent(value: dict[str, Any]) -> str:
    low, high = value["interval"]
    return f"{100 * value['score']:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=[*ARMS, "none"], help="which to run")
    wanted = [name for name in parser.parse_args().arms if name != "none"]
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / "curves.json"
    arms: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name in wanted:
        arms[name] = run_arm(name)
        arms = {known: arms[known] for known in ARMS if known in arms}
        path.write_text(json.dumps(arms, indent=1) + "\n")
    plot(arms)
    (OUT / "README.md").write_text(table(arms))
    print(table(arms))


if __name__ == "__main__":
    main()
