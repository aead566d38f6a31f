import _thread
import asyncio
import fcntl
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from synthetic_run import TurnScheduler, written

from gyre.errors import ConfigError, HeldError, MissingError, is_passing
from gyre.events.codec import Recorded, decode
from gyre.events.log import Writer
from gyre.events.memory import MemoryLog
from gyre.events.types import AdmissionResumed, RunFinished, RunResumed, TablesRecorded
from gyre.projections import projector as shell
from gyre.projections import sql_service
from gyre.projections.projector import run_projector
from gyre.projections.rebuild import rebuild
from gyre.projections.replay import verify
from gyre.projections.report import closing
from gyre.projections.schemas import TABLES
from gyre.projections.sql_service import sql
from gyre.projections.store import Store

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "QUIET_S", 0.2)
    monkeypatch.setattr(shell, "MIN_WAIT_S", 0.05)
    monkeypatch.setattr(shell, "MAX_WAIT_S", 0.05)


async def rows_of(run_dir: Path, seq: int) -> None:
    """Waits until a running projector answers with the rows of that event."""
    async with asyncio.timeout(120):
        while True:
            if (run_dir / "sql.json").exists():
                answer = await asyncio.to_thread(sql, run_dir, "SELECT max(seq) AS seq FROM events", lambda _: None)
                if (answer.to_pylist()[0]["seq"] or 0) >= seq:
                    return
            await asyncio.sleep(0.05)


async def without_last_seal() -> MemoryLog:
    log = await written()
    log._stored.pop()
    return log


async def project(log: MemoryLog, run_dir: Path, incarnation: int = 2) -> None:
    async with asyncio.timeout(120):
        await run_projector(log, Writer(log, "projector", incarnation, lambda: 1), run_dir=run_dir)


async def last_event(log: MemoryLog) -> object:
    return decode(await log.body(await log.last_seq())).event


def test_it_ends_after_the_run_with_digests_that_a_replay_confirms(tmp_path: Path) -> None:
    async def main() -> None:
        log = await without_last_seal()
        await project(log, tmp_path)
        seal = await last_event(log)
        assert isinstance(seal, TablesRecorded)
        with Store(tmp_path / "tables.duckdb", read_only=True) as store:
            assert store.table_digests() == seal.tables
            assert store.through_seq == seal.through_seq
        verdict = await verify(log, scheduler=TurnScheduler())
        assert verdict.ok, verdict.text()

    asyncio.run(main())


def test_what_a_writer_numbered_and_nobody_stored_is_told_by_tables_and_summary(tmp_path: Path) -> None:
    async def main() -> None:
        log = await without_last_seal()
        lost = Writer(log, "late", 1, lambda: 1)
        await lost.append(AdmissionResumed())
        lost._next((AdmissionResumed(), AdmissionResumed()), 0)
        seq = await lost.append(AdmissionResumed())
        await project(log, tmp_path)
        with Store(tmp_path / "tables.duckdb", read_only=True) as store:
            rows = store.query("from gaps").to_pylist()
        assert rows == [{"writer": "late", "incarnation": 1, "first": 2, "last": 3, "seq": seq}]
        summary = await rebuild(log, tmp_path / "again.duckdb")
        told = f"events 2 to 3 of late/1, missing before sequence {seq}"
        assert summary["gaps"] == [told]
        assert f"not there: {told}" in closing(summary, "runs/x")
        assert (await verify(log, scheduler=TurnScheduler())).ok

    asyncio.run(main())


def test_it_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    """Cancelled in the middle, started again on the same file: the digests are those of one pass."""

    async def main() -> None:
        whole = await without_last_seal()
        log = MemoryLog("r")
        task = asyncio.create_task(project(log, tmp_path))
        for number, (subject, body) in enumerate(whole._stored):
            await log.publish(subject, body, str(number))
            if number == 100:
                await rows_of(tmp_path, 1)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                with Store(tmp_path / "tables.duckdb", read_only=True) as store:
                    assert store.through_seq > 0
        await project(log, tmp_path, 3)
        verdict = await verify(log, scheduler=TurnScheduler())
        assert verdict.ok, verdict.text()

    asyncio.run(main())


def test_one_that_is_told_to_end_leaves_rows_of_all_that_it_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "MIN_WAIT_S", 600)
    all_read = asyncio.Event()
    evolve = shell.Projector.evolve

    def counted(self: shell.Projector, recorded: Recorded) -> None:
        evolve(self, recorded)
        if recorded.seq == 40:
            all_read.set()

    monkeypatch.setattr(shell.Projector, "evolve", counted)

    async def main() -> None:
        whole, log = await without_last_seal(), MemoryLog("r")
        for number, (subject, body) in enumerate(whole._stored[:40]):
            await log.publish(subject, body, str(number))
        task = asyncio.create_task(project(log, tmp_path))
        await asyncio.wait_for(all_read.wait(), 120)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with Store(tmp_path / "tables.duckdb", read_only=True) as store:
            assert store.through_seq == 40

    asyncio.run(main())


