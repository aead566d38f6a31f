"""Shell. The command line, and the only place that wires processes together.

Every command is thin: it finds the run, builds what a shell module needs of another folder, and calls
it. Imports are inside the commands, so that `gyre --help` and the small processes start fast. It is
longer than other modules because it is one function a command and nothing else.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gyre.errors import REFUSED, ConfigError, FoldError, GyreError, LogError, MissingError, is_passing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gyre.config import Config
    from gyre.events.log import Log, Stored, Writer
    from gyre.events.run_dir import RunDir
    from gyre.projections.evaluations import Evaluation
    from gyre.projections.integrity import Integrity
    from gyre.projections.progress import Progress

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Train agents by reinforcement learning through unmodified harnesses, on an event log.",
    epilog="First steps: `gyre doctor`, then `gyre run examples/quickstart.yaml`.",
)
policy_app = typer.Typer(no_args_is_help=True, help="Make and export policies (Hugging Face format).")
harness_app = typer.Typer(no_args_is_help=True, help="The agent programs that executions run.")
process_app = typer.Typer(
    no_args_is_help=True,
    help="One process of a run by itself, over the log named in RUN_DIR/run.json or in GYRE_NATS_URL.",
)
runs_app = typer.Typer(invoke_without_command=True, help="List runs and their figures; archive or remove one.")
log_app = typer.Typer(no_args_is_help=True, help="A run's log as one file, and whether a log is intact.")
streams_app = typer.Typer(no_args_is_help=True, help="streams.yaml against the streams of a live server.")
app.add_typer(runs_app, name="runs")
app.add_typer(log_app, name="log")
app.add_typer(streams_app, name="streams")
app.add_typer(policy_app, name="policy")
app.add_typer(harness_app, name="harness")
app.add_typer(process_app, name="process")

RunPath = Annotated[Path, typer.Argument(help="Run directory, as in runs/quickstart.")]
RUNS = Path("runs")
CONSUMERS = {"loops": "gyre.projections.loops:loops", "meter": "gyre.projections.meter:meter"}
"""Short names of the consumers that come with gyre."""


# ---------------------------------------------------------------- runs


@app.command(epilog="Example: `gyre run examples/quickstart.yaml` - Ctrl-C stops it; the same --dir goes on.")
def run(
    config_path: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file; see docs/guide.md.")],
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Run directory. Default: a new one under runs/, named after CONFIG.")
    ] = None,
    unsafe_no_sandbox: Annotated[
        bool, typer.Option("--unsafe-no-sandbox", help="Run model-written commands with your own rights.")
    ] = False,
) -> None:
    """Run the whole loop: rollout, scores, training, weights, until CONFIG's steps are done."""
    from gyre.events.run_dir import RunDir
    from gyre.projections.report import closing

    config = _read_config(config_path)
    _check_before_start(config, unsafe_no_sandbox)
    run_dir = RunDir(directory or _new_run_dir(config_path.stem))
    with run_dir.lock() as lock:
        _ensure_policy(config)
        progress = _run_to_the_end(run_dir, config, unsafe_no_sandbox, lock)
    summary = progress.summary()
    print(closing(summary, str(run_dir.path)))
    if summary["state"] == "interrupted":
        print(f"  gyre run {config_path} --dir {run_dir.path}    # goes on")
    if summary["state"] == "paused":
        print(f"  gyre run {config_path} --dir {run_dir.path}    # goes on with fresh groups; guards may be changed")
    _exit_unless_completed(progress)


