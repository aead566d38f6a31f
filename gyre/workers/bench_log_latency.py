"""Shell. From the call of `append` to the reader that gets the event, at a steady rate.

Writer and reader are of one process, each with a connection of its own. Where each write is synced, the reference is a
loop that only writes as many bytes to the same disk at the same rate and syncs each: an event cannot wait for less.
Direction: events -> log -> reader -> seconds.
"""

import asyncio
import os
import time
from pathlib import Path
from typing import Literal

import numpy as np

from gyre.events.log import Writer
from gyre.events.server import Server
from gyre.workers.bench import Figure, figure
from gyre.workers.log_load import log_at, server_in
from gyre.workers.run_events import call_completed

EVENTS_S = 2_000
SECONDS = 10.0
WARM_UP_S = 1.0
MAX_P99_MS = 5.0
NUM_BYTES = 600
"""Of an event."""


def latencies(folder: Path, *, seconds: float = SECONDS) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    syncs: tuple[Literal["default", "always"], ...] = ("default", "always")
    for sync in syncs:
        with server_in(folder, sync) as server:
            waits = np.array(asyncio.run(_run(server, seconds))) * 1e3
        bare = np.array(_synced(folder / "synced", seconds)) * 1e3 if sync == "always" else None
        for part, goal in ((0.5, None), (0.99, MAX_P99_MS)):
            figures[f"publish_to_reader_p{part * 100:.0f}_sync_{sync}"] = figure(
                float(np.quantile(waits, part)),
                "ms",
                reference=None if bare is None else float(np.quantile(bare, part)),
                max_value=goal,
            )
    return figures


def _synced(path: Path, seconds: float) -> list[float]:
    """Seconds from the time of each write to the end of its sync."""
    clock, waits = time.perf_counter, []
    with path.open("wb", buffering=0) as file:
        begun = clock()
        for number in range(int(EVENTS_S * seconds)):
            due = begun + number / EVENTS_S
            time.sleep(max(0.0, due - clock()))
            file.write(bytes(NUM_BYTES))
            os.fsync(file.fileno())
            waits.append(clock() - due)
    return waits


async def _run(server: Server, seconds: float) -> list[float]:
    """Seconds that each event took, those of the first second left out."""
    clock = time.perf_counter
    num, warm_up = int(EVENTS_S * (WARM_UP_S + seconds)), int(EVENTS_S * WARM_UP_S)
    sent, got = [0.0] * num, [0.0] * num
    async with log_at(server, "latency") as log, log_at(server, "latency") as readers:
        writer = Writer(log, "gateway", 1, time.time_ns)

        async def read() -> None:
            async for recorded in readers.read(1, until=num):
                got[int(recorded.envelope.writer_seq) - 1] = clock()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(read())
            await asyncio.sleep(0.1)
            begun = clock()
            for number in range(num):
                wait = begun + number / EVENTS_S - clock()
                if wait > 0:
                    await asyncio.sleep(wait)
                sent[number] = clock()
                tasks.create_task(writer.append(call_completed(f"c{number}", 12)))
    return [at - since for at, since in zip(got[warm_up:], sent[warm_up:], strict=True)]
