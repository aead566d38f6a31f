"""From a workspace to a score: what is graded was kept, and tampering costs what the config says."""

import asyncio
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from gyre.agents.dispatcher import Dispatcher, Ended, Engines
from gyre.agents.evaluator import grade
from gyre.agents.held_clock import HeldClock
from gyre.agents.process import Child
from gyre.agents.regrading import Regrading
from gyre.agents.sandbox import Sandbox
from gyre.agents.snapshots import Snapshots
from gyre.agents.task_folder import load_task
from gyre.agents.tasks import Task
from gyre.agents.verifier import Grade
from gyre.config import Config, load_config
from gyre.errors import EvaluationError, MissingError
from gyre.events.codec import Recorded
from gyre.events.log import Ack, Item, Writer
from gyre.events.memory import MemoryLog
from gyre.events.types import (
    CellFenced,
    CellJoined,
    CellLost,
    CellSwitched,
    EvaluationFailed,
    Event,
    ExecutionDropped,
    ExecutionFinished,
    ExecutionRegraded,
    ExecutionScored,
    ExecutionStarted,
    ExecutionTimedOut,
    Finding,
    GroupDispatched,
    MilestoneScored,
    PolicyPublished,
    RunFinished,
    SnapshotTaken,
)
from tests.projections.event_stream import Stream

E = TypeVar("E", bound=Event)
EXAMPLES = Path(__file__).parents[2] / "examples/tasks"


class Agent:
    """Does `work` in the workspace for `seconds`; the grader counts the files that are called `done*`."""

    def __init__(self, work: Callable[[Path], None], seconds: float = 0.0, fails: int = 0) -> None:
        self._work, self._seconds, self._fails = work, seconds, fails

    async def run(self, task: Task, session: str, workspace: Path, held: Callable[[], float]) -> Ended:
        self._work(workspace)
        await asyncio.sleep(self._seconds)
        return Ended(exit_code=0, wall_s=self._seconds, timed_out=False, detail="")

    async def grade(self, task: Task, workspace: Path) -> Grade:
        if self._fails:
            self._fails -= 1
            raise EvaluationError("grader: not today")
        (workspace / "left by the grader").touch()
        num = len(list(workspace.glob("done*")))
        return Grade(score=num / 4, parts=tuple((f"part {n}", n < num) for n in range(4)))


def drive(
    tmp_path: Path,
    agent: Agent,
    grading: str = "{}",
    harness: str = "{}",
    before: tuple[Event, ...] = (),
    num_tasks: int = 1,
    tasks: Path = EXAMPLES,
) -> list[Event]:
    """One execution each of tasks in folders, by a dispatcher over a memory log."""
    config = load_config(
        f"tasks: {{path: {tasks}}}\npipeline: {{num_steps: 0}}\n"
        f"evaluation: {{num_tasks: {num_tasks}, temperatures: [0.0]}}\n"
        f"log: {{min_free_gb: 0}}\ngrading: {grading}\nharness: {harness}\n"
    )

    tmp_path.mkdir(exist_ok=True)

    async def main() -> list[Event]:
        log = MemoryLog("r")
        other = Writer(log, "trainer", 1, lambda: 0)
        for event in (*before, PolicyPublished(version=0, digest="d", num_bytes=1, checkpoint="")):
            await other.append(event)
        writer = Writer(log, "dispatcher", 1, lambda: 0)
        dispatching = Dispatcher(log, writer, config, runner=agent, run_dir=tmp_path, mint=lambda: "s")
        async with asyncio.timeout(60):
            await dispatching.run()
        return [recorded.event async for recorded in log.read(1, until=await log.last_seq())]

    return asyncio.run(main())


def of(events: list[Event], cls: type[E]) -> list[E]:
    return [event for event in events if isinstance(event, cls)]


def touch(*names: str) -> Callable[[Path], None]:
    def work(workspace: Path) -> None:
        for name in names:
            (workspace / name).touch()

    return work


def cheat(workspace: Path) -> None:
    (workspace / "done").touch()
    (workspace / "sitecustomize.py").write_text("import os\nos._exit(0)\n")


def test_what_is_graded_is_a_copy_of_what_was_kept(tmp_path: Path) -> None:
    events = drive(tmp_path, Agent(touch("done 1", "done 2")))
    (taken,), (scored,) = of(events, SnapshotTaken), of(events, ExecutionScored)
    assert (taken.kind, scored.snapshot, scored.score) == ("end", taken.snapshot, 0.5)
    kept = {entry.path for entry in Snapshots(tmp_path / "snapshots").entries(taken.snapshot)}
    assert {"done 1", "done 2", "booking.py"} == kept
    assert not list((tmp_path / "grading").iterdir())


