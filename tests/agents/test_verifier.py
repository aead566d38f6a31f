"""What a verifier wrote becomes a grade, or a reason why there is none; never a score that nobody gave."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.agents.verifier import REPORTS, read_reports
from gyre.errors import EvaluationError


def ctrf(tests: list[tuple[str, str]], **summary: int) -> bytes:
    passed = sum(status == "passed" for _, status in tests)
    counted = {"tests": len(tests), "passed": passed} | summary
    return json.dumps(
        {"results": {"summary": counted, "tests": [{"name": n, "status": s, "duration": 1} for n, s in tests]}}
    ).encode()


def test_parts_come_from_the_report_and_the_score_from_the_reward() -> None:
    grade = read_reports({"reward.txt": b" 0.25\n", "ctrf.json": ctrf([("a", "passed"), ("b", "failed")])})
    assert grade.score == 0.25
    assert grade.parts == (("a", True), ("b", False))


@pytest.mark.parametrize(("text", "score"), [(b"1.0000001", 1.0), (b"-0.0000001", 0.0)])
def test_a_reward_that_arithmetic_took_a_little_out_of_bounds_is_at_the_bound(text: bytes, score: float) -> None:
    assert read_reports({"reward.txt": text}).score == score


def test_without_a_reward_what_passed_counts() -> None:
    assert read_reports({"ctrf.json": ctrf([("a", "passed"), ("a", "skipped"), ("b", "other")])}).score == 1 / 3


def test_a_test_that_was_kept_from_running_has_failed() -> None:
    assert read_reports({"ctrf.json": ctrf([("a", "passed")])}, num_tests=4).score == 0.25
    assert read_reports({"ctrf.json": ctrf([])}, num_tests=4).score == 0.0
    assert read_reports({"ctrf.json": ctrf([("a", "passed"), ("b", "passed")])}, num_tests=2).score == 1.0


@pytest.mark.parametrize(("content", "score"), [(b'{"reward": 0.5, "style": 1}', 0.5), (b'{"correct": 1}', 1.0)])
def test_json_rewards(content: bytes, score: float) -> None:
    assert read_reports({"reward.json": content}).score == score


WRONG = {
    "nothing at all": ({}, 0, "no reward.txt"),
    "an empty reward": ({"reward.txt": b""}, 0, "no number"),
    "rubbish": ({"reward.txt": b"\xff\xfe all good"}, 0, "no number"),
    "not a number": ({"reward.txt": b"nan"}, 0, "not in"),
    "infinite": ({"reward.txt": b"inf"}, 0, "not in"),
    "negative": ({"reward.txt": b"-0.5"}, 0, "not in"),
    "more than all": ({"reward.txt": b"1.5"}, 0, "not in"),
    "json that is none": ({"reward.json": b"{"}, 0, "reward.json"),
    "json that is no object": ({"reward.json": b"0.5"}, 0, "reward.json"),
    "json without a reward": ({"reward.json": b'{"a": 1, "b": 2}'}, 0, "it has a, b"),
    "a reward of true": ({"reward.json": b'{"reward": true}'}, 0, "a number"),
    "json that says NaN": ({"reward.json": b'{"reward": NaN}'}, 0, "reward.json"),
    "more passed than there are": ({"ctrf.json": ctrf([("a", "passed")], passed=3)}, 0, "3 of 1 passed"),
    "a summary that its tests deny": ({"ctrf.json": ctrf([("a", "failed")], passed=1)}, 0, "its tests do not"),
    "less than nothing passed": ({"ctrf.json": ctrf([("a", "failed")], passed=-1)}, 0, "its tests do not"),
    "more tests than the task has": ({"ctrf.json": ctrf([("a", "passed"), ("b", "passed")])}, 1, "task.toml says 1"),
    "a report that is none": ({"ctrf.json": b"[]"}, 0, "ctrf.json"),
    "no report of the tests": ({"reward.txt": b"1"}, 3, "no ctrf.json"),
}


@pytest.mark.parametrize("name", WRONG)
def test_there_is_no_score_and_the_reason_is_named(name: str) -> None:
    reports, num_tests, reason = WRONG[name]
    with pytest.raises(EvaluationError, match=reason):
        read_reports(reports, num_tests)


@given(st.dictionaries(st.sampled_from(REPORTS), st.binary(max_size=60)), st.integers(0, 3))
def test_any_bytes_give_a_score_in_bounds_or_a_reason(reports: dict[str, bytes], num_tests: int) -> None:
    try:
        score = read_reports(reports, num_tests).score
    except EvaluationError:
        return
    assert math.isfinite(score)
    assert 0 <= score <= 1
