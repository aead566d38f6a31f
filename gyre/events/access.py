"""Shell. Ways to a run's log: over the server that the run keeps, or over one of our own when the run has ended."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Literal

import msgspec

from gyre.errors import HeldError, StreamError
from gyre.events.codec import Recorded
from gyre.events.follow import QUIET_S, is_run_finished
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
    """The log of a run whose server is up. Raises StreamError.

    GYRE_NATS_URL and GYRE_NATS_TOKEN override run.json. The second alone is for a server of the user's own: an embedded
    one knows nothing of it."""
    address, url = run_dir.load_address(), os.environ.get("GYRE_NATS_URL")
    token = (address.reader or address.token) if access == "reader" else address.token
    if url or not run_dir.nats.is_dir():
        token = os.environ.get("GYRE_NATS_TOKEN", token)
    address = msgspec.structs.replace(address, url=url or address.url)
    log = await connect_at(address, token, timeout_s=timeout_s, rest_s=rest_s)
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


def was_killed(run_dir: RunDir) -> StreamError:
    return StreamError(f"{run_dir.path}: the run was killed; `gyre run` with its --dir goes on with it")


async def follow_run(run_dir: RunDir, show: Callable[[Recorded], None], *, start: int = 1) -> None:
    """Show the events of a run from sequence `start` on (0: from now on) until it is over, or those that there are of
    one that has ended. One that was killed and goes on is followed to its new server.

    Raises StreamError when the run is killed meanwhile, and as `open_log` does."""
    shown, was_live = _Shown(show, start - 1), False
    while True:
        address = run_dir.load_address()
        async with open_log(run_dir) as (log, is_live):
            last = await log.last_seq()
            shown.seq = last if start == 0 and not was_live else shown.seq
            if not is_live:
                await shown.read(log, last)
                if was_live and not shown.is_finished:
                    raise was_killed(run_dir)
                return
            was_live, give_up = True, time.monotonic() + PATIENCE_S
            reading = asyncio.create_task(shown.read(log))
            try:
                while True:
                    await shown.until_quiet(reading)
                    if shown.is_finished:
                        return
                    if run_dir.is_held:
                        give_up = time.monotonic() + PATIENCE_S
                    # An embedded server that has gone with its supervisor does not come back where it was.
                    if run_dir.nats.is_dir() and (time.monotonic() > give_up or run_dir.load_address() != address):
                        break
            finally:
                reading.cancel()
                with suppress(asyncio.CancelledError):
                    await reading


class _Shown:
    """How far a run has been followed."""

    def __init__(self, show: Callable[[Recorded], None], seq: int) -> None:
        self._show = show
        self.seq = seq
        self.is_finished = False

    async def read(self, log: Log, until: int | None = None) -> None:
        async for recorded in log.read(self.seq + 1, until=until):
            self.seq, self.is_finished = recorded.seq, is_run_finished(self.is_finished, recorded.event)
            self._show(recorded)

    async def until_quiet(self, reading: "asyncio.Task[None]") -> None:
        """Returns when nothing has come for `QUIET_S`. Raises what `reading` does."""
        before = -1
        while before != self.seq:
            before = self.seq
            await asyncio.wait({reading}, timeout=QUIET_S)
            if reading.done():
                reading.result()