@pytest.mark.parametrize("mode", ["record", "zero", "drop"])
def test_tampering_is_recorded_and_costs_what_the_config_says(tmp_path: Path, mode: str) -> None:
    events = drive(tmp_path, Agent(cheat), f"{{on_tampering: {mode}}}")
    if mode == "drop":
        (dropped,) = of(events, ExecutionDropped)
        assert (dropped.reason, dropped.final) == ("tampering: exits_early, runner_patched", True)
        return
    (scored,) = of(events, ExecutionScored)
    assert set(scored.findings) == {
        Finding(rule="runner_patched", path="sitecustomize.py"),
        Finding(rule="exits_early", path="sitecustomize.py"),
    }
    assert (scored.score, scored.graded) == ((0.25, None) if mode == "record" else (0.0, 0.25))


def test_a_milestone_is_graded_though_the_harness_ends_meanwhile(tmp_path: Path) -> None:
    events = drive(tmp_path, Agent(touch("done"), seconds=0.6), "{milestones_s: [0.3, 50]}")
    (milestone,), (scored,) = of(events, MilestoneScored), of(events, ExecutionScored)
    assert (milestone.after_s, milestone.score) == (0.3, 0.25)
    assert events.index(milestone) < events.index(scored), "a reward may be made of it"
    assert [taken.kind for taken in of(events, SnapshotTaken)] == ["milestone", "end"]


def test_a_grader_that_fails_is_asked_again_and_then_given_up(tmp_path: Path) -> None:
    events = drive(tmp_path / "a", Agent(touch("done"), fails=1))
    assert [failed.attempt for failed in of(events, EvaluationFailed)] == [1]
    assert len(of(events, ExecutionScored)) == len(of(events, SnapshotTaken)) == 1
    events = drive(tmp_path / "b", Agent(touch("done"), fails=9), "{attempts: 3}")
    assert [failed.attempt for failed in of(events, EvaluationFailed)] == [1, 2, 3]
    assert of(events, ExecutionDropped)[0].final


def test_a_workspace_that_is_too_large_has_no_score_and_says_why(tmp_path: Path) -> None:
    def fill(workspace: Path) -> None:
        with (workspace / "big").open("wb") as file:
            file.truncate(3 << 20)

    events = drive(tmp_path, Agent(fill), "{max_snapshot_mb: 1}")
    assert "more than 1 MiB" in of(events, EvaluationFailed)[0].reason
    assert of(events, ExecutionDropped)[0].reason == "evaluation failed"


def test_an_execution_beyond_its_overall_deadline_is_discarded(tmp_path: Path) -> None:
    events = drive(tmp_path, Agent(touch("done"), seconds=600), harness="{overall_deadline_s: 0.3}")
    (timed_out,), (dropped,) = of(events, ExecutionTimedOut), of(events, ExecutionDropped)
    assert (timed_out.kind, dropped.reason, dropped.final) == ("overall", "overall deadline", True)
    assert not of(events, ExecutionScored)
    assert not of(events, ExecutionFinished)


def test_an_execution_whose_score_is_being_written_at_its_deadline_ends_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_all = MemoryLog.publish_all

    async def slow(self: MemoryLog, items: Sequence[Item], **options: Any) -> Ack:
        ack = await publish_all(self, items, **options)
        if any(b"execution.scored" in item.body for item in items):
            await asyncio.sleep(0.8)
        return ack

    monkeypatch.setattr(MemoryLog, "publish_all", slow)
    events = drive(tmp_path, Agent(touch("done")), harness="{overall_deadline_s: 0.5}")
    assert len(of(events, ExecutionScored)) + len(of(events, ExecutionDropped)) == 1
    assert len(of(events, ExecutionDropped)) == len(of(events, ExecutionTimedOut))
    assert events[-1] == RunFinished(reason="completed")


def test_outages_are_the_seconds_without_an_open_cell() -> None:
    now = [0.0]
    outages = Engines(lambda: now[0])

    async def recorded(*events: Event) -> list[Recorded]:
        log = MemoryLog("r")
        writer = Writer(log, "cell", 1, lambda: 0)
        for event in events:
            await writer.append(event)
        return [item async for item in log.read(1, until=await log.last_seq())]

    opened, again = (CellSwitched(cell="c0", role="rollout", epoch=n, version=0, phases=()) for n in (1, 2))
    joined = CellJoined(cell="c0", index=0, capacity=1, engine_url="u", model_digest="d")
    seen = asyncio.run(recorded(joined, opened, CellFenced(cell="c0", epoch=2), again))
    held = []
    for item, at in zip(seen, (1.0, 2.0, 10.0, 15.0), strict=True):
        now[0] = at
        outages.evolve(item)
        now[0] += 1
        held.append(outages.held_s())
    assert held == [0.0, 0.0, 1.0, 5.0], "before the first cell nobody waits"


