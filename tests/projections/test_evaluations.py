"""Rounds of held-out executions: what counts, in which unit, and when two can be compared."""

from typing import Any

import pytest

from gyre.errors import ConfigError
from gyre.events.types import ExecutionScored, GroupDispatched, Part
from gyre.projections.evaluations import Evaluation, compare, comparison_lines, evaluation_lines


def evaluation(scores: dict[str, list[float]], *, num_slots: int = 0, digest: str = "d") -> Evaluation:
    found = Evaluation()
    for index, (task, values) in enumerate(scores.items()):
        found.dispatch(
            GroupDispatched(
                group=f"e{index:05d}", index=index, purpose="eval", task=task, task_digest=digest, task_index=index,
                num_slots=num_slots or len(values), policy_version=0, temperature=1.0,
            )
        )  # fmt: skip
        for slot, value in enumerate(values):
            parts = (Part(name="1-write-1", passed=value > 0), Part(name="1-write-2", passed=value == 1.0))
            found.score(task, ExecutionScored(execution=f"e{index}-{slot}", score=value, parts=parts, wall_s=0.1))
    return found


def test_tasks_are_the_unit_however_many_samples_they_have() -> None:
    figures = evaluation({"a": [1.0, 1.0, 1.0], "b": [0.0]}).figures()
    assert figures["score"] == 0.5
    assert figures["tasks"] == 2
    assert figures["executions"] == 4
    assert figures["score_interval"] == [0.0945, 0.9055], "Wilson, 1 of 2"


def test_pass_at_k_counts_whole_passes_and_needs_k_samples() -> None:
    figures = evaluation({"a": [1.0, 0.5, 0.5, 0.5], "b": [0.5] * 4, "c": [1.0]}, num_slots=4).figures(3)
    assert list(figures["pass_at"]) == ["1", "2", "3", "4"]
    assert figures["pass_at"]["1"]["mean"] == pytest.approx((0.25 + 0 + 1) / 3, abs=1e-4)
    assert figures["pass_at"]["4"]["mean"] == 0.5, "only a and b have four samples"
    assert figures["missing"] == 3
    assert figures["goals"] == {"write": {"passed": 2, "of": 9}}


def test_a_goal_is_reached_when_all_its_parts_are_and_other_parts_are_of_none() -> None:
    found = Evaluation()
    for parts in ({"1-write-a": False, "1-write-b": True, "2-write-a": True, "2-read": True, "tests": False},):
        named = tuple(Part(name=name, passed=passed) for name, passed in parts.items())
        found.score("t", ExecutionScored(execution="e", score=0.5, parts=named, wall_s=0.1))
    assert found.goals == {"write": [False, True]}
    assert found.mean == 0.5 and Evaluation().mean is None


def test_nothing_scored_is_no_score() -> None:
    figures = evaluation({"a": []}, num_slots=1).figures()
    assert figures["score"] is None
    assert figures["missing"] == 1
    assert evaluation_lines(figures) == ["no execution was scored"]


def test_a_comparison_is_paired_and_names_what_changed() -> None:
    scores = {f"t{i}": [i % 2] for i in range(20)}
    better: dict[str, Any] = scores | {f"t{i}": [1.0] for i in range(0, 20, 4)}
    found = compare(evaluation(scores), evaluation(better))
    assert (found["before"], found["after"], found["better"], found["worse"]) == (0.5, 0.75, 5, 0)
    assert found["difference"]["mean"] == 0.25
    assert 0 < found["difference"]["interval"][0] < 0.25 < found["difference"]["interval"][1]
    assert {item["task"] for item in found["changed"]} == {"t0", "t4", "t8", "t12", "t16"}
    lines = comparison_lines(found)
    assert lines[0] == "score       0.500 -> 0.750 over 20 tasks of both"
    assert lines[1].endswith("(0 is outside)") and lines[2] == "tasks       5 better, 0 worse"
    assert [line.split() for line in lines[3:]] == [[t["task"], "0.00", "->", "1.00"] for t in found["changed"]]


def test_a_comparison_lists_what_changed_most_and_says_how_much_more_did() -> None:
    before = {f"t{i:02}": [0.5] for i in range(23)}
    after: dict[str, Any] = before | {f"t{i:02}": [0.5 + 0.01 * (i - 11)] for i in range(23)}
    for num, rest in ((20, []), (21, []), (22, ["and", "1", "more:", "--json"])):
        some = [list(scores)[:num] for scores in (before, after)]
        found = compare(*(evaluation({t: s[t] for t in names}) for s, names in zip((before, after), some, strict=True)))
        lines = comparison_lines(found)
        assert "outside" not in lines[1], "some lost as much as others gained"
        assert lines[3].split()[0] == f"t{num - 1:02}", "the largest gain first"
        assert (lines[23:] or [""])[0].split() == rest


def test_other_tasks_are_refused() -> None:
    one = evaluation({"a": [1.0], "b": [0.0]})
    with pytest.raises(ConfigError, match="1 only in the first, 0 only in the second"):
        compare(one, evaluation({"a": [1.0]}))
    with pytest.raises(ConfigError, match="same ids, other content"):
        compare(one, evaluation({"a": [1.0], "b": [0.0]}, digest="other"))
    with pytest.raises(ConfigError, match="interrupted"):
        compare(evaluation({"a": []}, num_slots=1), evaluation({"a": [1.0]}))


def test_lines_say_score_interval_and_every_k() -> None:
    lines = evaluation_lines(evaluation({"a": [1.0, 0.0], "b": [1.0, 1.0]}, num_slots=3).figures())
    assert lines[0].startswith("score     0.750  95% [")
    assert [line.split()[0] for line in lines] == ["score", "pass@1", "pass@2", "missing", "goals"]
    whole = Evaluation()
    whole.score("t", ExecutionScored(execution="e", score=1.0, parts=(), wall_s=0.1))
    whole.num_slots = 1
    assert [line.split()[0] for line in evaluation_lines(whole.figures())] == ["score", "pass@1"]
