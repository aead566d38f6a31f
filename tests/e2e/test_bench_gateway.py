"""`gyre bench gateway`, small and without the peer: its figures hang together anywhere, and it tidies up."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from gyre.workers.bench_gateway import Sizes, bench_gateway
from gyre.workers.tiny_policy import init_policy

pytestmark = pytest.mark.timeout(240)


def test_the_gateway_and_many_sessions_are_measured(tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    init_policy(policy, 1, num_demonstrations=300)
    sizes = Sizes(histories={"1k": (1000, 8), "100k": (4000, 8)}, num_sessions=6, session_calls=2, engine_s=0.05)
    found = bench_gateway(policy, tmp_path, sizes, peer=False)
    assert found["sessions"].value == 6
    assert found["sessions_calls_a_second"].value > 0
    assert {name for name, value in found.items() if value.goal} == {"added_p50_100k", "added_p99_100k", "sessions"}
    assert found["engine_alone_p50_1k"].value > 0 and found["cpu_of_a_call_1k"].value >= 0
    assert found["added_p99_1k"].value >= found["added_p50_1k"].value
    # Six prompts, twelve replies and as many results of 400 tokens.
    assert 400 < found["tokens_of_a_session"].value < 1500
    assert not list(tmp_path.glob("peer*"))


# Sessions that take minutes, so that it is in the middle of them when it is told to end.
LONG = """
import sys
from pathlib import Path
from gyre.workers import benches
from gyre.workers.bench_gateway import Sizes, bench_gateway
sizes = Sizes(histories={"1k": (1000, 2)}, num_sessions=4, session_calls=9, engine_s=30.0)
benches.BENCHES["gateway"] = benches.Bench(
    about="", run=lambda needs: bench_gateway(needs.policy, needs.folder, sizes, peer=False, say=print)
)
sys.stdout.reconfigure(line_buffering=True)
benches.run_bench("gateway", policy=Path(sys.argv[1]), sandbox_cpu_s=float, installed=bool, rebuild=None)
"""


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_it_no_process_is_left(tmp_path: Path, number: signal.Signals) -> None:
    policy = tmp_path / "policy"
    init_policy(policy, 1, num_demonstrations=300)
    # What is killed cannot remove its scratch folder.
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    bench = subprocess.Popen((sys.executable, "-c", LONG, str(policy)), stdout=subprocess.PIPE, text=True, env=env)
    assert bench.stdout is not None
    assert bench.stdout.readline() == "one session, 1k tokens\n"
    children = psutil.Process(bench.pid).children(recursive=True)
    assert len(children) >= 3, "engine, gateway, the log's server"
    bench.send_signal(number)
    assert bench.wait(120) != 0
    deadline_s = time.monotonic() + 120
    while (left := [child for child in children if _runs(child)]) and time.monotonic() < deadline_s:
        time.sleep(0.05)  # those of a process that was killed are ended by the kernel, one after the other
    assert not left
