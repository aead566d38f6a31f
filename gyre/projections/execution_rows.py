"""Pure. Events of groups, executions and calls -> changes of their rows.

Invariant: an execution is settled once; a score or a drop that comes later, or of an attempt that another replaced,
sets nothing. Direction: event, and what `Experience` held before it -> `put`.
"""

import msgspec
import numpy as np

from gyre.events import types as e
from gyre.events.codec import Recorded
from gyre.events.tokens import num_tokens, unpack_logprobs
from gyre.projections import tree
from gyre.projections.changes import Put, columns_of
from gyre.projections.cohorts import Group
from gyre.projections.experience import Experience

Held = tuple[Group, tree.Tree | None]
"""Group and tree of an execution that is not settled."""


def held(experience: Experience, event: e.Event) -> Held | None:
    """Of the execution that this event may settle, as they are before it."""
    if not isinstance(event, (e.ExecutionScored, e.ExecutionDropped)):
        return None
    found = experience.cohorts.find(event.execution)
    if found is None or found[1].settled:
        return None
    return found[0], experience.trees.get(found[1].session)


class ExecutionRows:
    """The fold."""

    def __init__(self, put: Put) -> None:
        self._put = put
        self._grade_failures: dict[str, int] = {}
        """Of each execution that is not settled."""

    def evolve(self, recorded: Recorded, before: Held | None) -> None:
        """`before`: what `held` found."""
        event, seq, at = recorded.event, recorded.seq, recorded.envelope.time_ns
        match event:
            case e.CallStarted():
                copied = ("execution", "session", "base", "shared", "role_class", "rule", "cell", "temperature")
                self._put("calls", event.call, **{f: getattr(event, f) for f in copied}, status="open", num_sampled=0)
                self._put("calls", event.call, num_context=num_tokens(event.context), max_tokens=event.max_tokens)
                told = {f: getattr(event, f) or None for f in ("placed_by", "classed_by", "header", "tool_s")}
                self._put("calls", event.call, started_seq=seq, started_ns=at, **told)
            case e.CallCompleted() | e.CallCut():
                versions = [span.version for span in event.spans]
                self._put("calls", event.call, num_sampled=num_tokens(event.sampled), ended_ns=at)
                self._put("calls", event.call, logprob_mean=_mean(event.logprobs))
                if versions:
                    self._put("calls", event.call, version_min=min(versions), version_max=max(versions))
                if isinstance(event, e.CallCut):
                    self._put("calls", event.call, status="cut", finish=event.reason)
                    return
                ended = ("finish", "num_prompt_tokens", "num_cached_tokens", "num_retries", "engine_s")
                columns = {f: getattr(event, f) for f in ended} | {"tools": " ".join(event.tools) or None}
                self._put("calls", event.call, status="completed", **columns)
            case e.CallFailed():
                self._put("calls", event.call, status="failed", finish=f"{event.status} {event.reason}", ended_ns=at)
            case e.CallDelivered():
                self._put("calls", event.call, delivered=event.delivered)
            case e.CallSuperseded():
                self._put("calls", event.call, superseded_by=event.by)
            case _:
                self._execution_event(event, seq, at, before)

    def _execution_event(self, event: e.Event, seq: int, at: int, before: Held | None) -> None:
        match event:
            case e.GroupDispatched():
                self._put("groups", event.group, **columns_of(event, "group"), dispatched_seq=seq, dispatched_ns=at)
                self._put("groups", event.group, num_scored=0, num_dropped=0)
            case e.ExecutionStarted():
                columns = columns_of(event, "execution", "group")
                self._put("executions", event.execution, group_id=event.group)
                self._put("executions", event.execution, **columns, started_ns=at, num_grade_failures=0)
            case e.SessionOpened():
                self._put("executions", event.execution, session=event.session)
            case e.ExecutionTimedOut():
                self._put("executions", event.execution, timed_out=event.kind)
            case e.BudgetSpent():
                self._put("executions", event.execution, spent=f"{event.budget} {event.tool}".rstrip())
            case e.ExecutionFinished():
                columns = {f: getattr(event, f) for f in ("exit_code", "wall_s", "detail", "held_s")}
                self._put("executions", event.execution, finished=event.reason, finished_ns=at, **columns)
            case e.EvaluationFailed():
                failures = self._grade_failures[event.execution] = self._grade_failures.get(event.execution, 0) + 1
                self._put("executions", event.execution, num_grade_failures=failures)
            case e.ExecutionScored() if before is not None:
                columns = {f: getattr(event, f) for f in ("score", "graded", "snapshot")}
                columns |= {"num_parts": len(event.parts), "num_passed": sum(part.passed for part in event.parts)}
                columns |= {"grading_s": event.wall_s}
                self._put("executions", event.execution, **columns, settled_ns=at)
                for number, finding in enumerate(event.findings):
                    self._put("findings", event.execution, number, rule=finding.rule, path=finding.path)
                for number, part in enumerate(event.parts):
                    self._put("scores", event.execution, number, name=part.name, passed=part.passed)
                self._settled(event.execution, seq, at, before)
            case e.ExecutionDropped() if before is not None:
                self._put("executions", event.execution, dropped=event.reason, dropped_final=event.final)
                self._put("executions", event.execution, settled_ns=at)
                self._settled(event.execution, seq, at, before)
            case e.SnapshotTaken() | e.MilestoneScored() | e.ExecutionRegraded():
                self._kept(event, seq)
            case e.BranchForked():
                self._put("forks", seq, execution=event.execution, call=event.call, kind=event.kind)
                self._put("forks", seq, base=event.base, shared=event.shared)
            case e.ContextCompacted():
                where = {"execution": event.execution, "call": event.call, "base": event.summary_call}
                self._put("forks", seq, kind="summary", **where)
                if event.summary_class:
                    self._put("calls", event.summary_call, role_class=event.summary_class)
            case e.SubAgentSpawned():
                where = {"execution": event.execution, "call": event.call, "base": event.parent_call}
                self._put("forks", seq, kind="spawn", **where)

    def _kept(self, event: e.SnapshotTaken | e.MilestoneScored | e.ExecutionRegraded, seq: int) -> None:
        if isinstance(event, e.SnapshotTaken):
            self._put("snapshots", seq, **columns_of(event))
            return
        table = "milestones" if isinstance(event, e.MilestoneScored) else "regrades"
        passed = sum(part.passed for part in event.parts)
        self._put(table, seq, **columns_of(event, "parts", "wall_s"), num_passed=passed, num_parts=len(event.parts))

    def _settled(self, execution: str, seq: int, at: int, before: Held) -> None:
        group, grown = before
        self._grade_failures.pop(execution, None)
        if grown is not None:
            self._put("trees", execution, session=grown.session, **msgspec.to_builtins(tree.stats(grown)))
        settled = [slot for slot in group.slots if slot.settled]
        scores = [slot.score for slot in settled if slot.score is not None]
        self._put("groups", group.group, num_scored=len(scores), num_dropped=len(settled) - len(scores))
        if scores:
            self._put("groups", group.group, score_mean=sum(scores) / len(scores))
            self._put("groups", group.group, score_min=min(scores), score_max=max(scores))
        if len(settled) == len(group.slots):
            self._put("groups", group.group, complete_seq=seq, complete_ns=at)


def _mean(logprobs: bytes) -> float | None:
    """None for no tokens, and for what is not finite or torn."""
    if not logprobs or len(logprobs) % 4:
        return None
    mean = float(np.mean(unpack_logprobs(logprobs), dtype=np.float64))
    return mean if np.isfinite(mean) else None
