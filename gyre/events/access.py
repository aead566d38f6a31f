"""Shell. Ways to a run's log: over the server that the run keeps, or over one of our own when the run has ended."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gyre.errors import StreamError
from gyre.events.jetstream import connect
from gyre.events.log import Log
from gyre.events.run_dir import RunDir
from gyre.events.server import start_server

LOOK_S = 1.0
"""How long to look for a server that is probably gone."""


@asynccontextmanager
async def connect_run(run_dir: RunDir, timeout_s: float = 10.0) -> AsyncIterator[Log]:
    """The log of a run whose server is up. GYRE_NATS_URL and GYRE_NATS_TOKEN override run.json. Raises StreamError."""
    address = run_dir.load_address()
    url = os.environ.get("GYRE_NATS_URL", address.url)
    log = await connect(url, address.run, token=os.environ.get("GYRE_NATS_TOKEN", address.token), timeout_s=timeout_s)
    try:
        yield log
    finally:
        await log.close()


@asynccontextmanager
async def open_log(run_dir: RunDir) -> AsyncIterator[Log]:
    """The log of any run. A run that has ended gets a server for as long as the block lasts."""
    try:
        async with connect_run(run_dir, LOOK_S) as log:
            yield log
            return
    except StreamError:
        if not run_dir.nats.is_dir():
            raise
    address = run_dir.load_address()
    server = start_server(run_dir.nats, log=run_dir.path / "nats-server.log")
    try:
        log = await connect(server.url, address.run, token=server.token)
        try:
            yield log
        finally:
            await log.close()
    finally:
        server.stop()
