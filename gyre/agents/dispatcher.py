"""Shell. The dispatcher: folded log -> groups and executions -> sandboxes -> their events.

Invariant: every execution that is started ends on the log as scored or dropped, whatever ends this
process: what an earlier dispatcher left half done is dropped with its reason, and refilled.
"""

import asyncio
import math
import shutil
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from gyre.agents.curriculum import skip_wanted
from gyre.agents.dispatch import (
    Dispatch,
    GroupWanted,
    Slot,
    drop,
    execution_name,
    executions_wanted,
    groups_wanted,
    interrupt,
    work_done,
)
from gyre.agents.evaluator import prepare_workspace
from gyre.agents.grading import Grading
from gyre.agents.held_clock import HeldClock
from gyre.agents.redaction import Redactor
from gyre.agents.routes import Routes
from gyre.agents.routes import evolve as evolve_routes
from gyre.agents.snapshots import clear
from gyre.agents.task_source import TaskSource
from gyre.agents.tasks import Task, task_digest
from gyre.agents.verifier import Grade
from gyre.config import Config
from gyre.errors import HarnessError, SandboxError
from gyre.events.codec import Recorded
from gyre.events.follow import Follower
from gyre.events.log import Log, Writer
from gyre.events.subjects import ALL_BUT_CALLS
from gyre.events.types import (
    AdmissionResumed,
    AdmissionStopped,
    ExecutionDropped,
    ExecutionFinished,
    ExecutionScored,
    ExecutionStarted,
    ExecutionTimedOut,
    GroupDispatched,
    GroupSkipped,
    RunFinished,
    SessionOpened,
)

GIGABYTE = 1e9
DISK_CHECK_S = 5.0
DISK_REST_S = 1.0
DETAIL_CHARS = 2000


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How a harness process ended."""

    exit_code: int
    wall_s: float
    timed_out: bool
    detail: str
    """Why it failed; empty when it did not."""
    held_s: float = 0.0
    """Of `wall_s`: no engine could answer."""


class Runner(Protocol):
    """Runs one harness on a workspace, and grades what it left."""

    async def run(self, task: Task, session: str, workspace: Path, held: Callable[[], float]) -> Ended:
        """held: seconds so far in which no engine could answer: they do not count towards the deadline.

        Raises SandboxError or HarnessError when the harness could not be started at all.
        """
        ...

    async def grade(self, task: Task, workspace: Path) -> Grade:
        """Raises EvaluationError: no score. It may change the workspace of a task in a folder."""
        ...


class Engines:
    """What the cells can take, and the seconds in which none took calls, since the first that did: a fold of cell
    events with a clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._routes: Routes = {}
        self._total = 0.0
        self._since: float | None = None

    def evolve(self, recorded: Recorded) -> None:
        before = any(route.open for route in self._routes.values())
        self._routes = evolve_routes(self._routes, recorded.event, recorded.seq)
        after = any(route.open for route in self._routes.values())
        if before and not after:
            self._since = self._clock()
        elif after and self._since is not None:
            self._total += self._clock() - self._since
            self._since = None

    def capacity(self) -> float:
        """Executions that the cells in rollout have room for; while none is, those that all cells had: one comes back.
        Without a limit before the first has joined."""
        found = [route.capacity for route in self._routes.values() if route.open]
        return sum(found or (route.capacity for route in self._routes.values())) or math.inf

    def held_s(self) -> float:
        return self._total + (self._clock() - self._since if self._since is not None else 0.0)


