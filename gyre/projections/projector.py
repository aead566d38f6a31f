"""Shell. The log -> DuckDB, and SQL for whoever asks while it runs.

Invariant: the file holds the tables of the log through its checkpoint, no more and no less. The fold starts at
sequence 1 whatever the checkpoint; changes up to the checkpoint are in the file already and are let go. A transaction
costs the same for few events as for many, so rows are made when somebody asks for them, or many at once.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gyre.events.codec import Recorded
from gyre.events.follow import Waits
from gyre.events.log import Log, Writer
from gyre.events.order import Chain
from gyre.events.types import RunFinished, RunResumed, TablesRecorded
from gyre.projections.sql_service import SqlService
from gyre.projections.store import SETTLE_S, Store
from gyre.projections.tables import Tables

MAX_EVENTS = 2000
"""In one transaction."""
MIN_WAIT_S = 30.0
"""Between an event and its row, unless many come at once, or somebody asks."""
MAX_WAIT_S = 2.0
MAX_SHARE = 0.05
"""Of the time that transactions may take: where they are slow, more events go into one."""
QUIET_S = 0.5
"""Without an event after `run.finished`: then the other processes are done."""
ASKED_S = 10.0
"""How long an answer waits for the rows of what was read before it was asked for."""


class Projector:
    """The fold, the store, and how far each is."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.tables = Tables()
        self.chain = Chain()
        self.is_finished = False
        """`run.finished` was seen, and nothing since that takes it back."""
        self.is_recorded = False
        self._checkpoint = self._through = store.through_seq
        self._num_pending = 0
        self._waits = Waits()

    def evolve(self, recorded: Recorded) -> None:
        self.chain.observe(recorded)
        self.tables.evolve(recorded)
        if recorded.seq <= self._checkpoint:
            self.tables.take()
        else:
            self._num_pending += 1
        match recorded.event:
            case RunFinished():
                self.is_finished, self.is_recorded = True, False
            case RunResumed():
                self.is_finished = False
            case TablesRecorded():
                self.is_recorded = True
            case _:
                pass

    @property
    def num_pending(self) -> int:
        """Events whose rows are not in the file."""
        return self._num_pending

    async def flush(self) -> None:
        if self._num_pending:
            changes, self._num_pending, through = self.tables.take(), 0, self.tables.seq
            applying = asyncio.ensure_future(asyncio.to_thread(self.store.apply, changes, through))
            try:
                await asyncio.shield(applying)
            finally:
                await applying  # when cancelled too: the store is closed next
            self._through = through
            self._waits.notify()

    async def written(self, through: int) -> None:
        """Waits until the file has the rows of all events through this one."""
        await self._waits.wait_for(lambda: self._through >= through)


async def run_projector(log: Log, writer: Writer, *, run_dir: Path) -> None:
    """Consumes every event; produces rows, answers, and at the end `run.tables_recorded`.

    Waits for events; is unblocked by the next one, by a question, by the time for the next transaction, and, after
    `run.finished`, by `QUIET_S` without any. Returns once the digests are recorded.
    """
    arrived: asyncio.Queue[Recorded | None] = asyncio.Queue(MAX_EVENTS)
    loop = asyncio.get_running_loop()

    async def read() -> None:
        async for recorded in log.read(1):
            await arrived.put(recorded)

    async def written() -> None:
        if projector.num_pending:
            await arrived.put(None)
        await projector.written(projector.tables.seq)

    def refresh() -> None:
        with suppress(TimeoutError):  # an answer that is a little old is better than none
            asyncio.run_coroutine_threadsafe(written(), loop).result(ASKED_S)

    # Whoever reads the file of a run that stands still holds it for a moment.
    with await asyncio.to_thread(Store, run_dir / "tables.duckdb", patience_s=SETTLE_S) as store:
        projector = Projector(store)
        async with SqlService(store, run_dir, refresh):
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(read())
                try:
                    await _project(projector, arrived)
                except asyncio.CancelledError:
                    await projector.flush()  # whoever asks the file next shall find all that was read
                    raise
                reader.cancel()
            if not projector.is_recorded:
                digests = await asyncio.to_thread(store.table_digests)
                through = projector.tables.seq
                event = TablesRecorded(through_seq=through, tables=digests, heads=projector.chain.heads())
                await writer.append(event, cause=through)


async def _project(projector: Projector, arrived: asyncio.Queue[Recorded | None]) -> None:
    """Until the run is finished and quiet. None among what arrives: somebody wants the rows of what came before it."""
    clock = asyncio.get_running_loop().time
    due = quiet = clock()
    earliest = 0.0
    while True:
        wait = (due if projector.num_pending else quiet + QUIET_S if projector.is_finished else None, clock())
        try:
            async with asyncio.timeout(None if wait[0] is None else max(0.0, wait[0] - wait[1])):
                recorded = await arrived.get()
        except TimeoutError:
            earliest = await _flush(projector, clock)
            if projector.is_finished and clock() >= quiet + QUIET_S:
                return
            continue
        if recorded is None:
            earliest = await _flush(projector, clock)
            continue
        quiet = clock()
        if not projector.num_pending:
            due = max(quiet + MIN_WAIT_S, earliest)
        projector.evolve(recorded)
        if projector.is_finished:
            due = min(due, quiet + QUIET_S)
        if projector.num_pending >= MAX_EVENTS or (projector.num_pending and quiet >= due):
            earliest = await _flush(projector, clock)


async def _flush(projector: Projector, clock: Callable[[], float]) -> float:
    """Returns the earliest time of the next transaction."""
    begun = clock()
    await projector.flush()
    return clock() + min((clock() - begun) / MAX_SHARE, MAX_WAIT_S)
