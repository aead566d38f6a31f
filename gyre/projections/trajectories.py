"""Pure. The trajectories of a batch as Arrow: what `gyre export --format parquet` writes, and what its columns mean.

Invariant: a row is a trajectory as it was trained; lists have one entry a token, null where the token is no target.
So nothing stands for something that is not there: a 0 is a log-probability of 0. Direction: `Batch` -> record batches.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gyre.projections.batches import Batch, Row
from gyre.projections.members import Member

FORMAT = "gyre.trajectories.v1"
TOKENS_PER_PART = 1 << 20
"""Tokens of one record batch, unless a single row has more: what bounds the memory."""

COLUMNS: tuple[tuple[str, pa.DataType, bool, str], ...] = (
    ("step", pa.int32(), False, "the training step, counted from 1"),
    ("group", pa.string(), False, "executions of one task at one dispatch: the baseline"),
    ("execution", pa.string(), False, "the run of the harness"),
    ("call", pa.string(), False, "the call at the tip of the branch"),
    ("token_ids", pa.list_(pa.int32()), False, "from the root to the last target, context and sampled"),
    ("target", pa.list_(pa.bool_()), False, "whether the token is trained by this trajectory"),
    ("logprob", pa.list_(pa.float32()), False, "by the engine that sampled it, in nats; null: no target"),
    ("version", pa.list_(pa.int32()), False, "of the policy that sampled it; null: no target"),
    ("advantage", pa.float64(), False, "of the execution within its group"),
    ("weight", pa.float32(), False, "of each target in the mean of its execution: 1 / targets of the execution"),
    ("score", pa.float64(), True, "of the execution; null: none that a baseline counts"),
    ("staleness", pa.int32(), False, "step minus the policy version at dispatch"),
)
"""(name, type, may be null, meaning)"""


def schema(run: str) -> pa.Schema:
    """With the run and the format in its metadata, and the meaning of each column in the column's."""
    fields = [pa.field(name, kind, nullable, metadata={"meaning": text}) for name, kind, nullable, text in COLUMNS]
    return pa.schema(fields, metadata={"gyre.format": FORMAT, "gyre.run": run})


def by_execution(batch: Batch, min_score: float | None) -> Iterator[tuple[Member, tuple[Row, ...]]]:
    """Members with their rows, both in the batch's order; without those that have no row or a lower score."""
    rows: dict[str, list[Row]] = {}
    for row in batch.rows:
        rows.setdefault(row.execution, []).append(row)
    for member in batch.members:
        is_good = min_score is None or (member.score is not None and member.score >= min_score)
        if is_good and member.execution in rows:
            yield member, tuple(rows[member.execution])


def to_arrow(batch: Batch, schema: pa.Schema, min_score: float | None = None) -> Iterator[pa.RecordBatch]:
    """In parts of about `TOKENS_PER_PART` tokens."""
    part: list[tuple[Member, Row]] = []
    num_tokens = 0
    for member, rows in by_execution(batch, min_score):
        for row in rows:
            if part and num_tokens + row.num_tokens > TOKENS_PER_PART:
                yield _record_batch(batch.step, part, schema)
                part, num_tokens = [], 0
            part.append((member, row))
            num_tokens += row.num_tokens
    if part:
        yield _record_batch(batch.step, part, schema)


def versions(row: Row) -> NDArray[np.int32]:
    """The policy version of each token; -1 where it is no target."""
    out = np.full(row.num_tokens, -1, dtype=np.int32)
    for span in row.spans:
        out[span.start : span.end] = span.version
    return out


def _record_batch(step: int, part: Sequence[tuple[Member, Row]], schema: pa.Schema) -> pa.RecordBatch:
    rows = [row for _, row in part]
    offsets = pa.array(np.cumsum([0, *(row.num_tokens for row in rows)]), pa.int32())
    is_context = ~np.concatenate([row.target for row in rows])

    def lists(name: str, values: Sequence[NDArray[np.generic]], mask: NDArray[np.bool_] | None = None) -> pa.Array:
        kind = schema.field(name).type
        return pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(values), kind.value_type, mask=mask), kind)

    columns = {
        "step": [step] * len(part),
        "group": [member.group for member, _ in part],
        "execution": [row.execution for row in rows],
        "call": [row.call for row in rows],
        "token_ids": lists("token_ids", [row.ids for row in rows]),
        "target": lists("target", [row.target for row in rows]),
        "logprob": lists("logprob", [row.logprob for row in rows], is_context),
        "version": lists("version", [versions(row) for row in rows], is_context),
        "advantage": [row.advantage for row in rows],
        "weight": [float(row.weight[row.target][0]) for row in rows],
        "score": [member.score for member, _ in part],
        "staleness": [member.staleness for member, _ in part],
    }
    arrays = [c if isinstance(c, pa.Array) else pa.array(c, schema.field(n).type) for n, c in columns.items()]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