class Dispatcher:
    """Consumes publishes, consumed cohorts, cell events and its own; produces group and execution events.

    At most as many executions are live as `harness.max_concurrent` and the engines' capacity allow, and none before
    the gateway listens. Waits for the folded log and for its executions; is unblocked by either.
    """

    def __init__(
        self,
        log: Log,
        writer: Writer,
        config: Config,
        *,
        runner: Runner,
        run_dir: Path,
        mint: Callable[[], str],
        keep_workspaces: bool = False,
        gateway: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`mint` gives the unguessable part of a session id. `gateway` returns once it listens; None: it does."""
        self._log, self._writer, self._config = log, writer, config
        self._redactor = Redactor(config.gateway.redact)
        self._tasks = TaskSource(config)
        self._grading = Grading(writer, runner.grade, run_dir, config.grading, self._redactor)
        self._engines = Engines(time.monotonic)
        self._runner, self._run_dir, self._mint = runner, run_dir, mint
        self._keep = keep_workspaces
        self._gateway, self._is_reached = gateway, gateway is None
        self._state = Dispatch()
        self._nudge = asyncio.Event()
        folds = self._state.evolve, self._engines.evolve, lambda _: self._nudge.set()
        self._follower = Follower(log, *folds, only=ALL_BUT_CALLS)
        self._live: dict[str, asyncio.Task[None]] = {}
        self._disk_due = 0.0

    async def run(self) -> None:
        """Returns when the work is done (and says so on the log) or when somebody else ended the run."""
        async with asyncio.TaskGroup() as tasks:
            endless = [tasks.create_task(self._follower.run()), tasks.create_task(self._reach())]
            await self._follower.catch_up()
            await self._drop_orphans()
            while not self._state.finished:
                self._nudge.clear()
                await self._check_disk()
                while wanted := groups_wanted(self._state, self._config):
                    await self._sync(await self._writer.append(self._next(wanted[0])))
                room = int(min(self._config.harness.max_concurrent, self._engines.capacity())) - len(self._live)
                for slot in executions_wanted(self._state, room if self._is_reached else 0):
                    await self._start(tasks, slot)
                if work_done(self._state, self._config):
                    await self._writer.append(RunFinished(reason="completed"))
                    break
                with suppress(TimeoutError):  # disk space comes back without an event
                    async with asyncio.timeout(DISK_CHECK_S):
                        await self._nudge.wait()
            live = tuple(self._live.values())
            for task in live if self._state.open else ():  # else they only tidy up
                task.cancel()
            await asyncio.gather(*live, return_exceptions=True)
            for task in endless:
                task.cancel()

    async def _reach(self) -> None:
        if self._gateway is not None:
            await self._gateway()
            self._is_reached = True
            self._nudge.set()

    async def _sync(self, seq: int) -> None:
        """Decide nothing more before the folded state holds one's own event."""
        await self._follower.caught_up(seq)

    async def _drop_orphans(self) -> None:
        for slot in tuple(self._state.open.values()):
            if slot.is_live:
                await self._sync(await self._writer.append(interrupt(slot)))
        if not self._keep:
            await asyncio.to_thread(clear, self._run_dir / "workspaces")
        await asyncio.to_thread(clear, self._run_dir / "grading")
        await asyncio.to_thread(self._grading.snapshots.clear_drafts)

    async def _check_disk(self) -> None:
        """Once a second at most: what one second can write is far below any floor."""
        now = asyncio.get_running_loop().time()
        if now < self._disk_due:
            return
        self._disk_due = now + DISK_REST_S
        floor = self._config.log.min_free_gb
        free = shutil.disk_usage(self._run_dir).free / GIGABYTE
        if free < floor and not self._state.admission_stopped:
            reason = f"disk: {free:.2f} GB free, log.min_free_gb is {floor}; nothing new starts until there is room"
            await self._sync(await self._writer.append(AdmissionStopped(reason=reason)))
        elif free >= floor and self._state.admission_stopped:
            await self._sync(await self._writer.append(AdmissionResumed()))

    def _next(self, wanted: GroupWanted) -> GroupDispatched | GroupSkipped:
        """The group, or word that its task is passed over: then another is wanted in its place."""
        skipped = None
        if wanted.purpose == "train":
            skipped = skip_wanted(
                self._state.curriculum,
                self._config.tasks,
                wanted.task_index,
                lambda index: self._tasks.get("train", index).id,
            )
        return skipped or self._dispatched(wanted)

    def _dispatched(self, wanted: GroupWanted) -> GroupDispatched:
        task = self._tasks.get(wanted.purpose, wanted.task_index)
        return GroupDispatched(
            group=wanted.group,
            index=wanted.index,
            purpose=wanted.purpose,
            task=task.id,
            task_digest=task_digest(task),
            task_index=wanted.task_index,
            num_slots=wanted.num_slots,
            policy_version=wanted.policy_version,
            temperature=wanted.temperature,
        )

    async def _start(self, tasks: asyncio.TaskGroup, slot: Slot) -> None:
        execution = execution_name(slot)
        started = ExecutionStarted(
            execution=execution,
            group=slot.group,
            slot=slot.slot,
            attempt=slot.attempt,
            harness=self._config.harness.name,
            sandbox=self._config.harness.sandbox,
            deadline_s=self._config.harness.deadline_s,
        )
        await self._sync(await self._writer.append(started))
        task = self._live[execution] = tasks.create_task(self._execute(slot, execution))
        task.add_done_callback(lambda _: self._ended(execution))

    def _ended(self, execution: str) -> None:
        del self._live[execution]
        self._nudge.set()

    async def _execute(self, slot: Slot, execution: str) -> None:
        """One execution from its workspace to its score; every way out of it is an event."""
        workspace = self._run_dir / "workspaces" / execution
        limit = self._config.harness.overall_deadline_s
        try:
            async with HeldClock(self._engines.held_s).limit(limit) as overall:
                end, cause = await self._harness_and_score(slot, execution, workspace)
            # Beyond the limit: an end that is being written when it comes would be followed by another.
            await self._writer.append(end, cause=cause)
        except (SandboxError, HarnessError) as error:
            await self._writer.append(drop(slot, self._redactor.text(f"infrastructure: {error}")))
        except TimeoutError:
            if not overall.expired():
                raise
            timed_out = ExecutionTimedOut(execution=execution, kind="overall", after_s=limit)
            late = ExecutionDropped(execution=execution, reason="overall deadline", final=True)
            await self._writer.append_all((timed_out, late))
        finally:
            self._grading.snapshots.forget(workspace)
            if not self._keep:
                await asyncio.to_thread(clear, workspace)

    async def _harness_and_score(
        self, slot: Slot, execution: str, workspace: Path
    ) -> tuple[ExecutionScored | ExecutionDropped, int]:
        """(how it ends, the cause of that)."""
        group = self._state.groups[slot.group]
        task = self._tasks.get(group.purpose, group.task_index)
        await asyncio.to_thread(prepare_workspace, workspace, task)
        session = f"{execution}-{self._mint()}"
        opened = SessionOpened(
            execution=execution,
            session=session,
            temperature=group.temperature,
            top_p=self._config.sampling.top_p,
        )
        cause = await self._writer.append(opened)
        clock = HeldClock(self._engines.held_s)
        milestones = asyncio.create_task(self._grading.milestones(execution, task, workspace, clock))
        try:
            ended = await self._runner.run(task, session, workspace, self._engines.held_s)
        finally:
            milestones.cancel()
            await asyncio.gather(milestones, return_exceptions=True)
        finished = ExecutionFinished(
            execution=execution,
            reason="timed_out" if ended.timed_out else "harness_failed" if ended.detail else "completed",
            exit_code=ended.exit_code,
            wall_s=ended.wall_s,
            detail=self._redactor.text(ended.detail)[-DETAIL_CHARS:],
            held_s=ended.held_s,
        )
        timed_out = ExecutionTimedOut(execution=execution, kind="harness", after_s=ended.wall_s)
        cause = await self._writer.append_all((timed_out, finished) if ended.timed_out else (finished,), cause=cause)
        return await self._grading.score(execution, task, workspace, ended.wall_s, cause)
