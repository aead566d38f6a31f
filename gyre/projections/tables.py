"""Pure. Events -> changes of rows, and rows kept in memory with their digests.

`Tables` is a fold: each event yields changes, and a change names a key and the columns that it sets. Applying the
changes in stream order gives the tables, whether at once, in parts, or from any checkpoint on; a column that is set
is never unset. The fold knows nothing of what was stored, so a projector that starts again folds from sequence 1
and applies only what comes after its checkpoint.

`Tables` changes itself in place, as the folds of its parts do; what others read are `take` and `experience`.
"""

import hashlib
from collections.abc import Iterable

import msgspec
import numpy as np
import orjson

from gyre.config import Config, decode_config
from gyre.errors import FoldError
from gyre.events import types as e
from gyre.events.codec import Recorded, UnknownEvent
from gyre.events.tokens import num_tokens, unpack_logprobs
from gyre.projections import batches, tree
from gyre.projections.batches import Experience
from gyre.projections.cohorts import Group, consumed_cohort
from gyre.projections.schemas import BY_NAME, TABLES, Key, Row, canonical

Changes = dict[str, dict[Key, Row]]
"""Table -> key -> columns that are set."""


def event_columns(recorded: Recorded) -> Row:
    """What the table `events` says of one event, beside its sequence."""
    event, envelope = recorded.event, recorded.envelope
    place = recorded.subject.split(".", 2)[-1]
    aggregate, _, name = place.partition(".")
    payload = None
    if isinstance(event, UnknownEvent):
        payload = event.payload.decode()
    elif not e.event_type(event).startswith("call."):
        payload = orjson.dumps(msgspec.to_builtins(event), option=orjson.OPT_SORT_KEYS).decode()
    return {
        "type": event.name if isinstance(event, UnknownEvent) else e.event_type(event),
        "aggregate": aggregate,
        "id": name,
        "writer": envelope.writer,
        "incarnation": envelope.incarnation,
        "writer_seq": envelope.writer_seq,
        "cause": envelope.cause,
        "time_ns": envelope.time_ns,
        "digest": recorded.digest,
        "payload": payload,
    }


