"""Shell. Tables and summary of a log that came without them, or that grew when nobody projected it: an imported run
answers as the original does, and one that was graded again has its rows.

One transaction is written while the events of the next are folded, so at most two are in memory.
"""

import asyncio
from pathlib import Path
from typing import Any

from gyre.events.log import Log
from gyre.projections.progress import Progress
from gyre.projections.store import SETTLE_S, Store
from gyre.projections.tables import Tables

_BATCH = 20_000
"""Events a transaction."""


async def rebuild(log: Log, path: Path) -> dict[str, Any]:
    """Write what `path` lacks of the log, as the projector would have; returns the summary."""
    tables, progress, num = Tables(), Progress(), 0
    written: asyncio.Future[None] | None = None
    with await asyncio.to_thread(Store, path, patience_s=SETTLE_S) as store:
        through_seq = store.through_seq
        try:
            async for recorded in log.read(1, until=await log.last_seq()):
                tables.evolve(recorded)
                progress.evolve(recorded)
                if recorded.seq <= through_seq:
                    tables.take()  # they are there
                    continue
                num += 1
                if num % _BATCH == 0:
                    if written is not None:
                        await written
                    written = asyncio.ensure_future(asyncio.to_thread(store.apply, tables.take(), recorded.seq))
        finally:
            if written is not None:
                await written
        if tables.seq > through_seq:
            store.apply(tables.take(), tables.seq)
    return progress.summary()
