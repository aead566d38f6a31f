"""Pure. The tree of a scored session -> its trajectories: bounded, deduplicated, drawn with a recorded seed.

Rule of the policy `drawn`: among the tips of the highest class that still has unmasked targets (`PRIORITY`),
draw one in proportion to the unmasked targets on its whole path; the path from the root to its last target is
a trajectory; mask its targets; again, until nothing is left or `max_trajectories` are drawn. To compare with:
`longest` takes the tip with the longest path instead, whatever its class, the earlier call of two; `all` takes
every tip in the order of the calls, and knows no limit.

Invariant of each: a target is trained by at most one trajectory, and by exactly one when there is no limit. With
mode `branches` the same trajectories are taken, but each trains all targets on its path.
Any path takes of a call's tokens a beginning, so one number a call says what is masked.
"""

import hashlib
from bisect import bisect
from collections.abc import Mapping
from itertools import accumulate
from typing import Literal

import msgspec

from gyre.events.types import RoleClass
from gyre.projections.tree import Segment, Tree, path, tips

PRIORITY: tuple[RoleClass, ...] = ("main", "main-summary", "sub-agent", "sub-agent-summary")
"""Highest first. The auxiliary class has no targets."""


class TargetRange(msgspec.Struct, frozen=True, kw_only=True):
    """Positions `[start, end)` of the path, sampled by the call of this index, that this trajectory trains."""

    index: int
    start: int
    end: int


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """A path from the root to the last target of a tip."""

    index: int
    """The tip's place among the calls."""
    call: str
    role_class: RoleClass
    num_tokens: int
    targets: tuple[TargetRange, ...]

    @property
    def num_targets(self) -> int:
        return sum(t.end - t.start for t in self.targets)


def select(
    tree: Tree,
    *,
    seed: int,
    execution: str,
    max_trajectories: int,
    policy: Literal["drawn", "longest", "all"] = "drawn",
    mode: Literal["once", "branches"] = "once",
    max_tokens: int = 0,
) -> tuple[Trajectory, ...]:
    """Trajectories in the order in which they are taken; `max_trajectories` = 0 leaves no target out.

    max_tokens: of a path; what is beyond it is as if it had no targets (`tree.is_beyond`). 0: no limit.
    """
    calls = tree.calls
    masked = [call.prompt_end for call in calls]
    unmasked = masked.copy()
    paths = {index: path(tree, index, calls[index].target_end) for index in tips(tree, max_tokens)}
    weights = _Weights(tree, paths, masked)
    chosen: list[Trajectory] = []
    while paths and (policy == "all" or not max_trajectories or len(chosen) < max_trajectories):
        if policy == "all":
            index = min(paths)
        elif policy == "longest":
            index = min(paths, key=lambda i: (-calls[i].target_end, i))
        else:
            index = weights.drawn(draw(seed, execution, len(chosen)))
        segments = paths.pop(index)
        targets = _unmasked(tree, segments, masked)
        chosen.append(
            Trajectory(
                index=index,
                call=calls[index].call,
                role_class=calls[index].role_class,
                num_tokens=calls[index].target_end,
                targets=targets if mode == "once" else _unmasked(tree, segments, unmasked),
            )
        )
        weights.take(index, targets)
        for segment in segments:
            masked[segment.index] = max(masked[segment.index], segment.end)
    return tuple(chosen)


class _Weights:
    """Unmasked targets on the whole path of each tip that is left, by class; what is taken is subtracted, so that all
    rounds together cost the paths of the tips once."""

    def __init__(self, tree: Tree, paths: Mapping[int, tuple[Segment, ...]], masked: list[int]) -> None:
        self._through: dict[int, list[tuple[dict[int, int], int, int]]] = {}
        self._classes: list[dict[int, int]] = [{} for _ in PRIORITY]
        for index, segments in paths.items():
            rivals = self._classes[PRIORITY.index(tree.calls[index].role_class)]
            rivals[index] = sum(t.end - t.start for t in _unmasked(tree, segments, masked))
            for segment in segments:
                self._through.setdefault(segment.index, []).append((rivals, index, segment.end))

    def drawn(self, bits: int) -> int:
        """A tip of the highest class. Its last target is on no other path, so its weight is at least 1."""
        rivals = next(rivals for rivals in self._classes if rivals)
        ends = [*accumulate(rivals.values())]
        return list(rivals)[bisect(ends, bits * ends[-1] >> 64)]

    def take(self, index: int, targets: tuple[TargetRange, ...]) -> None:
        for rivals in self._classes:
            rivals.pop(index, None)
        for part in targets:
            for rivals, other, end in self._through[part.index]:
                if other in rivals and end > part.start:
                    rivals[other] -= min(end, part.end) - part.start


def draw(seed: int, execution: str, number: int) -> int:
    """64 random bits that depend on nothing else: the same on every machine and Python version."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{execution}/{number}".encode()).digest()[:8], "big")


def _unmasked(tree: Tree, segments: tuple[Segment, ...], masked: list[int]) -> tuple[TargetRange, ...]:
    found = []
    for segment in segments:
        start, end = masked[segment.index], min(segment.end, tree.calls[segment.index].target_end)
        if end > start:
            found.append(TargetRange(index=segment.index, start=start, end=end))
    return tuple(found)
