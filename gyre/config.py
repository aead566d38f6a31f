"""Pure. The one typed config tree of a run; `load_config` turns YAML text into it.

An unknown key fails with its path and the nearest valid name. Defaults are what a laptop without a
GPU needs, so that the quickstart's file names only what it is about.
"""

import difflib
import hashlib
import math
import re
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import orjson
import yaml

from gyre.errors import ConfigError

Positive = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]


SECRETS = (
    r"\b(?:sk-[A-Za-z0-9_-]{20,}|gh[oprsu]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{22,}|xox[abeprs]-[A-Za-z0-9-]{10,}"
    r"|A[KS]IA[0-9A-Z]{16}\b|AIza[0-9A-Za-z_-]{35})",
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?-----END [A-Z ]*PRIVATE KEY-----",
)
"""Keys of model providers, GitHub, Slack, AWS and Google, and private keys in PEM."""


MUTABLE = (
    "harness.max_concurrent",
    "harness.deadline_s",
    "trainer.learning_rate",
    "trainer.keep_checkpoints",
    "pipeline.num_steps",
    "guards",
    "cells.advertise",
    "log",
    "gateway",
)
"""What may change when a run goes on; anything else would make its past untrue."""


EMBEDDED = "embedded"
NATS_SCHEMES = ("nats", "tls", "ws", "wss")


