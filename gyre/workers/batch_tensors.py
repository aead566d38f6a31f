"""Pure. Packed rows -> the tensors of forward passes, in one of two layouts.

Invariant: every target of every row is predicted exactly once, whatever the passes; which passes there are follows
from the rows alone, so the order of arithmetic does too. A row lies in one pass as a whole.
Direction: rows -> those of one pass -> `BatchTensors`.

Paths: rows of like length, padded on the right to the longest: causal attention keeps real tokens from seeing pads.
Tree: rows that share a prefix hold it once, as one sequence with a `TreeMask` (`gyre.projections.forest`). Either way
tokens after a row's last target predict nothing, so they are cut off.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gyre.errors import TrainingError
from gyre.projections.forest import cut, num_computed, plant
from gyre.projections.packing import Layout
from gyre.workers.tree_attention import RUN, TreeMask

LAYOUTS: tuple[Layout, ...] = ("paths", "tree")


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
    """One forward pass: ids [B, T], what is predicted of them, P times, and what belongs to each of N targets."""

    ids_BT: Tensor
    place_P: Tensor
    """Index into hidden states [T, B, H] flattened to [T * B, H]: the token before the target."""
    token_P: Tensor
    pick_N: Tensor | None = None
    """The prediction of each target; None: target n has prediction n. Branches may have a target in common."""
    position_T: Tensor | None = None
    """Of each token in its branch; None: 0, 1, 2, ..."""
    mask: TreeMask | None = None
    """None: causal."""
    behaviour_N: Tensor
    advantage_N: Tensor
    weight_N: Tensor
    sequence_N: Tensor
    """Which sequence it is of (`sequences`), counted from 0 in this forward pass and never falling."""


def check_tokens(rows: Sequence[Row], vocab: int) -> None:
    """Ranks that share a vocabulary would read a token of none of them as zeros. Raises TrainingError."""
    for row in rows:
        if len(row.ids) and not 0 <= row.ids.min() <= row.ids.max() < vocab:
            raise TrainingError(
                f"execution {row.execution}: token ids from {row.ids.min()} to {row.ids.max()}, and the policy has "
                f"{vocab}: was it recorded with another policy?"
            )


def passes(rows: Sequence[Row], max_tokens: int, layout: Layout, device: torch.device) -> Iterator[BatchTensors]:
    """The forward passes of rows, each of at most `max_tokens` tokens; a longer row stands alone."""
    if layout == "tree":
        for part in cut(rows, max_tokens):
            yield forest_tensors([rows[i] for i in part], device)
    else:
        for bucket in buckets(rows, max_tokens):
            yield batch_tensors(bucket, device)


def buckets(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Rows by length, longest first, in runs whose padded size is at most `max_tokens`; a longer row stands alone.

    Ties keep their order. Rows without a target are left out.
    """
    lengths = [num_computed(row) for row in rows]
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
    lengths = [num_computed(row) for row in rows]
    ids_BT = np.zeros((len(rows), max(lengths)), np.int64)
    places: list[NDArray[np.int64]] = []
    picked: list[NDArray[np.int64]] = []
    for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        ids_BT[b, :length] = row.ids[:length]
        at = np.flatnonzero(row.target)
        picked.append(at)
        places.append((at - 1) * len(rows) + b)

    return BatchTensors(
        ids_BT=torch.from_numpy(ids_BT).to(device),
        place_P=torch.from_numpy(np.concatenate(places)).to(device),
        token_P=_tokens(rows, picked, device),
        **_columns(rows, picked, device),
    )


def forest_tensors(rows: Sequence[Row], device: torch.device) -> BatchTensors:
    """The tensors of rows as one forest, padded to whole blocks where those are needed: pads see and are seen by none
    but themselves. What several rows predict of one token is computed once."""
    forest = plant(rows)
    num, size = forest.num_tokens, RUN if device.type == "cuda" else 1
    pads = np.arange(num, -(-num // size) * size)
    ids, position = (np.append(x, 0 * pads) for x in (forest.ids.astype(np.int64), forest.position))
    ordered = [rows[i] for i in forest.order]
    picked = [np.flatnonzero(row.target) for row in ordered]
    place_N = np.concatenate(forest.places)
    pairs_N2 = np.stack([place_N, np.concatenate([row.ids[at] for row, at in zip(ordered, picked, strict=True)])], 1)
    pairs_P2, pick_N = np.unique(pairs_N2, axis=0, return_inverse=True)
    return BatchTensors(
        ids_BT=torch.from_numpy(ids[None]).to(device),
        position_T=torch.from_numpy(position).to(device),
        mask=TreeMask(np.append(forest.end, pads + 1), device),
        place_P=torch.from_numpy(pairs_P2[:, 0].copy()).to(device),
        token_P=torch.from_numpy(pairs_P2[:, 1].copy()).to(device),
        pick_N=torch.from_numpy(pick_N.reshape(-1)).to(device),
        **_columns(ordered, picked, device),
    )


def _tokens(rows: Sequence[Row], picked: Sequence[NDArray[np.int64]], device: torch.device) -> Tensor:
    ids = np.concatenate([row.ids[at] for row, at in zip(rows, picked, strict=True)])
    return torch.from_numpy(ids.astype(np.int64)).to(device)


def _columns(rows: Sequence[Row], picked: Sequence[NDArray[np.int64]], device: torch.device) -> dict[str, Any]:
    """What belongs to each target, row by row."""

    def column(values: Sequence[NDArray[np.float32]]) -> Tensor:
        return torch.from_numpy(np.concatenate(values)).to(device)

    pairs = list(zip(rows, picked, strict=True))
    return {
        "behaviour_N": column([row.logprob[at] for row, at in pairs]),
        "advantage_N": column([np.full(len(at), row.advantage, np.float32) for row, at in pairs]),
        "weight_N": column([row.weight[at] for row, at in pairs]),
        "sequence_N": torch.from_numpy(sequences(picked)).to(device),
    }


def sequences(picked: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """The sequence of each target [N], from 0, of rows whose targets are at these rising positions.

    A sequence is what the policy sampled at one go: targets of a row with nothing between them. So it is a reply,
    whichever branch trains it, and dividing an execution into more branches makes no other sequences. A reply that a
    fork within it shares out to two branches is two.
    """
    begins = [np.diff(at, prepend=-2) != 1 for at in picked]
    return np.cumsum(np.concatenate(begins)) - 1
