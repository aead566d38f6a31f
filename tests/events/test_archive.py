"""One file for a log: what comes out is what went in, byte for byte, or an error that says where it is damaged."""

import asyncio
import hashlib
import itertools
import os
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.errors import CodecError, GyreError, MissingError, StreamError
from gyre.events.archive import HEADER_BYTES, export_log, import_log, read_archive, read_header
from gyre.events.codec import encode
from gyre.events.log import Log, Stored, Writer
from gyre.events.memory import MemoryLog
from tests.conftest import NewLog
from tests.events.events import envelope, failed, started, ticking

_numbers = itertools.count()


async def fill(log: Log, num: int = 40) -> None:
    """Small bodies, one whose end goes to the blobs, and one that the log holds twice."""
    writer = Writer(log, "w", 1, ticking())
    large = started(os.urandom(1_200_000))
    for number in range(num):
        await writer.append(large if number == 7 else failed(number), cause=number and 1)
    twice = encode(envelope(failed(1), 1, writer="v"))
    for msg_id in ("a", "b"):
        await log.publish(f"gyre.{log.run}.execution.g0001-0", twice, msg_id)


async def stored_in(log: Log) -> list[Stored]:
    return [stored async for stored in log.stored(1, until=await log.last_seq())]


async def archive(path: Path, num: int = 40) -> MemoryLog:
    log = MemoryLog("r")
    await fill(log, num)
    await export_log(log, path)
    return log


def _intact() -> bytes:
    """The bytes of an archive of twelve events."""

    async def main() -> None:
        log = MemoryLog("r")
        writer = Writer(log, "w", 1, ticking())
        for number in range(12):
            await writer.append(failed(number))
        await export_log(log, path)

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "a.gyre"
        asyncio.run(main())
        return path.read_bytes()


INTACT = _intact()


def test_export_and_import_keep_every_byte_on_any_log(jetstream_log: NewLog, tmp_path: Path) -> None:
    async def main() -> None:
        first, second = tmp_path / "1.gyre", tmp_path / "2.gyre"
        async with jetstream_log() as log:
            await fill(log)
            header = await export_log(log, first)
            original = await stored_in(log)
            assert [item.seq for item in original] == list(range(1, 43))
        assert read_header(first) == header
        assert (header.run, header.num_events) == (log.run, 42)
        assert list(read_archive(first)) == original
        memory = MemoryLog(log.run)
        await import_log(first, memory)
        assert await stored_in(memory) == original
        assert (await export_log(memory, second)).digest == header.digest

    asyncio.run(main())


def test_the_digest_is_what_anybody_gets_from_the_decompressed_records(tmp_path: Path) -> None:
    path = tmp_path / "a.gyre"
    asyncio.run(archive(path))
    with path.open("rb") as file:
        assert file.readline().startswith(b'{"format":"gyre-archive","version":1')
        assert file.tell() == HEADER_BYTES
        records = pa.CompressedInputStream(pa.py_buffer(file.read()), "zstd").read()
    assert hashlib.sha256(records).hexdigest() == read_header(path).digest


@settings(max_examples=60)
@given(at=st.integers(0, 10**9), bit=st.integers(0, 7), cut=st.booleans())
def test_damage_anywhere_is_an_error(at: int, bit: int, cut: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    content = bytearray(INTACT)
    at %= len(content)
    if cut:
        content = content[:at]
    else:
        content[at] ^= 1 << bit
    path = tmp_path_factory.mktemp("a") / f"{next(_numbers)}.gyre"
    path.write_bytes(content)
    read: list[Stored] = []
    try:
        read.extend(read_archive(path))
    except CodecError as error:
        assert str(error).startswith(f"{path}: ")
    else:
        # The digest does not cover the run's name and who wrote it, and a bit of the compression may mean nothing.
        path.write_bytes(INTACT)
        assert at < HEADER_BYTES or read == [*read_archive(path)]
        assert len(read) == 12


def test_an_import_needs_an_empty_log_and_an_export_a_log_that_is_not(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "a.gyre"
        log = await archive(path, 3)
        with pytest.raises(StreamError, match="it holds 5 events: an import needs an empty stream"):
            await import_log(path, log)
        with pytest.raises(StreamError, match="no events yet"):
            await export_log(MemoryLog("r"), tmp_path / "b.gyre")
        assert [item.name for item in tmp_path.iterdir()] == ["a.gyre"]

    asyncio.run(main())


def test_nothing_of_a_damaged_archive_is_imported(tmp_path: Path) -> None:
    path = tmp_path / "a.gyre"
    path.write_bytes(INTACT[:-9])
    log = MemoryLog("r")
    with pytest.raises(CodecError, match=r"a.gyre: (damaged|truncated)"):
        asyncio.run(import_log(path, log))
    assert not log._stored


def test_what_is_no_archive_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="no such archive; `gyre log export"):
        read_header(tmp_path / "none.gyre")
    (tmp_path / "x").write_bytes(b"\x00\xff" * 600)
    with pytest.raises(CodecError, match="no archive of a log"):
        read_header(tmp_path / "x")
    newer = INTACT.replace(b'"version":1', b'"version":2', 1)
    (tmp_path / "newer").write_bytes(newer)
    with pytest.raises(CodecError, match=r"no archive of a log that this gyre can read: .*version"):
        read_header(tmp_path / "newer")


def test_an_export_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    class Holed(MemoryLog):
        async def last_seq(self) -> int:
            return await super().last_seq() + 1

        async def stored(self, start: int = 1, *, until: int | None = None, only=()):  # type: ignore[no-untyped-def]
            async for stored in super().stored(start, until=len(self._stored)):
                yield stored
            raise StreamError("sequences 4 to 4 are missing")

    async def main() -> None:
        log = Holed("r")
        await Writer(log, "w", 1, ticking()).append(failed(1))
        with pytest.raises(GyreError, match="are missing"):
            await export_log(log, tmp_path / "a.gyre")

    asyncio.run(main())
    assert not list(tmp_path.iterdir())
