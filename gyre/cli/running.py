"""Shell. Commands that run something: `gyre run`, `eval`, `bench`, `doctor`."""

import sys
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from gyre.cli.apps import app
from gyre.cli.starting import (
    check_before_start,
    choose_run_dir,
    ensure_policy,
    exit_unless_completed,
    export_checkpoint,
    read_config,
    run_id_of,
    run_to_the_end,
)
from gyre.cli.wiring import config_of, evaluation_of, plain_console, say, seen_policy
from gyre.errors import ConfigError, MissingError

if TYPE_CHECKING:
    pass


@app.command(epilog="Example: `gyre run examples/quickstart.yaml` - Ctrl-C stops it; the same --dir goes on.")
def run(
    config_path: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="YAML file; docs/configuration.md has its keys.")
    ],
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Run directory. Default: a new one under runs/, named after CONFIG.")
    ] = None,
    unsafe_no_sandbox: Annotated[
        bool,
        typer.Option(
            "--unsafe-no-sandbox", help="With `harness.sandbox: none`: run model-written commands with your own rights."
        ),
    ] = False,
) -> None:
    """Run the whole loop: rollout, scores, training, weights, until CONFIG's steps are done."""
    from gyre.projections.report import closing
    from gyre.workers.output import tell

    config = read_config(config_path)
    check_before_start(config, unsafe_no_sandbox)
    run_dir = choose_run_dir(directory, config_path.stem)
    with run_dir.lock() as lock:
        ensure_policy(config)
        progress = run_to_the_end(run_dir, config, unsafe_no_sandbox, lock)
    summary = progress.summary()
    again = f"  gyre run {quote(str(config_path))} --dir {quote(str(run_dir.path))}"
    tell(closing(summary, str(run_dir.path)))
    if summary["state"] == "interrupted":
        tell(f"{again}    # goes on")
    if summary["state"] == "paused":
        tell(f"{again}    # goes on with fresh groups; guards may be changed")
    exit_unless_completed(progress)


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
    harness: Annotated[str, typer.Option(help="Default: that of the run; of a policy, `reference`.")] = "",
    tasks: Annotated[int, typer.Option(help="Number of tasks.")] = 64,
    seed: Annotated[int, typer.Option(help="Of the tasks.")] = 1000,
    split: Annotated[str, typer.Option(help="heldout or train.")] = "heldout",
    num_goals: Annotated[int, typer.Option(help="Goals of one task. Default: as in the run; of a policy, 2.")] = 0,
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
    from msgspec.structs import replace

    from gyre.config import Config
    from gyre.events.run_dir import RunDir
    from gyre.projections.evaluations import compare as compare_evaluations
    from gyre.projections.evaluations import comparison_lines, evaluation_lines
    from gyre.workers.evaluation import evaluation_config
    from gyre.workers.output import tell

    if compare is not None:
        (first, before), (second, after) = map(evaluation_of, compare)
        figures = compare_evaluations(before, after)
        lines = [f"before      {first}", f"after       {second}", *comparison_lines(figures)]
        print(orjson.dumps(figures).decode() if as_json else "\n".join(lines))
        return
    if source is None:
        raise ConfigError("gyre eval: what? give a policy directory or a run directory, or --compare DIR_A DIR_B")
    is_run = (source / "run.json").exists()
    if not is_run and not (source / "config.json").exists():
        raise MissingError(f"{source}: neither a policy (no config.json) nor a run (no run.json)")
    if step and not is_run:
        raise ConfigError(f"gyre eval: --step {step}: {source} is a policy, not a run")
    step = RunDir(source).kept_step(step) if is_run else step
    of_run = config_of(source) if is_run else None
    base = read_config(config_path) if config_path else of_run or Config()
    run_dir = choose_run_dir(directory, "eval")
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
    # A checkpoint that is still to be exported has tokenizer, template and shape of what its run began with.
    begun = seen_policy(of_run.policy.path, "") if of_run and not policy.exists() else policy
    check_before_start(replace(config, policy=replace(config.policy, path=str(begun))), unsafe_no_sandbox)
    policy_of = (run_id_of(RunDir(source)), step) if is_run else ("", 0)
    with run_dir.lock() as lock:
        if is_run and not policy.exists():
            export_checkpoint(source, policy, step)
        progress = run_to_the_end(run_dir, config, unsafe_no_sandbox, lock, quiet=as_json, policy_of=policy_of)
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
        tell(orjson.dumps(result).decode())
    elif progress.evals:
        lines = ["", f"{source}, {config.harness.name}, {split} tasks of seed {seed}:"]
        tell("\n".join([*lines, *(f"  {line}" for line in evaluation_lines(result))]))
        where = quote(str(run_dir.path))
        tell(f"next:\n  gyre eval --compare {where} OTHER\n  gyre tree {where}")
    exit_unless_completed(progress)


@app.command(epilog="Examples: `gyre bench` lists them - `gyre bench loop --out loop.json`")
def bench(
    name: Annotated[str, typer.Argument(help="Which one. Default: list them.")] = "",
    out: Annotated[Path | None, typer.Option(help="Write the JSON object to this file as well.")] = None,
    policy: Annotated[
        Path | None, typer.Option(help="Policy to roll out. Default: policies/tiny, or a random one.")
    ] = None,
    sessions: Annotated[
        Path | None, typer.Option(help="Recorded sessions, for `tree` and `train`. Default: benchmarks/data.")
    ] = None,
    events: Annotated[
        int | None, typer.Option(min=1000, help="Length of the log that becomes tables, for `log`. Default: 200,000.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Print the page that shows the results in DIR instead.")
    ] = None,
) -> None:
    """Measure, and print one JSON object: figures, what each is compared to, and whether its goal holds."""
    from gyre.agents.harness_install import installed
    from gyre.agents.sandbox import sandbox_cpu_s
    from gyre.projections.rebuild import rebuild
    from gyre.workers.bench import encode_result
    from gyre.workers.benches import BENCHES, render_results, run_bench
    from gyre.workers.output import tell

    if page is not None:
        print(render_results(page), end="")
        return
    if not name:
        print("\n".join(f"{name:<12} {bench.about.partition('. ')[0]}" for name, bench in BENCHES.items()))
        return
    if name in BENCHES:  # else `run_bench` says which there are
        if out is not None:
            out.touch()  # what cannot be written is an error now, not after minutes
        say(f"{name}: {BENCHES[name].about.partition('. ')[0]}: takes minutes")
    result = run_bench(
        name,
        policy=policy,
        sandbox_cpu_s=sandbox_cpu_s,
        installed=installed,
        rebuild=rebuild,
        sessions=sessions,
        num_events=events,
    )
    content = encode_result(result)
    tell(content.decode())
    if out is not None:
        out.write_bytes(content + b"\n")


@app.command(epilog="Example: `gyre doctor --json`")
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Findings as JSON.")] = False) -> None:
    """Print versions, what is missing, and how to get it."""
    import msgspec
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
        plain_console().print(table)
    if any(not item.found for item in findings):
        raise typer.Exit(1)
