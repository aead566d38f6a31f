"""The log is disturbed in every way, once each where it is quick; `make chaos` does it hundreds of times."""

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.chaos import namespaces
from tests.chaos.log_driver import fault_of
from tests.chaos.log_faults import FAULTS
from tests.chaos.log_work import chains

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[2]
QUICK = ("kill server", "kill publisher", "kill projector in commit", "full disk", "lost acks", "slow consumer")


def play(faults: tuple[str, ...], root: Path) -> dict:
    """One seed each, in namespaces where they can be made; returns the driver's closing line."""
    seeds = [str(seed) for seed in range(len(FAULTS)) if fault_of(seed) in faults]
    command = [sys.executable, "-m", "tests.chaos.log_driver", *seeds, "--root", str(root)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    print(done.stdout)
    return msgspec.json.decode(done.stdout.splitlines()[-1])


def test_consecutive_seeds_go_through_all_faults_and_a_seed_repeats_its_work() -> None:
    assert {fault_of(seed) for seed in range(7, 7 + len(FAULTS))} == set(FAULTS)
    assert chains(7, 0) == chains(7, 0) != chains(8, 0)


def test_nothing_acknowledged_is_lost_and_nothing_is_there_twice(tmp_path: Path) -> None:
    closing = play(QUICK, tmp_path)
    assert closing["failed"] == []
    assert closing["seeds"] + len(closing["skipped"]) == len(QUICK)
    assert closing["acknowledged"] > 100 * closing["seeds"]
    assert closing["skipped"] == {} or namespaces.why_not()


def test_where_no_namespaces_can_be_made_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = tmp_path / "bin"
    nothing.mkdir()
    (nothing / "unshare").write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2\nexit 1\n")
    (nothing / "unshare").chmod(0o755)
    monkeypatch.setenv("PATH", str(nothing))
    namespaces.why_not.cache_clear()
    try:
        assert re.search("no namespaces here: unshare failed: Operation not permitted", namespaces.why_not())
        (reason,) = play(("full disk",), tmp_path / "logs")["skipped"]
        assert reason == "full disk: no namespaces here: unshare failed: Operation not permitted"
    finally:
        namespaces.why_not.cache_clear()
