import numpy as np
import pytest
from event_stream import Stream, call_events
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from gyre.config import Config, GradingConfig, PipelineConfig, SelectionConfig, TrainerConfig
from gyre.errors import FoldError
from gyre.events.codec import Recorded
from gyre.events.types import ExecutionTimedOut, MilestoneScored
from gyre.projections.batches import Batch, Row, assemble
from gyre.projections.cohorts import consumed_cohort, next_cohort
from gyre.projections.experience import Experience
from gyre.projections.packing import pack
from gyre.projections.recorded_batches import MEANINGS

LAYOUTS = ("paths", "tree")


def configured(num_groups: int = 1, **trainer: object) -> Config:
    return Config(
        pipeline=PipelineConfig(groups_per_step=num_groups, executions_per_group=2),
        trainer=TrainerConfig(**trainer),  # type: ignore[arg-type]
        selection=SelectionConfig(max_trajectories=0),
    )


def fold(recorded: list[Recorded], experience: Experience | None = None) -> Experience:
    experience = experience or Experience()
    for item in recorded:
        experience.evolve(item)
    return experience


def batch_of(stream: Stream, config: Config) -> Batch:
    experience = fold(stream.recorded)
    cohort = next_cohort(experience.cohorts, config.pipeline)
    assert cohort is not None
    return assemble(experience, cohort, config, cohort.step)


def weights(batch: Batch) -> dict[str, float]:
    out: dict[str, float] = {}
    for row in batch.rows:
        out[row.execution] = out.get(row.execution, 0.0) + float(row.weight.sum(dtype=np.float64))
    return out


def test_a_plain_group() -> None:
    stream = Stream()
    stream.whole_group("g0000", [1.0, 0.0])
    batch = batch_of(stream, configured())
    first, second = batch.rows
    assert first.ids.tolist() == list(range(14))
    assert np.flatnonzero(first.target).tolist() == [5, 6, 7, 10, 11, 12, 13]
    assert (first.logprob[first.target] == -0.5).all()
    assert not first.logprob[~first.target].any()
    assert first.weight[first.target] == pytest.approx(1 / 7)
    assert (first.advantage, second.advantage) == (1.0, -1.0)
    assert [(s.version, s.start, s.end) for s in first.spans] == [(0, 5, 8), (0, 10, 14)]
    assert first.ids.dtype == np.int32
    assert (first.logprob.dtype, first.weight.dtype, first.target.dtype) == (np.float32, np.float32, np.bool_)
    assert (batch.num_executions, batch.num_targets, batch.num_tokens) == (2, 14, 28)


def test_executions_with_more_rows_weigh_no_more() -> None:
    """miles#2378, agent-lightning#593, uni-agent#185: the weights of every execution sum to 1."""
    stream = Stream()
    stream.group("g0000", 2)
    plain = stream.start("g0000", 0)
    stream.calls(plain, (5, 3))
    stream.score(plain, 1.0)
    branchy = stream.start("g0000", 1)
    stream.calls(branchy, (5, 3))
    for number in range(6):
        for event in call_events(branchy, f"b{number}", f"{branchy}-s-c0", 8, [1], range(10 + number)):
            stream.add(event)
    stream.score(branchy, 0.0)
    batch = batch_of(stream, configured())
    assert len(batch.rows) == 7
    assert weights(batch) == pytest.approx({plain: 1.0, branchy: 1.0})
    assert {row.execution: row.advantage for row in batch.rows} == {plain: 1.0, branchy: -1.0}


def test_masked_timeouts_do_not_shift_their_siblings() -> None:
    """NeMo-RL#4029: an overall timeout is in neither; its score moves nobody's advantage."""
    stream = Stream()
    stream.group("g0000", 3)
    for slot, score in enumerate((1.0, 0.0, 0.0)):
        execution = stream.start("g0000", slot)
        stream.calls(execution, (5, 3))
        if slot == 2:
            stream.add(ExecutionTimedOut(execution=execution, kind="overall", after_s=9.0))
        stream.score(execution, score)
    batch = batch_of(stream, configured())
    assert {row.execution: row.advantage for row in batch.rows} == {"g0000-0": 1.0, "g0000-1": -1.0}
    assert batch.members[2].reason == "overall_timeout"


