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
    assert any("5 better, 0 worse" in line for line in comparison_lines(found))


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
