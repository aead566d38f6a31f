"""Whoever knows NATS and the documents can read a run: the example has a stock client and nothing of gyre."""

import asyncio
import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
import pytest

from gyre.events.codec import Recorded
from gyre.events.jetstream import connect
from gyre.events.log import Item, Writer
from gyre.events.server import Server, start_server
from gyre.events.streams import load_streams
from gyre.events.types import CallCompleted, CallCut, Event, ExecutionDropped, RunFinished
from tests.events.events import example, started, ticking

EXAMPLE = Path(__file__).parents[2] / "examples" / "attach.py"
LARGE = bytes(range(256)) * 4 * 1200
"""More than a message may hold, and than a chunk of a blob."""


def completed(cls: type[CallCompleted] | type[CallCut], sampled: bytes) -> dict[str, Any]:
    fields = {name: getattr(example(cls), name) for name in cls.__struct_fields__}
    return fields | {"execution": "g0001-0", "session": "s", "call": "s-c1", "sampled": sampled}


EVENTS: tuple[Event, ...] = (
    started(LARGE),
    CallCompleted(**completed(CallCompleted, bytes(400))),
    started(bytes(300_000)),
    CallCut(**completed(CallCut, bytes(80))),
    ExecutionDropped(execution="g0001-0", reason="interrupted", final=False),
    RunFinished(reason="completed"),
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = start_server(tmp_path / "nats", sync="default")
    yield server
    server.stop()


async def write(server: Server) -> list[Recorded]:
    """Some events, one of them twice."""
    log = await connect(server.url, "r", token=server.token, create=load_streams())
    try:
        writer = Writer(log, "gateway", 1, ticking())
        for event in EVENTS[:-1]:
            await writer.append(event)
        (again,) = [stored async for stored in log.stored(2, until=2)]
        await log.publish_all((Item(again.subject, again.body),))
        await writer.append(EVENTS[-1])
        return [recorded async for recorded in log.read(until=await log.last_seq())]
    finally:
        await log.close()


async def read(server: Server, num: int) -> list[tuple[int, dict[str, Any], bytes]]:
    user, _, password = server.credential("reader").partition(":")
    connection = await nats.connect(server.url, user=user, password=password)
    try:
        found = []
        async for item in runpy.run_path(str(EXAMPLE))["events"](connection, "r"):
            found.append(item)
            if len(found) == num:
                break
        return found
    finally:
        await connection.close()


def test_a_stock_client_reads_what_gyre_reads(server: Server) -> None:
    async def play() -> None:
        recorded = await write(server)
        assert [r.event for r in recorded] == list(EVENTS)
        found = await read(server, len(recorded))
        assert [seq for seq, _, _ in found] == [r.seq for r in recorded] == [1, 2, 3, 4, 5, 7]
        assert [header["id"] for _, header, _ in found] == [r.envelope.id for r in recorded]
        assert found[0][2] == LARGE
        assert found[2][2] == bytes(300_000)
        assert found[1][2][: found[1][1]["payload"]["sampled"]] == bytes(400)

    asyncio.run(asyncio.wait_for(play(), 60))


def test_the_example_counts_tokens_and_tells_of_what_is_dropped(server: Server, tmp_path: Path) -> None:
    asyncio.run(write(server))
    address = {"run": "r", "url": server.url, "reader": server.credential("reader")}
    (tmp_path / "run.json").write_text(json.dumps(address))
    done = subprocess.run(
        [sys.executable, EXAMPLE, tmp_path], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert done.stdout == "0 main 120\n"
    assert done.stderr == "5 g0001-0 was dropped: interrupted\n"
