"""Trees as lines: what is expected of each harness, and how what was seen is told apart from it."""

from pathlib import Path

import pytest

from gyre.agents import harness_check
from gyre.agents.expected_trees import compare, describe_tree, forks, parse_expected
from gyre.agents.harness_check import CONTEXTS, read_expected
from gyre.agents.harnesses import RECIPES
from gyre.agents.scenarios import SCENARIOS
from gyre.errors import ConfigError
from gyre.events.types import (
    BranchForked,
    CallStarted,
    CallSuperseded,
    ContextCompacted,
    Event,
    RoleClass,
    SubAgentSpawned,
)

PLACES = ("root", "continue", "retry", "edit", "drift", "sub-agent of", "compaction of")


def started(call: str, role_class: RoleClass, rule: str = "root", base: str = "") -> CallStarted:
    return CallStarted(
        execution="x", session="s", call=call, base=base, shared=0, context=b"", role_class=role_class,
        rule=rule, marks=(), temperature=1.0, top_p=1.0, max_tokens=8, cell="c0",
    )  # fmt: skip


WHERE = {"execution": "x", "session": "s"}
EVENTS: tuple[Event, ...] = (
    started("a", "main"),
    started("b", "sub-agent"),
    SubAgentSpawned(**WHERE, call="b", parent_call="a"),
    started("c", "main", "fork", "a"),
    BranchForked(**WHERE, call="c", base="a", shared=0, kind="retry"),
    started("d", "main-summary", "continue", "c"),
    started("e", "main"),
    ContextCompacted(**WHERE, call="e", summary_call="d"),
    CallSuperseded(**WHERE, call="a", by="c"),
)
LINES = (
    "main 0 root (superseded)",
    "main 1 retry main 0",
    "main 2 compaction of main-summary 0",
    "main-summary 0 continue main 1",
    "sub-agent 0 sub-agent of main 0",
)


def test_lines_name_calls_by_role_class_and_number() -> None:
    assert describe_tree(EVENTS) == LINES
    assert forks(LINES) == ("main 1 retry main 0",)


def test_calls_that_overlap_make_the_same_lines_whichever_came_first() -> None:
    spawned = SubAgentSpawned(**WHERE, call="b", parent_call="a")
    one, two = started("b", "sub-agent"), started("c", "main", "continue", "a")
    assert describe_tree([EVENTS[0], one, spawned, two]) == describe_tree([EVENTS[0], two, one, spawned])


def test_what_differs_is_told_line_by_line() -> None:
    assert compare(LINES, LINES) == ()
    seen = (*LINES[:1], "main 1 edit main 0", *LINES[2:], "main 3 continue main 2")
    assert compare(LINES, seen) == ("- main 1 retry main 0", "+ main 1 edit main 0", "+ main 3 continue main 2")


def test_a_file_of_expected_trees() -> None:
    text = "# A harness\n\n[main]\nmain 0   root\n\n# why\n[cut]\nnot offered: it does not stream\n"
    parsed = parse_expected(text, "a.txt")
    assert parsed["main"].lines == ("main 0 root",)
    assert (parsed["cut"].lines, parsed["cut"].not_offered) == ((), "it does not stream")
    with pytest.raises(ConfigError, match=r"a\.txt: line 1: 'main 0 root' stands before any \[scenario\]"):
        parse_expected("main 0 root\n", "a.txt")


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "command"])
def test_every_harness_has_a_tree_or_a_reason_for_every_scenario(name: str) -> None:
    expected = read_expected(name)
    assert list(expected) == list(SCENARIOS)
    for scenario, one in expected.items():
        assert bool(one.lines) != bool(one.not_offered), scenario
        known: list[str] = []
        for line in one.lines:
            role_class, number, *placed = line.split()
            known.append(f"{role_class} {number}")
            place = next(place for place in PLACES if " ".join(placed).startswith(place))
            source = " ".join(placed).removeprefix(place).removesuffix("(superseded)").strip()
            assert source in {"", *(" ".join(other.split()[:2]) for other in one.lines)}, line
        assert len(set(known)) == len(known)
    assert (name in CONTEXTS) == bool(expected["compaction"].lines)


def test_no_file_of_expected_trees_is_without_its_harness() -> None:
    folder = Path(harness_check.__file__).parent / "expected"
    assert {path.stem for path in folder.iterdir()} == set(RECIPES) - {"command"}


def test_the_table_of_what_was_seen_is_of_the_versions_that_are_installed() -> None:
    table = (Path(harness_check.__file__).parents[2] / "docs/harnesses.md").read_text()
    for recipe in RECIPES.values():
        assert recipe.version in table, f"{recipe.name}: check version {recipe.version} and say what it does"
    for scenario in SCENARIOS:
        assert f"| `{scenario}`" in table
