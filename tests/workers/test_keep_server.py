"""The embedded server is kept up: after its death, and after a full disk, from which it does not recover by itself."""

import asyncio
from pathlib import Path

import pytest

from gyre.errors import ProcessError
from gyre.events import server as server_module
from gyre.events.server import start_server
from gyre.workers import run as run_module
from gyre.workers.run import keep_server


def test_a_server_that_cannot_write_is_started_again_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it prints then was seen on a full disk; `make chaos` fills one."""
    server = start_server(tmp_path / "nats", sync="default")
    before, printed = server.pid, server.log

    async def main() -> None:
        deaths: asyncio.Queue[int] = asyncio.Queue()
        keeping = asyncio.create_task(keep_server(server, lambda: 0, deaths))
        await asyncio.sleep(0.3)
        assert server.pid == before, "there is nothing wrong yet"
        monkeypatch.setattr(server_module, "MIN_FREE_BYTES", 1 << 62)
        with printed.open("a") as log:
            log.write("[1] 2026/01/01 [ERR] JetStream stream '$G > S' critical write error: no space left on device\n")
        await asyncio.sleep(0.3)
        assert server.cannot_store
        assert server.pid == before, "there is no room to start it"
        monkeypatch.setattr(server_module, "MIN_FREE_BYTES", 0)
        async with asyncio.timeout(120):
            assert await deaths.get() == -9
        assert server.pid not in (0, before)
        assert not server.cannot_store
        keeping.cancel()

    try:
        asyncio.run(main())
    finally:
        server.stop()


def test_a_disk_that_stays_full_ends_the_run_with_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server(tmp_path / "nats", sync="default")
    monkeypatch.setattr(server_module, "MIN_FREE_BYTES", 1 << 62)
    monkeypatch.setattr(run_module, "ROOM_S", 0.2)
    with server.log.open("a") as log:
        log.write("critical write error\n")
    try:
        with pytest.raises(ProcessError, match=r"disk full: .* nothing recorded is lost: free some space and start"):
            asyncio.run(keep_server(server, lambda: 0, asyncio.Queue()))
    finally:
        server.stop()
