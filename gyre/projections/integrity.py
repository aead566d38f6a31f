"""Pure. What is wrong with a stored log, without computing its results again: altered, missing, out of place.

Three things bind an event: its body is canonical and names itself (codec); its writer's next event holds its digest
(`prev` chain); and `run.tables_recorded` seals the table of all events up to a sequence, their order included. A
writer's events may be stored out of their order by a retry, and a crash may leave a gap: neither is a fault by
itself. `gyre replay --verify` checks the rest: that cohorts, batches and decisions follow from the events.
"""

import hashlib
from collections import deque
from collections.abc import AsyncIterator

import msgspec

from gyre.errors import BlobError, CodecError, StreamError
from gyre.events.codec import UnknownEvent
from gyre.events.log import Stored
from gyre.events.memory import recorded_from
from gyre.events.order import Chain
from gyre.events.subjects import is_own_subject
from gyre.events.types import TablesRecorded
from gyre.projections.schemas import BY_NAME, canonical
from gyre.projections.tables import event_columns

_NAMES = BY_NAME["events"].names
_KEPT = 100_000
"""A seal comes soon after the last event that it covers."""


class Finding(msgspec.Struct, frozen=True, kw_only=True, order=True):
    seq: int
    what: str


class Integrity(msgspec.Struct, frozen=True, kw_only=True):
    num_events: int
    num_sealed: int
    """Events whose order and digests a seal confirms."""
    num_out_of_order: int
    """Stored after a later one of the same writer, as a retry may do."""
    num_gaps: int
    """Numbers of writers that nobody has, as a crash may leave."""
    findings: tuple[Finding, ...]
    """By sequence."""

    @property
    def ok(self) -> bool:
        return not self.findings

    def text(self) -> str:
        if self.findings:
            first, *more = self.findings
            rest = f" ({len(more)} more after it)" if more else ""
            return f"damaged, first at sequence {first.seq}: {first.what}{rest}"
        notes = [f"{self.num_events} events, {self.num_sealed} of them sealed with their order"]
        if self.num_out_of_order:
            notes.append(f"{self.num_out_of_order} stored late by a retry")
        if self.num_gaps:
            notes.append(f"{self.num_gaps} never stored (a process was killed)")
        return f"intact: {'; '.join(notes)}"


