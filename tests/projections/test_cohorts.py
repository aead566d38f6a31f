from event_stream import Stream
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from gyre.config import PipelineConfig
from gyre.events.codec import Recorded
from gyre.events.types import ExecutionFinished, ExecutionTimedOut, MilestoneScored, SessionOpened, StepRejected
from gyre.projections import cohorts
from gyre.projections.cohorts import CohortState, consumed_cohort, next_cohort, num_ready
from gyre.projections.scores import Ending

PIPELINE = PipelineConfig(groups_per_step=2, executions_per_group=2)


def fold(recorded: list[Recorded], state: CohortState | None = None) -> CohortState:
    state = state or CohortState()
    for item in recorded:
        state = cohorts.evolve(state, item)
    return state


def seen(state: CohortState) -> tuple[object, ...]:
    """All that others read of a state."""
    return (
        state.seq,
        state.step,
        state.dispatched,
        state.started,
        state.finished,
        tuple(state.ready),
        tuple(sorted(state.groups)),
        tuple(sorted(state.consumed.items())),
        next_cohort(state, PIPELINE),
    )


def test_the_earliest_complete_groups_are_next() -> None:
    stream = Stream()
    for group in ("g0000", "g0001", "g0002"):
        stream.group(group, 2)
    stream.group("e0000", 2, purpose="eval")
    for group in ("e0000", "g0002", "g0000"):
        for slot in (0, 1):
            stream.score(stream.start(group, slot), 0.5)
    state = fold(stream.recorded)
    assert num_ready(state) == 2
    cohort = next_cohort(state, PIPELINE)
    assert cohort is not None
    assert (cohort.step, cohort.groups) == (1, ("g0002", "g0000"))
    assert cohort.executions == ("g0002-0", "g0002-1", "g0000-0", "g0000-1")
    assert state.waterlevel == 2


def test_a_cohort_is_consumed_once_and_survives_a_restart_until_its_step_is_completed() -> None:
    stream = Stream()
    for group in ("g0000", "g0001", "g0002", "g0003"):
        stream.whole_group(group, [0.0, 1.0])
    before = next_cohort(fold(stream.recorded), PIPELINE)
    stream.consume(1, ("g0000", "g0001"))
    state = fold(stream.recorded)
    assert consumed_cohort(state, 1) == before
    following = next_cohort(state, PIPELINE)
    assert following is not None
    assert (following.step, following.groups) == (2, ("g0002", "g0003"))
    stream.complete(1)
    state = fold(stream.recorded)
    assert consumed_cohort(state, 1) is None
    assert set(state.groups) == {"g0002", "g0003"}
    assert next_cohort(state, PIPELINE) == following
    stream.consume(2, ("g0002", "of another log"))
    assert consumed_cohort(fold(stream.recorded), 2) is None, "a fold that began later knows not all of its groups"


def test_one_infrastructure_failure_does_not_drop_the_group() -> None:
    """miles#2800: the slot is filled again, and the group is complete with the second attempt."""
    stream = Stream()
    stream.group("g0000", 2)
    stream.score(stream.start("g0000", 0), 1.0)
    first = stream.start("g0000", 1)
    stream.finish(first, "interrupted")
    stream.drop(first, "infrastructure", final=False)
    waterlevel = fold(stream.recorded).waterlevel
    second = stream.start("g0000", 1, attempt=1)
    stream.score(first, 0.1)
    assert fold(stream.recorded).waterlevel == waterlevel == 1
    stream.score(second, 0.5)
    state = fold(stream.recorded)
    assert (state.dispatched, state.started, state.finished) == (2, 2, 2)
    assert next_cohort(state, PipelineConfig(groups_per_step=1)).executions == ("g0000-0", "g0000-1-r1")  # type: ignore[union-attr]


def test_the_first_score_settles_a_slot() -> None:
    stream = Stream()
    stream.group("g0000", 2)
    execution = stream.start("g0000", 0)
    stream.score(execution, 1.0)
    stream.score(execution, 0.0)
    stream.drop(execution, "late")
    stream.start("g0000", 0, attempt=1)
    stream.group("g0000", 2)  # nor does the same dispatch begin anything again
    state = fold(stream.recorded)
    assert state.groups["g0000"].slots[0].score == 1.0
    assert (state.dispatched, state.started, state.finished) == (2, 1, 1)


def test_a_refill_has_nothing_of_the_attempt_that_it_replaces() -> None:
    """Else an attempt that was lost would time out, interrupt or shape the reward of the one that was scored."""
    stream = Stream()
    stream.group("g0000", 1)
    first = stream.start("g0000", 0)
    said = [
        ExecutionTimedOut(execution=first, kind="overall", after_s=9.0),
        MilestoneScored(execution=first, snapshot="s", after_s=1.0, score=0.5, parts=(), wall_s=0.1),
        ExecutionFinished(execution=first, reason="interrupted", exit_code=0, wall_s=1.0, detail=""),
    ]
    for event in said:
        stream.add(event)
    before = structs.replace(stream.recorded[1].event, slot=0, attempt=0)
    stream.add(before)  # the same start again begins nothing
    slot = fold(stream.recorded).groups["g0000"].slots[0]
    assert slot.ending == Ending(finished="interrupted", timed_out="overall")
    assert (slot.session, slot.milestones) == (f"{first}-s", [0.5])
    stream.add(structs.replace(before, execution="again", attempt=1))
    for event in (*said, SessionOpened(execution=first, session="late", temperature=1.0, top_p=1.0)):
        stream.add(event)
    stream.add(before)  # nor does that of an earlier attempt
    slot = fold(stream.recorded).groups["g0000"].slots[0]
    assert (slot.execution, slot.attempt, slot.ending) == ("again", 1, Ending())
    assert (slot.session, slot.milestones) == ("", [])