def test_a_stale_execution_leaves_the_loss_and_stays_in_the_baseline() -> None:
    """prime-rl#2960."""
    stream = Stream()
    stream.whole_group("g0000", [1.0, 0.0], version=0)
    experience = fold(stream.recorded)
    cohort = next_cohort(experience.cohorts, configured().pipeline)
    assert cohort is not None
    late = assemble(experience, structs.replace(cohort, step=2), configured(), 2)
    assert late.rows == ()
    assert [(m.in_baseline, m.in_loss, m.reason, m.staleness) for m in late.members] == [(True, False, "stale", 2)] * 2
    assert {(r.execution, r.reason): r.num_tokens for r in late.explain()}[("g0000-0", "stale")] == 7


def test_a_placeholder_has_no_targets() -> None:
    """agentcore-rl-toolkit#122: in paper mode it is a 0 in the baseline and no row of the batch."""
    stream = Stream()
    stream.group("g0000", 2)
    execution = stream.start("g0000", 0)
    stream.calls(execution, (5, 3))
    stream.score(execution, 1.0)
    stream.drop(stream.start("g0000", 1), "no image")
    paper = structs.replace(configured(), selection=SelectionConfig(no_product="paper"))
    batch = batch_of(stream, paper)
    assert [row.execution for row in batch.rows] == ["g0000-0"]
    assert batch.rows[0].advantage == 1.0
    assert batch.members[1].in_baseline and not batch.members[1].in_loss
    assert batch.num_executions == 1
    assert batch_of(stream, configured()).rows[0].advantage == 0.0


def test_an_execution_without_targets_is_not_in_the_loss() -> None:
    stream = Stream()
    stream.group("g0000", 2)
    for slot, score in enumerate((1.0, 0.0)):
        execution = stream.start("g0000", slot)
        if slot:
            stream.calls(execution, (5, 3))
        stream.score(execution, score)
    batch = batch_of(stream, configured())
    assert batch.num_executions == 1
    assert batch.members[0].reason == "no_targets"
    assert batch.rows[0].advantage == -1.0


def test_milestones_shape_the_reward_only_when_asked_to() -> None:
    """Two that end alike: the one that was there earlier is worth more, and scores stay what they are."""
    stream = Stream()
    stream.group("g0000", 3)
    executions = [stream.start("g0000", slot) for slot in range(3)]
    for execution, earlier, score in zip(executions, ((0.5, 1.0), (0.0, 0.5), ()), (1.0, 1.0, 0.5), strict=True):
        stream.calls(execution, (5, 3))
        for number, value in enumerate(earlier):
            stream.add(
                MilestoneScored(
                    execution=execution, snapshot="s", after_s=number + 1.0, score=value, parts=(), wall_s=0.1
                )
            )
        stream.score(execution, score)
    plain = configured(advantage="grpo_no_std")
    found = {}
    for weight in (0.0, 0.5, 1.0):
        batch = batch_of(stream, structs.replace(plain, grading=GradingConfig(shaping_weight=weight)))
        assert [member.score for member in batch.members] == [1.0, 1.0, 0.5]
        found[weight] = [member.advantage for member in batch.members]
    assert GradingConfig().shaping_weight == 0
    assert found[0.0] == pytest.approx([1 / 6, 1 / 6, -1 / 3])
    # (1 - w) * score + w * mean(milestones and score); without a milestone the score.
    for weight in (0.5, 1.0):
        rewards = np.array([1 - weight + weight * 2.5 / 3, 1 - weight + weight * 1.5 / 3, 0.5])
        assert found[weight] == pytest.approx(list(rewards - rewards.mean()))


def test_groups_are_grouped_by_id_however_uneven() -> None:
    """AReaL#1419: a group that lost an execution does not borrow its neighbour's scores."""
    stream = Stream()
    stream.group("g0000", 2)
    stream.group("g0001", 3)
    for group, slot, score in (("g0001", 0, 5.0), ("g0000", 0, 1.0), ("g0001", 1, 5.0), ("g0001", 2, 5.0)):
        execution = stream.start(group, slot)
        stream.calls(execution, (5, 3))
        stream.score(execution, score)
    stream.drop(stream.start("g0000", 1), "evaluation_failed")
    batch = batch_of(stream, configured(2))
    assert {m.advantage for m in batch.members} == {0.0}
    assert batch.num_executions == 4


