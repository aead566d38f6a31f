"""Pure. What a verifier wrote -> a grade: reward.txt, reward.json and ctrf.json of `/logs/verifier`.

Invariant: a score is a finite number in [0, 1] that the verifier gave, or there is none and the reason is in the
EvaluationError: a missing reward is not 0. With `num_tests` the score is what passed of that many, so tests that an
agent's program kept from being collected have failed. Direction: bytes -> Grade.
"""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

from gyre.errors import EvaluationError

REPORTS = ("reward.txt", "reward.json", "ctrf.json")
MAX_REPORT_BYTES = 4 << 20
_TOLERANCE = 1e-6


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    score: float
    """In [0, 1]; for a task of graded tests the fraction that passed."""
    parts: tuple[tuple[str, bool], ...]
    """(name of the graded test, whether it passed), in the task's order."""
    wall_s: float = 0.0


class _Test(msgspec.Struct):
    name: str
    status: str


class _Summary(msgspec.Struct):
    tests: int
    passed: int


class _Results(msgspec.Struct):
    summary: _Summary
    tests: tuple[_Test, ...] = ()


class _Ctrf(msgspec.Struct):
    results: _Results


def read_reports(reports: Mapping[str, bytes], num_tests: int = 0) -> Grade:
    """`reports`: by name, those of `REPORTS` that there are. Raises EvaluationError."""
    parts = _parts(reports["ctrf.json"]) if "ctrf.json" in reports else ()
    num_passed = sum(passed for _, passed in parts)
    if num_tests:
        if "ctrf.json" not in reports:
            raise EvaluationError(
                f"verifier: no ctrf.json, which tells of the {num_tests} tests: did test.sh run to its end?"
            )
        if len(parts) > num_tests:
            raise EvaluationError(f"verifier: ctrf.json: {len(parts)} tests, task.toml says {num_tests}")
        return Grade(score=num_passed / num_tests, parts=parts)
    reward = _reward(reports)
    if reward is None:
        if not parts:
            raise EvaluationError("verifier: no reward.txt, reward.json or ctrf.json: did test.sh run to its end?")
        reward = num_passed / len(parts)
    if not math.isfinite(reward) or not -_TOLERANCE <= reward <= 1 + _TOLERANCE:
        raise EvaluationError(f"verifier: reward {reward} is not in [0, 1]")
    return Grade(score=min(max(reward, 0.0), 1.0), parts=parts)


def _reward(reports: Mapping[str, bytes]) -> float | None:
    if "reward.json" in reports:
        return _from_json(reports["reward.json"])
    if "reward.txt" not in reports:
        return None
    text = reports["reward.txt"].decode("utf-8", "replace").strip()
    try:
        return float(text)
    except ValueError:
        raise EvaluationError(f"verifier: reward.txt: {text[:80]!r} is no number") from None


def _from_json(content: bytes) -> float:
    try:
        rewards: dict[str, Any] = msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EvaluationError(f"verifier: reward.json: {error}") from None
    name = "reward" if "reward" in rewards else next(iter(rewards), "") if len(rewards) == 1 else ""
    value = rewards.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        said = ", ".join(rewards) or "nothing"
        raise EvaluationError(
            f"verifier: reward.json: a number under `reward`, or one number alone; it has {said[:80]}"
        )
    return float(value)


def _parts(content: bytes) -> tuple[tuple[str, bool], ...]:
    try:
        results = msgspec.json.decode(content, type=_Ctrf).results
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EvaluationError(f"verifier: ctrf.json: {error}") from None
    if results.summary.passed > results.summary.tests:
        raise EvaluationError(f"verifier: ctrf.json: {results.summary.passed} of {results.summary.tests} passed")
    seen: Counter[str] = Counter()
    parts = []
    for test in results.tests:
        seen[test.name] += 1
        name = test.name if seen[test.name] == 1 else f"{test.name} #{seen[test.name]}"
        parts.append((name, test.status == "passed"))
    if sum(passed for _, passed in parts) != results.summary.passed:
        raise EvaluationError(
            f"verifier: ctrf.json: the summary says {results.summary.passed} passed, its tests do not"
        )
    return tuple(parts)
