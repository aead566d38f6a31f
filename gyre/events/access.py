"""Shell. Ways to a run's log: over the server that the run keeps, or over one of our own when the run has ended."""

import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Literal

import msgspec

from gyre.errors import HeldError, StreamError
from gyre.events.jetstream import JetStreamLog, connect
from gyre.events.log import Log
from gyre.events.nats_wire import open_wire
from gyre.events.run_dir import Address, RunDir
from gyre.events.server import start_server
from gyre.events.streams import Streams

LOOK_S = 1.0
"""How long to look, at first, for an embedded server that is probably gone."""
FAR_S = 10.0
"""For one that is elsewhere, of a cluster perhaps, whose first server may be down."""
PATIENCE_S = 30.0
"""For an embedded one that is there: its run's, or that of somebody else who reads a run that has ended."""
Access = Literal["reader", "owner"]


async def connect_at(
    address: Address,
    token: str | None = None,
    *,
    create: Streams | None = None,
    timeout_s: float = 10.0,
    rest_s: float = 0.0,
) -> JetStreamLog:
    """Connect as the owner, or with another `token`. Raises as `connect` does."""
    return await connect(
        address.url,
        address.run,
        create=create,
        token=address.token if token is None else token,
        credentials=address.credentials,
        tls_ca=address.tls_ca,
        timeout_s=timeout_s,
        rest_s=rest_s,
    )


async def check_reachable(address: Address, timeout_s: float = 10.0) -> None:
    """Whether a server lets us in there; nothing is made of a log. Raises as `connect` does."""
    options = {"credentials": address.credentials, "tls_ca": address.tls_ca}
    wire = await open_wire(address.url, token=address.token, **options, timeout_s=timeout_s)
    await wire.close()


@asynccontextmanager
async def connect_run(
    run_dir: RunDir, timeout_s: float = 10.0, *, access: Access = "owner", rest_s: float = 0.0
) -> AsyncIterator[Log]:
    """The log of a run whose server is up. GYRE_NATS_URL and GYRE_NATS_TOKEN override run.json. Raises StreamError."""
    address = run_dir.load_address()
    address = msgspec.structs.replace(address, url=os.environ.get("GYRE_NATS_URL", address.url))
    own = (address.reader or address.token) if access == "reader" else address.token
    log = await connect_at(address, os.environ.get("GYRE_NATS_TOKEN", own), timeout_s=timeout_s, rest_s=rest_s)
    try:
        yield log
    finally:
        await log.close()


@asynccontextmanager
async def open_log(run_dir: RunDir, *, access: Access = "reader") -> AsyncIterator[tuple[Log, bool]]:
    """The log of any run, and whether it may still grow. One that has ended gets a server while the block lasts.

    Raises StreamError, and HeldError while another reader's server is at the log of a run that has ended."""
    is_embedded = run_dir.nats.is_dir()
    async with AsyncExitStack() as stack:
        give_up, look_s = time.monotonic() + PATIENCE_S, LOOK_S if is_embedded else FAR_S
        while True:
            try:
                log = await stack.enter_async_context(connect_run(run_dir, look_s, access=access))
                is_live = True
                break
            except StreamError:
                if not is_embedded:
                    raise
            try:
                server = start_server(run_dir.nats, log=run_dir.path / "nats-server.log")
            except HeldError:  # the run's own has much to do, or another reader's is there
                if time.monotonic() > give_up:
                    raise
                look_s *= 2
                continue
            stack.callback(server.stop)
            log = await connect(server.url, run_dir.load_address().run, token=server.credential(access))
            stack.push_async_callback(log.close)
            is_live = False
            break
        yield log, is_live
