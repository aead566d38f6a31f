from collections import Counter

from event_stream import done, grow

from gyre.events.types import Event
from gyre.projections.selection import draw, select
from gyre.projections.tree import Tree


def branching() -> Tree:
    """A main branch with a summary behind it, another, and a sub-agent with the most targets of all."""
    events: list[Event] = [
        *done("root", "", 0, [1, 2], [3] * 4),
        *done("long", "root", 6, [1], [5] * 90),
        *done("short", "root", 6, [1], [6] * 10),
        *done("summary", "long", 97, [1], [7] * 20, role_class="main-summary"),
        *done("child", "", 0, [8, 8], [9] * 500, role_class="sub-agent"),
        *done("child-summary", "child", 502, [8], [9] * 5, role_class="sub-agent-summary"),
    ]
    return grow(*events)


def test_classes_go_before_sizes() -> None:
    chosen = select(branching(), seed=3, execution="e", max_trajectories=0)
    assert [t.call for t in chosen] == ["short", "summary", "child-summary"]
    assert [t.role_class for t in chosen] == ["main", "main-summary", "sub-agent-summary"]


def test_the_limit_keeps_the_first_drawn() -> None:
    whole = select(branching(), seed=5, execution="e", max_trajectories=0)
    for limit in (1, 2):
        assert select(branching(), seed=5, execution="e", max_trajectories=limit) == whole[:limit]


def test_tips_are_drawn_in_proportion_to_the_unmasked_targets_on_their_path() -> None:
    events: list[Event] = [
        *done("root", "", 0, [1, 2], [3] * 4),
        *done("long", "root", 6, [1], [5] * 86),
        *done("short", "root", 6, [1], [6] * 6),
    ]
    grown = grow(*events)
    first = Counter(select(grown, seed=seed, execution="e", max_trajectories=1)[0].call for seed in range(2_000))
    assert abs(first["long"] / 2_000 - 90 / 100) < 0.03


def test_a_shared_target_belongs_to_the_trajectory_that_was_drawn_first() -> None:
    grown = grow(*done("root", "", 0, [1], [3] * 4), *done("a", "root", 5, [1], [5]), *done("b", "root", 5, [1], [6]))
    first, second = select(grown, seed=1, execution="e", max_trajectories=0)
    assert (first.num_targets, second.num_targets) == (5, 1)
    assert second.num_tokens == 7


def test_the_draw_is_the_same_everywhere() -> None:
    """Bits of SHA-256, not of a library's generator: a new Python must not change a recorded batch."""
    assert draw(1, "g0001-0", 0) == 0xE94F1B4AAE6529A1


def test_longest_looks_at_the_path_alone_and_all_knows_no_limit() -> None:
    longest = select(branching(), seed=3, execution="e", max_trajectories=2, policy="longest")
    assert [(t.call, t.num_tokens) for t in longest] == [("child-summary", 508), ("summary", 118)]
    every = select(branching(), seed=3, execution="e", max_trajectories=1, policy="all")
    assert [t.call for t in every] == ["short", "summary", "child-summary"]
    assert every[1].num_targets == 110, "the root's targets went with the call that started first"


def test_all_goes_by_the_order_of_the_calls_and_drawn_by_the_class() -> None:
    grown = grow(*done("child", "", 0, [8], [9], role_class="sub-agent"), *done("main", "", 0, [1], [3]))
    for policy, order in (("all", ["child", "main"]), ("drawn", ["main", "child"])):
        chosen = select(grown, seed=1, execution="e", max_trajectories=0, policy=policy)  # type: ignore[arg-type]
        assert [t.call for t in chosen] == order


def test_of_two_that_are_as_long_the_earlier_goes_first() -> None:
    grown = grow(*done("root", "", 0, [1], [3] * 4), *done("a", "root", 5, [1], [5]), *done("b", "root", 5, [1], [6]))
    assert [t.call for t in select(grown, seed=1, execution="e", max_trajectories=0, policy="longest")] == ["a", "b"]


def test_branches_train_all_targets_on_their_path() -> None:
    once = select(branching(), seed=3, execution="e", max_trajectories=0)
    each = select(branching(), seed=3, execution="e", max_trajectories=0, mode="branches")
    assert [t.call for t in each] == [t.call for t in once]
    assert [t.num_targets for t in once] == [14, 110, 505]
    assert [t.num_targets for t in each] == [14, 114, 505], "the root's four are on two branches"


def test_what_ends_beyond_the_budget_has_no_branch_and_the_calls_before_it_do() -> None:
    budget = 97  # where `long` ends; its summary does not fit, nor does any of the sub-agent
    chosen = select(branching(), seed=3, execution="e", max_trajectories=0, max_tokens=budget)
    assert sorted((t.call, t.num_tokens) for t in chosen) == [("long", 97), ("short", 17)]
    assert sum(t.num_targets for t in chosen) == 4 + 90 + 10
    assert [t.call for t in select(branching(), seed=3, execution="e", max_trajectories=0, max_tokens=20)] == ["short"]
    assert select(branching(), seed=3, execution="e", max_trajectories=0, max_tokens=5) == ()


def test_tokens_of_a_call_beyond_the_budget_are_trained_where_a_shorter_branch_holds_them() -> None:
    grown = grow(*done("far", "", 0, [1], [3] * 50), *done("near", "far", 11, [2], [4] * 3))
    (trajectory,) = select(grown, seed=1, execution="e", max_trajectories=0, max_tokens=20)
    assert (trajectory.call, trajectory.num_tokens, trajectory.num_targets) == ("near", 15, 13)
