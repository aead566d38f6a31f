"""What is no event, or not what was written: an error names log and sequence, and the events around it are read."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count

import pytest

from gyre.errors import BlobError, CodecError, LogError, StreamError
from gyre.events.codec import UnknownEvent, encode
from gyre.events.follow import Follower
from gyre.events.jetstream import JetStreamLog
from gyre.events.log import Item, Log, Writer
from gyre.events.memory import MemoryLog
from gyre.events.streams import load_streams
from gyre.events.tails import attach
from tests.conftest import NewLog
from tests.events.events import envelope, failed, started, ticking

OpenLog = Callable[[], AbstractAsyncContextManager[Log]]
_numbers = count(1)
GOOD = encode(envelope(failed(7), writer="other"))
LARGE = encode(envelope(started(bytes(70_000)), writer="other"))
HEADER = GOOD[4:]


def reworded(old: bytes, new: bytes) -> bytes:
    """A header that says something else, of the right length."""
    assert old in HEADER
    header = HEADER.replace(old, new, 1)
    return len(header).to_bytes(4, "big") + header


BAD = {
    "empty": (b"", "truncated"),
    "a word": (b"\x00\x00", "truncated"),
    "text": (b"hello there, this is no event", "truncated"),
    "an answer of the server": (b'{"type":"io.nats.jetstream.api.v1.stream_info_response"}', "truncated"),
    "cut in its header": (GOOD[:60], "truncated"),
    "cut in its tail": (LARGE[:-1], "tail has 69999"),
    "longer than it says": (GOOD + b"x", "bytes after the last field"),
    "a header of 2 GB": (b"\x7f\xff\xff\xff" + HEADER, "truncated"),
    "no JSON": (len(HEADER).to_bytes(4, "big") + b"\x00" * len(HEADER), "header"),
    "a field is missing": (reworded(b',"status":500', b""), "status"),
    "a field of another type": (reworded(b'"status":500', b'"status":"5"'), "status"),
    "a number that is not finite": (reworded(b'"status":500', b'"status":NaN'), "header"),
    "another payload": (reworded(b'"status":500', b'"status": 501'), "canonical"),
    "another hash": (reworded(b'"id":"', b'"id":"0'), "is not the hash"),
    "another writer": (reworded(b'"writer":"other"', b'"writer":"owner"'), "is not the hash"),
    "a tail elsewhere, without its name": (attach(GOOD[:20], "x"), "name of its blob|truncated|header"),
}


@pytest.fixture(params=["memory", "jetstream"])
def open_log(request: pytest.FixtureRequest) -> OpenLog:
    if request.param != "memory":
        return request.getfixturevalue("jetstream_log")

    @asynccontextmanager
    async def memory() -> AsyncIterator[Log]:
        yield MemoryLog(f"bad{next(_numbers)}")

    return memory


def check(open_log: OpenLog, body: Callable[[Log], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), open_log() as log:
            await body(log)

    asyncio.run(main())


async def put(log: Log, body: bytes, msg_id: str) -> None:
    """Past all that `publish` does with a body."""
    subject = f"gyre.{log.run}.execution.g0001-0"
    if isinstance(log, JetStreamLog):
        await log.window.send((Item(subject, body, msg_id),))
    else:
        await log.publish(subject, body, msg_id)


async def around(log: Log, body: bytes | None, error: type[LogError], message: str) -> None:
    """The second of three events is bad (put there already, if None): so it is said, and the others can be read."""
    writer = Writer(log, "w", 1, ticking())
    if body is not None:
        await writer.append(failed(1))
        await put(log, body, "bad")
        await writer.append(failed(3))
    seen = []
    with pytest.raises(error, match=message):
        async for recorded in log.read(until=3):
            seen.append(recorded.seq)  # noqa: PERF401 - those before the error count
    assert seen == [1]
    assert [recorded.event async for recorded in log.read(3, until=3)] == [failed(3)]


@pytest.mark.parametrize("name", BAD)
def test_a_bad_body_is_named_and_its_neighbours_are_read(open_log: OpenLog, name: str) -> None:
    body, reason = BAD[name]

    async def main(log: Log) -> None:
        await around(log, body, CodecError, rf"log {log.run}: sequence 2: .*({reason})")
        # Whoever examines or exports the log gets all three, as they are.
        if name != "a tail elsewhere, without its name" or isinstance(log, MemoryLog):
            assert [stored.body async for stored in log.stored(2, until=2)] == [body]

    check(open_log, main)


def test_a_body_that_the_server_does_not_take_is_refused_by_name(jetstream_log: NewLog) -> None:
    """Past the codec, which would have put its end elsewhere."""

    async def main(log: Log) -> None:
        assert isinstance(log, JetStreamLog)
        subject = f"gyre.{log.run}.execution.g0001-0"
        with pytest.raises(StreamError, match=rf"{subject}: 2000000 bytes are more than the server's max_payload"):
            log.window.send((Item(subject, bytes(2_000_000)),))
        assert await Writer(log, "w", 1, ticking()).append(failed(1)) == 1

    check(jetstream_log, main)


def test_an_event_whose_blob_is_altered_or_missing_is_named(jetstream_log: NewLog) -> None:
    async def main(log: Log) -> None:
        assert isinstance(log, JetStreamLog)
        writer = Writer(log, "w", 1, ticking())
        await writer.append(failed(1))
        damaged, missing, part = "1" * 64, "2" * 64, "3" * 64
        await log.put_object(damaged, b"\x00other bytes")
        several = b"\x01" + bytes.fromhex(part) * 3
        await log.put_object(hashlib.sha256(several).hexdigest(), several)
        await put(log, attach(LARGE[:500], damaged), "a")
        await writer.append(failed(3))
        await around(log, None, BlobError, rf"log {log.run}: sequence 2: blob 1+: .* damaged")
        await put(log, attach(LARGE[:500], missing), "b")
        with pytest.raises(BlobError, match=rf"log {log.run}: sequence 4: blob 2+: not in stream"):
            await log.body(4)
        name = hashlib.sha256(several).hexdigest()
        await put(log, attach(LARGE[:500], name), "c")
        with pytest.raises(BlobError, match=rf"log {log.run}: sequence 5: blob 3+: not in stream"):
            await log.body(5)

    check(jetstream_log, main)


@pytest.mark.parametrize("name", ["call.failed.v2", "call.imagined.v9"])
def test_a_type_or_version_of_a_newer_gyre_passes_through(open_log: OpenLog, name: str) -> None:
    async def main(log: Log) -> None:
        event = UnknownEvent(name=name, payload=b'{"other":[1,null]}', tail=b"\x01")
        item = envelope(event, writer="newer")
        writer = Writer(log, "w", 1, ticking())
        await writer.append(failed(1))
        await log.publish(f"gyre.{log.run}.execution.g0001-0", encode(item), item.id)
        await writer.append(failed(3))
        assert [recorded.event async for recorded in log.read(until=3)] == [failed(1), event, failed(3)]

    check(open_log, main)


@pytest.mark.parametrize("how", ["deleted", "purged to", "purged all"])
def test_a_stream_that_was_changed_by_hand_is_named_with_what_is_missing(jetstream_log: NewLog, how: str) -> None:
    """By somebody who took the stream's protection off first."""

    async def main(log: Log) -> None:
        assert isinstance(log, JetStreamLog)
        writer = Writer(log, "w", 1, ticking())
        for number in range(1, 6):
            await writer.append(failed(number))
        await _unprotect(log)
        request, payload = {
            "deleted": (f"STREAM.MSG.DELETE.{log.stream}", {"seq": 3}),
            "purged to": (f"STREAM.PURGE.{log.stream}", {"seq": 4}),
            "purged all": (f"STREAM.PURGE.{log.stream}", {}),
        }[how]
        answer = await log.wire.api(request, payload)
        assert answer.get("success"), answer
        first, last = {"deleted": (3, 3), "purged to": (1, 3), "purged all": (1, 5)}[how]
        await writer.append(failed(6))
        seen = []
        with pytest.raises(StreamError, match=rf"stream {log.stream}: sequences {first} to {last} are missing"):
            async for recorded in log.read(until=6):
                seen.append(recorded.seq)  # noqa: PERF401 - those before the error count
        assert seen == list(range(1, first))
        assert [r.seq async for r in log.read(last + 1, until=6)] == list(range(last + 1, 7))
        with pytest.raises(StreamError, match=rf"log {log.run}: no event at sequence {first}"):
            await log.body(first)

    check(jetstream_log, main)


