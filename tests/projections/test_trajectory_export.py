"""Trajectories as Parquet, and what `gyre batch show` tells, of a whole run in memory."""

import asyncio
import math
import re
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from synthetic_run import written

from gyre.errors import ReplayError
from gyre.events.memory import MemoryLog
from gyre.events.types import BatchAssembled, StepCompleted, StepRejected
from gyre.projections import trajectories
from gyre.projections.batches import Batch
from gyre.projections.exports import explanation_of, export_lines, export_parquet, trained_batches
from gyre.projections.recorded_batches import MEANINGS, RecordedBatches

LOG = asyncio.run(written())
DOCS = Path(__file__).parents[2] / "docs/export.md"


async def _batches(log: MemoryLog) -> list[Batch]:
    return [batch async for batch in trained_batches(log)]


BATCHES = asyncio.run(_batches(LOG))


def exported(path: Path, min_score: float | None = None) -> pa.Table:
    asyncio.run(export_parquet(LOG, path, min_score))
    return parquet.read_table(path)


def test_what_completed_steps_were_trained_on_and_nothing_of_rejected_ones() -> None:
    async def digests() -> tuple[list[str], set[str]]:
        events = [r.event async for r in LOG.read(1, until=await LOG.last_seq())]
        rejected = [i for i, event in enumerate(events) if isinstance(event, StepRejected)]
        assembled = [(i, event.digest) for i, event in enumerate(events) if isinstance(event, BatchAssembled)]
        lost = {max((i, d) for i, d in assembled if i < at)[1] for at in rejected}
        return [digest for _, digest in assembled], lost

    recorded, lost = asyncio.run(digests())
    assert lost and len(recorded) == 3
    assert [batch.digest for batch in BATCHES] == [digest for digest in recorded if digest not in lost]
    assert [batch.step for batch in BATCHES] == [1, 2]


def test_a_row_of_the_file_is_a_row_of_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = exported(tmp_path / "whole.parquet")
    monkeypatch.setattr(trajectories, "TOKENS_PER_PART", 1)
    assert exported(tmp_path / "parts.parquet").equals(whole), "however it is cut into parts"
    found = whole.to_pylist()
    rows = {(b.step, row.execution, row.call): row for b in BATCHES for row in b.rows}
    members = {m.execution: m for b in BATCHES for m in b.members}
    assert len(found) == len(rows) > 2
    weights: dict[str, float] = {}
    for line in found:
        row, member = rows.pop((line["step"], line["execution"], line["call"])), members[line["execution"]]
        assert line["token_ids"] == row.ids.tolist()
        assert line["target"] == row.target.tolist()
        nowhere = [i for i, value in enumerate(line["logprob"]) if value is None]
        assert nowhere == np.flatnonzero(~row.target).tolist()
        assert [v for v in line["logprob"] if v is not None] == row.logprob[row.target].tolist()
        assert [i for i, value in enumerate(line["version"]) if value is None] == nowhere
        for span in row.spans:
            assert set(line["version"][span.start : span.end]) == {span.version}
        assert (line["advantage"], line["score"]) == (row.advantage, member.score)
        assert (line["group"], line["staleness"]) == (member.group, member.staleness)
        weights[line["execution"]] = weights.get(line["execution"], 0.0) + line["weight"] * sum(line["target"])
    assert all(math.isclose(total, 1.0, rel_tol=1e-5) for total in weights.values())


def test_a_lower_score_is_left_out_and_so_is_none(tmp_path: Path) -> None:
    every = exported(tmp_path / "a.parquet").to_pylist()
    best = max(line["score"] for line in every)
    good = exported(tmp_path / "b.parquet", best).to_pylist()
    assert 0 < len(good) < len(every)
    assert good == [line for line in every if line["score"] == best]


def test_the_file_says_what_it_is_and_the_page_lists_its_columns(tmp_path: Path) -> None:
    schema = exported(tmp_path / "t.parquet").schema
    assert schema.metadata[b"gyre.format"] == trajectories.FORMAT.encode()
    assert schema.metadata[b"gyre.run"] == b"r"
    page = DOCS.read_text()
    for name, kind, nullable, meaning in trajectories.COLUMNS:
        assert schema.field(name).metadata[b"meaning"] == meaning.encode()
        is_nullable = ", or null" if nullable else ""
        kind_text = str(kind).replace("element: ", "").replace("item: ", "")
        assert f"| `{name}` | `{kind_text}`{is_nullable} | {meaning} |" in page


