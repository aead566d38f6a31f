"""Policies by name, drains, dwells and impossible moves: what each decides over logs of a cluster."""

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

from gyre.config import Config, SchedulerConfig
from gyre.errors import ReplayError
from gyre.events.types import (
    AdmissionStopped,
    CellLost,
    Decided,
    DrainLifted,
    DrainRequested,
    Event,
    MoveRefused,
    PolicyPublished,
    TermStarted,
    Ticked,
)
from gyre.workers import scheduler_policies
from gyre.workers.scheduler import SchedulerState, decide, evolve, is_dwelling, read_inputs, recompute
from gyre.workers.scheduler_policies import Inputs, Move

THREE: tuple[Event, ...] = tuple(e for i in range(3) for e in (joined(f"c{i}", i, 4), *arrival(f"c{i}", 1, 0)))
START: tuple[Event, ...] = (TermStarted(term=1), published(0), *THREE)
BUSY: tuple[Event, ...] = (*START, *whole_group(0, 2, 0), dispatched(1, 2, 0), started(1, 0), started(1, 1))
"""A step is ready and two executions are unfinished."""
STEP_IS_READY = BUSY[len(START) :]


def config(policy: str = "waterlevel", **options: object) -> Config:
    base = small_config(num_steps=9, lookahead=1)
    return msgspec.structs.replace(base, scheduler=SchedulerConfig(policy=policy, **options))  # type: ignore[arg-type]


def after(*events: Event) -> SchedulerState:
    state: SchedulerState = fold(evolve, SchedulerState(), records(events))
    return state


def outcome(options: Config, *events: Event) -> Decided | MoveRefused | None:
    found = decide(after(*events), options)
    return found[0] if found else None


def move(options: Config, *events: Event) -> tuple[str, str] | None:
    found = outcome(options, *events)
    assert not isinstance(found, MoveRefused), found
    return (found.cell, found.role) if found else None


def finished(group: int) -> tuple[Event, ...]:
    return (scored(group, 0), scored(group, 1))


# ---------------------------------------------------------------- by name


def test_colocated_moves_nobody_before_the_last_execution_and_then_everybody() -> None:
    options = config("colocated")
    assert move(config("waterlevel"), *BUSY) == ("c0", "train")
    assert move(options, *BUSY) is None
    log = [*BUSY, *finished(1)]
    for cell in ("c0", "c1", "c2"):
        assert move(options, *log) == (cell, "train")
        log += departure(cell, 2, 0)
    assert move(options, *log) is None
    log += [consumed(1, (0,)), completed(1), published(1)]
    for cell in ("c2", "c1"):
        assert move(options, *log) == (cell, "rollout")
        log += arrival(cell, 3, 1)
    # One group is owed to version 1 and step 2 is ready: with a level of 0 the core has to serve first.
    assert move(options, *log) == ("c0", "rollout")


def test_static_moves_its_training_cells_once_and_renews_them_after_each_burst() -> None:
    options = config("static", num_training=2)
    log = list(START)
    for cell in ("c0", "c1"):
        assert move(options, *log) == (cell, "train")
        log += departure(cell, 2, 0)
    assert move(options, *log) is None
    log += [*whole_group(0, 2, 0), consumed(1, (0,)), completed(1), published(1)]
    for cell in ("c0", "c1"):
        assert move(options, *log) == (cell, "train")
        log += departure(cell, 3, 1)
    assert move(options, *log) is None


def test_static_gives_back_a_cell_that_another_policy_left_in_training() -> None:
    log = (*START, *departure("c0", 2, 0), *departure("c2", 2, 0))
    assert move(config("static", num_training=1), *log) == ("c2", "rollout")


def test_static_renews_no_lease_after_the_last_step_and_renews_it_while_the_others_are_away() -> None:
    log = [*START, *departure("c0", 2, 0), *whole_group(0, 2, 0), consumed(1, (0,)), completed(1), published(1)]
    last = msgspec.structs.replace(config("static", num_training=1), pipeline=small_config(num_steps=1).pipeline)
    assert move(last, *log) is None
    away = [CellLost(cell=cell, reason="x") for cell in ("c1", "c2")]
    assert move(config("static", num_training=1), *log, dispatched(1, 2, 1), *away) == ("c0", "train")


def test_colocated_stays_in_training_when_nothing_is_owed_and_a_step_is_ready() -> None:
    options = config("colocated")
    options = msgspec.structs.replace(options, pipeline=small_config(num_steps=2, lookahead=1).pipeline)
    log = [*BUSY, *finished(1), *departure("c0", 2, 0), consumed(1, (0,)), completed(1), published(1)]
    assert move(options, *log) == ("c0", "train")