@pytest.mark.parametrize("how", ["deleted", "purged all"])
def test_a_lost_end_is_named_at_once_and_not_waited_for(jetstream_log: NewLog, how: str) -> None:
    async def main(log: Log) -> None:
        assert isinstance(log, JetStreamLog)
        for number in range(1, 4):
            await Writer(log, f"w{number}", 1, ticking()).append(failed(number))
        await _unprotect(log)
        request, payload = {
            "deleted": (f"STREAM.MSG.DELETE.{log.stream}", {"seq": 3}),
            "purged all": (f"STREAM.PURGE.{log.stream}", {}),
        }[how]
        assert (await log.wire.api(request, payload)).get("success")
        first = {"deleted": 3, "purged all": 1}[how]
        for until in (3, None):
            with pytest.raises(StreamError, match=rf"stream {log.stream}: sequences 3 to 3 are missing"):
                [recorded.seq async for recorded in log.read(3, until=until)]
        following = Follower(log)
        with pytest.raises(StreamError, match=rf"stream {log.stream}: sequences {first} to 3 are missing"):
            await following.run()
        assert following.seq == first - 1
        # What comes after it is read by whoever begins there.
        await Writer(log, "later", 1, ticking()).append(failed(4))
        assert [recorded.seq async for recorded in log.read(4, until=4)] == [4]

    check(jetstream_log, main)


async def _unprotect(log: JetStreamLog) -> None:
    """Deleting cannot be allowed again: so the stream is one that never denied it."""
    spec = load_streams().for_run(log.run).log
    wanted = spec.to_api() | {"deny_delete": False, "deny_purge": False}
    bodies = [stored async for stored in log.stored(until=await log.last_seq())]
    await log.wire.api(f"STREAM.DELETE.{log.stream}", {})
    assert "error" not in await log.wire.api(f"STREAM.CREATE.{log.stream}", wanted)
    for stored in bodies:
        await log.publish(stored.subject, stored.body, f"again-{stored.seq}")
