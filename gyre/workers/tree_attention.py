"""Pure. Attention over a forest: each token sees its ancestors and itself, and nothing else.

Invariant: key k is visible to query q exactly when `k <= q < end[k]` (`gyre.projections.forest`). All three ways of
computing it say so: `dense_mask` holds every pair, to compare with; on a CPU `attend` goes over runs of queries, each
against the keys that it can see; on a GPU it is one FlexAttention call with a block mask.

In preorder, what a run of queries `[a, b)` sees before a are the ancestors of a: a token whose subtree reaches into
the run holds a as well. So a run needs the path to a and itself, whatever branches off in between.

Direction: `end` of a forest -> `TreeMask`, once a forward pass -> every layer's attention.
"""

from collections.abc import Callable
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

RUN = 128
"""Queries of one run on a CPU, and of one block on a GPU."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Queries `[start, stop)` and the keys that they need, as ranges in their order; the last ends at `stop`."""

    start: int
    stop: int
    keys: tuple[tuple[int, int], ...]
    hidden: Tensor
    """[stop - start, number of keys] float32: 0 where the key is visible, else -inf."""


class Blocks(msgspec.Struct, frozen=True, kw_only=True):
    """Of each block of queries, the blocks of keys that it sees in part and as a whole, in FlexAttention's terms:
    how many, and which, padded with 0."""

    num_part: NDArray[np.int32]
    part: NDArray[np.int32]
    num_whole: NDArray[np.int32]
    whole: NDArray[np.int32]


class TreeMask:
    """What a forward pass hands to every layer instead of a mask. `end` is on the CPU; T is its length."""

    def __init__(self, end: NDArray[np.int64], device: torch.device) -> None:
        self.end, self.device = end, device

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        return runs(self.end)

    @cached_property
    def block_mask(self) -> Any:
        return block_mask(self.end, self.device)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: TreeMask) -> Tensor:
    """[1, heads, T, D] and [1, KV heads, T, D] twice -> [1, heads, T, D]."""
    if q.device.type == "cuda":
        return _flex()(q, k, v, block_mask=mask.block_mask, enable_gqa=q.shape[1] != k.shape[1])
    queries = torch.split(q, [run.stop - run.start for run in mask.runs], dim=2)
    return torch.cat([_attend_run(part, k, v, run) for part, run in zip(queries, mask.runs, strict=True)], dim=2)


def dense_mask(end: Tensor) -> Tensor:
    """[T, T] bool, rows are queries, True where the key is visible."""
    at = torch.arange(len(end), device=end.device)
    return (at[None, :] <= at[:, None]) & (at[:, None] < end[None, :])


def runs(end: NDArray[np.int64], size: int = RUN) -> tuple[Run, ...]:
    """The runs of a forest, of `size` queries each."""
    out = []
    for start in range(0, len(end), size):
        stop = min(start + size, len(end))
        above = np.flatnonzero(end[:start] > start)
        keys = np.concatenate([above, np.arange(start, stop)])
        query = np.arange(start, stop)[:, None]
        visible = (keys <= query) & (query < end[keys])
        hidden = np.where(visible, np.float32(0), np.float32(-np.inf))
        out.append(Run(start=start, stop=stop, keys=_ranges(keys), hidden=torch.from_numpy(hidden)))
    return tuple(out)


def _ranges(at: NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    """Rising places as ranges `[start, stop)`."""
    breaks = [0, *(np.flatnonzero(np.diff(at) != 1) + 1).tolist(), len(at)]
    return tuple((int(at[i]), int(at[j - 1]) + 1) for i, j in pairwise(breaks))


def _attend_run(q: Tensor, k: Tensor, v: Tensor, run: Run) -> Tensor:
    def gather(x: Tensor) -> Tensor:
        parts = [x[:, :, start:stop] for start, stop in run.keys]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    hidden, gqa = run.hidden.to(q.dtype), q.shape[1] != k.shape[1]
    return functional.scaled_dot_product_attention(q, gather(k), gather(v), attn_mask=hidden, enable_gqa=gqa)


def blocks(end: NDArray[np.int64], size: int = RUN) -> Blocks:
    """Which blocks see which: a block of keys is visible as a whole to a block of queries after it when the subtree
    of each of its keys holds the whole block of queries. T must be a multiple of `size`."""
    num = len(end) // size
    if num * size != len(end):
        raise ValueError(f"forest of {len(end)} tokens: pad it to a multiple of {size}")
    least, most = end.reshape(num, size).min(1), end.reshape(num, size).max(1)
    part, whole = np.zeros((num, num), np.int32), np.zeros((num, num), np.int32)
    num_part, num_whole = np.zeros(num, np.int32), np.zeros(num, np.int32)
    for block in range(num):
        start, stop = block * size, (block + 1) * size
        before = np.arange(block)
        full = before[least[:block] >= stop]
        some = np.append(before[(least[:block] < stop) & (most[:block] > start)], block)
        num_part[block], num_whole[block] = len(some), len(full)
        part[block, : len(some)], whole[block, : len(full)] = some, full
    return Blocks(num_part=num_part, part=part, num_whole=num_whole, whole=whole)


def block_mask(end: NDArray[np.int64], device: torch.device) -> Any:
    """FlexAttention's mask of a forest whose length is a multiple of `RUN`."""
    from torch.nn.attention.flex_attention import BlockMask

    found = blocks(end)
    end_T = torch.from_numpy(end).to(device)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end_T[key])

    def column(values: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(values).to(device)[None, None]

    return BlockMask.from_kv_blocks(
        column(found.num_part),
        column(found.part),
        column(found.num_whole),
        column(found.whole),
        BLOCK_SIZE=RUN,
        mask_mod=visible,
    )


@lru_cache(maxsize=1)
def _flex() -> Callable[..., Tensor]:
    """Compiled, or FlexAttention would hold every pair; for any length from the second one on."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