def test_colocated_brings_the_satellites_back_before_a_core_that_was_away_trains_again() -> None:
    log = [*BUSY, *finished(1), *departure("c0", 2, 0), *departure("c1", 2, 0), *arrival("c0", 3, 0)]
    assert move(config("colocated"), *log) == ("c1", "rollout")


@pytest.mark.parametrize("policy", scheduler_policies.POLICIES)
def test_a_core_that_is_away_is_asked_for_nothing(policy: str) -> None:
    options = config(policy, num_training=1)
    log = [*BUSY, *finished(1), CellLost(cell="c0", reason="x")]
    assert outcome(options, *log) is None
    assert outcome(options, *log, published(1)) is None
    never_there = [event for event in START if getattr(event, "cell", "") != "c0"]
    assert outcome(options, *never_there, *STEP_IS_READY, *finished(1)) is None


@pytest.mark.parametrize("policy", ["waterlevel", "colocated"])
def test_without_a_step_to_take_nobody_leaves(policy: str) -> None:
    assert move(config(policy), *START, AdmissionStopped(reason="full disk")) is None


def test_a_lost_satellite_keeps_none_after_it_from_joining_the_burst() -> None:
    log = [*BUSY, *finished(1), *departure("c0", 2, 0), CellLost(cell="c1", reason="x")]
    assert move(config(), *log) == ("c2", "train")


def test_nobody_leaves_for_a_step_after_the_last() -> None:
    """A run that is gone on with may have fewer steps than it dispatched groups for."""
    log = [*BUSY, *finished(1), *departure("c0", 2, 0), consumed(1, (0,)), completed(1), published(1)]
    log += arrival("c0", 3, 1)
    assert move(config(), *log, *whole_group(2, 2, 1)) == ("c0", "train")
    last = msgspec.structs.replace(config(), pipeline=small_config(num_steps=1, lookahead=1).pipeline)
    assert move(last, *log) is None


def test_every_policy_by_name_is_one_that_a_config_can_ask_for() -> None:
    for name in scheduler_policies.POLICIES:
        assert read_inputs(after(*START), config(name)).policy == name
    with pytest.raises(msgspec.ValidationError, match="enum"):
        msgspec.convert({"policy": "threshold"}, SchedulerConfig)


def test_a_decision_carries_w_and_the_capacity_and_the_digest_of_its_inputs() -> None:
    found = outcome(config(), *BUSY)
    assert isinstance(found, Decided)
    assert (found.waterlevel, found.capacity, found.cell_capacity, found.policy) == (2, 12, 4, "waterlevel")
    assert len(found.inputs_digest) == 32 and "2 unfinished <= C_R - C_e = 8" in found.reason


# ---------------------------------------------------------------- drains


def test_a_drained_satellite_leaves_first_and_is_asked_for_nothing_until_it_is_undrained() -> None:
    options, log = config(), [*START, dispatched(0, 2, 0), DrainRequested(cell="c1", reason="a fan")]
    state = after(*log)
    assert state.cluster.drained == ("c1",) and state.cluster.rollout_capacity == 8
    found = outcome(options, *log)
    assert isinstance(found, Decided) and (found.cell, found.role, found.reason) == (
        "c1",
        "train",
        "drained by the operator",
    )
    log += departure("c1", 2, 0)
    assert move(options, *log) is None, "no policy brings it back"
    log += [DrainLifted(cell="c1")]
    assert move(options, *log) == ("c1", "rollout")


def test_the_core_cannot_be_drained() -> None:
    state = after(*START, DrainRequested(cell="c0", reason=""))
    assert state.cluster.drained == () and state.cluster.rollout_capacity == 12


def test_the_last_cell_that_serves_is_not_drained_while_executions_are_unfinished() -> None:
    log = [*BUSY, *departure("c0", 2, 0), CellLost(cell="c2", reason="x"), DrainRequested(cell="c1", reason="")]
    assert move(config(), *log) is None
    assert move(config(), *log, *finished(1)) == ("c1", "train"), "nothing is unfinished"
    log += [joined("c2", 2, 4), *arrival("c2", 3, 0)]
    assert move(config(), *log) == ("c1", "train")


def test_a_drain_outlives_the_cell_and_the_waterlevel_skips_it() -> None:
    log = [*BUSY, DrainRequested(cell="c1", reason=""), *departure("c1", 2, 0), *departure("c0", 2, 0)]
    assert move(config(), *log) is None, "c2 is the last that serves"
    assert after(*log).cluster.rollout_capacity == 4
    log += [CellLost(cell="c1", reason="x"), joined("c1", 1, 4), *arrival("c1", 4, 0)]
    assert after(*log).cluster.drained == ("c1",)
    assert move(config(), *log) == ("c1", "train")


