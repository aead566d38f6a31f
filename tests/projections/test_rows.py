"""What rows of cells, calls and executions say, event by event: what `gyre sql` is asked about a run."""

from typing import Any

import numpy as np
import pytest
from event_stream import Stream, call_events, completed, cut, failed, started
from msgspec import structs

from gyre.errors import FoldError
from gyre.events import types as e
from gyre.projections.changes import ChangedRows, MemoryTables
from gyre.projections.tables import Tables

Row = dict[str, Any]


def tables(*events: e.Event) -> dict[str, dict[Any, Row]]:
    """Rows by table and key; of one column, the key is what stands in it. Event n is recorded at n microseconds."""
    stream, fold = Stream(), Tables()
    for event in events:
        stream.add(event)
    found: dict[str, dict[Any, Row]] = {}
    for recorded in stream.recorded:
        fold.evolve(recorded)
        for table, rows in fold.take().items():
            for key, row in rows.items():
                found.setdefault(table, {}).setdefault(key if len(key) > 1 else key[0], {}).update(row)
    return found


def phases(**seconds: float) -> tuple[e.Phase, ...]:
    return tuple(e.Phase(name=name, seconds=value) for name, value in seconds.items())


JOINED = e.CellJoined(cell="c1", index=1, capacity=8, engine_url="u", model_digest="m")


def test_a_cell_is_what_its_last_events_say() -> None:
    events = [
        JOINED,
        e.CellLeased(cell="c1", role="rollout", epoch=3),
        e.WeightsPulled(cell="c1", epoch=3, version=7, digest="w", num_bytes=1, phases=()),
        e.DrainRequested(cell="c1", reason="r"),
        e.CellLost(cell="c1", reason="no sign of life"),
    ]
    lost = tables(*events)["cells"]["c1"]
    assert (lost["epoch"], lost["version"], lost["lost"], lost["drained"]) == (3, 7, "no sign of life", True)
    assert "role" not in lost and "num_switches" not in lost, "it has not switched"
    again = tables(*events, JOINED)["cells"]["c1"]
    assert (again["lost"], again["drained"], again["joined_ns"]) == ("", True, 6_000), "it is asked to drain still"
    lifted = [*events, e.DrainLifted(cell="c1"), JOINED]
    assert tables(*lifted[:-1])["cells"]["c1"]["drained"] is tables(*lifted)["cells"]["c1"]["drained"] is False
    for num in (1, 2):
        switched = [e.CellSwitched(cell="c1", role="train", epoch=4, version=8, phases=())] * num
        row = tables(*events, *switched)["cells"]["c1"]
        assert (row["role"], row["epoch"], row["version"], row["num_switches"]) == ("train", 4, 8, num)


def test_a_switch_is_told_with_its_last_request_and_what_moved_since() -> None:
    asked = {"cell": "c1", "term": 1}
    moved = {"cell": "c1", "epoch": 1}
    found = tables(
        e.SwitchRequested(role="train", epoch=1, **asked),  # type: ignore[arg-type]
        e.SessionsRerouted(num_sessions=9, num_calls_moved=9, **moved),  # type: ignore[arg-type]
        e.SwitchRequested(role="train", epoch=2, **asked),  # type: ignore[arg-type]
        e.SessionsRerouted(num_sessions=3, num_calls_moved=1, **moved),  # type: ignore[arg-type]
        e.CellSwitched(cell="c1", role="train", epoch=2, version=5, phases=phases(drain=0.25, load=0.5)),
        e.SwitchRequested(role="rollout", epoch=3, **asked),  # type: ignore[arg-type]
        e.SwitchRolledBack(cell="c1", role="train", epoch=3, reason="engine did not wake"),
        e.CellSwitched(cell="c1", role="rollout", epoch=4, version=6, phases=()),
    )
    ended = {"cell": "c1", "ended_ns": 5_000}
    assert found["switches"] == {
        5: ended
        | {"seq": 5, "role": "train", "epoch": 2, "version": 5, "outcome": "switched", "reason": "", "phase_s": 0.75}
        | {"requested_seq": 3, "wall_s": 2e-6, "num_sessions": 3, "num_calls_moved": 1},
        7: ended
        | {"seq": 7, "role": "train", "epoch": 3, "outcome": "rolled_back", "reason": "engine did not wake"}
        | {"requested_seq": 6, "wall_s": 1e-6, "ended_ns": 7_000},
        8: ended
        | {"seq": 8, "role": "rollout", "epoch": 4, "version": 6, "outcome": "switched", "reason": "", "phase_s": 0.0}
        | {"ended_ns": 8_000},
    }
    assert found["phases"] == {
        (5, 0): {"seq": 5, "number": 0, "name": "drain", "seconds": 0.25},
        (5, 1): {"seq": 5, "number": 1, "name": "load", "seconds": 0.5},
    }


