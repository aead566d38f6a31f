import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gyre.agents import dispatcher
from gyre.agents.dispatch import Dispatch, GroupWanted, execution_name, executions_wanted, groups_wanted, work_done
from gyre.agents.dispatcher import Dispatcher, Ended
from gyre.agents.evaluator import Grade
from gyre.agents.tasks import Task
from gyre.config import Config, load_config
from gyre.errors import EvaluationError, SandboxError
from gyre.events.log import Writer
from gyre.events.memory import MemoryLog
from gyre.events.types import (
    AdmissionResumed,
    AdmissionStopped,
    CohortConsumed,
    EvaluationFailed,
    Event,
    ExecutionDropped,
    ExecutionFinished,
    ExecutionScored,
    ExecutionStarted,
    GroupDispatched,
    PolicyPublished,
    PolicyRolledBack,
    Purpose,
    RunFinished,
    RunResumed,
    StepRejected,
)
from gyre.projections import cohorts as cohorts_fold
from gyre.projections.cohorts import CohortState
from tests.projections.event_stream import Stream

E = TypeVar("E", bound=Event)

CONFIG = load_config(
    "pipeline: {num_steps: 2, groups_per_step: 2, executions_per_group: 2}\n"
    "evaluation: {num_tasks: 1, temperatures: [0.0]}\n"
    "log: {min_free_gb: 0}\n"
)


def published(version: int) -> PolicyPublished:
    return PolicyPublished(version=version, digest="d", num_bytes=1, checkpoint="")


def consumed(step: int, groups: tuple[str, ...]) -> CohortConsumed:
    return CohortConsumed(step=step, groups=groups, executions=(), digest="", through_seq=0)


REJECTED = StepRejected(step=1, guard="kl", value=2.0, bound=1.0, detail="kl", action="rollback")


class ScriptedRunner:
    """Ends as it is told to; finishing at once is the default."""

    def __init__(self, run: Callable[[str], Ended] | None = None, grade: Callable[[Task], Grade] | None = None) -> None:
        self.sessions: list[str] = []
        self._run = run or (lambda session: Ended(exit_code=0, wall_s=0.1, timed_out=False, detail=""))
        self._grade = grade or (lambda task: Grade(score=0.5, parts=(("a", True), ("b", False)), wall_s=0.0))

    async def run(self, task: Task, session: str, workspace: Path, held: object = None) -> Ended:
        assert workspace.is_dir()
        self.sessions.append(session)
        return self._run(session)

    async def grade(self, task: Task, workspace: Path) -> Grade:
        return self._grade(task)


def drive(
    tmp_path: Path,
    runner: ScriptedRunner,
    before: Callable[[Writer], Awaitable[None]] | None = None,
    config: Config = CONFIG,
) -> list[Event]:
    """A dispatcher over a memory log, with a stand-in for the trainer that consumes whatever is complete."""

    async def main() -> list[Event]:
        log = MemoryLog("r")
        other = Writer(log, "trainer", 1, lambda: 0)
        if before:
            await before(other)
        await other.append(published(0))
        dispatching = Dispatcher(
            log, Writer(log, "dispatcher", 9, lambda: 0), config, runner=runner, run_dir=tmp_path, mint=lambda: "s"
        )

        async def trainer() -> None:
            state, step = Dispatch(), 0
            async for recorded in log.read(1):
                state.evolve(recorded)
                trains = [g for g, e in state.groups.items() if e.purpose == "train"]
                done = [g for g in trains if not any(key[0] == g for key in state.open)]
                wanted = done[2 * step : 2 * step + 2]
                if step < 2 and len(wanted) == 2 and len(done) == 2 * step + 2:
                    step += 1
                    await other.append(consumed(step, tuple(wanted)))
                    await other.append(published(step))

        training = asyncio.create_task(trainer())
        async with asyncio.timeout(60):
            await dispatching.run()
        training.cancel()
        return [recorded.event async for recorded in log.read(1, until=await log.last_seq())]

    return asyncio.run(main())


def of(events: list[Event], cls: type[E]) -> list[E]:
    return [event for event in events if isinstance(event, cls)]


def fold(events: list[Event]) -> Dispatch:
    async def main() -> Dispatch:
        log, state = MemoryLog("r"), Dispatch()
        writer = Writer(log, "w", 1, lambda: 0)
        for event in events:
            await writer.append(event)
        async for recorded in log.read(1, until=len(events)):
            state.evolve(recorded)
        return state

    return asyncio.run(main())


def test_nothing_is_wanted_before_the_first_version_is_published() -> None:
    assert groups_wanted(Dispatch(), CONFIG) == ()


