"""A whole run on three servers, of which the one that leads the log is killed: the run does not notice."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gyre.errors import StreamError
from gyre.events.cluster import Cluster, start_cluster
from gyre.events.jetstream import JetStreamLog, connect
from gyre.events.types import ExecutionFinished
from tests.events.test_nats_cluster import leader_of

pytestmark = [pytest.mark.stack, pytest.mark.cluster, pytest.mark.timeout(400)]

CONFIG = """
seed: 3
harness: {{name: reference, deadline_s: 60, max_turns: 2, max_concurrent: 2}}
policy: {{path: policy, warm_start: false}}
sampling: {{max_tokens: 12}}
pipeline: {{num_steps: 1, groups_per_step: 1, executions_per_group: 2}}
trainer: {{weight_decay: 0.1}}
evaluation: {{num_tasks: 1, temperatures: [0.0]}}
log: {{min_free_gb: 0, url: "{url}", num_replicas: 3}}
"""


def test_a_run_on_three_servers_survives_the_one_that_leads(tmp_path: Path) -> None:
    cluster = start_cluster(tmp_path / "cluster")
    try:
        _run_and_verify(cluster, tmp_path)
    finally:
        cluster.stop()


def _run_and_verify(cluster: Cluster, directory: Path) -> None:
    (directory / "run.yaml").write_text(CONFIG.format(url=cluster.url))
    env = os.environ | {"GYRE_NATS_TOKEN": cluster.credential("owner")}
    output = (directory / "output.txt").open("w+")

    def gyre(*args: str) -> "subprocess.Popen[bytes]":
        argv = [sys.executable, "-m", "gyre.cli", *args]
        return subprocess.Popen(argv, cwd=directory, env=env, stdout=output, stderr=output)

    def printed() -> str:
        return (directory / "output.txt").read_text()[-3000:]

    with output:
        running = gyre("run", "run.yaml", "--dir", "runs/r")
        try:
            killed = asyncio.run(_kill_the_leader(cluster, directory / "runs/r/run.json", running))
            assert running.wait(300) == 0, printed()
        finally:
            running.kill()
        assert gyre("replay", "runs/r", "--verify").wait(200) == 0, printed()
        assert gyre("log", "verify", "runs/r").wait(200) == 0, printed()
    assert cluster.servers[killed].poll() is not None
    summary = json.loads((directory / "runs/r/summary.json").read_text())
    assert (summary["state"], summary["steps"], summary["gaps"]) == ("completed", 1, [])
    assert summary["executions"]["scored"] == 2 + 2  # the step's, and the held-out task before and after it
    assert (summary["calls"]["cut"], summary["calls"]["failed"], summary["executions"]["dropped"]) == (0, 0, {})


async def _kill_the_leader(cluster: Cluster, address: Path, running: "subprocess.Popen[bytes]") -> str:
    """When the first execution has finished: others, the training step and a switch are still to come."""
    while not address.exists():
        assert running.poll() is None
        await asyncio.sleep(0.1)
    run = json.loads(address.read_text())["run"]
    async with asyncio.timeout(200):
        log = await _log_of(cluster, run)
        async for recorded in log.read():
            if isinstance(recorded.event, ExecutionFinished):
                break
        name = await leader_of(log)
        cluster.servers[name].kill()
        await log.close()
    return name


async def _log_of(cluster: Cluster, run: str) -> JetStreamLog:
    while True:
        try:
            return await connect(cluster.url, run, token=cluster.credential("owner"))
        except StreamError:
            await asyncio.sleep(0.2)
