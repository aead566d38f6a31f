"""Shell. What benchmarks of the log share: a server for one figure, and a log that is filled as fast as it goes.

Direction: events -> writers -> log.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Literal

from gyre.events.jetstream import JetStreamLog, connect
from gyre.events.log import Log, Writer
from gyre.events.server import Server, start_server
from gyre.events.streams import load_streams
from gyre.workers.run_events import Written

NUM_WRITING = 4000
"""Appends that are under way at once: as many as the window of sends holds."""


@contextlib.contextmanager
def server_in(folder: Path, sync: Literal["always", "default"]) -> Iterator[Server]:
    """A new one, on a disk that has written what came before: a sync would wait for that too."""
    os.sync()
    server = start_server(folder / f"nats-{time.monotonic_ns()}", sync=sync)
    try:
        yield server
    finally:
        server.stop()


@contextlib.asynccontextmanager
async def log_at(server: Server, run: str) -> AsyncIterator[JetStreamLog]:
    """The log of this run; its streams are made when missing."""
    log = await connect(server.url, run, token=server.token, create=load_streams())
    try:
        yield log
    finally:
        await log.close()


async def fill(log: Log, written: Iterable[Written], *, num_writing: int = NUM_WRITING) -> float:
    """Seconds until all is acknowledged. One writer a name; events are appended as typed values, one by one."""
    writers: dict[str, Writer] = {}
    rest = iter(written)

    async def write() -> None:
        for name, event in rest:
            writer = writers.get(name)
            if writer is None:
                writer = writers[name] = Writer(log, name, 1, time.time_ns)
            await writer.append(event)

    begun = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(num_writing):
            tasks.create_task(write())
    return time.perf_counter() - begun
