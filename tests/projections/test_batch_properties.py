"""What must hold of a batch whatever its executions did: random branching histories, endings, faults and orders."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from event_stream import Stream, completed, cut, delivered, failed, started
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from numpy.typing import NDArray

from gyre.config import Config, PipelineConfig, SelectionConfig, TrainerConfig
from gyre.events.codec import Recorded
from gyre.events.tokens import pack_ids, unpack_ids
from gyre.events.types import CallCompleted, CallCut, CallDelivered, CallStarted, Event, VersionSpan
from gyre.projections import tree
from gyre.projections.batches import Batch, assemble
from gyre.projections.cohorts import consumed_cohort
from gyre.projections.experience import Experience
from gyre.projections.members import choose
from gyre.projections.recorded_batches import MEANINGS, explain
from gyre.projections.selection import PRIORITY
from gyre.projections.tree import Tree

FAULTS = ("", "", "", "", "nan", "no-version", "no-logprob", "empty", "unknown-base", "beyond-base", "auxiliary")


def configured(limit: int = 0, **trainer: Any) -> Config:
    return Config(
        pipeline=PipelineConfig(groups_per_step=1, executions_per_group=2),
        trainer=TrainerConfig(**trainer),
        selection=SelectionConfig(max_trajectories=limit),
    )


@st.composite
def executions(draw: st.DrawFn, faults: Sequence[str] = FAULTS) -> list[list[Event]]:
    """Events of two to four executions of one group, each in its own order; all tokens of an execution differ."""
    return [list(_calls(draw, f"g-{slot}", faults)) for slot in range(draw(st.integers(2, 4)))]


def _calls(draw: st.DrawFn, execution: str, faults: Sequence[str]) -> Iterator[Event]:
    where = {"execution": execution, "session": f"{execution}-s"}
    ends = {"": 0}
    fresh = iter(range(1, 10**6))
    for number in range(draw(st.integers(0, 7))):
        call, fault = f"{execution}-c{number}", draw(st.sampled_from(faults))
        base = draw(st.sampled_from([*ends]))
        shared = draw(st.integers(0, ends[base]))
        context = [next(fresh) for _ in range(draw(st.integers(0 if shared else 1, 3)))]
        role = "auxiliary" if fault == "auxiliary" else draw(st.sampled_from(PRIORITY))
        begun = started(call, base, shared, context, role_class=role, **where)
        if fault == "unknown-base":
            begun = structs.replace(begun, base="nobody")
        if fault == "beyond-base":
            begun = structs.replace(begun, shared=ends[base] + 1)
        yield begun
        if fault not in ("unknown-base", "beyond-base"):
            ends[call] = shared + len(context)
        sampled = [] if fault == "empty" else [next(fresh) for _ in range(draw(st.integers(1, 4)))]
        ending = draw(st.sampled_from(["delivered", "delivered", "delivered", "undelivered", "cut", "failed", "open"]))
        if ending == "failed":
            yield structs.replace(failed(call), **where)
        if ending in ("failed", "open"):
            continue
        yield structs.replace(
            _spoiled(_told(cut(call, sampled) if ending == "cut" else completed(call, sampled)), fault), **where
        )
        if ending != "cut":
            yield delivered(call, ending == "delivered", **where)
        if call in ends:
            ends[call] += len(sampled)


def logprob_of(ids: NDArray[np.int32]) -> NDArray[np.float32]:
    """Of each token one of its own, so that no other's can pass for it."""
    return (ids / -1024).astype("<f4")


def version_of(token: int) -> int:
    return token // 3


def _told(event: CallCompleted | CallCut) -> CallCompleted | CallCut:
    ids = unpack_ids(event.sampled)
    begins = [at for at in range(len(ids)) if not at or version_of(ids[at]) != version_of(ids[at - 1])]
    spans = tuple(
        VersionSpan(version=version_of(int(ids[start])), start=start, end=end)
        for start, end in pairwise([*begins, len(ids)])
    )
    return structs.replace(event, logprobs=logprob_of(ids).tobytes(), spans=spans)


