"""Tasks that have nothing to teach are passed over for a while: from the log alone, and each time with its reason."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.agents.curriculum import Curriculum, skip_wanted
from gyre.agents.dispatch import Dispatch, executions_wanted, groups_wanted, work_done
from gyre.agents.dispatcher import Dispatcher, Ended
from gyre.agents.tasks import Task
from gyre.agents.verifier import Grade
from gyre.config import Config, load_config
from gyre.events.log import Writer
from gyre.events.memory import MemoryLog
from gyre.events.types import (
    CohortConsumed,
    Event,
    ExecutionDropped,
    ExecutionScored,
    ExecutionStarted,
    GroupDispatched,
    GroupSkipped,
    PolicyPublished,
)
from tests.projections.event_stream import Stream

E = TypeVar("E", bound=Event)


def configured(num_steps: int = 6, num_tasks: int = 3, rounds: int = 2, *, curriculum: bool = True) -> Config:
    return load_config(
        f"tasks: {{num_tasks: {num_tasks}, curriculum: {str(curriculum).lower()}, curriculum_rounds: {rounds}}}\n"
        f"pipeline: {{num_steps: {num_steps}, groups_per_step: 2, executions_per_group: 2}}\nlog: {{min_free_gb: 0}}\n"
    )


def of(events: Sequence[Event], cls: type[E]) -> list[E]:
    return [event for event in events if isinstance(event, cls)]


def task_at(index: int) -> str:
    return f"t{index}"


class Loop:
    """Dispatcher, executions and trainer as one: what comes next follows from the events so far and `scores`."""

    def __init__(
        self, config: Config, scores: dict[int, tuple[float | None, ...]], events: Sequence[Event] = ()
    ) -> None:
        """scores: of a task's executions; None is dropped for good."""
        self.config, self.scores = config, scores
        self.stream, self.state = Stream(), Dispatch()
        self._num_folded = 0
        self.add(*(events or [PolicyPublished(version=0, digest="d", num_bytes=1, checkpoint="")]))

    @property
    def events(self) -> list[Event]:
        return [recorded.event for recorded in self.stream.recorded]

    def add(self, *events: Event) -> None:
        for event in events:
            self.stream.add(event)
            self.state.evolve(self.stream.recorded[-1])

    def step(self) -> bool:
        """One event more; False at the end."""
        if work_done(self.state, self.config):
            return False
        if wanted := groups_wanted(self.state, self.config):
            index = wanted[0].task_index
            self.add(
                skip_wanted(self.state.curriculum, self.config.tasks, index, task_at)
                or GroupDispatched(
                    group=wanted[0].group, index=wanted[0].index, purpose="train", task=task_at(index), task_digest="",
                    task_index=index, num_slots=wanted[0].num_slots, policy_version=wanted[0].policy_version,
                    temperature=1.0,
                )
            )  # fmt: skip
        elif started := [slot for slot in self.state.open.values() if slot.is_live]:
            slot = started[0]
            score = self.scores[self.state.groups[slot.group].task_index][slot.slot]
            if score is None:
                self.add(ExecutionDropped(execution=slot.execution, reason="", final=True))
            else:
                self.add(ExecutionScored(execution=slot.execution, score=score, parts=(), wall_s=0.0))
        elif slots := executions_wanted(self.state, 1):
            (slot,) = slots
            name = f"{slot.group}-{slot.slot}"
            self.add(
                ExecutionStarted(
                    execution=name, group=slot.group, slot=slot.slot, attempt=0, harness="", sandbox="", deadline_s=1.0
                )
            )
        elif (consumed := len(of(self.events, CohortConsumed))) > self.state.version:
            self.add(PolicyPublished(version=consumed, digest="d", num_bytes=1, checkpoint=""))
        else:
            groups = tuple(self.state.groups)[2 * consumed : 2 * consumed + 2]
            self.add(CohortConsumed(step=consumed + 1, groups=groups, executions=(), digest="", through_seq=0))
        return True

    def play(self) -> list[Event]:
        while self.step():
            assert len(self.stream.recorded) < 2000, "a walk comes to an end"
        return self.events


def walk(events: Sequence[Event]) -> list[str]:
    return [
        event.task if isinstance(event, GroupDispatched) else f"({event.task})"
        for event in events
        if isinstance(event, GroupDispatched | GroupSkipped)
    ]


def test_a_task_rests_for_its_rounds_and_is_tried_again() -> None:
    events = Loop(configured(), {0: (0.0, 0.0), 1: (0.0, 1.0), 2: (0.5, 0.25)}).play()
    assert walk(events)[:12] == ["t0", "t1", "t2", "(t0)", "t1", "t2", "(t0)", "t1", "t2", "t0", "t1", "t2"]
    first, second = of(events, GroupSkipped)[:2]
    assert first == second == GroupSkipped(task="t0", task_index=0, reason="all_failed", because="g00000")
    assert len(of(events, GroupDispatched)) == 12, "a task that rests takes no group's place"


def test_it_is_off_by_default() -> None:
    events = Loop(configured(curriculum=False), dict.fromkeys(range(3), (0.0, 0.0))).play()
    assert not of(events, GroupSkipped)
    assert [event.task_index for event in of(events, GroupDispatched)] == [0, 1, 2] * 4
    assert not load_config("").tasks.curriculum


