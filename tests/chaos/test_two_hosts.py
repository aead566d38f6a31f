"""A run whose satellite is on another host and knows only the log's address."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.test_log_chaos import ROOT

pytestmark = [pytest.mark.stack, pytest.mark.timeout(500)]


def play(tmp_path: Path, *flags: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.chaos.two_hosts", str(tmp_path), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=460)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_satellite_on_another_host_takes_part_from_the_address_of_the_log_alone(tmp_path: Path) -> None:
    told = play(tmp_path)
    assert told["faults"] == []
    assert told["codes"] == [0, 0], "both end with the run"
    addresses = {cell["cell"]: cell["engine_url"].split("//")[1].split(":")[0] for cell in told["cells"]}
    assert addresses.keys() == {"c0", "c1"}
    assert len(set(addresses.values())) == 2 and addresses["c1"] != "127.0.0.1"
    assert "c1" in {row["cell"] for row in told["calls"]}, "it served before the core did"
    took_part = {row["cell"] for row in (*told["calls"], *told["microsteps"])}
    assert took_part == {"c0", "c1"}


@pytest.mark.skipif("GYRE_LONG" not in os.environ, reason="takes two minutes: make chaos-hosts")
def test_a_host_that_disappears_is_lost_and_joins_again_when_it_is_back(tmp_path: Path) -> None:
    told = play(tmp_path, "--cut")
    assert told["faults"] == []
    assert told["codes"] == [0, 0]
    assert told["lost"] and told["lost"][0].startswith("no sign of life for ")
    assert told["joined"] >= 2
    assert told["not_completed"] == 0, "no call was cut or failed by it"
    assert all(row["num"] > 0 for row in told["calls"]) and len(told["calls"]) == 2
