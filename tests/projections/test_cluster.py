"""The fold of cells, terms and decisions."""

from gyre.events.codec import Envelope, Recorded
from gyre.events.follow import is_run_finished
from gyre.events.subjects import event_subject
from gyre.events.types import (
    CellFenced,
    CellJoined,
    CellLeased,
    CellLost,
    CellSwitched,
    Decided,
    EngineReleased,
    Event,
    PolicyPublished,
    RunFinished,
    RunResumed,
    SessionsRerouted,
    SwitchRequested,
    SwitchRolledBack,
    TermStarted,
    Ticked,
    WeightsPulled,
)
from gyre.projections.cluster import Cluster, evolve, find_cell


def fold(*events: Event) -> Cluster:
    cluster = Cluster()
    for seq, event in enumerate(events, 1):
        envelope = Envelope(writer="t", incarnation=1, writer_seq=seq, prev="", time_ns=0, cause=0, event=event)
        recorded = Recorded(seq=seq, subject=event_subject("r", event), digest="", envelope=envelope)
        cluster = evolve(cluster, recorded)
    return cluster


def join(cell: str, index: int) -> CellJoined:
    return CellJoined(cell=cell, index=index, capacity=4 + index, engine_url="u", model_digest="m")


def decided(term: int = 1, epoch: int = 2) -> Decided:
    return Decided(
        term=term, policy="waterlevel", cell="c0", role="train", epoch=epoch, waterlevel=0, capacity=4, cell_capacity=4,
        reason="", inputs_digest="",
    )  # fmt: skip


ARRIVED = (
    TermStarted(term=1),
    join("c0", 0),
    CellLeased(cell="c0", role="rollout", epoch=1),
    CellSwitched(cell="c0", role="rollout", epoch=1, version=0, phases=()),
)


def test_a_cell_goes_round_and_the_capacity_follows() -> None:
    way: list[tuple[Event, str, int]] = [
        (join("c0", 0), "LOADING", 0),
        (CellLeased(cell="c0", role="rollout", epoch=1), "LOADING", 0),
        (WeightsPulled(cell="c0", epoch=1, version=0, digest="d", num_bytes=1, phases=()), "LOADING", 0),
        (CellSwitched(cell="c0", role="rollout", epoch=1, version=0, phases=()), "SERVING", 4),
        (CellLeased(cell="c0", role="train", epoch=2), "SERVING", 4),
        (CellFenced(cell="c0", epoch=2), "FENCED", 0),
        (SessionsRerouted(cell="c0", epoch=2, num_sessions=1, num_calls_moved=1), "DRAINING", 0),
        (EngineReleased(cell="c0", epoch=2, seconds=0.1), "EMPTY", 0),
        (CellSwitched(cell="c0", role="train", epoch=2, version=0, phases=()), "TRAINING", 0),
        (CellLeased(cell="c0", role="rollout", epoch=3), "LOADING", 0),
        (CellSwitched(cell="c0", role="rollout", epoch=3, version=1, phases=()), "SERVING", 4),
        (CellLost(cell="c0", reason="x"), "LOST", 0),
        (CellSwitched(cell="c0", role="rollout", epoch=3, version=1, phases=()), "LOST", 0),
        (join("c0", 0), "LOADING", 0),
    ]
    for num, (_, state, capacity) in enumerate(way, 1):
        cluster = fold(*(event for event, _, _ in way[:num]))
        assert (cluster.cells[0].state, cluster.rollout_capacity) == (state, capacity), way[num - 1]
    assert cluster.cells[0].epoch == 3


def test_a_cell_that_serves_has_the_version_that_it_pulled_last() -> None:
    def pulled(version: int, epoch: int = 1) -> WeightsPulled:
        return WeightsPulled(cell="c0", epoch=epoch, version=version, digest="d", num_bytes=1, phases=())

    cell = fold(*ARRIVED, pulled(2)).cells[0]
    assert (cell.state, cell.version) == ("SERVING", 2)
    assert fold(*ARRIVED, pulled(2), pulled(1)).cells[0].version == 2, "what is told twice"
    assert fold(*ARRIVED, pulled(2, epoch=0)).cells[0].version == 0, "of another lease"


def test_cells_stand_in_their_fixed_order_whatever_order_they_join_in() -> None:
    cluster = fold(join("c2", 2), join("c0", 0), join("c1", 1))
    assert [cell.cell for cell in cluster.cells] == ["c0", "c1", "c2"]
    assert find_cell(cluster, "c3") is None


def test_hops_of_an_old_epoch_change_nothing() -> None:
    assert fold(*ARRIVED, CellFenced(cell="c0", epoch=0)).cells == fold(*ARRIVED).cells
    late = fold(*ARRIVED, CellLeased(cell="c0", role="rollout", epoch=1))
    assert late.cells == fold(*ARRIVED).cells


def test_a_roll_back_serves_again() -> None:
    hops = (CellLeased(cell="c0", role="train", epoch=2), CellFenced(cell="c0", epoch=2))
    cluster = fold(*ARRIVED, *hops, SwitchRolledBack(cell="c0", role="rollout", epoch=2, reason="late"))
    assert (cluster.cells[0].state, cluster.cells[0].epoch) == ("SERVING", 2)


def test_a_decision_is_open_until_it_is_answered_or_overtaken() -> None:
    command = SwitchRequested(cell="c0", role="train", epoch=2, term=1)
    lease = CellLeased(cell="c0", role="train", epoch=2)
    assert fold(*ARRIVED, decided()).decision is not None
    obeyed = fold(*ARRIVED, decided(), command, lease).decision
    assert obeyed is not None and obeyed.commanded_seq == 6
    ends: list[tuple[Event, ...]] = [
        (command, lease, CellSwitched(cell="c0", role="train", epoch=2, version=0, phases=())),
        (command, lease, SwitchRolledBack(cell="c0", role="rollout", epoch=2, reason="late")),
        (CellLost(cell="c0", reason="x"),),
        (CellLeased(cell="c0", role="rollout", epoch=2),),
        (command, CellLeased(cell="c0", role="rollout", epoch=3)),
        (join("c0", 0),),
    ]
    for end in ends:
        assert fold(*ARRIVED, decided(), *end).decision is None, end


def test_what_a_deposed_scheduler_says_is_void() -> None:
    assert fold(*ARRIVED, TermStarted(term=2), decided(term=1)).decision is None
    late = SwitchRequested(cell="c0", role="train", epoch=2, term=1)
    open_ = fold(*ARRIVED, decided(term=1), TermStarted(term=2), late).decision
    assert open_ is not None and not open_.commanded_seq
    assert fold(*ARRIVED, TermStarted(term=2), Ticked(term=1, now_s=9.0)).now_s == 0.0


def test_versions_only_grow() -> None:
    events = (PolicyPublished(version=v, digest="d", num_bytes=1, checkpoint="") for v in (0, 2, 1))
    cluster = fold(*events)
    assert (cluster.published_version, cluster.published_seq) == (2, 2)


def test_an_end_holds_until_the_run_is_resumed() -> None:
    end = RunFinished(reason="interrupted")
    assert is_run_finished(False, end)
    assert is_run_finished(True, TermStarted(term=1))
    assert not is_run_finished(True, RunResumed(versions=()))
