"""Shell. Moves weights between processes and hosts over Mooncake's Transfer Engine.

Invariant: a sink hands out tensors only when every checksum of the manifest is right; until then
nothing but its own shadow buffer has changed.

Direction: trainer's tensors -> WeightSource.manifest -> (the manifest travels by any way) ->
WeightSink.pull -> verified tensors. The sink reads; the source's CPU does nothing but answer.

Mooncake listens on all interfaces whatever `host` says, and whoever reaches its ports can read and
write registered memory: on a machine of several users or networks, keep others away from them.
"""

import itertools
import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import xxhash

from gyre.errors import MissingError, TransferError
from gyre.workers.manifest import TensorEntry, WeightManifest, check_manifest, combine_digests, tensor_digest

ALIGNMENT = 64
PART_BYTES = 64 << 20


class TransferEndpoint:
    """One Mooncake transfer engine: a session that others can read registered memory from."""

    def __init__(self, host: str = "127.0.0.1", protocol: str = "tcp", device: str = "") -> None:
        """`device` names the RDMA devices (`mlx5_0,mlx5_1`) when `protocol` is `rdma`."""
        self.engine = _transfer_engine()
        if code := self.engine.initialize(host, "P2PHANDSHAKE", protocol, device):
            raise TransferError(f"mooncake: initialize({host}, {protocol}, {device!r}) failed with {code}")
        self.session = f"{host}:{self.engine.get_rpc_port()}"

    def register(self, address: int, num_bytes: int) -> None:
        if code := self.engine.register_memory(address, num_bytes):
            raise TransferError(f"mooncake: cannot register {num_bytes} bytes: {code}; is the memlock limit too low?")

    def unregister(self, address: int) -> None:
        if code := self.engine.unregister_memory(address):
            raise TransferError(f"mooncake: cannot unregister the buffer at {address:#x}: {code}")

    def read(self, session: str, local: list[int], remote: list[int], lengths: list[int]) -> None:
        """Read remote ranges into local ones; returns when all bytes have arrived."""
        code = self.engine.batch_transfer_sync_read(session, local, remote, lengths)
        if code:
            raise TransferError(f"mooncake: reading {sum(lengths)} bytes from {session} failed with {code}")


class BufferSource:
    """One buffer that others may read: a gradient that goes to the core."""

    def __init__(self, buffer: torch.Tensor, endpoint: TransferEndpoint) -> None:
        """`buffer` must stay where it is until `close`."""
        self._buffer, self._endpoint = buffer.detach(), endpoint
        self.session, self.address, self.num_bytes = endpoint.session, buffer.data_ptr(), buffer.nbytes
        endpoint.register(self.address, self.num_bytes)

    def digest(self) -> str:
        """Of what it holds now."""
        return tensor_digest(_bytes_of(self._buffer))

    def close(self) -> None:
        self._endpoint.unregister(self.address)


class BufferSink:
    """One registered shadow buffer, as large as `like`, that a remote one is read into."""

    def __init__(self, like: torch.Tensor, endpoint: TransferEndpoint) -> None:
        self._endpoint = endpoint
        self._buffer = torch.empty_like(like)
        endpoint.register(self._buffer.data_ptr(), self._buffer.nbytes)

    def pull(self, session: str, address: int, num_bytes: int, digest: str) -> torch.Tensor:
        """Use it before the next pull. Raises TransferError when it is of another size, or one byte is wrong."""
        if num_bytes != self._buffer.nbytes:
            raise TransferError(f"gradient at {session} has {num_bytes} bytes, expected {self._buffer.nbytes}")
        self._endpoint.read(session, [self._buffer.data_ptr()], [address], [num_bytes])
        found = tensor_digest(_bytes_of(self._buffer))
        if found != digest:
            raise TransferError(f"gradient at {session} arrived with digest {found[:12]}, expected {digest[:12]}")
        return self._buffer

    def close(self) -> None:
        self._endpoint.unregister(self._buffer.data_ptr())


class WeightSource:
    """Owns nothing: keeps the caller's tensors readable and describes what they hold at the moment."""

    def __init__(self, named: Mapping[str, torch.Tensor], endpoint: TransferEndpoint) -> None:
        """`named` must stay where they are (update them in place); tied tensors may share memory."""
        self._named = {name: named[name].detach() for name in sorted(named)}
        self._endpoint = endpoint
        self._addresses: list[int] = []
        for name, tensor in self._named.items():
            if not tensor.is_contiguous() or tensor.numel() == 0:
                raise TransferError(f"weights: {name} is empty or not contiguous; give a contiguous copy")
            if tensor.data_ptr() not in self._addresses:
                endpoint.register(tensor.data_ptr(), tensor.nbytes)
                self._addresses.append(tensor.data_ptr())

    def manifest(self, version: int) -> WeightManifest:
        """Digest the tensors as they are now. Do not change them until the pulls of this version are over."""
        tensors = tuple(_entry(name, tensor) for name, tensor in self._named.items())
        whole = combine_digests((e.name, e.dtype, e.shape, e.digest) for e in tensors)
        return WeightManifest(session=self._endpoint.session, version=version, digest=whole, tensors=tensors)

    def close(self) -> None:
        while self._addresses:
            self._endpoint.unregister(self._addresses.pop())


