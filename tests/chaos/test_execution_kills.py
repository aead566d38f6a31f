"""`kill -9` of dispatcher, harness or evaluator, at seeded moments: `make chaos` has more seeds."""

from pathlib import Path

import pytest

from gyre.agents.sandbox import check_sandbox
from tests.chaos.execution_kills import KINDS, kill_executions

pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(bool(check_sandbox()), reason=check_sandbox())]


@pytest.mark.parametrize("kind", KINDS)
def test_an_execution_ends_once_and_says_how(tmp_path: Path, kind: str) -> None:
    outcome = kill_executions(kind, 2, tmp_path / kind, num_kills=2)
    assert outcome.faults == []
    assert outcome.num_kills >= 1
