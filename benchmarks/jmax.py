"""J_max ablation: how many branches of an execution are trained, 1, 5 or all, with three seeds each.

    make jmax                                     # all arms, then docs/jmax/{curves.json,curves.svg,README.md}
    python benchmarks/jmax.py --arms 1/seed-2     # one arm again, the others as they are
    python benchmarks/jmax.py --arms none         # plot and table again from curves.json

Each arm is a whole `gyre run` with the harness `reference-team`, whose main agent hands every line of its instruction
to a sub-agent and goes on from a summary every two turns. The arms of a seed begin with one policy and meet the same
tasks. Everything that is plotted is asked of the run in SQL.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml
from learning import ask

from gyre.projections.intervals import bootstrap
from gyre.workers.tiny_policy import TinyShape

ROOT = Path(__file__).parent.parent
OUT = ROOT / "docs/jmax"
WORK = ROOT / "runs/jmax"
HELDOUT_SEED = 20261130
NUM_GOALS = 4
SHAPE = TinyShape(hidden=128, num_heads=4, ffn=320)  # 0.6 million parameters
LIMITS = {"1": 1, "5": 5, "all": 0}
SEEDS = (1, 2, 3)
ARMS = [f"{limit}/seed-{seed}" for seed in SEEDS for limit in LIMITS]
COLOURS = {"1": "#d1711f", "5": "#1b6ca8", "all": "#2a9d8f"}
CURVE = """
select policy_version as version, list(score_mean order by "index") as groups
from groups where purpose = 'train' group by policy_version order by policy_version
"""
STEPS = """
select step, loss, grad_norm, entropy, num_trajectories, num_tokens, num_targets,
  (select sum(seconds) from phases p where p.seq = completed_seq and p.name = 'gradients') as gradients_s