class WeightSink:
    """One registered shadow buffer in shared memory that every pull is read into.

    Tensors of a pull are views of it: use or copy them before the next pull.
    """

    def __init__(self, endpoint: TransferEndpoint) -> None:
        self._endpoint = endpoint
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def pull(self, manifest: WeightManifest, fetched: Callable[[], None] = lambda: None) -> dict[str, torch.Tensor]:
        """Fetch and verify, part by part: one is digested while the next one comes.

        `fetched` is called when the last byte is here. Raises TransferError and leaves no tensor behind when one byte
        is wrong.
        """
        self._prepare(manifest)
        tensors: dict[str, torch.Tensor] = {}
        parts = _parts(manifest)
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="fetch") as reader:
            reads = [reader.submit(self._read, manifest, part) for part in parts]
            try:
                for part, read in zip(parts, reads, strict=True):
                    read.result()
                    if part is parts[-1]:
                        fetched()
                    tensors |= self._verify(manifest, part)
            finally:
                for read in reads:
                    read.cancel()
        return tensors

    def fetch(self, manifest: WeightManifest) -> None:
        """Without looking at what came."""
        self._prepare(manifest)
        self._read(manifest, range(len(manifest.tensors)))

    def _prepare(self, manifest: WeightManifest) -> None:
        check_manifest(manifest)
        for entry in manifest.tensors:
            wanted = math.prod(entry.shape) * _dtype(entry).itemsize
            if entry.num_bytes != wanted:
                raise TransferError(f"manifest: {entry.name} says {entry.num_bytes} bytes, its shape {wanted}")
        self._reserve(_offsets(manifest)[1])

    def _read(self, manifest: WeightManifest, part: range) -> None:
        base, offsets = self.buffer.data_ptr(), _offsets(manifest)[0]
        entries = [manifest.tensors[i] for i in part]
        self._endpoint.read(
            manifest.session,
            [base + offsets[i] for i in part],
            [entry.address for entry in entries],
            [entry.num_bytes for entry in entries],
        )

    def verify(self, manifest: WeightManifest) -> dict[str, torch.Tensor]:
        return self._verify(manifest, range(len(manifest.tensors)))

    def _verify(self, manifest: WeightManifest, part: range) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        offsets = _offsets(manifest)[0]
        for i in part:
            entry, offset = manifest.tensors[i], offsets[i]
            flat = self.buffer[offset : offset + entry.num_bytes]
            what, of, expected = "checksum", _checksum, entry.checksum
            if not expected:
                what, of, expected = "digest", tensor_digest, entry.digest
            if (found := of(_bytes_of(flat))) != expected:
                raise TransferError(
                    f"weights of version {manifest.version}: {entry.name} arrived with {what} {found[:12]}, expected "
                    f"{expected[:12]}: it changed during the pull; publish again and pull that"
                )
            tensors[entry.name] = flat.view(_dtype(entry)).view(entry.shape)
        return tensors

    def _reserve(self, size: int) -> None:
        if size <= self.buffer.numel():
            return
        if self.buffer.numel():
            self._endpoint.unregister(self.buffer.data_ptr())
        self.buffer = torch.empty(size, dtype=torch.uint8)
        self.buffer.share_memory_()  # type: ignore[no-untyped-call]
        self._endpoint.register(self.buffer.data_ptr(), size)


def _entry(name: str, tensor: torch.Tensor) -> TensorEntry:
    content = _bytes_of(tensor)
    return TensorEntry(
        name=name,
        dtype=_dtype_name(tensor),
        shape=tuple(tensor.shape),
        address=tensor.data_ptr(),
        num_bytes=tensor.nbytes,
        digest=tensor_digest(content),
        checksum=_checksum(content),
    )


def _checksum(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def _parts(manifest: WeightManifest) -> list[range]:
    """Consecutive tensors of some PART_BYTES together."""
    ends, size = [0], 0
    for i, entry in enumerate(manifest.tensors, 1):
        size += entry.num_bytes
        if size >= PART_BYTES or i == len(manifest.tensors):
            ends.append(i)
            size = 0
    return [range(start, end) for start, end in itertools.pairwise(ends)]


def tensors_digest(named: Mapping[str, torch.Tensor]) -> str:
    """`manifest.weights_digest` for torch tensors, bfloat16 included."""
    return combine_digests(
        (name, _dtype_name(tensor), tuple(tensor.shape), tensor_digest(_bytes_of(tensor)))
        for name, tensor in named.items()
    )


def _offsets(manifest: WeightManifest) -> tuple[list[int], int]:
    offsets, end = [], 0
    for entry in manifest.tensors:
        offsets.append(end)
        end += -(-entry.num_bytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def _dtype(entry: TensorEntry) -> torch.dtype:
    found = getattr(torch, entry.dtype, None)
    if not isinstance(found, torch.dtype):
        raise TransferError(f"manifest: {entry.name} has dtype {entry.dtype!r}, which torch does not know")
    return found


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor; those of a GPU tensor are copied to the host first."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return flat.numpy().data


def _transfer_engine() -> Any:
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # otherwise ten lines on stderr for each endpoint
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        reason = str(error)
        if "lib" in reason and ".so" in reason:
            raise MissingError(
                f"mooncake: {reason}; apt-get install -y --no-install-recommends libibverbs1 libnuma1 libcurl4"
            ) from None
        raise MissingError(f"mooncake: {reason}; install the `cpu` extra of gyre") from None
    return TransferEngine()