def test_groups_are_wanted_up_to_the_dispatch_depth_and_only_at_boundaries() -> None:
    config = load_config("pipeline: {num_steps: 9, groups_per_step: 2, lookahead: 1, steps_per_burst: 2}")
    state = fold([published(0)])
    assert [g.group for g in groups_wanted(state, config)] == [f"g0000{i}" for i in range(6)]
    state = fold([published(0), consumed(1, ("g00000", "g00001"))])
    assert len(groups_wanted(state, config)) == 6, "a step inside a burst is no boundary"
    state = fold([published(0), consumed(1, ("g00000", "g00001")), published(2)])
    assert len(groups_wanted(state, config)) == 8


def test_without_steps_the_evaluation_is_all_there_is_and_comes_once() -> None:
    config = load_config(
        "pipeline: {num_steps: 0}\nevaluation: {num_tasks: 2, executions_per_task: 3, temperatures: [1.0]}"
    )
    wanted = groups_wanted(fold([published(0)]), config)
    assert [(group.group, group.num_slots, group.policy_version) for group in wanted] == [
        ("e00000", 3, 0),
        ("e00001", 3, 0),
    ]
    assert not work_done(fold([published(0)]), config)


def test_the_policy_is_evaluated_before_the_first_step_and_after_the_last_alike() -> None:
    evaluation = "evaluation: {num_tasks: 2, executions_per_task: 3, temperatures: [0.0, 1.0]}"
    config = load_config(f"pipeline: {{num_steps: 2, groups_per_step: 1}}\n{evaluation}")
    places = [(0, 0.0), (1, 0.0), (0, 1.0), (1, 1.0)]

    def wanted(*events: Event) -> list[tuple[str, int, int, float]]:
        found = [w for w in groups_wanted(fold([published(0), *events]), config) if w.purpose == "eval"]
        return [(w.group, w.policy_version, w.task_index, w.temperature) for w in found]

    assert wanted() == [(f"e{n:05d}", 0, *place) for n, place in enumerate(places)]
    before = [group(index, "eval") for index in range(4)]
    assert wanted(*before[:3]) == [("e00003", 0, *places[3])]
    assert wanted(*before, published(1)) == []
    assert wanted(*before, published(1), published(2)) == [(f"e{n:05d}", 2, *p) for n, p in enumerate(places, 4)]
    config = msgspec.structs.replace(config, pipeline=msgspec.structs.replace(config.pipeline, num_steps=1))
    assert len(wanted(*before, published(1))) == 4


def trains(state: Dispatch) -> list[GroupWanted]:
    return [wanted for wanted in groups_wanted(state, CONFIG) if wanted.purpose == "train"]


def test_a_rejected_cohort_is_dispatched_again_at_the_end_of_its_burst() -> None:
    first, second = ("g00000", "g00001"), ("g00002", "g00003")
    rejected = [published(0), consumed(1, first), REJECTED]
    assert len(trains(fold(rejected))) == 2, "not before the burst ends"
    back = PolicyRolledBack(from_step=1, to_version=0, reason="kl")
    assert len(trains(fold([*rejected, back]))) == 4
    state = fold([*rejected, back, consumed(1, second), published(1)])
    assert len(trains(state)) == 6, "two steps and the rejected one"
    late = fold([*rejected, PolicyRolledBack(from_step=1, to_version=1, reason="kl")])
    assert len(trains(late)) == 2, "a step is not published yet: the burst goes on"


def test_a_run_that_is_over_wants_nothing_until_it_is_resumed() -> None:
    over = [published(0), RunFinished(reason="paused")]
    assert groups_wanted(fold(over), CONFIG) == ()
    assert len(trains(fold([*over, RunResumed(versions=())]))) == 2


def test_a_cohort_and_its_rejection_count_once_however_often_they_are_heard() -> None:
    """Else more groups than the steps can consume are dispatched, or fewer, and the run waits for ever."""
    first, back = consumed(1, ("g00000", "g00001")), PolicyRolledBack(from_step=1, to_version=0, reason="kl")
    second, third = consumed(1, ("g00002", "g00003")), consumed(2, ("g00004", "g00005"))
    for rest in ([back], [back, second, published(1), third, published(2)]):
        once = trains(fold([published(0), first, REJECTED, *rest]))
        for again in ([first, first, REJECTED], [first, REJECTED, REJECTED], [first, REJECTED, first, REJECTED]):
            assert trains(fold([published(0), *again, *rest])) == once


def group(index: int, purpose: Purpose = "train") -> GroupDispatched:
    return GroupDispatched(
        group=f"{purpose[0]}{index}", index=index, purpose=purpose, task="t", task_digest="d", task_index=0,
        num_slots=2, policy_version=0, temperature=1.0,
    )  # fmt: skip


