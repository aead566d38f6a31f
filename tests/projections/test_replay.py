import asyncio
import copy
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from synthetic_run import SyntheticRun, TurnScheduler, written

from gyre.events.codec import Recorded, decode, encode
from gyre.events.memory import MemoryLog
from gyre.events.types import EVENT_TYPES, CohortConsumed, Event, TablesRecorded, event_type
from gyre.projections.changes import MemoryTables
from gyre.projections.replay import Difference, Verdict, verify
from gyre.projections.schemas import BY_NAME, TABLES
from gyre.projections.tables import Tables

LOG = asyncio.run(written())


async def _read(log: MemoryLog) -> list[Recorded]:
    return [recorded async for recorded in log.read(1, until=await log.last_seq())]


RECORDED = asyncio.run(_read(LOG))


def check(log: MemoryLog) -> Verdict:
    return asyncio.run(verify(log, scheduler=TurnScheduler()))


def altered(seq: int, **envelope: Any) -> MemoryLog:
    """The log with other bytes at one sequence, as who edits the store would leave it."""
    log = copy.copy(LOG)
    log._stored = list(LOG._stored)
    subject, body = log._stored[seq - 1]
    log._stored[seq - 1] = (subject, encode(msgspec.structs.replace(decode(body), **envelope)))
    return log


def other(value: Any, hint: Any) -> Any:
    """Another value that the field's type allows."""
    choices = [choice for choice in get_args(hint) if isinstance(choice, str)]
    if choices:
        return next(choice for choice in choices if choice != value)
    match value:
        case None:
            return 0.5
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return value + 0.125
        case str():
            return value + "x"
        case bytes():
            return value + b"\0\0\0\0"
        case msgspec.Struct():
            name, kind = next(iter(get_type_hints(type(value)).items()))
            return msgspec.structs.replace(value, **{name: other(getattr(value, name), kind)})
        case tuple() if value:
            return value[:-1]
        case tuple():
            item = get_args(hint)[0]
            return ("x",) if item is str else (_blank(item),)
    raise AssertionError(f"no other value for {value!r}")


def _blank(cls: Any) -> Any:
    blanks = {str: "x", int: 0, float: 0.0, bool: True}
    return cls(**{name: blanks[hint] for name, hint in get_type_hints(cls).items()})


def cases() -> list[Any]:
    """Each field of the first event of each type."""
    found = []
    for name, cls in EVENT_TYPES.items():
        recorded = next(item for item in RECORDED if event_type(item.event) == name)
        found += [pytest.param(recorded.seq, field, id=f"{name}-{field}") for field in cls.__struct_fields__]
    return found


def test_a_log_is_the_same_as_recorded() -> None:
    verdict = check(LOG)
    assert verdict.differences == ()
    assert dict(verdict.num_checked) == {"batches": 3, "cohorts": 3, "decisions": 3, "tables": 2 * len(TABLES)}
    assert verdict.num_unsealed == 0
    assert verdict.text().startswith(f"same as recorded: {len(RECORDED)} events, 3 batches")


@pytest.mark.parametrize(("seq", "field"), cases())
def test_altering_any_field_of_any_event_names_its_sequence(seq: int, field: str) -> None:
    event: Event = RECORDED[seq - 1].event
    value = other(getattr(event, field), get_type_hints(type(event))[field])
    verdict = check(altered(seq, event=msgspec.structs.replace(event, **{field: value})))
    assert verdict.first is not None
    assert verdict.first.seq == seq, verdict.text()


@pytest.mark.parametrize("field", ["prev", "time_ns", "cause"])
def test_altering_the_envelope_names_its_sequence(field: str) -> None:
    for seq in range(1, len(RECORDED), 29):
        value = getattr(RECORDED[seq - 1].envelope, field)
        verdict = check(altered(seq, **{field: other(value, type(value))}))
        assert verdict.first is not None and verdict.first.seq == seq, verdict.text()