def test_a_drop_is_one_also_without_a_reason() -> None:
    for reason, told in (("", "dropped"), ("no image", "no image")):
        stream = Stream()
        stream.group("g0000", 1)
        stream.drop(stream.start("g0000", 0), reason)
        assert fold(stream.recorded).groups["g0000"].slots[0].ending == Ending(dropped=told)


def test_an_overall_timeout_stays_one_whatever_times_out_after_it() -> None:
    stream = Stream()
    stream.group("g0000", 1)
    execution = stream.start("g0000", 0)
    for kind in ("harness", "overall", "harness"):
        stream.add(ExecutionTimedOut(execution=execution, kind=kind, after_s=9.0))  # type: ignore[arg-type]
    assert fold(stream.recorded).groups["g0000"].slots[0].timed_out == "overall"


def test_a_rejected_step_gives_its_number_back_and_its_groups_are_gone() -> None:
    stream = Stream()
    for group in ("g0000", "g0001", "g0002", "g0003"):
        stream.whole_group(group, [0.0, 1.0])
    rejected = StepRejected(step=1, guard="kl", value=2.0, bound=1.0, detail="", action="rollback")
    stream.add(structs.replace(rejected, step=3))  # which consumed nothing
    assert fold(stream.recorded).step == 0
    stream.consume(1, ("g0000", "g0001"))
    stream.add(rejected)
    state = fold(stream.recorded)
    cohort = next_cohort(state, PIPELINE)
    assert cohort is not None
    assert (cohort.step, cohort.groups) == (1, ("g0002", "g0003"))
    assert set(state.groups) == {"g0002", "g0003"} and state.find("g0000-0") is None


def test_held_out_groups_are_counted_nowhere_and_forgotten_once_they_are_complete() -> None:
    stream = Stream()
    stream.group("e0000", 2, purpose="eval")
    stream.score(stream.start("e0000", 0), 1.0)
    state = fold(stream.recorded)
    assert set(state.groups) == {"e0000"} and (state.dispatched, state.started, state.finished) == (0, 0, 0)
    stream.score(stream.start("e0000", 1), 1.0)
    state = fold(stream.recorded)
    assert (state.groups, state.ready, state.find("e0000-0")) == ({}, {}, None)


def test_the_digest_binds_what_a_batch_is_made_of() -> None:
    """And is canonical: a recorded cohort must have it in every later version of gyre."""

    def digest(score: float = 0.5, session: str = "g0000-0-s", earlier: float | None = None, **group: int) -> str:
        stream = Stream()
        stream.group("g0000", 1, **group)
        execution = stream.start("g0000", 0)
        stream.add(SessionOpened(execution=execution, session=session, temperature=1.0, top_p=1.0))
        if earlier is not None:
            milestone = {"snapshot": "s", "after_s": 1.0, "parts": (), "wall_s": 0.1}
            stream.add(MilestoneScored(execution=execution, score=earlier, **milestone))  # type: ignore[arg-type]
        stream.score(execution, score)
        cohort = next_cohort(fold(stream.recorded), PipelineConfig(groups_per_step=1))
        assert cohort is not None
        return cohort.digest

    assert digest() == "52bb8f558b245dd03652246e16d5828d"
    others = {digest(score=0.75), digest(session="other"), digest(earlier=0.5), digest(earlier=0.25), digest(version=1)}
    assert len(others | {digest()}) == 6


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    """Dispatches, starts, refills and ends in any order, sense or nonsense."""
    stream = Stream()
    names = ["g0000", "g0001", "g0002", "e0000"]
    for _ in range(draw(st.integers(0, 40))):
        group, slot, attempt = draw(st.sampled_from(names)), draw(st.integers(0, 2)), draw(st.integers(0, 1))
        execution = f"{group}-{slot}" + (f"-r{attempt}" if attempt else "")
        match draw(
            st.sampled_from(["group", "start", "start", "score", "score", "drop", "refill", "consume", "complete"])
        ):
            case "group":
                stream.group(group, 2, purpose="eval" if group.startswith("e") else "train")
            case "start":
                stream.start(group, slot, attempt)
            case "score":
                stream.score(execution, 0.5)
            case "drop":
                stream.drop(execution, "evaluation_failed")
            case "refill":
                stream.drop(execution, "infrastructure", final=False)
            case "consume":
                stream.consume(draw(st.integers(1, 3)), [group])
            case "complete":
                stream.complete(draw(st.integers(1, 3)))
    return stream


@given(streams(), st.data())
def test_any_prefix_then_the_rest_equals_the_whole(stream: Stream, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(stream.recorded)))
    assert seen(fold(stream.recorded[cut:], fold(stream.recorded[:cut]))) == seen(fold(stream.recorded))


@given(streams())
def test_the_waterlevel_rises_only_with_a_dispatch(stream: Stream) -> None:
    state = CohortState()
    for item in stream.recorded:
        before = (state.dispatched, state.started, state.finished)
        state = cohorts.evolve(state, item)
        after = (state.dispatched, state.started, state.finished)
        assert all(b <= a for b, a in zip(before, after, strict=True))
        assert state.finished <= state.started <= state.dispatched
        if after[0] == before[0]:
            assert after[0] - after[2] <= before[0] - before[2]