def test_a_run_that_goes_on_is_recorded_again(tmp_path: Path) -> None:
    async def main() -> None:
        log = await without_last_seal()
        await project(log, tmp_path, 2)
        supervisor = Writer(log, "supervisor", 2, lambda: 2)
        await supervisor.append(RunResumed(versions=()))
        await supervisor.append(RunFinished(reason="completed"))
        await project(log, tmp_path, 3)
        verdict = await verify(log, scheduler=TurnScheduler())
        assert verdict.ok, verdict.text()
        assert dict(verdict.num_checked)["tables"] == 3 * len(TABLES)
        before = await log.last_seq()
        await project(log, tmp_path, 4)
        assert await log.last_seq() == before

    asyncio.run(main())


def test_sql_of_a_running_run_and_of_one_that_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks need not wait until rows are due."""
    monkeypatch.setattr(shell, "MIN_WAIT_S", 600)

    async def main() -> None:
        log = MemoryLog("r")
        whole = await without_last_seal()
        task = asyncio.create_task(project(log, tmp_path))
        for number, (subject, body) in enumerate(whole._stored[:60]):
            await log.publish(subject, body, str(number))
        await rows_of(tmp_path, 60)
        assert not task.done()
        assert (tmp_path / "sql.json").stat().st_mode & 0o777 == 0o600
        query = "SELECT max(seq) AS seq FROM events"
        assert (await asyncio.to_thread(sql, tmp_path, query, said.append)).to_pylist() == [{"seq": 60}]
        with pytest.raises(ConfigError, match=r"^sql: .*INSERT"):
            await asyncio.to_thread(sql, tmp_path, "INSERT INTO cells (cell) VALUES ('x')", said.append)
        with pytest.raises(ConfigError, match=r"^sql: .*nothing"):
            await asyncio.to_thread(sql, tmp_path, "SELECT nothing FROM cells", said.append)
        tables = (await asyncio.to_thread(sql, tmp_path, "SHOW TABLES", said.append)).column("name").to_pylist()
        assert {"executions", "calls", "events"} <= set(tables)
        for number, (subject, body) in enumerate(whole._stored[60:], 60):
            await log.publish(subject, body, str(number))
        await task
        assert not (tmp_path / "sql.json").exists()
        answer = sql(tmp_path, "SELECT state FROM runs", said.append).to_pylist()
        assert answer == [{"state": "completed"}] and not said

    said: list[str] = []
    asyncio.run(main())


def test_a_projector_that_was_killed_leaves_a_file_that_answers(tmp_path: Path) -> None:
    """A stale `sql.json` is no obstacle: nobody listens at its port any more. Who asks is told what may be missing."""

    async def main() -> None:
        await project(await without_last_seal(), tmp_path)

    asyncio.run(main())
    (tmp_path / "sql.json").write_bytes(b'{"port":1,"token":"x"}')
    said: list[str] = []
    assert sql(tmp_path, "SELECT count(*) AS n FROM runs", said.append).to_pylist() == [{"n": 1}]
    assert len(said) == 1 and "was killed" in said[0]


def test_a_projector_that_ends_while_it_is_asked_was_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        await project(await without_last_seal(), tmp_path)

    def ends(address: object, query: str, say: object) -> None:
        (tmp_path / "sql.json").unlink()

    asyncio.run(main())
    monkeypatch.setattr(sql_service, "_ask", ends)
    said: list[str] = []
    with served(tmp_path, 1):
        assert sql(tmp_path, "SELECT count(*) AS n FROM runs", said.append).to_pylist() == [{"n": 1}]
    assert said == []


@contextmanager
def served(run_dir: Path, port: int) -> Iterator[None]:
    """As by a projector that lives."""
    with (run_dir / "sql.json").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(msgspec.json.encode(sql_service.Port(port=port, token="x")))
        file.flush()
        yield


def test_who_asks_waits_for_a_projector_that_lives_and_for_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        await project(await without_last_seal(), tmp_path)

    asyncio.run(main())
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with served(tmp_path, silent.getsockname()[1]), monkeypatch.context() as patch:
            patch.setattr(sql_service, "SILENCE_S", 0.1)
            patch.setattr(sql_service, "TIMEOUT_S", 1.0)
            with pytest.raises(ConfigError, match="sql: no answer within 1 s; ask for less"):
                sql(tmp_path, "SELECT 1", said.append)
        assert said.pop() == "sql: no answer of the run's projector for 0.1 s; it has 1 s in all"
        assert sql(tmp_path, "SELECT count(*) AS n FROM runs", said.append).to_pylist() == [{"n": 1}]
    assert "was killed" in said.pop()


@contextmanager
def held(tables: Path, *, read_only: bool = False) -> "Iterator[subprocess.Popen[bytes]]":
    """Another process that has the file open, until its standard input is closed."""
    hold = f"import duckdb, sys; held = duckdb.connect(sys.argv[1], {read_only}); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", hold, str(tables)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        yield process
        process.stdin.close()


@pytest.mark.parametrize("left", [b"", b'{"port":1,"token":"x"}'])
def test_a_projector_that_starts_or_ends_is_waited_for(tmp_path: Path, left: bytes) -> None:
    """It holds the file a moment before it answers, and a moment after."""

    async def main() -> None:
        await project(await without_last_seal(), tmp_path)

    asyncio.run(main())
    if left:
        (tmp_path / "sql.json").write_bytes(left)
    with held(tmp_path / "tables.duckdb") as process:
        assert process.stdin is not None
        release = threading.Timer(0.5, process.stdin.close)
        release.start()
        assert sql(tmp_path, "SELECT count(*) AS n FROM runs", lambda _: None).to_pylist() == [{"n": 1}]
        release.join()


def test_a_port_that_another_run_has_by_now_is_no_obstacle(tmp_path: Path) -> None:
    killed, other = tmp_path / "killed", tmp_path / "other"

    async def main() -> None:
        for path in (killed, other):
            path.mkdir()
            await project(await without_last_seal(), path)
        with Store(other / "tables.duckdb", read_only=True) as store:
            async with sql_service.SqlService(store, other, lambda: None):
                port = msgspec.json.decode((other / "sql.json").read_bytes())["port"]
                (killed / "sql.json").write_text(f'{{"port":{port},"token":"x"}}')
                answer = await asyncio.to_thread(sql, killed, "SELECT count(*) AS n FROM runs", said.append)
        assert answer.to_pylist() == [{"n": 1}]

    said: list[str] = []
    asyncio.run(main())
    assert len(said) == 1 and "was killed" in said[0]


def test_a_projector_waits_for_who_reads_the_file(tmp_path: Path) -> None:
    """`gyre sql` of a run that stands still, at the moment when the run goes on."""

    async def main() -> None:
        log = await without_last_seal()
        await project(log, tmp_path)
        log._stored.pop()
        with held(tmp_path / "tables.duckdb", read_only=True) as process:
            assert process.stdin is not None
            release = threading.Timer(0.5, process.stdin.close)
            release.start()
            await project(log, tmp_path, 3)
            assert release.finished.is_set()
        with held(tmp_path / "tables.duckdb", read_only=True) as process:
            assert process.stdin is not None
            threading.Timer(0.5, process.stdin.close).start()
            await rebuild(log, tmp_path / "tables.duckdb")
        assert isinstance(await last_event(log), TablesRecorded)

    asyncio.run(main())
    assert is_passing(HeldError()), "one that reads for longer costs another start, not the run"


def test_before_its_first_table_a_file_has_no_tables(tmp_path: Path) -> None:
    (tmp_path / "tables.duckdb").touch()
    with pytest.raises(MissingError, match="no tables yet"):
        sql(tmp_path, "SELECT 1", lambda _: None)


def test_a_file_is_there_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where somebody is killed while it is made."""

    class Killed(BaseException): ...

    def connect(path: str, **options: object) -> None:
        Path(path).write_bytes(b"half a header")
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("gyre.projections.store.duckdb.connect", connect)
        with pytest.raises(Killed):
            Store(tmp_path / "tables.duckdb")
    with Store(tmp_path / "tables.duckdb") as store:
        assert store.through_seq == 0
    assert [path.name for path in tmp_path.iterdir()] == ["tables.duckdb"]


def test_a_file_that_somebody_keeps_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_service, "SETTLE_S", 0.1)
    said: list[str] = []
    with held(tmp_path / "tables.duckdb"), pytest.raises(HeldError, match="another process is writing it"):
        sql(tmp_path, "SELECT 1", said.append)
    assert said == []


def test_a_file_that_is_no_database_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "tables.duckdb").write_text("no tables")
    with pytest.raises(ConfigError, match=r"tables\.duckdb: it is no database"):
        sql(tmp_path, "SELECT 1", lambda _: None)


def test_a_question_that_is_interrupted_is_no_bug(tmp_path: Path) -> None:
    """DuckDB says RuntimeError for Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored, as in a job of a script
    try:
        with Store(tmp_path / "tables.duckdb") as store, pytest.raises(KeyboardInterrupt):
            threading.Timer(0.3, _thread.interrupt_main).start()
            store.query("select sum(hash(a.range)) from range(100000000000) a")
    finally:
        signal.signal(signal.SIGINT, before)
