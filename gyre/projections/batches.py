"""Pure. Cohort + trees + scores -> the packed batch of one step, with its digest.

The loss is a two-level mean: over the targets of an execution, then over the executions of a minibatch that are in
the loss. Here each target gets the weight 1 / targets of its execution; the core divides by `num_executions` once,
at the commit. So an execution that branches more, or is cut into more rows, weighs no more.

Invariant: equal logs, config and seed give equal bytes. Groups keep the cohort's order and are parted into
`num_minibatches` runs of whole groups. Within one, rows are packed longest first (ties in order), so that rows of
like length are padded together, and a row longer than a micro-step stands alone; or, as trees, so that the fewest
tokens are computed twice (`forest.cut`).
"""

import hashlib
from functools import cached_property

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from gyre.config import Config
from gyre.events.tokens import unpack_logprobs
from gyre.events.types import VersionSpan
from gyre.projections import tree
from gyre.projections.cohorts import Cohort
from gyre.projections.experience import Experience
from gyre.projections.members import LeftOut, Member, choose
from gyre.projections.packing import pack
from gyre.projections.selection import Trajectory
from gyre.projections.tree import Tree


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory, T tokens. `logprob` and `weight` are 0 where `target` is false."""

    execution: str
    call: str
    """The tip of the path."""
    ids: NDArray[np.int32]
    target: NDArray[np.bool_]
    logprob: NDArray[np.float32]
    """Of the policy that sampled the token."""
    weight: NDArray[np.float32]
    advantage: float
    spans: tuple[VersionSpan, ...]
    """Positions of the row and the policy version that sampled them; targets only."""

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def num_targets(self) -> int:
        return int(self.target.sum())


class Microstep(msgspec.Struct, frozen=True, kw_only=True):
    """What a cell claims at once."""

    index: int
    """0, 1, 2, ... within the step."""
    minibatch: int
    rows: tuple[Row, ...]


class Minibatch(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer update; its micro-steps' sums are divided by `num_executions`. 0 executions: no update."""

    index: int
    groups: tuple[str, ...]
    num_executions: int
    microsteps: tuple[Microstep, ...]


class Batch(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    step: int
    seed: int
    members: tuple[Member, ...]
    minibatches: tuple[Minibatch, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def microsteps(self) -> tuple[Microstep, ...]:
        return tuple(m for minibatch in self.minibatches for m in minibatch.microsteps)

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(row for microstep in self.microsteps for row in microstep.rows)

    @property
    def num_executions(self) -> int:
        return sum(m.in_loss for m in self.members)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def num_targets(self) -> int:
        return sum(row.num_targets for row in self.rows)

    @property
    def score_mean(self) -> float:
        """Over the baselines; 0 when they are empty."""
        scores = [m.score for m in self.members if m.score is not None]
        return float(np.mean(scores)) if scores else 0.0

    @property
    def staleness_mean(self) -> float:
        stale = [m.staleness for m in self.members if m.in_loss]
        return float(np.mean(stale)) if stale else 0.0

    @property
    def staleness_max(self) -> int:
        return max((m.staleness for m in self.members if m.in_loss), default=0)

    @cached_property
    def digest(self) -> str:
        """Over the members, the packing and every array's bytes."""
        hasher = hashlib.sha256()
        packing = [[b.index, b.groups, b.num_executions, [len(m.rows) for m in b.microsteps]] for b in self.minibatches]
        head = [self.step, self.seed, msgspec.to_builtins(self.members), packing]
        hasher.update(orjson.dumps(head, option=orjson.OPT_SORT_KEYS))
        for row in self.rows:
            line = [row.execution, row.call, row.num_tokens, row.advantage, msgspec.to_builtins(row.spans)]
            hasher.update(orjson.dumps(line, option=orjson.OPT_SORT_KEYS))
            for array, kind in ((row.ids, "<i4"), (row.target, "?"), (row.logprob, "<f4"), (row.weight, "<f4")):
                hasher.update(array.astype(kind, copy=False).tobytes())
        return hasher.hexdigest()[:32]

    def explain(self) -> tuple[LeftOut, ...]:
        """Per execution and reason, the tokens that are not trained."""
        return self.left_out


def assemble(experience: Experience, cohort: Cohort, config: Config, step: int) -> Batch:
    """The batch of `step`. Raises FoldError when a group of the cohort is not remembered."""
    chosen = choose(experience, cohort, config, step)
    members = [c.member for c in chosen]
    rows_by_group: dict[str, list[Row]] = {name: [] for name in cohort.groups}
    for c in chosen:
        m = c.member
        rows_by_group[m.group] += [
            make_row(c.tree, t, execution=m.execution, advantage=m.advantage, num_targets=m.num_targets)
            for t in c.trajectories
        ]
    return Batch(
        step=step,
        seed=config.seed,
        members=tuple(members),
        minibatches=_minibatches(cohort, members, rows_by_group, config),
        left_out=tuple(left for c in chosen for left in c.left_out()),
    )


def make_row(grown: Tree, trajectory: Trajectory, *, execution: str, advantage: float, num_targets: int) -> Row:
    """The row of a trajectory of an execution that has so many targets in all."""
    size = trajectory.num_tokens
    target = np.zeros(size, dtype=np.bool_)
    logprob = np.zeros(size, dtype=np.float32)
    spans: list[VersionSpan] = []
    for part in trajectory.targets:
        call = grown.calls[part.index]
        target[part.start : part.end] = True
        at = call.prompt_end
        logprob[part.start : part.end] = unpack_logprobs(call.logprobs)[part.start - at : part.end - at]
        for span in call.spans:
            start, end = max(part.start, at + span.start), min(part.end, at + span.end)
            if start < end:
                spans.append(VersionSpan(version=span.version, start=start, end=end))
    return Row(
        execution=execution,
        call=trajectory.call,
        ids=tree.token_ids(grown, trajectory.index, size),
        target=target,
        logprob=logprob,
        weight=np.where(target, np.float32(1 / num_targets), np.float32(0)),
        advantage=advantage,
        spans=tuple(spans),
    )


def _minibatches(
    cohort: Cohort, members: list[Member], rows_by_group: dict[str, list[Row]], config: Config
) -> tuple[Minibatch, ...]:
    parts = config.trainer.num_minibatches
    num_groups = len(cohort.groups)
    out: list[Minibatch] = []
    num_microsteps = 0
    for part in range(parts):
        names = cohort.groups[part * num_groups // parts : (part + 1) * num_groups // parts]
        rows = [row for name in names for row in rows_by_group[name]]
        packed = pack(rows, config.trainer.max_tokens_per_microstep, config.trainer.layout)
        if names:
            out.append(
                Minibatch(
                    index=len(out),
                    groups=names,
                    num_executions=sum(m.in_loss for m in members if m.group in names),
                    microsteps=tuple(
                        Microstep(index=num_microsteps + i, minibatch=len(out), rows=r) for i, r in enumerate(packed)
                    ),
                )
            )
            num_microsteps += len(packed)
    return tuple(out)
