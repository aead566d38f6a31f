"""The waterlevel policy and its promises, over logs of a cluster that crashes, lags and repeats itself."""

import msgspec
import pytest
from cell_logs import (
    arrival,
    completed,
    consumed,
    departure,
    dispatched,
    fold,
    joined,
    published,
    records,
    scored,
    small_config,
    started,
    whole_group,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from play import Play

from gyre.config import Config
from gyre.errors import ReplayError
from gyre.events.types import (
    AdmissionStopped,
    CellLeased,
    Decided,
    Event,
    PolicyRolledBack,
    StepRejected,
    SwitchRequested,
    TermStarted,
)
from gyre.workers.scheduler import SchedulerState, decide, evolve, recompute

START = (TermStarted(term=1), published(0), joined(), *arrival("c0", 1, 0))


def after(*events: Event) -> SchedulerState:
    state: SchedulerState = fold(evolve, SchedulerState(), records(events))
    return state


def decision(config: Config, *events: Event) -> Decided | None:
    decisions = decide(after(*events), config)
    return decisions[0] if decisions else None


def test_the_core_leaves_when_all_executions_of_a_cohort_are_done() -> None:
    config = small_config()
    assert decision(config, *START) is None
    assert decision(config, *START, dispatched(0, 2, 0), started(0, 0), scored(0, 0)) is None
    decided = decision(config, *START, *whole_group(0, 2, 0))
    assert decided is not None
    assert (decided.cell, decided.role, decided.epoch, decided.term) == ("c0", "train", 2, 1)
    assert (decided.waterlevel, decided.capacity, decided.cell_capacity) == (0, 4, 4)


def test_without_a_term_nobody_decides() -> None:
    assert decision(small_config(), *START[1:], *whole_group(0, 2, 0)) is None


def test_it_waits_for_the_dispatch_that_belongs_to_the_publish() -> None:
    config = small_config(lookahead=1)
    # Q_b is two groups: one is ready, the other not even dispatched.
    assert decision(config, *START, *whole_group(0, 2, 0)) is None
    assert decision(config, *START, *whole_group(0, 2, 0), AdmissionStopped(reason="full disk")) is not None
    assert decision(config, *START, *whole_group(0, 2, 0), *whole_group(1, 2, 0)) is not None


def test_an_execution_is_waited_for_also_while_admission_is_stopped() -> None:
    config = small_config(lookahead=1)
    log = (*START, *whole_group(0, 2, 0), dispatched(1, 2, 0), started(1, 0), started(1, 1), scored(1, 0))
    stopped = (*log, AdmissionStopped(reason="full disk"))
    assert decision(config, *stopped) is None
    assert decision(config, *stopped, scored(1, 1)) is not None


@pytest.mark.parametrize("is_said_twice", [False, True])
@pytest.mark.parametrize(("num_steps", "num_entitled"), [(9, 6), (2, 6), (1, 4)])
def test_it_waits_for_the_groups_in_place_of_a_rejected_cohort(
    num_steps: int, num_entitled: int, is_said_twice: bool
) -> None:
    """Otherwise the core would leave between the rollback and the dispatch that belongs to it, or wait for ever for
    groups in place of a cohort whose rejection was heard once more, of a trainer that had died."""
    config = small_config(num_steps=num_steps, lookahead=1, groups_per_step=2)
    rejected = StepRejected(step=1, guard="kl", value=1.0, bound=0.0, detail="", action="rollback")
    again = [rejected] if is_said_twice else []
    rolled_back = PolicyRolledBack(from_step=1, to_version=0, reason="kl")
    groups = [event for index in range(4) for event in whole_group(index, 2, 0)]
    log = [*START, *groups, *departure("c0", 2, 0), consumed(1, (0, 1)), rejected, *again, rolled_back]
    log += arrival("c0", 3, 0)
    for index in range(4, num_entitled):
        assert decision(config, *log) is None
        log += whole_group(index, 2, 0)
    assert decision(config, *log) is not None


def test_one_decision_is_open_at_a_time() -> None:
    config = small_config()
    log = (*START, *whole_group(0, 2, 0))
    decided = decision(config, *log)
    assert decided is not None
    assert decision(config, *log, decided) is None
    command = SwitchRequested(cell="c0", role="train", epoch=2, term=1)
    assert decision(config, *log, decided, command) is None
    assert decision(config, *log, decided, command, *departure("c0", 2, 0)) is None


def test_the_core_returns_after_the_publish_and_not_before() -> None:
    config = small_config()
    log = (*START, *whole_group(0, 2, 0), *departure("c0", 2, 0), consumed(1, (0,)), completed(1))
    assert decision(config, *log) is None
    decided = decision(config, *log, published(1))
    assert decided is not None and (decided.role, decided.epoch) == ("rollout", 3)


def test_the_core_stays_when_the_next_cohort_is_ready_and_it_is_not_missed() -> None:
    config = small_config(num_steps=2, lookahead=1)
    log = (*START, *whole_group(0, 2, 0), *whole_group(1, 2, 0), *departure("c0", 2, 0))
    decided = decision(config, *log, consumed(1, (0,)), completed(1), published(1))
    assert decided is not None and (decided.role, decided.epoch) == ("train", 3)
    # With a third step there is a group to dispatch, and nobody to serve it.
    config = small_config(num_steps=3, lookahead=1)
    decided = decision(config, *log, consumed(1, (0,)), completed(1), published(1))
    assert decided is not None and decided.role == "rollout"


def test_a_step_that_a_crash_left_half_done_is_ready() -> None:
    config = small_config()
    log = (*START, *whole_group(0, 2, 0), *departure("c0", 2, 0), consumed(1, (0,)))
    decided = decision(config, *log, joined(), *arrival("c0", 3, 0))
    assert decided is not None and (decided.role, decided.epoch) == ("train", 4)


def test_satellites_follow_the_core_in_order_as_far_as_the_rest_suffices() -> None:
    config = small_config(groups_per_step=2, executions_per_group=3, lookahead=1, num_steps=9)
    cells = [e for i in range(3) for e in (joined(f"c{i}", i, 4), *arrival(f"c{i}", 1, 0))]
    log = [TermStarted(term=1), published(0), *cells, *whole_group(0, 3, 0), *whole_group(1, 3, 0)]
    log += [dispatched(2, 3, 0), dispatched(3, 3, 0)]
    # w = 6 <= 12 - 4: the core; then 6 > 8 - 4; one group later 3 <= 8 - 4: c1; then 3 > 4 - 4.
    decided = decision(config, *log)
    assert decided is not None and (decided.cell, decided.waterlevel, decided.capacity) == ("c0", 6, 12)
    log += departure("c0", 2, 0)
    assert decision(config, *log) is None
    log += [e for slot in range(3) for e in (started(2, slot), scored(2, slot))]
    decided = decision(config, *log)
    assert decided is not None and (decided.cell, decided.role, decided.waterlevel) == ("c1", "train", 3)
    log += departure("c1", 2, 0)
    assert decision(config, *log) is None
    # After the publish the last to leave comes back first.
    log += [consumed(1, (0, 1)), completed(1), published(1)]
    decided = decision(config, *log)
    assert decided is not None and (decided.cell, decided.role) == ("c1", "rollout")
    decided = decision(config, *log, *arrival("c1", 3, 1))
    assert decided is not None and (decided.cell, decided.role) == ("c0", "rollout")


def test_recompute_names_the_prefix_that_calls_for_nothing() -> None:
    with pytest.raises(ReplayError, match="through sequence 6"):
        recompute(after(*START), small_config())


# ---------------------------------------------------------------- plays

PIPELINES = st.fixed_dictionaries(
    {
        "num_steps": st.integers(1, 4),
        "groups_per_step": st.integers(1, 2),
        "executions_per_group": st.integers(2, 3),
        "steps_per_burst": st.just(1),
        "lookahead": st.integers(0, 2),
    }
)


@st.composite
def plays(draw: st.DrawFn) -> Play:
    """A run in which processes act in any order, lag, crash, repeat themselves and miss deadlines."""
    config = small_config(**draw(PIPELINES))
    engine = msgspec.structs.replace(config.engine, capacity=draw(st.integers(1, 8)))
    config = msgspec.structs.replace(config, engine=engine)
    play = Play(config, draw(st.integers(1, 3)))
    rare = [name for name in play.actors if name.startswith(("new", "crash", "deadline", "guard"))]
    usual = [name for name in play.actors if name not in rare]
    for name in draw(st.lists(st.sampled_from([*usual * 5, *rare]), max_size=200)):
        for _ in range(draw(st.integers(1, 4))):
            play.actors[name]()
    return play


def check_promises(play: Play) -> None:
    """Promise 2 of the design and the scheduler's invariants, for every decision on the log."""
    epochs: dict[str, int] = {}
    for recorded, decided in play.decisions():
        state = fold(evolve, SchedulerState(), play.log[: recorded.envelope.cause])
        again = recompute(state, play.config)
        assert msgspec.json.encode(again) == msgspec.json.encode(decided)
        cell = next(c for c in state.cluster.cells if c.cell == decided.cell)
        if cell.state == "SERVING":
            assert decided.role == "train"
            assert decided.waterlevel <= decided.capacity - decided.cell_capacity
    taken: dict[tuple[str, int], str] = {}
    for event in play.events(CellLeased):
        assert event.epoch > epochs.get(event.cell, 0), "an epoch was used twice"
        epochs[event.cell] = event.epoch
        taken[event.cell, event.epoch] = event.role
    commands = [(c.cell, c.epoch, c.term) for c in play.events(SwitchRequested)]
    assert len(set(commands)) == len(commands), "a command was issued twice in one term"
    assert len(set(play.trained)) == len(play.trained)


@settings(max_examples=150, deadline=None)
@given(plays())
def test_whatever_happens_decisions_replay_and_cells_leave_only_below_the_waterlevel(play: Play) -> None:
    check_promises(play)


@settings(max_examples=100, deadline=None)
@given(plays())
def test_after_any_trouble_a_fair_run_finishes_its_steps(play: Play) -> None:
    play.run()
    assert play.is_done()
    pipeline, num_rejected = play.config.pipeline, len(play.events(StepRejected))
    assert play.num_groups == (pipeline.num_steps + num_rejected) * pipeline.groups_per_step
    check_promises(play)
