"""Pure. What a version of the weights is made of, and the one digest that names it.

Invariant: the digest of the whole depends only on the names, dtypes, shapes and bytes of the
tensors, never on the order in which somebody lists them, on an address or on a file format. So the
trainer that publishes, the engine that pulls and a replay that recomputes compare one string.

Direction: named arrays -> tensor digests -> digest of the whole; a manifest adds where the bytes lie.

SHA-256 is the hash: every digest of gyre is one. It names the weights on the log, and is taken once, where they are
made. Whether bytes arrived as they left is another question, asked by every engine at every publish, and of memory that
changes or lines that break, not of somebody who forges: a manifest answers it with a checksum that costs less than the
transfer (XXH3, 128 bits: 40 GB/s on a core that does 2 GB/s of SHA-256).
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from gyre.errors import TransferError

Shape = tuple[int, ...]


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor, lying at `address` in the memory of the process that owns it."""

    name: str
    dtype: str
    """As torch and numpy both call it: `float32`, `bfloat16`."""
    shape: Shape
    address: int
    num_bytes: int
    digest: str
    checksum: str = ""
    """XXH3-128 of the same bytes, for whoever reads them; empty: the digest is compared instead."""


class WeightManifest(msgspec.Struct, frozen=True, kw_only=True):
    """All tensors of one policy version, in name order, and the session to read them from."""

    session: str
    """`host:port` of the owner's transfer engine."""
    version: int
    digest: str
    tensors: tuple[TensorEntry, ...]

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.tensors)


def tensor_digest(data: bytes | memoryview) -> str:
    """Hex digest of the bytes of one contiguous tensor."""
    return hashlib.sha256(data).hexdigest()


def combine_digests(tensors: Iterable[tuple[str, str, Shape, str]]) -> str:
    """Digest of the whole from `(name, dtype, shape, tensor digest)`, in name order."""
    whole = hashlib.sha256()
    for name, dtype, shape, digest in sorted(tensors):
        whole.update(msgspec.json.encode((name, dtype, shape, digest)) + b"\n")
    return whole.hexdigest()


def weights_digest(arrays: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """Digest of named numpy arrays. `gyre.workers.transfer.tensors_digest` is the same for torch."""
    return combine_digests(
        (name, array.dtype.name, array.shape, tensor_digest(np.ascontiguousarray(array).data.cast("B")))
        for name, array in arrays.items()
    )


def check_manifest(manifest: WeightManifest, shapes: Mapping[str, Shape] | None = None) -> None:
    """Raises TransferError when the manifest contradicts itself or does not cover the model.

    `shapes` are the tensors that the model is loaded from: a version that names fewer, more or
    others would leave an engine on mixed weights.
    """
    names = [entry.name for entry in manifest.tensors]
    if len(set(names)) != len(names):
        raise TransferError(f"manifest of version {manifest.version}: a tensor is named twice")
    whole = combine_digests((e.name, e.dtype, e.shape, e.digest) for e in manifest.tensors)
    if whole != manifest.digest:
        raise TransferError(
            f"manifest of version {manifest.version}: its tensors give digest {whole[:12]}, it says "
            f"{manifest.digest[:12]}; make a new manifest from the source"
        )
    if shapes is None:
        return
    if odd := sorted(set(names) ^ set(shapes)):
        state = "is not in the model" if odd[0] in names else "is missing"
        raise TransferError(
            f"manifest of version {manifest.version}: {odd[0]} {state} ({len(odd)} such tensors); "
            "publish all tensors of the checkpoint that the engine was started from"
        )
    for entry in manifest.tensors:
        if entry.shape != shapes[entry.name]:
            raise TransferError(
                f"manifest of version {manifest.version}: {entry.name} has shape {list(entry.shape)}, "
                f"the model has {list(shapes[entry.name])}"
            )
