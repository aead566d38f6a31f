"""The consumer SDK: exactly once in the state wherever it is killed, errors that name the event, bad input."""

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gyre
from gyre.errors import ConfigError, ConsumerError, MissingError
from gyre.events.checkpoint import Checkpoint, Saved
from gyre.events.codec import Recorded, encode
from gyre.events.consumer import Consumer, is_immutable
from gyre.events.consuming import consume, find_consumer, start_seq
from gyre.events.log import Writer, open_writer
from gyre.events.memory import MemoryLog
from gyre.events.run_dir import Address, RunDir
from gyre.events.server import Server
from gyre.events.types import CallCut, CallFailed, Event, RunFinished
from tests.conftest import NewLog
from tests.events.counting import Count, by_writer, counting, failing
from tests.events.events import envelope, failed, started, ticking

KNOWN = {"meter": "gyre.projections.meter:meter"}


async def filled(num: int, *, every: Callable[[int], Event] = failed) -> MemoryLog:
    log = MemoryLog("r")
    writer = Writer(log, "w", 1, ticking())
    for number in range(1, num + 1):
        await writer.append(every(number))
    return log


async def take(consumer: Consumer[...], log: MemoryLog, path: Path, **options: Any) -> Any:
    with Checkpoint(path) as checkpoint:
        return await consume(consumer, log, checkpoint, **options)


def test_importing_gyre_imports_no_client_of_the_log() -> None:
    code = "import gyre, sys; assert gyre.consumer; assert 'nats' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_only_wanted_events_reach_it_and_the_state_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        log = await filled(9, every=lambda n: failed(n) if n % 3 else started(b""))
        state = await take(counting, log, tmp_path / "c.json")
        assert state.seqs == (1, 2, 4, 5, 7, 8)
        await Writer(log, "v", 1, ticking()).append(failed(10))
        assert (await take(counting, log, tmp_path / "c.json")).seqs == (1, 2, 4, 5, 7, 8, 10)

    asyncio.run(main())


def stopping(stop: int, save_every_s: float, stopped: asyncio.Event) -> Consumer[...]:
    """Counts, until it hangs in the middle of event `stop`."""

    @gyre.consumer(name="c", save_every_s=save_every_s)
    async def count(event: CallFailed, state: Count, recorded: Recorded) -> Count:
        if recorded.seq == stop:
            stopped.set()
            await asyncio.sleep(3600)
        return Count(num=state.num + 1, seqs=(*state.seqs, recorded.seq))

    return count


