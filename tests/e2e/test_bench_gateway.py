"""`gyre bench gateway`, small and without the peer: its figures hang together whatever the machine."""

from pathlib import Path

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
    assert {name for name, value in found.items() if value.goal} == {"added_p50_100k", "added_p99_100k"}
    assert found["engine_alone_p50_1k"].value > 0 and found["cpu_of_a_call_1k"].value >= 0
    assert found["added_p99_1k"].value >= found["added_p50_1k"].value
    # Six prompts, twelve replies and as many results of 400 tokens.
    assert 400 < found["tokens_of_a_session"].value < 1500
    assert not list(tmp_path.glob("peer*"))
