"""Routes: which cells take calls, as the cell events say."""

from gyre.agents import routes
from gyre.events.types import (
    CellFenced,
    CellJoined,
    CellLeased,
    CellLost,
    CellSwitched,
    Event,
    RunResumed,
    SessionsRerouted,
    SwitchRolledBack,
    WeightsPulled,
)


def joined(cell: str, index: int = 0) -> CellJoined:
    return CellJoined(cell=cell, index=index, capacity=8, engine_url=f"http://{cell}", model_digest="")


def switched(cell: str, role: str = "rollout", epoch: int = 1, version: int = 0) -> CellSwitched:
    return CellSwitched(cell=cell, role=role, epoch=epoch, version=version, phases=())  # type: ignore[arg-type]


def folded(*events: Event) -> routes.Routes:
    found: routes.Routes = {}
    for seq, event in enumerate(events, 1):
        found = routes.evolve(found, event, seq)
    return found


def test_a_cell_is_open_from_its_switch_to_rollout_until_its_fence() -> None:
    fence = CellFenced(cell="a", epoch=2)
    assert not folded(joined("a"))["a"].open
    assert folded(joined("a"), switched("a"))["a"].open
    fenced = folded(joined("a"), switched("a"), fence)["a"]
    assert (fenced.open, fenced.fence, fenced.fence_seq) == (False, 2, 3)
    back = SwitchRolledBack(cell="a", role="rollout", epoch=2, reason="")
    assert folded(joined("a"), switched("a"), fence, back)["a"].open
    assert not folded(joined("a"), switched("a"), fence, switched("a", "train"))["a"].open
    assert not folded(joined("a"), switched("a"), CellLost(cell="a", reason=""))["a"].open
    assert not folded(joined("a"), switched("a"), joined("a"))["a"].open


def test_a_fence_is_owed_an_answer_of_its_own_epoch() -> None:
    def answer(epoch: int) -> SessionsRerouted:
        return SessionsRerouted(cell="a", epoch=epoch, num_sessions=0, num_calls_moved=0)

    fenced = (joined("a"), switched("a"), CellFenced(cell="a", epoch=4))
    assert folded(*fenced, answer(2))["a"].fence == 4
    assert folded(*fenced, answer(4))["a"].fence is None
    assert folded(*fenced, CellLeased(cell="a", role="rollout", epoch=5))["a"].fence is None, "of a switch that is over"


def test_the_version_follows_the_weights() -> None:
    pulled = WeightsPulled(cell="a", epoch=1, version=7, digest="", num_bytes=0, phases=())
    assert folded(joined("a"), switched("a", version=3))["a"].version == 3
    assert folded(joined("a"), switched("a", version=3), pulled)["a"].version == 7


def test_what_comes_late_or_twice_of_a_switch_that_has_ended_changes_nothing() -> None:
    fence = CellFenced(cell="a", epoch=2)
    left = (joined("a"), switched("a", epoch=1), fence)
    assert not folded(*left, switched("a", epoch=1))["a"].open, "an arrival of before the fence"
    trains = folded(*left, switched("a", "train", epoch=2))["a"]
    assert (trains.open, trains.fence) == (False, None), "nobody waits for an answer any more"
    assert folded(*left, switched("a", epoch=2), fence)["a"].open, "it has arrived since"
    back = SwitchRolledBack(cell="a", role="rollout", epoch=2, reason="")
    again = folded(*left, back, fence, switched("a", "train", epoch=2))["a"]
    assert (again.open, again.fence) == (True, None), "the switch was rolled back"
    lost = folded(*left, CellLost(cell="a", reason=""), joined("a"), switched("a", epoch=2))["a"]
    assert not lost.open, "of the process before"


def test_nothing_of_a_switch_under_way_opens_a_cell_that_was_lost() -> None:
    """Calls would wait there for an engine that is gone, and a fence for an answer that nobody needs."""
    under_way = (joined("a"), switched("a", epoch=1), CellFenced(cell="a", epoch=2), CellLost(cell="a", reason=""))
    back = SwitchRolledBack(cell="a", role="rollout", epoch=2, reason="")
    for late in (switched("a", epoch=2), back, CellFenced(cell="a", epoch=2)):
        found = folded(*under_way, late)["a"]
        assert (found.open, found.fence, found.lost) == (False, None, True), late


def test_unknown_cells_and_other_events_change_nothing() -> None:
    assert folded(switched("a"), RunResumed(versions=())) == {}


def test_the_choice_is_the_last_cell_then_the_least_busy_then_the_first() -> None:
    both = folded(joined("a"), switched("a"), joined("b", 1), switched("b"))

    def chosen(num_calls: dict[str, int], last: str = "", at: routes.Routes = both) -> str:
        route = routes.choose(at, num_calls, last)
        return route.cell if route else ""

    assert chosen({}) == "a"
    assert chosen({}, at=folded(joined("b", 1), switched("b"), joined("a"), switched("a"))) == "a", "whoever came first"
    assert chosen({"a": 2, "b": 1}) == "b"
    assert chosen({"a": 2, "b": 1}, last="a") == "a"
    assert chosen({}, last="a", at=routes.evolve(both, CellFenced(cell="a", epoch=2), 9)) == "b"
    assert chosen({}, at={}) == ""


def test_a_session_that_moves_goes_to_the_cell_that_stays_longest_and_has_room() -> None:
    three = folded(joined("a"), switched("a"), joined("b", 1), switched("b"), joined("c", 2), switched("c"))
    three = routes.evolve(three, CellFenced(cell="a", epoch=2), 9)

    def chosen(num_calls: dict[str, int]) -> str:
        route = routes.choose(three, num_calls, "a")
        return route.cell if route else ""

    assert chosen({"c": 7}) == "c"
    assert chosen({"c": 8}) == "b"
    assert chosen({"b": 8, "c": 9}) == "b"