def start(name: str) -> ExecutionStarted:
    of, slot, attempt = name.split("-")
    return ExecutionStarted(
        execution=name, group=of, slot=int(slot), attempt=int(attempt[1:]), harness="", sandbox="", deadline_s=1.0
    )


def score(name: str) -> ExecutionScored:
    return ExecutionScored(execution=name, score=1.0, parts=(), wall_s=0.0)


def drop(name: str, final: bool = False) -> ExecutionDropped:
    return ExecutionDropped(execution=name, reason="", final=final)


ATTEMPTS = st.sampled_from(("t0-0-r0", "t0-0-r1", "t0-0-r2", "t0-1-r0", "e0-0-r0", "t9-0-r0"))
SAID = st.builds(start, ATTEMPTS) | st.builds(score, ATTEMPTS) | st.builds(drop, ATTEMPTS, st.booleans())
"""Anything that a dispatcher, alive or dead, may say of an attempt at a slot."""
TWICE = [start("t0-0-r0"), drop("t0-0-r0"), start("t0-0-r1")]


@given(st.lists(SAID | st.just(group(0)), max_size=25))
@example([*TWICE, score("t0-0-r0")])
@example([*TWICE, drop("t0-0-r0"), score("t0-0-r1"), score("t0-0-r1")])
@example([*TWICE, start("t0-0-r0"), drop("t0-0-r1", True)])
def test_a_slot_is_open_exactly_as_long_as_its_group_waits_for_it(events: list[Event]) -> None:
    """Whoever wrote it, and however late it is heard: a group that waits for a slot that nobody fills never ends."""
    cohorts, state, stream = CohortState(), Dispatch(), Stream()
    for number, event in enumerate((group(0), group(0, "eval"), *events), 1):
        stream.add(event)
        state.evolve(stream.recorded[-1])
        cohorts_fold.evolve(cohorts, stream.recorded[-1])
        groups = cohorts.groups.items()
        waiting = {(name, i) for name, found in groups for i, slot in enumerate(found.slots) if not slot.settled}
        assert state.open.keys() == waiting
        live = [slot.execution for slot in state.open.values() if slot.is_live]
        assert all(cohorts.find(execution) is not None for execution in live)
        assert len(live) + len(executions_wanted(state, 9)) == len(waiting)
        assert state.num_groups == {"train": 1, "eval": int(number > 1)}


def test_a_drop_that_is_heard_twice_uses_up_one_attempt() -> None:
    state = fold([group(0), start("t0-0-r0"), drop("t0-0-r0"), drop("t0-0-r0")])
    assert [(slot.attempt, execution_name(slot)) for slot in executions_wanted(state, 1)] == [(1, "t0-0-r1")]


def test_a_whole_run_dispatches_trains_evaluates_and_says_that_it_is_finished(tmp_path: Path) -> None:
    events = drive(tmp_path, ScriptedRunner())
    assert len(of(events, ExecutionScored)) == len(of(events, ExecutionStarted)) == 2 * 2 * 2 + 2
    assert events[-1] == RunFinished(reason="completed")
    assert not list((tmp_path / "workspaces").iterdir())


def test_an_infrastructure_failure_is_refilled_and_given_up_after_three_attempts(tmp_path: Path) -> None:
    def run(session: str) -> Ended:
        if session.startswith("g00000-0"):
            raise SandboxError("no namespaces")
        return Ended(exit_code=0, wall_s=0.1, timed_out=False, detail="")

    events = drive(tmp_path, ScriptedRunner(run))
    drops = of(events, ExecutionDropped)
    assert [d.execution for d in drops] == ["g00000-0", "g00000-0-r1", "g00000-0-r2"]
    assert [d.final for d in drops] == [False, False, True]
    assert "no namespaces" in drops[0].reason
    assert events[-1] == RunFinished(reason="completed")


def test_a_failed_and_a_timed_out_harness_are_scored_all_the_same(tmp_path: Path) -> None:
    def run(session: str) -> Ended:
        timed_out = session.startswith("g00000-0")
        return Ended(exit_code=1, wall_s=1.0, timed_out=timed_out, detail="" if timed_out else "exit code 1: boom")

    events = drive(tmp_path, ScriptedRunner(run))
    finished = {e.execution: e.reason for e in of(events, ExecutionFinished)}
    assert finished["g00000-0"] == "timed_out"
    assert finished["g00000-1"] == "harness_failed"
    assert {e.execution for e in of(events, ExecutionScored)} == set(finished)


