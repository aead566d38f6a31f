"""Shell. Commands that keep runs and logs in order: `gyre runs`, `log`, `streams`."""

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gyre.cli.apps import (
    RUNS,
    RunPath,
    log_app,
    runs_app,
    streams_app,
)
from gyre.cli.wiring import confirm, find_run, new_place, plain_console, say, with_log
from gyre.errors import ConfigError, FoldError, LogError, MissingError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gyre.events.log import Log, Stored
    from gyre.projections.integrity import Integrity


@runs_app.callback(epilog="Examples: `gyre runs --json` - `gyre runs archive runs/quickstart`")
def runs(
    context: typer.Context,
    root: Annotated[Path, typer.Option("--root", help="Where run directories are.")] = RUNS,
    as_json: Annotated[bool, typer.Option("--json", help="All figures, as in summary.json.")] = False,
) -> None:
    """List runs and their figures."""
    import orjson
    from rich.table import Table

    from gyre.events.run_dir import find_runs
    from gyre.workers.run import load_summary

    if context.invoked_subcommand is not None:
        return
    summaries = {
        str(r.path): {"run": r.path.name, "state": "running"}
        if r.is_held
        else load_summary(r) or {"run": r.path.name, "state": "unfinished"}
        for r in find_runs(root)
    }
    if as_json:
        print(orjson.dumps(summaries, option=orjson.OPT_INDENT_2).decode())
        return
    table = Table("run", "state", "steps", "version", "executions", "score", box=None)
    table.columns[0].overflow = "fold"  # a path is there to be typed
    for path, figures in summaries.items():
        scores: Any = figures.get("scores") or figures.get("evaluations") or [{}]
        executions: Any = figures.get("executions") or {}
        cells = (figures["state"], figures.get("steps", ""), figures.get("version", ""), executions.get("scored", ""))
        table.add_row(path, *map(str, cells), str(scores[-1].get("score", "")))
    plain_console().print(table if summaries else f"no runs in {root}/; start one: gyre run examples/quickstart.yaml")


@runs_app.command("archive", epilog="Example: `gyre runs archive runs/quickstart archives/quickstart.gyre`")
def runs_archive(
    run_path: RunPath,
    file: Annotated[Path | None, typer.Argument(help="Archive to write. Default: RUN_DIR.gyre.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Export the log, read the archive back, then remove the run directory: checkpoints too."""
    from gyre.events.lifecycle import contents, held, remove

    run_dir = find_run(run_path)
    with held(run_dir):
        path = file or run_path.with_name(f"{run_path.resolve().name}.gyre")
        with new_place(path):
            confirm(f"{run_path}: remove it once {path} holds its log ({contents(run_dir)})?", yes)
        log_export(run_path, path)
        if not (found := _examine_archive(path)).ok:
            raise ConfigError(f"{path}: {found.text()}; the run directory stays as it is")
        remove(run_dir)
    print(f"{run_path}: removed; `gyre log import {path} {run_path}` brings log and tables back")


@runs_app.command("rm", epilog="Example: `gyre runs rm runs/quickstart`")
def runs_rm(run_path: RunPath, yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False) -> None:
    """Remove a run directory: log, tables, checkpoints."""
    from gyre.events.lifecycle import contents, held, remove

    run_dir = find_run(run_path)
    with held(run_dir):
        confirm(f"{run_path}: remove it for good ({contents(run_dir)})?", yes)
        is_elsewhere = not run_dir.nats.is_dir()
        url = run_dir.load_address().url
        remove(run_dir)
    print(f"{run_path}: removed" + (f"; its streams on {url} stay there" if is_elsewhere else ""))


@log_app.command("export", epilog="Example: `gyre log export runs/quickstart quickstart.gyre`")
def log_export(run_path: RunPath, file: Annotated[Path, typer.Argument(help="Archive to write.")]) -> None:
    """Write the whole log to one compressed file, which any server can import."""
    from gyre.events.archive import export_log

    async def work(log: "Log", live: bool) -> None:
        begun = time.monotonic()
        header = await export_log(log, file)
        seconds = time.monotonic() - begun
        rate = f"{file.stat().st_size:,} bytes, {header.num_events / seconds:,.0f} events/s"
        print(f"{file}: run {header.run}, {header.num_events:,} events, {rate}, digest {header.digest}")

    with new_place(file):
        with_log(run_path, work)


@log_app.command("import", epilog="Example: `gyre log import quickstart.gyre runs/again`")
def log_import(
    file: Annotated[Path, typer.Argument(help="Archive.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Run directory to make.")],
    url: Annotated[
        str, typer.Option(help="A NATS server of your own (token or user:password in GYRE_NATS_TOKEN).")
    ] = "",
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
                say(f"{directory}: without tables: {error}")
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
        with_log(source, work)
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

    sync, num_replicas = sync_line(find_run(run_path)), find_run(run_path).load_address().num_replicas
    if not file:  # streams.yaml of gyre says what one server can do; the run's config may ask for more
        streams = streams.with_replicas(num_replicas)

    async def work(log: "Log", live: bool) -> None:
        assert isinstance(log, JetStreamLog)
        act = apply_changes if apply else compare
        changes = await act(log.wire.api, streams.for_run(log.run))
        print("\n".join(changes.lines(is_done=apply)))
        print(sync)

    with_log(run_path, work, "owner" if apply else "reader")
