"""Shell. What becomes of runs: a log into a new run directory, a run into an archive, a run removed.

Invariants: a directory is removed only while nobody holds it, and vanishes at once; an archive takes a
run's place only after it was read back and found whole; an import that fails leaves no run.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

from gyre.errors import ConfigError
from gyre.events.archive import Header, import_log, read_header
from gyre.events.jetstream import connect
from gyre.events.log import Log
from gyre.events.run_dir import Address, RunDir
from gyre.events.server import start_server
from gyre.events.streams import load_streams


@asynccontextmanager
async def imported(path: Path, run_dir: RunDir, *, url: str = "") -> AsyncIterator[tuple[Header, Log]]:
    """Import an archive as a new run directory; the log is there while the block lasts.

    Without `url` (token in GYRE_NATS_TOKEN) the directory gets an embedded server's store. Raises ConfigError for a
    directory that is not empty, StreamError for a stream that is not.
    """
    header = read_header(path)
    if run_dir.path.exists() and any(run_dir.path.iterdir()):
        raise ConfigError(f"{run_dir.path}: not empty; give a new directory for the import")
    is_new = not run_dir.path.exists()
    run_dir.path.mkdir(parents=True, exist_ok=True)
    # Each write to the disk by itself would take an hour where minutes do: all of it is written at the end.
    server = None if url else start_server(run_dir.nats, sync="default", log=run_dir.path / "nats-server.log")
    token = server.token if server else os.environ.get("GYRE_NATS_TOKEN", "")
    reader = server.credential("reader") if server else ""
    address = Address(run=header.run, url=server.url if server else url, token=token, reader=reader)
    try:
        log = await connect(address.url, header.run, token=token, create=load_streams())
        try:
            await import_log(path, log)
            run_dir.save_address(address)
            yield header, log
        finally:
            await log.close()
    except BaseException:
        if server is not None:
            server.stop()
        shutil.rmtree(run_dir.path) if is_new else _empty(run_dir.path)
        raise
    if server is not None:
        server.stop()
        os.sync()


@contextlib.contextmanager
def held(run_dir: RunDir) -> Iterator[None]:
    """Nobody runs in this directory while the block lasts. Raises ConfigError, MissingError."""
    run_dir.load_address()
    with run_dir.lock():
        _check_server(run_dir)
        yield


def remove(run_dir: RunDir) -> None:
    """All of it. Call it while it is `held`."""
    _check_server(run_dir)
    going = run_dir.path.with_name(f".{run_dir.path.name}.removed")
    shutil.rmtree(going, ignore_errors=True)
    run_dir.path.rename(going)
    shutil.rmtree(going)


def contents(run_dir: RunDir) -> str:
    """What would be lost, in one line: `nats 18 MB, checkpoints 4 MB`."""
    sizes = {path.name: _size(path) for path in sorted(run_dir.path.iterdir())}
    large = sorted(((size, name) for name, size in sizes.items() if size >= 1 << 20), reverse=True)
    named = [f"{name} {size >> 20} MB" for size, name in large]
    rest = sum(sizes.values()) - sum(size for size, _ in large)
    return ", ".join([*named, f"{'the rest' if named else 'all'} {rest >> 10} KB"])


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else (path,)
    return sum(file.lstat().st_size for file in files if not file.is_dir())


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _check_server(run_dir: RunDir) -> None:
    """`gyre tail` or `gyre consume` over a run that has ended hold its log by a server of their own."""
    lock = run_dir.nats / "lock"
    if not lock.exists():
        return
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{run_dir.path}: its log is being read by another process; stop it first") from None
