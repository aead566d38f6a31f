"""Pure. Rows -> micro-steps within a budget of tokens, as a layout counts them.

Invariant: each row is in exactly one micro-step, as a whole; which one follows from the rows, in their order, alone.
Direction: rows of a mini-batch -> runs of them.
"""

from collections.abc import Sequence
from typing import Literal, Protocol, TypeVar

from gyre.projections.forest import Branch, cut

Layout = Literal["paths", "tree"]


class _Row(Branch, Protocol):
    @property
    def num_tokens(self) -> int: ...


Packed = TypeVar("Packed", bound=_Row)


def pack(rows: Sequence[Packed], max_tokens: int, layout: Layout = "paths") -> list[tuple[Packed, ...]]:
    """Rows in runs of at most `max_tokens`. Paths: longest first, counted once padded to their longest; a longer row
    stands alone. Tree: shared prefixes counted once."""
    if layout == "tree":
        return [tuple(rows[i] for i in part) for part in cut(rows, max_tokens)]
    packed: list[list[Packed]] = []
    for row in sorted(rows, key=lambda r: -r.num_tokens):
        if not packed or (len(packed[-1]) + 1) * packed[-1][0].num_tokens > max_tokens:
            packed.append([])
        packed[-1].append(row)
    return [tuple(run) for run in packed]
