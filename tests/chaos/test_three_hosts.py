"""A cluster on three hosts, which are network namespaces: the log's whole contract, and the loss of one of them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos import namespaces
from tests.chaos.test_log_chaos import ROOT, play

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not()),
]


def test_the_contract_of_the_log_holds() -> None:
    pytest_there = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "cluster"]
    command = namespaces.command_inside([*pytest_there, "tests/events/test_log_contract.py"])
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_one_of_them_killed_or_cut_off_costs_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    closing = play(("kill leader", "partition"), tmp_path)
    assert closing["failed"] == []
    assert closing["faults"] == {"kill leader": 1, "partition": 1}
