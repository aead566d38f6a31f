"""Pure. Every event type of gyre: the facts that a run consists of.

Invariant: a released type never changes; a new field or meaning is a new version beside the old one
(`call.completed.v2`), and the old class an `upcast` to it. Token arrays are `bytes` fields (little-endian int32 ids,
float32 logprobs: see `tokens.py`), which the codec keeps out of the JSON.

An event's aggregate says which subject it lives on: `gyre.<run>.<aggregate>.<id>`. For groups, executions and cells
the id is the field of that name, for calls it is their execution; run, scheduler and policy have one each.
"""

from typing import ClassVar, Literal

import msgspec

Aggregate = Literal["run", "group", "execution", "call", "cell", "scheduler", "policy"]
Role = Literal["rollout", "train"]
RoleClass = Literal["main", "main-summary", "sub-agent", "sub-agent-summary", "auxiliary"]
Purpose = Literal["train", "eval"]
Guard = Literal["non_finite", "logprob_gap_mean", "logprob_gap_max", "kl", "entropy"]

MAIN = "main"
"""The id on the subjects of aggregates of which a run has one."""
ID_FIELDS = {"group": "group", "execution": "execution", "call": "execution", "cell": "cell"}
"""By aggregate, of those of which it has many."""


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """Part of an event."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all event types; `type` is the struct's tag."""

    aggregate: ClassVar[Aggregate]

    def upcast(self) -> "Event":
        """This event in the newest version of its type, which is what folds see; an old version overrides it."""
        return self


def event_type(event: "Event | type[Event]") -> str:
    """The versioned name, as in `call.completed.v1`."""
    name: str = event.__struct_config__.tag  # type: ignore[assignment]
    return name


def aggregate_id(event: Event) -> str:
    """The last part of the event's subject."""
    field = ID_FIELDS.get(event.aggregate)
    return str(getattr(event, field)) if field else MAIN


# ---------------------------------------------------------------- run


class Versioned(Value, frozen=True, kw_only=True):
    name: str
    version: str


class RunStarted(Event, frozen=True, kw_only=True, omit_defaults=True, tag="run.started.v1"):
    """First event of a log. A resumed run does not start again."""

    aggregate: ClassVar[Aggregate] = "run"
    run: str
    config: str
    """Canonical JSON of the whole config: a replay needs nothing beside the log."""
    config_digest: str
    seed: int
    """Fixes tasks, policy and selection."""
    versions: tuple[Versioned, ...]
    """Of gyre and of what computes."""
    num_threads: int
    """Of the trainer: the last bits depend on it."""
    policy_run: str = ""
    """Of an evaluation: the run whose checkpoint the policy is. Empty for one that was no checkpoint."""
    policy_step: int = 0
    """Its step there, which is version 0 here."""


class ConfigChanged(Event, frozen=True, kw_only=True, tag="run.configuration_changed.v1"):
    """The run goes on under a config that differs from the one before."""

    aggregate: ClassVar[Aggregate] = "run"
    config: str
    """As in `run.started`."""
    config_digest: str
    changed: tuple[str, ...]
    """Paths of the keys that differ, as in `trainer.learning_rate`."""


class ProcessExited(Event, frozen=True, kw_only=True, tag="run.process_exited.v1"):
    """A supervised process ended although nobody had asked it to."""

    aggregate: ClassVar[Aggregate] = "run"
    process: str
    code: int
    """Exit code; negative: the signal that ended it."""
    restarted: bool
    """Whether it is started again."""


class AdmissionStopped(Event, frozen=True, kw_only=True, tag="run.admission_stopped.v1"):
    """No new group is dispatched (a full disk, say); what runs goes on."""

    aggregate: ClassVar[Aggregate] = "run"
    reason: str


class AdmissionResumed(Event, frozen=True, kw_only=True, tag="run.admission_resumed.v1"):
    """Groups are dispatched again."""

    aggregate: ClassVar[Aggregate] = "run"


