"""Shell. All benchmarks by name, and the files that their results are kept in.

A benchmark is a function from a scratch folder to figures; whatever it starts has ended when it returns.
Direction: name -> figures -> Result -> benchmarks/results/<name>.json -> docs/benchmarks.md.
"""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from gyre.errors import ConfigError, MissingError
from gyre.workers.bench import Figure, Result, decode_result, render_page
from gyre.workers.bench_executions import bench_executions
from gyre.workers.bench_gateway import bench_gateway
from gyre.workers.bench_log import NUM_EVENTS, bench_log
from gyre.workers.bench_log_tables import Rebuild
from gyre.workers.bench_loop import bench_loop
from gyre.workers.bench_switch import bench_switch
from gyre.workers.bench_train import bench_train
from gyre.workers.bench_tree import bench_tree
from gyre.workers.machine import this_machine
from gyre.workers.session_shapes import RECORDED

TINY = Path("policies/tiny")
"""Warmed up, so that executions have the length that they have in the quickstart."""


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """What benchmarks get from outside."""

    policy: Path
    folder: Path
    sandbox_cpu_s: Callable[[], float]
    installed: Callable[[str], bool]
    """Whether a harness of this name can be started."""
    sessions: Path
    rebuild: Rebuild
    num_events: int


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    about: str
    """What it measures, and how; the first sentence stands in the list."""
    run: Callable[[Needs], dict[str, Figure]]
    rolls_out: bool = True
    """Whether it needs a policy."""


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
    )
    return figures | {f"mini_swe_agent_{name}": value for name, value in real.items()}


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


