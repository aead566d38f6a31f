"""Shell. A log -> all of its tables in a fresh DuckDB file, in a process of its own; next to a loop of fetches.

Seconds are those from the first request to the last commit; memory is that of the process, read as the events pass by.
Direction: log -> rebuild -> marks along the way -> figures.
"""

import asyncio
import multiprocessing
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import psutil

from gyre.errors import ProcessError
from gyre.events.codec import Recorded
from gyre.events.jetstream import JetStreamLog, connect
from gyre.events.log import Log
from gyre.events.server import Server
from gyre.workers.bench import Figure, figure
from gyre.workers.log_load import fill, log_at, server_in
from gyre.workers.run_events import run_events

MIN_EVENTS_S = 20_000
MAX_REPLAY_S = 50.0
"""Of a million events."""
MIN_GAIN = 2.0
"""Over the loop of fetches and rows."""
MAX_BEND = 1.3
"""The last fifth of the events may cost so many times the second (the first is warming up)."""
PARTS = 5
NUM_FETCHED = 20_000
"""Events of the loop to compare with."""

Rebuild = Callable[[Log, Path], Awaitable[object]]
"""Tables of a whole log into a fresh file; a function of a module, since another process calls it."""


class Mark(msgspec.Struct, frozen=True):
    """One fifth of the events has passed."""

    at_s: float
    resident_mb: float
    """The most so far."""


def into_tables(folder: Path, fetch_rows: Path, *, rebuild: Rebuild, num_events: int) -> dict[str, Figure]:
    """Raises ProcessError."""
    with server_in(folder, "default") as server:
        asyncio.run(_fill(server, num_events))
        fetched = _fetch_rows(server, fetch_rows, min(NUM_FETCHED, num_events), folder / "rows.duckdb")
        marks = _in_process(rebuild, server, folder / "tables.duckdb", num_events)
    seconds = marks[-1].at_s - marks[0].at_s
    parts = [after.at_s - before.at_s for before, after in pairwise(marks)]
    rate = num_events / seconds
    return {
        "log_to_tables": figure(rate, "events/s", min_value=MIN_EVENTS_S),
        "log_to_tables_next_to_fetch": figure(rate, "events/s", reference=fetched, min_ratio=MIN_GAIN),
        "replay_of_a_million": figure(1e6 / rate, "s", max_value=MAX_REPLAY_S),
        "replay_last_fifth": figure(parts[-1], "s", reference=parts[1], max_ratio=MAX_BEND),
        "resident": figure(marks[-1].resident_mb, "MB", reference=marks[1].resident_mb),
        "events": figure(num_events, "events"),
    }


async def _fill(server: Server, num: int) -> None:
    async with log_at(server, "r") as log:
        await fill(log, run_events(num))


def _fetch_rows(server: Server, script: Path, num: int, path: Path) -> float:
    """Events a second."""
    argv = (sys.executable, str(script), server.url, server.token, "r", str(num), str(path))
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ProcessError(f"bench log: {script.name}: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}")
    return num / float(done.stdout)


def _in_process(rebuild: Rebuild, server: Server, path: Path, num: int) -> list[Mark]:
    """Marks at the begin, after each fifth but the last, and at the end."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(rebuild, server.url, server.token, path, num, theirs))
    process.start()
    theirs.close()
    try:
        return list(ours.recv())
    except EOFError:
        raise ProcessError("bench log: the process that makes the tables ended: its error is above") from None
    finally:
        process.join()


def _child(rebuild: Rebuild, url: str, token: str, path: Path, num: int, answer: Connection) -> None:
    answer.send(asyncio.run(_rebuild(rebuild, url, token, path, num)))


async def _rebuild(rebuild: Rebuild, url: str, token: str, path: Path, num: int) -> list[Mark]:
    log = await connect(url, "r", token=token)
    watched = _Watched(log, num)
    watched.mark()
    await rebuild(watched, path)
    watched.mark()
    await log.close()
    return watched.marks


class _Watched:
    """A log that takes notes while it is read."""

    def __init__(self, log: JetStreamLog, num: int) -> None:
        self.marks: list[Mark] = []
        self._log = log
        self._due = {num * part // PARTS for part in range(1, PARTS)}
        self._process = psutil.Process()
        self._resident_mb = 0.0

    @property
    def run(self) -> str:
        return self._log.run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def read(self, start: int = 1, **how: Any) -> AsyncIterator[Recorded]:
        async for recorded in self._log.read(start, **how):
            yield recorded
            if recorded.seq % 10_000 == 0:
                self._look()
            if recorded.seq in self._due:
                self.mark()

    def mark(self) -> None:
        self._look()
        self.marks.append(Mark(time.perf_counter(), round(self._resident_mb, 1)))

    def _look(self) -> None:
        self._resident_mb = max(self._resident_mb, self._process.memory_info().rss / 1e6)
