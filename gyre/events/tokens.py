"""Pure. Token arrays as bytes: little-endian int32 ids and float32 logprobs, as events carry them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ITEM_BYTES = 4


def pack_ids(ids: Sequence[int] | NDArray[np.integer]) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(packed: bytes) -> NDArray[np.int32]:
    """int32[T], read-only."""
    return np.frombuffer(packed, dtype="<i4")


def pack_logprobs(logprobs: Sequence[float] | NDArray[np.floating]) -> bytes:
    """Raises ValueError when one is not finite: no logprob is invented."""
    array = np.asarray(logprobs, dtype="<f4")
    if not np.isfinite(array).all():
        raise ValueError(f"logprob {int(np.argmin(np.isfinite(array)))} of {array.size} is not finite")
    return array.tobytes()


def unpack_logprobs(packed: bytes) -> NDArray[np.float32]:
    """float32[T], read-only."""
    return np.frombuffer(packed, dtype="<f4")


def num_tokens(packed: bytes) -> int:
    return len(packed) // ITEM_BYTES
