"""`gyre bench`, small: the loop's figures hang together whatever the machine."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gyre.workers.bench_loop import bench_loop
from gyre.workers.cpu_meter import CpuMeter

BUSY = "import time\nend = time.process_time() + 0.6\nwhile time.process_time() < end: pass"
CHILD = f"import sys\n{BUSY}\nprint(flush=True)\nsys.stdin.read()"
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, '-c', {CHILD!r}], stdout=subprocess.PIPE)
child.stdout.readline()
{BUSY}
print(flush=True)
sys.stdin.read()
"""
"""Both stay until their standard input ends: of a process that has ended the last reading counts, whenever it was."""


def test_names_are_listed_and_an_unknown_one_is_refused() -> None:
    listed = subprocess.run([sys.executable, "-m", "gyre.cli", "bench"], capture_output=True, text=True, check=True)
    assert {"log", "loop"} <= {line.split()[0] for line in listed.stdout.splitlines()}
    refused = subprocess.run([sys.executable, "-m", "gyre.cli", "bench", "nope"], capture_output=True, text=True)
    assert refused.returncode == 1
    assert refused.stderr.startswith("gyre: gyre bench: no benchmark 'nope'; there are: log, loop, ")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_cpu_seconds_are_those_of_the_process_tree() -> None:
    command = (sys.executable, "-c", PARENT)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        meter = CpuMeter(process.pid)
        meter.start()
        process.stdout.readline()
        meter.stop()
        process.stdin.close()
    cpu = meter.between(0.0, time.time())
    assert 0.7 <= cpu["supervisor"] <= 2.5, "its own and its child's"
    assert cpu["machine"] > 0.7


@pytest.mark.stack
@pytest.mark.timeout(300)
def test_the_loop_is_measured(tmp_path: Path) -> None:
    made = [sys.executable, "-m", "gyre.cli", "policy", "init", str(tmp_path / "policy"), "--random"]
    subprocess.run(made, check=True, capture_output=True)
    figures = bench_loop(
        tmp_path / "policy", tmp_path, sandbox_cpu_s=lambda: 0.01, num_steps=1, num_groups=2, num_executions=2
    )
    total = figures["gyre_idle_wall"].reference
    assert total is not None
    assert total > 0
    walls = sum(figures[f"wall_{name}"].value for name in ("training", "engine", "harness", "scoring"))
    assert walls + figures["gyre_idle_wall"].value == pytest.approx(total, rel=0.01)
    assert figures["executions"].value == 4
    assert figures["gyre_added_wall"].goal == "ratio <= 0.1"
    assert 0 < figures["gyre_cpu"].value <= (figures["gyre_cpu"].reference or 0)
    cores = os.cpu_count() or 1  # the whole machine is measured
    assert figures["machine_busy"].value <= 1.2 * total * cores
    assert json.loads((tmp_path / "loop/summary.json").read_text())["steps"] == 1
