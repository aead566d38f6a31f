"""Where harnesses find the gateway: where one listens, not where one did."""

import asyncio
import socket
from pathlib import Path

from gyre.cli.processes import wait_for_port, wait_for_socket
from gyre.events.run_dir import RunDir
from gyre.events.server import free_ports


def test_the_port_of_a_gateway_that_is_gone_is_not_taken_for_that_of_the_next(tmp_path: Path) -> None:
    async def play() -> None:
        old, new = free_ports(2)
        file = tmp_path / "gateway.port"
        waiting = asyncio.create_task(wait_for_port(RunDir(tmp_path), "127.0.0.1"))
        for text in ("", str(old)):
            file.write_text(text)
            assert not (await asyncio.wait((waiting,), timeout=0.2))[0]
        async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", new):
            file.write_text(str(new))
            assert await asyncio.wait_for(waiting, 120) == new

    asyncio.run(play())


def test_the_socket_of_a_gateway_that_is_gone_is_not_taken_for_that_of_the_next(tmp_path: Path) -> None:
    async def play() -> None:
        path = tmp_path / "s"
        with socket.socket(socket.AF_UNIX) as gone:
            gone.bind(str(path))
        waiting = asyncio.create_task(wait_for_socket(path))
        assert not (await asyncio.wait((waiting,), timeout=0.2))[0]
        async with await asyncio.start_unix_server(lambda _, writer: writer.close(), path):
            await asyncio.wait_for(waiting, 120)

    asyncio.run(play())
