"""Pure. How a stream stores a body that is large: its end goes to a blob, and the blob's name takes its place.

Invariant: `detach` and `attach` are inverse for any bytes, so nobody but the stream sees the
difference. A detached body starts with a word whose highest bit is set (no header is that long) and
whose other bits are the number of bytes kept; then those bytes, then the name of the blob.
"""

from collections.abc import Iterable

from gyre.errors import CodecError
from gyre.events.blobs import NAME_CHARS
from gyre.events.log import Item

INLINE_BYTES = 256 * 1024
"""A longer token tail goes to the blobs: a blob is hashed once more, and acknowledged before its event is sent."""
KEPT_BYTES = 256 * 1024
"""A longer header goes there too: a message may have 1 MB."""
_WORD = 4
_DETACHED = 1 << 31
_MARK = b"\x80"


def are_inline(items: Iterable[Item]) -> bool:
    """Whether these are surely stored as they are, seen at once."""
    for item in items:  # half the time of `all`, on the way of every append
        body = item.body
        if len(body) > INLINE_BYTES or body[:1] >= _MARK:
            return False
    return True


def detach(body: bytes) -> tuple[bytes, bytes] | None:
    """(what is kept, what becomes a blob), or None for a body that is stored as it is."""
    if is_detached(body):
        return b"", body
    header_end = _WORD + int.from_bytes(body[:_WORD], "big")
    if header_end > KEPT_BYTES:
        return (b"", body) if len(body) > KEPT_BYTES else None
    return (body[:header_end], body[header_end:]) if len(body) - header_end > INLINE_BYTES else None


def attach(kept: bytes, name: str) -> bytes:
    """The stored form."""
    return (_DETACHED | len(kept)).to_bytes(_WORD, "big") + kept + name.encode()


def is_detached(stored: bytes) -> bool:
    return stored[:1] >= _MARK


def parse_detached(stored: bytes) -> tuple[bytes, str]:
    """(what was kept, name of the blob with the rest). Raises CodecError."""
    end = _WORD + (int.from_bytes(stored[:_WORD], "big") ^ _DETACHED)
    name = stored[end:]
    if len(name) != NAME_CHARS or not name.isalnum():
        raise CodecError(f"stored body: {len(name)} bytes where the name of its blob should be")
    return stored[_WORD:end], name.decode()
