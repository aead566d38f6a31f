"""Shell. Commands about cells: `gyre status`, `gyre cells`, `gyre cell drain|undrain`."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gyre.cli.apps import RunPath, app, cell_app
from gyre.cli.wiring import with_log
from gyre.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gyre.events.log import Log
    from gyre.events.types import DrainLifted, DrainRequested
    from gyre.projections.status import Status

Cell = Annotated[str, typer.Argument(metavar="N", help="Cell: its place in the order, or its name, as in 1 or c1.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object.")]


@app.command(epilog="Example: `gyre status runs/quickstart`")
def status(run_path: RunPath, as_json: AsJson = False) -> None:
    """Roles, waterlevel, queues, versions and the last switches of a run, whether it is running or not."""
    _show(run_path, as_json, whole=True)


@app.command(epilog="Example: `gyre cells runs/quickstart --json`")
def cells(run_path: RunPath, as_json: AsJson = False) -> None:
    """The cells of a run in their fixed order: state, version, capacity, calls, switches."""
    _show(run_path, as_json, whole=False)


@cell_app.command("drain", epilog="Example: `gyre cell drain 1 runs/elastic` - `gyre cell undrain 1 runs/elastic`")
def drain(
    cell: Cell,
    run_path: RunPath,
    reason: Annotated[str, typer.Option(help="Recorded with the order.")] = "",
) -> None:
    """Take a satellite out of use: it leaves rollout as soon as another cell serves, and gets no work."""
    from gyre.events.types import DrainRequested

    def order(status: "Status", name: str) -> DrainRequested:
        found = next(c for c in status.cluster.cells if c.cell == name)
        if found.index == 0:
            raise ConfigError(
                f"gyre cell drain: {name} is the core, which alone has the optimizer: stop the run instead"
            )
        if name in status.cluster.standalone:
            raise ConfigError(
                f"gyre cell drain: {name} is a standalone engine, which only serves; end its process instead"
            )
        if name in status.cluster.drained:
            raise ConfigError(f"gyre cell drain: {name} is drained already")
        return DrainRequested(cell=name, reason=reason)

    _order(run_path, cell, order)


@cell_app.command("undrain", epilog="Example: `gyre cell undrain 1 runs/elastic`")
def undrain(cell: Cell, run_path: RunPath) -> None:
    """Give a drained cell back to the scheduler."""
    from gyre.events.types import DrainLifted

    def order(status: "Status", name: str) -> DrainLifted:
        if name not in status.cluster.drained:
            raise ConfigError(f"gyre cell undrain: {name} is not drained")
        return DrainLifted(cell=name)

    _order(run_path, cell, order)


def _show(run_path: Path, as_json: bool, *, whole: bool) -> None:
    import orjson

    from gyre.projections.status import cell_lines, status_lines

    async def work(log: "Log", live: bool) -> None:
        figures = (await _fold(log, live)).figures()
        if as_json:
            print(orjson.dumps(figures if whole else figures["cells"]).decode())
        else:
            print("\n".join(status_lines(figures) if whole else cell_lines(figures)))

    with_log(run_path, work)


def _order(run_path: Path, cell: str, order: "Callable[[Status, str], DrainRequested | DrainLifted]") -> None:
    from gyre.events.log import open_writer
    from gyre.events.types import event_type

    async def work(log: "Log", live: bool) -> None:
        status = await _fold(log, live)
        if status.state != "running":
            raise ConfigError(f"{run_path}: the run is {status.state}: only a running one takes orders")
        names = [c.cell for c in status.cluster.cells if cell in (c.cell, str(c.index))]
        if not names:
            known = ", ".join(f"{c.index} ({c.cell})" for c in status.cluster.cells) or "none"
            raise ConfigError(f"{run_path}: no cell {cell!r}; there are: {known}")
        event = order(status, names[0])
        seq = await (await open_writer(log, "operator", time.time_ns)).append(event)
        print(f"{names[0]}: {event_type(event)} at sequence {seq}; `gyre cells {run_path}` shows it")

    with_log(run_path, work, access="owner")


async def _fold(log: "Log", live: bool) -> "Status":
    from gyre.projections.status import Status

    status = Status()
    if last := await log.last_seq():
        async for recorded in log.read(1, until=last):
            status.evolve(recorded)
    if status.state == "running" and not live:
        status.state, status.detail = "killed", "`gyre run` with its --dir goes on"
    return status