def test_only_the_session_that_was_scored_is_selectable() -> None:
    stream = Stream()
    stream.group("g0000", 2)
    lost = stream.start("g0000", 0)
    stream.calls(lost, (50, 30))
    again = stream.start("g0000", 0, attempt=1)
    stream.calls(again, (5, 3))
    stream.score(again, 1.0)
    other = stream.start("g0000", 1)
    stream.calls(other, (5, 3))
    stream.score(other, 0.0)
    experience = fold(stream.recorded)
    assert set(experience.trees) == {f"{again}-s", f"{other}-s"}
    assert {row.execution for row in batch_of(stream, configured()).rows} == {again, other}


def test_what_comes_after_the_score_is_in_no_batch() -> None:
    """Else what a batch holds would follow from when it was assembled."""
    stream = Stream()
    first, _ = stream.whole_group("g0000", [1.0, 0.0])
    before = batch_of(stream, configured())
    for event in call_events(first, "late", f"{first}-s-c1", 14, [1], [2, 3]):
        stream.add(event)
    for event in call_events("of-no-group", "stray", "", 0, [1], [2]):
        stream.add(event)
    assert set(fold(stream.recorded).trees) == {"g0000-0-s", "g0000-1-s"}
    assert batch_of(stream, configured()).digest == before.digest


def test_minibatches_are_runs_of_whole_groups() -> None:
    stream = Stream()
    names = [f"g000{n}" for n in range(5)]
    for name in names:
        stream.whole_group(name, [1.0, 0.0])
    batch = batch_of(stream, configured(5, num_minibatches=2, max_tokens_per_microstep=30))
    assert [m.groups for m in batch.minibatches] == [tuple(names[:2]), tuple(names[2:])]
    assert [m.num_executions for m in batch.minibatches] == [4, 6]
    assert [m.index for m in batch.microsteps] == list(range(5))
    assert all(len(m.rows) == 2 for m in batch.microsteps)


def test_a_minibatch_without_groups_is_none() -> None:
    """An update of it would divide by no executions."""
    stream = Stream()
    stream.whole_group("g0000", [1.0, 0.0])
    batch = batch_of(stream, configured(1, num_minibatches=3))
    assert [(m.index, m.groups) for m in batch.minibatches] == [(0, ("g0000",))]
    assert {m.minibatch for m in batch.microsteps} == {0}


def test_figures_of_a_batch_are_of_what_the_loss_holds_and_its_scores_of_the_baselines() -> None:
    stream = Stream()
    stream.whole_group("g0000", [0.75], version=0)
    stream.whole_group("g0001", [0.5, 1.0], version=1)
    stream.whole_group("g0002", [0.25, 0.0], version=2)
    stream.group("g0003", 1)
    stream.drop(stream.start("g0003", 0), "no image")
    experience = fold(stream.recorded)
    cohort = next_cohort(experience.cohorts, configured(4).pipeline)
    assert cohort is not None
    batch = assemble(experience, cohort, configured(4), 2)
    assert [m.reason for m in batch.members] == ["stale", "", "", "", "", "no_product"]
    assert (batch.score_mean, batch.staleness_mean, batch.staleness_max) == (0.5, 0.5, 1)
    empty = assemble(experience, structs.replace(cohort, groups=("g0003",)), configured(4), 2)
    assert (empty.score_mean, empty.staleness_mean, empty.staleness_max) == (0.0, 0.0, 0)


def test_a_restarted_trainer_assembles_the_same_batch() -> None:
    stream = Stream()
    stream.whole_group("g0000", [1.0, 0.0])
    before = batch_of(stream, configured())
    stream.consume(1, ("g0000",))
    experience = fold(stream.recorded)
    cohort = consumed_cohort(experience.cohorts, 1)
    assert cohort is not None
    assert assemble(experience, cohort, configured(), 1).digest == before.digest
    stream.complete(1)
    experience = fold(stream.recorded)
    assert experience.trees == {}
    with pytest.raises(FoldError, match="g0000"):
        assemble(experience, cohort, configured(), 1)


def test_the_control_runs_everything_and_reinforces_nothing() -> None:
    stream = Stream()
    stream.whole_group("g0000", [1.0, 0.0])
    batch = batch_of(stream, configured(advantage="zero"))
    assert len(batch.rows) == 2
    assert {row.advantage for row in batch.rows} == {0.0}


def test_eval_executions_leave_no_trees_once_their_group_is_complete() -> None:
    stream = Stream()
    stream.group("e0000", 2, purpose="eval")
    for slot in range(2):
        execution = stream.start("e0000", slot)
        stream.calls(execution, (5, 3))
        assert set(fold(stream.recorded).trees) == {f"e0000-{n}-s" for n in range(slot + 1)}
        stream.score(execution, 1.0)
    assert fold(stream.recorded).trees == {}


