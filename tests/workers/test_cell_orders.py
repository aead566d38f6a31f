"""`gyre cell drain|undrain`, and a cell that must not join, over a real server: what is written, what is refused."""

import asyncio
import time
from pathlib import Path

import msgspec
import pytest
from cell_logs import arrival, joined, published, small_config
from typer.testing import CliRunner

from gyre.cli import app
from gyre.config import config_digest, encode_config
from gyre.errors import ConfigError
from gyre.events.access import connect_at
from gyre.events.log import open_writer
from gyre.events.run_dir import Address, RunDir
from gyre.events.server import Server, start_server
from gyre.events.streams import load_streams
from gyre.events.types import (
    DrainLifted,
    DrainRequested,
    Event,
    RunFinished,
    RunResumed,
    RunStarted,
    TermStarted,
    Versioned,
)

CONFIG = small_config()
BEGUN: tuple[Event, ...] = (
    RunStarted(
        run="drains", config=encode_config(CONFIG), config_digest=config_digest(CONFIG), seed=1, versions=(),
        num_threads=1,
    ),
    TermStarted(term=1),
    published(0),
    *(e for i in range(2) for e in (joined(f"c{i}", i), *arrival(f"c{i}", 1, 0))),
)  # fmt: skip


def write(server: Server, run: str, *events: Event) -> None:
    async def work() -> None:
        log = await connect_at(Address(run=run, url=server.url, token=server.token), create=load_streams())
        writer = await open_writer(log, "hand", time.time_ns)
        for event in events:
            await writer.append(event)
        await log.close()

    asyncio.run(work())


def orders(server: Server, run: str) -> list[Event]:
    async def work() -> list[Event]:
        log = await connect_at(Address(run=run, url=server.url, token=server.token))
        found = [r.event async for r in log.read(1, until=await log.last_seq())]
        await log.close()
        return [event for event in found if isinstance(event, DrainRequested | DrainLifted)]

    return asyncio.run(work())


@pytest.fixture
def run_path(nats_server: Server, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    run = f"d{abs(hash(request.node.name)) % 10**9}"
    run_dir = RunDir(tmp_path / run)
    run_dir.path.mkdir()
    run_dir.save_address(Address(run=run, url=nats_server.url, token=nats_server.token))
    write(nats_server, run, *BEGUN)
    return run_dir.path


def gyre(*argv: str) -> str:
    result = CliRunner().invoke(app, list(argv))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_a_drain_and_its_end_are_events_that_status_and_cells_show(run_path: Path, nats_server: Server) -> None:
    assert "cell.drain_requested.v1" in gyre("cell", "drain", "1", str(run_path), "--reason", "a fan")
    assert "drained" in gyre("cells", str(run_path))
    assert "drained" in gyre("status", str(run_path))
    with pytest.raises(ConfigError, match="drained already"):
        gyre("cell", "drain", "c1", str(run_path))
    gyre("cell", "undrain", "c1", str(run_path))
    assert "drained" not in gyre("cells", str(run_path))
    with pytest.raises(ConfigError, match="not drained"):
        gyre("cell", "undrain", "1", str(run_path))
    assert orders(nats_server, run_path.name) == [DrainRequested(cell="c1", reason="a fan"), DrainLifted(cell="c1")]


def test_what_cannot_be_drained_is_refused_and_nothing_is_written(run_path: Path, nats_server: Server) -> None:
    with pytest.raises(ConfigError, match="c0 is the core"):
        gyre("cell", "drain", "0", str(run_path))
    with pytest.raises(ConfigError, match=r"no cell '7'; there are: 0 \(c0\), 1 \(c1\)"):
        gyre("cell", "drain", "7", str(run_path))
    write(nats_server, run_path.name, msgspec.structs.replace(joined("p0", 2), standalone=True))
    assert "standalone" in gyre("cells", str(run_path))
    with pytest.raises(ConfigError, match="p0 is a standalone engine"):
        gyre("cell", "drain", "p0", str(run_path))
    write(nats_server, run_path.name, RunFinished(reason="completed"))
    with pytest.raises(ConfigError, match="the run is completed"):
        gyre("cell", "drain", "1", str(run_path))
    assert orders(nats_server, run_path.name) == []
    assert "completed" in gyre("status", str(run_path))


def test_a_run_that_was_killed_is_not_shown_as_running(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "one")
    server = start_server(run_dir.nats, sync="default")
    write(server, "one", *BEGUN)
    server.stop()
    run_dir.save_address(Address(run="one", url=server.url, token=server.token))
    assert "killed (`gyre run` with its --dir goes on)" in gyre("status", str(run_dir.path))
    with pytest.raises(ConfigError, match="the run is killed: only a running one takes orders"):
        gyre("cell", "drain", "1", str(run_dir.path))


@pytest.mark.parametrize("process", ["cell", "trainer"])
def test_a_cell_of_another_version_of_gyre_is_refused_before_it_joins(
    run_path: Path, nats_server: Server, process: str
) -> None:
    write(nats_server, run_path.name, RunResumed(versions=(Versioned(name="gyre", version="9.9.9"),)))
    with pytest.raises(
        ConfigError, match=rf"{process} c1: this is gyre .*, the run goes on with gyre 9\.9\.9; install"
    ):
        gyre("process", process, str(run_path), "--cell", "c1")
    assert f"{len(BEGUN) + 1} events" in gyre("status", str(run_path)), "it has written nothing"