def test_weights_that_are_pulled_have_their_phases() -> None:
    pulled = e.WeightsPulled(cell="c1", epoch=3, version=7, digest="w", num_bytes=1, phases=phases(pull=0.125))
    assert tables(pulled)["phases"] == {(1, 0): {"seq": 1, "number": 0, "name": "pull", "seconds": 0.125}}


def test_a_call_is_open_until_it_is_completed_cut_or_failed() -> None:
    spans = tuple(e.VersionSpan(version=v, start=at, end=at + 1) for at, v in enumerate((4, 3, 5)))
    told = {"logprobs": np.array([-1, -2, -6], "<f4").tobytes(), "spans": spans}
    found = tables(
        started("done", context=[1, 2], header="h"),
        completed("done", [7, 8, 9], num_prompt_tokens=2, num_cached_tokens=1, num_retries=4, **told),
        started("cut", "done", 5, [1]),
        cut("cut", [7]),
        started("failed"),
        failed("failed"),
        started("empty"),
        completed("empty", [], spans=()),
        started("odd"),
        completed("odd", [7], logprobs=np.array([np.nan], "<f4").tobytes()),
        started("torn"),
        completed("torn", [7], logprobs=b"abc"),
        started("open"),
    )["calls"]
    assert {call: row["status"] for call, row in found.items()} == {
        "done": "completed", "cut": "cut", "failed": "failed", "empty": "completed", "odd": "completed",
        "torn": "completed", "open": "open",
    }  # fmt: skip
    assert found["done"] == {
        "call": "done", "execution": "e", "session": "s", "base": "", "shared": 0, "role_class": "main",
        "rule": "root", "cell": "c0", "temperature": 1.0, "max_tokens": 64, "status": "completed", "header": "h",
        "num_context": 2, "num_sampled": 3, "started_seq": 1, "started_ns": 1_000, "ended_ns": 2_000,
        "logprob_mean": -3.0, "version_min": 3, "version_max": 5, "finish": "stop", "num_prompt_tokens": 2,
        "num_cached_tokens": 1, "num_retries": 4, "engine_s": 0.25,
    }  # fmt: skip
    where = ("base", "shared", "num_context", "num_sampled", "finish", "ended_ns")
    assert [found["cut"][name] for name in where] == ["done", 5, 1, 1, "deadline", 4_000]
    assert [found["failed"][name] for name in where[3:]] == [0, "500 engine", 6_000]
    assert [found["open"].get(name) for name in where[3:]] == [0, None, None]
    assert [found[call].get("logprob_mean") for call in ("empty", "odd", "torn")] == [None] * 3
    assert "version_min" not in found["empty"]


