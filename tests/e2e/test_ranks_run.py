"""A whole run whose cell trains with two ranks on gloo; one of them is killed on the way."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from gyre.config import load_config
from gyre.events.access import open_log
from gyre.events.codec import Recorded
from gyre.events.run_dir import RunDir
from gyre.events.types import ProcessExited, StepCompleted
from tests.chaos.driver import make_config
from tests.chaos.invariants import broken

pytestmark = [
    pytest.mark.stack,
    pytest.mark.timeout(600),
    pytest.mark.skipif("GYRE_LONG" not in os.environ, reason="takes a minute: make chaos-hosts"),
]
RUN_S = 300


def ranks_of(run: psutil.Popen) -> list[psutil.Process]:
    """torchrun's children: what it starts itself has their command line, too."""
    return [p for p in run.children(recursive=True) if "trainer" in p.cmdline() and "RANK" in p.environ()]


async def events_of(run_dir: RunDir) -> list[Recorded]:
    async with open_log(run_dir) as (log, _):
        return [recorded async for recorded in log.read(1, until=await log.last_seq())]


def test_a_cell_of_two_ranks_trains_goes_on_after_a_dead_one_and_replays(tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    gyre = [sys.executable, "-m", "gyre.cli"]
    subprocess.run([*gyre, "policy", "init", str(policy), "--random"], check=True, capture_output=True, timeout=200)
    settings = make_config(policy) | {"cells": {"ranks_per_host": 2}}
    settings["pipeline"] |= {"num_steps": 2}
    settings["trainer"] |= {"num_threads": 1}
    config_path = tmp_path / "ranks.yaml"
    config_path.write_bytes(msgspec.yaml.encode(settings))
    run_dir = RunDir(tmp_path / "run")
    run = psutil.Popen([*gyre, "run", str(config_path), "--dir", str(run_dir.path)], stdout=subprocess.DEVNULL)
    try:
        give_up = time.monotonic() + RUN_S
        while not (run_dir.checkpoints / "step-1").exists():  # the second step is still to come
            assert run.poll() is None
            assert time.monotonic() < give_up
            time.sleep(0.05)
        ranks = ranks_of(run)
        assert len(ranks) == 2
        follower = next(rank for rank in ranks if rank.environ()["RANK"] == "1")
        follower.kill()
        assert not psutil.wait_procs(ranks, timeout=60)[1]
        assert run.wait(RUN_S) == 0
    finally:
        if run.poll() is None:
            run.terminate()
            run.wait(60)
    events = asyncio.run(events_of(run_dir))
    assert list(broken(events, load_config(config_path.read_text()), {})) == []
    steps = [r.event for r in events if isinstance(r.event, StepCompleted)]
    assert len(steps) == 2
    assert all(step.grad_norm > 0 for step in steps)
    deaths = [r.event for r in events if isinstance(r.event, ProcessExited)]
    assert [(death.process, death.restarted) for death in deaths] == [("c0-trainer", True)]
    command = [*gyre, "replay", str(run_dir.path), "--verify", "--train"]
    replay = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert replay.returncode == 0, replay.stdout + replay.stderr[-3000:]
    assert "same weights as recorded: 2 steps" in replay.stdout
