"""Shell. Commands about what steps are trained on: `gyre batch`, `export`."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gyre.cli.apps import RunPath, app, batch_app
from gyre.cli.wiring import config_of, new_place, plain_console, seen_policy, with_log
from gyre.errors import MissingError

if TYPE_CHECKING:
    from gyre.events.log import Log
    from gyre.projections.recorded_batches import Explanation


@batch_app.command(
    "show", epilog="Examples: `gyre batch show runs/quickstart` - `gyre batch show runs/quickstart 2 --json`"
)
def batch_show(
    run_path: RunPath,
    step: Annotated[int, typer.Argument(help="Step. Default: the last that has a batch.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="All of it, as one JSON object.")] = False,
) -> None:
    """Show what a step is trained on: executions, branches, weights, and why the rest is left out."""
    import msgspec

    from gyre.projections.exports import explanation_of

    found: list[Explanation | None] = []

    async def read(log: "Log", live: bool) -> None:
        found.append(await explanation_of(log, step))

    with_log(run_path, read)
    if (explanation := found[0]) is None:
        what = f"step {step} has no batch" if step else "no step has a batch yet"
        raise MissingError(f"{run_path}: {what}; see: gyre sql {run_path} 'select step from steps'")
    if as_json:
        print(msgspec.json.encode(explanation).decode())
    else:
        _print(explanation)


def _print(batch: "Explanation") -> None:
    from rich.table import Table

    from gyre.projections.recorded_batches import MEANINGS

    num_in_loss = sum(e.in_loss for e in batch.executions)
    num_groups = len({e.group for e in batch.executions})
    lines = [
        f"step {batch.step}: {len(batch.executions)} executions of {num_groups} groups, {num_in_loss} in the loss",
        f"{batch.num_trajectories} trajectories, {batch.num_tokens:,} tokens, {batch.num_targets:,} targets, "
        f"{batch.num_microsteps} micro-steps in {batch.num_minibatches} mini-batches, digest {batch.digest[:12]}",
    ]
    names = ("execution", "score", "advantage", "stale", "branches", "targets", "weight", "a target", "left out")
    table = Table(*names, box=None)
    for column in table.columns[1:8]:
        column.justify = "right"
    branches = Table("branch", "class", "tokens", "targets", "versions", "micro-step", "left out", box=None)
    for e in batch.executions:
        left = ", ".join(f"{t.num_tokens:,} {t.reason}" for t in e.left_out if t.reason not in ("context", e.reason))
        why = f"all: {e.reason}" + (", in the baseline" if e.in_baseline else "") if e.reason else left
        score = "" if e.score is None else f"{e.score:.3g}"
        of = f"{len(e.branches)} of {e.num_branches}"
        weights = (f"{e.weight:.4g}", f"{e.target_weight:.3g}") if e.in_loss else ("", "")
        table.add_row(
            e.execution, score, f"{e.advantage:+.3f}", str(e.staleness), of, f"{e.num_targets:,}", *weights, why
        )
        for b in e.branches:
            of_policies = (
                "-".join(f"v{v}" for v in dict.fromkeys((b.versions[0], b.versions[-1]))) if b.versions else ""
            )
            cells = (f"{b.num_tokens:,}", f"{b.num_targets:,}", of_policies, str(b.microstep))
            branches.add_row(b.call, b.role_class, *cells, "")
        for left_one in e.left_branches if e.in_loss else ():
            untrained = f"{left_one.num_targets:,} {left_one.reason}"
            branches.add_row(left_one.call, left_one.role_class, f"{left_one.num_tokens:,}", "0", "", "", untrained)
    reasons = Table("tokens that are not targets", "why", "", box=None)
    for t in batch.left_out:
        reasons.add_row(f"{t.num_tokens:,}", t.reason, MEANINGS.get(t.reason, ""))
    plain_console().print("\n".join(lines), "", table, "", branches, "", reasons, sep="\n")


@app.command(
    epilog="Examples: `gyre export runs/quickstart --format parquet trajectories.parquet` - "
    "`gyre export runs/quickstart --format chat chat.jsonl --min-score 1`"
)
def export(
    run_path: RunPath,
    file: Annotated[Path, typer.Argument(help="File to write.")],
    format_: Annotated[
        Literal["parquet", "chat"], typer.Option("--format", help="Columns of tokens, or messages as JSON lines.")
    ],
    min_score: Annotated[float | None, typer.Option(help="Only executions with at least this score.")] = None,
    policy: Annotated[
        Path | None,
        typer.Option("--policy", help="Whose template reads the tokens. Default: policy.path of the config."),
    ] = None,
) -> None:
    """Write the trajectories that completed steps were trained on to a file; see docs/export.md."""
    from gyre.projections.exports import Exported, export_lines, export_parquet

    done: list[Exported] = []
    if format_ == "parquet":

        async def write(log: "Log", live: bool) -> None:
            done.append(await export_parquet(log, file, min_score))

    else:
        from gyre.agents.checkpoint import load_renderer
        from gyre.agents.transcript import chat_lines

        renderer = load_renderer(seen_policy(policy or config_of(run_path).policy.path))

        async def write(log: "Log", live: bool) -> None:
            done.append(await export_lines(log, file, partial(chat_lines, renderer, min_score=min_score)))

    with new_place(file):
        with_log(run_path, write)
    size = file.stat().st_size
    print(f"{file}: {done[0].num_trajectories:,} trajectories of {done[0].num_steps} steps, {size:,} bytes")