class RunResumed(Event, frozen=True, kw_only=True, tag="run.resumed.v1"):
    """The run goes on after it was interrupted or killed: an earlier `run.finished` no longer holds."""

    aggregate: ClassVar[Aggregate] = "run"
    versions: tuple[Versioned, ...]


class RunFinished(Event, frozen=True, kw_only=True, tag="run.finished.v1"):
    """The work ended: all steps done, interrupted, paused by a guard (both may be resumed), or failed."""

    aggregate: ClassVar[Aggregate] = "run"
    reason: Literal["completed", "interrupted", "paused", "failed"]
    detail: str = ""
    """Why, in words."""


class TableDigest(Value, frozen=True, kw_only=True):
    table: str
    num_rows: int
    digest: str


class Head(Value, frozen=True, kw_only=True):
    """Last event of a writer: what seals it, since no later `prev` does."""

    writer: str
    incarnation: int
    writer_seq: int
    digest: str


class TablesRecorded(Event, frozen=True, kw_only=True, tag="run.tables_recorded.v1"):
    """The projector's digests of all tables as of `through_seq`, and the seal over all writers."""

    aggregate: ClassVar[Aggregate] = "run"
    through_seq: int
    """The last sequence that is in the tables."""
    tables: tuple[TableDigest, ...]
    heads: tuple[Head, ...]


# ---------------------------------------------------------------- group


class GroupDispatched(Event, frozen=True, kw_only=True, tag="group.dispatched.v1"):
    """`num_slots` executions of one task are wanted; each slot is one unit of w(t)."""

    aggregate: ClassVar[Aggregate] = "group"
    group: str
    index: int
    """0, 1, 2, ... in dispatch order, per purpose."""
    purpose: Purpose
    task: str
    task_digest: str
    task_index: int
    """Place in the task set."""
    num_slots: int
    policy_version: int
    """Published when it was dispatched: what staleness is counted from."""
    temperature: float
    """At which its executions sample; the gateway applies it whatever the harness asks for."""


class GroupSkipped(Event, frozen=True, kw_only=True, tag="group.skipped.v1"):
    """The walk through the tasks passed over one, for its last group said nothing to learn from. No group is made."""

    aggregate: ClassVar[Aggregate] = "run"
    task: str
    task_index: int
    reason: Literal["all_passed", "all_failed"]
    because: str
    """The group whose scores say so."""


# ---------------------------------------------------------------- execution


class ExecutionStarted(Event, frozen=True, kw_only=True, tag="execution.started.v1"):
    """`attempt` counts refills of the slot after infrastructure failures."""

    aggregate: ClassVar[Aggregate] = "execution"
    execution: str
    group: str
    slot: int
    """Place in the group."""
    attempt: int
    harness: str
    """Its name."""
    sandbox: str
    """Its kind."""
    deadline_s: float
    """After which the harness is stopped, and scored all the same."""


class SessionOpened(Event, frozen=True, kw_only=True, tag="execution.session_opened.v1"):
    """From here on the gateway accepts `/s/<session>`."""

    aggregate: ClassVar[Aggregate] = "execution"
    execution: str
    session: str
    """The credential in the harness's address; of several, the last one's tree counts."""
    temperature: float
    top_p: float


class Mark(Value, frozen=True, kw_only=True):
    """End of one message in the token history: the places where a later call may branch."""

    digest: str
    """Of all canonical messages (and the tool set) up to here."""
    end: int
    """Tokens of the call's full sequence up to here."""


