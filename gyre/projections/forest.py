"""Pure. Branches that share prefixes -> a forest that holds each shared prefix once, and its cuts within a budget.

Branches sorted by their tokens stand beside those that they share most with, so each adds only what lies beyond the
one before: the tokens of all, laid out so, are the trees of the set in preorder, one after another. What a token
sees is then one number a token:

    key k is visible to query q  exactly when  k <= q < end[k]          (end[k]: where the subtree of k ends)

It holds within a branch, between branches and between trees, so a forest is one sequence for whatever computes it.

Invariants: every token that a target needs is computed; two branches share a token exactly when they have equal
tokens up to it; a branch is never divided. A tree that does not fit is cut between branches, that is at branch
points, where the fewest tokens are computed again.

Direction: branches (ids, targets) -> `cut` -> parts within the budget -> `plant` -> `Forest`.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray


class Branch(Protocol):
    """A root-to-leaf path: T ids, and which of them are targets. `gyre.projections.batches.Row` is one."""

    @property
    def ids(self) -> NDArray[np.int32]: ...
    @property
    def target(self) -> NDArray[np.bool_]: ...


class Forest(msgspec.Struct, frozen=True, kw_only=True):
    """T tokens in preorder."""

    ids: NDArray[np.int32]
    position: NDArray[np.int64]
    """Of each token in its branch, from 0."""
    end: NDArray[np.int64]
    """Tokens `[t, end[t])` are the subtree of t, itself included."""
    order: tuple[int, ...]
    """The branches that have a target, as they are laid out: their place among those that were given."""
    places: tuple[NDArray[np.int64], ...]
    """Of each of these, where the token before each of its targets lies: what predicts the target."""

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def num_pairs(self) -> int:
        """Pairs of key and query that see each other: what attention costs, beside the tokens."""
        return int((self.position + 1).sum())


class _Sorted(msgspec.Struct, frozen=True, kw_only=True):
    """Branches with targets by their tokens: their place among those given, how many tokens each computes, and how
    many of them it shares with the one before."""

    order: tuple[int, ...]
    lengths: tuple[int, ...]
    shared: tuple[int, ...]


def num_computed(branch: Branch) -> int:
    """Tokens up to the one before the last target; 0 without a target. Raises ValueError for a first token that is
    one, which nothing predicts."""
    at = np.flatnonzero(branch.target)
    if len(at) and at[0] == 0:
        execution = getattr(branch, "execution", "")
        raise ValueError(f"row of execution {execution!r}: its first token is a target, but nothing precedes it")
    return int(at[-1]) if len(at) else 0


def plant(branches: Sequence[Branch]) -> Forest:
    """The forest of the branches."""
    found = _sorted(branches)
    num_tokens = sum(found.lengths) - sum(found.shared)
    ids = np.zeros(num_tokens, np.int32)
    position, end = np.zeros(num_tokens, np.int64), np.full(num_tokens, num_tokens, np.int64)
    path = np.zeros(max(found.lengths, default=0), np.int64)
    places: list[NDArray[np.int64]] = []
    at = before = 0
    for index, length, shared in zip(found.order, found.lengths, found.shared, strict=True):
        end[path[shared:before]] = at
        new = slice(at, at + length - shared)
        ids[new] = branches[index].ids[shared:length]
        position[new] = np.arange(shared, length)
        path[shared:length] = np.arange(new.start, new.stop)
        places.append(path[np.flatnonzero(branches[index].target) - 1])
        at, before = new.stop, length
    return Forest(ids=ids, position=position, end=end, order=found.order, places=tuple(places))


def cut(branches: Sequence[Branch], max_tokens: int) -> list[list[int]]:
    """Parts whose forests have at most `max_tokens` tokens, as places among the branches; a longer branch stands alone.

    Of all divisions of the sorted branches into runs, one that computes the fewest tokens again, and of those one with
    the fewest parts: so a tree is cut only if it has to be. Branches without a target are in none.
    """
    found = _sorted(branches)
    num = len(found.order)
    best = [(0, 0, 0)]
    """Of the first so many: tokens computed again, parts, and where the last of these begins."""
    for stop in range(1, num + 1):
        tokens, options = 0, []
        for start in reversed(range(stop)):
            if start < stop - 1:
                tokens += found.lengths[start] - found.shared[start + 1]
                if tokens > max_tokens:
                    break
            else:
                tokens = found.lengths[start]
            again, parts, _ = best[start]
            options.append((again + found.shared[start], parts + 1, start))
        best.append(min(options))
    out: list[list[int]] = []
    stop = num
    while stop:
        start = best[stop][2]
        out.append(list(found.order[start:stop]))
        stop = start
    return out[::-1]


def _sorted(branches: Sequence[Branch]) -> _Sorted:
    lengths = [num_computed(branch) for branch in branches]
    # Big-endian bytes of ids that are not negative sort as the ids do, a prefix before what goes on.
    keys = {i: branches[i].ids[:n].astype(">i4").tobytes() for i, n in enumerate(lengths) if n}
    order = sorted(keys, key=keys.__getitem__)
    shared = [0] * len(order)
    for i in range(1, len(order)):
        one, other = (branches[k].ids[: lengths[k]] for k in order[i - 1 : i + 1])
        num = min(len(one), len(other))
        differ = np.flatnonzero(one[:num] != other[:num])
        shared[i] = int(differ[0]) if len(differ) else num
    return _Sorted(order=tuple(order), lengths=tuple(lengths[i] for i in order), shared=tuple(shared))