def test_forks_say_what_branches_and_a_compaction_what_it_made_of_the_summary() -> None:
    where = {"execution": "e", "session": "s", "call": "b"}
    found = tables(
        started("a"),
        started("b"),
        e.BranchForked(base="a", shared=3, kind="retry", **where),  # type: ignore[arg-type]
        e.ContextCompacted(summary_call="a", **where),
        e.SubAgentSpawned(parent_call="a", **where),
        e.CallSuperseded(execution="e", session="s", call="a", by="b"),
        e.CallDelivered(delivered=False, **where),  # type: ignore[arg-type]
    )
    row = {"execution": "e", "call": "b", "base": "a"}
    assert found["forks"] == {
        3: row | {"seq": 3, "kind": "retry", "shared": 3},
        4: row | {"seq": 4, "kind": "summary"},
        5: row | {"seq": 5, "kind": "spawn"},
    }
    assert found["calls"]["a"]["superseded_by"] == "b" and found["calls"]["b"]["delivered"] is False
    assert found["calls"]["a"]["role_class"] == "main"
    classed = e.ContextCompacted(summary_call="a", summary_class="main-summary", **where)
    assert tables(started("a"), classed)["calls"]["a"]["role_class"] == "main-summary"


def group_of(num_slots: int) -> Stream:
    stream = Stream()
    stream.group("g", num_slots)
    return stream


def events_of(stream: Stream) -> list[e.Event]:
    return [recorded.event for recorded in stream.recorded]


def test_an_execution_is_settled_once_and_its_group_when_all_are() -> None:
    stream = group_of(3)
    first = stream.start("g", 0)
    stream.add(e.EvaluationFailed(execution=first, attempt=1, reason="r"))
    stream.add(e.EvaluationFailed(execution=first, attempt=2, reason="r"))
    for event in call_events(first, "a", "", 0, [1], [2]):
        stream.add(event)
    stream.score(first, 0.25)
    stream.score(first, 1.0)
    stream.drop(first, "late")
    lost = stream.start("g", 1)
    stream.drop(lost, "sandbox", final=False)
    again = stream.start("g", 1, attempt=1)
    stream.score(lost, 1.0)
    part = tables(*events_of(stream))
    row = part["executions"][first]
    assert (row["score"], row["num_grade_failures"], row["num_parts"], row["num_passed"]) == (0.25, 2, 1, 1)
    assert "dropped" not in row and row["settled_ns"] == 10_000
    assert [part["executions"][lost].get(name) for name in ("dropped", "dropped_final", "score")] == [
        "sandbox", False, None,
    ]  # fmt: skip
    assert part["executions"][lost]["num_grade_failures"] == 0
    assert set(part["scores"]) == {(first, 0)} and set(part["trees"]) == {first}
    assert part["trees"][first]["num_targets"] == 1
    assert "complete_seq" not in part["groups"]["g"]
    assert [part["groups"]["g"][name] for name in ("num_scored", "num_dropped", "score_mean")] == [1, 0, 0.25]
    stream.drop(again, "no image")
    stream.score(stream.start("g", 2), 0.75)
    whole = tables(*events_of(stream))["groups"]["g"]
    last = len(stream.recorded)
    assert {name: whole[name] for name in whole if name.startswith(("num_", "score_", "complete_"))} == {
        "num_slots": 3, "num_scored": 2, "num_dropped": 1, "score_mean": 0.5, "score_min": 0.25, "score_max": 0.75,
        "complete_seq": last, "complete_ns": 1_000 * last,
    }  # fmt: skip


def test_a_group_of_which_nothing_was_scored_has_no_mean() -> None:
    stream = group_of(1)
    assert tables(*events_of(stream))["groups"]["g"] == {
        "group_id": "g", "index": 0, "purpose": "train", "task": "task-g", "task_digest": "d", "task_index": 0,
        "num_slots": 1, "policy_version": 0, "temperature": 1.0, "dispatched_seq": 1, "dispatched_ns": 1_000,
        "num_scored": 0, "num_dropped": 0,
    }  # fmt: skip
    stream.drop(stream.start("g", 0), "no image")
    row = tables(*events_of(stream))["groups"]["g"]
    assert (row["num_scored"], row["num_dropped"], row["complete_seq"]) == (0, 1, 4)
    assert "score_mean" not in row


