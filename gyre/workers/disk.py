"""Shell. Warns while a run goes on that its disk is filling up, before the dispatcher stops admission."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

GIGABYTE = 1e9
CHECK_S = 30.0
MARGIN = 2.0
"""The warning comes at this many times the floor."""


def disk_warning(free_gb: float, floor_gb: float) -> str:
    """Empty while there is room."""
    if free_gb >= MARGIN * floor_gb:
        return ""
    return f"disk: {free_gb:.2f} GB free; below {floor_gb:g} GB (log.min_free_gb) nothing new starts: make room"


@asynccontextmanager
async def disk_watch(path: Path, floor_gb: float, say: Callable[[str], None]) -> AsyncIterator[None]:
    """Says the warning once each time that the disk gets low, until the block ends."""

    async def watch() -> None:
        warned = False
        while True:
            warning = disk_warning(shutil.disk_usage(path).free / GIGABYTE, floor_gb)
            if warning and not warned:
                say(warning)
            warned = bool(warning)
            await asyncio.sleep(CHECK_S)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
