"""Shell. The checkpoint of a consumer: its state and the sequence that the state holds, in one file.

Invariant: the file always holds a state together with the very sequence that it was folded through:
it is replaced as a whole, and is on the disk before it takes the old one's place. One process at a
time may hold it.
"""

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from gyre.errors import ConfigError, ConsumerError
from gyre.events.order import Seen


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """What the file holds."""

    consumer: str
    run: str
    seq: int
    """Every event through this one is in the state, none after it."""
    digest: str
    """Of the event at `seq`: tells another log of the same name."""
    from_start: bool
    """Whether it was folded from the log's first event on."""
    seen: tuple[Seen, ...]
    """Tells an event that the log holds twice, also when the first is in the state already."""
    state: msgspec.Raw


class Checkpoint:
    """`with Checkpoint(path) as checkpoint:` holds it; nothing is written before `save`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def load(self) -> Saved | None:
        """Raises ConfigError for a file that is no checkpoint."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=Saved)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise ConfigError(f"{self.path}: no checkpoint of a consumer: {error}; --restart replaces it") from None

    def save(self, saved: Saved) -> None:
        """Raises ConsumerError; the old checkpoint then holds."""
        new = self.path.with_name(f"{self.path.name}.new")
        try:
            with new.open("wb") as file:
                file.write(msgspec.json.encode(saved))
                file.flush()
                os.fsync(file.fileno())
            new.replace(self.path)
            sync_directory(self.path.parent)
        except OSError as error:
            raise ConsumerError(f"{self.path}: cannot be saved: {error.strerror}; the last save holds") from None

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        """Raises ConfigError while another process holds it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path.with_name(f"{self.path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ConfigError(
                f"{self.path}: another process consumes under this name; stop it, or give another --checkpoint"
            ) from None
        self._lock = lock
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._lock is not None:
            os.close(self._lock)


def sync_directory(path: Path) -> None:
    """A file that was put in place by its name is on the disk only when its directory is."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
