"""Shell. One file that holds a whole log: header line, then every event in stream order, compressed.

Invariant: bodies are kept byte for byte with their sequences and subjects, large ones whole, so that an
import anywhere has the same digests. The header's digest is over all that follows, uncompressed.
Direction: log -> file (written beside, then put in place), file -> empty log.

Bytes 1-512 are the header: JSON, filled up with spaces, and a newline. The rest is one zstd stream of
records: 4-byte big-endian length, then the MessagePack array [sequence, subject, body]. So
`head -1 FILE` says what it is, and `tail -c +513 FILE | zstd -dc | sha256sum` gives the digest.
"""

import asyncio
import hashlib
import os
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Literal

import msgspec
import pyarrow as pa

import gyre
from gyre.errors import CodecError, MissingError, StreamError
from gyre.events.checkpoint import sync_directory
from gyre.events.log import Log, Stored

HEADER_BYTES = 512
FORMAT = "gyre-archive"
_LENGTH_BYTES = 4
_BLOCK_BYTES = 1 << 20
_MAX_OPEN = 1024
"""Publishes in flight at an import."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line."""

    format: Literal["gyre-archive"] = "gyre-archive"
    version: Literal[1] = 1
    gyre: str
    """That wrote it."""
    run: str
    num_events: int
    digest: str
    """SHA-256 of the records, uncompressed."""
    compression: Literal["zstd"] = "zstd"


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[int, str, bytes])


async def export_log(log: Log, path: Path) -> Header:
    """Write the log as it is now. Raises StreamError for one without events or with a hole."""
    last = await log.last_seq()
    if not last:
        raise StreamError(f"log {log.run}: no events yet: there is nothing to export")
    path.parent.mkdir(parents=True, exist_ok=True)
    new, hasher, block = path.with_name(f"{path.name}.new"), hashlib.sha256(), bytearray()
    try:
        with pa.OSFile(str(new), "wb") as file:
            file.write(bytes(HEADER_BYTES))
            with pa.CompressedOutputStream(file, "zstd") as compressed:
                async for stored in log.stored(1, until=last):
                    record = _encoder.encode((stored.seq, stored.subject, stored.body))
                    block += len(record).to_bytes(_LENGTH_BYTES, "big") + record
                    if len(block) >= _BLOCK_BYTES or stored.seq == last:
                        hasher.update(block)
                        compressed.write(bytes(block))
                        block.clear()
        header = Header(gyre=gyre.__version__, run=log.run, num_events=last, digest=hasher.hexdigest())
        with new.open("r+b") as written:
            written.write(msgspec.json.encode(header).ljust(HEADER_BYTES - 1) + b"\n")
            written.flush()
            os.fsync(written.fileno())
        new.replace(path)
        sync_directory(path.parent)
    finally:
        new.unlink(missing_ok=True)
    return header


def read_header(path: Path) -> Header:
    """Raises MissingError, and CodecError for a file that is no archive or one of a newer gyre."""
    try:
        with path.open("rb") as file:
            first = file.read(HEADER_BYTES)
    except FileNotFoundError:
        raise MissingError(f"{path}: no such archive; `gyre log export RUN_DIR FILE` makes one") from None
    try:
        return msgspec.json.decode(first, type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CodecError(f"{path}: no archive of a log that this gyre can read: {error}") from None


def read_archive(path: Path) -> Iterator[Stored]:
    """Every event in order; at the end the digest is compared. Raises CodecError naming where it is damaged."""
    header, hasher, seq = read_header(path), hashlib.sha256(), 0
    try:
        with pa.OSFile(str(path)) as file:
            file.seek(HEADER_BYTES)
            with pa.CompressedInputStream(file, "zstd") as records:
                while length := records.read(_LENGTH_BYTES):
                    record = records.read(int.from_bytes(length, "big"))
                    hasher.update(length + record)
                    stored = Stored(*_decoder.decode(record))
                    seq = stored.seq
                    yield stored
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise CodecError(f"{path}: damaged after sequence {seq}: {' '.join(str(error).split())}") from None
    if hasher.hexdigest() != header.digest:
        what = "truncated" if seq < header.num_events else "altered"
        raise CodecError(
            f"{path}: {what}: it ends at sequence {seq} of {header.num_events}, and its digest is "
            f"{hasher.hexdigest()}, not {header.digest}"
        )


async def import_log(path: Path, log: Log) -> Header:
    """Publish every event to an empty log, under the sequence that it had. Raises StreamError, and CodecError for a
    damaged archive, of which nothing is published: events stay where they are."""
    header = read_header(path)
    deque(read_archive(path), maxlen=0)
    if last := await log.last_seq():
        raise StreamError(f"log {log.run}: it holds {last} events: an import needs an empty stream")

    async def publish(stored: Stored) -> None:
        # The id is the place, not the event's own: an event that the log held twice is to be there twice again.
        ack = await log.publish(stored.subject, stored.body, f"import-{stored.seq}")
        if ack.seq != stored.seq:
            raise StreamError(
                f"log {log.run}: sequence {stored.seq} was stored as {ack.seq}: does anybody else write to it? "
                "Import again into an empty stream"
            )

    for items in _batches(read_archive(path), _MAX_OPEN):
        async with asyncio.TaskGroup() as group:
            for stored in items:
                group.create_task(publish(stored))
    return header


def _batches(stored: Iterator[Stored], size: int) -> Iterator[list[Stored]]:
    while items := list(islice(stored, size)):
        yield items