class Examination:
    """Takes every stored event in order, then says what it found."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._findings: list[Finding] = []
        self._chain = Chain()
        self._hasher = hashlib.sha256()
        self._recent: deque[tuple[int, str]] = deque(maxlen=_KEPT)
        """Digest of the table of events through each of the last sequences."""
        self._place: dict[tuple[str, int], tuple[int, int]] = {}
        """Highest number of each writer, and its sequence."""
        self._late: list[int] = []
        self._gaps: list[tuple[int, tuple[str, int], int]] = []
        """Sequence of each event that came before the one in front of it, writer, number of that one."""
        self._altered: set[tuple[str, int, int]] = set()
        """Events that a seal tells of, as `Chain.faults` takes them."""
        self._sealed = 0
        self.seq = 0

    def fail(self, seq: int, what: str) -> None:
        self._findings.append(Finding(seq=seq, what=what))

    def take(self, stored: Stored) -> None:
        if stored.seq != self.seq + 1:
            at = (
                "out of place"
                if stored.seq <= self.seq
                else f"sequences {self.seq + 1} to {stored.seq - 1} are missing"
            )
            self.fail(min(stored.seq, self.seq + 1), at)
        self.seq = stored.seq
        try:
            recorded = recorded_from(self._run, stored.seq, stored.subject, stored.body)
        except CodecError as error:
            self.fail(stored.seq, str(error).partition(f"sequence {stored.seq}: ")[2])
            return
        envelope = recorded.envelope
        event = recorded.event
        if not isinstance(event, UnknownEvent) and not is_own_subject(self._run, stored.subject, event):
            self.fail(stored.seq, f"it stands on subject {stored.subject}, which is not its own")
        if envelope.cause >= stored.seq:
            what = f"its cause, sequence {envelope.cause}, does not come before it"
            self.fail(stored.seq, f"{what}: an event is missing, or they changed places")
        placed = self._chain.observe(recorded)
        if placed == "repeat":
            return
        key = (envelope.writer, envelope.incarnation)
        if placed == "gap":
            self._gaps.append((stored.seq, key, envelope.writer_seq - 1))
        if envelope.writer_seq > self._place.get(key, (0, 0))[0]:
            self._place[key] = (envelope.writer_seq, stored.seq)
        else:
            self._late.append(stored.seq)
        row = {"seq": stored.seq, **event_columns(recorded)}
        if isinstance(recorded.event, TablesRecorded):
            self._compare(stored.seq, recorded.event)
        self._hasher.update(canonical(row.get(name) for name in _NAMES))
        self._recent.append((stored.seq, self._hasher.hexdigest()[:32]))

    def result(self) -> Integrity:
        links = [Finding(seq=fault.seq, what=fault.what) for fault in self._chain.faults(self._altered)]
        return Integrity(
            num_events=self.seq,
            num_sealed=self._sealed,
            num_out_of_order=len(self._late),
            num_gaps=sum(gap.last - gap.first + 1 for gap in self._chain.gaps()),
            findings=tuple(sorted({*self._findings, *links})),
        )

    def _compare(self, seq: int, seal: TablesRecorded) -> None:
        """Of a table of events that differs, one event is to blame that the chain names, or else their order."""
        recorded = next((t.digest for t in seal.tables if t.table == "events"), "")
        found = next((digest for at, digest in reversed(self._recent) if at <= seal.through_seq), "")
        if not recorded or not found:
            return  # it seals no table, or events so long ago that their digest is not at hand
        is_same = recorded == found
        if is_same:
            self._sealed = seal.through_seq
        for head in seal.heads:
            number, at = self._place.get((head.writer, head.incarnation), (0, 0))
            if number < head.writer_seq:
                self.fail(seq, f"event {number + 1} of {head.writer}/{head.incarnation} was sealed here and is missing")
        altered = {(h.writer, h.incarnation, h.writer_seq): h.digest for h in self._chain.heads()}
        for head in seal.heads:
            key = (head.writer, head.incarnation, head.writer_seq)
            if altered.get(key, head.digest) != head.digest:
                at = seq if is_same else self._place[key[:2]][1]
                if not is_same:
                    self._altered.add(key)
                self.fail(at, "the seal was altered" if is_same else f"event {key[2]} of {key[0]}/{key[1]} was altered")
        if not is_same and not self._findings and not self._chain.faults():
            at, what = self._suspect(seal.through_seq)
            self.fail(at, f"{what}; sequence {seq} sealed other events or another order")

    def _suspect(self, through: int) -> tuple[int, str]:
        """What a retry or a crash might have done, but had not when the events up to `through` were sealed."""
        missing = {(gap.writer, gap.incarnation, gap.last) for gap in self._chain.gaps()}
        suspects = [(at, "it was moved behind a later one of its writer") for at in self._late]
        suspects += [
            (at, f"event {number} of {key[0]}/{key[1]} is missing before it")
            for at, key, number in self._gaps
            if (*key, number) in missing
        ]
        between = (self._sealed + 1, f"it or one up to sequence {through} is not where it was")
        return min((item for item in suspects if item[0] > self._sealed), default=between)


async def examine(run: str, stored: AsyncIterator[Stored]) -> Integrity:
    """The whole of a log or an archive, or as much of it as can be read."""
    examination = Examination(run)
    try:
        async for item in stored:
            examination.take(item)
    except (BlobError, CodecError, StreamError) as error:
        examination.fail(examination.seq + 1, str(error))
    return examination.result()