# ---------------------------------------------------------------- dwells


def test_no_cell_leaves_a_role_inside_the_dwell_and_a_tick_ends_it() -> None:
    options = config(dwell_s=10.0)
    state = after(*BUSY)
    assert is_dwelling(state, options) and decide(state, options) == ()
    log = [*BUSY, Ticked(term=1, now_s=1000.0)]
    assert move(options, *log) is None, "it is counted from the first tick after the arrival"
    log += [Ticked(term=1, now_s=1009.9)]
    assert move(options, *log) is None
    log += [Ticked(term=1, now_s=1010.0)]
    assert move(options, *log) == ("c0", "train")
    assert not is_dwelling(after(*log), options)
    log += [joined(), *arrival("c0", 2, 0)]
    assert move(options, *log) is None, "it has arrived a second time"
    log += [Ticked(term=1, now_s=1050.0)]
    assert move(options, *log, Ticked(term=1, now_s=1059.9)) is None
    assert move(options, *log, Ticked(term=1, now_s=1060.0)) == ("c0", "train")


def test_clocks_of_two_schedulers_that_differ_by_minutes_are_never_compared() -> None:
    options = config(dwell_s=10.0)
    log = [*BUSY, Ticked(term=1, now_s=1000.0), Ticked(term=1, now_s=1004.0)]
    for ahead_s in (-600.0, 600.0):
        takeover = [TermStarted(term=2), Ticked(term=2, now_s=1004.0 + ahead_s)]
        assert move(options, *log, *takeover) is None
        assert move(options, *log, *takeover, Ticked(term=2, now_s=1009.0 + ahead_s)) is None
        assert move(options, *log, *takeover, Ticked(term=2, now_s=1010.5 + ahead_s)) == ("c0", "train")
    back = [*log, Ticked(term=1, now_s=900.0), Ticked(term=1, now_s=1004.0)]
    assert after(*back).cluster.elapsed_s == pytest.approx(4.0), "a clock that is set back counts nothing"


def test_a_renewal_is_no_flip() -> None:
    options = config(dwell_s=10.0)
    log = [*BUSY, *finished(1), Ticked(term=1, now_s=1.0), Ticked(term=1, now_s=20.0), *departure("c0", 2, 0)]
    log += [consumed(1, (0,)), completed(1), published(1), dispatched(2, 2, 1)]
    assert move(options, *log) == ("c0", "train"), "the core stays: step 2 is ready and two cells cover the rest"
    since = after(*log, Ticked(term=1, now_s=25.0)).cluster.cells[0].switched_s
    log += [Ticked(term=1, now_s=25.0), *departure("c0", 3, 1)]
    assert after(*log).cluster.cells[0].switched_s == since


# ---------------------------------------------------------------- standalone engines


POOL = (msgspec.structs.replace(joined("p0", 3, 4), standalone=True), *arrival("p0", 1, 0))
ONE = (TermStarted(term=1), published(0), joined("c0", 0, 4), *arrival("c0", 1, 0))


def test_standalone_engines_count_in_the_capacity_and_never_leave() -> None:
    options = config()
    log = [*ONE, *POOL, *STEP_IS_READY]
    found = outcome(options, *log)
    assert isinstance(found, Decided) and (found.cell, found.capacity, found.waterlevel) == ("c0", 8, 2)
    assert "2 unfinished <= C_R - C_e = 4" in found.reason
    log += departure("c0", 2, 0)
    assert move(options, *log) is None, "nobody is left to join it"
    assert outcome(options, *log, *finished(1)) is None, "nor asked to, when it is not missed"
    log += [*finished(1), consumed(1, (0,)), completed(1), published(1)]
    for policy in ("waterlevel", "colocated", "static"):
        found = outcome(config(policy), *log)
        assert not isinstance(found, Decided) or found.cell != "p0", policy


