"""Pure. Cohort + trees + scores -> what became of each execution: flags, advantage, trajectories, what is left out.

Invariant: every execution of a cohort is a member, in the loss or with the reason why not; every token of its tree is
in a trajectory, or left out with a reason. Direction: `Experience` -> `Chosen` -> rows of a batch, and tables.
"""

from collections.abc import Iterator

import msgspec

from gyre.config import Config
from gyre.errors import FoldError
from gyre.projections import tree
from gyre.projections.cohorts import Cohort
from gyre.projections.experience import Experience
from gyre.projections.scores import advantages, flags, reward
from gyre.projections.selection import Trajectory, select
from gyre.projections.tree import Call, Tree


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of an execution that the batch does not train, and why."""

    execution: str
    reason: str
    num_tokens: int


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one execution of the cohort."""

    execution: str
    group: str
    score: float | None
    in_baseline: bool
    in_loss: bool
    advantage: float
    staleness: int
    reason: str
    """Why it is not in the loss; empty when it is."""
    num_trajectories: int
    num_targets: int


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """What the batch takes of one execution, before any row is made."""

    member: Member
    tree: Tree
    trajectories: tuple[Trajectory, ...]
    max_tokens: int
    """Of a path, when it was selected; 0: no limit."""

    def untrained(self) -> Iterator[tuple[Call, int, str]]:
        """(call, position, reason) of calls whose targets from this position on no trajectory trains."""
        trained: dict[int, int] = {}
        for part in (part for t in self.trajectories for part in t.targets):
            trained[part.index] = max(trained.get(part.index, 0), part.end)
        for call in self.tree.calls:
            start = max(call.prompt_end, trained.get(call.index, 0))
            if start < call.target_end:
                beyond = tree.is_beyond(call, self.max_tokens) and self.member.reason in ("", "no_targets")
                yield call, start, "beyond_budget" if beyond else self.member.reason or "not_selected"

    def left_out(self) -> Iterator[LeftOut]:
        """Every token of the tree that is not trained, by reason."""
        counts: dict[str, int] = {}
        for _, reason, num in tree.left_out(self.tree):
            counts[reason] = counts.get(reason, 0) + num
        for call, start, reason in self.untrained():
            counts[reason] = counts.get(reason, 0) + call.target_end - start
        for reason, num in sorted(counts.items()):
            yield LeftOut(execution=self.member.execution, reason=reason, num_tokens=num)


def staleness(step: int, policy_version: int) -> int:
    """Trained step minus the version at dispatch."""
    return step - policy_version


def choose(experience: Experience, cohort: Cohort, config: Config, step: int) -> tuple[Chosen, ...]:
    """Flags, advantages and trajectories of every execution of the cohort, in its order; costs no tokens.

    Raises FoldError when a group of the cohort is not remembered.
    """
    out: list[Chosen] = []
    max_tokens = config.trainer.max_path_tokens
    for name in cohort.groups:
        group = experience.cohorts.groups.get(name)
        if group is None:
            raise FoldError(
                f"batch of step {step}: group {name} of the cohort is not in the fold; fold from sequence 1"
            )
        marked = {slot.execution: flags(slot.ending, config.selection.no_product) for slot in group.slots}
        weight = config.grading.shaping_weight
        earlier = {slot.execution: slot.milestones for slot in group.slots}
        baseline = {e: reward(f.score, earlier[e], weight) for e, f in marked.items() if f.score is not None}
        advantage = advantages(baseline, config.trainer.advantage)
        late = staleness(step, group.policy_version)
        for slot in group.slots:
            flag = marked[slot.execution]
            reason = flag.reason or ("stale" if late > config.pipeline.max_staleness else "")
            grown = experience.trees.get(slot.session, Tree(slot.session))
            trajectories: tuple[Trajectory, ...] = ()
            if not reason:
                trajectories = select(
                    grown,
                    seed=config.seed,
                    execution=slot.execution,
                    max_trajectories=config.selection.max_trajectories,
                    policy=config.selection.policy,
                    mode=config.selection.targets,
                    max_tokens=max_tokens,
                )
            num_targets = sum(t.num_targets for t in trajectories)
            reason = reason or ("" if num_targets else "no_targets")
            member = Member(
                execution=slot.execution,
                group=name,
                score=flag.score,
                in_baseline=flag.in_baseline,
                in_loss=not reason,
                advantage=advantage.get(slot.execution, 0.0),
                staleness=late,
                reason=reason,
                num_trajectories=len(trajectories),
                num_targets=num_targets,
            )
            out.append(Chosen(member=member, tree=grown, trajectories=trajectories, max_tokens=max_tokens))
    return tuple(out)
