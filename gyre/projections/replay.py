"""Shell. Verifies a log by replaying it: the same log gives the same chain, tables, cohorts, batches, decisions.

Nothing but the log is read, and no engine is called. Two passes in stream order, O(events): the first notes at which
prefix each recorded result must be computed again, the second folds and compares there. What differs is named by
its own sequence: every event is bound by the `prev` of its writer's next, the last ones by the seal in
`run.tables_recorded`. Events after the last seal are bound by nothing later, and are counted as unsealed.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from gyre.config import Config
from gyre.errors import CodecError, GyreError, ReplayError
from gyre.events.codec import Recorded
from gyre.events.log import Log
from gyre.events.order import Chain
from gyre.events.types import (
    BatchAssembled,
    CohortConsumed,
    Decided,
    Event,
    RunStarted,
    TablesRecorded,
    event_type,
)
from gyre.projections.batches import assemble
from gyre.projections.changes import MemoryTables
from gyre.projections.cohorts import consumed_cohort, next_cohort
from gyre.projections.schemas import BY_NAME
from gyre.projections.tables import Tables


class Scheduler(Protocol):
    """The scheduler's pure core, injected: a fold, and the decision that a prefix calls for."""

    def initial(self) -> Any: ...
    def evolve(self, state: Any, recorded: Recorded) -> Any: ...
    def recompute(self, state: Any, config: Config) -> Decided:
        """Raises ReplayError when the prefix calls for none."""
        ...


class Difference(msgspec.Struct, frozen=True, kw_only=True, order=True):
    seq: int
    what: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    num_events: int
    num_unsealed: int
    """Events after the last seal."""
    num_checked: tuple[tuple[str, int], ...]
    """How many recorded results of each kind were computed again."""
    differences: tuple[Difference, ...]
    """By sequence."""

    @property
    def ok(self) -> bool:
        return not self.differences

    @property
    def first(self) -> Difference | None:
        return self.differences[0] if self.differences else None

    def text(self) -> str:
        if self.first is not None:
            more = f" ({len(self.differences) - 1} more after it)" if len(self.differences) > 1 else ""
            return f"differs first at sequence {self.first.seq}: {self.first.what}{more}"
        checked = ", ".join(f"{num} {name}" for name, num in self.num_checked) or "nothing recorded"
        unsealed = f"; {self.num_unsealed} events after the last seal" if self.num_unsealed else ""
        return f"same as recorded: {self.num_events} events, {checked}{unsealed}"


class _Due(msgspec.Struct, frozen=True):
    """A recorded result, to be computed again at some prefix."""

    seq: int
    event: Event


async def verify(log: Log, *, scheduler: Scheduler | None = None) -> Verdict:
    """Replay the whole log as it is now. Without a scheduler, decisions are not computed again."""
    last = await log.last_seq()
    found: list[Difference] = []
    due: dict[int, list[_Due]] = {}
    num_read = sealed = 0
    try:
        if last:
            async for recorded in log.read(1, until=last):
                num_read = recorded.seq
                prefix = _prefix(recorded)
                if prefix is not None and 0 <= prefix < recorded.seq:
                    due.setdefault(prefix, []).append(_Due(recorded.seq, recorded.event))
                elif prefix is not None:
                    found.append(Difference(seq=recorded.seq, what=f"claims to follow from sequence {prefix}"))
                if isinstance(recorded.event, TablesRecorded):
                    sealed = recorded.seq
    except CodecError as error:
        found.append(Difference(seq=num_read + 1, what=str(error)))
    replay = _Replay(scheduler)
    if num_read:
        replay.compare(due.get(0, ()))
        async for recorded in log.read(1, until=num_read):
            replay.evolve(recorded)
            replay.compare(due.get(recorded.seq, ()))
    found += [Difference(seq=fault.seq, what=fault.what) for fault in replay.chain.faults(replay.altered)]
    return Verdict(
        num_events=num_read,
        num_unsealed=num_read - sealed,
        num_checked=tuple(sorted(replay.num_checked.items())),
        differences=tuple(sorted({*found, *replay.found})),
    )


def _prefix(recorded: Recorded) -> int | None:
    """The sequence at which the event's content is a function of the log; None for a plain fact."""
    match recorded.event:
        case CohortConsumed() | BatchAssembled() | TablesRecorded() as event:
            return event.through_seq
        case Decided():
            return recorded.envelope.cause
        case _:
            return None