def test_when_all_tasks_rest_they_are_tried_again() -> None:
    events = Loop(configured(rounds=3), dict.fromkeys(range(3), (1.0, 1.0))).play()
    assert len(of(events, GroupDispatched)) == 12
    assert {event.reason for event in of(events, GroupSkipped)} == {"all_passed"}


def test_equal_scores_in_between_and_a_single_score_say_nothing() -> None:
    state = Curriculum()
    for task, scores in (("a", (0.5, 0.5)), ("b", (1.0,)), ("c", ()), ("d", (0.0, 1.0)), ("e", (float("nan"), 0.0))):
        state.settle("g", task, scores)
    assert not state.resting
    state.settle("g1", "d", (1.0, 1.0))
    state.settle("g2", "d", (1.0, 0.0))
    assert not state.resting, "the last group counts"


scores = st.sampled_from([0.0, 0.0, 1.0, 1.0, 0.5, None])


@settings(max_examples=40, deadline=None)
@given(
    st.fixed_dictionaries({n: st.tuples(scores, scores) for n in range(3)}),
    st.integers(1, 3),
    st.integers(1, 4),
    st.data(),
)
def test_going_on_from_any_prefix_gives_the_same_log(
    outcome: dict[int, tuple[float | None, ...]], rounds: int, num_tasks: int, data: st.DataObject
) -> None:
    outcome = {**outcome, 3: (0.0, 1.0)}
    config = configured(num_tasks=num_tasks, rounds=rounds)
    whole = Loop(config, outcome).play()
    cut = data.draw(st.integers(1, len(whole)))
    assert Loop(config, outcome, whole[:cut]).play() == whole
    groups = {event.group: event.task for event in of(whole, GroupDispatched)}
    assert all(groups[event.because] == event.task for event in of(whole, GroupSkipped))
    assert max(Counter(e.because for e in of(whole, GroupSkipped)).values(), default=0) <= rounds


@settings(max_examples=60, deadline=None)
@given(st.fixed_dictionaries({n: st.tuples(scores, scores) for n in range(4)}), st.integers(1, 4), st.booleans())
def test_at_any_time_every_task_had_its_turn_as_often_as_any_other_but_for_one(
    outcome: dict[int, tuple[float | None, ...]], num_tasks: int, curriculum: bool
) -> None:
    """A turn is a group, or word that there is none and why; whatever is dropped, scored or skipped meanwhile."""
    turns = Counter(dict.fromkeys(map(task_at, range(num_tasks)), 0))
    for event in Loop(configured(num_tasks=num_tasks, curriculum=curriculum), outcome).play():
        if isinstance(event, GroupDispatched | GroupSkipped):
            turns[event.task] += 1
            assert max(turns.values()) - min(turns.values()) <= 1
        if isinstance(event, GroupSkipped):
            assert curriculum and event.reason in ("all_passed", "all_failed") and event.because
    assert sum(turns.values()) >= 12


def test_a_dispatcher_passes_over_what_everybody_solves(tmp_path: Path) -> None:
    """The real one, over a log: it says so, and what it dispatches instead is the next task."""

    class Solves:
        async def run(self, task: Task, session: str, workspace: Path, held: object = None) -> Ended:
            return Ended(exit_code=0, wall_s=0.0, timed_out=False, detail="")

        async def grade(self, task: Task, workspace: Path) -> Grade:
            return Grade(score=1.0, parts=(("a", True),))

    async def main() -> list[Event]:
        log = MemoryLog("r")
        other = Writer(log, "trainer", 1, lambda: 0)
        await other.append(PolicyPublished(version=0, digest="d", num_bytes=1, checkpoint=""))
        dispatching = Dispatcher(
            log,
            Writer(log, "dispatcher", 1, lambda: 0),
            configured(num_steps=2, num_tasks=2, rounds=1),
            runner=Solves(),
            run_dir=tmp_path,
            mint=lambda: "s",
        )

        async def trainer() -> None:
            num_scored = step = 0
            async for recorded in log.read(1):
                num_scored += isinstance(recorded.event, ExecutionScored)
                if num_scored == 4:
                    num_scored, step = 0, step + 1
                    groups = (f"g{2 * step - 2:05d}", f"g{2 * step - 1:05d}")
                    await other.append(
                        CohortConsumed(step=step, groups=groups, executions=(), digest="", through_seq=0)
                    )
                    await other.append(PolicyPublished(version=step, digest="d", num_bytes=1, checkpoint=""))

        training = asyncio.create_task(trainer())
        async with asyncio.timeout(60):
            await dispatching.run()
        training.cancel()
        return [recorded.event async for recorded in log.read(1, until=await log.last_seq())]

    events = asyncio.run(main())
    skipped = of(events, GroupSkipped)
    assert [(event.task_index, event.because) for event in skipped] == [(0, "g00000"), (1, "g00001")]
    assert [event.task_index for event in of(events, GroupDispatched)] == [0, 1, 0, 1]


def test_only_what_is_passed_over_for_the_group_that_counts_now_uses_up_its_rest() -> None:
    state = Curriculum()
    for because in ("g1", "g2"):
        state.settle(because, "t0", (1.0, 1.0))
    for because in ("g1", "g2", "g9"):
        state.skip(GroupSkipped(task="t0", task_index=0, reason="all_passed", because=because))
    state.skip(GroupSkipped(task="t9", task_index=9, reason="all_passed", because="g2"))
    assert state.resting["t0"].num_skipped == 1 and state.num_skipped == 4
