"""Shell. From the call of `append` to the reader that gets the event, at a steady rate.

Writer and reader are of one process, each with a connection of its own. Direction: events -> log -> reader -> seconds.
"""

import asyncio
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


def latencies(folder: Path, *, seconds: float = SECONDS) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    syncs: tuple[Literal["default", "always"], ...] = ("default", "always")
    for sync in syncs:
        with server_in(folder, sync) as server:
            waits = np.array(asyncio.run(_run(server, seconds))) * 1e3
        figures[f"publish_to_reader_p50_sync_{sync}"] = figure(float(np.quantile(waits, 0.5)), "ms")
        figures[f"publish_to_reader_p99_sync_{sync}"] = figure(
            float(np.quantile(waits, 0.99)), "ms", max_value=MAX_P99_MS
        )
    return figures


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
