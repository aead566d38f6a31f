"""`gyre bench executions`, small: every deadline is kept, and nothing is left of what it stopped."""

import subprocess
import sys
from pathlib import Path

import pytest

from gyre.agents.sandbox import check_sandbox
from gyre.workers.bench_executions import bench_executions

NUM = 6


@pytest.mark.stack
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(check_sandbox()), reason=check_sandbox())
def test_executions_at_once_end_at_their_deadlines_and_leave_nothing(tmp_path: Path) -> None:
    made = [sys.executable, "-m", "gyre.cli", "policy", "init", str(tmp_path / "policy"), "--random"]
    subprocess.run(made, check=True, capture_output=True)
    figures = bench_executions(tmp_path / "policy", tmp_path, num=NUM, deadline_s=2.0, engine_s=0.3)
    counts = {name: found.value for name, found in figures.items() if found.unit in ("executions", "paths")}
    assert counts == {
        "executions_at_once": counts["executions_at_once"],
        "timed_out_and_scored": NUM,
        "timed_out_and_discarded": NUM,
        "leftover_paths": 0,
    }
    assert 1 <= counts["executions_at_once"] <= NUM, "on a busy machine the first may end before the last begins"
    assert figures["orphan_processes"].value == 0
    assert figures["orphan_processes"].holds
    assert figures["harness_deadline_late_max"].value >= 0, "a deadline never comes early"
    assert figures["overall_deadline_late_max"].value >= 0