def test_a_grader_that_fails_gives_no_score_and_no_zero(tmp_path: Path) -> None:
    def grade(task: Task) -> Grade:
        raise EvaluationError("grader is broken")

    events = drive(tmp_path, ScriptedRunner(grade=grade))
    assert of(events, ExecutionScored) == []
    drops = of(events, ExecutionDropped)
    assert {d.reason for d in drops} == {"evaluation failed"}
    assert all(d.final for d in drops)
    assert len(of(events, EvaluationFailed)) == 2 * len(drops)


@pytest.mark.parametrize("finished", [False, True])
def test_what_an_earlier_dispatcher_left_half_done_is_dropped_with_a_reason_and_refilled(
    tmp_path: Path, finished: bool
) -> None:
    async def before(writer: Writer) -> None:
        await writer.append(
            GroupDispatched(
                group="g00000", index=0, purpose="train", task="t", task_digest="d", task_index=0, num_slots=2,
                policy_version=0, temperature=1.0,
            )
        )  # fmt: skip
        await writer.append(
            ExecutionStarted(
                execution="g00000-0", group="g00000", slot=0, attempt=0, harness="h", sandbox="s", deadline_s=1.0
            )
        )
        if finished:
            await writer.append(
                ExecutionFinished(execution="g00000-0", reason="completed", exit_code=0, wall_s=1.0, detail="")
            )

    events = drive(tmp_path, ScriptedRunner(), before)
    drops = of(events, ExecutionDropped)
    assert [(d.execution, d.final) for d in drops] == [("g00000-0", False)]
    assert "interrupted" in drops[0].reason
    scored = [e.execution for e in of(events, ExecutionScored)]
    assert "g00000-0-r1" in scored
    assert len(scored) == len(set(scored))


def test_a_full_disk_stops_admission_and_nothing_else_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter([0.0, 0.0])

    class Usage:
        def __init__(self) -> None:
            self.free = next(free, 1e12)

    monkeypatch.setattr(dispatcher.shutil, "disk_usage", lambda path: Usage())
    monkeypatch.setattr(dispatcher, "DISK_CHECK_S", 0.05)
    monkeypatch.setattr(dispatcher, "DISK_REST_S", 0.0)
    config = msgspec.structs.replace(CONFIG, log=msgspec.structs.replace(CONFIG.log, min_free_gb=1.0))
    events = drive(tmp_path, ScriptedRunner(), config=config)
    stopped, resumed = (of(events, kind)[0] for kind in (AdmissionStopped, AdmissionResumed))
    assert "log.min_free_gb" in stopped.reason
    first = next(i for i, event in enumerate(events) if isinstance(event, GroupDispatched))
    assert events.index(stopped) < events.index(resumed) < first
    assert events[-1] == RunFinished(reason="completed"), "it goes on by itself"


def test_no_execution_starts_before_the_gateway_listens(tmp_path: Path) -> None:
    async def main() -> None:
        log, runner, listens = MemoryLog("r"), ScriptedRunner(), asyncio.Event()
        await Writer(log, "trainer", 1, lambda: 0).append(published(0))
        dispatching = Dispatcher(
            log, Writer(log, "dispatcher", 9, lambda: 0), CONFIG, runner=runner, run_dir=tmp_path, mint=lambda: "s",
            gateway=listens.wait,
        )  # fmt: skip

        async def until(kind: type[Event]) -> None:
            async for recorded in log.read(1):
                if isinstance(recorded.event, kind):
                    return

        async with asyncio.timeout(120):
            task = asyncio.create_task(dispatching.run())
            await until(GroupDispatched)
            await asyncio.sleep(0.2)
            assert runner.sessions == []
            listens.set()
            await until(ExecutionScored)
            await Writer(log, "supervisor", 1, lambda: 0).append(RunFinished(reason="interrupted"))
            await task

    asyncio.run(main())


def test_a_run_that_ends_before_its_gateway_listens_ends_the_dispatcher(tmp_path: Path) -> None:
    async def main() -> None:
        log = MemoryLog("r")
        await Writer(log, "trainer", 1, lambda: 0).append(published(0))
        dispatching = Dispatcher(
            log, Writer(log, "dispatcher", 9, lambda: 0), CONFIG, runner=ScriptedRunner(), run_dir=tmp_path,
            mint=lambda: "s", gateway=asyncio.Event().wait,
        )  # fmt: skip
        async with asyncio.timeout(120):
            task = asyncio.create_task(dispatching.run())
            async for recorded in log.read(1):
                if isinstance(recorded.event, GroupDispatched):
                    break
            await Writer(log, "supervisor", 1, lambda: 0).append(RunFinished(reason="failed"))
            await task

    asyncio.run(main())
