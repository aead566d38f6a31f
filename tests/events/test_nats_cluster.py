"""Three servers: a run is not disturbed by the loss of one, and nothing that was acknowledged is lost."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gyre.events.cluster import start_cluster
from gyre.events.jetstream import JetStreamLog, connect
from gyre.events.log import open_writer
from gyre.events.streams import load_streams
from gyre.events.types import CallFailed
from tests.events.events import failed, ticking

pytestmark = pytest.mark.cluster
NUM_EVENTS = 3000


async def leader_of(log: JetStreamLog) -> str:
    async with asyncio.timeout(60):
        while not (name := (await log.wire.api(f"STREAM.INFO.{log.stream}", {}))["cluster"].get("leader")):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    return str(name)


def test_kill_9_of_the_leader_while_publishing_loses_and_doubles_nothing(tmp_path: Path) -> None:
    cluster = start_cluster(tmp_path / "cluster", sync="default")
    token = cluster.credential("owner")

    async def main() -> None:
        log = await connect(cluster.url, "r", create=load_streams().with_replicas(3), token=token)
        reader_log = await connect(cluster.url, "r", token=cluster.credential("reader"))
        writer = await open_writer(log, "w", ticking())
        killed = await leader_of(log)
        acked: dict[int, int] = {}
        third = asyncio.Event()
        seen: list[int] = []

        async def follow() -> None:
            async for recorded in reader_log.read(until=NUM_EVENTS):
                assert isinstance(recorded.event, CallFailed)
                seen.append(int(recorded.event.call.removeprefix("s-c")))

        async def append(number: int) -> None:
            acked[number] = await writer.append(failed(number))
            if len(acked) == NUM_EVENTS // 3:
                third.set()

        async with asyncio.timeout(120), asyncio.TaskGroup() as group:
            group.create_task(follow())
            for number in range(NUM_EVENTS * 2 // 3):
                group.create_task(append(number))
            await third.wait()
            # Acknowledgements may come many at once: there is new work under way when it dies.
            for number in range(NUM_EVENTS * 2 // 3, NUM_EVENTS):
                group.create_task(append(number))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert len(acked) < NUM_EVENTS
            cluster.servers[killed].kill()

        assert sorted(acked.values()) == list(range(1, NUM_EVENTS + 1))
        assert [acked[number] for number in seen] == list(range(1, NUM_EVENTS + 1))
        assert await leader_of(log) != killed
        cluster.servers[killed].start()
        assert await log.last_seq() == NUM_EVENTS
        await reader_log.close()
        await log.close()

    try:
        asyncio.run(main())
    finally:
        cluster.stop()


def test_the_command_says_what_to_write_and_stops_all_of_its_servers(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gyre.events.cluster", str(tmp_path / "cluster")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(4)]
        try:
            url = lines[1].partition("'")[2].partition("'")[0]
            token = subprocess.run(
                ["sh", "-c", f'{lines[3]} printf %s "$GYRE_NATS_TOKEN"'], capture_output=True, text=True, check=True
            ).stdout

            async def main() -> None:
                log = await connect(url, "r", create=load_streams().with_replicas(3), token=token)
                assert await (await open_writer(log, "w", ticking())).append(failed(1)) == 1
                await log.close()

            asyncio.run(main())
        finally:
            os.kill(child.pid, signal.SIGTERM)
    assert child.returncode == 0
    assert "num_replicas: 3" in lines[1]
