"""Shell. A line between harness and gateway that breaks once: socket file or TCP -> this -> the gateway's socket file.

Bytes pass unchanged in both directions, until a reply holds the text at which the line breaks: what stands before it
is passed on, then both ends are aborted. Invariant: it breaks at most once, and only in the gateway's direction.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

CHUNK = 65536
UNREAD_S = 1.0
"""Between the last bytes and the break: a connection that is reset loses what its reader has not taken."""


class BrokenLine:
    def __init__(self, gateway: Path, breaks_at: str) -> None:
        self.broken = False
        self._gateway = gateway
        self._breaks_at = breaks_at.encode()

    @asynccontextmanager
    async def listen(self, socket_path: Path) -> AsyncIterator[str]:
        """Its URL for a harness that no sandbox keeps from TCP; for as long as the block lasts."""
        servers = (
            await asyncio.start_unix_server(self._connect, str(socket_path)),
            await asyncio.start_server(self._connect, "127.0.0.1", 0),
        )
        try:
            yield f"http://127.0.0.1:{servers[1].sockets[0].getsockname()[1]}"
        finally:
            for server in servers:
                server.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream, downstream = await asyncio.open_unix_connection(str(self._gateway))
        except OSError:
            writer.transport.abort()
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pass(reader, downstream))
                tasks.create_task(self._pass_until_break(upstream, writer))
        except* ConnectionError:
            pass
        finally:
            for end in (downstream, writer):
                with contextlib.suppress(ConnectionError):
                    end.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(CHUNK):
            writer.write(chunk)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()

    async def _pass_until_break(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held = b""
        while chunk := await reader.read(CHUNK):
            held += chunk
            at = held.find(self._breaks_at) if not self.broken and self._breaks_at else -1
            if at >= 0:
                self.broken = True
                writer.write(held[:at])
                await writer.drain()
                await asyncio.sleep(UNREAD_S)
                raise ConnectionResetError("the line breaks here")
            # The text may go on in the next chunk.
            keep = self._num_begun(held)
            writer.write(held[: len(held) - keep])
            held = held[len(held) - keep :]
            await writer.drain()
        writer.write(held)
        with contextlib.suppress(OSError):
            writer.write_eof()

    def _num_begun(self, held: bytes) -> int:
        """Bytes at the end with which the text at which it breaks may begin."""
        sizes = range(min(len(self._breaks_at) - 1, len(held)), 0, -1)
        return next((size for size in sizes if not self.broken and held.endswith(self._breaks_at[:size])), 0)