def test_unequal_cells_count_with_what_each_of_them_holds() -> None:
    unequal = tuple(e for i, size in enumerate((4, 1, 2)) for e in (joined(f"c{i}", i, size), *arrival(f"c{i}", 1, 0)))
    log = [TermStarted(term=1), published(0), *unequal, *STEP_IS_READY]
    found = outcome(config(), *log)
    assert isinstance(found, Decided) and (found.cell, found.capacity, found.cell_capacity) == ("c0", 7, 4)
    log += departure("c0", 2, 0)
    assert move(config(), *log) == ("c1", "train"), "c2 holds the two that are unfinished"
    log += departure("c1", 2, 0)
    assert move(config(), *log) is None
    smaller = [TermStarted(term=1), published(0), joined("c0", 0, 4), *arrival("c0", 1, 0), joined("c1", 1, 1),
               *arrival("c1", 1, 0), *STEP_IS_READY]  # fmt: skip
    assert move(config(), *smaller) is None, "c1 holds one, two are unfinished"


def test_one_cell_without_a_pool_leaves_only_when_nothing_is_unfinished() -> None:
    options = config()
    log = [*ONE, *STEP_IS_READY]
    assert move(options, *log) is None
    found = outcome(options, *log, *finished(1))
    assert isinstance(found, Decided) and found.reason == "step 1 is ready; 0 unfinished <= C_R - C_e = 0"


def test_a_standalone_engine_cannot_be_drained() -> None:
    log = [*ONE, *POOL, *STEP_IS_READY, DrainRequested(cell="p0", reason="")]
    assert after(*log).cluster.drained == () and after(*log).cluster.rollout_capacity == 8


# ---------------------------------------------------------------- impossible moves


def asking(monkeypatch: pytest.MonkeyPatch, cell: str, role: str, options: Config, *log: Event) -> object:
    def policy(inputs: Inputs) -> Move | None:
        known = {c.cell: c for c in inputs.cells}
        found = known.get(cell) or msgspec.structs.replace(inputs.cells[0], cell=cell)
        return Move(cell=found, role=role, reason="because")  # type: ignore[arg-type]

    monkeypatch.setitem(scheduler_policies.POLICIES, "waterlevel", policy)
    return outcome(options, *log)


@pytest.mark.parametrize(
    ("cell", "role", "more", "reason"),
    [
        ("c9", "train", (), "c9 is not in the cluster"),
        ("c1", "rollout", (), "c1 serves already"),
        ("p0", "train", (), "p0 is a standalone engine: it has no trainer"),
        ("c1", "train", (CellLost(cell="c1", reason="x"),), "c1 is LOST; only a cell that has arrived"),
        (
            "c0",
            "train",
            (CellLost(cell="p0", reason="x"), *departure("c1", 2, 0), *departure("c2", 2, 0)),
            "c0 is the last cell in rollout",
        ),
    ],
)
def test_an_impossible_move_is_refused_once_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, cell: str, role: str, more: tuple[Event, ...], reason: str
) -> None:
    log = [*BUSY, *POOL, *more]
    refused = asking(monkeypatch, cell, role, config(), *log)
    assert isinstance(refused, MoveRefused) and reason in refused.reason
    assert asking(monkeypatch, cell, role, config(), *log, refused) is None, "it is not said again"
    again = asking(
        monkeypatch,
        cell,
        role,
        config(),
        *log,
        refused,
        PolicyPublished(version=1, digest="", num_bytes=1, checkpoint=""),
    )
    assert again is None


@pytest.mark.parametrize(
    "other", [{"policy": "static"}, {"cell": "c1"}, {"role": "rollout"}, {"reason": "c9 is LOST"}, None]
)
def test_a_refusal_that_differs_from_the_one_before_is_said(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, str] | None
) -> None:
    refused = asking(monkeypatch, "c9", "train", config(), *BUSY)
    assert isinstance(refused, MoveRefused)
    before = msgspec.structs.replace(refused, **other) if other else decided_of_late()
    assert asking(monkeypatch, "c9", "train", config(), *BUSY, refused, before) == refused


def decided_of_late() -> Decided:
    """Of a term that is over: it moves nobody, but ends what was refused before it."""
    return Decided(
        term=0, policy="waterlevel", cell="c0", role="train", epoch=2, waterlevel=0, capacity=0, cell_capacity=0,
        reason="", inputs_digest="",
    )  # fmt: skip


def test_a_refusal_is_no_decision_that_could_be_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asking(monkeypatch, "c9", "train", config(), *BUSY) is not None
    with pytest.raises(ReplayError, match="calls for no decision"):
        recompute(after(*BUSY), config())


def test_what_came_later_is_left_out_of_the_digest_while_it_is_not_used() -> None:
    plain = msgspec.json.decode(msgspec.json.encode(read_inputs(after(*START), config())))
    assert not plain.keys() & {"drained", "dwelling", "num_training", "standalone"}
    drained = read_inputs(after(*START, DrainRequested(cell="c1", reason="")), config())
    assert b'"drained":["c1"]' in msgspec.json.encode(drained)