class CallStarted(Event, frozen=True, kw_only=True, omit_defaults=True, tag="call.started.v1"):
    """One model request: `full(c) = full(base)[:shared] + context + sampled`."""

    aggregate: ClassVar[Aggregate] = "call"
    execution: str
    session: str
    call: str
    base: str
    """An earlier started call of the session; empty for a root."""
    shared: int
    """Tokens of the base that the prompt begins with."""
    context: bytes
    """int32 ids that are new in this prompt."""
    role_class: RoleClass
    rule: str
    """Which lineage rule placed it: `root`, `continue`, `fork`."""
    marks: tuple[Mark, ...]
    """Of the messages that are new in this prompt."""
    temperature: float
    """Asked of the engine."""
    top_p: float
    """Asked of the engine."""
    max_tokens: int
    """Bound on the reply."""
    cell: str
    """That it was first sent to; it may go on elsewhere when that one leaves rollout."""
    placed_by: str = ""
    """What `rule` found: `tool-call-id`, `reply`, `request` (the same again), `prefix`, `nothing`."""
    classed_by: str = ""
    """What `role_class` follows from: `helper-model`, `schema`, `history`, `same-request`, `quote`, `summary`,
    `spawn`, `header`, `nothing`."""
    header: str = ""
    """Name of the header by which the harness labelled it, whether or not it was needed."""
    tool_s: float = 0.0
    """Since the reply that it goes on from, when that asked for tools: what they took. 0: it is not known."""


class VersionSpan(Value, frozen=True, kw_only=True):
    """Sampled tokens `[start, end)` came from this policy version."""

    version: int
    start: int
    end: int


class CallCompleted(Event, frozen=True, kw_only=True, omit_defaults=True, tag="call.completed.v1"):
    """Acknowledged by the log before the harness sees the end of the reply."""

    aggregate: ClassVar[Aggregate] = "call"
    execution: str
    session: str
    call: str
    sampled: bytes
    """int32 ids, exactly as the engine sampled them, the stop token included."""
    logprobs: bytes
    """float32, one a sampled token."""
    spans: tuple[VersionSpan, ...]
    """In order, without holes: together all of `sampled`."""
    finish: Literal["stop", "length", "tool_calls"]
    reply: str
    """Digest of the canonical reply message: what an echo of it is matched by."""
    num_prompt_tokens: int
    """As the engine counted."""
    num_cached_tokens: int
    """Of those, found in its KV cache."""
    num_retries: int
    """Times that an engine was asked again, unseen by the harness."""
    engine_s: float
    """Spent in the engine."""
    tools: tuple[str, ...] = ()
    """Names of the tools that the reply asks for, one a tool call."""


class CallCut(Event, frozen=True, kw_only=True, tag="call.cut.v1"):
    """The call ended early; what was sampled until then is kept."""

    aggregate: ClassVar[Aggregate] = "call"
    execution: str
    session: str
    call: str
    sampled: bytes
    """As in `call.completed`; may be empty."""
    logprobs: bytes
    """float32, one a sampled token."""
    spans: tuple[VersionSpan, ...]
    reason: str
    """Why, in words."""


class CallFailed(Event, frozen=True, kw_only=True, tag="call.failed.v1"):
    """The harness got an error of the provider's shape."""

    aggregate: ClassVar[Aggregate] = "call"
    execution: str
    session: str
    call: str
    status: int
    """HTTP status that the harness got."""
    reason: str


class CallDelivered(Event, frozen=True, kw_only=True, tag="call.delivered.v1"):
    """Whether the reply's last byte went out; a client may have gone away."""

    aggregate: ClassVar[Aggregate] = "call"
    execution: str
    session: str
    call: str
    delivered: bool


class CallSuperseded(Event, frozen=True, kw_only=True, tag="call.superseded.v1"):
    """The same request came again after this call's reply, when nothing had gone on from that: whatever the gateway
    handed over, the harness did not take it."""

    aggregate: ClassVar[Aggregate] = "call"
    execution: str
    session: str
    call: str
    by: str
    """The call that the request made when it came again."""


class BranchForked(Event, frozen=True, kw_only=True, tag="execution.branch_forked.v1"):
    """A call goes on from the middle of a history instead of its end."""

    aggregate: ClassVar[Aggregate] = "call"
    execution: str
    session: str
    call: str
    """The call that branches."""
    base: str
    """The call that it branches from."""
    shared: int
    """Tokens of the base that it keeps."""
    kind: Literal["compaction", "sub-agent", "retry", "edit", "drift"]