BENCHES = {
    "log": Bench(
        about="How fast the log takes events, hands them on, and becomes tables, each next to what one would write "
        "without gyre. `append_...` are typed events of 600 B, 8 KB and 200 KB, appended by one process, up to "
        "4,000 at once; the reference is a C client of libnats that publishes as many bare bytes, asynchronously, "
        "with a Msg-Id each (`benchmarks/publish.c`; gcc and libnats-dev). The best of three each. `sync_always` "
        "is `sync_interval: always`, gyre's default, where an acknowledged event is on the disk; `sync_default` "
        "is the server's, every two minutes. `publish_to_reader` is from the call of `append` to the reader that "
        "has the decoded event, at 2,000 events/s; with `always` the reference is a loop that only writes as many "
        "bytes to the same disk at that rate, and syncs each. `log_to_tables` is a made-up run in the mix of the "
        "quickstart's, from the first request to the last commit of all tables; `..._next_to_fetch` compares it "
        "to a loop of `fetch`, the same fold, the same Arrow batches, and an acknowledgement each "
        "(`benchmarks/fetch_rows.py`). `replay_of_a_million` is the same per million events, `replay_last_fifth` "
        "the last fifth of the events next to the second: the cost is linear. `resident` is the most memory that "
        "this process had, next to what it had after the first fifth. `gyre bench log --events 5000000` takes the "
        "longest log.",
        run=lambda needs: bench_log(
            needs.folder,
            rebuild=needs.rebuild,
            num_events=needs.num_events,
            say=lambda text: print(f"gyre bench log: {text}", file=sys.stderr),
        ),
        rolls_out=False,
    ),
    "loop": Bench(
        about="Where the time of the whole loop goes, and what gyre adds to engine, harness, grader and trainer. "
        "Three steps of 8 groups x 8 executions, as in the quickstart; then the same through mini-swe-agent, if "
        "it is installed: a harness that people use, though a light one (`mini_swe_agent_...`). "
        "`gyre_added_wall` is the time in which none of the four works, plus the CPU seconds of gyre's own "
        "processes (log server, start of sandboxes included) over the number of cores: on a machine that "
        "rollout saturates, those are taken from the others. It leans to the high side: CPU time during idle time "
        "counts twice, and all of the gateway's is gyre's, although rendering and parsing are an engine's work "
        "elsewhere. A sandbox counts with what it adds to a program that does nothing; what its relay passes on "
        "later is the harness's. The projector counts to its end, since rows may wait that long. The reference is "
        "the wall time, less what other programs took of the machine (`other_programs_cpu`). "
        "The quickstart is the hardest case: a call is a few tokens, an execution "
        "some tens of milliseconds of harness and grader, while what gyre adds is the same for every call "
        "(`gyre_cpu_of_a_call`) and every sandbox (`gyre_cpu_of_a_sandbox`, two an execution) whatever the "
        "policy and the harness. `startup` is what a user waits for the first call, once the policy is there.",
        run=_loop,
    ),
    "gateway": Bench(
        about="What the gateway adds to a call, beside the engine alone and beside another gateway. `gyre gateway` as "
        "anybody would start it - log, fsync and tables with it - and the gateway of rLLM (rllm-model-gateway "
        "0.1.0, in an environment of its own, what passed kept in SQLite, written behind the reply), in front of the "
        "same scripted engine. `added_...` is the latency of a call less the median of the same engine asked "
        "directly with a prompt of that length, for the median and the 99th percentile of 200 calls in a row with "
        "histories of 1,000 and 100,000 tokens, and of 40 with 700,000; `cpu_of_a_call_...` are the CPU "
        "milliseconds of the gateway's process for one of them. Its reference, and that of the others, is the "
        "peer's figure. The two do not do the same: the peer passes messages on, so that its engine makes tokens "
        "of the whole history at each call, which is not counted here; gyre sends token ids, and answers only "
        "when the log has the call on disk. `sessions_...` is for 1,000 sessions at once, three calls each, that "
        "begin within the five seconds that a call takes the engine; the reference of `sessions_calls_a_second` "
        "is the engine alone. Each gateway has 25 seconds for a history and 45 for all sessions: where the peer was "
        "not through by then, `peer_calls_...` and `sessions_peer_calls` say how far it came, and there is no "
        "reference. `memory_of_a_session` is what the process "
        "grew by, over the number of sessions. "
        "`other_programs_cpu` tells how quiet the machine was, next to all that its CPUs had.",
        run=lambda needs: bench_gateway(
            needs.policy, needs.folder, say=lambda text: print(f"gyre bench gateway: {text}", file=sys.stderr)
        ),
    ),
    "executions": Bench(
        about="200 executions at once, all stopped by a deadline. Gateway, dispatcher, sandboxes and the reference "
        "harness as in a run, in front of a scripted engine that takes five seconds a call and never ends the work. "
        "First `harness.deadline_s` is 60 s: every execution is stopped and its workspace is scored. Then "
        "`harness.overall_deadline_s` is: every execution is discarded. `harness_deadline_late` is the time between "
        "the deadline and the end of harness and sandbox, `overall_deadline_late` the same by the times of the events. "
        "`orphan_processes` are those that lost their parent, which this benchmark adopts; `leftover_paths` what is "
        "left of workspaces, launch files and temporary files. `memory_sandbox` is one sandbox's with its harness, "
        "shared pages divided among those that share them; that of gateway and dispatcher is the most that each had.",
        run=lambda needs: bench_executions(needs.policy, needs.folder),
    ),
    "switch": Bench(
        about="What a role switch costs, in seconds by phase and in both directions, and what moving KV saves. Two "
        "real engines with Mooncake's store between them. One samples greedily from 8,192 tokens that nobody has seen; "
        "it leaves for training in the middle of that: `to_training_cut` is the abort, `..._kv` waits until every "
        "page is in the store, takes checksums, and reads all of it again on the target's side, `..._owner` is "
        "the compare-and-set, `..._release` the engine's memory. The other engine, flushed before, goes on with "
        "prompt and decoded tokens: `prefilled_again` is what it had to compute, next to what it has to without "
        "migration, and `first_token` how long that takes. `tokens_that_differ_from_a_run_without_a_switch` "
        "compares all tokens with one uninterrupted call. `to_rollout_...` is the way back: memory, weights over "
        "Mooncake, checksums, flip. `weight_pull` is 1 GiB with every tensor compared, next to Mooncake alone moving "
        "the same bytes into the same buffer; the best of three of each. Phases of whole runs, with Megatron "
        "beside the engine, are in the table `switches`.",
        run=lambda needs: bench_switch(_new(needs.folder / "switch")),
        rolls_out=False,
    ),
    "tree": Bench(
        about="Building trees from recorded sessions, tokens attached, and what a tree saves over flat rows. The "
        "structure is that of 650 real Claude Code sessions (`benchmarks/data`), the tokens are made up by position. "
        "`calls_a_second` folds the three events of a call, `calls_a_second_from_the_log` decodes their stored bytes "
        "first. `late_call` is a call of the last tenth of a session of 20,000, next to the first tenth: what a call "
        "costs does not grow with what came before. `memory` is what the trees hold, next to a row a call: ids of the "
        "whole path, and the log-probabilities of what the call sampled. `tokens_of_a_row_a_call` and "
        "`tokens_of_a_row_a_leaf` are the tokens of such rows, and of a row a leaf, over the tokens of the trees: how "
        "often a token would be computed. `tokens_of_j_max_5` is the same for what selection leaves, with rows that "
        "share nothing. `selection_of_a_bushy_tree` takes all 1,000 branches along a stem of 50 calls.",
        run=lambda needs: bench_tree(needs.sessions),
        rolls_out=False,
    ),
    "train": Bench(
        about="Forward and backward passes of leaf paths against the tree (`trainer.layout`), on the structure of real "
        "sessions. Every eighth of the sessions of `benchmarks/data`, lengths divided by 128 so that attention "
        "takes of the tiny policy about the share that it takes of a large one; tokens are random, selection and "
        "packing are those of a step. `speed_up_...` is the time of the paths over that of the tree, next to the ratio "
        "of their floating-point operations, which are counted without padding and with each token of a tree once. "
        "`time_LAYOUT_j_max_N` is the time with J_max = N over that without a limit, as the paper has it of its own "
        "tasks and policy; `flops_...` is the same of operations. Seconds are CPU seconds of one thread.",
        run=lambda needs: bench_train(needs.policy, needs.sessions),
    ),
}


