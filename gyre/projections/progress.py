"""Pure. Where a run stands: the figures of the live view, of `summary.json` and of `gyre runs`.

A fold of the log in O(1) an event; `summary` turns it into plain values. The same log gives the same
summary, so a finished run's figures can be checked against its log.
"""

from collections import Counter
from typing import Any

import msgspec

from gyre.events import types as e
from gyre.events.codec import Recorded
from gyre.events.order import WriterOrder
from gyre.events.tokens import num_tokens
from gyre.projections.evaluations import Evaluation


class Mean:
    """A running mean; None while empty."""

    def __init__(self) -> None:
        self.num, self.total = 0, 0.0

    def add(self, value: float) -> None:
        self.num, self.total = self.num + 1, self.total + value

    @property
    def value(self) -> float | None:
        return self.total / self.num if self.num else None


class Progress:
    """Changed in place by `evolve`, deterministically."""

    def __init__(self) -> None:
        self.run = ""
        self.config = ""
        self.policy_of = ("", 0)
        """Run and step of the checkpoint that it began with."""
        self.num_events = 0
        self.first_ns = 0
        self.last_ns = 0
        self.counts: Counter[str] = Counter()
        self.num_sampled = 0
        self.num_context = 0
        self.dropped: Counter[str] = Counter()
        self.trees: set[str] = set()
        self.version = -1
        self.role = "starting"
        self.last_step: e.StepCompleted | None = None
        self.scores: dict[int, Mean] = {}
        """Of training executions, by the version that they were dispatched at."""
        self.evals: dict[tuple[int, float], Evaluation] = {}
        """By (version, temperature)."""
        self.num_failed_in_a_row = 0
        """Executions whose harness failed, since the last one whose harness did not."""
        self.last_failure: e.ExecutionFinished | None = None
        self.finished: e.RunFinished | None = None
        self.is_sealed = False
        """The tables were recorded after the run finished: nothing is left to do."""
        self.versions: dict[str, str] = {}
        """Of what the run was started or resumed with last."""
        self.order = WriterOrder()
        self._groups: dict[str, e.GroupDispatched] = {}
        self._group_of: dict[str, str] = {}

    def evolve(self, recorded: Recorded) -> None:
        event, at = recorded.event, recorded.envelope.time_ns
        self.num_events = recorded.seq
        self.order.place(recorded.envelope, recorded.seq)
        self.first_ns = self.first_ns or at
        self.last_ns = max(self.last_ns, at)
        self.counts[type(event).__name__] += 1
        match event:
            case e.RunStarted():
                self.run, self.config = event.run, event.config
                self.policy_of = event.policy_run, event.policy_step
                self.versions = {v.name: v.version for v in event.versions}
            case e.ConfigChanged():
                self.config = event.config
            case e.RunResumed():
                self.finished = None
                self.versions = {v.name: v.version for v in event.versions}
            case e.RunFinished():
                self.finished, self.is_sealed = event, False
            case e.TablesRecorded():
                self.is_sealed = self.finished is not None
            case e.GroupDispatched():
                self._groups[event.group] = event
                self.counts["slots"] += event.num_slots
                if event.purpose == "eval":
                    self.evals.setdefault((event.policy_version, event.temperature), Evaluation()).dispatch(event)
            case e.ExecutionStarted():
                self._group_of[event.execution] = event.group
            case e.CallStarted():
                self.trees.add(event.session)
                self.num_context += num_tokens(event.context)
            case e.CallCompleted() | e.CallCut():
                self.num_sampled += num_tokens(event.sampled)
            case e.ExecutionFinished():
                self.counts[f"finished:{event.reason}"] += 1
                if event.reason == "harness_failed":
                    self.num_failed_in_a_row, self.last_failure = self.num_failed_in_a_row + 1, event
                else:
                    self.num_failed_in_a_row = 0
            case e.ExecutionScored():
                self._score(event)
            case e.ExecutionDropped():
                self.dropped[event.reason] += 1
                self.counts["final drops"] += event.final
            case e.CellSwitched():
                self.role = event.role
            case e.StepCompleted():
                self.last_step = event
            case e.PolicyPublished():
                self.version = event.version
            case _:
                pass

    def _score(self, event: e.ExecutionScored) -> None:
        group = self._groups.get(self._group_of.get(event.execution, ""))
        if group is None:
            return
        if group.purpose == "eval":
            self.evals[group.policy_version, group.temperature].score(group.task, event)
        else:
            self.scores.setdefault(group.policy_version, Mean()).add(event.score)

    @property
    def evals_mean(self) -> float | None:
        """Of the scores of the newest evaluation so far; None without one."""
        return self.evals[max(self.evals)].mean if self.evals else None

    @property
    def num_done(self) -> int:
        """Slots that ended: scored, or dropped for good."""
        return self.counts["ExecutionScored"] + self.counts["final drops"]

    @property
    def num_moves(self) -> int:
        """Grows whenever the run gets somewhere: an execution has ended, a step is done, weights are published."""
        return self.num_done + self.counts["StepCompleted"] + self.counts["PolicyPublished"]

    def summary(self) -> dict[str, Any]:
        """JSON-ready figures. Scores are means of fractions of graded tests; None where there is none."""
        counts = self.counts
        return {
            "run": self.run,
            "policy_of": dict(zip(("run", "step"), self.policy_of, strict=True)) if self.policy_of[0] else None,
            "state": self.finished.reason if self.finished else "running",
            "detail": self.finished.detail if self.finished else "",
            "events": self.num_events,
            "gaps": [str(gap) for gap in self.order.gaps()],
            "wall_s": round((self.last_ns - self.first_ns) / 1e9, 3),
            "groups": counts["GroupDispatched"],
            "executions": {
                "started": counts["ExecutionStarted"],
                "scored": counts["ExecutionScored"],
                "timed_out": counts["finished:timed_out"],
                "harness_failed": counts["finished:harness_failed"],
                "dropped": dict(sorted(self.dropped.items())),
            },
            "calls": {
                "started": counts["CallStarted"],
                "completed": counts["CallCompleted"],
                "cut": counts["CallCut"],
                "failed": counts["CallFailed"],
            },
            "tokens": {"context": self.num_context, "sampled": self.num_sampled},
            "trees": len(self.trees),
            "switches": counts["CellSwitched"],
            "switches_rolled_back": counts["SwitchRolledBack"],
            "steps": counts["StepCompleted"],
            "rejected_steps": counts["StepRejected"],
            "version": self.version,
            "scores": [
                {"version": version, "executions": mean.num, "score": _round(mean.value)}
                for version, mean in sorted(self.scores.items())
            ],
            "evaluations": [
                {"version": version, "temperature": temperature, **evaluation.figures()}
                for (version, temperature), evaluation in sorted(self.evals.items())
            ],
            "last_step": msgspec.to_builtins(self.last_step) if self.last_step else None,
        }


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