def test_the_engines_have_room_for_what_open_cells_can_take() -> None:
    engines = Engines(lambda: 0.0)
    assert engines.capacity() == float("inf"), "before the first cell nothing is known"
    stream = Stream()

    def after(*events: Event) -> float:
        for event in events:
            stream.add(event)
            engines.evolve(stream.recorded[-1])
        return engines.capacity()

    def joined(index: int, capacity: int) -> CellJoined:
        return CellJoined(cell=f"c{index}", index=index, capacity=capacity, engine_url="u", model_digest="d")

    def opened(index: int, epoch: int) -> CellSwitched:
        return CellSwitched(cell=f"c{index}", role="rollout", epoch=epoch, version=0, phases=())

    assert after(joined(0, 3), joined(1, 4)) == 7
    assert after(opened(0, 1)) == 3
    assert after(opened(1, 1)) == 7
    assert after(CellFenced(cell="c0", epoch=2)) == 4
    assert after(CellLost(cell="c1", reason="")) == 7, "one of them comes back: what is started meanwhile waits there"
    assert after(opened(0, 2)) == 3


def test_no_more_executions_are_live_than_the_engines_have_room_for(tmp_path: Path) -> None:
    most, live = [0], [0]

    class Counting(Agent):
        async def run(self, task: Task, session: str, workspace: Path, held: Callable[[], float]) -> Ended:
            live[0] += 1
            most[0] = max(most[0], live[0])
            while most[0] < 2:  # noqa: ASYNC110 - until another has come, however slowly
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)
            live[0] -= 1
            return Ended(exit_code=0, wall_s=0.0, timed_out=False, detail="")

    cell = CellJoined(cell="c0", index=0, capacity=2, engine_url="u", model_digest="d")
    events = drive(tmp_path, Counting(touch("done")), before=(cell,), num_tasks=7)
    assert (most[0], len(of(events, ExecutionScored))) == (2, 7)


def test_no_more_graders_are_at_work_than_the_config_says(tmp_path: Path) -> None:
    most, live = [0], [0]

    class Counting(Agent):
        async def grade(self, task: Task, workspace: Path) -> Grade:
            live[0] += 1
            most[0] = max(most[0], live[0])
            while most[0] < 2:  # noqa: ASYNC110 - until another has come, however slowly
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)
            live[0] -= 1
            return Grade(score=0.5, parts=())

    events = drive(tmp_path, Counting(touch("done")), grading="{max_concurrent: 2}", num_tasks=6)
    assert (most[0], len(of(events, ExecutionScored))) == (2, 6)


def test_a_deadline_waits_while_the_clock_is_held() -> None:
    async def main(held: Callable[[], float]) -> float:
        child = Child([sys.executable, "-c", "import time; time.sleep(600)"], env={}, tail_size=10, output_size=10)
        begun = time.monotonic()
        assert await child.watch(0.3, held)
        return time.monotonic() - begun

    begun = time.monotonic()
    assert asyncio.run(main(lambda: min(time.monotonic() - begun, 1.5))) >= 1.5
    assert asyncio.run(main(lambda: 77.0)) < 60, "only what is added while it runs counts"


def test_the_overall_deadline_and_milestones_wait_while_no_engine_can_answer(tmp_path: Path) -> None:
    """All the while: the only cell is on its way to training."""
    there = (
        CellJoined(cell="c0", index=0, capacity=8, engine_url="u", model_digest="d"),
        CellSwitched(cell="c0", role="rollout", epoch=1, version=0, phases=()),
        CellFenced(cell="c0", epoch=2),
    )
    limits = {"grading": "{milestones_s: [0.2]}", "harness": "{overall_deadline_s: 0.3}"}
    events = drive(tmp_path / "held", Agent(touch("done"), seconds=0.6), before=there, **limits)
    assert not of(events, ExecutionTimedOut) and not of(events, MilestoneScored)
    assert len(of(events, ExecutionScored)) == 1
    (after,) = of(
        drive(tmp_path / "free", Agent(touch("done"), seconds=600), before=there[:2], **limits), ExecutionTimedOut
    )
    assert after.after_s == 0.3


