"""Shell. How commands find a run, its log, its config and its figures."""

import asyncio
import errno
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gyre.cli.apps import PLACE
from gyre.errors import ConfigError, MissingError, StreamError

if TYPE_CHECKING:
    from rich.console import Console

    from gyre.config import Config
    from gyre.events.access import Access
    from gyre.events.log import Log
    from gyre.events.run_dir import RunDir
    from gyre.projections.evaluations import Evaluation
    from gyre.projections.progress import Progress


def find_run(path: Path) -> "RunDir":
    from gyre.events.run_dir import RunDir

    run_dir = RunDir(path)
    run_dir.load_address()
    return run_dir


def with_log(path: Path, work: "Callable[[Log, bool], Awaitable[None]]", access: "Access" = "reader") -> None:
    """The log of a run that may still grow (True), or of one that ended: then over a server of our own.

    Only to be read, unless `access` is the owner's."""
    from gyre.events.access import open_log, was_killed

    async def main() -> None:
        run_dir, is_live = find_run(path), False
        try:
            async with open_log(run_dir, access=access) as (log, is_live):
                await work(log, is_live)
        except StreamError as error:
            if is_live and run_dir.nats.is_dir() and not run_dir.is_held:  # what the server did not answer says less
                raise was_killed(run_dir) from error
            raise

    until_interrupted(main())


def until_interrupted(work: Coroutine[Any, Any, None]) -> None:
    try:
        asyncio.run(work)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def progress_of(path: Path) -> "Progress":
    """The fold of a run's log, whether it is running or not."""
    from gyre.projections.progress import Progress

    progress = Progress()

    async def fold(log: "Log", live: bool) -> None:
        last = await log.last_seq()
        if last:
            async for recorded in log.read(1, until=last):
                progress.evolve(recorded)

    with_log(path, fold)
    return progress


def config_of(path: Path) -> "Config":
    from gyre.config import decode_config

    return decode_config(progress_of(path).config)


def seen_policy(path: Path | str, otherwise: str = ", or name it with --policy") -> Path:
    """The directory of a run's policy, as far as it can be seen from here. Raises MissingError."""
    path = Path(path)
    if not path.is_dir():
        raise MissingError(f"policy: {path}: no such directory seen from here; go where the run was started{otherwise}")
    return path


def evaluation_of(path: Path) -> "tuple[str, Evaluation]":
    """The newest evaluation of a run, and what it is of. Raises MissingError when it has none."""
    from gyre.config import decode_config
    from gyre.projections.report import way_of_sampling

    progress = progress_of(path)
    evals = progress.evals
    if not evals:
        raise MissingError(f"{path}: no evaluation in this run; make one with `gyre eval`")
    config = decode_config(progress.config)
    version, temperature = max(evals)
    run, step = progress.policy_of
    policy = f"step {step} of {run}" if run else config.policy.path
    policy += f", version {version}" if version else ""
    what = f"{path}: {policy}, {config.harness.name}, {way_of_sampling(temperature)}"
    return what, evals[version, temperature]


def plain_console(width: int | None = None) -> "Console":
    """For text of tasks, policies and paths: square brackets in it are no markup."""
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise  # noqa: PLE0704 - the error that it is called for; the entry point knows what to do

    console = Plain(width=width, markup=False, highlight=False)
    if width is None and not console.is_terminal:  # a file or a pipe has no width that a path must be cut to
        console.width = 200
    return console


@contextmanager
def new_place(path: Path) -> Iterator[None]:
    """Something is made there in the block. Raises ConfigError when it is there already; the system's errors about a
    place name this one where they name none, or what was being copied to a full disk."""
    if path.exists():
        raise ConfigError(f"{path}: exists already; choose another name or remove it")
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC or (error.errno in PLACE and not error.filename):
            error.filename = str(path)
        raise


def confirm(question: str, yes: bool) -> None:
    if not yes and not (sys.stdin.isatty() and typer.confirm(question)):
        raise ConfigError(f"{question} Not without --yes; nothing was removed")


def say(text: str) -> None:
    if text:
        print(text, file=sys.stderr, flush=True)
