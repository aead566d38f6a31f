"""Shell. All benchmarks by name, and the files that their results are kept in.

A benchmark is a function from a scratch folder to figures; whatever it starts has ended when it returns.
Direction: name -> figures -> Result -> benchmarks/results/<name>.json -> docs/benchmarks.md.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from gyre.errors import ConfigError, MissingError
from gyre.workers.bench import Figure, Result, decode_result, render_page
from gyre.workers.bench_loop import bench_loop
from gyre.workers.machine import this_machine

TINY = Path("policies/tiny")
"""Warmed up, so that executions have the length that they have in the quickstart."""


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """What benchmarks get from outside."""

    policy: Path
    folder: Path
    sandbox_cpu_s: Callable[[], float]
    installed: Callable[[str], bool]
    """Whether a harness of this name can be started."""


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    about: str
    """What it measures, and how; the first sentence stands in the list."""
    run: Callable[[Needs], dict[str, Figure]]


def _loop(needs: Needs) -> dict[str, Figure]:
    figures = bench_loop(needs.policy, _new(needs.folder / "reference"), sandbox_cpu_s=needs.sandbox_cpu_s)
    if not needs.installed("mini-swe-agent"):
        print("gyre bench loop: without mini-swe-agent; gyre harness install mini-swe-agent", file=sys.stderr)
        return figures
    real = bench_loop(
        needs.policy,
        _new(needs.folder / "mini-swe-agent"),
        sandbox_cpu_s=needs.sandbox_cpu_s,
        harness="mini-swe-agent",
        max_concurrent=8,
        num_steps=2,
        num_groups=4,
    )
    return figures | {f"mini_swe_agent_{name}": value for name, value in real.items()}


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


BENCHES = {
    "loop": Bench(
        about="Where the time of the whole loop goes, and what gyre adds to engine, harness, grader and trainer. "
        "Three steps of 8 groups x 8 executions, as in the quickstart; then two of 4 x 8 through mini-swe- "
        "agent, if it is installed: a harness that people use, though a light one (`mini_swe_agent_...`). "
        "`gyre_added_wall` is the time in which none of the four works, plus the CPU seconds of gyre's own "
        "processes (log server, start of sandboxes included) over the number of cores: on a machine that "
        "rollout saturates, those are taken from the others. It leans to the high side, since CPU time during "
        "idle time counts twice. Its reference is the wall time, less what other programs took of the machine "
        "(`other_programs_cpu`). The quickstart is the hardest case: a call is a few tokens, an execution "
        "some tens of milliseconds of harness and grader, while what gyre adds is the same for every call "
        "(`gyre_cpu_of_a_call`) and every sandbox (`gyre_cpu_of_a_sandbox`, two an execution) whatever the "
        "policy and the harness. `startup` is what a user waits for the first call, once the policy is there.",
        run=_loop,
    )
}


def run_bench(
    name: str, *, policy: Path | None, sandbox_cpu_s: Callable[[], float], installed: Callable[[str], bool]
) -> Result:
    """Raises ConfigError for a name that there is not, and what the benchmark raises."""
    if name not in BENCHES:
        raise ConfigError(f"gyre bench: no benchmark {name!r}; there are: {', '.join(BENCHES)}")
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as folder:
        found = policy or (TINY if TINY.is_dir() else _random_policy(Path(folder) / "policy"))
        if not found.is_dir():
            raise MissingError(f"{found}: no such policy; make one with `gyre policy init {found}`")
        needs = Needs(policy=found, folder=Path(folder), sandbox_cpu_s=sandbox_cpu_s, installed=installed)
        return Result(bench=name, machine=this_machine(), figures=BENCHES[name].run(needs))


def render_results(folder: Path) -> str:
    """The page of all results that a folder holds."""
    paths = (folder / f"{name}.json" for name in BENCHES)
    results = [decode_result(path.read_bytes()) for path in paths if path.exists()]
    return render_page(results, {name: bench.about for name, bench in BENCHES.items()})


def _random_policy(path: Path) -> Path:
    argv = (sys.executable, "-m", "gyre.cli", "policy", "init", str(path), "--random")
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MissingError(f"gyre bench: no policy: {done.stderr.strip()}")
    return path
