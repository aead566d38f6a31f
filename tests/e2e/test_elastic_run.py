"""A whole run of two cells with a KV store: cells change role while contexts live, and their KV moves along.

Who is where when a cell leaves is no matter of speed here: harnesses wait for a file before each turn, the core is held
until they have begun at the satellite, and each deed waits for what the log says of the one before.
"""

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from test_run import gyre, processes_of, rows

from gyre.agents.process import base_python
from gyre.events.access import open_log
from gyre.events.run_dir import RunDir
from gyre.events.types import (
    CallCompleted,
    CallStarted,
    CellSwitched,
    Event,
    KvMigrated,
    SessionOpened,
    WeightsPulled,
)
from tests.chaos.driver import core_engine

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

E = TypeVar("E", bound=Event)
TURNS, HELD = 5, "/s/g0000[0-3]-"
"""All that is dispatched under the first version waits to be let on."""
LONG = ("g00000-0", "g00000-1", "g00001-0", "g00001-1")
SHORT = ("g00002-0", "g00002-1", "g00003-0", "g00003-1")
HARNESS = (Path(__file__).parents[1] / "chaos/lucky_harness.py").read_text()
CONFIG = {
    "seed": 3,
    "harness": {
        "name": "command",
        "command": [base_python(), "-I", "-S", "-c", HARNESS, "{base_url}", "{instruction}", str(TURNS), HELD],
        "deadline_s": 300,
        "max_concurrent": 8,
    },
    "policy": {"path": "policy", "warm_start": False},
    "sampling": {"max_tokens": 16},
    "cells": {"count": 2},
    "engine": {"capacity": 8, "max_total_tokens": 8192, "kv_store": "embedded"},
    "pipeline": {"num_steps": 2, "groups_per_step": 2, "executions_per_group": 2, "lookahead": 1, "max_staleness": 2},
    "trainer": {"weight_decay": 0.1, "max_tokens_per_microstep": 256, "num_threads": 1},
    "log": {"min_free_gb": 0},
}


def test_the_kv_of_live_contexts_moves_in_a_whole_run(tmp_path: Path) -> None:
    (tmp_path / "elastic.yaml").write_text(json.dumps(CONFIG))
    with (tmp_path / "printed.txt").open("w") as output:
        argv = [sys.executable, "-m", "gyre.cli", "run", "elastic.yaml", "--dir", "runs/kv"]
        run = subprocess.Popen(argv, cwd=tmp_path, stdout=output, stderr=output)
        try:
            asyncio.run(_Scene(run, RunDir(tmp_path / "runs/kv")).play())
            assert run.wait(300) == 0, (tmp_path / "printed.txt").read_text()[-3000:]
        finally:
            run.terminate()
            run.wait()
    summary = json.loads((tmp_path / "runs/kv/summary.json").read_text())
    calls = summary["calls"]
    assert calls["completed"] == calls["started"] > 0 and calls["cut"] == calls["failed"] == 0
    assert summary["executions"]["dropped"] == {} and summary["switches_rolled_back"] == 0
    moved = rows(tmp_path, "runs/kv", "select * from kv_moves where target is not null order by seq")
    assert all(row["num_tokens"] > 0 and row["num_bytes"] > 0 and row["digest"] for row in moved), moved
    next_calls = """
        select m.num_tokens, c.num_cached_tokens, c.cell, c.version_min as version from kv_moves m
        join calls c on c.session = m.session and c.started_seq > m.seq where m.target = 'c0'
        qualify row_number() over (partition by m.session order by c.started_seq) = 1
    """
    used = rows(tmp_path, "runs/kv", next_calls)
    assert [(row["cell"], row["version"]) for row in used] == [("c0", 0)] * len(LONG)
    assert all(row["num_cached_tokens"] >= row["num_tokens"] for row in used), f"computed again: {used}"
    assert gyre("replay", "runs/kv", "--verify", cwd=tmp_path).returncode == 0
    assert processes_of(tmp_path) == []


class _Scene:
    """What is done to a run, and what its log has to say to each deed."""

    def __init__(self, run: "subprocess.Popen[bytes]", run_dir: RunDir) -> None:
        self.run, self.run_dir, self.seen = run, run_dir, list[Event]()

    async def play(self) -> None:
        engine = await core_engine(self.run.pid)
        engine.suspend()
        try:
            async with asyncio.timeout(300), open_log(self.run_dir) as (log, _):
                self.events = log.read(1)
                await self._begin_at_the_satellite()
                engine.resume()
                await self._move_to_the_core()
                await self._move_from_the_core()
        finally:
            engine.resume()

    async def _begin_at_the_satellite(self) -> None:
        """Nobody else serves yet."""
        num_sessions = len(LONG) + len(SHORT)
        await self._until(lambda: len(self._of(SessionOpened)) == num_sessions and self._serving() == {"c1"})
        self._let(LONG, 0, 1, 2)
        await self._until(lambda: len(self._of(CallCompleted)) == 3 * len(LONG))
        assert {call.cell for call in self._of(CallStarted)} == {"c1"}

    async def _move_to_the_core(self) -> None:
        """At the operator's word. No step is ready, so it serves the same version for as long as its calls take."""
        await self._until(lambda: self._serving() == {"c0", "c1"})
        await self._order("drain")
        await self._until(lambda: self._serving() == {"c0"})
        assert [(move.cell, move.target) for move in self._of(KvMigrated)] == [("c1", "c0")] * len(LONG)
        self._let(LONG, 3)
        await self._until(lambda: len(self._of(CallCompleted)) == 4 * len(LONG))
        await self._order("undrain")
        await self._until(lambda: self._serving() == {"c0", "c1"})

    async def _move_from_the_core(self) -> None:
        """At the scheduler's: the short executions end, so a step is ready, and the core leaves the long ones."""
        self._let(SHORT, *range(TURNS))
        await self._until(lambda: any(pull.cell == "c1" and pull.version == 1 for pull in self._of(WeightsPulled)))
        assert [(move.cell, move.target) for move in self._of(KvMigrated)[len(LONG) :]] == [("c0", "c1")] * len(LONG)
        arrived = [switch for switch in self._of(CellSwitched) if switch.cell == "c1"][-1]
        assert (arrived.role, arrived.epoch) == ("rollout", self._of(WeightsPulled)[-1].epoch), "not in place"
        self._let(LONG, 4)

    async def _until(self, has_come: Callable[[], bool]) -> None:
        while not has_come():
            self.seen.append((await anext(self.events)).event)

    def _of(self, kind: type[E]) -> list[E]:
        return [event for event in self.seen if isinstance(event, kind)]

    def _serving(self) -> set[str]:
        roles = {switch.cell: switch.role for switch in self._of(CellSwitched)}
        return {cell for cell in roles if roles[cell] == "rollout"}

    def _let(self, executions: tuple[str, ...], *turns: int) -> None:
        for execution, turn in itertools.product(executions, turns):
            (self.run_dir.path / "workspaces" / execution / f"turn-{turn}").touch()

    async def _order(self, order: str) -> None:
        await asyncio.to_thread(gyre, "cell", order, "c1", self.run_dir.path.name, cwd=self.run_dir.path.parent)