@app.command(
    "eval",
    epilog="Examples: `gyre eval policies/tiny` - `gyre eval runs/quickstart --temperature 1 --samples 4` - "
    "`gyre eval --compare runs/eval runs/eval-2`",
)
def evaluate(
    source: Annotated[
        Path | None, typer.Argument(metavar="POLICY_OR_RUN", help="Hugging Face directory, or run directory.")
    ] = None,
    step: Annotated[int, typer.Option(help="Of a run: the checkpoint to take; 0: the last one.")] = 0,
    harness: Annotated[str, typer.Option(help="Default: that of the run; reference.")] = "",
    tasks: Annotated[int, typer.Option(help="Number of tasks.")] = 64,
    seed: Annotated[int, typer.Option(help="Of the tasks.")] = 1000,
    split: Annotated[str, typer.Option(help="heldout or train.")] = "heldout",
    num_goals: Annotated[int, typer.Option(help="Goals of one task. Default: as the run; 2.")] = 0,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    samples: Annotated[int, typer.Option(help="Executions of one task.")] = 1,
    pass_at: Annotated[int, typer.Option(help="Report pass@k for this k too; at most --samples.")] = 0,
    config_path: Annotated[
        Path | None, typer.Option("--config", help="YAML that says the rest (engine, harness limits, ...).")
    ] = None,
    directory: Annotated[Path | None, typer.Option("--dir", help="Run directory. Default: a new one.")] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="DIR_A DIR_B", help="Compare two evaluations instead.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Figures as one JSON object.")] = False,
    unsafe_no_sandbox: Annotated[bool, typer.Option("--unsafe-no-sandbox", help="As for `gyre run`.")] = False,
) -> None:
    """Score a policy on a set of tasks: a run of its own, without training, on a log of its own."""
    import orjson

    from gyre.config import Config
    from gyre.events.run_dir import RunDir
    from gyre.projections.evaluations import compare as compare_evaluations
    from gyre.projections.evaluations import comparison_lines, evaluation_lines
    from gyre.workers.evaluation import evaluation_config

    if compare is not None:
        figures = compare_evaluations(*map(_evaluation_of, compare))
        print(orjson.dumps(figures).decode() if as_json else "\n".join(comparison_lines(figures)))
        return
    if source is None:
        raise ConfigError("gyre eval: what? give a policy directory or a run directory, or --compare DIR_A DIR_B")
    is_run = (source / "run.json").exists()
    if not is_run and not (source / "config.json").exists():
        raise MissingError(f"{source}: neither a policy (no config.json) nor a run (no run.json)")
    if step and not is_run:
        raise ConfigError(f"gyre eval: --step {step}: {source} is a policy, not a run")
    step = RunDir(source).kept_step(step) if is_run else step
    base = _read_config(config_path) if config_path else _config_of(source) if is_run else Config()
    run_dir = RunDir(directory or _new_run_dir("eval"))
    policy = run_dir.path / "policy" if is_run else source
    config = evaluation_config(
        base,
        policy=str(policy),
        harness=harness,
        num_tasks=tasks,
        seed=seed,
        split=split,
        temperature=temperature,
        num_samples=samples,
        pass_at=pass_at,
        num_goals=num_goals,
    )
    if not is_run:
        _check_before_start(config, unsafe_no_sandbox)
    with run_dir.lock() as lock:
        if is_run and not policy.exists():
            _export(source, policy, step)
        _check_before_start(config, unsafe_no_sandbox)
        progress = _run_to_the_end(run_dir, config, unsafe_no_sandbox, lock, quiet=as_json)
    if progress.finished and progress.finished.detail:
        print(f"gyre eval: {progress.finished.detail}", file=sys.stderr)
    key = max(progress.evals, default=(0, temperature))
    result = {
        "run": progress.run,
        "policy": str(source),
        "step": step,
        "harness": config.harness.name,
        "split": split,
        "seed": seed,
        "temperature": temperature,
        "samples": samples,
        **(progress.evals[key].figures(pass_at) if progress.evals else {}),
    }
    if as_json:
        print(orjson.dumps(result).decode())
    elif progress.evals:
        print("\n".join(["", f"{source}, {config.harness.name}, {split} tasks of seed {seed}:"]))
        print("\n".join(f"  {line}" for line in evaluation_lines(result)))
        print(f"next:\n  gyre eval --compare {run_dir.path} OTHER\n  gyre tree {run_dir.path}")
    _exit_unless_completed(progress)


@runs_app.callback(epilog="Examples: `gyre runs --json` - `gyre runs archive runs/quickstart`")
def runs(
    context: typer.Context,
    root: Annotated[Path, typer.Option("--root", help="Where run directories are.")] = RUNS,
    as_json: Annotated[bool, typer.Option("--json", help="All figures, as in summary.json.")] = False,
) -> None:
    """List runs and their figures."""
    import orjson
    from rich.console import Console
    from rich.table import Table

    from gyre.events.run_dir import find_runs
    from gyre.workers.run import load_summary

    if context.invoked_subcommand is not None:
        return
    summaries = {str(r.path): load_summary(r) or {"run": r.path.name, "state": "unfinished"} for r in find_runs(root)}
    if as_json:
        print(orjson.dumps(summaries, option=orjson.OPT_INDENT_2).decode())
        return
    table = Table("run", "state", "steps", "version", "executions", "score", box=None)
    for path, figures in summaries.items():
        scores: Any = figures.get("scores") or [{}]
        executions: Any = figures.get("executions") or {}
        cells = (figures["state"], figures.get("steps", ""), figures.get("version", ""), executions.get("scored", ""))
        table.add_row(path, *map(str, cells), str(scores[-1].get("score", "")))
    Console().print(table if summaries else f"no runs in {root}/; start one: gyre run examples/quickstart.yaml")


