"""Pure. Packed rows -> the tensors of forward passes.

Invariant: every target of every row is predicted exactly once, whatever the buckets; which buckets there are follows
from the rows alone, so the order of arithmetic does too. Direction: rows -> buckets of like length -> `BatchTensors`.

Rows are padded on the right to the longest of their bucket: causal attention keeps real tokens from seeing pads.
Tokens after a row's last target predict nothing, so they are cut off.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Row(Protocol):
    """What the trainer reads of a row of a packed batch (`gyre.projections.batches.Row`). T tokens.

    `weight` of a target is 1 / targets of its execution, so that their sum over a batch is a sum of executions' means.
    """

    @property
    def execution(self) -> str: ...
    @property
    def ids(self) -> NDArray[np.int32]: ...
    @property
    def target(self) -> NDArray[np.bool_]: ...
    @property
    def logprob(self) -> NDArray[np.float32]: ...
    @property
    def advantage(self) -> float: ...
    @property
    def weight(self) -> NDArray[np.float32]: ...


class TokenRow(msgspec.Struct, frozen=True, kw_only=True):
    """A demonstration for the warm start; `logprob` is not looked at. The last two fields make it a `Row`."""

    ids: NDArray[np.int32]
    target: NDArray[np.bool_]
    weight: NDArray[np.float32]
    logprob: NDArray[np.float32]
    advantage: float = 0.0
    execution: str = ""


class BatchTensors(msgspec.Struct, frozen=True, kw_only=True):
    """One forward pass: ids [B, T] and, for each of N targets, where its prediction is and what belongs to it."""

    ids_BT: Tensor
    place_N: Tensor
    """Index into hidden states [T, B, H] flattened to [T * B, H]: the token before the target."""
    token_N: Tensor
    behaviour_N: Tensor
    advantage_N: Tensor
    weight_N: Tensor
    row_N: Tensor
    """The row, counted from 0 in this forward pass; targets of a row stand together."""


def buckets(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Rows by length, longest first, in runs whose padded size is at most `max_tokens`; a longer row stands alone.

    Ties keep their order. Rows without a target are left out.
    """
    lengths = [_length(row) for row in rows]
    order = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i])
    out: list[list[Row]] = []
    longest = 0
    for i in order:
        if not out or (len(out[-1]) + 1) * longest > max_tokens:
            out.append([])
            longest = lengths[i]
        out[-1].append(rows[i])
    return out


def batch_tensors(rows: Sequence[Row], device: torch.device) -> BatchTensors:
    """The tensors of one bucket."""
    lengths = [_length(row) for row in rows]
    ids_BT = np.zeros((len(rows), max(lengths)), np.int64)
    places: list[NDArray[np.int64]] = []
    picked: list[NDArray[np.int64]] = []
    for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        ids_BT[b, :length] = row.ids[:length]
        at = np.flatnonzero(row.target)
        picked.append(at)
        places.append((at - 1) * len(rows) + b)

    def column(values: Sequence[NDArray[np.float32]]) -> Tensor:
        return torch.from_numpy(np.concatenate(values)).to(device)

    pairs = list(zip(rows, picked, strict=True))
    return BatchTensors(
        ids_BT=torch.from_numpy(ids_BT).to(device),
        place_N=torch.from_numpy(np.concatenate(places)).to(device),
        token_N=torch.from_numpy(np.concatenate([row.ids[at] for row, at in pairs]).astype(np.int64)).to(device),
        behaviour_N=column([row.logprob[at] for row, at in pairs]),
        advantage_N=column([np.full(len(at), row.advantage, np.float32) for row, at in pairs]),
        weight_N=column([row.weight[at] for row, at in pairs]),
        row_N=torch.from_numpy(np.repeat(np.arange(len(pairs)), [len(at) for at in picked])).to(device),
    )


def _length(row: Row) -> int:
    """Tokens that have to be computed: up to the one before the last target."""
    at = np.flatnonzero(row.target)
    if len(at) and at[0] == 0:
        raise ValueError(f"row of execution {row.execution!r}: its first token is a target, but nothing precedes it")
    return int(at[-1]) if len(at) else 0