def test_a_limit_by_the_clock_of_an_execution_comes_that_much_later() -> None:
    async def main() -> float:
        begun = time.monotonic()

        def held() -> float:
            """Between 0.1 and 0.5 s."""
            return 50 + min(max(time.monotonic() - begun - 0.1, 0), 0.4)

        with pytest.raises(TimeoutError):
            async with HeldClock(held).limit(0.3):
                await asyncio.sleep(600)
        async with HeldClock(held).limit(0):
            await asyncio.sleep(0.01)
        return time.monotonic() - begun

    assert 0.7 <= asyncio.run(main()) < 60


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_a_finished_run_is_graded_again_from_its_snapshots_alone(tmp_path: Path) -> None:
    task = load_task(EXAMPLES / "booking-bugs")

    def solve(workspace: Path) -> None:
        assert task.folder is not None
        subprocess.run(["bash", f"{task.folder.path}/solution/solve.sh"], cwd=workspace, check=True, env=os.environ)

    config: Config = load_config(
        f"tasks: {{path: {EXAMPLES}}}\npipeline: {{num_steps: 0}}\nevaluation: {{num_tasks: 1, temperatures: [0.0]}}\n"
        "log: {min_free_gb: 0}\n"
    )

    async def main() -> tuple[list[Event], list[str]]:
        log = MemoryLog("r")
        published = PolicyPublished(version=0, digest="d", num_bytes=1, checkpoint="")
        await Writer(log, "trainer", 1, lambda: 0).append(published)
        writer = Writer(log, "dispatcher", 1, lambda: 0)
        await Dispatcher(log, writer, config, runner=Agent(solve), run_dir=tmp_path, mint=lambda: "s").run()
        said: list[str] = []
        again = Regrading(
            log, Writer(log, "grader", 1, lambda: 0), Sandbox(), tmp_path, "tests", lambda purpose, index, name: task
        )
        await again.run("", 2, said.append)
        with pytest.raises(MissingError, match="no snapshot"):
            await again.run("nobody", 1, said.append)
        return [recorded.event async for recorded in log.read(1, until=await log.last_seq())], said

    events, said = asyncio.run(main())
    (scored,), (regraded,) = of(events, ExecutionScored), of(events, ExecutionRegraded)
    assert (scored.score, regraded.score, regraded.snapshot) == (0.0, 1.0, scored.snapshot)
    assert said[-1] == "1 of 1 graded with tests, mean 1.000"


BAD_TESTS = {
    "hangs": ("sleep 600", "stopped: longer than 1 s"),
    "prints rubbish": ("head -c 3000 /dev/urandom", "no ctrf.json, .* it said: what is no text"),
    "more passed than there are": (
        """echo '{"results": {"summary": {"tests": 1, "passed": 9}, "tests": []}}' > /logs/verifier/ctrf.json""",
        "ctrf.json: 9 of 1 passed",
    ),
    "more than the task has": (
        """echo '{"results": {"summary": {"tests": 2, "passed": 0}, "tests": [{"name": "a", "status": "failed"},"""
        """ {"name": "b", "status": "failed"}]}}' > /logs/verifier/ctrf.json""",
        "ctrf.json: 2 tests, task.toml says 1",
    ),
    "a score that is no number": ("echo nan > /logs/verifier/reward.txt", "reward nan is not in"),
    "a negative score": ("echo -0.5 > /logs/verifier/reward.txt", "reward -0.5 is not in"),
}


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_bad_tests_are_recorded_and_no_score(tmp_path: Path) -> None:
    """One task of each kind, in one run, by the real grader."""
    for name, (script, _) in BAD_TESTS.items():
        folder = tmp_path / "tasks" / name
        (folder / "tests").mkdir(parents=True)
        num_tests = 0 if "score" in name else 1
        timeout_s = 1 if name == "hangs" else 60
        (folder / "task.toml").write_text(
            f"[verifier]\ntimeout_sec = {timeout_s}\n[metadata.gyre]\nnum_tests = {num_tests}\n"
        )
        (folder / "instruction.md").write_text("Do it.\n")
        (folder / "tests/test.sh").write_text(f"{script}\n")

    class Graded(Agent):
        async def grade(self, task: Task, workspace: Path) -> Grade:
            return await grade(Sandbox(), workspace, task)

    events = drive(
        tmp_path / "run", Graded(touch("done")), "{attempts: 1}", num_tasks=len(BAD_TESTS), tasks=tmp_path / "tasks"
    )
    assert not of(events, ExecutionScored)
    dropped = {event.execution: event for event in of(events, ExecutionDropped)}
    assert {(event.reason, event.final) for event in dropped.values()} == {("evaluation failed", True)}
    group_of = {event.execution: event.group for event in of(events, ExecutionStarted)}
    task_of = {event.group: event.task for event in of(events, GroupDispatched)}
    failed = {task_of[group_of[event.execution]]: event.reason for event in of(events, EvaluationFailed)}
    assert len(dropped) == len(failed) == len(BAD_TESTS)
    for name, (_, reason) in BAD_TESTS.items():
        assert re.search(reason, failed[name], re.S), failed[name]