def run_bench(
    name: str,
    *,
    policy: Path | None,
    sandbox_cpu_s: Callable[[], float],
    installed: Callable[[str], bool],
    rebuild: Rebuild,
    sessions: Path | None = None,
    num_events: int | None = None,
) -> Result:
    """Raises ConfigError for a name that there is not, and what the benchmark raises."""
    if name not in BENCHES:
        raise ConfigError(f"gyre bench: no benchmark {name!r}; there are: {', '.join(BENCHES)}")
    # So that whatever was started is ended then, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as folder:
        found = policy or TINY
        if BENCHES[name].rolls_out and policy is None and not TINY.is_dir():
            found = _random_policy(Path(folder) / "policy")
        if BENCHES[name].rolls_out and not found.is_dir():
            raise MissingError(f"{found}: no such policy; make one with `gyre policy init {found}`")
        needs = Needs(
            policy=found,
            folder=Path(folder),
            sandbox_cpu_s=sandbox_cpu_s,
            installed=installed,
            sessions=sessions or RECORDED,
            rebuild=rebuild,
            num_events=num_events or NUM_EVENTS,
        )
        return Result(bench=name, machine=this_machine(), figures=BENCHES[name].run(needs))


def render_results(folder: Path) -> str:
    """The page of all results that a folder holds. Raises MissingError without any."""
    paths = (folder / f"{name}.json" for name in BENCHES)
    results = [decode_result(path.read_bytes()) for path in paths if path.exists()]
    if not results:
        raise MissingError(f"{folder}: no results here; `gyre bench NAME --out {folder}/NAME.json` makes one")
    return render_page(results, {name: bench.about for name, bench in BENCHES.items()})


def _random_policy(path: Path) -> Path:
    argv = (sys.executable, "-m", "gyre.cli", "policy", "init", str(path), "--random")
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MissingError(f"gyre bench: no policy: {done.stderr.strip()}")
    return path
