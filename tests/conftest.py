"""Fixtures for every test: one nats-server a session, and fresh logs on it."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count
from pathlib import Path

import pytest
from hypothesis import settings

from gyre.events.cluster import Cluster, start_cluster
from gyre.events.jetstream import JetStreamLog, connect
from gyre.events.server import Server, start_server
from gyre.events.streams import load_streams
from tests.chaos import namespaces

NewLog = Callable[..., AbstractAsyncContextManager[JetStreamLog]]
_run_numbers = count(1)

# A busy machine is no failure: no property here is about time.
settings.register_profile("gyre", deadline=None)
settings.load_profile("gyre")


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for the whole session: `.url`, `.token`. Start your own to stop or kill one."""
    server = start_server(tmp_path_factory.mktemp("nats"), sync="default")
    yield server
    server.stop()


@pytest.fixture
def jetstream_log(nats_server: Server) -> NewLog:
    """`async with jetstream_log() as log:` gives a connection to a run of its own; pass `run` to join one."""

    @asynccontextmanager
    async def open_log(run: str | None = None) -> AsyncIterator[JetStreamLog]:
        name = run or f"t{next(_run_numbers)}"
        log = await connect(nats_server.url, name, create=load_streams(), token=nats_server.token)
        try:
            yield log
        finally:
            await log.close()

    return open_log


@pytest.fixture
def resting_log(nats_server: Server) -> NewLog:
    """As `jetstream_log`, whose readers look for new events now and then."""

    @asynccontextmanager
    async def open_log() -> AsyncIterator[JetStreamLog]:
        run = f"t{next(_run_numbers)}"
        log = await connect(nats_server.url, run, create=load_streams(), token=nats_server.token, rest_s=0.02)
        try:
            yield log
        finally:
            await log.close()

    return open_log


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three servers for the whole session, inside namespaces on a host each. Start your own to kill one."""
    hosts = {"hosts": namespaces.make_hosts()} if namespaces.is_inside() else {}
    cluster = start_cluster(tmp_path_factory.mktemp("cluster"), sync="default", **hosts)
    yield cluster
    cluster.stop()


@pytest.fixture
def cluster_log(cluster: Cluster) -> NewLog:
    """As `jetstream_log`, on the cluster: each event is on all three servers."""

    @asynccontextmanager
    async def open_log() -> AsyncIterator[JetStreamLog]:
        create = load_streams().with_replicas(3)
        log = await connect(cluster.url, f"t{next(_run_numbers)}", create=create, token=cluster.credential("owner"))
        try:
            yield log
        finally:
            await log.close()

    return open_log


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """An empty run directory."""
    path = tmp_path / "run"
    path.mkdir()
    return path