def _spoiled(event: CallCompleted | CallCut, fault: str) -> CallCompleted | CallCut:
    if fault == "nan":
        return structs.replace(event, logprobs=np.full(len(event.sampled) // 4, np.nan, "<f4").tobytes())
    if fault == "no-version":
        return structs.replace(event, spans=tuple(VersionSpan(version=0, start=1, end=s.end) for s in event.spans))
    if fault == "no-logprob":
        return structs.replace(event, logprobs=event.logprobs[4:])
    return event


def stream_of(runs: Sequence[Sequence[Event]], order: Sequence[int] = (), scores: Sequence[float] = ()) -> Stream:
    """One group whose executions' events arrive in the order that `order` picks them in, the rest as they come."""
    stream = Stream()
    stream.group("g", len(runs))
    for slot in range(len(runs)):
        stream.start("g", slot)
    rest = [iter(run) for run in runs]
    for pick in order:
        for event in rest[pick % len(rest)]:
            stream.add(event)
            break
    for run in rest:
        for event in run:
            stream.add(event)
    for slot in range(len(runs)):
        stream.score(f"g-{slot}", scores[slot] if scores else slot / len(runs))
    stream.consume(1, ["g"])
    return stream


def fold(recorded: Sequence[Recorded], experience: Experience | None = None) -> Experience:
    experience = experience or Experience()
    for item in recorded:
        experience.evolve(item)
    return experience


def batch_of(experience: Experience, config: Config) -> Batch:
    cohort = consumed_cohort(experience.cohorts, 1)
    assert cohort is not None
    return assemble(experience, cohort, config, 1)


def shape(grown: Tree) -> list[tuple[Any, ...]]:
    return [tuple(getattr(call, name) for name in call.__slots__) for call in grown.calls]


def per_target(batch: Batch) -> Counter[tuple[Any, ...]]:
    """Each target with all that its loss is made of: execution, what stands before it, itself, and its weight."""
    found: Counter[tuple[Any, ...]] = Counter()
    for row in batch.rows:
        ids = row.ids.tolist()
        for at in np.flatnonzero(row.target):
            found[
                (row.execution, tuple(ids[: at + 1]), float(row.logprob[at]), float(row.weight[at]), row.advantage)
            ] += 1
    return found


@settings(max_examples=60, deadline=None)
@given(executions(), st.lists(st.integers(0, 3), max_size=60))
def test_executions_in_any_order_of_arrival_give_the_same_trees_and_digest(
    runs: list[list[Event]], order: list[int]
) -> None:
    one, other = (fold(stream_of(runs, picks).recorded) for picks in ((), order))
    assert {name: shape(grown) for name, grown in one.trees.items()} == {
        name: shape(grown) for name, grown in other.trees.items()
    }
    assert batch_of(one, configured(2)).digest == batch_of(other, configured(2)).digest


@settings(max_examples=60, deadline=None)
@given(executions(), st.lists(st.integers(0, 3), max_size=40), st.data())
def test_any_prefix_and_then_the_rest_gives_the_same_batch(
    runs: list[list[Event]], order: list[int], data: st.DataObject
) -> None:
    recorded = stream_of(runs, order).recorded
    at = data.draw(st.integers(0, len(recorded)))
    resumed = fold(recorded[at:], fold(recorded[:at]))
    assert batch_of(resumed, configured(3)).digest == batch_of(fold(recorded), configured(3)).digest


@settings(max_examples=100, deadline=None)
@given(executions(), st.sampled_from([0, 1, 2, 5]))
def test_a_batch_trains_each_target_at_most_once_and_gives_a_reason_for_every_other_token(
    runs: list[list[Event]], limit: int
) -> None:
    experience = fold(stream_of(runs).recorded)
    batch = batch_of(experience, configured(limit))
    assert set(per_target(batch).values()) <= {1}
    left = Counter[str]()
    for item in batch.explain():
        assert item.reason in MEANINGS and item.num_tokens > 0
        left[item.execution] += item.num_tokens
    for member in batch.members:
        grown = experience.trees.get(f"{member.execution}-s", Tree(""))
        numbers = tree.stats(grown)
        assert member.num_targets + left[member.execution] == numbers.num_tokens
        assert member.num_targets == numbers.num_targets or (limit and member.num_trajectories == limit)
        assert member.in_loss == (numbers.num_targets > 0)
        assert member.reason == ("" if numbers.num_targets else "no_targets")
    cohort = consumed_cohort(experience.cohorts, 1)
    assert cohort is not None
    told = explain(batch, choose(experience, cohort, configured(limit), 1))
    for execution in told.executions:
        grown = experience.trees.get(f"{execution.execution}-s", Tree(""))
        named = [b.call for b in (*execution.branches, *execution.left_branches)]
        assert sorted(named) == sorted(grown.calls[index].call for index in tree.tips(grown)), "every branch is named"
        targets = {t for call in grown.calls for t in full(grown, call)[call.prompt_end : call.target_end]}
        rows = [row for row in batch.rows if row.execution == execution.execution]
        targets -= {t for row in rows for t in row.ids[row.target].tolist()}
        for branch in execution.left_branches:
            tip = grown.find(branch.call)
            assert tip is not None
            assert branch.num_targets == len(targets & {*full(grown, tip)[: tip.target_end]}) > 0
        assert sum(t.num_tokens for t in execution.left_out if t.reason == "not_selected") == len(targets)
        assert execution.weight == (1 / batch.num_executions if execution.in_loss else 0)
        assert execution.target_weight * execution.num_targets == pytest.approx(execution.weight)
    assert [*told.left_out] == sorted(told.left_out, key=lambda t: (-t.num_tokens, t.reason))
    for row in batch.rows:
        assert not row.target[0]
        assert row.logprob.tolist() == np.where(row.target, logprob_of(row.ids), 0).tolist()
        assert all({*map(version_of, row.ids[s.start : s.end].tolist())} == {s.version} for s in row.spans)
        assert (
            sorted(i for span in row.spans for i in range(span.start, span.end)) == np.flatnonzero(row.target).tolist()
        )


def full(grown: Tree, call: tree.Call) -> list[int]:
    return tree.token_ids(grown, call.index, call.end).tolist()


def flattened(run: Sequence[Event]) -> list[Event]:
    """The same calls with nothing shared: each has its whole prompt as context, and so is a branch of its own."""
    grown = Tree("s")
    for event in run:
        grown = tree.evolve(grown, event)
    out: list[Event] = []
    for event in run:
        if isinstance(event, CallStarted):
            call = grown.find(event.call)
            assert call is not None
            prompt = pack_ids(tree.token_ids(grown, call.index, call.prompt_end))
            event = structs.replace(event, base="", shared=0, context=prompt)
        out.append(event)
    return out


@settings(max_examples=60, deadline=None)
@given(executions(("", "empty")))
def test_splitting_an_execution_into_more_branches_changes_no_target_and_no_weight(runs: list[list[Event]]) -> None:
    """miles#2378, agent-lightning#593, uni-agent#185. A target's loss follows from what is compared here: the tokens
    before it, its log-probability, weight and advantage."""
    runs = [_all_delivered(run) for run in runs]
    whole = batch_of(fold(stream_of(runs).recorded), configured())
    split = batch_of(fold(stream_of([flattened(run) for run in runs]).recorded), configured())
    assert len(split.rows) >= len(whole.rows)
    assert per_target(split) == per_target(whole)
    assert split.num_executions == whole.num_executions


def _all_delivered(run: Sequence[Event]) -> list[Event]:
    """No target depends on a later call, which proves nothing of this one when nothing is shared."""
    out: list[Event] = []
    for event in run:
        if isinstance(event, CallCompleted | CallCut):
            done = structs.replace(
                completed(event.call, unpack_ids(event.sampled)), execution=event.execution, session=event.session
            )
            out += [done, delivered(event.call, execution=event.execution, session=event.session)]
        elif not isinstance(event, CallDelivered):
            out.append(event)
    return out


@settings(max_examples=30, deadline=None)
@given(
    executions(),
    st.sampled_from([0.0, 0.1, 1 / 3, 0.7, 5.0, -2.5]),
    st.sampled_from(["grpo", "grpo_no_std", "rloo", "zero"]),
)
def test_equal_scores_are_an_advantage_of_exactly_zero(runs: list[list[Event]], score: float, kind: str) -> None:
    batch = batch_of(fold(stream_of(runs, scores=[score] * len(runs)).recorded), configured(advantage=kind))
    assert {member.advantage for member in batch.members} == {0.0}
    assert all(row.advantage == 0.0 for row in batch.rows)