class BudgetSpent(Event, frozen=True, kw_only=True, omit_defaults=True, tag="execution.budget_spent.v1"):
    """From here on its calls are refused. How it ends is its harness's affair; what it leaves is scored."""

    aggregate: ClassVar[Aggregate] = "call"
    execution: str
    session: str
    budget: Literal["tool_calls", "tool_seconds", "calls", "output_tokens"]
    limit: int
    """From the config, in the budget's unit."""
    reason: str
    tool: str = ""
    """Whose budget it is, of `tool_calls` and `tool_seconds`."""


class TokensDrifted(Event, frozen=True, kw_only=True, tag="execution.tokens_drifted.v1"):
    """A reply came back as something else: both forms. What was sampled stays on its branch; what came is context."""

    aggregate: ClassVar[Aggregate] = "call"
    execution: str
    session: str
    call: str
    """Whose prompt holds what came."""
    source: str
    """The call whose reply it was."""
    sampled: bytes
    """int32 ids of the reply."""
    shown: bytes
    """int32 ids that stand for it in the prompt, without the opening of the turn."""


class ContextCompacted(Event, frozen=True, kw_only=True, omit_defaults=True, tag="execution.context_compacted.v1"):
    """A history begins that has a summary in place of an earlier one."""

    aggregate: ClassVar[Aggregate] = "call"
    execution: str
    session: str
    call: str
    """The first of the new history."""
    summary_call: str
    """Whose reply is the summary."""
    summary_class: Literal["", "main-summary", "sub-agent-summary"] = ""
    """What the summary's call was for, where nothing said so when it started; else empty, and its start says it."""


class SubAgentSpawned(Event, frozen=True, kw_only=True, tag="execution.sub_agent_spawned.v1"):
    """A history begins that a tool call asked for."""

    aggregate: ClassVar[Aggregate] = "call"
    execution: str
    session: str
    call: str
    """The first of the sub-agent."""
    parent_call: str
    """Whose reply asked for it."""


class ExecutionTimedOut(Event, frozen=True, kw_only=True, tag="execution.timed_out.v1"):
    """`harness`: stopped and scored all the same. `overall`: discarded."""

    aggregate: ClassVar[Aggregate] = "execution"
    execution: str
    kind: Literal["harness", "overall"]
    after_s: float
    """Since it was started."""


class ExecutionFinished(Event, frozen=True, kw_only=True, omit_defaults=True, tag="execution.finished.v1"):
    """The harness process is gone, and all of its children."""

    aggregate: ClassVar[Aggregate] = "execution"
    execution: str
    reason: Literal["completed", "timed_out", "harness_failed", "interrupted"]
    exit_code: int
    """Of the harness."""
    wall_s: float
    """From start to the end of the harness."""
    detail: str
    """Tail of the output where the harness failed."""
    held_s: float = 0.0
    """Of `wall_s`: no engine could answer, so its clock stood still."""


class Part(Value, frozen=True, kw_only=True):
    name: str
    passed: bool


class Finding(Value, frozen=True, kw_only=True):
    """A sign that a workspace was made to please its grader: `agents/tampering.py` lists the rules."""

    rule: str
    path: str


class SnapshotTaken(Event, frozen=True, kw_only=True, tag="execution.snapshot_taken.v1"):
    """The workspace as it was, kept outside the log: it can be graded again."""

    aggregate: ClassVar[Aggregate] = "execution"
    execution: str
    snapshot: str
    """Digest of its manifest."""
    kind: Literal["milestone", "end"]
    after_s: float
    """Since the harness was started."""
    num_files: int
    num_bytes: int
    new_bytes: int
    """What the store did not have yet."""


class MilestoneScored(Event, frozen=True, kw_only=True, tag="execution.milestone_scored.v1"):
    """What the execution had reached by then; it is not its score."""

    aggregate: ClassVar[Aggregate] = "execution"
    execution: str
    snapshot: str
    after_s: float
    """Since the harness was started."""
    score: float
    parts: tuple[Part, ...]
    wall_s: float
    """That grading took."""


