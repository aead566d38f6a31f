"""Pure. Content-addressed blobs of any size over a store of small objects.

Invariant: an object's name is the SHA-256 of its bytes, so every read verifies itself and a put of
what is there already changes nothing. An object is one chunk (kind 0), or a list of the names of
chunks (kind 1); the blob's name is the name of the object at its root.
"""

import asyncio
import hashlib
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol, TypeVar

from gyre.errors import BlobError

CHUNK_BYTES = 512 * 1024
"""With its name and protocol lines it fits the server's default limit of 1 MB a message."""
NAME_CHARS = 64
MAX_BYTES = CHUNK_BYTES * (CHUNK_BYTES // (NAME_CHARS // 2))
"""One list of chunks must fit one object: 8 GiB."""
_CHUNK, _LIST = b"\x00", b"\x01"
_CONCURRENCY = 8
T = TypeVar("T")


class Objects(Protocol):
    """Where objects live: a stream, or a dict in tests."""

    async def put_object(self, name: str, content: bytes) -> None:
        """Durable when it returns; a name that is there already is a success. Raises StreamError."""
        ...

    async def get_object(self, name: str) -> bytes:
        """Raises BlobError when there is none."""
        ...


async def put_blob(objects: Objects, content: bytes) -> str:
    """Store a blob; returns its name once all of it is durable. Raises BlobError when it is too large."""
    if len(content) > MAX_BYTES:
        raise BlobError(f"blob of {len(content)} bytes: at most {MAX_BYTES} fit; split it")
    view = memoryview(content)
    chunks = [_CHUNK + view[at : at + CHUNK_BYTES] for at in range(0, len(content), CHUNK_BYTES)] or [_CHUNK]
    names = [_name(chunk) for chunk in chunks]
    turn = asyncio.Semaphore(_CONCURRENCY)

    async def put(name: str, chunk: bytes) -> None:
        async with turn:
            await objects.put_object(name, chunk)

    await _all(put(name, chunk) for name, chunk in zip(names, chunks, strict=True))
    if len(names) == 1:
        return names[0]
    root = _LIST + b"".join(bytes.fromhex(name) for name in names)
    await objects.put_object(_name(root), root)
    return _name(root)


async def get_blob(objects: Objects, name: str) -> bytes:
    """Raises BlobError when a part is missing or not what its name says."""
    root = await _get_verified(objects, name)
    if root[:1] == _CHUNK:
        return root[1:]
    size = NAME_CHARS // 2
    names = [root[at : at + size].hex() for at in range(1, len(root), size)]
    turn = asyncio.Semaphore(_CONCURRENCY)

    async def get(chunk_name: str) -> bytes:
        async with turn:
            return (await _get_verified(objects, chunk_name))[1:]

    return b"".join(await _all(get(chunk_name) for chunk_name in names))


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """At once; the first error ends the others, and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(item) for item in work]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _get_verified(objects: Objects, name: str) -> bytes:
    content = await objects.get_object(name)
    if _name(content) != name:
        raise BlobError(f"blob {name}: its bytes hash to {_name(content)}: the store is damaged")
    return content


def _name(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
