"""The consumers that come with gyre, over small logs: what they find and count."""

import asyncio
from pathlib import Path
from typing import Any

import event_stream as es
import pytest
from synthetic_run import written

from gyre.events import types as e
from gyre.events.checkpoint import Checkpoint
from gyre.events.consumer import Consumer
from gyre.events.consuming import consume
from gyre.events.log import Log, Writer
from gyre.events.memory import MemoryLog
from gyre.projections.loops import Loops, loops
from gyre.projections.loops import report as loops_report
from gyre.projections.meter import Meter, meter
from gyre.projections.meter import report as meter_report
from gyre.projections.progress import Progress


async def log_of(*events: tuple[float, e.Event]) -> MemoryLog:
    """Events with the second at which each was recorded."""
    log = MemoryLog("r")
    times = iter([at for at, _ in events])
    writer = Writer(log, "w", 1, lambda: int(next(times) * 1e9))
    for _, event in events:
        await writer.append(event)
    return log


def state_of(consumer: Consumer[...], log: Log, tmp_path: Path) -> Any:
    async def main() -> Any:
        with Checkpoint(tmp_path / f"{consumer.name}.json") as checkpoint:
            return await consume(consumer, log, checkpoint)

    return asyncio.run(main())


def calls(*steps: tuple[str, str, str, list[int]]) -> list[tuple[float, e.Event]]:
    """(call, base, rule, sampled tokens) each."""
    found: list[tuple[float, e.Event]] = []
    for call, base, rule, sampled in steps:
        found += [(0.0, es.started(call, base, rule=rule)), (0.0, es.completed(call, sampled))]
    return found


def test_a_loop_is_the_same_reply_along_one_branch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [("c1", "", "root", [7, 8])]
    steps += [(f"c{n}", f"c{n - 1}", "continue", [7, 8]) for n in range(2, 8)]
    steps += [("d1", "c7", "continue", [9]), ("d2", "d1", "continue", [7, 8])]
    log = asyncio.run(log_of(*calls(*steps)))
    state: Loops = state_of(loops, log, tmp_path)
    assert capsys.readouterr().out.splitlines() == [
        "sequence 6: e says the same 3 times in a row; last in c3",
        "sequence 12: e says the same 6 times in a row; last in c6",
    ]
    assert loops_report(state).splitlines() == [
        "1 executions with a loop of 3 or more, in 9 calls",
        "     7 times  e  c7",
    ]


def test_retries_and_sub_agents_side_by_side_are_no_loop(tmp_path: Path) -> None:
    same = [7, 8]
    steps = [("c1", "", "root", same), *((f"r{n}", "c1", "fork", same) for n in range(5))]
    steps += [(f"s{n}", "", "root", same) for n in range(5)]
    state: Loops = state_of(loops, asyncio.run(log_of(*calls(*steps))), tmp_path)
    assert not state.loops


def test_calls_of_an_execution_that_ended_are_forgotten(tmp_path: Path) -> None:
    scored = e.ExecutionScored(execution="e", score=1.0, parts=(), wall_s=1.0)
    events = [*calls(("c1", "", "root", [1])), (0.0, scored)]
    assert state_of(loops, asyncio.run(log_of(*events)), tmp_path).replies == {}


def switched(role: Any, version: int = 0) -> e.CellSwitched:
    return e.CellSwitched(cell="c0", role=role, epoch=1, version=version, phases=())