class ExecutionRegraded(Event, frozen=True, kw_only=True, tag="execution.regraded.v1"):
    """A snapshot graded again. It changes neither the score of the execution nor any batch."""

    aggregate: ClassVar[Aggregate] = "execution"
    execution: str
    snapshot: str
    grader: str
    score: float | None
    """None: there is no score, and `reason` says why."""
    parts: tuple[Part, ...]
    reason: str


class ExecutionScored(Event, frozen=True, kw_only=True, omit_defaults=True, tag="execution.scored.v1"):
    """Fraction of graded tests that pass on the workspace as it was left."""

    aggregate: ClassVar[Aggregate] = "execution"
    execution: str
    score: float
    """0 to 1."""
    parts: tuple[Part, ...]
    """One a graded test."""
    wall_s: float
    """That grading took."""
    snapshot: str = ""
    """What was graded."""
    findings: tuple[Finding, ...] = ()
    """Signs of tampering; what they cost is `grading.on_tampering` of the config, and is in `score` already."""
    graded: float | None = None
    """The grader's score, where a finding changed it."""


class EvaluationFailed(Event, frozen=True, kw_only=True, tag="execution.evaluation_failed.v1"):
    """No score, which is not a score of 0."""

    aggregate: ClassVar[Aggregate] = "execution"
    execution: str
    attempt: int
    """Of grading this execution."""
    reason: str


class ExecutionDropped(Event, frozen=True, kw_only=True, tag="execution.dropped.v1"):
    """It counts nowhere. Unless `final`, its slot is refilled by another attempt."""

    aggregate: ClassVar[Aggregate] = "execution"
    execution: str
    reason: str
    final: bool
    """Its slot is given up with it."""


# ---------------------------------------------------------------- cell


class Phase(Value, frozen=True, kw_only=True):
    name: str
    seconds: float


class CellJoined(Event, frozen=True, kw_only=True, omit_defaults=True, tag="cell.joined.v1"):
    """A cell is there; again after each of its starts."""

    aggregate: ClassVar[Aggregate] = "cell"
    cell: str
    index: int
    """Place in the fixed order; the core is 0."""
    capacity: int
    """C_e: executions that it serves at once in rollout."""
    engine_url: str
    model_digest: str
    """Of its policy: all cells of a run have the same."""
    standalone: bool = False
    """An engine without a trainer: it always serves."""


class CellLeased(Event, frozen=True, kw_only=True, tag="cell.leased.v1"):
    """The cell has the role from here on; `cell.switched` says when it serves or trains."""

    aggregate: ClassVar[Aggregate] = "cell"
    cell: str
    role: Role
    epoch: int
    """Fencing number: raised with every lease, never reused."""


class SwitchRequested(Event, frozen=True, kw_only=True, tag="cell.switch_requested.v1"):
    """The scheduler's command to a cell; its cause is the decision.

    It stands on the scheduler's subject, where no other process may write.
    """

    aggregate: ClassVar[Aggregate] = "scheduler"
    cell: str
    role: Role
    epoch: int
    """Of the lease that it asks for."""
    term: int
    """Of the scheduler; a cell refuses a command of a lower one than it has seen."""


class DrainRequested(Event, frozen=True, kw_only=True, tag="cell.drain_requested.v1"):
    """The operator wants no work on this cell: the scheduler takes it out of rollout and gives it none.

    It stands on the scheduler's subject, as commands do, and holds until it is lifted, whatever becomes of the cell.
    """

    aggregate: ClassVar[Aggregate] = "scheduler"
    cell: str
    reason: str


class DrainLifted(Event, frozen=True, kw_only=True, tag="cell.drain_lifted.v1"):
    """The operator gives the cell back to the scheduler."""

    aggregate: ClassVar[Aggregate] = "scheduler"
    cell: str