def test_altering_the_last_event_of_a_writer_is_found_by_the_seal() -> None:
    last = {item.envelope.writer: item for item in RECORDED if not isinstance(item.event, TablesRecorded)}
    seals = [item.seq for item in RECORDED if isinstance(item.event, TablesRecorded)]
    for item in last.values():
        for change in ({"time_ns": item.envelope.time_ns + 1}, {"prev": "0" * 32}):
            verdict = check(altered(item.seq, **change))
            after = [seq for seq in seals if seq > item.seq]
            assert [difference.seq for difference in verdict.differences] == [item.seq, *after], verdict.text()


def test_the_verdict_says_what_differs_first_and_how_much_more() -> None:
    verdict = check(altered(1, time_ns=5))
    assert verdict.text() == "differs first at sequence 1: event 1 of supervisor/1 was altered (2 more after it)"
    killed = copy.copy(LOG)
    killed._stored = LOG._stored[:60]
    assert check(killed).text() == "same as recorded: 60 events, nothing recorded; 60 events after the last seal"


def test_a_result_that_claims_to_follow_from_nothing_is_computed_again_all_the_same() -> None:
    consumed = next(item for item in RECORDED if isinstance(item.event, CohortConsumed))
    verdict = check(altered(consumed.seq, event=msgspec.structs.replace(consumed.event, through_seq=0)))
    expected = Difference(seq=consumed.seq, what="policy.cohort_consumed: no cohort is complete at sequence 0")
    assert expected in verdict.differences


def test_altering_the_seal_names_the_seal() -> None:
    seq = len(RECORDED)
    seal = RECORDED[-1].event
    assert isinstance(seal, TablesRecorded)
    head = msgspec.structs.replace(seal.heads[0], digest="0" * 32)
    table = msgspec.structs.replace(seal.tables[0], digest="0" * 32)
    for changes in (
        {"heads": (head, *seal.heads[1:])},
        {"tables": (table, *seal.tables[1:])},
        {"through_seq": seal.through_seq - 1},
        {"through_seq": seq},
    ):
        verdict = check(altered(seq, event=msgspec.structs.replace(seal, **changes)))
        assert verdict.first is not None and verdict.first.seq == seq, verdict.text()


def test_a_seal_of_tables_without_what_came_later_holds() -> None:
    """Columns are added at the end of a table: a run that was sealed before is intact."""
    seq, seal = len(RECORDED), RECORDED[-1].event
    assert isinstance(seal, TablesRecorded)
    tables, memory = Tables(), MemoryTables()
    for item in RECORDED[:-1]:
        tables.evolve(item)
    memory.apply(tables.take())
    calls = BY_NAME["calls"]
    assert calls.num_later > 0
    for left in range(calls.num_later + 2):
        older = memory._digest(calls, calls.names[: len(calls.names) - left])
        sealed = tuple(older if table.table == "calls" else table for table in seal.tables)
        verdict = check(altered(seq, event=msgspec.structs.replace(seal, tables=sealed)))
        found = [item.what for item in verdict.differences]
        assert found == ([] if left <= calls.num_later else ["run.tables_recorded: calls differ from the log's"])


def test_a_body_that_cannot_be_read_is_named() -> None:
    log = altered(1)
    log._stored[49] = (log._stored[49][0], log._stored[49][1][:40])
    verdict = check(log)
    assert verdict.first is not None and verdict.first.seq == 50


def test_a_run_that_was_killed_verifies_without_a_seal() -> None:
    log = copy.copy(LOG)
    log._stored = LOG._stored[:60]
    verdict = check(log)
    assert verdict.ok
    assert verdict.num_unsealed == 60


def test_an_empty_log_verifies() -> None:
    assert check(MemoryLog("r")).ok


def test_a_decision_that_the_log_does_not_call_for_is_named() -> None:
    class Idle(TurnScheduler):
        def recompute(self, state: Any, config: Any) -> Any:
            decided = super().recompute(state, config)
            return msgspec.structs.replace(decided, waterlevel=decided.waterlevel + 1)

    verdict = asyncio.run(verify(LOG, scheduler=Idle()))
    first = next(item for item in RECORDED if event_type(item.event) == "scheduler.decided.v1")
    assert verdict.first is not None and verdict.first.seq == first.seq
    assert "waterlevel is 0, computed 1" in verdict.first.what


def test_two_runs_of_the_same_facts_give_the_same_log() -> None:
    again = asyncio.run(SyntheticRun().write())
    assert again._stored == LOG._stored