@runs_app.command("archive", epilog="Example: `gyre runs archive runs/quickstart archives/quickstart.gyre`")
def runs_archive(
    run_path: RunPath,
    file: Annotated[Path | None, typer.Argument(help="Archive to write. Default: RUN_DIR.gyre.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Export the log, read the archive back, then remove the run directory: checkpoints too."""
    from gyre.events.lifecycle import contents, held, remove

    run_dir = _existing(run_path)
    with held(run_dir):
        path = file or run_path.with_name(f"{run_path.resolve().name}.gyre")
        _refuse_existing(path)
        _confirm(f"{run_path}: remove it once {path} holds its log ({contents(run_dir)})?", yes)
        log_export(run_path, path)
        if not (found := _examine_archive(path)).ok:
            raise ConfigError(f"{path}: {found.text()}; the run directory stays as it is")
        remove(run_dir)
    print(f"{run_path}: removed; `gyre log import {path} {run_path}` brings log and tables back")


@runs_app.command("rm", epilog="Example: `gyre runs rm runs/quickstart`")
def runs_rm(run_path: RunPath, yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False) -> None:
    """Remove a run directory: log, tables, checkpoints."""
    from gyre.events.lifecycle import contents, held, remove

    run_dir = _existing(run_path)
    with held(run_dir):
        _confirm(f"{run_path}: remove it for good ({contents(run_dir)})?", yes)
        is_elsewhere = not run_dir.nats.is_dir()
        url = run_dir.load_address().url
        remove(run_dir)
    print(f"{run_path}: removed" + (f"; its streams on {url} stay there" if is_elsewhere else ""))


@log_app.command("export", epilog="Example: `gyre log export runs/quickstart quickstart.gyre`")
def log_export(run_path: RunPath, file: Annotated[Path, typer.Argument(help="Archive to write.")]) -> None:
    """Write the whole log to one compressed file, which any server can import."""
    from gyre.events.archive import export_log

    _refuse_existing(file)

    async def work(log: "Log", live: bool) -> None:
        begun = time.monotonic()
        header = await export_log(log, file)
        seconds = time.monotonic() - begun
        rate = f"{file.stat().st_size:,} bytes, {header.num_events / seconds:,.0f} events/s"
        print(f"{file}: run {header.run}, {header.num_events:,} events, {rate}, digest {header.digest}")

    _with_log(run_path, work)


@log_app.command("import", epilog="Example: `gyre log import quickstart.gyre runs/again`")
def log_import(
    file: Annotated[Path, typer.Argument(help="Archive.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Run directory to make.")],
    url: Annotated[str, typer.Option(help="A NATS server of your own (token in GYRE_NATS_TOKEN).")] = "",
) -> None:
    """Make a run directory of an archive: same sequences, same digests, tables and summary as they were."""
    import orjson

    from gyre.events.lifecycle import imported
    from gyre.events.run_dir import RunDir
    from gyre.projections.rebuild import rebuild

    async def work() -> None:
        begun, run_dir = time.monotonic(), RunDir(directory)
        async with imported(file, run_dir, url=url) as (header, log):
            rate = header.num_events / (time.monotonic() - begun)
            try:
                summary = await rebuild(log, run_dir.tables)
                run_dir.summary.write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2) + b"\n")
            except (LogError, FoldError) as error:  # the log is there all the same, as damaged as it was
                run_dir.tables.unlink(missing_ok=True)
                _say(f"{directory}: without tables: {error}")
        print(f"{directory}: run {header.run}, {header.num_events:,} events, {rate:,.0f} events/s")

    asyncio.run(work())


@log_app.command("verify", epilog="Examples: `gyre log verify runs/quickstart` - `gyre log verify quickstart.gyre`")
def log_verify(
    source: Annotated[Path, typer.Argument(metavar="RUN_DIR|FILE", help="Run directory or archive.")],
) -> None:
    """Find the first event that was altered, is missing or is out of place. `gyre replay --verify` does more."""
    from gyre.projections.integrity import Integrity, examine

    found: list[Integrity] = []

    async def work(log: "Log", live: bool) -> None:
        last = await log.last_seq()
        if not last:
            raise MissingError(f"{source}: the log has no events yet")
        found.append(await examine(log.run, log.stored(1, until=last)))

    if source.is_dir():
        _with_log(source, work)
    else:
        found.append(_examine_archive(source))
    print(found[0].text())
    if not found[0].ok:
        raise typer.Exit(1)


@streams_app.command("plan", epilog="Example: `gyre streams plan runs/quickstart`")
def streams_plan(
    run_path: RunPath,
    file: Annotated[Path | None, typer.Option("--file", help="streams.yaml. Default: the one of gyre.")] = None,
) -> None:
    """Show what differs between streams.yaml and the server, and what may be changed."""
    _streams(run_path, file, apply=False)


@streams_app.command("apply", epilog="Example: `gyre streams apply runs/quickstart --file streams.yaml`")
def streams_apply(
    run_path: RunPath,
    file: Annotated[Path | None, typer.Option("--file", help="streams.yaml. Default: the one of gyre.")] = None,
) -> None:
    """Make the server's streams as streams.yaml says; refuses all of it if anything could lose events."""
    _streams(run_path, file, apply=True)


@app.command(epilog='Example: `gyre sql runs/quickstart "select step, loss from steps"`')
def sql(
    run_path: RunPath,
    query: Annotated[str, typer.Argument(help="One SELECT over the run's tables; see docs/tables.md.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a row.")] = False,
) -> None:
    """Ask a running or a finished run in SQL."""
    import orjson
    from rich.console import Console
    from rich.table import Table

    from gyre.projections.sql_service import sql as ask

    answer = ask(_existing(run_path).path, query)
    if as_json:
        for row in answer.to_pylist():
            print(orjson.dumps(row, default=str).decode())
        return
    rows = [{name: "" if value is None else str(value) for name, value in row.items()} for row in answer.to_pylist()]
    console = Console()
    widths = [max([len(name), *(len(row[name]) for row in rows)]) + 2 for name in answer.column_names]
    if console.is_terminal and sum(widths) > console.width:  # one block a row beats columns that nobody can read
        for row in rows:
            console.print("\n".join(f"{name:<{max(map(len, row))}}  {value}" for name, value in row.items()), "")
        return
    table = Table(*answer.column_names, box=None)
    for row in rows:
        table.add_row(*row.values())
    Console(width=max(sum(widths), console.width)).print(table)


@app.command(epilog="Example: `gyre tail runs/quickstart --type call.` ")
def tail(
    run_path: RunPath,
    start: Annotated[int, typer.Option("--from", help="First sequence; 0: only what comes from now on.")] = 1,
    only: Annotated[str, typer.Option("--type", help="Only types that begin with this.")] = "",
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", "-f", help="Wait for more while the run goes on.")
    ] = True,
) -> None:
    """Print events as they come, one line each."""
    from gyre.projections.lines import event_line

    async def follow_log(log: "Log", live: bool) -> None:
        last = await log.last_seq()
        first = start or last + 1
        if not (follow and live) and last < first:
            return
        async for recorded in log.read(first, until=None if follow and live else last):
            line = event_line(recorded)
            if line.startswith(only, line.index(" ") + 1):
                print(line, flush=True)

    _with_log(run_path, follow_log)


