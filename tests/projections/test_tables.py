import asyncio
import math
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_run import written

from gyre.errors import ConfigError, MissingError
from gyre.events.codec import Recorded
from gyre.events.types import EVENT_TYPES, event_type
from gyre.projections import store as store_module
from gyre.projections.changes import MemoryTables
from gyre.projections.schemas import BY_NAME, TABLES, describe
from gyre.projections.store import Store
from gyre.projections.tables import Tables

DOCS = Path(__file__).parents[2] / "docs" / "tables.md"


async def _recorded() -> list[Recorded]:
    log = await written()
    return [recorded async for recorded in log.read(1, until=await log.last_seq())]


RECORDED = asyncio.run(_recorded())


def project(store: Store, recorded: list[Recorded], every: int) -> None:
    """What the projector does: fold from sequence 1, store what comes after the checkpoint."""
    tables, checkpoint = Tables(), store.through_seq
    for item in recorded:
        tables.evolve(item)
        if item.seq <= checkpoint:
            tables.take()
        elif (item.seq - checkpoint) % every == 0:
            store.apply(tables.take(), item.seq)
    if tables.seq > store.through_seq:
        store.apply(tables.take(), tables.seq)


@pytest.fixture(scope="module")
def store() -> Store:
    whole = Store(":memory:")
    project(whole, RECORDED, len(RECORDED))
    return whole


def rows(store: Store, sql: str) -> list[dict[str, object]]:
    return list(store.query(sql).to_pylist())


def test_the_run_holds_every_event_type() -> None:
    assert {event_type(item.event) for item in RECORDED} == set(EVENT_TYPES)


def test_every_table_and_column_gets_a_value(store: Store) -> None:
    for table in TABLES:
        (counts,) = rows(
            store, f"SELECT {', '.join(f'count({c.name}) AS {c.name}' for c in table.columns)} FROM {table.name}"
        )
        assert [name for name, num in counts.items() if num == 0] == [], table.name


def test_what_the_tools_of_a_call_were_and_took(store: Store) -> None:
    found = rows(
        store,
        """
        select a.tools, b.tool_s from calls a join calls b on b.base = a.call where a.tools is not null group by all
    """,
    )
    assert found == [{"tools": "bash read", "tool_s": 0.5}]


def test_the_digests_are_those_of_the_fold_in_memory(store: Store) -> None:
    tables, memory = Tables(), MemoryTables()
    for item in RECORDED:
        tables.evolve(item)
    memory.apply(tables.take())
    assert memory.digests() == store.table_digests()


def test_tables_of_another_gyre_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    """A run that goes on under a gyre with one column more, or one table more, has it of the events before, too."""
    calls = BY_NAME["calls"]
    fewer = msgspec.structs.replace(calls, columns=calls.columns[:-1])
    for number, tables in enumerate([[fewer if t is calls else t for t in TABLES], [t for t in TABLES if t != calls]]):
        path = tmp_path / f"{number}.duckdb"
        with monkeypatch.context() as patch:
            patch.setattr(store_module, "TABLES", tables)
            with Store(path) as old:
                project(old, [item for item in RECORDED if item.seq <= 100], 100)
                assert old.through_seq == 100
            with Store(path) as same:
                assert same.through_seq == 100
        with Store(path) as new:
            assert new.through_seq == 0
            project(new, RECORDED, 500)
            assert new.table_digests() == store.table_digests()


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 400), st.integers(0, len(RECORDED)), st.integers(1, 400))
def test_from_scratch_in_increments_or_resumed_anywhere(every: int, stop: int, again: int) -> None:
    tables, memory = Tables(), MemoryTables()
    for item in RECORDED:
        tables.evolve(item)
    memory.apply(tables.take())
    with Store(":memory:") as parts:
        project(parts, RECORDED[:stop], every)
        assert parts.through_seq == stop
        project(parts, RECORDED, again)
        assert parts.table_digests() == memory.digests()


CHILD = """
import sys
from pathlib import Path
from gyre.projections import store as store_module
from gyre.projections.store import Store
from test_tables import RECORDED, project
with Store(Path(sys.argv[1])) as store:
    for end in range(1, len(RECORDED) + 1):
        project(store, RECORDED[:end], 1)
        print(end, flush=True)
        if end == 120:
            sys.stdin.read()  # until it is killed
"""


def test_kill_nine_of_the_writer_loses_and_repeats_nothing(tmp_path: Path, store: Store) -> None:
    path = tmp_path / "tables.duckdb"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )
    assert child.stdin is not None and child.stdout is not None
    applied = next(int(line) for line in child.stdout if int(line) == 60)
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        pipe.close()
    with Store(path) as resumed:
        assert applied <= resumed.through_seq < len(RECORDED)
        project(resumed, RECORDED, 70)
        assert resumed.table_digests() == store.table_digests()


