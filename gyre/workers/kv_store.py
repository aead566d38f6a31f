"""Shell. The store through which KV moves between engines: Mooncake's master, memory that outlives engines, a client.

    python -m gyre.workers.kv_store --port PORT --bytes BYTES

Invariant: the memory belongs to this process, never to an engine, so KV survives the engine that computed it. The
process ends with its parent, and the master with it. Direction: engines (SGLang's HiCache, write-through) -> store ->
engines; the client only looks at what is there and reads it to check it.

As all of Mooncake it listens on all interfaces: on a machine of several users or networks, keep others away.
"""

import argparse
import contextlib
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gyre.errors import MissingError, TransferError
from gyre.events.parent import die_with
from gyre.events.server import free_ports

SEGMENT_BYTES = 2 << 30
BUFFER_BYTES = 64 << 20
READY = "kv store: ready"
PATIENCE_S = 30.0


class KvStore:
    """A client that offers no memory of its own. Blocking: call it in a thread."""

    def __init__(self, address: str, host: str = "127.0.0.1", protocol: str = "tcp", device: str = "") -> None:
        self._store = _connect(address, host, protocol, device, segment_bytes=0)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        return [found == 1 for found in self._store.batch_is_exist(list(keys))] if keys else []

    def wait_for(self, keys: Sequence[str], timeout_s: float, poll_s: float = 0.01) -> bool:
        """Whether all of them were there before the time was over."""
        give_up = time.monotonic() + timeout_s
        while not all(self.exists(keys)):
            if time.monotonic() > give_up:
                return False
            time.sleep(poll_s)
        return True

    def checksums(self, keys: Iterable[str]) -> tuple[dict[str, str], int]:
        """SHA-256 of each object that is there, and the bytes of all of them. Reads every byte."""
        found, num_bytes = {}, 0
        for key in keys:
            content = self._store.get(key)
            if content:
                found[key] = hashlib.sha256(content).hexdigest()[:32]
                num_bytes += len(content)
        return found, num_bytes

    def put(self, key: str, content: bytes) -> None:
        if code := self._store.put(key, content):
            raise TransferError(f"kv store: cannot put {key}: {code}")

    def remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._store.remove(key)

    def close(self) -> None:
        self._store.close()


def store_command(address: str) -> tuple[str, ...]:
    """argv of a store that is to have this address."""
    host, _, port = address.rpartition(":")
    return (sys.executable, "-m", "gyre.workers.kv_store", "--host", host, "--port", port)


def open_store(address: str, patience_s: float = PATIENCE_S) -> KvStore:
    """One whose process may still be starting. Raises TransferError when it is not there in time."""
    give_up = time.monotonic() + patience_s
    while True:
        try:
            return KvStore(address)
        except TransferError:
            if time.monotonic() > give_up:
                raise
        time.sleep(0.2)


def engine_env(address: str, host: str = "127.0.0.1", protocol: str = "tcp", device: str = "") -> dict[str, str]:
    """What an engine needs to know of the store; it offers no memory of its own."""
    return {
        "MOONCAKE_MASTER": address,
        "MOONCAKE_PROTOCOL": protocol,
        "MOONCAKE_DEVICE": device,
        "MOONCAKE_TE_META_DATA_SERVER": "P2PHANDSHAKE",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "0",
        "MOONCAKE_LOCAL_HOSTNAME": host,
    }


def engine_flags(page_size: int, *, gpu: bool) -> tuple[str, ...]:
    """Of `sglang.launch_server`: KV is written to the store as it is computed, and read from it as it is needed."""
    layout = ("page_first", "kernel") if gpu else ("page_first_direct", "direct")
    return (
        "--page-size", str(page_size), "--enable-hierarchical-cache", "--hicache-size", "1",
        "--hicache-mem-layout", layout[0], "--hicache-io-backend", layout[1],
        "--hicache-write-policy", "write_through", "--hicache-storage-backend", "mooncake",
        "--hicache-storage-prefetch-policy", "wait_complete",
        "--hicache-storage-backend-extra-config", f'{{"prefetch_threshold":{page_size}}}', "--enable-cache-report",
    )  # fmt: skip


def _connect(address: str, host: str, protocol: str, device: str, *, segment_bytes: int) -> Any:
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("GLOG_minloglevel", "2")
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise MissingError(f"mooncake: {error}; install the `cpu` extra of gyre") from None
    store = MooncakeDistributedStore()
    if code := store.setup(host, "P2PHANDSHAKE", segment_bytes, BUFFER_BYTES, protocol, device, address):
        raise TransferError(f"kv store {address}: setup failed with {code}; is its process alive?")
    return store


def main() -> None:
    parser = argparse.ArgumentParser(prog="kv_store", description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument("--bytes", default=SEGMENT_BYTES, type=int, help="memory to hold")
    parser.add_argument("--transfer-protocol", default="tcp", choices=("tcp", "rdma"))
    parser.add_argument("--transfer-device", default="")
    args = parser.parse_args()
    die_with(os.getppid())
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    master = subprocess.Popen(
        [
            _master(), f"--rpc_port={args.port}", f"--rpc_address={args.host}", f"--metrics_port={free_ports(1)[0]}",
            "--metrics_host=127.0.0.1", "--eviction_high_watermark_ratio=0.95",
        ],
        preexec_fn=partial(die_with, os.getpid(), signal.SIGKILL),
    )  # fmt: skip
    try:
        address = f"{args.host}:{args.port}"
        _wait_for_master(master, args.host, args.port)
        protocol, device = args.transfer_protocol, args.transfer_device
        held = _connect(address, args.host, protocol, device, segment_bytes=args.bytes)
        print(READY, address, flush=True)
        while not stopped and master.poll() is None:
            time.sleep(0.1)
        with contextlib.suppress(Exception):
            held.close()
    finally:
        master.kill()
        master.wait()
    os._exit(0 if stopped else 1)


def _wait_for_master(master: "subprocess.Popen[bytes]", host: str, port: int) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up and master.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
            return
        time.sleep(0.05)
    raise TransferError(f"kv store: its master does not listen on {host}:{port}; is the port taken?")


def _master() -> str:
    beside = Path(sys.executable).with_name("mooncake_master")
    found = str(beside) if beside.exists() else shutil.which("mooncake_master")
    if not found:
        raise MissingError("kv store: no mooncake_master; install the `cpu` extra of gyre")
    return found


if __name__ == "__main__":
    main()
