"""Pure. Where the wall time of a run goes, as its log tells: events -> intervals of work -> seconds by phase.

Every instant between the first arrival of a cell and the end belongs to one phase: the first in `PHASES` for which
somebody is at work. What is left, `gyre`, is time in which neither trainer, engine, harness nor grader works for any
execution: what this program itself adds on the critical path. Invariant: the phases add up to the whole.

Times are those that events carry. An engine is at work for the last `engine_s` before a `call.completed`; a harness
from the opening of its session to its end, but for its calls; a grader for the `wall_s` before its score; the trainer
from the cohort to the step, checkpoint included.
"""

from collections.abc import Iterable

import msgspec

from gyre.events import types as e
from gyre.events.codec import Recorded

PHASES = ("training", "engine", "harness", "scoring")
Interval = tuple[float, float]


class WallSeconds(msgspec.Struct, frozen=True, kw_only=True):
    total: float
    phases: dict[str, float]
    """`PHASES`, and `gyre`."""
    switching: float
    """Of `gyre`: between a command to a cell and its arrival; the rest is dispatch, waiting and writing."""


class RunCosts:
    """Changed in place by `evolve`. Seconds are since the epoch, as floats of recorded nanoseconds."""

    def __init__(self) -> None:
        self.begin_s = 0.0
        """First arrival of a cell in rollout; what comes before is the start."""
        self.end_s = 0.0
        """`run.finished`."""
        self.milestones: dict[str, float] = {}
        """First time of each event type."""
        self.work: dict[str, list[Interval]] = {phase: [] for phase in PHASES}
        self.switches: list[Interval] = []
        self.trainer_phases: dict[str, float] = {}
        self.switch_phases: dict[str, float] = {}
        self.num_calls = 0
        self.num_executions = 0
        self.num_events = 0
        self.call_added: list[float] = []
        """Of each call: seconds between its start and its delivery that are not the engine's."""
        self._sessions: dict[str, float] = {}
        self._calls: dict[str, dict[str, tuple[float, float]]] = {}
        """Execution -> call -> (start, end so far)."""
        self._engine_s: dict[str, float] = {}
        self._step_s = 0.0
        self._requested: dict[str, float] = {}

    def evolve(self, recorded: Recorded) -> None:
        event, at = recorded.event, recorded.envelope.time_ns / 1e9
        self.num_events += 1
        self.milestones.setdefault(type(event).__name__, at)
        match event:
            case e.RunFinished():
                self.end_s = at
            case e.SessionOpened():
                self._sessions[event.execution] = at
            case e.CallStarted():
                self.num_calls += 1
                self._calls.setdefault(event.execution, {})[event.call] = (at, at)
            case e.CallCompleted():
                self.work["engine"].append((at - event.engine_s, at))
                self._engine_s[event.call] = event.engine_s
                self._extend(event.execution, event.call, at)
            case e.CallDelivered():
                start = self._extend(event.execution, event.call, at)
                if event.call in self._engine_s:
                    self.call_added.append(at - start - self._engine_s.pop(event.call))
            case e.ExecutionFinished():
                calls = self._calls.pop(event.execution, {}).values()
                begun = self._sessions.pop(event.execution, at)
                self.work["harness"] += subtract((begun, at), calls)
            case e.ExecutionScored():
                self.num_executions += 1
                self.work["scoring"].append((at - event.wall_s, at))
            case e.CohortConsumed():
                self._step_s = at
            case e.StepCompleted():
                self.work["training"].append((self._step_s, at))
                _add(self.trainer_phases, event.phases)
            case e.SwitchRequested():
                self._requested[event.cell] = at
            case e.CellSwitched() if not self.begin_s:
                self.begin_s = at
            case e.CellSwitched() if event.cell in self._requested:
                self.switches.append((self._requested.pop(event.cell), at))
                _add(self.switch_phases, event.phases)
            case _:
                pass

    def _extend(self, execution: str, call: str, at: float) -> float:
        calls = self._calls.setdefault(execution, {})
        start, _ = calls.get(call, (at, at))
        calls[call] = (start, at)
        return start

    def wall(self) -> WallSeconds:
        """Raises ValueError before the run is finished."""
        if not self.begin_s or self.end_s < self.begin_s:
            raise ValueError("the run has no cell in rollout or no end")
        window = (self.begin_s, self.end_s)
        rest, phases = [window], {}
        for name in PHASES:
            busy = union(self.work[name])
            phases[name] = window_length(busy, rest)
            rest = [part for free in rest for part in subtract(free, busy)]
        phases["gyre"] = sum(end - start for start, end in rest)
        switching = window_length(union(self.switches), rest)
        return WallSeconds(total=self.end_s - self.begin_s, phases=phases, switching=switching)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint, in order, covering the same."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        elif end > start:
            joined.append((start, end))
    return joined


def subtract(whole: Interval, parts: Iterable[Interval]) -> list[Interval]:
    """What of `whole` lies in no part."""
    rest, at = [], whole[0]
    for start, end in union(parts):
        if start > at:
            rest.append((at, min(start, whole[1])))
        at = max(at, end)
    return [(a, b) for a, b in [*rest, (at, whole[1])] if b > a]


def window_length(intervals: Iterable[Interval], windows: Iterable[Interval]) -> float:
    """Seconds of disjoint `intervals` that lie in disjoint `windows`."""
    spans = list(intervals)
    return sum(max(0.0, min(b, d) - max(a, c)) for c, d in windows for a, b in spans)


def _add(seconds: dict[str, float], phases: tuple[e.Phase, ...]) -> None:
    for phase in phases:
        seconds[phase.name] = seconds.get(phase.name, 0.0) + phase.seconds
