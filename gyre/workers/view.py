"""Shell. The live view of a run: one line that changes on a terminal, a log line a phase elsewhere."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rich.console import Console
from rich.status import Status

from gyre.config import Config
from gyre.projections.progress import Progress
from gyre.projections.report import phase, status_line

REFRESH_S = 0.25
QUIET_S = 30.0
"""Without a terminal a line is also printed when nothing changed for this long."""


@asynccontextmanager
async def live_view(progress: Progress, config: Config, console: Console) -> AsyncIterator[None]:
    """Shows `progress`, which somebody else folds, until the block ends."""
    task = asyncio.create_task(
        _terminal(progress, config, console) if console.is_terminal else _lines(progress, config, console)
    )
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _terminal(progress: Progress, config: Config, console: Console) -> None:
    with Status(status_line(progress, config), console=console) as status:
        while True:
            await asyncio.sleep(REFRESH_S)
            status.update(status_line(progress, config))


async def _lines(progress: Progress, config: Config, console: Console) -> None:
    shown, printed = None, time.monotonic()
    while True:
        key = (phase(progress), progress.counts["StepCompleted"], progress.version)
        if key != shown or time.monotonic() - printed > QUIET_S:
            shown, printed = key, time.monotonic()
            print(status_line(progress, config), file=console.file, flush=True)
        await asyncio.sleep(REFRESH_S)
