"""A log that is opened to be read: of a run that goes on, however busy its server, and of one that has ended."""

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest

from gyre.cli.wiring import with_log
from gyre.errors import StreamError
from gyre.events import access as access_module
from gyre.events import server as server_module
from gyre.events.access import follow_run, open_log
from gyre.events.codec import Recorded
from gyre.events.follow import Waits
from gyre.events.jetstream import connect
from gyre.events.log import Log, Writer
from gyre.events.run_dir import Address, RunDir
from gyre.events.server import Server, start_server
from gyre.events.streams import load_streams
from gyre.events.types import Event, RunFinished, RunResumed


def serve(run_dir: RunDir) -> Server:
    server = start_server(run_dir.nats, sync="default")
    run_dir.save_address(Address(run="one", url=server.url, token=server.token))
    return server


async def append(server: Server, event: Event, incarnation: int = 1) -> None:
    log = await connect(server.url, "one", token=server.token, create=load_streams())
    await Writer(log, "w", incarnation, lambda: 1).append(event)
    await log.close()


def run_in(path: Path) -> tuple[RunDir, Server]:
    """A run of one event, whose server is up."""
    run_dir = RunDir(path)
    server = serve(run_dir)
    asyncio.run(append(server, RunFinished(reason="completed")))
    return run_dir, server


async def look(run_dir: RunDir) -> tuple[int, bool]:
    """Its last sequence, and whether it may grow."""
    async with open_log(run_dir) as (log, is_live):
        return await log.last_seq(), is_live


def test_a_server_that_is_slow_to_answer_is_not_taken_for_gone(tmp_path: Path) -> None:
    run_dir, server = run_in(tmp_path)
    waking = threading.Timer(2.0, os.kill, (server.pid, signal.SIGCONT))
    try:
        os.kill(server.pid, signal.SIGSTOP)
        waking.start()
        assert asyncio.run(look(run_dir)) == (1, True)
    finally:
        waking.join()
        server.stop()


def test_of_two_that_read_a_run_that_has_ended_the_second_waits_for_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_module, "LOOK_S", 0.2)
    monkeypatch.setattr(server_module, "_LOCK_WAIT_S", 0.2)
    run_dir, server = run_in(tmp_path)
    server.stop()
    first_is_there, found = threading.Event(), list[tuple[int, bool]]()

    def second() -> None:
        first_is_there.wait(60)
        found.append(asyncio.run(look(run_dir)))

    async def first() -> None:
        async with open_log(run_dir) as (log, is_live):
            assert (await log.last_seq(), is_live) == (1, False)
            first_is_there.set()
            await asyncio.sleep(1.5)
            assert not found

    reading = threading.Thread(target=second)
    reading.start()
    try:
        asyncio.run(first())
    finally:
        first_is_there.set()
        reading.join(60)
    assert found == [(1, False)]


def test_an_error_of_who_reads_is_not_taken_for_a_log_that_is_gone(tmp_path: Path) -> None:
    run_dir, server = run_in(tmp_path)

    async def fail() -> None:
        async with open_log(run_dir) as (_, is_live):
            assert is_live
            raise StreamError("torn")

    try:
        with pytest.raises(StreamError, match="torn"):
            asyncio.run(fail())
    finally:
        server.stop()


def test_the_token_of_a_server_of_ones_own_is_not_shown_to_an_embedded_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, server = run_in(tmp_path)
    monkeypatch.setenv("GYRE_NATS_TOKEN", "owner:elsewhere")
    try:
        assert asyncio.run(look(run_dir)) == (1, True)
    finally:
        server.stop()


def test_what_a_server_does_not_answer_is_said_in_words_of_the_run(tmp_path: Path) -> None:
    run_dir, server = run_in(tmp_path)

    async def lose(log: Log, live: bool) -> None:
        assert live
        raise StreamError("$JS.API.CONSUMER.CREATE.GYRE_one: no answer")

    try:
        with run_dir.lock(), pytest.raises(StreamError, match="no answer"):
            with_log(tmp_path, lose)
        with pytest.raises(StreamError, match="the run was killed"):
            with_log(tmp_path, lose)
    finally:
        server.stop()


def test_a_run_is_followed_over_a_resume_and_until_it_is_killed_or_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOOK_S", "QUIET_S", "PATIENCE_S"):
        monkeypatch.setattr(access_module, name, 0.2)
    run_dir, shown, waits = RunDir(tmp_path), list[Event](), Waits()

    def show(recorded: Recorded) -> None:
        shown.append(recorded.event)
        waits.notify()

    async def follow(server: Server, num: int) -> "asyncio.Task[None]":
        """Has shown so many events."""
        await append(server, RunResumed(versions=()), num)
        following = asyncio.create_task(follow_run(run_dir, show))
        await waits.wait_for(lambda: len(shown) == num)
        return following

    async def main() -> None:
        server = serve(run_dir)
        with run_dir.lock():
            following = await follow(server, 1)
            server.kill()
            server = serve(run_dir)
            await append(server, RunResumed(versions=()), 2)
            await waits.wait_for(lambda: len(shown) == 2)
            assert not following.done()
            server.kill()
        with pytest.raises(StreamError, match="the run was killed; `gyre run` with its --dir goes on with it"):
            await following
        shown.clear()
        server = serve(run_dir)
        with run_dir.lock():
            following = await follow(server, 3)
            await append(server, RunFinished(reason="completed"), 4)
            await following
        server.stop()

    asyncio.run(asyncio.wait_for(main(), 120))
    assert shown == [RunResumed(versions=())] * 3 + [RunFinished(reason="completed")]