class _Replay:
    """All folds at one prefix, and the comparison of what was recorded of it."""

    def __init__(self, scheduler: Scheduler | None) -> None:
        self.found: list[Difference] = []
        self.num_checked: Counter[str] = Counter()
        self.altered: set[tuple[str, int, int]] = set()
        """Events that a seal tells of: a broken link into one is of its own making."""
        self._scheduler = scheduler
        self._state = None if scheduler is None else scheduler.initial()
        self._tables = Tables()
        self._memory = MemoryTables()
        self.chain = Chain()
        self._seqs: dict[tuple[str, int, int], int] = {}

    def evolve(self, recorded: Recorded) -> None:
        envelope = recorded.envelope
        self.chain.observe(recorded)
        self._seqs[envelope.writer, envelope.incarnation, envelope.writer_seq] = recorded.seq
        self._seqs.pop((envelope.writer, envelope.incarnation, envelope.writer_seq - 1), None)
        self._tables.evolve(recorded)
        self._memory.apply(self._tables.take())
        if self._scheduler is not None:
            self._state = self._scheduler.evolve(self._state, recorded)
        if isinstance(recorded.event, RunStarted) and not _holds_its_digest(recorded.event):
            self._differs(recorded.seq, "run.started: the config is not the one that its digest names")

    def compare(self, due: Iterable[_Due]) -> None:
        for item in due:
            try:
                match item.event:
                    case CohortConsumed() as event:
                        self._equal(item.seq, "cohorts", event, self._cohort(event))
                    case BatchAssembled() as event:
                        self._equal(item.seq, "batches", event, self._batch(event))
                    case Decided() as event if self._scheduler is not None:
                        decided = self._scheduler.recompute(self._state, self._tables.config)
                        self._equal(item.seq, "decisions", event, decided)
                    case TablesRecorded() as event:
                        self._seal(item.seq, event)
                    case _:
                        pass
            except GyreError as error:
                self._differs(item.seq, str(error))

    def _cohort(self, recorded: CohortConsumed) -> CohortConsumed:
        cohort = next_cohort(self._tables.experience.cohorts, self._tables.config.pipeline)
        if cohort is None:
            raise ReplayError(f"policy.cohort_consumed: no cohort is complete at sequence {recorded.through_seq}")
        return CohortConsumed(
            step=cohort.step,
            groups=cohort.groups,
            executions=cohort.executions,
            digest=cohort.digest,
            through_seq=recorded.through_seq,
        )

    def _batch(self, recorded: BatchAssembled) -> BatchAssembled:
        experience, config = self._tables.experience, self._tables.config
        cohort = consumed_cohort(experience.cohorts, recorded.step) or next_cohort(experience.cohorts, config.pipeline)
        if cohort is None or cohort.step != recorded.step:
            raise ReplayError(f"policy.batch_assembled: step {recorded.step} has no cohort at {recorded.through_seq}")
        batch = assemble(experience, cohort, config, recorded.step)
        return BatchAssembled(
            step=recorded.step,
            digest=batch.digest,
            through_seq=recorded.through_seq,
            seed=batch.seed,
            num_executions=batch.num_executions,
            num_trajectories=len(batch.rows),
            num_tokens=batch.num_tokens,
            num_targets=batch.num_targets,
            num_microsteps=len(batch.microsteps),
        )

    def _seal(self, seq: int, event: TablesRecorded) -> None:
        """Tables and heads. A head that differs from its event, while the table of events agrees with the record,
        was altered itself; otherwise the event was."""
        self.num_checked["tables"] += len(event.tables)
        holding = {sealed.table for sealed in event.tables if self._memory.holds(sealed)}
        differing = sorted({*BY_NAME, *(sealed.table for sealed in event.tables)} - holding)
        if differing:
            self._differs(seq, f"run.tables_recorded: {', '.join(differing)} differ from the log's")
        heads = self.chain.heads()
        if heads == event.heads:
            return
        altered = {(h.writer, h.incarnation, h.writer_seq) for h in heads if h not in event.heads}
        altered &= {(h.writer, h.incarnation, h.writer_seq) for h in event.heads}
        if "events" not in differing or not altered:
            self._differs(seq, "run.tables_recorded: the heads are not those of the writers")
        else:
            self.altered |= altered
            for writer, incarnation, number in altered:
                at = self._seqs[writer, incarnation, number]
                self._differs(at, f"event {number} of {writer}/{incarnation} is not the one that was sealed")

    def _equal(self, seq: int, kind: str, recorded: Event, computed: Event) -> None:
        self.num_checked[kind] += 1
        fields = [f for f in recorded.__struct_fields__ if getattr(recorded, f) != getattr(computed, f)]
        if fields:
            values = "; ".join(f"{f} is {getattr(recorded, f)}, computed {getattr(computed, f)}" for f in fields)
            self._differs(seq, f"{event_type(recorded)}: {values}")

    def _differs(self, seq: int, what: str) -> None:
        self.found.append(Difference(seq=seq, what=what))


def _holds_its_digest(event: RunStarted) -> bool:
    return hashlib.sha256(event.config.encode()).hexdigest() == event.config_digest
