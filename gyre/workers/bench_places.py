"""Shell. The processes that `gyre bench gateway` compares: a scripted engine, a gateway of gyre's, another one.

Each is a block, within which it serves. Invariant: whatever ends this process, none that it started outlives it: the
kernel kills each with it, and each ends its own children so. Direction: argv -> process -> Place.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec

from gyre.errors import MissingError, ProcessError
from gyre.events.parent import die_with
from gyre.events.server import free_ports

PEER = "rllm-model-gateway==0.1.0"
START_TIMEOUT_S = 60.0
GRACE_S = 15.0
"""For a process that is asked to end."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where calls go, and whose sessions they are."""

    url: str
    """With `{session}` where its name belongs."""
    pid: int = 0
    """Of its process."""


@contextmanager
def _process(argv: Sequence[str], folder: Path, name: str) -> Iterator["subprocess.Popen[str]"]:
    """A child that has ended when the block has, and its group with it."""
    with (folder / f"{name}.log").open("w") as log:
        child = subprocess.Popen(
            argv,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            preexec_fn=partial(die_with, os.getpid(), signal.SIGKILL),
        )
        try:
            yield child
        finally:
            try:
                child.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    child.wait(GRACE_S)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()


@contextmanager
def engine_process(reply: Sequence[int | None], bytes_per_token: float, folder: Path, delay_s: float) -> Iterator[str]:
    """Its URL. Raises ProcessError, as the others do."""
    said = ",".join(map(str, reply))
    options = ("--reply", said, "--delay-s", str(delay_s), "--bytes-per-token", str(bytes_per_token))
    argv = (sys.executable, "-m", "gyre.workers.bench_engine", *options)
    with _process(argv, folder, f"engine-{delay_s:g}") as child:
        yield _first_line(child)


@contextmanager
def gyre_process(policy: Path, folder: Path, engine: str) -> Iterator[Place]:
    folder.mkdir()
    options = ("--engine", engine, "--policy", str(policy.resolve()), "--dir", "run", "--context", "2000000")
    with _process((sys.executable, "-m", "gyre.cli", "gateway", *options), folder, "gateway") as child:
        yield Place(url=_first_line(child).split()[1] + "/s/{session}/v1/chat/completions", pid=child.pid)


@contextmanager
def peer_process(python: Path, folder: Path, engine: str) -> Iterator[Place]:
    """Its defaults: what passed is kept in SQLite, written behind the reply."""
    (port,) = free_ports(1)
    options = ("--host", "127.0.0.1", "--port", str(port), "--worker", f"{engine}/v1", "--log-level", "ERROR")
    argv = (str(python), "-m", "rllm_model_gateway", *options, "--db-path", str(folder / f"peer-{port}.db"))
    with _process(argv, folder, f"peer-{port}") as child:
        _wait_until_open(port, child)
        yield Place(url=f"http://127.0.0.1:{port}/sessions/{{session}}/v1/chat/completions", pid=child.pid)


def _first_line(child: "subprocess.Popen[str]") -> str:
    assert child.stdout is not None
    line = child.stdout.readline()
    if "http" not in line:
        raise ProcessError(f"gyre bench gateway: {child.args!r:.200} did not start: {line!r}; see its log")
    return line.strip()


def _wait_until_open(port: int, child: "subprocess.Popen[str]") -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s and child.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    raise ProcessError(f"gyre bench gateway: {PEER} did not start: see its log")


def install_peer(folder: Path) -> Path:
    """Its interpreter: an environment of its own, from the Python package index."""
    python = folder / "bin" / "python"
    for argv in ((sys.executable, "-m", "venv", str(folder)), (str(python), "-m", "pip", "install", "-q", PEER)):
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            said = done.stderr.strip().splitlines()
            raise MissingError(f"gyre bench gateway: {PEER} cannot be installed: {said[-1] if said else argv}")
    return python