def test_the_database_may_take_more_memory_when_keys_need_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def limit(store: Store) -> str:
        return str(rows(store, "SELECT current_setting('memory_limit') AS it")[0]["it"])

    with Store(tmp_path / "t.duckdb") as store:
        project(store, RECORDED, 50)
        assert limit(store) == "1.0 GiB"
        monkeypatch.setattr(store_module, "KEYS_SHARE", 1e-6)
        project(store, [*RECORDED, msgspec.structs.replace(RECORDED[-1], seq=len(RECORDED) + 1)], 50)
        assert limit(store) != "1.0 GiB"


def test_a_failed_transaction_leaves_nothing(tmp_path: Path) -> None:
    with Store(tmp_path / "t.duckdb") as store:
        project(store, RECORDED[:20], 20)
        before = store.table_digests()
        wrong = {"cells": {("c9",): {"cell": "c9"}}, "events": {(999,): {"seq": "no number"}}}
        with pytest.raises(Exception, match="no number"):
            store.apply(wrong, 999)
        assert (store.table_digests(), store.through_seq) == (before, 20)


def test_figures_of_the_run(store: Store) -> None:
    (run,) = rows(store, "SELECT state, num_resumed FROM runs")
    assert run == {"state": "completed", "num_resumed": 1}
    assert rows(store, "SELECT step, num_groups, num_executions FROM steps ORDER BY step") == [
        {"step": 1, "num_groups": 2, "num_executions": 4},
        {"step": 2, "num_groups": 2, "num_executions": 4},
    ]
    (switch,) = rows(store, "SELECT phase_s, num_calls_moved FROM switches WHERE role = 'train' ORDER BY seq LIMIT 1")
    assert switch == {"phase_s": 0.75, "num_calls_moved": 1}
    (tree,) = rows(store, "SELECT * FROM trees WHERE execution = 'g0000-0'")
    assert (tree["num_calls"], tree["num_leaves"], tree["num_targets"], tree["num_sampled"]) == (4, 2, 6, 8)


def test_a_rejected_cohort_is_told_from_the_one_that_was_trained(store: Store) -> None:
    (rejection,) = rows(store, "SELECT step, attempt, guard, action, num_groups, to_version FROM rejections")
    assert rejection == {
        "step": 2, "attempt": 0, "guard": "kl", "action": "rollback", "num_groups": 2, "to_version": 1,
    }  # fmt: skip
    assert rows(store, "SELECT step, num_rejected FROM steps ORDER BY step") == [
        {"step": 1, "num_rejected": 0},
        {"step": 2, "num_rejected": 1},
    ]
    groups = rows(store, "SELECT group_id, rejected FROM groups WHERE step = 2 ORDER BY group_id")
    assert [g["rejected"] for g in groups] == [True, True, False, False]
    micro = rows(store, "SELECT attempt, count(*) AS n, max(num_claims) AS c FROM microsteps WHERE step = 2 GROUP BY 1")
    assert sorted((m["attempt"], m["c"]) for m in micro) == [(0, 1), (1, 1)]


def test_every_token_of_a_consumed_execution_is_trained_or_has_a_reason(store: Store) -> None:
    """slime#85, NeMo-RL#938, agent-lightning#586."""
    answer = rows(
        store,
        """SELECT execution, any_value(t.num_tokens) - any_value(e.num_targets) - sum(l.num_tokens)::BIGINT AS rest
           FROM executions e JOIN trees t USING (execution) JOIN left_out l USING (execution)
           WHERE e.step IS NOT NULL GROUP BY execution""",
    )
    assert len(answer) == 12
    assert {row["rest"] for row in answer} == {0}


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO cells (cell) VALUES ('x')",
        "SELECT 1; SELECT 2",
        "COPY cells TO '/tmp/gyre-cells.csv'",
        "ATTACH '/tmp/gyre-other.duckdb'",
        "SET threads = 1",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM store",
        "SELECT nothing FROM cells",
        "SELEC",
        "",
    ],
)
def test_a_bad_query_is_one_clear_error(store: Store, sql: str) -> None:
    with pytest.raises(ConfigError, match=r"^sql: ") as caught:
        store.query(sql)
    assert "\n" not in str(caught.value)
    assert rows(store, "SELECT count(*) AS n FROM cells WHERE cell = 'x'") == [{"n": 0}]


def test_text_with_any_character_is_kept() -> None:
    text = 'tail\x00 of \N{SNOWMAN} output\r\n"quoted" \x1b[0m'
    with Store(":memory:") as store:
        store.apply({"executions": {("e",): {"execution": "e", "detail": text, "wall_s": math.pi}}}, 1)
        assert rows(store, "SELECT detail, wall_s FROM executions") == [{"detail": text, "wall_s": math.pi}]


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="no tables yet"):
        Store(tmp_path / "tables.duckdb", read_only=True)


def test_no_column_is_a_reserved_word_of_sql() -> None:
    with Store(":memory:") as store:
        for table in BY_NAME.values():
            store.query(f"SELECT {', '.join(table.names)} FROM {table.name}")


def test_the_reference_of_the_tables_is_current() -> None:
    assert DOCS.read_text() == describe(), (
        "run: python -c 'from gyre.projections.schemas import describe; print(describe(), end=\"\")' > docs/tables.md"
    )
