"""Pure. The log -> the batches that its steps were trained on, assembled again, one at a time.

Invariant: a batch that is given out has the digest that the log recorded, so it is what was trained and not what
this version would make of the same executions. Direction: events -> `RecordedBatches` -> `Batch` -> whoever shows or
exports it. It holds what `Experience` holds: executions that no step has used up, and never more than one batch.
"""

from collections.abc import Iterator

import msgspec

from gyre.config import Config, decode_config
from gyre.errors import ReplayError
from gyre.events.codec import Recorded
from gyre.events.types import BatchAssembled, ConfigChanged, RunStarted
from gyre.projections import tree
from gyre.projections.batches import Batch, Row, assemble
from gyre.projections.cohorts import Cohort, consumed_cohort
from gyre.projections.experience import Experience
from gyre.projections.members import Chosen, LeftOut, choose


class RecordedBatches:
    """The fold. Ask for the batch of a step after its `policy.batch_assembled` and before its end is folded."""

    def __init__(self) -> None:
        self.run = ""
        self.config = Config()
        self.experience = Experience()
        self._assembled: BatchAssembled | None = None

    def evolve(self, recorded: Recorded) -> None:
        match recorded.event:
            case RunStarted(run=run, config=config):
                self.run, self.config = run, decode_config(config)
            case ConfigChanged(config=config):
                self.config = decode_config(config)
            case BatchAssembled() as event:
                self._assembled = event
            case _:
                pass
        self.experience.evolve(recorded)

    def batch(self, step: int) -> Batch:
        """Raises ReplayError when the log has no batch of the step here, or one with another digest."""
        batch = assemble(self.experience, self._cohort(step), self.config, step)
        if self._assembled is None or batch.digest != self._assembled.digest:
            recorded = "nothing" if self._assembled is None else self._assembled.digest[:12]
            raise ReplayError(
                f"the batch of step {step} has digest {batch.digest[:12]}, recorded is {recorded}; "
                "gyre replay --verify names what was altered"
            )
        return batch

    def explanation(self, step: int) -> "Explanation":
        """Raises ReplayError as `batch` does."""
        return explain(self.batch(step), choose(self.experience, self._cohort(step), self.config, step))

    def _cohort(self, step: int) -> Cohort:
        cohort = consumed_cohort(self.experience.cohorts, step)
        if cohort is None:
            raise ReplayError(f"step {step} has no cohort at sequence {self.experience.seq}; fold from sequence 1")
        return cohort


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory of the batch."""

    call: str
    """The tip of its path."""
    role_class: str
    num_tokens: int
    num_targets: int
    versions: tuple[int, ...]
    """Of the policies that sampled its targets."""
    minibatch: int
    microstep: int


class LeftBranch(msgspec.Struct, frozen=True, kw_only=True):
    """A branch that is no trajectory of the batch."""

    call: str
    """The tip of its path."""
    role_class: str
    num_tokens: int
    num_targets: int
    """That no trajectory trains; branches may have them in common."""
    reason: str


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    reason: str
    num_tokens: int


class Execution(msgspec.Struct, frozen=True, kw_only=True):
    execution: str
    group: str
    score: float | None
    in_baseline: bool
    in_loss: bool
    reason: str
    """Why it is not in the loss; empty when it is."""
    advantage: float
    staleness: int
    num_branches: int
    """That have a target, trained or not."""
    num_targets: int
    weight: float
    """Of the execution in the update of its mini-batch; 0 when it is not in the loss."""
    target_weight: float
    """Of each of its targets in that update; by `branches`, once for each branch that holds it."""
    branches: tuple[Branch, ...]
    left_branches: tuple[LeftBranch, ...]
    left_out: tuple[Tokens, ...]


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What `gyre batch show` tells of a batch."""

    step: int
    seed: int
    digest: str
    num_minibatches: int
    num_microsteps: int
    num_trajectories: int
    num_tokens: int
    """Of the rows: what is shared is counted in each."""
    num_targets: int
    executions: tuple[Execution, ...]
    left_out: tuple[Tokens, ...]
    """Over all executions, most first."""


