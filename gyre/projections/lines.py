"""Pure. One line of text an event: what `gyre tail` prints."""

import msgspec

from gyre.events.codec import Recorded, UnknownEvent
from gyre.events.tokens import num_tokens
from gyre.events.types import event_type

MAX_CHARS = 60
HIDDEN = frozenset({"type", "config", "marks", "heads"})


def event_line(recorded: Recorded) -> str:
    """`<seq> <type> <field>=<value> ...`: tokens as their number, long texts cut."""
    event = recorded.event
    if isinstance(event, UnknownEvent):
        return f"{recorded.seq} {event.name} (of a newer gyre)"
    fields = (f"{name}={_short(getattr(event, name))}" for name in type(event).__struct_fields__ if name not in HIDDEN)
    return f"{recorded.seq} {event_type(event)} {' '.join(fields)}"


def _short(value: object) -> str:
    if isinstance(value, bytes):
        return f"{num_tokens(value)} tokens"
    if isinstance(value, float):
        return f"{value:.4g}"
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= MAX_CHARS else f"{text[: MAX_CHARS - 3]}..."