@app.command(
    epilog="Examples: `gyre consume meter runs/quickstart --no-follow` - `gyre consume mine.py:alert runs/quickstart`"
)
def consume(
    name: Annotated[
        str, typer.Argument(metavar="CONSUMER", help="module:function, file.py:function, `loops` or `meter`.")
    ],
    run_path: RunPath,
    start: Annotated[
        str, typer.Option("--from", help="The first time: beginning, now, a sequence, or a time (ISO 8601).")
    ] = "",
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", "-f", help="Wait for more while the run goes on.")
    ] = True,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Its state and place. Default: RUN_DIR/consumers/NAME.json.")
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Forget the checkpoint.")] = False,
) -> None:
    """Run a consumer over a run's events: its state is exact after any crash, and the run is not disturbed."""
    from gyre.events.checkpoint import Checkpoint
    from gyre.events.consuming import consume as run_consumer
    from gyre.events.consuming import find_consumer

    consumer = find_consumer(name, CONSUMERS)
    path = checkpoint or run_path / "consumers" / f"{consumer.name}.json"

    async def work(log: "Log", live: bool) -> None:
        with Checkpoint(path) as held:
            if restart:
                held.discard()
            state = await run_consumer(consumer, log, held, start=start or None, follow=follow and live, say=_say)
        if consumer.report:
            print(consumer.report(state), flush=True)

    _with_log(run_path, work)


@app.command(epilog="Example: `gyre tree runs/quickstart g00000-0`")
def tree(
    run_path: RunPath,
    execution: Annotated[str, typer.Argument(help="Execution, as in g00000-0. Default: the one with most calls.")] = "",
) -> None:
    """Draw the calls of one execution as a tree."""
    from gyre.projections.draw import Sketch

    async def draw(log: "Log", live: bool) -> None:
        sketch = Sketch(execution)
        last = await log.last_seq()
        if last:
            async for recorded in log.read(1, until=last):
                sketch.evolve(recorded)
        print(sketch.text())

    _with_log(run_path, draw)