def explain(batch: Batch, chosen: tuple[Chosen, ...]) -> Explanation:
    """`chosen` is what the batch was assembled of."""
    rows: dict[str, list[tuple[int, int, Row]]] = {}
    for microstep in batch.microsteps:
        for row in microstep.rows:
            rows.setdefault(row.execution, []).append((microstep.minibatch, microstep.index, row))
    shares = {name: 1 / m.num_executions for m in batch.minibatches if m.num_executions for name in m.groups}
    left: dict[str, list[LeftOut]] = {}
    totals: dict[str, int] = {}
    for item in batch.explain():
        left.setdefault(item.execution, []).append(item)
        totals[item.reason] = totals.get(item.reason, 0) + item.num_tokens
    return Explanation(
        step=batch.step,
        seed=batch.seed,
        digest=batch.digest,
        num_minibatches=len(batch.minibatches),
        num_microsteps=len(batch.microsteps),
        num_trajectories=len(batch.rows),
        num_tokens=batch.num_tokens,
        num_targets=batch.num_targets,
        executions=tuple(
            _execution(
                c, shares.get(c.member.group, 0.0), rows.get(c.member.execution, []), left.get(c.member.execution, [])
            )
            for c in chosen
        ),
        left_out=tuple(
            Tokens(reason=reason, num_tokens=num) for reason, num in sorted(totals.items(), key=lambda t: (-t[1], t[0]))
        ),
    )


def _execution(chosen: Chosen, share: float, rows: list[tuple[int, int, Row]], left: list[LeftOut]) -> Execution:
    member = chosen.member
    weight = share if member.in_loss else 0.0
    classes = {t.call: t.role_class for t in chosen.trajectories}
    return Execution(
        execution=member.execution,
        group=member.group,
        score=member.score,
        in_baseline=member.in_baseline,
        in_loss=member.in_loss,
        reason=member.reason,
        advantage=member.advantage,
        staleness=member.staleness,
        num_branches=len(tree.tips(chosen.tree)),
        num_targets=member.num_targets,
        weight=weight,
        target_weight=weight / max(member.num_targets, 1),
        branches=tuple(
            Branch(
                call=row.call,
                role_class=classes[row.call],
                num_tokens=row.num_tokens,
                num_targets=row.num_targets,
                versions=tuple(sorted({span.version for span in row.spans})),
                minibatch=minibatch,
                microstep=microstep,
            )
            for minibatch, microstep, row in rows
        ),
        left_branches=tuple(_left_branches(chosen)),
        left_out=tuple(Tokens(reason=item.reason, num_tokens=item.num_tokens) for item in left),
    )


def _left_branches(chosen: Chosen) -> Iterator[LeftBranch]:
    taken = {trajectory.index for trajectory in chosen.trajectories}
    untrained = {call.index: (start, reason) for call, start, reason in chosen.untrained()}
    for index in tree.tips(chosen.tree):
        if index not in taken:
            tip = chosen.tree.calls[index]
            rest = 0
            for segment in tree.path(chosen.tree, index, tip.target_end):
                if segment.index in untrained:
                    rest += max(0, segment.end - untrained[segment.index][0])
            yield LeftBranch(
                call=tip.call,
                role_class=tip.role_class,
                num_tokens=tip.target_end,
                num_targets=rest,
                reason=untrained[index][1],
            )


MEANINGS = {
    "context": "not sampled by the policy",
    "auxiliary": "sampled by a call of the auxiliary class",
    "cut": "of a reply that was cut and never built on",
    "undelivered": "of a reply that did not reach the harness",
    "superseded": "of a reply that was asked for again before anything went on from it",
    "not_selected": "on branches beyond selection.max_trajectories",
    "beyond_budget": "of calls that end beyond trainer.max_tokens_per_microstep, within which trees are trained",
    "stale": "of executions dispatched more than pipeline.max_staleness steps ago; they stay in the baseline",
    "overall_timeout": "of executions that ran into the overall timeout",
    "interrupted": "of executions that an end of the run interrupted",
    "invalid_score": "of executions whose score is not finite",
    "evaluation_failed": "of executions that could not be scored",
    "no_product": "of executions dropped before they finished",
    "no_score": "of executions without a score",
    "no_targets": "of executions without a trainable token",
    "no_context": "nothing stands before their first token",
    "logprob_missing": "recorded without a log-probability",
    "logprob_not_finite": "recorded with a log-probability that is not finite",
    "span_missing": "recorded without the version that sampled them",
    "torn_tokens": "of a record that is torn",
    "unknown_base": "of a call whose base is unknown",
    "base_excluded": "of a call whose base has no place in the tree",
    "shared_beyond_base": "of a call that shares more than its base has",
}
"""Of each reason, in words, after the number of tokens."""
