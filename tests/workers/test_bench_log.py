"""`gyre bench log`, small: its figures hang together, whatever the machine is busy with."""

import asyncio
import shutil
from pathlib import Path

import pytest

from gyre.errors import MissingError
from gyre.events.codec import Envelope, Recorded, body_digest, encode
from gyre.events.subjects import event_subject
from gyre.projections.rebuild import rebuild
from gyre.projections.store import Store
from gyre.projections.tables import Tables
from gyre.workers import bench_log_append
from gyre.workers.bench_log import BENCHMARKS
from gyre.workers.bench_log_append import appends, build_client
from gyre.workers.bench_log_latency import latencies
from gyre.workers.bench_log_tables import into_tables
from gyre.workers.log_load import fill, log_at, server_in
from gyre.workers.run_events import run_events


def recorded(num: int) -> list[Recorded]:
    found, numbers = [], dict[str, int]()
    for seq, (writer, event) in enumerate(run_events(num), 1):
        numbers[writer] = numbers.get(writer, 0) + 1
        envelope = Envelope(
            writer=writer, incarnation=1, writer_seq=numbers[writer], prev="", time_ns=seq, cause=0, event=event
        )
        body = encode(envelope)
        found.append(Recorded(seq=seq, subject=event_subject("r", event), digest=body_digest(body), envelope=envelope))
    return found


def test_the_made_up_run_fills_tables_and_what_its_fold_holds_does_not_grow() -> None:
    events = recorded(6_000)
    tables, rows, held = Tables(), set[str](), []
    for item in events:
        tables.evolve(item)
        rows |= tables.take().keys()
        if item.seq % 2_000 == 0:
            held.append(len(tables.experience.trees))
    assert rows >= {"runs", "groups", "executions", "scores", "calls", "trees", "left_out", "cells", "switches"}
    assert rows >= {"decisions", "steps", "microsteps", "versions", "phases", "events"}
    assert max(held) <= 64, "the executions of one step"
    assert len(events) == 6_000


def test_appends_have_a_reference_where_a_compiler_and_libnats_are(tmp_path: Path) -> None:
    said: list[str] = []
    figures = appends(tmp_path, BENCHMARKS / "publish.c", scale=0.005, say=said.append)
    assert set(figures) == {
        "append_600B_sync_default",
        "append_8KB_sync_default",
        "append_200KB_sync_default",
        "append_600B_sync_always",
    }
    for figure in figures.values():
        assert figure.value > 0
        assert bool(figure.reference) == (not said)
    if said:
        assert "apt-get install gcc libnats-dev" in said[0]


def test_what_is_missing_for_the_reference_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingError, match="in a checkout of gyre"):
        build_client(tmp_path / "none.c", tmp_path / "none")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(MissingError, match="a C compiler is missing: apt-get install gcc libnats-dev"):
        build_client(BENCHMARKS / "publish.c", tmp_path / "none")
    monkeypatch.undo()
    broken = tmp_path / "broken.c"
    broken.write_text("#include <nats/no_such_header.h>\n")
    if shutil.which("gcc"):
        with pytest.raises(MissingError, match=r"libnats: .*no_such_header"):
            build_client(broken, tmp_path / "broken")
    monkeypatch.setattr(bench_log_append, "build_client", lambda source, target: build_client(tmp_path / "x", target))
    monkeypatch.setattr(bench_log_append, "SIZES", bench_log_append.SIZES[:1])
    figures = appends(tmp_path, tmp_path / "x", scale=0.001, say=lambda text: None)
    assert figures["append_600B_sync_default"].reference is None
    assert figures["append_600B_sync_default"].goal == ""


def test_latency_is_told_for_both_ways_to_sync(tmp_path: Path) -> None:
    figures = latencies(tmp_path, seconds=0.5)
    for sync in ("default", "always"):
        p50, p99 = (figures[f"publish_to_reader_p{p}_sync_{sync}"] for p in (50, 99))
        assert 0 < p50.value <= p99.value
        assert p99.goal == "value <= 5"
        assert (p99.reference is not None) == (sync == "always")


def test_tables_of_the_log_are_those_of_its_events(tmp_path: Path) -> None:
    figures = into_tables(tmp_path, BENCHMARKS / "fetch_rows.py", rebuild=rebuild, num_events=2_000)
    assert figures["log_to_tables_next_to_fetch"].reference
    assert figures["replay_of_a_million"].value == pytest.approx(1e6 / figures["log_to_tables"].value, rel=1e-3)
    assert figures["resident"].value >= (figures["resident"].reference or 0) > 0
    with Store(tmp_path / "tables.duckdb") as tables, Store(tmp_path / "rows.duckdb") as rows:
        assert tables.through_seq == rows.through_seq == 2_000
        assert tables.table_digests() == rows.table_digests()


def test_a_log_that_is_filled_holds_each_event_once_in_the_order_of_its_writer(tmp_path: Path) -> None:
    async def main() -> None:
        async with log_at(server, "r") as log:
            await fill(log, run_events(3_000))
            numbers: dict[str, int] = {}
            async for item in log.read(until=3_000):
                writer = item.envelope.writer
                assert item.envelope.writer_seq == numbers.get(writer, 0) + 1
                numbers[writer] = item.envelope.writer_seq
            assert sum(numbers.values()) == 3_000 == await log.last_seq()

    with server_in(tmp_path, "always") as server:
        asyncio.run(main())


def test_batches_in_flight_when_the_server_is_killed_are_stored_once(tmp_path: Path) -> None:
    num = 12_000

    async def main() -> None:
        async with log_at(server, "r") as log:
            async with asyncio.TaskGroup() as tasks:
                filling = tasks.create_task(fill(log, run_events(num)))
                for share in (0.2, 0.6):
                    while await log.last_seq() < share * num:  # noqa: ASYNC110 - the server tells it when asked
                        await asyncio.sleep(0.005)
                    await asyncio.to_thread(server.kill)
                    await asyncio.to_thread(server.start)
            assert filling.result() > 0
            last = await log.last_seq()
            seen = [(r.envelope.writer, r.envelope.writer_seq) async for r in log.read(until=last)]
            assert len(seen) == len(set(seen)) == num
            assert last == num, "the server knew each repeat by its id"

    with server_in(tmp_path, "always") as server:
        asyncio.run(main())