@app.command(epilog="Examples: `gyre replay runs/quickstart --verify` - `gyre replay runs/quickstart --verify --train`")
def replay(
    run_path: RunPath,
    verify: Annotated[bool, typer.Option("--verify", help="Compare with the recorded digests.")] = True,
    train: Annotated[bool, typer.Option("--train", help="Take the recorded steps again as well, on CPU.")] = False,
    policy: Annotated[
        Path | None, typer.Option("--policy", help="What the run began with. Default: policy.path of its config.")
    ] = None,
) -> None:
    """Rebuild tables, decisions and batches from the log alone, and compare them with what was recorded.

    With --train also the weights: from the policy that the run began with, step by step.
    """
    from gyre.projections.replay import verify as check
    from gyre.workers import scheduler

    async def rebuild(log: "Log", live: bool) -> None:
        verdict = await check(log, scheduler=scheduler)
        print(verdict.text())
        if not verdict.ok:
            raise typer.Exit(1)
        if train:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks
            from gyre.workers.doctor import versions
            from gyre.workers.retrain import retrain

            num = await retrain(log, policy, versions=versions(), show=lambda line: print(line, flush=True))
            print(f"same weights as recorded: {num} steps" if num else "no step is recorded: nothing to train")

    if not verify:
        raise ConfigError("gyre replay: nothing to do; add --verify")
    _with_log(run_path, rebuild)


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Print versions, what is missing, and how to get it."""
    import msgspec
    from rich.console import Console
    from rich.table import Table

    from gyre.agents.sandbox import check_sandbox
    from gyre.workers.doctor import examine

    findings = examine(check_sandbox)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(findings)).decode())
    else:
        table = Table("", "", "what to do", "needed for", box=None)
        for item in findings:
            table.add_row(item.name, item.found or "missing", "" if item.found else item.remedy, item.needed_for)
        Console().print(table)
    if any(not item.found for item in findings):
        raise typer.Exit(1)


@app.command(epilog="Examples: `gyre bench` lists them - `gyre bench loop --out loop.json`")
def bench(
    name: Annotated[str, typer.Argument(help="Which one. Default: list them.")] = "",
    out: Annotated[Path | None, typer.Option(help="Write the JSON object to this file as well.")] = None,
    policy: Annotated[
        Path | None, typer.Option(help="Policy to roll out. Default: policies/tiny, or a random one.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Print the page that shows the results in DIR instead.")
    ] = None,
) -> None:
    """Measure, and print one JSON object: figures, what each is compared to, and whether its goal holds."""
    from gyre.agents.sandbox import sandbox_cpu_s
    from gyre.workers.bench import encode_result
    from gyre.workers.benches import BENCHES, render_results, run_bench

    if page is not None:
        print(render_results(page), end="")
        return
    if not name:
        print("\n".join(f"{name:<12} {bench.about.partition('. ')[0]}" for name, bench in BENCHES.items()))
        return
    content = encode_result(run_bench(name, policy=policy, sandbox_cpu_s=sandbox_cpu_s))
    print(content.decode())
    if out is not None:
        out.write_bytes(content + b"\n")


# ---------------------------------------------------------------- policies and harnesses


@policy_app.command("init", epilog="Example: `gyre policy init policies/tiny --seed 1`")
def policy_init(
    path: Annotated[Path, typer.Argument(help="Directory to make.")] = Path("policies/tiny"),
    seed: Annotated[int, typer.Option(help="Fixes tokenizer, weights and warm start.")] = 1,
    family: Annotated[str, typer.Option(help="Family of tasks that it is warmed up on.")] = "files",
    num_goals: Annotated[int, typer.Option(help="Goals of one task.")] = 2,
    warm_start: Annotated[bool, typer.Option("--warm-start/--random", help="Supervised steps first, or none.")] = True,
    num_threads: Annotated[int, typer.Option(help="Threads of the warm start.")] = 2,
) -> None:
    """Make a tiny policy: tokenizer, template and weights, warmed up on oracle demonstrations."""
    from gyre.workers.tiny_policy import init_policy

    if path.exists():
        raise ConfigError(f"{path}: exists already; choose another path or remove it")
    if not warm_start:
        print(f"{path}: {init_policy(path, seed, family=family)}")
        return
    from gyre.workers.warm_start import warm_policy

    digest = warm_policy(path, seed, family=family, num_goals=num_goals, num_threads=num_threads, show=_show_warm_start)
    print(f"{path}: {digest}")


@policy_app.command("export", epilog="Example: `gyre policy export runs/quickstart out/policy`")
def policy_export(
    run_path: RunPath,
    target: Annotated[Path, typer.Argument(help="Directory to make, in Hugging Face format.")],
    step: Annotated[int, typer.Option(help="Step to export; 0: the last checkpoint.")] = 0,
) -> None:
    """Write a checkpoint of a run as a Hugging Face model directory."""
    run_dir = _existing(run_path)
    written = run_dir.kept_step(step)
    from gyre.workers.export import export_policy

    config = _config_of(run_path)
    export_policy(run_dir.checkpoints / f"step-{written}", Path(config.policy.path), target, config.seed)
    print(f"{target}: the policy after step {written}")


@harness_app.command("list")
def harness_list() -> None:
    """Which harnesses there are, and which are installed."""
    from rich.console import Console
    from rich.table import Table

    from gyre.agents.harness_install import installed
    from gyre.agents.harnesses import RECIPES

    table = Table("harness", "version", "state", "about", box=None)
    for column in table.columns[:3]:
        column.no_wrap = True
    for name, recipe in RECIPES.items():
        state = "ready" if installed(name) else f"gyre harness install {name}"
        table.add_row(name, recipe.version, state, recipe.about)
    Console().print(table)


@harness_app.command("install", epilog="Example: `gyre harness install mini-swe-agent`")
def harness_install(name: Annotated[str, typer.Argument(help="As `gyre harness list` shows it.")]) -> None:
    """Install a harness, unmodified, in an environment of its own."""
    from gyre.agents.harness_install import install

    print(f"{name}: {install(name) or 'comes with gyre'}")


# ---------------------------------------------------------------- processes of a run


@process_app.command("gateway")
def process_gateway(run_path: RunPath) -> None:
    """Harness requests in, call events out."""
    from gyre.agents.checkpoint import load_renderer
    from gyre.agents.gateway import run_gateway
    from gyre.workers.engine import SglangEngine

    async def work(log: "Log", writer: "Writer", config: "Config") -> None:
        run_dir = _existing(run_path)

        run_dir.socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        port_file = run_dir.path / "gateway.port"

        def ready(port: int) -> None:
            port_file.write_text(str(port))

        async with AsyncExitStack() as engines:

            def engine_for(url: str) -> SglangEngine:
                engine = SglangEngine(url, call_timeout_s=config.engine.call_timeout_s)
                engines.push_async_callback(engine.close)
                return engine

            await run_gateway(
                log,
                writer,
                config,
                engine_for=engine_for,
                renderer=load_renderer(config.policy.path),
                socket_path=run_dir.socket,
                host=config.gateway.host,
                port=config.gateway.port,
                last_port=int(port_file.read_text() or 0) if port_file.exists() else 0,
                ready=ready,
            )

    _process(run_path, "gateway", work)


@process_app.command("dispatcher")
def process_dispatcher(
    run_path: RunPath, unsafe_no_sandbox: Annotated[bool, typer.Option("--unsafe-no-sandbox")] = False
) -> None:
    """Groups and executions: sandboxes, harnesses, scores."""
    import secrets

    from gyre.agents.dispatcher import Dispatcher
    from gyre.agents.execution import HarnessRunner
    from gyre.agents.sandbox import end_strays
    from gyre.agents.unsandboxed import open_sandbox

    async def work(log: "Log", writer: "Writer", config: "Config") -> None:
        run_dir = _existing(run_path.resolve())
        sandbox = open_sandbox(config.harness.sandbox, unsafe=unsafe_no_sandbox)
        end_strays(run_dir.path / "workspaces")
        port = await _wait_for_port(run_dir) if config.harness.sandbox == "none" else 0
        runner = HarnessRunner(
            config.harness,
            sandbox,
            socket_path=run_dir.socket,
            gateway_url=f"http://{config.gateway.host}:{port}",
        )
        dispatcher = Dispatcher(
            log, writer, config, runner=runner, run_dir=run_dir.path, mint=lambda: secrets.token_hex(8)
        )
        await dispatcher.run()

    _process(run_path, "dispatcher", work)


@process_app.command("projector")
def process_projector(run_path: RunPath) -> None:
    """The log into DuckDB, and SQL for whoever asks."""
    from gyre.projections.projector import run_projector

    async def work(log: "Log", writer: "Writer", config: "Config") -> None:
        await run_projector(log, writer, run_dir=_existing(run_path).path)

    _process(run_path, "projector", work)


@process_app.command("scheduler")
def process_scheduler(run_path: RunPath) -> None:
    """Decisions from the log, commands to cells."""
    from gyre.workers.scheduler_loop import run_scheduler

    async def work(log: "Log", writer: "Writer", config: "Config") -> None:
        await run_scheduler(log, writer, config, clock=time.time)

    _process(run_path, "scheduler", work)


@process_app.command("cell")
def process_cell(run_path: RunPath, cell: Annotated[str, typer.Option(help="Cell name.")] = "c0") -> None:
    """One elastic cell: an engine and a trainer, one role at a time."""
    from gyre.workers.cell import run_cell

    async def work(log: "Log", writer: "Writer", config: "Config") -> None:
        trainer = (sys.executable, "-m", "gyre.cli", "process", "trainer", str(run_path), "--cell", cell)
        await run_cell(
            log, writer, config, cell_id=cell, index=0, run_dir=_existing(run_path).path, trainer_argv=trainer
        )

    _process(run_path, "cell", work)


@process_app.command("trainer")
def process_trainer(run_path: RunPath, cell: Annotated[str, typer.Option(help="Cell name.")] = "c0") -> None:
    """The trainer of a cell: cohorts in, steps and weights out."""
    from gyre.workers.trainer_loop import run_trainer

    async def work(log: "Log", writer: "Writer", config: "Config") -> None:
        run_dir = _existing(run_path).path
        await run_trainer(log, writer, config, cell_id=cell, run_dir=run_dir, policy_dir=Path(config.policy.path))

    _process(run_path, "trainer", work)


# ---------------------------------------------------------------- how the commands get what they need


def _read_config(path: Path) -> "Config":
    from gyre.config import load_config

    try:
        return load_config(path.read_text(), str(path))
    except FileNotFoundError:
        raise MissingError(f"{path}: no such config; examples/ has some to start from") from None


def _check_before_start(config: "Config", unsafe: bool) -> None:
    """What would fail only after minutes fails here at once, in one line."""
    from gyre.agents.checkpoint import load_renderer
    from gyre.agents.harness_install import require
    from gyre.agents.harnesses import find_recipe
    from gyre.agents.tasks import make_task
    from gyre.agents.unsandboxed import open_sandbox
    from gyre.workers.doctor import missing_for_run

    find_recipe(config.harness.name)
    require(config.harness.name)
    open_sandbox(config.harness.sandbox, unsafe=unsafe)
    make_task(config.tasks.family, "train", config.tasks.seed, 0, config.tasks.num_goals)
    if missing := missing_for_run():
        raise MissingError(f"not installed: {', '.join(missing)}; run: make setup (gyre doctor says more)")
    path = Path(config.policy.path)
    if path.is_dir():
        load_renderer(path)  # raises PolicyError for a template that gyre cannot continue
    elif not config.policy.init:
        raise MissingError(f"policy.path: {path}: no such directory; make one with `gyre policy init {path}`")


def _ensure_policy(config: "Config") -> None:
    """Make the policy in a process of its own, so that this one never loads torch."""
    import subprocess

    if Path(config.policy.path).is_dir():
        return
    kind = "--warm-start" if config.policy.warm_start else "--random"
    argv = [sys.executable, "-m", "gyre.cli", "policy", "init", config.policy.path, "--seed", str(config.seed), kind]
    argv += ["--family", config.tasks.family, "--num-goals", str(config.tasks.num_goals)]
    argv += ["--num-threads", str(config.trainer.num_threads)]
    if subprocess.run(argv, check=False).returncode:
        raise MissingError(f"policy.path: {config.policy.path}: could not be made; see above")


def _run_to_the_end(run_dir: "RunDir", config: "Config", unsafe: bool, lock: int, *, quiet: bool = False) -> "Progress":
    """Supervise all processes of a run, until it is over. The directory is locked by the caller."""
    from rich.console import Console

    from gyre.workers.doctor import versions
    from gyre.workers.run import run as supervise

    run_id = _run_id(run_dir)
    extra = ("--unsafe-no-sandbox",) if unsafe else ()

    def argv(name: str) -> Sequence[str]:
        flags = extra if name == "dispatcher" else ()
        return (sys.executable, "-m", "gyre.cli", "process", name, str(run_dir.path), *flags)

    if not quiet:
        print(f"run {run_id} in {run_dir.path}", flush=True)
    console = Console(stderr=quiet)
    return asyncio.run(supervise(run_dir, config, run_id, argv=argv, versions=versions(), lock=lock, console=console))


def _exit_unless_completed(progress: "Progress") -> None:
    """130 for a run that was interrupted, 3 for one that a guard paused, 1 for one that failed."""
    finished = progress.finished
    if finished is None or finished.reason != "completed":
        raise typer.Exit({"interrupted": 130, "paused": 3}.get(finished.reason, 1) if finished is not None else 1)


def _progress_of(path: Path) -> "Progress":
    """The fold of a run's log, whether it is running or not."""
    from gyre.projections.progress import Progress

    progress = Progress()

    async def fold(log: "Log", live: bool) -> None:
        last = await log.last_seq()
        if last:
            async for recorded in log.read(1, until=last):
                progress.evolve(recorded)

    _with_log(path, fold)
    return progress


