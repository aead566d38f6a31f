"""Shell. Trajectories that completed steps were trained on -> one file.

Invariants: what is written is what was trained, by its recorded digest; a rejected step, or one that is not complete,
is not in it; the file appears whole or not at all; memory holds one batch and the executions that wait for a step.
Direction: log -> batches, in one pass -> file.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from pyarrow import parquet

from gyre.events.log import Log
from gyre.events.types import BatchAssembled, StepCompleted
from gyre.projections.batches import Batch
from gyre.projections.recorded_batches import Explanation, RecordedBatches
from gyre.projections.trajectories import schema, to_arrow


class Exported(msgspec.Struct, kw_only=True):
    num_steps: int = 0
    num_trajectories: int = 0


async def export_parquet(log: Log, path: Path, min_score: float | None = None) -> Exported:
    """Columns as in `trajectories.COLUMNS`. Raises ReplayError when a batch is not the recorded one."""
    done, columns = Exported(), schema(log.run)
    with _whole(path) as part, parquet.ParquetWriter(part, columns, compression="zstd") as writer:
        async for batch in trained_batches(log):
            done.num_steps += 1
            for records in to_arrow(batch, columns, min_score):
                writer.write_batch(records)
                done.num_trajectories += records.num_rows
    return done


async def export_lines(log: Log, path: Path, lines: Callable[[Batch], Iterable[bytes]]) -> Exported:
    """What `lines` makes of each batch, a line each. Raises ReplayError when a batch is not the recorded one."""
    done = Exported()
    with _whole(path) as part, part.open("wb") as file:
        async for batch in trained_batches(log):
            done.num_steps += 1
            for line in lines(batch):
                file.write(line + b"\n")
                done.num_trajectories += 1
    return done


async def trained_batches(log: Log) -> AsyncIterator[Batch]:
    """Of every completed step, in order."""
    fold, last = RecordedBatches(), await log.last_seq()
    if last:
        async for recorded in log.read(1, until=last):
            if isinstance(recorded.event, StepCompleted):
                yield fold.batch(recorded.event.step)
            fold.evolve(recorded)


async def explanation_of(log: Log, step: int = 0) -> Explanation | None:
    """Of the batch last assembled for a step, trained or not; 0: of the last one of all. None: there is none."""
    last, at = await log.last_seq(), 0
    if last:
        async for recorded in log.read(1, until=last):
            if isinstance(recorded.event, BatchAssembled) and step in (0, recorded.event.step):
                at, found = recorded.seq, recorded.event.step
    if not at:
        return None
    fold = RecordedBatches()
    async for recorded in log.read(1, until=at):
        fold.evolve(recorded)
    return fold.explanation(found)


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A file beside `path` that gets its name when the block ends well, and is removed when it does not."""
    part = path.with_name(f".{path.name}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
