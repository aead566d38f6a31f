"""Pure. What a reader checks of each writer: that nothing is repeated, missing or altered.

Both folds go over events in stream order and keep little: ranges of missing numbers, and the links
of a chain that are still open. Retries may store a writer's events out of order, and a crash may
leave a gap; neither is an error here.
"""

from collections.abc import Collection
from typing import Literal, NamedTuple

import msgspec

from gyre.events.codec import Envelope, Recorded
from gyre.events.types import Head

_KEPT = 4096
"""Ranges of a partial reader, at least: what a writer may have on its way is no more."""
Placement = Literal["new", "repeat", "gap"]
Key = tuple[str, int]
"""(writer, incarnation)."""


class Gap(NamedTuple):
    """Events of a writer that are not on the log, though later ones of it are."""

    writer: str
    incarnation: int
    first: int
    last: int
    seq: int = 0
    """Of the one after them; 0: not known any more."""

    def __str__(self) -> str:
        what = f"event {self.first}" if self.first == self.last else f"events {self.first} to {self.last}"
        place = f", missing before sequence {self.seq}" if self.seq else ""
        return f"{what} of {self.writer}/{self.incarnation}{place}"


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What has been seen of one writer's incarnation."""

    writer: str
    incarnation: int
    base: int
    """The first number that matters: 1, or where the fold began."""
    highest: int
    missing: tuple[tuple[int, int], ...]
    """Ranges below the highest."""


class WriterOrder:
    """Tells new events from repeats, per writer and incarnation."""

    def __init__(self, *, from_start: bool = True, partial: bool = False) -> None:
        """`from_start`: the fold begins at sequence 1, so a writer's first number must be 1. `partial`: it passes
        aggregates over, so that what is missing says nothing, and is kept only where a late retry may still fall."""
        self._from_start, self._partial = from_start, partial
        self._highest: dict[Key, int] = {}
        self._missing: dict[Key, list[tuple[int, int]]] = {}
        self._base: dict[Key, int] = {}
        self._next_seq: dict[tuple[Key, int], int] = {}
        """Of what came after each range that is missing, by the last number of that."""

    def place(self, envelope: Envelope, seq: int = 0) -> Placement:
        """`repeat`: seen before. `gap`: new, and numbers before it are missing so far. Else `new`.

        seq: where it stands, for the report of what is missing before it.
        """
        key, number = (envelope.writer, envelope.incarnation), envelope.writer_seq
        highest = self._highest.get(key)
        if highest is None:
            self._base[key] = 1 if self._from_start else number
            highest = 0
        if number == highest + 1:
            self._highest[key] = number
            return "new"
        if number > highest:
            ranges = self._missing.setdefault(key, [])
            ranges.append((highest + 1, number - 1))
            if self._partial:
                del ranges[: _KEPT if len(ranges) > 2 * _KEPT else 0]
            else:
                self._next_seq[key, number - 1] = seq
            self._highest[key] = number
            return "gap" if number > self._base[key] else "new"
        return "new" if self._fill(key, number, seq) else "repeat"

    def has(self, envelope: Envelope) -> bool:
        """Whether `place` would call it a repeat."""
        key, number = (envelope.writer, envelope.incarnation), envelope.writer_seq
        if number > self._highest.get(key, 0):
            return False
        return not any(first <= number <= last for first, last in self._missing.get(key, ()))

    @property
    def seen(self) -> tuple[Seen, ...]:
        """All that it knows, so that another can go on from here."""
        return tuple(
            Seen(
                writer=key[0],
                incarnation=key[1],
                base=self._base[key],
                highest=self._highest[key],
                missing=tuple(self._missing.get(key, ())),
            )
            for key in sorted(self._highest)
        )

    @classmethod
    def resumed(cls, seen: tuple[Seen, ...], *, from_start: bool) -> "WriterOrder":
        """One that has seen all that."""
        order = cls(from_start=from_start)
        for item in seen:
            key = (item.writer, item.incarnation)
            order._base[key], order._highest[key], order._missing[key] = item.base, item.highest, [*item.missing]
        return order

    def gaps(self) -> tuple[Gap, ...]:
        """Every range of numbers that is still missing: never stored, or on its way still."""
        return tuple(
            Gap(*key, first, last, self._next_seq.get((key, last), 0))
            for key in sorted(self._missing)
            for first, last in self._missing[key]
            if last >= self._base[key]
        )

    def _fill(self, key: Key, number: int, seq: int) -> bool:
        ranges = self._missing.get(key, [])
        for index, (first, last) in enumerate(ranges):
            if first <= number <= last:
                ranges[index : index + 1] = [r for r in ((first, number - 1), (number + 1, last)) if r[0] <= r[1]]
                if number == last:
                    self._next_seq.pop((key, last), None)
                if first < number and not self._partial:
                    self._next_seq[key, number - 1] = seq
                return True
        return False


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """The first place where a writer's chain differs from what was written."""

    seq: int
    writer: str
    incarnation: int
    writer_seq: int
    kind: Literal["altered", "foreign"]
    """`foreign`: a second event under a number that was taken."""

    @property
    def what(self) -> str:
        found = {"altered": "was altered", "foreign": "has two bodies"}[self.kind]
        return f"event {self.writer_seq} of {self.writer}/{self.incarnation} {found}"

    def __str__(self) -> str:
        return f"sequence {self.seq}: {self.what}"


