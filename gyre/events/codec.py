"""Pure. Event bodies: canonical bytes out, typed events in.

Layout: 4-byte big-endian header length, the header as canonical JSON (sorted keys), then a binary
tail. A `bytes` field stands in the header as its number of bytes; the tail holds the bytes of those
fields in the order of the type's fields. Equal events have equal bodies, so a body's digest names it.
"""

import hashlib
import math
import sys
from functools import cache, reduce
from operator import or_
from types import GenericAlias, UnionType
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
import orjson

from gyre.errors import CodecError
from gyre.events.types import EVENT_TYPES, Event, event_type

_LENGTH_BYTES = 4
_BYTES = (bytes,)
_FINITE = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]


class UnknownEvent(Event, frozen=True, kw_only=True, tag="unknown"):
    """An event of a newer gyre: passed through, so that an old reader survives it."""

    name: str
    payload: bytes
    tail: bytes


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """Who wrote what, after what, and why."""

    writer: str
    incarnation: int
    writer_seq: int
    """1, 2, 3, ... within (writer, incarnation)."""
    prev: str
    """Digest of the writer's previous body; empty for the first of an incarnation."""
    time_ns: int
    """Recorded, never ordered by."""
    cause: int
    """Sequence of the event that led here; 0 for none."""
    event: Event

    @property
    def id(self) -> str:
        """Also the Msg-Id by which the server drops a repeat."""
        return event_id(_name(self.event), self.writer, self.incarnation, self.writer_seq)


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """An event as read back: its place in the total order, and its body's digest."""

    seq: int
    subject: str
    digest: str
    envelope: Envelope

    @property
    def event(self) -> Event:
        """In its newest version; the envelope has it as it was written."""
        return self.envelope.event.upcast()


def event_id(name: str, writer: str, incarnation: int, writer_seq: int) -> str:
    return hashlib.sha256(f"{name} {writer} {incarnation} {writer_seq}".encode()).hexdigest()[:32]


def body_digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:32]


def encode(envelope: Envelope) -> bytes:
    """Canonical bytes. Raises CodecError for a value of the wrong type, and for a non-finite number."""
    return encode_with_id(envelope)[1]


def encode_with_id(envelope: Envelope) -> tuple[str, bytes]:
    """The event's id and its canonical bytes. Raises CodecError as `encode`."""
    event = envelope.event
    if type(event) is UnknownEvent:
        name, payload, tail = event.name, orjson.Fragment(event.payload), [event.tail]
    else:
        name, checked, bytes_fields = _form(type(event))
        try:
            # What is wrong must not reach the log: it would stay there. An int where a float belongs becomes one here,
            # so that equal events have equal bodies.
            typed = msgspec.convert(event, checked, builtin_types=_BYTES, from_attributes=True)
        except (msgspec.ValidationError, TypeError, UnicodeEncodeError) as error:
            _refuse_non_finite(event, name)
            raise CodecError(f"event {name}: {error}") from None
        payload = msgspec.to_builtins(typed, builtin_types=_BYTES)
        tail = []
        for field in bytes_fields:  # for so few a comprehension takes longer
            tail.append(payload[field])
    msg_id = event_id(name, envelope.writer, envelope.incarnation, envelope.writer_seq)
    try:
        header = orjson.dumps(
            {
                "cause": envelope.cause,
                "id": msg_id,
                "incarnation": envelope.incarnation,
                "payload": payload,
                "prev": envelope.prev,
                "time_ns": envelope.time_ns,
                "type": name,
                "writer": envelope.writer,
                "writer_seq": envelope.writer_seq,
            },
            len,  # of a `bytes` field
        )
    except orjson.JSONEncodeError as error:
        raise CodecError(f"event {name}: {error}") from None
    return msg_id, b"".join([len(header).to_bytes(_LENGTH_BYTES, "big"), header, *tail])


class _Form(NamedTuple):
    """How a type of events is written."""

    name: str
    checked: type[msgspec.Struct]
    bytes_fields: tuple[str, ...]


