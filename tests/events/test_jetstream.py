"""The log on JetStream where servers die, streams differ and connections fail."""

import asyncio
from itertools import islice
from pathlib import Path
from random import Random

import msgspec
import pytest

from gyre.errors import BlobError, ConflictError, StreamError
from gyre.events import feed, jetstream
from gyre.events.blobs import get_blob, put_blob
from gyre.events.codec import encode
from gyre.events.jetstream import JetStreamLog, connect
from gyre.events.log import Item, Writer, open_writer
from gyre.events.server import Server, start_server
from gyre.events.streams import load_streams
from gyre.events.types import CallFailed, CallStarted
from tests.chaos.proxy import Proxy
from tests.conftest import NewLog
from tests.events.events import envelope, failed, started, ticking

NUM_EVENTS = 6000


def test_kill_9_while_publishing_loses_and_doubles_nothing(tmp_path: Path) -> None:
    server = start_server(tmp_path, sync="always")

    async def main() -> None:
        log = await connect(server.url, "r", create=load_streams(), token=server.token)
        reader_log = await connect(server.url, "r", token=server.token)
        writer = await open_writer(log, "w", ticking())
        acked: dict[int, int] = {}
        shares = {NUM_EVENTS // 5: asyncio.Event(), NUM_EVENTS * 3 // 5: asyncio.Event()}
        seen: list[int] = []

        async def follow() -> None:
            async for recorded in reader_log.read(until=NUM_EVENTS):
                assert isinstance(recorded.event, CallFailed)
                seen.append(int(recorded.event.call.removeprefix("s-c")))

        async def append(number: int) -> None:
            acked[number] = await writer.append(failed(number))
            if len(acked) in shares:
                shares[len(acked)].set()

        async with asyncio.timeout(90), asyncio.TaskGroup() as group:
            group.create_task(follow())
            numbers = iter(range(NUM_EVENTS))
            for share in (None, *shares.values()):
                if share is not None:
                    await share.wait()
                # Acknowledgements may come many at once: there is new work under way whenever it dies.
                for number in islice(numbers, NUM_EVENTS * 2 // 5):
                    group.create_task(append(number))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                if share is not None:
                    assert len(acked) < NUM_EVENTS
                    server.kill()
                    server.start()

        assert sorted(acked) == list(range(NUM_EVENTS))
        assert sorted(acked.values()) == list(range(1, NUM_EVENTS + 1))
        assert [acked[number] for number in seen] == list(range(1, NUM_EVENTS + 1))
        assert await log.last_seq() == NUM_EVENTS
        await reader_log.close()
        await log.close()

    try:
        asyncio.run(main())
    finally:
        server.stop()


def test_a_fact_of_several_events_is_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    """Whoever is killed: the server twice, and a publisher that had not sent the last of them."""
    server, num_facts, size = start_server(tmp_path, sync="default"), 200, 5

    async def main() -> None:
        log = await connect(server.url, "r", create=load_streams(), token=server.token)
        half = await connect(server.url, "r", token=server.token)
        envelopes = [envelope(failed(number), number, writer="half") for number in range(1, size + 1)]
        items = [Item("gyre.r.call.g0001-0", encode(item), item.id) for item in envelopes]
        half.wire.post(half.window._batch(items, 1)[:-1])
        await half.last_seq()
        await half.close()
        writers = [Writer(log, f"w{index}", 1, ticking()) for index in range(8)]
        acked: dict[int, int] = {}
        shares = {num_facts // 5: asyncio.Event(), num_facts * 3 // 5: asyncio.Event()}

        async def append(number: int) -> None:
            facts = [failed(number * size + place) for place in range(size)]
            acked[number] = await writers[number % 8].append_all(facts)
            if len(acked) in shares:
                shares[len(acked)].set()

        async def append_some(first: int) -> None:
            for number in range(first, num_facts, 10):
                await append(number)

        async with asyncio.timeout(90), asyncio.TaskGroup() as group:
            for first in range(10):
                group.create_task(append_some(first))
            for share in shares.values():
                await share.wait()
                server.kill()
                server.start()
        assert sorted(acked.values()) == list(range(size, num_facts * size + 1, size))
        found = [recorded.event async for recorded in log.read(until=await log.last_seq())]
        for number, last in acked.items():
            assert found[last - size : last] == [failed(number * size + place) for place in range(size)]
        assert len(found) == num_facts * size
        # What was not whole is as if it had never been sent.
        assert (await log.publish_all(items)).duplicate is False
        await log.close()

    try:
        asyncio.run(main())
    finally:
        server.stop()


def test_a_compare_and_set_whose_ack_was_lost_is_ones_own(nats_server: Server) -> None:
    async def main() -> None:
        # After the duplicate window the server answers a repeat with a conflict: only reading back tells.
        streams = load_streams()
        streams = msgspec.structs.replace(streams, log=msgspec.structs.replace(streams.log, duplicate_window_s=1))
        log = await connect(nats_server.url, "own-write", create=streams, token=nats_server.token)
        item = envelope(failed(1))
        subject = f"gyre.{log.run}.execution.g0001-0"
        for _ in range(2):
            assert (await log.publish(subject, encode(item), item.id, expect_last=0)).seq == 1
            await asyncio.sleep(1.5)
        await log.publish(subject, encode(envelope(failed(2), 2)), "later")
        assert (await log.publish(subject, encode(item), item.id, expect_last=0)).seq == 1
        with pytest.raises(ConflictError, match="expected last sequence 0, it is 2"):
            await log.publish(subject, encode(item), "another", expect_last=0)
        assert await log.last_seq() == 2
        await log.close()

    asyncio.run(main())


@pytest.mark.parametrize("rest_s", [0.0, 0.05])
def test_an_idle_reader_goes_on_after_a_restart(tmp_path: Path, rest_s: float) -> None:
    server = start_server(tmp_path, sync="default")

    async def main() -> None:
        log = await connect(server.url, "r", create=load_streams(), token=server.token, rest_s=rest_s)
        writer = await open_writer(log, "w", ticking())
        await writer.append(failed(1))
        seen: asyncio.Queue[int] = asyncio.Queue()

        async def follow() -> None:
            async for recorded in log.read():
                seen.put_nowait(recorded.seq)

        follower = asyncio.create_task(follow())
        async with asyncio.timeout(60):
            assert await seen.get() == 1
            server.restart()
            await writer.append(failed(2))
            assert await seen.get() == 2
        follower.cancel()
        await log.close()

    try:
        asyncio.run(main())
    finally:
        server.stop()


def test_a_cancelled_reader_leaves_no_consumer(jetstream_log: NewLog) -> None:
    async def main() -> None:
        async with jetstream_log() as log:
            await (await open_writer(log, "w", ticking())).append(failed(1))

            async def follow() -> None:
                async for _ in log.read():
                    arrived.set()

            for _ in range(3):
                arrived = asyncio.Event()
                follower = asyncio.create_task(follow())
                await arrived.wait()
                follower.cancel()
                await asyncio.gather(follower, return_exceptions=True)
            async with asyncio.timeout(60):
                while await _num_consumers(log):  # noqa: ASYNC110 - the server does not tell
                    await asyncio.sleep(0.02)

    asyncio.run(main())


async def _num_consumers(log: JetStreamLog) -> int:
    info = await log.wire.api(f"STREAM.INFO.{log.stream}", {})
    return int(info["state"]["consumer_count"])


def test_a_slow_reader_holds_a_bounded_number_of_events(jetstream_log: NewLog) -> None:
    async def main() -> None:
        async with jetstream_log() as log:
            writer = await open_writer(log, "w", ticking())
            await asyncio.gather(*(writer.append(failed(number)) for number in range(4000)))
            events = log.read()
            assert (await anext(events)).seq == 1
            await asyncio.sleep(0.3)
            info = await log.wire.api(f"CONSUMER.LIST.{log.stream}", {})
            delivered = info["consumers"][0]["delivered"]["stream_seq"]
            assert delivered <= 3 * feed.BATCH
            assert [(await anext(events)).seq for _ in range(3999)] == list(range(2, 4001))
            await events.aclose()  # type: ignore[attr-defined]

    asyncio.run(main())


def test_reading_is_prompt(jetstream_log: NewLog) -> None:
    async def main() -> None:
        async with jetstream_log() as log:
            loop = asyncio.get_running_loop()
            writer = await open_writer(log, "w", ticking())
            sent: list[float] = []
            acked: list[float] = []
            delays: list[float] = []

            async def follow() -> None:
                delays.extend([loop.time() - sent[recorded.seq - 1] async for recorded in log.read(until=200)])

            follower = asyncio.create_task(follow())
            await asyncio.sleep(0.1)
            for number in range(200):
                sent.append(loop.time())
                await writer.append(failed(number))
                acked.append(loop.time() - sent[-1])
            await follower
            assert sorted(delays)[100] < max(0.02, 4 * sorted(acked)[100]), "a busy machine takes longer for both"

    asyncio.run(main())


def test_appends_that_are_open_when_the_log_closes_fail(jetstream_log: NewLog) -> None:
    async def main() -> None:
        async with jetstream_log() as log:
            writer = Writer(log, "w", 1, ticking())
            open_appends = [asyncio.create_task(writer.append(failed(number))) for number in range(3)]
            await asyncio.sleep(0)
            await log.close()
            results = await asyncio.gather(*open_appends, return_exceptions=True)
            assert all(isinstance(result, StreamError) for result in results)
            with pytest.raises(StreamError, match="closed"):
                await writer.append(failed(9))

    asyncio.run(main())


def test_a_reader_of_a_closed_log_ends(jetstream_log: NewLog) -> None:
    async def main() -> None:
        async with jetstream_log() as log:
            follower = asyncio.create_task(anext(log.read()))
            await asyncio.sleep(0.1)
            await log.close()
            with pytest.raises(StreamError, match="closed"):
                async with asyncio.timeout(60):
                    await follower

    asyncio.run(main())


def test_nothing_of_a_log_that_is_closed_while_its_server_is_away_goes_on(tmp_path: Path) -> None:
    """Attempts to connect again are at most different places when each is closed; some have something to send."""
    server = start_server(tmp_path, sync="default")

    async def main() -> None:
        logs = [await connect(server.url, "r", create=load_streams(), token=server.token) for _ in range(40)]
        readers = [asyncio.create_task(anext(log.read())) for log in logs]
        await asyncio.sleep(0.2)
        server.kill()
        for number, (log, reader) in enumerate(zip(logs, readers, strict=True)):
            if number % 4:
                await asyncio.sleep(0.01)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            await log.close()
        server.start()
        async with asyncio.timeout(60):
            while len(asyncio.all_tasks()) > 1:  # noqa: ASYNC110 - one that goes on has no end
                await asyncio.sleep(0.05)

    try:
        asyncio.run(main())
    finally:
        server.stop()


def test_a_wrong_token_an_absent_server_and_an_absent_run_are_named(nats_server: Server) -> None:
    async def main() -> None:
        with pytest.raises(StreamError, match=r"cannot connect.*[Aa]uthorization"):
            await connect(nats_server.url, "r", token="wrong", timeout_s=60)
        with pytest.raises(StreamError, match=r"127\.0\.0\.1:1: cannot connect"):
            await connect("nats://127.0.0.1:1", "r", timeout_s=1)
        with pytest.raises(StreamError, match="GYRE_never: stream not found: has the run been started"):
            await connect(nats_server.url, "never", token=nats_server.token)

    asyncio.run(main())


@pytest.mark.parametrize("num_bytes", [0, 1, 512 * 1024, 512 * 1024 + 1, 5_000_000])
def test_blobs_come_back_and_a_second_put_is_a_success(jetstream_log: NewLog, num_bytes: int) -> None:
    async def main() -> None:
        content = bytes(number * 7919 >> 8 & 0xFF for number in range(num_bytes))
        async with jetstream_log() as log:
            name = await put_blob(log, content)
            assert await put_blob(log, content) == name
            assert await get_blob(log, name) == content

    asyncio.run(main())


def test_a_damaged_and_a_missing_blob_are_named(jetstream_log: NewLog) -> None:
    async def main() -> None:
        async with jetstream_log() as log:
            with pytest.raises(BlobError, match="not in stream GYRE-BLOBS"):
                await get_blob(log, "0" * 64)
            await log.put_object("1" * 64, b"\x00other bytes")
            with pytest.raises(BlobError, match="the store is damaged"):
                await get_blob(log, "1" * 64)

    asyncio.run(main())


def test_an_event_is_not_sent_before_its_blob_is_acknowledged(jetstream_log: NewLog) -> None:
    """Where the blobs take no more, an event with a long tail is an error and not on the log, and others go on."""

    async def main() -> None:
        async with jetstream_log() as log:
            assert isinstance(log, JetStreamLog)
            writer = await open_writer(log, "w", ticking())
            assert await writer.append(started(bytes(300_000))) == 1
            blobs = load_streams().for_run(log.run).blobs
            full = await log.wire.api(f"STREAM.UPDATE.{blobs.name}", blobs.to_api() | {"max_bytes": 310_000})
            assert "error" not in full, full
            with pytest.raises(StreamError, match="maximum bytes exceeded"):
                await writer.append(started(bytes(range(256)) * 1200))
            assert await log.last_seq() == 1
            assert await Writer(log, "v", 1, ticking()).append(failed(1)) == 2
            assert [type(r.event) async for r in log.read(until=2)] == [CallStarted, CallFailed]

    asyncio.run(main())


def test_no_event_can_be_deleted(jetstream_log: NewLog) -> None:
    async def main() -> None:
        async with jetstream_log() as log:
            await (await open_writer(log, "w", ticking())).append(failed(1))
            for request, payload in (
                (f"STREAM.MSG.DELETE.{log.stream}", {"seq": 1}),
                (f"STREAM.PURGE.{log.stream}", {}),
            ):
                assert "error" in await log.wire.api(request, payload)
            assert await log.last_seq() == 1

    asyncio.run(main())


def test_what_was_on_its_way_when_a_connection_ended_is_read_all_the_same(nats_server: Server) -> None:
    """Its server takes it for delivered, and goes on with heartbeats to the next connection."""

    async def main() -> None:
        async with asyncio.timeout(90), Proxy("127.0.0.1", nats_server.port, Random(1)) as proxy:
            log = await connect(nats_server.url, "on-its-way", create=load_streams(), token=nats_server.token)
            reader_log = await connect(proxy.url, "on-its-way", token=nats_server.token)
            writer = await open_writer(log, "w", ticking())
            await writer.append(failed(0))
            events = reader_log.read()
            assert (await anext(events)).seq == 1
            stalled = asyncio.create_task(proxy.stall(60))
            await asyncio.sleep(0)
            await asyncio.gather(*(writer.append(failed(number)) for number in range(1, 60)))
            while (await _delivered(log)) < 60:  # noqa: ASYNC110 - the server does not tell
                await asyncio.sleep(0.02)
            proxy.tear()
            stalled.cancel()
            proxy.resume()
            assert [(await anext(events)).seq for _ in range(59)] == list(range(2, 61))
            await events.aclose()  # type: ignore[attr-defined]
            await reader_log.close()
            await log.close()

    asyncio.run(main())


async def _delivered(log: JetStreamLog) -> int:
    info = await log.wire.api(f"CONSUMER.LIST.{log.stream}", {})
    return int(info["consumers"][0]["delivered"]["stream_seq"])


@pytest.mark.parametrize(
    ("cluster", "is_leader"),
    [
        ({}, True),
        ({"leader": "n1"}, True),
        ({"replicas": [{"active": 3e8}, {"active": 9e9}]}, True),
        ({"replicas": [{"active": 9e9}, {"active": 9e9}]}, False),
        ({"replicas": [{"active": 3e8, "offline": True}, {"active": 9e9}]}, False),
    ],
)
def test_only_a_leader_that_hears_of_a_majority_knows_the_end(cluster: dict, is_leader: bool) -> None:
    assert jetstream._has_majority(cluster) == is_leader


def test_a_reader_ends_whenever_it_is_cancelled(jetstream_log: NewLog) -> None:
    """Also when the cancellation comes together with an answer of the server."""

    async def read_all(log: JetStreamLog) -> None:
        async for _ in log.read(1, until=await log.last_seq() + 1):
            pass

    async def main() -> None:
        async with jetstream_log() as log:
            await Writer(log, "w", 1, lambda: 0).append(failed(1))
            for number in range(150):
                reading = asyncio.create_task(read_all(log))
                await asyncio.sleep(number * 20e-6)
                reading.cancel()
                await asyncio.wait({reading}, timeout=60)
                assert reading.cancelled(), f"cancelled after {number * 20} us"
            assert await log.last_seq() == 1, "and the connection lives"

    asyncio.run(main())
