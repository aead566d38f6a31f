"""Shell. The run directory: where a run keeps its log, tables, checkpoints and how to reach it.

run.json          run id, NATS url and credentials (mode 0600): how every process finds the log
nats/             the embedded server's store
tables.duckdb     the projector's database
checkpoints/      step-N, of the trainer
cells/<cell>/     manifests and ports of one cell
workspaces/       one an execution, while it lives
logs/             one file a process
summary.json      the closing figures
"""

import contextlib
import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from gyre.errors import ConfigError, MissingError

LOCK_WAIT_S = 30.0
"""For the processes of a supervisor that was killed: on a machine that has the time they end themselves within 5 s."""
HOLDER_WAIT_S = 0.5
"""For a supervisor itself: one that was killed a moment ago has not ended yet."""


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach a run's log, and what else of it listens."""

    run: str
    url: str
    token: str = ""
    """The owner's: a token, or `user:password`."""
    reader: str = ""
    """For those who only read; empty: as the owner."""
    tls_ca: str = ""
    credentials: str = ""
    """Files, as in the config."""
    num_replicas: Literal[1, 3, 5] = 1
    kv_store: str = ""
    """`host:port` of the KV store that the supervisor keeps, if it keeps one."""


class RunDir:
    """Paths by name; nothing is created before it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nats = path / "nats"
        self.tables = path / "tables.duckdb"
        self.logs = path / "logs"
        self.summary = path / "summary.json"
        self.address_file = path / "run.json"
        self.checkpoints = path / "checkpoints"
        self._lock = path / "lock"

    @property
    def socket(self) -> Path:
        """Where harnesses in a sandbox reach the gateway: alone in its folder, which is what they get to see, so that
        a gateway that starts again is reached too. Socket paths are short by law: 107 bytes on Linux."""
        near = self.path.resolve() / "gateway/gateway.sock"
        if len(str(near)) < 100:
            return near
        name = hashlib.sha256(str(near).encode()).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"gyre-{os.getuid()}-{name}" / "gateway.sock"

    def save_address(self, address: Address) -> None:
        """Readable by its owner only: it carries a credential."""
        new = self.address_file.with_suffix(".new")
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(address))
        new.replace(self.address_file)

    def load_address(self) -> Address:
        """Raises MissingError where there is no run."""
        try:
            return msgspec.json.decode(self.address_file.read_bytes(), type=Address)
        except FileNotFoundError:
            raise MissingError(f"{self.path}: no run here (no run.json); `gyre runs` lists what there is") from None
        except msgspec.DecodeError as error:
            raise ConfigError(f"{self.address_file}: {error}; was it changed by hand?") from None

    def kept_step(self, step: int) -> int:
        """The step itself when its checkpoint is kept; of 0, the last one. Raises MissingError."""
        names = (path.name.removeprefix("step-") for path in self.checkpoints.glob("step-*"))
        steps = sorted(int(name) for name in names if name.isdigit())
        if not steps or step not in (0, *steps):
            kept = f"there are: steps {', '.join(map(str, steps))}" if steps else "no step of this run was completed"
            raise MissingError(f"{self.checkpoints}: no checkpoint {f'of step {step}' if step else 'yet'}; {kept}")
        return step or steps[-1]

    @property
    def was_used(self) -> bool:
        """By a run, if only to begin."""
        return self._lock.exists() or self.address_file.exists()

    @property
    def is_held(self) -> bool:
        """Whether a run goes on here."""
        return is_locked(self._lock)

    @contextlib.contextmanager
    def lock(self) -> Iterator[int]:
        """One supervisor a directory; yields a descriptor for its processes to inherit, so that the directory is free
        only when all of them are gone. Raises ConfigError while another run holds it."""
        self.path.mkdir(parents=True, exist_ok=True)
        with self._lock.open("a+") as file:
            begun = time.monotonic()
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    file.seek(0)
                    holder = file.read().strip()
                    # A supervisor that was killed is about to end, and then its processes are.
                    if time.monotonic() - begun > (HOLDER_WAIT_S if _is_alive(holder) else LOCK_WAIT_S):
                        raise ConfigError(
                            f"{self.path}: in use by another run (process {holder or 'unknown'}); "
                            "stop it first or give another --dir"
                        ) from None
                    time.sleep(0.05)
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield file.fileno()


def find_runs(root: Path) -> tuple[RunDir, ...]:
    """Every run below `root`, by name."""
    return tuple(RunDir(path.parent) for path in sorted(root.glob("*/run.json")))


def is_locked(path: Path) -> bool:
    """Whether a process that lives holds the lock of a file: the kernel takes it back from one that was killed."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _is_alive(pid: str) -> bool:
    """One that ended, and that its parent has not asked about yet, is not."""
    try:
        return pid.isdigit() and Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