def test_the_query_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = exported(Path("trajectories.parquet"))
    (query,) = re.findall(r"```sql\n(.*?)```", DOCS.read_text(), re.S)
    rows = duckdb.sql(query).fetchall()
    steps = table["step"].to_pylist()
    assert [row[:2] for row in rows] == [(step, steps.count(step)) for step in sorted(set(steps))]
    assert all(num_tokens > 0 and logprob < 0 for _, _, num_tokens, logprob in rows)


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def lines(batch: Batch) -> list[bytes]:
        if batch.step == 2:
            raise RuntimeError("disk")
        return [b"{}"]

    with pytest.raises(RuntimeError):
        asyncio.run(export_lines(LOG, tmp_path / "chat.jsonl", lines))
    assert list(tmp_path.iterdir()) == []
    done = asyncio.run(export_lines(LOG, tmp_path / "chat.jsonl", lambda batch: [b"{}"] * batch.step))
    assert (done.num_steps, done.num_trajectories) == (2, 3)
    assert (tmp_path / "chat.jsonl").read_bytes() == b"{}\n{}\n{}\n"


def test_a_batch_that_is_not_the_recorded_one_is_an_error() -> None:
    async def fold() -> None:
        batches = RecordedBatches()
        async for recorded in LOG.read(1, until=await LOG.last_seq()):
            if isinstance(recorded.event, BatchAssembled):
                event = msgspec.structs.replace(recorded.event, digest="0" * 32)
                envelope = msgspec.structs.replace(recorded.envelope, event=event)
                recorded = msgspec.structs.replace(recorded, envelope=envelope)
            if isinstance(recorded.event, StepCompleted):
                batches.batch(recorded.event.step)
            batches.evolve(recorded)

    with pytest.raises(ReplayError, match="batch of step 1 has digest"):
        asyncio.run(fold())


def test_a_batch_that_the_log_has_not_yet_is_an_error() -> None:
    async def fold() -> None:
        batches = RecordedBatches()
        async for recorded in LOG.read(1, until=await LOG.last_seq()):
            if isinstance(recorded.event, BatchAssembled):
                with pytest.raises(ReplayError, match="recorded is nothing"):
                    batches.batch(1)
                with pytest.raises(ReplayError, match="step 2 has no cohort at sequence"):
                    batches.batch(2)
                return
            batches.evolve(recorded)

    asyncio.run(fold())


@pytest.mark.parametrize("step", [1, 2])
def test_every_token_of_the_cohort_is_explained(step: int) -> None:
    found = asyncio.run(explanation_of(LOG, step))
    assert found is not None
    batch = BATCHES[step - 1]
    assert (found.step, found.digest, found.num_targets) == (step, batch.digest, batch.num_targets)
    assert [e.execution for e in found.executions] == [m.execution for m in batch.members]
    minibatches: dict[int, float] = {}
    for e in found.executions:
        assert e.in_loss == (e.weight > 0) == (not e.reason)
        assert sum(b.num_targets for b in e.branches) == e.num_targets
        assert len(e.branches) + len(e.left_branches) == e.num_branches
        assert all(b.num_targets > 0 and b.reason in MEANINGS for b in e.left_branches)
        assert e.target_weight * e.num_targets == pytest.approx(e.weight)
        for number in {b.minibatch for b in e.branches}:
            minibatches[number] = minibatches.get(number, 0.0) + e.weight
        left: dict[str, int] = {t.reason: t.num_tokens for t in e.left_out}
        assert set(left) <= set(MEANINGS)
    assert minibatches and all(total == pytest.approx(1) for total in minibatches.values())
    total = sum(t.num_tokens for t in found.left_out)
    assert total == sum(t.num_tokens for e in found.executions for t in e.left_out) > 0


def test_the_last_batch_is_shown_when_no_step_is_named() -> None:
    found: Any = asyncio.run(explanation_of(LOG))
    assert found.step == 2
    assert found.digest == BATCHES[-1].digest, "of two batches for one step, the later"
    assert asyncio.run(explanation_of(LOG, 9)) is None
    assert asyncio.run(explanation_of(MemoryLog("empty"))) is None