class CellFenced(Event, frozen=True, kw_only=True, tag="cell.fenced.v1"):
    """The cell takes no new calls under its old epoch."""

    aggregate: ClassVar[Aggregate] = "cell"
    cell: str
    epoch: int


class SessionsRerouted(Event, frozen=True, kw_only=True, tag="cell.sessions_rerouted.v1"):
    """The gateway's answer to a fence: none of its calls is at the cell any more."""

    aggregate: ClassVar[Aggregate] = "cell"
    cell: str
    epoch: int
    num_sessions: int
    """That had been at the cell."""
    num_calls_moved: int
    """Calls in flight that go on elsewhere."""


class KvMigrated(Event, frozen=True, kw_only=True, omit_defaults=True, tag="cell.kv_migrated.v1"):
    """The KV of a session belongs to the target from here on, whose side has read every page with its checksum.

    Appended by compare-and-set against the subject of the source, which frees its memory only afterwards.
    """

    aggregate: ClassVar[Aggregate] = "cell"
    cell: str
    """The source."""
    epoch: int
    target: str
    num_tokens: int
    num_bytes: int
    session: str = ""
    digest: str = ""
    """Of keys and checksums of all pages."""


class KvMissed(Event, frozen=True, kw_only=True, tag="cell.kv_missed.v1"):
    """The KV of a session stays behind: its next call computes it again from the logged tokens."""

    aggregate: ClassVar[Aggregate] = "cell"
    cell: str
    """The source."""
    epoch: int
    session: str
    num_tokens: int
    """To be prefilled again."""
    reason: str


class EngineReleased(Event, frozen=True, kw_only=True, tag="cell.engine_released.v1"):
    """The engine has given its memory back."""

    aggregate: ClassVar[Aggregate] = "cell"
    cell: str
    epoch: int
    seconds: float
    """That it took."""


class WeightsPulled(Event, frozen=True, kw_only=True, tag="cell.weights_pulled.v1"):
    """Every tensor had arrived whole before the engine flipped to the version."""

    aggregate: ClassVar[Aggregate] = "cell"
    cell: str
    epoch: int
    version: int
    digest: str
    """Of the weights, as in `policy.published`."""
    num_bytes: int
    phases: tuple[Phase, ...]


class CellSwitched(Event, frozen=True, kw_only=True, tag="cell.switched.v1"):
    """The cell is in its new role."""

    aggregate: ClassVar[Aggregate] = "cell"
    cell: str
    role: Role
    epoch: int
    version: int
    """Of the weights that its engine has."""
    phases: tuple[Phase, ...]
    """Of the switch, in their order."""


class SwitchRolledBack(Event, frozen=True, kw_only=True, tag="cell.rolled_back.v1"):
    """A switch did not come about."""

    aggregate: ClassVar[Aggregate] = "cell"
    cell: str
    role: Role
    """The role that it keeps."""
    epoch: int
    reason: str


class CellLost(Event, frozen=True, kw_only=True, tag="cell.lost.v1"):
    """It is no part of the run any more, until it joins again."""

    aggregate: ClassVar[Aggregate] = "cell"
    cell: str
    reason: str


# ---------------------------------------------------------------- scheduler


class TermStarted(Event, frozen=True, kw_only=True, tag="scheduler.term_started.v1"):
    """A scheduler leads from here on."""

    aggregate: ClassVar[Aggregate] = "scheduler"
    term: int


class Ticked(Event, frozen=True, kw_only=True, tag="scheduler.ticked.v1"):
    """The only clock that decisions may use."""

    aggregate: ClassVar[Aggregate] = "scheduler"
    term: int
    now_s: float


class SilenceNoticed(Event, frozen=True, kw_only=True, tag="scheduler.silence_noticed.v1"):
    """A satellite gives no sign of life: by the scheduler's own count of seconds, which nobody else can repeat."""

    aggregate: ClassVar[Aggregate] = "scheduler"
    term: int
    cell: str
    seconds: float