def is_host_port(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(re.fullmatch(r"\S+", host)) and port.isdecimal() and 0 < int(port) < 1 << 16


class Base(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A branch of the config tree."""


Tree = TypeVar("Tree", bound=Base)


class TasksConfig(Base, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which tasks the executions get: [tasks.md](tasks.md)."""

    family: str = "files"
    """Of generated tasks: one of gyre's, or a function of your own as `mytasks.py:reverse` or `module:function`."""
    seed: Natural = 1
    """Of the generated tasks that are trained on."""
    num_tasks: Positive = 512
    """Size of the training set; groups walk through it in order and start again."""
    num_goals: Positive = 2
    """Of one generated task: how long it is."""
    path: str = ""
    """A directory of tasks in the Harbor format, instead of a family: groups walk through them by name."""
    heldout_path: str = ""
    """Another one, for evaluations; empty: the same."""
    curriculum: bool = False
    """Pass over a task whose last group all passed or all failed: [Curriculum](tasks.md#curriculum)."""
    curriculum_rounds: Positive = 2
    """Walks through the tasks for which it is passed over; then it is tried again."""


class ToolBudget(Base, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one tool in one execution, as the replies name it. Once it is used up, further calls are refused."""

    tool: str
    """Its name."""
    max_calls: Natural = 0
    """0: no limit."""
    max_seconds: Natural = 0
    """From each reply that asks for it to the request that goes on from there. 0: no limit."""


class LimitsConfig(Base, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one execution, all of its processes together unless it says otherwise. What breaks one is stopped, or refused
    where the kernel keeps it: [Sandboxes](guide.md#sandboxes)."""

    processes: Positive = 256
    """At once."""
    memory_mb: Positive = 4096
    """Of its processes."""
    cpu_s: Positive = 4 * 3600
    """CPU seconds."""
    workspace_mb: Positive = 2048
    """All files of the workspace."""
    tmp_mb: Positive = 128
    """Its private `/tmp`."""
    file_mb: Positive = 512
    """Of one file."""
    open_files: Positive = 4096
    """Of one process."""


class HarnessConfig(Base, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one execution is run: [Harnesses](guide.md#harnesses)."""

    name: str = "reference"
    """`reference`, `mini-swe-agent`, or any other name that `gyre harness list` shows; or `command`."""
    command: tuple[str, ...] = ()
    """For `name: command`: argv; `{base_url}`, `{instruction}`, `{workspace}` and `{folder}` are filled in."""
    folder: str = ""
    """For `name: command`: a directory of this machine that its sandbox shows read-only, under its own path."""
    deadline_s: Seconds = 60.0
    """Or the task's own, if it is shorter. Then the harness is stopped, and its workspace is scored all the same."""
    overall_deadline_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """For harness and grading together: an execution that is not scored by then is discarded. 0: no limit. As with
    `deadline_s`, seconds in which no engine could answer do not count."""
    max_turns: Positive = 8
    """Replies that a harness asks for before it gives up, where it knows such a limit."""
    max_calls: Natural = 0
    """Of one execution, those that failed apart; further ones are refused, and what it left is scored. 0: no limit."""
    max_output_tokens: Natural = 0
    """Sampled by one execution; a call gets what is left when it begins. 0: no limit."""
    tool_budgets: tuple[ToolBudget, ...] = ()
    """As `[{tool: bash, max_calls: 50, max_seconds: 600}]`."""
    sandbox: Literal["bubblewrap", "docker", "podman", "harbor", "none"] = "bubblewrap"
    """[Sandboxes](guide.md#sandboxes). `none` gives no protection and needs `--unsafe-no-sandbox` as well."""
    image: str = "python:3.11-slim"
    """Of `docker`, `podman` and `harbor`: it has `sh` and `python3`. The first two do not pull it."""
    environment: str = ""
    """Of `harbor`: the name of its kind of environment, as in `daytona`, or `module:Class`."""
    limits: LimitsConfig = LimitsConfig()
    max_concurrent: Positive = 16
    """Executions at once."""
    pauses_s: tuple[Annotated[float, msgspec.Meta(ge=0)], ...] = ()
    """Of the reference harness, after each command, as a build or a test suite takes its time: an execution has one of
    these, by its name. So a run has short executions and long ones."""

    def __post_init__(self) -> None:
        if self.sandbox == "harbor" and not self.environment:
            raise ValueError("sandbox is `harbor`, but harness.environment is empty; name one, as in `daytona`")
        if self.name == "command" and not self.command:
            raise ValueError(
                "name is `command`, but harness.command is empty; give argv with {base_url}, {instruction}, {workspace}"
            )


class GradingConfig(Base, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is kept of a workspace, and what its score is made of: [tasks.md](tasks.md#what-is-kept)."""

    attempts: Positive = 2
    """Times that a grader is asked before the execution is dropped."""
    max_concurrent: Positive = 16
    """Graders at once: when many executions end together, each has its time limit to itself all the same."""
    max_snapshot_mb: Positive = 512
    """Of one workspace. A larger one cannot be kept: its execution is dropped."""
    milestones_s: tuple[Seconds, ...] = ()
    """Seconds after the start of a harness at which its workspace is kept and graded too."""
    shaping_weight: Fraction = 0.0
    """w: the reward is (1 - w) * score + w * mean of the milestones' scores, the end's among them. 0: the score."""
    on_tampering: Literal["record", "zero", "drop"] = "zero"
    """A workspace that was made to please its grader: its findings are recorded; then its score stands, or is 0, or
    the execution is dropped."""


class EvalConfig(Base, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Held-out executions before the first step and after the last; never trained on.

    [Evaluations](guide.md#evaluations)."""

    num_tasks: Natural = 0
    """Of each evaluation. 0: there is none."""
    executions_per_task: Positive = 1
    """At each temperature."""
    split: Literal["heldout", "train"] = "heldout"
    """`train` with `tasks.seed` asks for the very tasks that are trained on."""
    seed: Natural = 1000
    """Of the generated tasks."""
    temperatures: tuple[Annotated[float, msgspec.Meta(ge=0)], ...] = (1.0, 0.0)
    """One round each; 0 is greedy."""


class PolicyConfig(Base, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The checkpoint in Hugging Face format that the run starts from: [Policies](guide.md#policies)."""

    path: str = "policies/tiny"
    """Made by `gyre policy init` when it is missing and `init` is true."""
    init: bool = True
    """Make the tiny policy where there is none; otherwise that is an error."""
    warm_start: bool = True
    """Supervised steps on oracle demonstrations when the policy is made (never RL targets)."""


class SamplingConfig(Base, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the policy samples. What a harness asks for counts for `max_tokens` only."""

    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    """Of executions that are trained on: above 0, where there are steps."""
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    """Of all executions. 1: the whole vocabulary."""
    max_tokens: Positive = 64
    """Upper bound for one call; a smaller bound from the harness is kept."""


class EngineConfig(Base, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rollout engine (SGLang) of a cell."""

    context_tokens: Positive = 2048
    """Of one call, prompt and reply together. Harnesses with long system prompts need 32,768 or more."""
    max_total_tokens: Positive = 32768
    """Room for KV: of all calls that an engine holds at once."""
    max_running_requests: Positive = 64
    """Calls that an engine computes at once; others wait."""
    capacity: Positive = 64
    """C_e: executions that one cell serves at once, as the waterlevel rule counts them."""
    kv_store: str = ""
    """A store that keeps KV beyond the engine: contexts move with it when a cell leaves rollout. `embedded`: `gyre run`
    starts it, for the cells of its machine; `host:port`: one of your own (`python -m gyre.workers.kv_store`). Empty:
    contexts are prefilled again. See [KV that moves](guide.md#kv-that-moves)."""
    kv_page_tokens: Positive = 16
    """Tokens of one page in the store; the last, incomplete page of a context is always prefilled again."""
    start_timeout_s: Seconds = 240.0
    """An engine that is not ready by then is started again."""
    call_timeout_s: Seconds = 120.0
    """Of one attempt of a call, and of failures in a row; then the harness gets the engine's error."""

    def __post_init__(self) -> None:
        if self.kv_store not in ("", EMBEDDED) and not is_host_port(self.kv_store):
            raise ValueError(f"kv_store is {self.kv_store!r}, expected {EMBEDDED}, host:port, or nothing")


class CellsConfig(Base, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What changes role as one: an engine and a trainer each. The first, `c0`, is the core. [Cells](guide.md#cells),
    [on several hosts](guide.md#cells-on-several-hosts) too."""

    count: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """K: the core and K - 1 satellites."""
    pool: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    """Standalone engines beside the cells, `p0`, `p1`, ...: they always serve, and never train."""
    elsewhere: Natural = 0
    """So many of the last ones are on other hosts, where `gyre cell --nats URL` starts them."""
    advertise: str = "127.0.0.1"
    """Address under which other hosts reach the engines and weights of this one."""
    claim_deadline_s: Seconds = 120.0
    """A satellite that the core has waited for this long loses the micro-steps that it claimed."""
    lease_s: Seconds = 20.0
    """A satellite that gives no sign of life for so long is lost, and joins again when it is back."""
    hosts: Positive = 1
    """That one cell spans. Its process is on the first of them; `gyre cell ranks` starts the ranks of another."""
    ranks_per_host: Positive = 1
    """Processes of a cell's trainer on each of its hosts, usually one a GPU: torchrun starts them."""
    rendezvous: tuple[str, ...] = ()
    """Of each cell, in their order, an address of its first host where its ranks meet, as in `10.0.0.1:29500`. Empty:
    any free port; then a cell is of one host."""

    def __post_init__(self) -> None:
        if self.elsewhere >= self.count:
            raise ValueError(
                f"cells.elsewhere: {self.elsewhere} of {self.count} cells: the core is where `gyre run` is; raise count"
            )
        if len(self.rendezvous) != self.count and (self.rendezvous or self.hosts > 1):
            raise ValueError(
                f"cells.rendezvous: {len(self.rendezvous)} addresses for {self.count} cells of {self.hosts} hosts; "
                "give one a cell, as in 10.0.0.1:29500"
            )
        for address in self.rendezvous:
            if not is_host_port(address):
                raise ValueError(f"cells.rendezvous: {address!r} is no HOST:PORT, as in 10.0.0.1:29500")

    @property
    def num_ranks(self) -> int:
        """Of one cell's trainer."""
        return self.hosts * self.ranks_per_host

    @property
    def names(self) -> tuple[str, ...]:
        """In their fixed order: the cells, then the standalone engines, which stay in rollout longest."""
        return (*(f"c{index}" for index in range(self.count)), *self.standalone)

    @property
    def standalone(self) -> tuple[str, ...]:
        return tuple(f"p{index}" for index in range(self.pool))

    @property
    def satellites_here(self) -> tuple[str, ...]:
        """That `gyre run` starts."""
        return self.names[1 : self.count - self.elsewhere]


CORE = "c0"


class PipelineConfig(Base, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much work a run has, and how far rollout may be ahead of training."""

    num_steps: Natural = 4
    """In all. 0: no training, only the evaluation."""
    groups_per_step: Positive = 8
    """B: groups that one step consumes."""
    executions_per_group: Annotated[int, msgspec.Meta(ge=2)] = 8
    """N: executions of one task, whose mean score is the baseline."""
    steps_per_burst: Positive = 1
    """mu: steps between two publishes of the weights."""
    lookahead: Natural = 0
    """phi: bursts of groups that are dispatched ahead of training. (phi + mu) * B groups are under way at most."""
    max_staleness: Natural = 1
    """S: an execution that was dispatched more steps ago is not trained on; its score stays in the baseline."""

    @property
    def dispatch_depth(self) -> int:
        """Q_b = (phi + mu) * B, in groups."""
        return (self.lookahead + self.steps_per_burst) * self.groups_per_step


class TrainerConfig(Base, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The optimizer (AdamW), what it minimises ([Objective](guide.md#objective)), and how it is computed."""

    learning_rate: Annotated[float, msgspec.Meta(ge=0)] = 5e-4
    """After the warm-up."""
    warmup_steps: Natural = 2
    """Updates over which the learning rate rises, in a straight line."""
    beta1: Fraction = 0.9
    """Of AdamW: of the mean of gradients."""
    beta2: Fraction = 0.95
    """Of AdamW: of the mean of their squares."""
    weight_decay: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Of matrices; norms and biases have none."""
    max_grad_norm: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """A longer gradient is scaled down to it."""
    loss: Literal["ppo", "gspo", "cispo", "policy_gradient"] = "ppo"
    """`gyre/workers/objective.py` has the table: which formula, from which paper."""
    clip_low: Annotated[float, msgspec.Meta(gt=0)] = 0.2
    """The ratio is held in [1 - clip_low, 1 + clip_high]. A sequence's ratio moves far less than a token's: GSPO's
    authors took 3e-4 and 4e-4. 1 or more is no lower bound, as CISPO's authors had it."""
    clip_high: Annotated[float, msgspec.Meta(gt=0)] = 0.28
    """See `clip_low`."""
    correction: Literal["none", "truncated", "masked"] = "none"
    """Between what the engine and what the trainer gives a token: `none` takes the engine's log-probability for the
    old policy's. The other two weigh each target by trainer / engine, at most `correction_high`, or 0 outside
    [`correction_low`, `correction_high`]; the ratio of the loss is then to the weights that the step began with."""
    correction_low: Fraction = 0.5
    """See `correction`."""
    correction_high: Annotated[float, msgspec.Meta(ge=1)] = 2.0
    """See `correction`."""
    kl: Literal["none", "k1", "k3"] = "none"
    """To the policy that the run began with: `k1` lowers the advantage, `k3` is added to the loss. It costs one more
    set of weights and one more forward pass."""
    kl_weight: Annotated[float, msgspec.Meta(ge=0)] = 1e-3
    """Of the term that `kl` asks for."""
    num_minibatches: Positive = 1
    """Optimizer updates within one step; each takes its share of the groups."""
    advantage: Literal["grpo", "grpo_no_std", "rloo", "zero"] = "grpo"
    """`zero` is the control: everything runs, nothing is reinforced."""
    max_tokens_per_microstep: Positive = 16384
    """Of one micro-step, the unit of work that cells share; padding counts."""
    layout: Literal["paths", "tree"] = "paths"
    """[Trees](guide.md#trees). `paths`: a row a branch, padded to the longest. `tree`: branches that share a prefix
    compute it once, within `max_tokens_per_microstep`; a call whose targets end beyond it is left out
    (`beyond_budget`)."""
    tensor_parallel: Positive = 1
    """Ranks of a cell that hold one copy of the model together; the others are data parallel. The number of KV heads
    must be a multiple of it."""
    num_threads: Positive = 2
    """Of the trainer on a CPU. A replay to the same bits needs the same number."""
    keep_checkpoints: Natural = 2
    """The newest ones that stay on disk; 0: all."""

    @property
    def max_path_tokens(self) -> int:
        """Of a branch that can be trained; 0: no limit. A row may be longer than a micro-step, a path of a tree not."""
        return self.max_tokens_per_microstep if self.layout == "tree" else 0


class GuardsConfig(Base, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step that breaks one of these is not committed. Loss, gradient norm and all measures must be finite besides.
    [Guards](guide.md#guards) has how they are measured."""

    on_breach: Literal["pause", "rollback"] = "pause"
    """`pause` ends the run with the reason; `rollback` leaves the cohort out and goes on with fresh groups."""
    max_rollbacks: Natural = 3
    """In a row, without a step in between; the next breach pauses."""
    min_entropy: Annotated[float, msgspec.Meta(ge=0)] = 1e-4
    """Mean over targets, in nats: below it the policy says one thing only. 0: no bound."""
    max_kl: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    """Mean over targets, in nats, of the trained policy from the one that sampled. Wide, because one unlikely token
    that became likely weighs exp(its gap); what drifts as a whole breaks `max_logprob_gap_mean` first."""
    max_logprob_gap_mean: Annotated[float, msgspec.Meta(gt=0)] = 0.5
    """Mean |trainer - engine| over targets, in nats."""
    max_logprob_gap_max: Annotated[float, msgspec.Meta(gt=0)] = 15.0
    """Of one target: one token that both call possible differs by less, a wrong token or row by more."""


class SelectionConfig(Base, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which branches of an execution are trained, and what they weigh."""

    policy: Literal["drawn", "longest", "all"] = "drawn"
    """`drawn` is the paper's: by class, then in proportion to the targets that are left. `longest` takes the longest
    branches, `all` every branch without a limit; both are there to compare with."""
    max_trajectories: Natural = 5
    """J_max; 0 means no limit."""
    targets: Literal["once", "branches"] = "once"
    """`once`: a target is trained by the first trajectory that holds it. `branches`: by every one that does, so within
    its execution it weighs as many times as branches share it."""
    no_product: Literal["drop", "paper"] = "drop"
    """An execution without a product: no score and out of the baseline, or 0 and in it. See
    [What a score counts for](tasks.md#what-a-score-counts-for)."""


class SchedulerConfig(Base, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When cells change role, and who says so."""

    policy: Literal["waterlevel", "colocated", "static"] = "waterlevel"
    """`waterlevel` is the paper's; `colocated` moves all cells together, `static` never moves one: to compare with."""
    num_training: Positive = 1
    """Of `static`: so many cells of the order train, the core first; the others serve."""
    dwell_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """No cell leaves a role sooner than this, as ticks count it."""
    lease_s: Seconds = 5.0
    """Of several schedulers, one that is silent for so long leads no more."""
    num_standby: Annotated[int, msgspec.Meta(ge=0, le=8)] = 0
    """Schedulers beside the first: they wait, and one of them takes over. See
    [Several schedulers](guide.md#several-schedulers)."""
    tick_s: Seconds = 0.5
    """Seconds between two ticks, the only clock that decisions know; without `dwell_s` they come more rarely."""
    switch_deadline_s: Seconds = 120.0
    """A switch that takes longer is rolled back."""


class LogConfig(Base, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where events go: [log.md](log.md)."""

    url: str = ""
    """A NATS server of your own, or several of a cluster with commas between; a token or `user:password` goes into
    GYRE_NATS_TOKEN. Empty: an embedded one in the run directory."""
    sync: Literal["always", "default"] = "always"
    """fsync each write of the embedded server, or every two minutes as the server does by default."""
    min_free_gb: Annotated[float, msgspec.Meta(ge=0)] = 0.5
    """Below this free space no new group is dispatched; nothing recorded is dropped."""
    tls_ca: str = ""
    """PEM file of certificates that sign the one of a server of your own; empty: as `url` says, and the system's."""
    credentials: str = ""
    """NATS creds file for a server of your own."""
    num_replicas: Literal[1, 3, 5] = 1
    """Servers that keep each event: of a cluster of your own."""

    def __post_init__(self) -> None:
        for url in filter(None, self.url.split(",")):
            if "://" in url and url.strip().partition("://")[0] not in NATS_SCHEMES:
                raise ValueError(f"log.url: {url.strip()} is no address of a NATS server; write nats://host:4222")
        if "@" in self.url:
            raise ValueError("log.url: the config is recorded: leave user and password out and give GYRE_NATS_TOKEN")
        own = {"tls_ca": self.tls_ca, "credentials": self.credentials, "num_replicas": self.num_replicas > 1}
        if not self.url and (names := [f"log.{name}" for name, value in own.items() if value]):
            raise ValueError(f"{', '.join(names)}: of a server of your own; give its log.url too")


class GatewayConfig(Base, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where harnesses reach the policy, for how long, and what of their text is kept out."""

    host: str = "127.0.0.1"
    """Address that it listens on, beside the socket file."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """0: any free port. Harnesses in a sandbox reach the gateway through a socket file instead."""
    call_deadline_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """A call that waits and samples for longer is ended with 504; what was sampled until then is kept. 0: none."""
    session_deadline_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """After its opening; then its calls are ended in the same way, and others are refused. 0: none."""
    redact: tuple[str, ...] = SECRETS
    """Regular expressions; what matches in the text of a harness reaches neither log nor policy. The default knows keys
    of model providers, GitHub, Slack, AWS and Google, and private keys in PEM; `[]`: nothing is kept out."""

    def __post_init__(self) -> None:
        for pattern in self.redact:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"gateway.redact: {pattern!r} is no regular expression: {error}") from None


class Config(Base, frozen=True, kw_only=True, forbid_unknown_fields=True):
    seed: Natural = 1
    """Fixes tasks, policy and selection."""
    tasks: TasksConfig = TasksConfig()
    harness: HarnessConfig = HarnessConfig()
    grading: GradingConfig = GradingConfig()
    evaluation: EvalConfig = EvalConfig()
    policy: PolicyConfig = PolicyConfig()
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    cells: CellsConfig = CellsConfig()
    pipeline: PipelineConfig = PipelineConfig()
    trainer: TrainerConfig = TrainerConfig()
    guards: GuardsConfig = GuardsConfig()
    selection: SelectionConfig = SelectionConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    log: LogConfig = LogConfig()
    gateway: GatewayConfig = GatewayConfig()

    def __post_init__(self) -> None:
        if self.cells.elsewhere and not self.log.url:
            raise ValueError(
                "cells.elsewhere: the embedded server is for this host alone; name one that the others reach in log.url"
            )
        if self.cells.num_ranks % self.trainer.tensor_parallel:
            raise ValueError(
                f"trainer.tensor_parallel: {self.trainer.tensor_parallel} ranks hold a model, but a cell has "
                f"{self.cells.num_ranks}: cells.hosts times cells.ranks_per_host must be a multiple of it"
            )


class _Loader(yaml.SafeLoader):
    """Reads `5e-4` as the number that everybody means by it: YAML 1.1 wants `5.0e-4`. A key that is there twice is an
    error, as YAML says: PyYAML would take the last one. So is `.inf` or `.nan`, for which JSON has no word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value} is there twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        value = super().construct_yaml_float(node)
        if not math.isfinite(value):
            raise yaml.constructor.ConstructorError(None, None, f"{node.value} is no finite number", node.start_mark)
        return value


_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def load_config(text: str, source: str = "config") -> Config:
    """Parse YAML text. Raises ConfigError naming the path of what is wrong and the nearest valid name."""
    return parse_tree(text, Config, source)


def parse_tree(text: str, cls: type[Tree], source: str) -> Tree:
    """YAML text as one typed tree. Raises ConfigError as `load_config` does."""
    try:
        tree = yaml.load(text, _Loader) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not YAML: {' '.join(str(error).split())}") from None
    _check_keys(tree, cls, source, "")
    return _convert(tree, cls, source)


def checked(config: Config, source: str) -> Config:
    """One that a command put together: values are looked at where they come in, and not there. Raises ConfigError."""
    return _convert(msgspec.to_builtins(config), Config, source)


def _convert(tree: Any, cls: type[Tree], source: str) -> Tree:
    try:
        return msgspec.convert(tree, cls)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        path = path.rstrip("`")
        if reason.startswith("Invalid enum value"):
            reason += f"; choose one of {', '.join(map(str, _choices(cls, path)))}"
        raise ConfigError(f"{source}: {path or 'top level'}: {reason}") from None


def _choices(cls: type[Base], path: str) -> tuple[Any, ...]:
    """What may stand at `path`, as in `log.sync`, whose type is a Literal."""
    hint: Any = cls
    for name in path.split("."):
        hint = get_type_hints(hint)[name]
    return get_args(hint)


def encode_config(config: Config) -> str:
    """Canonical JSON text: what `run.started` carries."""
    return orjson.dumps(msgspec.to_builtins(config), option=orjson.OPT_SORT_KEYS).decode()


def decode_config(text: str) -> Config:
    """The inverse of `encode_config`. Raises ConfigError for one that this gyre does not know."""
    try:
        return msgspec.json.decode(text, type=Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"config on the log: {error}; use the gyre that wrote it") from None


def config_digest(config: Config) -> str:
    return hashlib.sha256(encode_config(config).encode()).hexdigest()


def changed_paths(old: Base, new: Base, path: str = "") -> tuple[str, ...]:
    """Paths of the values that differ, as in `trainer.learning_rate`."""
    changed: list[str] = []
    for name in old.__struct_fields__:
        was, now = getattr(old, name), getattr(new, name)
        if isinstance(was, Base):
            changed += changed_paths(was, now, f"{path}{name}.")
        elif was != now:
            changed.append(f"{path}{name}")
    return tuple(changed)


def _check_keys(tree: Any, cls: type[Base], source: str, path: str) -> None:
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: {path or 'top level'}: expected a mapping, got {type(tree).__name__}")
    hints = get_type_hints(cls)
    for key, value in tree.items():
        here = f"{path}.{key}" if path else str(key)
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"valid names: {', '.join(hints)}"
            raise ConfigError(f"{source}: {here}: unknown key; {hint}")
        branch, is_many = _struct_of(hints[key])
        if branch is not None and is_many and isinstance(value, list):
            for index, item in enumerate(value):
                _check_keys(item, branch, source, f"{here}[{index}]")
        elif branch is not None and not is_many:
            _check_keys({} if value is None else value, branch, source, here)


def _struct_of(hint: Any) -> tuple[type[Base] | None, bool]:
    """(the config branch that a field holds, if it holds one; whether it is a list of them)."""
    options = get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is not None else (hint,)
    found = next((o for o in options if isinstance(o, type) and issubclass(o, Base)), None)
    return found, get_origin(hint) is tuple