class Tables:
    def __init__(self) -> None:
        self.seq = 0
        self.experience = Experience()
        self.config = Config()
        self._changes: Changes = {}
        self._run = ""
        self._num_resumed = 0
        self._grade_failures: dict[str, int] = {}
        self._claims: dict[int, int] = {}
        """Of each micro-step of the step under way."""
        self._num_rejected = 0
        """Cohorts of the step under way."""
        self._rejected_seq = 0
        self._consumed: e.CohortConsumed | None = None
        self._requested: dict[str, tuple[int, int]] = {}
        """Sequence and time of each cell's open switch request."""
        self._rerouted: dict[str, e.SessionsRerouted] = {}
        self._num_switches: dict[str, int] = {}
        self._drained: set[str] = set()

    def take(self) -> Changes:
        """The changes since the last call."""
        changes, self._changes = self._changes, {}
        return changes

    def evolve(self, recorded: Recorded) -> None:
        """Fold one event. Total but for a bug: a column that no table has."""
        event, at = recorded.event, recorded.envelope.time_ns
        self.seq = recorded.seq
        self._changes.setdefault("events", {})[recorded.seq,] = {"seq": recorded.seq, **event_columns(recorded)}
        held = self._held(event)
        batches.evolve(self.experience, recorded)
        match event.aggregate if not isinstance(event, UnknownEvent) else "":
            case "run":
                self._run_event(event, at)
            case "group" | "execution" | "call":
                self._call_event(event, recorded.seq, at)
                self._execution_event(event, recorded.seq, at, held)
            case "cell" | "scheduler":
                self._cell_event(event, recorded)
            case "policy":
                self._policy_event(event, recorded.seq, at)
            case _:
                pass

    def _put(self, table: str, *key: object, **columns: object) -> None:
        schema = BY_NAME[table]
        if not columns.keys() <= schema.name_set:
            raise FoldError(f"table {table}: no column {', '.join(sorted(columns.keys() - schema.name_set))}")
        rows = self._changes.setdefault(table, {})
        row = rows.get(key)
        if row is None:
            row = rows[key] = dict(zip(schema.key, key, strict=True))
        for name, value in columns.items():
            if value is not None:
                row[name] = value

    def _held(self, event: e.Event) -> tuple[Group, tree.Tree | None] | None:
        """Group and tree of an execution that this event may settle, as they are before it."""
        if not isinstance(event, (e.ExecutionScored, e.ExecutionDropped)):
            return None
        found = self.experience.cohorts.find(event.execution)
        if found is None or found[1].settled:
            return None
        return found[0], self.experience.trees.get(found[1].session)

    # ------------------------------------------------------------ run

    def _run_event(self, event: e.Event, at: int) -> None:
        match event:
            case e.RunStarted():
                self._run = event.run
                self._configure(event.config, event.config_digest)
                self._put("runs", event.run, state="running", detail="", num_resumed=0, started_ns=at)
                self._put("runs", event.run, seed=event.seed, num_threads=event.num_threads)
            case e.ConfigChanged():
                self._configure(event.config, event.config_digest)
            case e.RunResumed():
                self._num_resumed += 1
                self._put("runs", self._run, state="running", detail="", num_resumed=self._num_resumed)
            case e.RunFinished():
                self._put("runs", self._run, state=event.reason, detail=event.detail, ended_ns=at)
            case e.GroupSkipped():
                self._put("skips", self.seq, **_columns(event))
            case _:
                pass

    def _configure(self, config: str, digest: str) -> None:
        self._put("runs", self._run, config=config, config_digest=digest)
        try:
            self.config = decode_config(config)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.config = Config()

    # ------------------------------------------------------------ groups and executions

    def _kept(self, event: e.SnapshotTaken | e.MilestoneScored | e.ExecutionRegraded, seq: int) -> None:
        if isinstance(event, e.SnapshotTaken):
            self._put("snapshots", seq, **_columns(event))
            return
        table = "milestones" if isinstance(event, e.MilestoneScored) else "regrades"
        passed = sum(part.passed for part in event.parts)
        self._put(table, seq, **_columns(event, "parts", "wall_s"), num_passed=passed, num_parts=len(event.parts))

    def _execution_event(self, event: e.Event, seq: int, at: int, held: tuple[Group, tree.Tree | None] | None) -> None:
        match event:
            case e.GroupDispatched():
                self._put("groups", event.group, **_columns(event, "group"), dispatched_seq=seq, dispatched_ns=at)
                self._put("groups", event.group, num_scored=0, num_dropped=0)
            case e.ExecutionStarted():
                columns = _columns(event, "execution", "group")
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
            case e.ExecutionScored() if held is not None:
                columns = {f: getattr(event, f) for f in ("score", "graded", "snapshot")}
                columns |= {"num_parts": len(event.parts), "num_passed": sum(part.passed for part in event.parts)}
                self._put("executions", event.execution, **columns, settled_ns=at)
                for number, finding in enumerate(event.findings):
                    self._put("findings", event.execution, number, rule=finding.rule, path=finding.path)
                for number, part in enumerate(event.parts):
                    self._put("scores", event.execution, number, name=part.name, passed=part.passed)
                self._settled(event.execution, seq, at, held)
            case e.ExecutionDropped() if held is not None:
                self._put("executions", event.execution, dropped=event.reason, dropped_final=event.final)
                self._put("executions", event.execution, settled_ns=at)
                self._settled(event.execution, seq, at, held)
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

    def _settled(self, execution: str, seq: int, at: int, held: tuple[Group, tree.Tree | None]) -> None:
        group, grown = held
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

    def _call_event(self, event: e.Event, seq: int, at: int) -> None:
        match event:
            case e.CallStarted():
                copied = ("execution", "session", "base", "shared", "role_class", "rule", "cell", "temperature")
                self._put("calls", event.call, **{f: getattr(event, f) for f in copied}, status="open", num_sampled=0)
                self._put("calls", event.call, num_context=num_tokens(event.context), max_tokens=event.max_tokens)
                told = {f: getattr(event, f) or None for f in ("placed_by", "classed_by", "header")}
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
                self._put("calls", event.call, status="completed", **{f: getattr(event, f) for f in ended})
            case e.CallFailed():
                self._put("calls", event.call, status="failed", finish=f"{event.status} {event.reason}", ended_ns=at)
            case e.CallDelivered():
                self._put("calls", event.call, delivered=event.delivered)
            case e.CallSuperseded():
                self._put("calls", event.call, superseded_by=event.by)

    # ------------------------------------------------------------ cells and scheduler

    def _cell_event(self, event: e.Event, recorded: Recorded) -> None:
        seq, at = recorded.seq, recorded.envelope.time_ns
        match event:
            case e.CellJoined():
                drained = event.cell in self._drained
                self._put("cells", event.cell, **_columns(event, "cell"), joined_ns=at, lost="", drained=drained)
            case e.DrainRequested() | e.DrainLifted():
                is_asked = isinstance(event, e.DrainRequested)
                (self._drained.add if is_asked else self._drained.discard)(event.cell)
                self._put("cells", event.cell, drained=is_asked)
            case e.CellLeased():
                self._put("cells", event.cell, epoch=event.epoch)
            case e.SwitchRequested():
                self._requested[event.cell] = (seq, at)
                self._rerouted.pop(event.cell, None)
            case e.SessionsRerouted():
                self._rerouted[event.cell] = event
            case e.WeightsPulled():
                self._phases(seq, event.phases)
                self._put("cells", event.cell, version=event.version)
            case e.CellSwitched():
                num = self._num_switches[event.cell] = self._num_switches.get(event.cell, 0) + 1
                columns = {f: getattr(event, f) for f in ("role", "epoch", "version")}
                self._put("cells", event.cell, **columns, num_switches=num)
                self._put("switches", seq, role=event.role, version=event.version, outcome="switched", reason="")
                self._put("switches", seq, phase_s=sum((p.seconds for p in event.phases), 0.0))
                self._phases(seq, event.phases)
                self._switch_ended(event.cell, event.epoch, seq, at)
            case e.SwitchRolledBack():
                self._put("switches", seq, role=event.role, outcome="rolled_back", reason=event.reason)
                self._switch_ended(event.cell, event.epoch, seq, at)
            case e.KvMigrated() | e.KvMissed():
                self._put("kv_moves", seq, **_columns(event))
            case e.CellLost():
                self._put("cells", event.cell, lost=event.reason)
            case e.Decided():
                self._put("decisions", seq, cause=recorded.envelope.cause, **_columns(event))

    def _switch_ended(self, cell: str, epoch: int, seq: int, at: int) -> None:
        self._put("switches", seq, cell=cell, epoch=epoch, ended_ns=at)
        requested = self._requested.pop(cell, None)
        if requested is not None:
            self._put("switches", seq, requested_seq=requested[0], wall_s=(at - requested[1]) / 1e9)
        rerouted = self._rerouted.pop(cell, None)
        if rerouted is not None:
            self._put("switches", seq, num_sessions=rerouted.num_sessions, num_calls_moved=rerouted.num_calls_moved)

    def _phases(self, seq: int, phases: Iterable[e.Phase]) -> None:
        for number, phase in enumerate(phases):
            self._put("phases", seq, number, name=phase.name, seconds=phase.seconds)

    # ------------------------------------------------------------ policy

    def _policy_event(self, event: e.Event, seq: int, at: int) -> None:
        match event:
            case e.CohortConsumed():
                self._consumed, digest = event, event.digest
                self._put("steps", event.step, num_groups=len(event.groups), cohort_digest=digest, consumed_ns=at)
                self._put("steps", event.step, num_rejected=self._num_rejected)
                for group in event.groups:
                    self._put("groups", group, step=event.step, rejected=False)
            case e.BatchAssembled():
                copied = ("seed", "num_executions", "num_trajectories", "num_tokens", "num_targets", "num_microsteps")
                self._put("steps", event.step, **{f: getattr(event, f) for f in copied})
                self._put("steps", event.step, batch_digest=event.digest, assembled_ns=at)
                self._chosen(event.step)
            case e.MicrostepClaimed():
                key = (event.step, self._num_rejected, event.microstep)
                claims = self._claims[event.microstep] = self._claims.get(event.microstep, 0) + 1
                self._put("microsteps", *key, cell=event.cell, epoch=event.epoch)
                self._put("microsteps", *key, num_claims=claims, claimed_ns=at)
            case e.MicrostepAccepted():
                key = (event.step, self._num_rejected, event.microstep)
                self._put("microsteps", *key, loss_sum=event.loss_sum, accepted_ns=at)
            case e.StepCompleted():
                columns = _columns(event, "step", "phases", "num_tokens", "num_targets")
                self._put("steps", event.step, **columns, completed_seq=seq, completed_ns=at)
                self._put("steps", event.step, phase_s=sum((p.seconds for p in event.phases), 0.0))
                self._phases(seq, event.phases)
                self._claims.clear()
                self._num_rejected = 0
            case e.StepRejected():
                self._put("rejections", seq, **_columns(event), attempt=self._num_rejected, rejected_ns=at)
                if self._consumed is not None and self._consumed.step == event.step:
                    digest = self._consumed.digest
                    self._put("rejections", seq, num_groups=len(self._consumed.groups), cohort_digest=digest)
                    for group in self._consumed.groups:
                        self._put("groups", group, rejected=True)
                self._rejected_seq = seq
                self._num_rejected += 1
                self._claims.clear()
            case e.PolicyRolledBack() if self._rejected_seq:
                self._put("rejections", self._rejected_seq, to_version=event.to_version, rolled_back_ns=at)
            case e.DemonstrationsLearned():
                self._put("demonstrations", seq, **_columns(event))
            case e.PolicyPublished():
                self._put("versions", event.version, **_columns(event, "version"), published_seq=seq, published_ns=at)
            case _:
                pass

    def _chosen(self, step: int) -> None:
        """What became of every execution and token of the step's cohort."""
        cohort = consumed_cohort(self.experience.cohorts, step)
        if cohort is None:
            return
        for chosen in batches.choose(self.experience, cohort, self.config, step):
            member = chosen.member
            copied = ("in_baseline", "in_loss", "advantage", "staleness", "num_trajectories", "num_targets")
            self._put("executions", member.execution, **{f: getattr(member, f) for f in copied})
            self._put("executions", member.execution, step=step, out_reason=member.reason)
            for left in chosen.left_out():
                self._put("left_out", left.execution, left.reason, num_tokens=left.num_tokens)