class Decided(Event, frozen=True, kw_only=True, tag="scheduler.decided.v1"):
    """`decide` over the log up to the envelope's `cause` asked for this switch."""

    aggregate: ClassVar[Aggregate] = "scheduler"
    term: int
    policy: str
    cell: str
    role: Role
    epoch: int
    waterlevel: int
    """w = executions dispatched minus finished."""
    capacity: int
    """C_R of all cells in rollout when it was decided."""
    cell_capacity: int
    """C_e of this cell."""
    reason: str
    """In words."""
    inputs_digest: str
    """Of all that the decision looked at."""


class MoveRefused(Event, frozen=True, kw_only=True, tag="scheduler.move_refused.v1"):
    """The policy asked for a switch that cannot be; nothing is commanded. Not repeated until something is decided."""

    aggregate: ClassVar[Aggregate] = "scheduler"
    term: int
    policy: str
    cell: str
    role: Role
    reason: str
    inputs_digest: str


# ---------------------------------------------------------------- policy


class CohortConsumed(Event, frozen=True, kw_only=True, tag="policy.cohort_consumed.v1"):
    """The executions that one step trains on."""

    aggregate: ClassVar[Aggregate] = "policy"
    step: int
    """1, 2, 3, ...: the version that the step makes."""
    groups: tuple[str, ...]
    executions: tuple[str, ...]
    digest: str
    through_seq: int
    """The fold of the log up to here yields it."""


class BatchAssembled(Event, frozen=True, kw_only=True, tag="policy.batch_assembled.v1"):
    """What a step is trained on: a function of the log and the seed."""

    aggregate: ClassVar[Aggregate] = "policy"
    step: int
    digest: str
    """Of all its rows."""
    through_seq: int
    """The fold of the log up to here yields it."""
    seed: int
    """Of the selection of trajectories."""
    num_executions: int
    num_trajectories: int
    num_tokens: int
    num_targets: int
    """Tokens that are trained."""
    num_microsteps: int


class MicrostepClaimed(Event, frozen=True, kw_only=True, tag="policy.microstep_claimed.v1"):
    """A cell computes this micro-step; the first valid claim wins."""

    aggregate: ClassVar[Aggregate] = "policy"
    step: int
    microstep: int
    cell: str
    epoch: int


class WeightsExposed(Event, frozen=True, kw_only=True, tag="policy.weights_exposed.v1"):
    """The core's own weights lie still for one update: satellites may read them, and join the batch."""

    aggregate: ClassVar[Aggregate] = "policy"
    step: int
    minibatch: int
    """The update of the step that they are for: 0, 1, ..."""
    cell: str
    """The core."""
    epoch: int
    digest: str
    num_bytes: int
    manifest: str
    """JSON: the session to read from, and address and digest of each tensor."""


class WeightsLocated(Event, frozen=True, kw_only=True, tag="policy.weights_located.v1"):
    """Where engines read a version, before it is published and again whenever the core's trainer was started."""

    aggregate: ClassVar[Aggregate] = "policy"
    version: int
    digest: str
    num_bytes: int
    manifest: str
    """JSON: the session to read from, and address and digest of each tensor."""


class GradientSums(Value, frozen=True, kw_only=True):
    """Over the targets of a gradient; `loss` is the sum of execution means."""

    loss: float
    entropy: float
    num_clipped: int
    logprob_gap: float
    logprob_gap_max: float
    kl: float
    num_tokens: int
    num_targets: int


class GradientOffered(Event, frozen=True, kw_only=True, tag="policy.gradient_offered.v1"):
    """A satellite's sum is ready to be read by the core."""

    aggregate: ClassVar[Aggregate] = "policy"
    step: int
    minibatch: int
    cell: str
    epoch: int
    base: str
    """Digest of the weights that it was computed on."""
    microsteps: tuple[int, ...]
    """In the order in which they were claimed and summed."""
    losses: tuple[float, ...]
    """`loss_sum` of each."""
    sums: GradientSums
    session: str
    """`host:port` of the satellite's transfer engine."""
    address: int
    num_bytes: int
    digest: str


