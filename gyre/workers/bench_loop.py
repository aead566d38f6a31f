"""Shell. `gyre bench loop`: a run like the quickstart, and where its wall and CPU seconds went.

The share that gyre adds to engine, harness, grader and trainer is (idle + CPU / cores) / wall, where idle is the time
in which none of them works (`run_costs.py`) and CPU is what gyre's own processes, their log and the start of sandboxes
used meanwhile. Rollout saturates a small machine, so each CPU second of gyre is taken from the others: that makes CPU /
cores wall time as well. What gyre does during idle time counts twice, so the figure leans to the high side. What other
programs of the machine took is left out of the wall time: it would make the share look smaller than it is.

Direction: config -> `gyre run` -> its log, and /proc while it goes on -> figures.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gyre.errors import ProcessError
from gyre.events.access import open_log
from gyre.events.run_dir import RunDir
from gyre.workers.bench import Figure, figure
from gyre.workers.cpu_meter import GYRE, CpuMeter
from gyre.workers.run_costs import RunCosts, WallSeconds

GOAL = 0.10
SANDBOXES = 2
"""Of one execution: the harness's and the grader's."""

CONFIG = """\
seed: 1
tasks: {{family: files, num_goals: 2}}
harness: {{name: {harness}, deadline_s: 90, max_turns: 8, max_concurrent: {concurrent}}}
policy: {{path: {policy}, init: false}}
sampling: {{temperature: 1.0, max_tokens: 64}}
pipeline: {{num_steps: {steps}, groups_per_step: {groups}, executions_per_group: {executions}}}
trainer: {{learning_rate: 5.0e-4, num_minibatches: 2}}
log: {{min_free_gb: 0}}
"""
"""As examples/quickstart.yaml and examples/mini-swe-agent.yaml."""


def bench_loop(
    policy: Path,
    folder: Path,
    *,
    sandbox_cpu_s: Callable[[], float],
    harness: str = "reference",
    max_concurrent: int = 16,
    num_steps: int = 3,
    num_groups: int = 8,
    num_executions: int = 8,
    timeout_s: float = 600.0,
) -> dict[str, Figure]:
    """Runs the loop in `folder` (empty) and measures it. Raises ProcessError when the run does not complete.

    sandbox_cpu_s: CPU seconds that one sandbox costs whatever runs in it.
    """
    config, run_path = folder / "loop.yaml", folder / "loop"
    config.write_text(
        CONFIG.format(
            policy=policy.resolve(),
            harness=harness,
            concurrent=max_concurrent,
            steps=num_steps,
            groups=num_groups,
            executions=num_executions,
        )
    )
    begun_s = time.time()
    meter = _watch((sys.executable, "-m", "gyre.cli", "run", str(config), "--dir", str(run_path)), folder, timeout_s)
    ended_s = time.time()
    costs = asyncio.run(_read_log(run_path))
    wall = costs.wall()
    cpu = meter.between(costs.begin_s, costs.end_s)
    # Rows may wait until somebody asks, or the end: the projector's work for these events counts whenever it is done.
    cpu["projector"] = meter.between(costs.begin_s, ended_s)["projector"]
    sandboxes = SANDBOXES * costs.num_executions * sandbox_cpu_s()
    return {
        **_shares(wall, cpu, sandboxes),
        **_costs_of_one(costs, cpu, sandboxes),
        **_by_phase(costs, wall, cpu, sandboxes),
        **_waits(costs, begun_s, ended_s),
    }


def _watch(argv: Sequence[str], folder: Path, timeout_s: float) -> CpuMeter:
    output = folder / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(argv, cwd=folder, stdout=file, stderr=file)
        meter = CpuMeter(process.pid)
        meter.start()
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait()
            meter.stop()
    if code:
        said = output.read_text(errors="replace").strip().splitlines()
        raise ProcessError(f"gyre bench loop: the run ended with {code}: {said[-1] if said else 'it said nothing'}")
    return meter


async def _read_log(path: Path) -> RunCosts:
    costs = RunCosts()
    async with open_log(RunDir(path)) as (log, _):
        async for recorded in log.read(1, until=await log.last_seq()):
            costs.evolve(recorded)
    return costs


def _shares(wall: WallSeconds, cpu: dict[str, float], sandboxes: float) -> dict[str, Figure]:
    own = sum(cpu.get(part, 0.0) for part in GYRE) + sandboxes
    ours = sum(value for part, value in cpu.items() if part != "machine")
    cores = len(os.sched_getaffinity(0))
    others = max(0.0, cpu["machine"] - ours)
    had = wall.total - others / cores
    return {
        "gyre_added_wall": figure(wall.phases["gyre"] + own / cores, "s", reference=had, max_ratio=GOAL),
        "gyre_idle_wall": figure(wall.phases["gyre"], "s", reference=wall.total),
        "gyre_cpu": figure(own, "CPU s", reference=ours),
        "machine_busy": figure(cpu["machine"], "CPU s", reference=wall.total * cores),
        "other_programs_cpu": figure(others, "CPU s", reference=cpu["machine"]),
    }


def _costs_of_one(costs: RunCosts, cpu: dict[str, float], sandboxes: float) -> dict[str, Figure]:
    """What does not grow with the policy: from these the share follows for calls and harnesses that take longer."""
    own = sum(cpu.get(part, 0.0) for part in GYRE)
    return {
        "gyre_cpu_of_a_call": figure(1e3 * own / max(costs.num_calls, 1), "CPU ms"),
        "gyre_cpu_of_a_sandbox": figure(1e3 * sandboxes / max(SANDBOXES * costs.num_executions, 1), "CPU ms"),
    }


def _by_phase(costs: RunCosts, wall: WallSeconds, cpu: dict[str, float], sandboxes: float) -> dict[str, Figure]:
    figures = {f"wall_{name}": figure(seconds, "s") for name, seconds in wall.phases.items() if name != "gyre"}
    figures["wall_switching"] = figure(wall.switching, "s")
    figures["wall_publish"] = figure(sum(costs.switch_phases.get(n, 0.0) for n in ("fetch", "verify", "load")), "s")
    figures["wall_checkpoint"] = figure(costs.trainer_phases.get("checkpoint", 0.0), "s")
    names = {"engine": "rollout", "trainer": "training", "projector": "projection"}
    for part in ("engine", "trainer", *GYRE):
        figures[f"cpu_{names.get(part, part)}"] = figure(cpu.get(part, 0.0), "CPU s")
    figures["cpu_harness_and_scoring"] = figure(max(0.0, cpu["sandboxes"] - sandboxes), "CPU s")
    figures["cpu_sandbox_starts"] = figure(sandboxes, "CPU s")
    return figures


def _waits(costs: RunCosts, begun_s: float, ended_s: float) -> dict[str, Figure]:
    at = costs.milestones
    added = sorted(costs.call_added)
    return {
        "startup": figure(costs.begin_s - begun_s, "s"),
        "startup_log": figure(at["RunStarted"] - begun_s, "s"),
        "startup_trainer": figure(at["PolicyPublished"] - begun_s, "s"),
        "startup_engine": figure(at["CellJoined"] - begun_s, "s"),
        "shutdown": figure(ended_s - costs.end_s, "s"),
        "added_to_a_call_median": figure(added[len(added) // 2] if added else 0.0, "s"),
        "executions": figure(costs.num_executions, "executions"),
        "calls_per_execution": figure(costs.num_calls / max(costs.num_executions, 1), "calls"),
        "events": figure(costs.num_events, "events"),
    }