def test_what_is_of_no_group_that_is_remembered_changes_nothing() -> None:
    stream = Stream()
    stream.whole_group("g0000", [1.0, 0.0])
    before = fold(stream.recorded)
    stream.score(stream.start("forgotten", 0), 1.0)
    stream.drop("nobody", "lost")
    stream.consume(1, ["forgotten"])
    stream.complete(1)
    after = fold(stream.recorded)
    assert after.trees.keys() == before.trees.keys() and after.seq == len(stream.recorded)


def test_the_digest_is_canonical() -> None:
    """A recorded batch must have this digest in every later version of gyre."""
    stream = Stream()
    stream.whole_group("g0000", [1.0, 0.0])
    assert batch_of(stream, configured()).digest == "3e3a5034351fed87b1e63190d8ae8387"


def branchy(**changes: object) -> Stream:
    """Two executions of a stem (5 context tokens, 3 sampled) and branches that sample 4, 6 and 8 tokens after one of
    context; `changes` are of the end of the first execution's last call."""
    stream = Stream()
    stream.group("g0000", 2)
    for slot, score in enumerate((1.0, 0.0)):
        execution = stream.start("g0000", slot)
        stream.calls(execution, (5, 3))
        for number, size in enumerate((4, 6, 8)):
            begin, end, arrival = call_events(
                execution, f"b{number}", f"{execution}-s-c0", 8, [50 + number], range(size)
            )
            stream.add(begin)
            stream.add(structs.replace(end, **changes) if (slot, size) == (0, 8) else end)  # type: ignore[type-var]
            stream.add(arrival)
        stream.score(execution, score)
    return stream


def left_out(batch: Batch, execution: str) -> dict[str, int]:
    assert {left.reason for left in batch.explain()} <= MEANINGS.keys()
    return {left.reason: left.num_tokens for left in batch.explain() if left.execution == execution}


def test_branches_of_a_tree_go_into_micro_steps_that_share_their_prefixes() -> None:
    """Both executions have the same tokens: 8 of the stem, and 1 + 3, 1 + 5 and 1 + 7 of the branches."""
    stream = branchy()
    paths, tree = (batch_of(stream, configured(layout=layout, max_tokens_per_microstep=26)) for layout in LAYOUTS)
    assert [len(m.rows) for m in tree.microsteps] == [6]
    assert [len(m.rows) for m in paths.microsteps] == [1, 1, 1, 1, 2]
    assert sorted(row.call for row in tree.rows) == sorted(row.call for row in paths.rows)
    smaller = batch_of(stream, configured(layout="tree", max_tokens_per_microstep=25))
    assert [sorted(row.call for row in m.rows) for m in smaller.microsteps] == [["b0"] * 2, ["b1"] * 2 + ["b2"] * 2]
    assert weights(smaller) == pytest.approx({"g0000-0": 1.0, "g0000-1": 1.0})


def test_a_node_that_no_micro_step_can_hold_is_left_out_with_its_reason() -> None:
    """And what is left has the weight of a whole execution."""
    batch = batch_of(branchy(), configured(layout="tree", max_tokens_per_microstep=15))
    assert {row.call for row in batch.rows} == {"b0", "b1"}
    assert left_out(batch, "g0000-0") == {"context": 8, "beyond_budget": 8}
    assert weights(batch) == pytest.approx({"g0000-0": 1.0, "g0000-1": 1.0})
    nothing = batch_of(branchy(), configured(layout="tree", max_tokens_per_microstep=7))
    assert nothing.rows == () and nothing.num_executions == 0
    assert [(m.reason, m.in_baseline) for m in nothing.members] == [("no_targets", True)] * 2
    assert left_out(nothing, "g0000-0") == {"context": 8, "beyond_budget": 21}
    rows = batch_of(branchy(), configured(max_tokens_per_microstep=7)).rows
    assert len(rows) == 6, "a row of its own may be longer than a micro-step"


def test_the_reason_of_an_execution_goes_before_that_of_its_calls() -> None:
    experience = fold(branchy().recorded)
    config = configured(layout="tree", max_tokens_per_microstep=15)
    cohort = next_cohort(experience.cohorts, config.pipeline)
    assert cohort is not None
    late = assemble(experience, cohort, config, 2)
    assert left_out(late, "g0000-0") == {"context": 8, "stale": 21}


