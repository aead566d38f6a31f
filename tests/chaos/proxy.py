"""A wire between clients and a nats-server that loses, doubles and reorders acknowledgements, repeats sends, stalls or
tears.

client <-> Proxy <-> server. It knows the protocol's frames, so what it lets through is well formed, but for `tear`.
"""

import asyncio
import socket
from collections.abc import Callable
from random import Random

Deliver = Callable[[bytes, float], None]
"""Hands a frame on after so many seconds."""
ACK = b'{"stream":'
STALL_S = (0.3, 1.2)


def lose(frame: bytes, rng: Random, deliver: Deliver) -> None:
    if rng.random() > 0.25:
        deliver(frame, 0)


def double(frame: bytes, rng: Random, deliver: Deliver) -> None:
    for _ in range(rng.choice((1, 2, 2, 3))):
        deliver(frame, rng.choice((0, 0, 0.05, 0.5)))


def reorder(frame: bytes, rng: Random, deliver: Deliver) -> None:
    deliver(frame, rng.uniform(0, 0.3))


class Proxy:
    """`async with Proxy(host, port, rng) as proxy:` listens at `proxy.url`."""

    def __init__(self, host: str, port: int, rng: Random) -> None:
        self.host, self.port, self.rng = host, port, rng
        self.on_ack: Callable[[bytes, Random, Deliver], None] | None = None
        self.repeat_after_s = 0.0
        """Every now and then a send comes once more, so long after it came."""
        self.num_touched = 0
        """Frames that something was done about."""
        self._reading = asyncio.Event()
        self._reading.set()
        self._clients: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Proxy":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.tear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def tear(self) -> None:
        """Every connection ends in the middle of whatever it is at."""
        for writer in self._clients:
            writer.transport.abort()

    async def stall(self, seconds: float) -> None:
        """What the server sends is not taken from it meanwhile."""
        self._reading.clear()
        await asyncio.sleep(seconds)
        self.resume()

    def resume(self) -> None:
        self._reading.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._clients.add(writer)
        try:
            from_server, to_server = await asyncio.open_connection(sock=await self._connection())
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._sends(reader, to_server))
                    both.create_task(self._frames(from_server, writer))
            finally:
                to_server.transport.abort()
        except* (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()
            self._clients.discard(writer)
            self._tasks.discard(task)

    async def _connection(self) -> socket.socket:
        """With small buffers, so that a server soon notices that nobody reads."""
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        await asyncio.get_running_loop().sock_connect(sock, (self.host, self.port))
        return sock

    async def _frames(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()

        def write(frame: bytes) -> None:
            if not writer.is_closing():
                writer.write(frame)

        def deliver(frame: bytes, delay_s: float) -> None:
            if delay_s:
                loop.call_later(delay_s, write, frame)
            else:
                write(frame)

        while True:
            await self._reading.wait()
            line = await reader.readuntil(b"\r\n")
            words = line.split()
            if words[0] in (b"MSG", b"HMSG"):
                payload = await reader.readexactly(int(words[-1]) + 2)
                if payload.startswith(ACK) and b'"seq":' in payload and self.on_ack is not None:
                    self.num_touched += 1
                    self.on_ack(line + payload, self.rng, deliver)
                    continue
                line += payload
            deliver(line, 0)
            await writer.drain()

    async def _sends(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        last_repeat = 0.0
        try:
            while True:
                line = await reader.readuntil(b"\r\n")
                words = line.split()
                if words[0] in (b"PUB", b"HPUB"):
                    line += await reader.readexactly(int(words[-1]) + 2)
                    if self.repeat_after_s and words[1].startswith(b"gyre.") and self.rng.random() < 0.1:
                        self.num_touched += 1
                        due = loop.time() + self.repeat_after_s * self.rng.uniform(1, 2)
                        loop.call_at(due, writer.write, line)
                        last_repeat = max(last_repeat, due)
                writer.write(line)
                await writer.drain()
        finally:  # what is under way arrives, also when its sender is gone
            await asyncio.sleep(last_repeat - loop.time())