def test_what_ends_an_execution_early_is_told() -> None:
    stream = group_of(1)
    execution = stream.start("g", 0)
    where = {"execution": execution, "session": f"{execution}-s", "limit": 2, "reason": "r"}
    events = [
        *events_of(stream),
        e.ExecutionTimedOut(execution=execution, kind="harness", after_s=9.0),
        e.BudgetSpent(budget="calls", **where),  # type: ignore[arg-type]
        e.BudgetSpent(budget="tool_calls", tool="bash", **where),  # type: ignore[arg-type]
    ]
    assert tables(*events[:-1])["executions"][execution]["spent"] == "calls"
    row = tables(*events)["executions"][execution]
    assert (row["timed_out"], row["spent"], row["session"]) == ("harness", "tool_calls bash", f"{execution}-s")


REJECTED = e.StepRejected(step=2, guard="kl", value=2.0, bound=1.0, detail="", action="rollback")
BACK = e.PolicyRolledBack(from_step=2, to_version=1, reason="kl")
CONSUMED = e.CohortConsumed(step=2, groups=("g",), executions=(), digest="d", through_seq=0)


def test_a_rejection_is_of_the_cohort_that_its_step_consumed() -> None:
    stream = group_of(1)
    stream.score(stream.start("g", 0), 1.0)
    events = events_of(stream)
    told = tables(*events, CONSUMED, REJECTED, BACK, REJECTED)
    first, second = told["rejections"].values()
    assert [first.get(name) for name in ("attempt", "num_groups", "cohort_digest", "to_version")] == [0, 1, "d", 1]
    assert second["attempt"] == 1 and "to_version" not in second
    assert told["groups"]["g"]["rejected"] is True
    other = tables(*events, structs.replace(CONSUMED, step=1), REJECTED)
    assert other["groups"]["g"]["rejected"] is False and "num_groups" not in next(iter(other["rejections"].values()))
    assert "rejections" not in tables(BACK), "a policy that goes back of itself rejected nothing"
    assert "num_groups" not in tables(REJECTED)["rejections"][1]


def test_a_batch_whose_cohort_is_not_in_the_log_tells_its_figures_alone() -> None:
    figures = {"num_executions": 1, "num_trajectories": 2, "num_tokens": 3, "num_targets": 4, "num_microsteps": 5}
    found = tables(e.BatchAssembled(step=2, digest="d", through_seq=0, seed=7, **figures))
    assert found["steps"] == {
        2: {"step": 2, "seed": 7, "batch_digest": "d", "assembled_ns": 1_000} | figures
    }  # fmt: skip
    assert found.keys() == {"events", "steps"}


def test_a_column_that_no_table_has_is_a_bug_and_none_sets_nothing() -> None:
    changed = ChangedRows()
    changed.put("cells", "c1", epoch=1)
    changed.put("cells", "c1", epoch=None, version=2)
    assert changed.take() == {"cells": {("c1",): {"cell": "c1", "epoch": 1, "version": 2}}}
    assert changed.take() == {}
    with pytest.raises(FoldError, match="table cells: no column color, hue"):
        changed.put("cells", "c1", hue=1, color=2, epoch=3)


def test_digests_of_the_tables_bind_every_value_and_follow_no_order_of_arrival() -> None:
    one, other = {"cell": "c1", "epoch": 1}, {"cell": "c2", "epoch": 2}

    def digest(*rows: Row) -> e.TableDigest:
        memory = MemoryTables()
        for row in rows:
            memory.apply({"cells": {(row["cell"],): row}})
        (found,) = [table for table in memory.digests() if table.table == "cells"]
        return found

    assert digest(one, other) == digest(other, one)
    assert digest(one, other).num_rows == 2 and digest().num_rows == 0
    assert digest({"cell": "c1"}, {"epoch": 1, "cell": "c1"}) == digest(one), "columns that are set stay set"
    assert len({digest(), digest(one), digest(other), digest(one | {"epoch": 2}), digest(one, other)}) == 5
    assert len(digest(one).digest) == 32