@settings(max_examples=30)
@given(stops=st.lists(st.integers(1, 12), max_size=6), save_every_s=st.sampled_from([0.0, 3600.0]))
def test_each_event_is_in_the_state_once_wherever_it_stops(
    stops: list[int], save_every_s: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("c") / "c.json"

    async def main() -> None:
        log = await filled(12)
        for stop in sorted(stops):
            stopped = asyncio.Event()
            task = asyncio.create_task(take(stopping(stop, save_every_s, stopped), log, path))
            await stopped.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        state = await take(stopping(0, save_every_s, asyncio.Event()), log, path)
        assert state.seqs == tuple(range(1, 13))

    asyncio.run(main())


def test_kill_9_at_any_moment_leaves_each_event_in_the_state_once(
    nats_server: Server, jetstream_log: NewLog, tmp_path: Path
) -> None:
    """Also while the checkpoint is being replaced: it is saved all the time."""
    num_kills, num = 6, 800

    async def fill() -> None:
        async with jetstream_log("killed") as log:
            writer = await open_writer(log, "w", ticking())
            await asyncio.gather(*(writer.append(failed(number)) for number in range(num)))

    directory = RunDir(tmp_path)
    directory.save_address(Address(run="killed", url=nats_server.url, token=nats_server.token))
    argv = [sys.executable, "-m", "gyre.cli", "consume", "tests.events.counting:counting", str(tmp_path)]
    path, chance = tmp_path / "consumers/counting.json", random.Random(7)
    for _ in range(num_kills):
        asyncio.run(fill())
        before = path.stat().st_mtime_ns if path.exists() else 0
        with subprocess.Popen(argv, cwd=Path(__file__).parents[2]) as process:
            while not (path.exists() and path.stat().st_mtime_ns != before):
                assert process.poll() is None, "it follows the run until it is killed"
                time.sleep(0.001)
            time.sleep(chance.uniform(0, 0.05))
            process.kill()
        state = msgspec.json.decode(path.read_bytes())
        assert state["state"]["seqs"] == list(range(1, state["seq"] + 1)), "whatever is on the disk is whole"
    subprocess.run([*argv, "--no-follow"], cwd=Path(__file__).parents[2], check=True)
    assert msgspec.json.decode(path.read_bytes())["state"]["seqs"] == list(range(1, num_kills * num + 1))


def test_an_event_that_the_log_holds_twice_is_applied_once_also_over_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        log = MemoryLog("r")
        bodies = [encode(envelope(failed(number), number)) for number in (1, 2, 3, 4)]
        for number in (0, 1, 3):
            await log.publish("gyre.r.execution.g0001-0", bodies[number], f"a{number}")
        said: list[str] = []
        assert (await take(counting, log, tmp_path / "c.json", say=said.append)).seqs == (1, 2, 3)
        assert said == ["log r: not there: event 3 of w/1, missing before sequence 3"]
        for number in (0, 1, 2, 3):  # 2 was missing and comes now; the others are there already
            await log.publish("gyre.r.execution.g0001-0", bodies[number], f"b{number}")
        assert (await take(counting, log, tmp_path / "c.json")).seqs == (1, 2, 3, 6)

    asyncio.run(main())


def test_what_is_missing_before_the_first_event_is_told_to_who_began_there(tmp_path: Path) -> None:
    async def main() -> None:
        log = MemoryLog("r")
        await log.publish("gyre.r.execution.g0001-0", encode(envelope(failed(2), 2)), "a")
        for start, told in (
            ("beginning", ["log r: not there: event 1 of w/1, missing before sequence 1"]),
            ("now", []),
        ):
            said: list[str] = []
            await take(counting, log, tmp_path / f"{start}.json", start=start, say=said.append)
            assert said == told
        saved = msgspec.json.decode((tmp_path / "now.json").read_bytes(), type=Saved)
        assert (saved.seq, saved.from_start) == (1, False), "where `now` was is known from now on"

    asyncio.run(main())


def test_a_consumer_without_a_state_goes_on_where_it_was(tmp_path: Path) -> None:
    seen: list[str] = []

    @gyre.consumer(name="c")
    async def noting(event: CallFailed) -> None:
        seen.append(event.call)

    async def main() -> None:
        log = await filled(2)
        assert await take(noting, log, tmp_path / "c.json") is None
        await Writer(log, "v", 1, ticking()).append(failed(3))
        assert await take(noting, log, tmp_path / "c.json") is None
        assert seen == ["s-c1", "s-c2", "s-c3"]

    asyncio.run(main())


def test_an_error_names_the_event_and_the_next_start_begins_with_it(tmp_path: Path) -> None:
    calls: list[str] = []
    broken = True

    @gyre.consumer(name="c")
    async def fragile(event: CallFailed, state: Count) -> Count:
        calls.append(event.call)
        if event.call == "s-c4" and broken:
            raise ValueError("no such key")
        return Count(num=state.num + 1)

    async def main() -> None:
        nonlocal broken
        log = await filled(6)
        with pytest.raises(
            ConsumerError,
            match=r"consumer c: sequence 4 \(call.failed.v1\): ValueError: no such key "
            r"\(test_consuming.py, line \d+\); the next start begins at sequence 4",
        ):
            await take(fragile, log, tmp_path / "c.json")
        broken = False
        assert (await take(fragile, log, tmp_path / "c.json")).num == 6
        assert calls == ["s-c1", "s-c2", "s-c3", "s-c4", "s-c4", "s-c5", "s-c6"]

    asyncio.run(main())


def test_a_state_that_was_half_changed_when_it_failed_is_not_saved(tmp_path: Path) -> None:
    broken = True

    @gyre.consumer(name="c")
    async def fragile(event: CallFailed, state: dict[str, int]) -> dict[str, int]:
        state["before"] = state.get("before", 0) + 1
        if event.call == "s-c4" and broken:
            raise ValueError
        state["after"] = state.get("after", 0) + 1
        return state

    async def main() -> None:
        nonlocal broken
        log = await filled(6)
        with pytest.raises(ConsumerError, match=r"sequence 4 .* the next start begins at sequence 1$"):
            await take(fragile, log, tmp_path / "c.json")
        broken = False
        assert await take(fragile, log, tmp_path / "c.json") == {"before": 6, "after": 6}

    asyncio.run(main())


def test_where_it_starts(tmp_path: Path) -> None:
    async def main() -> None:
        log = MemoryLog("r")
        times = iter([1, 2, 2, 5, 9, 10])
        writer = Writer(log, "w", 1, lambda: next(times) * 1_000_000_000)
        for number in range(5):
            await writer.append(failed(number))
        assert await start_seq(log, "beginning") == 1
        assert await start_seq(log, "3") == await start_seq(log, 3) == 3
        assert await start_seq(log, "now") == 6
        assert await start_seq(log, datetime(1970, 1, 1, 0, 0, 2, tzinfo=UTC)) == 2
        assert await start_seq(log, "1970-01-01T00:00:03") == 4
        assert await start_seq(log, "1971-01-01") == 6
        with pytest.raises(ConfigError, match="start at 'yesterday': give `beginning`"):
            await start_seq(log, "yesterday")
        with pytest.raises(ConfigError, match="sequences begin at 1"):
            await start_seq(log, 0)
        assert (await take(counting, log, tmp_path / "c.json", start="now")).num == 0
        await writer.append(failed(6))
        said: list[str] = []
        state = await take(counting, log, tmp_path / "c.json", start="beginning", say=said.append)
        assert (state.seqs, said) == ((6,), ["counting: goes on after sequence 5"])

    asyncio.run(main())


def test_following_ends_when_the_run_has_finished_and_is_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre.events.consuming.TICK_S", 0.02)
    monkeypatch.setattr("gyre.events.consuming.QUIET_S", 0.1)
    monkeypatch.setattr("gyre.events.consuming.REPORT_S", 0.0)

    async def main() -> None:
        log = await filled(3)
        said: list[str] = []
        task = asyncio.create_task(take(by_writer, log, tmp_path / "c.json", follow=True, say=said.append))
        writer = Writer(log, "v", 1, ticking())
        while "3 events" not in said:  # noqa: ASYNC110 - it ends by what another task does to a list
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert not task.done(), "a run that is quiet is not over"
        assert said == ["3 events"], "told once"
        assert msgspec.json.decode((tmp_path / "c.json").read_bytes())["seq"] == 3, "saved although nothing comes"
        await writer.append(RunFinished(reason="completed"))
        await writer.append(failed(5))
        assert await task == {"w": 3, "v": 2}

    asyncio.run(main())


def test_an_error_or_an_interrupt_ends_a_consumer_that_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre.events.consuming.TICK_S", 0.02)

    async def main() -> None:
        log = await filled(9)
        with pytest.raises(ConsumerError, match="sequence 7"):
            await take(failing, log, tmp_path / "f.json", follow=True)
        assert msgspec.json.decode((tmp_path / "f.json").read_bytes())["seq"] == 6
        said: list[str] = []
        task = asyncio.create_task(take(by_writer, log, tmp_path / "c.json", follow=True, say=said.append))
        while not (tmp_path / "c.json").exists():  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert said == [f"{msgspec.json.decode((tmp_path / 'c.json').read_bytes())['seq']} events"]

    asyncio.run(main())


def test_a_checkpoint_is_of_one_consumer_one_log_and_one_process(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "c.json"
        await take(counting, await filled(3), path)
        other = await filled(4, every=lambda n: failed(n + 1))
        with pytest.raises(ConfigError, match="another event at sequence 3 than the one that was consumed"):
            await take(counting, other, path)
        with pytest.raises(ConfigError, match="it is of consumer counting over run r"):
            await take(by_writer, other, path)
        with pytest.raises(ConfigError, match="another process consumes under this name"), Checkpoint(path):
            await take(counting, await filled(3), path)
        path.write_text("{}")
        with pytest.raises(ConfigError, match="no checkpoint of a consumer"):
            await take(counting, await filled(3), path)

    asyncio.run(main())


def test_a_checkpoint_makes_its_folder_and_is_gone_when_it_is_discarded(tmp_path: Path) -> None:
    with Checkpoint(tmp_path / "of/its/own/c.json") as checkpoint:
        saved = Saved(consumer="c", run="r", seq=1, digest="d", from_start=True, seen=(), state=msgspec.Raw(b"1"))
        assert checkpoint.load() is None
        checkpoint.save(saved)
        assert checkpoint.load() == saved
        for _ in range(2):
            checkpoint.discard()
            assert checkpoint.load() is None


def test_a_save_that_fails_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        log, path = await filled(3), tmp_path / "c.json"
        await take(counting, log, path)
        kept = path.read_bytes()
        await Writer(log, "v", 1, ticking()).append(failed(4))

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(ConsumerError, match="cannot be saved: No space left on device; the last save holds"):
                await take(counting, log, path)
        assert path.read_bytes() == kept
        assert (await take(counting, log, path)).num == 4

    asyncio.run(main())


def test_a_consumer_is_found_by_module_file_or_short_name(tmp_path: Path) -> None:
    assert find_consumer("tests.events.counting:counting", {}) is counting
    assert find_consumer("meter", KNOWN).name == "meter"
    (tmp_path / "mine.py").write_text(Path(__file__).with_name("counting.py").read_text())
    assert find_consumer(f"{tmp_path}/mine.py:failing", {}).name == failing.name
    for name, error, said in (
        ("metre", ConfigError, "one of meter"),
        ("tests.events.counting:plain", ConfigError, "decorate it"),
        ("tests.events.counting:nobody", MissingError, "there is no nobody"),
        ("tests.events.nowhere:x", MissingError, "no module tests.events.nowhere"),
        ("nowhere.py:x", MissingError, "no such file"),
    ):
        with pytest.raises(error, match=said):
            find_consumer(name, KNOWN)


def test_what_cannot_be_a_consumer_is_refused_at_once() -> None:
    async def odd(event: CallFailed, stat: Count) -> None: ...
    async def untyped(event: CallFailed, state) -> None: ...  # type: ignore[no-untyped-def]
    async def no_event(event: int) -> None: ...
    def plain(event: CallFailed) -> None: ...

    for function, said in (
        (odd, "its parameters are event, stat; write async def name"),
        (untyped, "say the type of `state`"),
        (no_event, "<class 'int'> is no event class"),
        (plain, "not an async function"),
    ):
        with pytest.raises(ConfigError, match=said):
            gyre.consumer()(function)  # type: ignore[arg-type]
    assert gyre.consumer(CallCut, CallFailed)(no_event).types == (CallCut, CallFailed)


class _Loose(msgspec.Struct, frozen=True):
    items: list[int]


@pytest.mark.parametrize(
    ("kind", "immutable"),
    [
        (int, True),
        (Count, True),
        (tuple[str, ...], True),
        (tuple[int, Count], True),
        (int | None, True),
        (dict[str, int], False),
        (_Loose, False),
        (tuple[list[int], ...], False),
    ],
)
def test_what_cannot_be_changed_in_place(kind: Any, immutable: bool) -> None:
    assert is_immutable(msgspec.inspect.type_info(kind)) is immutable
