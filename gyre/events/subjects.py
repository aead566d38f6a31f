"""Pure. Subjects: `gyre.<run>.<aggregate>.<id>`, and the stream that holds them."""

import re
from collections.abc import Sequence
from functools import lru_cache

from gyre.errors import ConfigError
from gyre.events.types import Aggregate, Event, aggregate_id

ALL_BUT_CALLS: tuple[Aggregate, ...] = ("run", "group", "execution", "cell", "scheduler", "policy")
"""What a run is steered by. Most events of a run are calls."""
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_token(token: str, what: str) -> str:
    """A name that may stand in a subject, returned as it is. Raises ConfigError."""
    if not _TOKEN.fullmatch(token):
        raise ConfigError(f"{what} {token!r}: use 1 to 64 letters, digits, '_' or '-'")
    return token


def event_subject(run: str, event: Event) -> str:
    return _subject(run, event.aggregate, aggregate_id(event))


@lru_cache(4096)
def _subject(run: str, aggregate: str, token: str) -> str:
    return f"gyre.{run}.{aggregate}.{check_token(token, aggregate)}"


def is_own_subject(run: str, subject: str, event: Event) -> bool:
    """Whether an event stands where its kind and id say; an altered id may be no name at all."""
    token = aggregate_id(event)
    if subject == f"gyre.{run}.{event.aggregate}.{token}":
        return True
    # Calls of older logs stand among their execution's other events.
    return event.aggregate == "call" and subject == f"gyre.{run}.execution.{token}"


def run_subjects(run: str) -> str:
    """All events of a run."""
    return f"gyre.{check_token(run, 'run')}.>"


def aggregate_subjects(run: str, aggregates: Sequence[Aggregate]) -> tuple[str, ...]:
    """All events of these aggregates of a run."""
    return tuple(f"gyre.{check_token(run, 'run')}.{aggregate}.*" for aggregate in aggregates)


def key_subject(run: str, key: str) -> str:
    """Of one key of the run's bucket, as NATS names it; of several parts, as in `alive.c1`."""
    return f"$KV.gyre-{run}.{'.'.join(check_token(part, 'key') for part in key.split('.'))}"


def blob_subject(run: str, digest: str) -> str:
    return f"gyre-blob.{run}.{digest}"