def test_the_meter_adds_up_roles_tokens_and_executions(tmp_path: Path) -> None:
    config = '{"cells": {"hosts": 2, "ranks_per_host": 4, "a key of another gyre": 1}}'
    started = e.RunStarted(run="r", config=config, config_digest="", seed=1, versions=(), num_threads=1)
    joined = e.CellJoined(cell="c0", index=0, capacity=8, engine_url="", model_digest="")
    pool = e.CellJoined(cell="p0", index=1, capacity=8, engine_url="", model_digest="", standalone=True)
    spans = (e.VersionSpan(version=3, start=0, end=2), e.VersionSpan(version=4, start=2, end=3))
    events = [
        (0.0, started),
        (9.0, joined),
        (9.5, pool),
        (10.0, switched("rollout")),
        (10.0, e.CellSwitched(cell="p0", role="rollout", epoch=1, version=0, phases=())),
        (11.0, es.started("c1", role_class="sub-agent")),
        (12.0, es.completed("c1", [1, 2, 3], spans=spans, num_prompt_tokens=50, num_cached_tokens=20)),
        (30.0, e.ExecutionScored(execution="e", score=1.0, parts=(), wall_s=1.0)),
        (40.0, e.CellFenced(cell="c0", epoch=2)),
        (42.0, switched("train")),
        (50.0, e.RunFinished(reason="interrupted")),
        (1000.0, e.RunResumed(versions=())),
        (1010.0, switched("rollout")),
        (1020.0, e.ExecutionScored(execution="f", score=1.0, parts=(), wall_s=1.0)),
    ]
    state: Meter = state_of(meter, asyncio.run(log_of(*events)), tmp_path)
    assert state.cells["c0"].total(state.now_ns) == {"rollout": 40.0, "switching": 2.0, "train": 8.0}
    tokens = state.tokens["sub-agent"]
    assert (tokens.num_calls, tokens.prompt, tokens.cached, tokens.sampled) == (1, 50, 20, {3: 2, 4: 1})
    lines = meter_report(state).splitlines()
    assert lines[1].split() == ["sub-agent", "1", "50", "20", "3", "v3", "2,", "v4", "1"]
    # Seconds in every role and between them, times 2 hosts of 4 ranks; the standalone engine has one GPU.
    assert lines[3].split() == ["c0", "40.0", "8.0", "2.0", "8", "400.0"]
    assert lines[4].split() == ["p0", "40.0", "0.0", "0.0", "1", "40.0"]
    assert lines[-1] == "executions: 2 scored, 0 dropped; 103 an hour over 70 s"


def test_the_meter_adds_up_what_older_versions_sampled_and_forgets_calls_that_failed(tmp_path: Path) -> None:
    events: list[tuple[float, e.Event]] = []
    for version in (4, 0, 1, 2, 3, 5):
        spans = (e.VersionSpan(version=version, start=0, end=version + 1),)
        call = f"c{version}"
        events += [(1.0, es.started(call)), (1.0, es.completed(call, [1] * (version + 1), spans=spans))]
    events += [(1.0, es.started("failed")), (1.0, es.failed("failed"))]
    state: Meter = state_of(meter, asyncio.run(log_of(*events)), tmp_path)
    assert state.classes == {}
    assert meter_report(state).splitlines()[1].endswith("  v0-v2 6, v3 4, v4 5, v5 6")
    state.tokens["main"].sampled = {7: 1, 9: 2, 8: 3, 2: 4}
    assert meter_report(state).splitlines()[1].endswith("  v2 4, v7 1, v8 3, v9 2"), "one alone is no run"


def test_the_meter_takes_no_time_back_and_a_cell_without_ranks_for_one_gpu(tmp_path: Path) -> None:
    config = '{"cells": {"ranks_per_host": 3}}'
    joined = e.CellJoined(cell="c0", index=0, capacity=8, engine_url="", model_digest="")
    events = [
        (10.0, switched("rollout")),
        (9.0, e.CellFenced(cell="c0", epoch=2)),  # a clock that was set back
        (12.0, switched("train")),
    ]
    state: Meter = state_of(meter, asyncio.run(log_of(*events)), tmp_path)
    assert state.cells["c0"].total(state.now_ns) == {"rollout": 0.0, "switching": 3.0, "train": 0.0}
    assert meter_report(state).splitlines()[2].split() == ["c0", "0.0", "0.0", "3.0", "1", "3.0"]
    started = e.RunStarted(run="r", config=config, config_digest="", seed=1, versions=(), num_threads=1)
    state = state_of(meter, asyncio.run(log_of((0.0, started), (0.0, joined))), tmp_path / "other")
    assert state.num_gpus == {"c0": 3}


def test_the_meter_agrees_with_the_summary_of_a_whole_run(tmp_path: Path) -> None:
    async def fold() -> tuple[MemoryLog, Progress]:
        log, progress = await written(), Progress()
        async for recorded in log.read(1, until=await log.last_seq()):
            progress.evolve(recorded)
        return log, progress

    log, progress = asyncio.run(fold())
    state: Meter = state_of(meter, log, tmp_path)
    summary = progress.summary()
    assert state.num_scored == summary["executions"]["scored"] > 0
    assert sum(t.num_calls for t in state.tokens.values()) == summary["calls"]["completed"] + summary["calls"]["cut"]
    assert sum(sum(t.sampled.values()) for t in state.tokens.values()) == summary["tokens"]["sampled"] > 0