from steps order by step
"""
HELDOUT = """
select g.policy_version as version, g.task_index, avg(e.score) as score
from executions e join groups g using (group_id) where g.purpose = 'eval' and e.score is not null
group by all order by version, task_index
"""


def make_config(arm: str) -> dict[str, Any]:
    limit, _, seed = arm.partition("/seed-")
    return {
        "seed": int(seed),
        "tasks": {"family": "files", "num_goals": NUM_GOALS, "num_tasks": 100_000},
        "harness": {"name": "reference-team", "deadline_s": 60, "max_turns": 8, "max_concurrent": 16},
        "policy": {"path": str(policy_of(int(seed))), "init": False},
        "sampling": {"temperature": 1.0, "max_tokens": 48},
        "pipeline": {"num_steps": 12, "groups_per_step": 6, "executions_per_group": 8},
        "evaluation": {"num_tasks": 48, "temperatures": [1.0], "seed": HELDOUT_SEED},
        "trainer": {"learning_rate": 7e-4, "num_minibatches": 2},
        "selection": {"max_trajectories": LIMITS[limit]},
    }


def policy_of(seed: int) -> Path:
    return WORK / f"policy-{seed}"


def warm_up(seed: int) -> None:
    from gyre.workers.warm_start import make_team_stages, warm_policy

    if not policy_of(seed).exists():
        stages = make_team_stages(NUM_GOALS)
        warm_policy(
            policy_of(seed),
            seed,
            num_goals=NUM_GOALS,
            stages=stages,
            shape=SHAPE,
            show=lambda text: print(text, flush=True),
        )


def run_arm(arm: str) -> dict[str, Any]:
    """Run one arm to its end (or go on with it), and ask it for its curves."""
    config = make_config(arm)
    warm_up(config["seed"])
    path, run_dir = WORK / f"{arm.replace('/', '-')}.yaml", WORK / arm.replace("/", "-")
    path.write_text(yaml.safe_dump(config))
    summary = run_dir / "summary.json"
    if not summary.exists() or json.loads(summary.read_text())["state"] != "completed":
        subprocess.run([sys.executable, "-m", "gyre.cli", "run", str(path), "--dir", str(run_dir)], check=True)
    told = json.loads(summary.read_text())
    heldout: dict[int, list[float]] = {}
    for row in ask(run_dir, HELDOUT):
        heldout.setdefault(row["version"], []).append(row["score"])
    return {
        "config": config | {"policy": f"own warm start, seed {config['seed']}"},
        "wall_s": told["wall_s"],
        "calls": told["calls"]["completed"],
        "train": [{"version": row["version"], "groups": row["groups"]} for row in ask(run_dir, CURVE)],
        "steps": ask(run_dir, STEPS),
        "heldout": [
            {"version": version, "score": mean(scores), "interval": bootstrap(scores)}
            for version, scores in sorted(heldout.items())
        ],
    }


def of_limit(arms: dict[str, Any], limit: str) -> list[dict[str, Any]]:
    return [arm for name, arm in arms.items() if name.startswith(f"{limit}/")]


def across(arms: list[dict[str, Any]], read: Any) -> list[tuple[float, float]]:
    """(mean, standard deviation over seeds) of each step."""
    columns = list(zip(*([read(arm, i) for i in range(len(arm["steps"]))] for arm in arms), strict=True))
    return [(mean(column), stdev(column) if len(column) > 1 else 0.0) for column in columns]


def score_at(arm: dict[str, Any], i: int) -> float:
    return mean(arm["train"][i]["groups"])


def norm_at(arm: dict[str, Any], i: int) -> float:
    return float(arm["steps"][i]["grad_norm"])


def plot(arms: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "gyre"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for axis, read, title in zip(
        axes, (score_at, norm_at), ("score of training executions", "gradient norm"), strict=True
    ):
        for limit, colour in COLOURS.items():
            if not of_limit(arms, limit):
                continue
            values = across(of_limit(arms, limit), read)
            xs = range(1, len(values) + 1)
            axis.plot(xs, [m for m, _ in values], color=colour, label=f"J_max {limit}", linewidth=1.8)
            low, high = zip(*((m - s, m + s) for m, s in values), strict=True)
            axis.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
        axis.set(xlabel="step", title=title, ylim=(0, None))
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.25)
    axes[0].legend(frameon=False)
    figure.savefig(OUT / "curves.svg", metadata={"Date": None})


def table(arms: dict[str, Any]) -> str:
    """The page beside the plot."""
    lines = [
        "# How many branches to train: J_max 1, 5 and all",
        "",
        f"Made by `make jmax`: a policy of 0.6 million parameters, tasks of {NUM_GOALS} goals, harness",
        "`reference-team`, whose main agent hands each line to a sub-agent and goes on from a summary every two",
        "turns, so that an execution has about six branches. Each run has 12 steps of 6 x 8 executions; the runs",
        "of a seed share policy and tasks. The paper reports, at its scale, that J_max 1 takes 41.4% of the time",
        "of all branches, with a worse score and a larger gradient norm, and J_max 5 74.8%, with the same score.",
        "",
        "![curves](curves.svg)",
        "",
        "Mean and standard deviation over seeds; bands are one deviation each way. Scores in percent: of 48 held-out",
        "tasks, one sample each, and of training executions. *Tokens* and *time* are what the trainer computed, with",
        "rows that share nothing, and the seconds of its forward and backward passes, as percent of those of `all`",
        "with the same seed, whose policy went another way. The data is in [curves.json](curves.json).",
        "",
        "| J_max | Seeds | Held-out before | after | Last 4 steps | Gradient norm | Trajectories | Tokens | Time |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for limit in LIMITS:
        mine = of_limit(arms, limit)
        cells = [
            ", ".join(str(arm["config"]["seed"]) for arm in mine),
            _spread([arm["heldout"][0]["score"] for arm in mine], 100),
            _spread([arm["heldout"][-1]["score"] for arm in mine], 100),
            _spread([mean(score_at(arm, i) for i in range(-4, 0)) for arm in mine], 100),
            _spread([mean(step["grad_norm"] for step in arm["steps"]) for arm in mine], 1, 2),
            _spread([mean(step["num_trajectories"] for step in arm["steps"]) for arm in mine], 1, 0),
            _spread(ratios(arms, mine, "num_tokens"), 100),
            _spread(ratios(arms, mine, "gradients_s"), 100),
        ]
        lines.append(f"| {limit} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def ratios(arms: dict[str, Any], mine: list[dict[str, Any]], key: str) -> list[float]:
    """Of each arm to that of the same seed which trains all branches, if it ran."""
    wholes = {arm["config"]["seed"]: arm for arm in of_limit(arms, "all")}
    pairs = [(arm, wholes[arm["config"]["seed"]]) for arm in mine if arm["config"]["seed"] in wholes]
    return [sum(step[key] for step in a["steps"]) / sum(step[key] for step in b["steps"]) for a, b in pairs]


def _spread(values: list[float], scale: float, digits: int = 1) -> str:
    deviation = f" ± {scale * stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{scale * mean(values):.{digits}f}{deviation}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="*", default=ARMS, choices=[*ARMS, "none"], help="which to run")
    wanted = [name for name in parser.parse_args().arms if name != "none"]
    for folder in (OUT, WORK):
        folder.mkdir(parents=True, exist_ok=True)
    path = OUT / "curves.json"
    arms: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name in wanted:
        arms[name] = run_arm(name)
        arms = {known: arms[known] for known in ARMS if known in arms}
        path.write_text(json.dumps(arms, indent=1) + "\n")
    if all(of_limit(arms, limit) for limit in LIMITS):
        plot(arms)
        (OUT / "README.md").write_text(table(arms))
        print(table(arms))


if __name__ == "__main__":
    main()