@cache
def _form(cls: type[Event]) -> _Form:
    return _Form(event_type(cls), _checked(cls), _bytes_fields(cls))


@cache
def _checked(cls: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """A class with the same fields in the order of their names, and without a tag: msgspec takes an instance of the
    very class as it is, but looks at each value of another's."""
    fields = sorted(msgspec.structs.fields(cls), key=lambda field: field.name)
    return msgspec.defstruct(
        cls.__name__,
        [(field.name, _checked_hint(field.type), msgspec.field(default=field.default)) for field in fields],
        kw_only=True,
        omit_defaults=cls.__struct_config__.omit_defaults,
        gc=False,
    )


def _checked_hint(hint: Any) -> Any:
    """The hint of a field with all structs in it replaced, and JSON's limits: it would hide a NaN as null."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        if _bytes_fields(hint):
            raise TypeError(f"{hint.__name__}: only an event itself may have fields of bytes")
        return _checked(hint)
    args = tuple(_checked_hint(arg) for arg in get_args(hint))
    if isinstance(hint, UnionType):
        return reduce(or_, args)
    if get_origin(hint) is tuple:
        return GenericAlias(tuple, args)
    return _FINITE if hint is float else hint


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    id: str
    writer: str
    incarnation: int
    writer_seq: int
    prev: str
    time_ns: int
    cause: int
    payload: msgspec.Raw


_header_decoder = msgspec.json.Decoder(_Header)


def decode(body: bytes) -> Envelope:
    """Raises CodecError, with the reason, for a body that `encode` could not have made."""
    end = _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "big")
    if len(body) < end or end == _LENGTH_BYTES:
        raise CodecError(f"event body: truncated: header ends at byte {end}, the body at {len(body)}")
    try:
        header = _header_decoder.decode(body[_LENGTH_BYTES:end])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CodecError(f"event body: header: {error}") from None
    envelope = Envelope(
        writer=header.writer,
        incarnation=header.incarnation,
        writer_seq=header.writer_seq,
        prev=header.prev,
        time_ns=header.time_ns,
        cause=header.cause,
        event=_decode_payload(header.type, bytes(header.payload), body[end:]),
    )
    msg_id, canonical = encode_with_id(envelope)
    if header.id != msg_id:
        raise CodecError(f"event body: id {header.id} is not the hash of its type, writer and writer_seq")
    if canonical != body:
        raise CodecError(f"event body: {header.type}: not in canonical form: it was altered")
    return envelope


def _decode_payload(name: str, raw: bytes, tail: bytes) -> Event:
    cls = EVENT_TYPES.get(name)
    if cls is None:
        return UnknownEvent(name=name, payload=raw, tail=tail)
    try:
        payload = msgspec.json.decode(raw)
        at = 0
        for field in _bytes_fields(cls):
            size = payload[field]
            if type(size) is not int or not 0 <= size <= len(tail) - at:
                raise CodecError(f"event body: {name}: {field} needs {size} bytes, the tail has {len(tail) - at}")
            payload[field] = tail[at : at + size]
            at += size
        if at != len(tail):
            raise CodecError(f"event body: {name}: {len(tail) - at} bytes after the last field")
        return msgspec.convert({**payload, "type": name}, cls, builtin_types=_BYTES)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError) as error:
        raise CodecError(f"event body: {name}: {error}") from None


@cache
def _bytes_fields(cls: type[Event]) -> tuple[str, ...]:
    hints = get_type_hints(cls)
    return tuple(f for f in cls.__struct_fields__ if hints[f] is bytes)


def _name(event: Event) -> str:
    return event.name if isinstance(event, UnknownEvent) else event_type(event)


def _refuse_non_finite(value: Any, path: str) -> None:
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise CodecError(f"event {path}: {value} is not a finite number")
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_non_finite(item, f"{path}.{key}")
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            _refuse_non_finite(item, f"{path}[{index}]")