class ClaimsReturned(Event, frozen=True, kw_only=True, tag="policy.claims_returned.v1"):
    """The core waits no longer for these: whoever trains may claim them again."""

    aggregate: ClassVar[Aggregate] = "policy"
    step: int
    cell: str
    """That held them."""
    epoch: int
    microsteps: tuple[int, ...]
    reason: str


class MicrostepAccepted(Event, frozen=True, kw_only=True, tag="policy.microstep_accepted.v1"):
    """Its gradient is in the core's sum. Its cause is the `policy.gradient_offered` that contained it, if another cell
    computed it."""

    aggregate: ClassVar[Aggregate] = "policy"
    step: int
    microstep: int
    cell: str
    """That computed it."""
    epoch: int
    loss_sum: float


class StepCompleted(Event, frozen=True, kw_only=True, tag="policy.step_completed.v1"):
    """The optimizer committed."""

    aggregate: ClassVar[Aggregate] = "policy"
    step: int
    weights_digest: str
    """After the step."""
    loss: float
    """Mean over executions of means over their targets."""
    grad_norm: float
    """Before clipping."""
    entropy: float
    """Mean over targets; nats."""
    clip_fraction: float
    """Of targets whose ratio was clipped."""
    logprob_gap_mean: float
    """Mean |engine - trainer| logprob over targets."""
    logprob_gap_max: float
    kl: float
    """Of the trained policy from the one that sampled, estimated over targets; nats."""
    staleness_mean: float
    staleness_max: int
    """Trained step minus dispatch version, of the executions in the loss."""
    learning_rate: float
    score_mean: float
    """Of the baselines."""
    num_tokens: int
    """In the batch."""
    num_targets: int
    """Tokens that were trained."""
    phases: tuple[Phase, ...]
    """Of the step, in their order."""


class StepRejected(Event, frozen=True, kw_only=True, tag="policy.step_rejected.v1"):
    """A guard refused the step before it was committed. Its cohort is used up; its number is free again."""

    aggregate: ClassVar[Aggregate] = "policy"
    step: int
    guard: Guard
    value: float
    """What was measured; 0 for `non_finite`, where `detail` says what it was."""
    bound: float
    """From the config; 0 for `non_finite`."""
    detail: str
    action: Literal["pause", "rollback"]
    """What follows: `run.finished` (paused), or fresh groups."""


class PolicyRolledBack(Event, frozen=True, kw_only=True, tag="policy.rolled_back.v1"):
    """Weights and optimizer are those of `to_version` again, as if the rejected step had not been begun."""

    aggregate: ClassVar[Aggregate] = "policy"
    from_step: int
    to_version: int
    """The last completed step."""
    reason: str


class DemonstrationsLearned(Event, frozen=True, kw_only=True, tag="policy.demonstrations_learned.v1"):
    """A stage of the warm start that made the policy which the run began with: supervised steps on demonstrations. They
    are no calls and belong to no execution, so none of their tokens is ever a target of a batch."""

    aggregate: ClassVar[Aggregate] = "policy"
    stage: str
    num_steps: int
    num_demonstrations: int
    """Histories, each met once; 0 where random tokens were repeated instead."""
    num_tokens: int
    num_targets: int
    """Those that the assistant says."""
    loss: float
    """Of the last step."""
    digest: str
    """Of ids and weights of all tokens, in their order."""


class PolicyPublished(Event, frozen=True, kw_only=True, tag="policy.published.v1"):
    """These weights are there to be pulled; version 0 is the policy that the run began with."""

    aggregate: ClassVar[Aggregate] = "policy"
    version: int
    digest: str
    num_bytes: int
    checkpoint: str
    """Directory, relative to the run's; empty when none was written."""


EVENT_TYPES: dict[str, type[Event]] = {event_type(cls): cls for cls in Event.__subclasses__()}
"""Every type by its versioned name."""