def _columns(event: e.Event, *left: str) -> dict[str, object]:
    """The event's fields, as they are, but for those that are left out."""
    return {f: getattr(event, f) for f in event.__struct_fields__ if f not in left}


def _mean(logprobs: bytes) -> float | None:
    """None for no tokens, and for what is not finite or torn."""
    if not logprobs or len(logprobs) % 4:
        return None
    mean = float(np.mean(unpack_logprobs(logprobs), dtype=np.float64))
    return mean if np.isfinite(mean) else None


class MemoryTables:
    """The tables in memory: what the store keeps on disk, for a replay to compare with."""

    def __init__(self) -> None:
        self._rows: Changes = {}

    def apply(self, changes: Changes) -> None:
        for table, rows in changes.items():
            kept = self._rows.setdefault(table, {})
            for key, row in rows.items():
                kept.setdefault(key, {}).update(row)

    def digests(self) -> tuple[e.TableDigest, ...]:
        """Of every table: rows in the order of their keys."""
        out = []
        for table in TABLES:
            rows = self._rows.get(table.name, {})
            hasher = hashlib.sha256()
            for key in sorted(rows):
                hasher.update(canonical(rows[key].get(name) for name in table.names))
            out.append(e.TableDigest(table=table.name, num_rows=len(rows), digest=hasher.hexdigest()[:32]))
        return tuple(out)