class _Open(msgspec.Struct, frozen=True):
    """An event whose link to the next is not seen yet."""

    seq: int
    digest: str


class Chain:
    """Verifies the `prev` links of every writer over the whole log.

    Event k holds the digest of event k-1. Altering k breaks the link from k alone, since k's own
    `prev` is as it was; altering the `prev` in k breaks the link into k and, as its body changed
    too, the link from k. So where two links in a row are broken the event between them is to
    blame, and else the earlier end is. Nothing binds the last event of a writer but a seal of
    the heads, which who reads it compares.
    """

    def __init__(self) -> None:
        self._order = WriterOrder()
        self._open: dict[Key, dict[int, _Open]] = {}
        self._waiting: dict[Key, dict[int, tuple[int, str]]] = {}
        """(seq, prev) of events whose predecessor is not there yet, by their number."""
        self._broken: dict[Key, dict[int, tuple[int, int]]] = {}
        """Sequences of both ends of each broken link, by the number of the later end."""
        self._highest: dict[Key, int] = {}
        self._foreign: list[Fault] = []

    def observe(self, recorded: Recorded) -> Placement:
        """Take the next stored event, repeats included, in stream order, and say what it is to its writer's others."""
        envelope, seq = recorded.envelope, recorded.seq
        key, number = (envelope.writer, envelope.incarnation), envelope.writer_seq
        chain, waiting = self._open.setdefault(key, {}), self._waiting.setdefault(key, {})
        placed = self._order.place(envelope, seq)
        if placed == "repeat":
            known = chain.get(number)
            if known is not None and known.digest != recorded.digest:
                self._foreign.append(_fault(seq, key, number, "foreign"))
            return placed
        if number == 1:
            self._link(key, 1, 0, "", seq, envelope.prev)
        elif number - 1 in chain:
            before = chain.pop(number - 1)
            self._link(key, number, before.seq, before.digest, seq, envelope.prev)
        else:
            waiting[number] = (seq, envelope.prev)
        after = waiting.pop(number + 1, None)
        if after is not None:
            self._link(key, number + 1, seq, recorded.digest, *after)
        else:
            chain[number] = _Open(seq, recorded.digest)
        self._highest[key] = max(number, self._highest.get(key, 0))
        return placed

    def heads(self) -> tuple[Head, ...]:
        """The last event of every writer so far: what `run.tables_recorded` seals."""
        return tuple(
            Head(writer=key[0], incarnation=key[1], writer_seq=number, digest=self._open[key][number].digest)
            for key, number in sorted(self._highest.items())
        )

    def gaps(self) -> tuple[Gap, ...]:
        return self._order.gaps()

    def faults(self, altered: Collection[tuple[str, int, int]] = ()) -> tuple[Fault, ...]:
        """All that differs, by sequence. A gap is none.

        altered: (writer, incarnation, number) of events that a seal tells of: a broken link into one is of its own
        making, and no fault of the event before it.
        """
        found = list(self._foreign)
        for key, links in self._broken.items():
            for number in sorted(links):
                if number - 1 in links:
                    continue  # the run of broken links that this one belongs to is blamed once
                earlier, later = links[number]
                if number + 1 in links or number == 1:
                    found.append(_fault(later, key, number, "altered"))
                else:
                    found.append(_fault(earlier, key, number - 1, "altered"))
        left = [f for f in found if (f.writer, f.incarnation, f.writer_seq + 1) not in altered]
        return tuple(sorted(left, key=lambda fault: fault.seq))

    def _link(self, key: Key, number: int, before: int, digest: str, seq: int, prev: str) -> None:
        if prev != digest:
            self._broken.setdefault(key, {})[number] = (before, seq)


def _fault(seq: int, key: Key, number: int, kind: Literal["altered", "foreign"]) -> Fault:
    return Fault(seq=seq, writer=key[0], incarnation=key[1], writer_seq=number, kind=kind)
