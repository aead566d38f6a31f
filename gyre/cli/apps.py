"""Shell. The command groups, and the entry point: errors in one line, bugs as tracebacks."""

import errno
import gc
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from gyre.errors import REFUSED, ConfigError, GyreError, is_passing


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """When whoever reads the output has gone, a command ends as SIGPIPE ends other programs, without a word."""
        try:
            try:
                return super().invoke(ctx)
            finally:
                print(end="", flush=True)  # what cannot be written is an error now, not at the interpreter's end
        except BrokenPipeError:
            from gyre.workers.output import silence

            silence(sys.stdout)
            raise typer.Exit(128 + signal.SIGPIPE) from None


app = typer.Typer(
    cls=_Commands,
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
tasks_app = typer.Typer(
    no_args_is_help=True, help="Tasks in folders: list them, check that they grade right, make one of a package."
)
log_app = typer.Typer(no_args_is_help=True, help="A run's log as one file, and whether a log is intact.")
cell_app = typer.Typer()
batch_app = typer.Typer(no_args_is_help=True, help="What a step is trained on, and why the rest is left out.")
streams_app = typer.Typer(no_args_is_help=True, help="streams.yaml against the streams of a live server.")
app.add_typer(batch_app, name="batch")
app.add_typer(cell_app, name="cell")
app.add_typer(runs_app, name="runs")
app.add_typer(log_app, name="log")
app.add_typer(streams_app, name="streams")
app.add_typer(policy_app, name="policy")
app.add_typer(tasks_app, name="tasks")
app.add_typer(harness_app, name="harness")
app.add_typer(process_app, name="process")

RunPath = Annotated[Path, typer.Argument(help="Run directory, as in runs/quickstart.")]
RUNS = Path("runs")
CONSUMERS = {"loops": "gyre.projections.loops:loops", "meter": "gyre.projections.meter:meter"}
"""Short names of the consumers that come with gyre."""

PLACE = frozenset(
    (
        errno.EACCES,
        errno.EDQUOT,
        errno.EEXIST,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOENT,  # below /proc, say: a folder that makes no others
        errno.ENOSPC,
        errno.ENOTDIR,
        errno.EPERM,
        errno.EROFS,
    )
)
"""What the system says of a place that was asked for: no bug."""


def main() -> None:
    """Entry point: an error that gyre raises on purpose, or a path that cannot be used, is one line; anything else is a
    bug and a traceback."""
    gc.set_threshold(10_000, 50, 50)  # events are many small values that live for moments and hold no cycles
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin while they wait starve the other processes
    try:
        app()
    except GyreError as error:
        _fail(error)
    except OSError as error:
        if error.errno not in PLACE or _is_supervised():
            raise
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        _fail(ConfigError(f"{what}; give another path, or make this one usable"))
    except BaseExceptionGroup as group:  # what a task group raises
        known, bugs = group.split(GyreError)
        if bugs is not None or known is None:
            raise
        _fail(*_leaves(known))


def _leaves(error: BaseException) -> list[BaseException]:
    return [leaf for e in error.exceptions for leaf in _leaves(e)] if isinstance(error, BaseExceptionGroup) else [error]


def _is_supervised() -> bool:
    return sys.argv[1:2] == ["process"]


def _fail(*errors: BaseException) -> None:
    for error in errors:
        print("gyre:", *str(error).splitlines(), file=sys.stderr)
    sys.exit(REFUSED if _is_supervised() and not all(map(is_passing, errors)) else 1)