@pytest.mark.parametrize("policy", ["drawn", "longest", "all"])
def test_the_policy_of_the_config_takes_the_branches(policy: str) -> None:
    config = structs.replace(configured(), selection=SelectionConfig(max_trajectories=1, policy=policy))  # type: ignore[arg-type]
    batches = [batch_of(branchy(), structs.replace(config, seed=seed)) for seed in range(8)]
    taken = {tuple(row.call for row in batch.rows if row.execution == "g0000-0") for batch in batches}
    assert taken == {"drawn": {("b0",), ("b1",), ("b2",)}, "longest": {("b2",)}, "all": {("b2", "b1", "b0")}}[policy]


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("logprob_not_finite", {"logprobs": np.array([-1.0] * 7 + [np.nan], "<f4").tobytes()}),
        ("logprob_not_finite", {"logprobs": np.array([-np.inf] + [-1.0] * 7, "<f4").tobytes()}),
        ("logprob_missing", {"logprobs": b""}),
        ("span_missing", {"spans": ()}),
        ("torn_tokens", {"logprobs": b"abc"}),
    ],
)
def test_a_node_that_was_badly_recorded_is_left_out_with_its_reason(reason: str, changes: dict[str, object]) -> None:
    batch = batch_of(branchy(**changes), configured(layout="tree"))
    assert sorted(row.call for row in batch.rows if row.execution == "g0000-0") == ["b0", "b1"]
    assert left_out(batch, "g0000-0") == {"context": 8, reason: 8}
    assert all(np.isfinite(row.logprob).all() for row in batch.rows)
    assert weights(batch) == pytest.approx({"g0000-0": 1.0, "g0000-1": 1.0})


def test_targets_weigh_by_branches_when_asked_to() -> None:
    config = structs.replace(configured(), selection=SelectionConfig(max_trajectories=0, targets="branches"))
    once, each = batch_of(branchy(), configured()), batch_of(branchy(), config)
    assert [m.num_targets for m in once.members] == [21, 21]
    assert [m.num_targets for m in each.members] == [27, 27], "the stem's three are on three branches"
    assert weights(each) == pytest.approx({"g0000-0": 1.0, "g0000-1": 1.0})
    assert left_out(each, "g0000-0") == {"context": 8}
    limited = SelectionConfig(max_trajectories=2, targets="branches")
    found = batch_of(branchy(), structs.replace(config, selection=limited))
    rows = [row for row in found.rows if row.execution == "g0000-0"]
    missing = {"b0": 4, "b1": 6, "b2": 8}[({"b0", "b1", "b2"} - {row.call for row in rows}).pop()]
    assert left_out(found, "g0000-0") == {"context": 8, "not_selected": missing}


def lengths_rows(lengths: list[int]) -> list[Row]:
    return [
        Row(
            execution=f"e{n}",
            call="c",
            ids=np.zeros(length, np.int32),
            target=np.ones(length, np.bool_),
            logprob=np.zeros(length, np.float32),
            weight=np.ones(length, np.float32),
            advantage=0.0,
            spans=(),
        )
        for n, length in enumerate(lengths)
    ]


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 120))
def test_packing_keeps_every_row_and_the_bound(lengths: list[int], limit: int) -> None:
    packed = pack(lengths_rows(lengths), limit)
    assert sorted(row.execution for run in packed for row in run) == sorted(f"e{n}" for n in range(len(lengths)))
    for run in packed:
        assert len(run) * max(row.num_tokens for row in run) <= limit or len(run) == 1


@given(st.integers(0, 200), st.data())
def test_any_prefix_then_the_rest_gives_the_same_batch(seed: int, data: st.DataObject) -> None:
    stream = Stream()
    rng = np.random.default_rng(seed)
    for name in ("g0000", "g0001"):
        stream.group(name, 2)
        for slot in range(2):
            execution = stream.start(name, slot)
            stream.calls(execution, *((int(a), int(b)) for a, b in rng.integers(1, 9, (3, 2))))
            stream.score(execution, float(rng.integers(0, 3) / 2))
    config = configured(2)
    cut = data.draw(st.integers(0, len(stream.recorded)))
    experience = fold(stream.recorded[cut:], fold(stream.recorded[:cut]))
    cohort = next_cohort(experience.cohorts, config.pipeline)
    assert cohort is not None
    batch = assemble(experience, cohort, config, 1)
    assert batch.digest == batch_of(stream, config).digest
    assert list(weights(batch).values()) == pytest.approx([1.0] * 4)
