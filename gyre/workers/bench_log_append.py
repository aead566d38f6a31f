"""Shell. Typed appends, next to a C client that publishes bare bytes of the same size, asynchronously and with ids.

An append is `Writer.append`: checked, encoded, hashed, linked to the writer's event before, sent, and acknowledged. One
process and one connection each, one replica; ours runs on uvloop, as all of gyre's do.
Direction: events -> log, bytes -> stream -> figures.
"""

import asyncio
import shutil
import subprocess
import time
from collections.abc import Callable
from itertools import cycle, islice, repeat
from pathlib import Path
from typing import Any, Literal

import msgspec
import uvloop

from gyre.errors import MissingError, ProcessError
from gyre.events.codec import Envelope, encode
from gyre.events.server import Server
from gyre.events.types import Event
from gyre.workers.bench import Figure, figure
from gyre.workers.log_load import fill, log_at, server_in
from gyre.workers.run_events import call_completed

WINDOW = 4_000
"""Of the C client: its own default."""
TO_INSTALL = "apt-get install gcc libnats-dev"
MIN_APPENDS_S = 15_000
"""With a sync of each write."""
_WRITTEN: dict[str, Any] = {"writer": "gateway", "incarnation": 1, "writer_seq": 12_345, "cause": 0}
ROUNDS = 3
"""Of each figure, with its reference in turn: the best of each counts, since other programs only slow both down."""


class Size(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    num_tokens: int
    """Of the event: 8 bytes each, beside about 500 of header."""
    num: int
    num_at_once: int
    min_ratio: float


SIZES = (
    Size(name="600B", num_tokens=12, num=100_000, num_at_once=4000, min_ratio=0.5),
    Size(name="8KB", num_tokens=960, num=20_000, num_at_once=2000, min_ratio=0.45),
    Size(name="200KB", num_tokens=25_530, num=1_000, num_at_once=100, min_ratio=0.45),
)


def appends(folder: Path, source: Path, *, scale: float = 1.0, say: Callable[[str], None]) -> dict[str, Figure]:
    """`source`: of the C client. `scale`: of the number of events."""
    try:
        client = build_client(source, folder / "publish")
    except MissingError as error:
        client = None
        say(str(error))
    figures: dict[str, Figure] = {}
    for size in SIZES:
        value, reference = _best(folder, client, size, int(size.num * scale), "default")
        goal = size.min_ratio if reference else None
        figures[f"append_{size.name}_sync_default"] = figure(value, "events/s", reference=reference, min_ratio=goal)
    value, reference = _best(folder, client, SIZES[0], int(SIZES[0].num * scale), "always")
    figures["append_600B_sync_always"] = figure(value, "events/s", reference=reference, min_value=MIN_APPENDS_S)
    return figures


def build_client(source: Path, target: Path) -> Path:
    """Raises MissingError that says what to install."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or not source.exists():
        what = "a C compiler" if source.exists() else str(source)
        raise MissingError(f"no reference for appends: {what} is missing: {TO_INSTALL}, in a checkout of gyre")
    argv = (compiler, "-O2", "-o", str(target), str(source), "-lnats")
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason"])[0]
        raise MissingError(f"no reference for appends: libnats: {reason}: {TO_INSTALL}")
    return target


def _best(
    folder: Path, client: Path | None, size: Size, num: int, sync: Literal["always", "default"]
) -> tuple[float, float | None]:
    """Events a second of gyre and of the client."""
    events: list[Event] = [call_completed(f"g000001-3-s-c{number}", size.num_tokens) for number in range(100)]
    num_bytes = len(encode(Envelope(event=events[0], prev="0" * 32, time_ns=time.time_ns(), **_WRITTEN)))
    value = reference = 0.0
    for number in range(ROUNDS):
        with server_in(folder, sync) as server:
            if client is not None:
                reference = max(reference, asyncio.run(_published(server, client, f"c{number}", num, num_bytes)))
            value = max(value, uvloop.run(_appended(server, f"g{number}", events, num, size.num_at_once)))
    return value, reference or None


async def _appended(server: Server, run: str, events: list[Event], num: int, num_at_once: int) -> float:
    async with log_at(server, run) as log:
        written = zip(repeat("gateway"), islice(cycle(events), num), strict=False)
        seconds = await fill(log, written, num_writing=num_at_once)
        stored = await log.last_seq()
    if stored != num:
        raise ProcessError(f"bench log: {stored} events are stored, not {num}")
    return num / seconds


async def _published(server: Server, client: Path, run: str, num: int, num_bytes: int) -> float:
    async with log_at(server, run) as log:
        url = server.url.replace("nats://", f"nats://{server.token}@")
        subject = f"gyre.{run}.run.main"
        argv = (str(client), url, subject, str(num), str(num_bytes), str(WINDOW))
        done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, check=False)
        if done.returncode or await log.last_seq() != num:
            raise ProcessError(f"bench log: {client.name}: {done.stderr.strip() or 'not all was stored'}")
    return num / float(done.stdout.split()[0])