def _config_of(path: Path) -> "Config":
    from gyre.config import decode_config

    return decode_config(_progress_of(path).config)


def _evaluation_of(path: Path) -> "Evaluation":
    """The newest evaluation of a run. Raises MissingError when it has none."""
    evals = _progress_of(path).evals
    if not evals:
        raise MissingError(f"{path}: no evaluation in this run; make one with `gyre eval`")
    return evals[max(evals)]


def _export(run_path: Path, target: Path, step: int) -> None:
    """In a process of its own, so that this one never loads torch."""
    import subprocess

    argv = [sys.executable, "-m", "gyre.cli", "policy", "export", str(run_path), str(target), "--step", str(step)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MissingError(done.stderr.strip().rpartition("\n")[2].removeprefix("gyre: "))


def _new_run_dir(stem: str) -> Path:
    """runs/<stem>, or the first free runs/<stem>-N."""
    paths = (RUNS / (stem if n == 1 else f"{stem}-{n}") for n in range(1, 10000))
    return next(path for path in paths if not path.exists())


def _run_id(run_dir: "RunDir") -> str:
    """The directory's name, so that subjects and paths say the same."""
    from gyre.events.subjects import check_token

    if run_dir.address_file.exists():
        return run_dir.load_address().run
    return check_token(run_dir.path.resolve().name, "run directory")


def _existing(path: Path) -> "RunDir":
    from gyre.events.run_dir import RunDir

    run_dir = RunDir(path)
    run_dir.load_address()
    return run_dir


def _with_log(path: Path, work: "Callable[[Log, bool], Awaitable[None]]") -> None:
    """The log of a run that may still grow (True), or of one that ended: then over a server of our own."""
    from gyre.events.access import open_log

    async def main() -> None:
        async with open_log(_existing(path)) as (log, live):
            await work(log, live)

    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _process(path: Path, name: str, work: "Callable[[Log, Writer, Config], Awaitable[None]]") -> None:
    """Run one process over the run's log until its work is done, or SIGTERM."""
    from gyre.config import decode_config
    from gyre.events.access import connect_run
    from gyre.events.log import open_writer
    from gyre.projections.progress import Progress
    from gyre.workers.supervisor import KILL_GRACE_S, die_with_parent

    if parent := os.environ.get("GYRE_PARENT"):
        die_with_parent(int(parent))

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None

        def end() -> None:
            signal.alarm(int(KILL_GRACE_S))  # the end of a supervisor that was killed is nobody's to enforce but ours
            task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
        async with connect_run(_existing(path)) as log:
            progress = Progress()
            async for recorded in log.read(1, until=await log.last_seq()):
                progress.evolve(recorded)
            if not progress.config:
                raise MissingError(f"{path}: the log has no run.started yet; start the run with `gyre run`")
            await work(log, await open_writer(log, name, time.time_ns), decode_config(progress.config))

    try:
        asyncio.run(main())
    except asyncio.CancelledError:
        raise typer.Exit(0) from None


async def _wait_for_port(run_dir: "RunDir") -> int:
    """The gateway's TCP port, once it listens."""
    path = run_dir.path / "gateway.port"
    while not path.exists() or not path.read_text():  # noqa: ASYNC110 - another process writes it
        await asyncio.sleep(0.05)
    return int(path.read_text())


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise ConfigError(f"{path}: exists already; choose another name or remove it")


def _confirm(question: str, yes: bool) -> None:
    if not yes and not (sys.stdin.isatty() and typer.confirm(question)):
        raise ConfigError(f"{question} Not without --yes; nothing was removed")


def _examine_archive(path: Path) -> "Integrity":
    from gyre.events.archive import read_archive, read_header
    from gyre.projections.integrity import examine

    async def events() -> "AsyncIterator[Stored]":
        for stored in read_archive(path):
            yield stored

    return asyncio.run(examine(read_header(path).run, events()))


def _streams(run_path: Path, file: Path | None, *, apply: bool) -> None:
    from gyre.events.jetstream import JetStreamLog
    from gyre.events.stream_changes import apply_changes, compare, sync_line
    from gyre.events.streams import load_streams

    if file and not file.exists():
        raise MissingError(f"{file}: no such file; leave --file out for the streams that gyre makes")
    streams = load_streams(file.read_text(), str(file)) if file else load_streams()

    sync = sync_line(_existing(run_path))

    async def work(log: "Log", live: bool) -> None:
        assert isinstance(log, JetStreamLog)
        act = apply_changes if apply else compare
        changes = await act(log.wire.api, streams.for_run(log.run))
        print("\n".join(changes.lines(is_done=apply)))
        print(sync)

    _with_log(run_path, work)


def _say(text: str) -> None:
    if text:
        print(text, file=sys.stderr, flush=True)


def _show_warm_start(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    """Entry point: an error that gyre raises on purpose is one line, anything else is a bug and a traceback."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin while they wait starve the other processes
    try:
        app()
    except GyreError as error:
        _fail(error)
    except BaseExceptionGroup as group:  # what a task group raises
        known, bugs = group.split(GyreError)
        if bugs is not None or known is None:
            raise
        _fail(*_leaves(known))


def _leaves(error: BaseException) -> list[BaseException]:
    return [leaf for e in error.exceptions for leaf in _leaves(e)] if isinstance(error, BaseExceptionGroup) else [error]


def _fail(*errors: BaseException) -> None:
    for error in errors:
        print(f"gyre: {error}", file=sys.stderr)
    is_supervised = sys.argv[1:2] == ["process"]
    sys.exit(REFUSED if is_supervised and not all(map(is_passing, errors)) else 1)


if __name__ == "__main__":
    main()
