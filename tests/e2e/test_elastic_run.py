"""A whole run of two cells with a KV store: cells change role while contexts live, and their KV moves along."""

import json
from pathlib import Path

import pytest
from test_run import gyre, processes_of, rows

from gyre.agents.process import base_python

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

TURNS, PAUSES_S = 5, (0.1, 0.6)
"""Executions that are short, and some that are long: in the pauses their contexts wait at their cell."""
HARNESS = (Path(__file__).parents[1] / "chaos/lucky_harness.py").read_text()
CONFIG = {
    "seed": 3,
    "harness": {"name": "command", "deadline_s": 60, "max_concurrent": 4},
    "policy": {"path": "policy", "warm_start": False},
    "sampling": {"max_tokens": 16},
    "cells": {"count": 2},
    "engine": {"capacity": 8, "max_total_tokens": 8192, "kv_store": "embedded"},
    "pipeline": {"num_steps": 3, "groups_per_step": 2, "executions_per_group": 2, "lookahead": 1, "max_staleness": 2},
    "trainer": {"weight_decay": 0.1, "max_tokens_per_microstep": 256, "num_threads": 1},
    "log": {"min_free_gb": 0},
}


def test_the_kv_of_live_contexts_moves_in_a_whole_run(tmp_path: Path) -> None:
    command = [base_python(), "-I", "-S", "-c", HARNESS, "{base_url}", "{instruction}", str(TURNS), *map(str, PAUSES_S)]
    config = CONFIG | {"harness": {**CONFIG["harness"], "command": command}}  # type: ignore[dict-item]
    (tmp_path / "elastic.yaml").write_text(json.dumps(config))
    gyre("run", "elastic.yaml", "--dir", "runs/kv", cwd=tmp_path)
    summary = json.loads((tmp_path / "runs/kv/summary.json").read_text())
    calls = summary["calls"]
    assert calls["completed"] == calls["started"] > 0 and calls["cut"] == calls["failed"] == 0
    assert summary["executions"]["dropped"] == {} and summary["switches_rolled_back"] == 0
    moved = rows(tmp_path, "runs/kv", "select * from kv_moves where target is not null order by seq")
    assert moved and all(row["num_tokens"] > 0 and row["num_bytes"] > 0 and row["digest"] for row in moved), moved
    again = """
        select m.num_tokens, c.num_cached_tokens from kv_moves m
        join calls before on before.session = m.session and before.started_seq < m.seq
        join calls c on c.session = m.session and c.started_seq > m.seq and c.cell = m.target
        where c.version_min = before.version_max
    """
    used = rows(tmp_path, "runs/kv", again)
    assert any(row["num_cached_tokens"] >= row["num_tokens"] for row in used), f"computed again: {used}"
    (served,) = rows(tmp_path, "runs/kv", "select max(version_max) as v from calls where cell = 'c1'")
    assert int(str(served["v"])) >= 1, "it took no version in place"
    assert gyre("replay", "runs/kv", "--verify", cwd=tmp_path).returncode == 0
    assert processes_of(tmp_path) == []
