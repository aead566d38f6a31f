"""A whole run in memory that holds every event type and is consistent: cohorts, batches, decisions, seal."""

from typing import Literal

import msgspec
from event_stream import call_events

from gyre.config import Config, EngineConfig, PipelineConfig, TrainerConfig, config_digest, encode_config
from gyre.events import types as e
from gyre.events.codec import Recorded
from gyre.events.log import Writer
from gyre.events.memory import MemoryLog
from gyre.events.order import Chain
from gyre.events.tokens import pack_ids
from gyre.projections import cohorts
from gyre.projections.batches import assemble
from gyre.projections.changes import MemoryTables
from gyre.projections.cohorts import CohortState, next_cohort
from gyre.projections.experience import Experience
from gyre.projections.tables import Tables

CONFIG = Config(
    pipeline=PipelineConfig(num_steps=2, groups_per_step=2, executions_per_group=2, max_staleness=2),
    trainer=TrainerConfig(num_minibatches=2, max_tokens_per_microstep=32),
    engine=EngineConfig(capacity=8),
)


class TurnScheduler:
    """A scheduler small enough to read: the core trains as soon as nothing is unfinished."""

    def initial(self) -> CohortState:
        return CohortState()

    def evolve(self, state: CohortState, recorded: Recorded) -> CohortState:
        return cohorts.evolve(state, recorded)

    def recompute(self, state: CohortState, config: Config) -> e.Decided:
        return e.Decided(
            term=1,
            policy=config.scheduler.policy,
            cell="c0",
            role="train",
            epoch=2 * state.step + 2,
            waterlevel=state.waterlevel,
            capacity=config.engine.capacity,
            cell_capacity=config.engine.capacity,
            reason=f"{cohorts.num_ready(state)} groups are ready",
            inputs_digest=f"{state.dispatched}-{state.finished}",
        )


class SyntheticRun:
    """Writes with one writer a process, and folds what it writes, as the processes of a run do."""

    def __init__(self) -> None:
        self.log = MemoryLog("r")
        self._clock = 0
        self._writers: dict[str, Writer] = {}
        self._experience = Experience()
        self._tables = Tables()
        self._memory = MemoryTables()
        self._chain = Chain()
        self.scheduler = TurnScheduler()
        self._scheduled = self.scheduler.initial()

    def _tick(self) -> int:
        self._clock += 1_000_000
        return self._clock

    async def add(self, writer: str, event: e.Event, cause: int = 0) -> int:
        if writer not in self._writers:
            self._writers[writer] = Writer(self.log, writer, 1, self._tick)
        seq = await self._writers[writer].append(event, cause=cause)
        async for recorded in self.log.read(seq, until=seq):
            self._experience.evolve(recorded)
            self._tables.evolve(recorded)
            self._memory.apply(self._tables.take())
            self._chain.observe(recorded)
            self._scheduled = self.scheduler.evolve(self._scheduled, recorded)
        return seq

    async def write(self) -> MemoryLog:
        text = encode_config(CONFIG)
        versions = (e.Versioned(name="gyre", version="0.1.0"),)
        await self.add(
            "supervisor",
            e.RunStarted(
                run="r", config=text, config_digest=config_digest(CONFIG), seed=1, versions=versions, num_threads=2
            ),
        )
        await self.add(
            "cell",
            e.CellJoined(cell="c0", index=0, capacity=8, engine_url="http://127.0.0.1:1", model_digest="m"),
        )
        await self.add("cell", e.CellLeased(cell="c0", role="rollout", epoch=1))
        await self._published(0)
        await self.add("cell", self._switched("rollout", 1, 0))
        await self.add("scheduler", e.TermStarted(term=1))
        await self._rollout(0)
        await self._train(1)
        await self.add("supervisor", e.AdmissionStopped(reason="disk full"))
        skipped = e.GroupSkipped(task="files-train-0", task_index=0, reason="all_failed", because="g00000")
        await self.add("dispatcher", skipped)
        await self.add("supervisor", e.ProcessExited(process="gateway", code=-9, restarted=True))
        await self.add("supervisor", e.RunFinished(reason="interrupted"))
        await self.seal()
        await self.add("supervisor", e.RunResumed(versions=versions))
        changed = msgspec.structs.replace(CONFIG, trainer=msgspec.structs.replace(CONFIG.trainer, learning_rate=1e-4))
        await self.add(
            "supervisor",
            e.ConfigChanged(
                config=encode_config(changed), config_digest=config_digest(changed), changed=("trainer.learning_rate",)
            ),
        )
        await self.add("supervisor", e.AdmissionResumed())
        await self._rollout(1)
        await self._train(2, reject=True)
        await self._rollout(2)
        await self._train(2)
        await self.add("cell", e.KvMigrated(cell="c0", epoch=5, target="c1", num_tokens=10, num_bytes=960))
        missed = {"session": "s", "num_tokens": 10, "reason": "not in the store"}
        await self.add("cell", e.KvMissed(cell="c0", epoch=5, **missed))  # type: ignore[arg-type]
        await self.add("cell", e.SwitchRolledBack(cell="c0", role="rollout", epoch=5, reason="engine did not wake"))
        await self.add("scheduler", e.SilenceNoticed(term=1, cell="c0", seconds=30.5))
        await self.add("cell", e.CellLost(cell="c0", reason="run is over"))
        await self.add("supervisor", e.RunFinished(reason="completed"))
        await self.seal()
        return self.log

    async def seal(self) -> None:
        through = await self.log.last_seq()
        event = e.TablesRecorded(through_seq=through, tables=self._memory.digests(), heads=self._chain.heads())
        await self.add("projector", event, cause=through)

    async def _published(self, version: int) -> None:
        if not version:
            learned = e.DemonstrationsLearned(
                stage="clean", num_steps=2, num_demonstrations=32, num_tokens=640, num_targets=96, loss=0.5, digest="d"
            )
            await self.add("trainer", learned)
        await self.add(
            "trainer", e.PolicyPublished(version=version, digest=f"w{version}", num_bytes=64, checkpoint="step-0")
        )

    def _switched(self, role: e.Role, epoch: int, version: int) -> e.CellSwitched:
        phases = (e.Phase(name="drain", seconds=0.25), e.Phase(name="load", seconds=0.5))
        return e.CellSwitched(cell="c0", role=role, epoch=epoch, version=version, phases=phases)

    async def _rollout(self, version: int) -> None:
        for purpose, name, index in (("train", "g", 0), ("train", "g", 1), ("eval", "e", 0)):
            group = f"{name}000{2 * version + index}"
            await self.add(
                "dispatcher",
                e.GroupDispatched(
                    group=group,
                    index=2 * version + index,
                    purpose=purpose,  # type: ignore[arg-type]
                    task=f"files-{index}",
                    task_digest="t",
                    task_index=index,
                    num_slots=2,
                    policy_version=version,
                    temperature=1.0,
                ),
            )
            for slot in range(2):
                await self._execution(group, slot, slot + index)

    async def _execution(self, group: str, slot: int, kind: int) -> None:
        execution = f"{group}-{slot}"
        started = e.ExecutionStarted(
            execution=execution, group=group, slot=slot, attempt=0, harness="reference", sandbox="none", deadline_s=9.0
        )
        if kind == 2:
            await self.add("dispatcher", started)
            await self.add("dispatcher", e.ExecutionDropped(execution=execution, reason="sandbox", final=False))
            execution += "-r1"
            started = msgspec.structs.replace(started, execution=execution, attempt=1)
        await self.add("dispatcher", started)
        session = f"{execution}-s"
        await self.add("dispatcher", e.SessionOpened(execution=execution, session=session, temperature=1.0, top_p=1.0))
        await self._calls(execution, session)
        if kind == 1:
            await self.add("dispatcher", e.ExecutionTimedOut(execution=execution, kind="harness", after_s=9.0))
            where = {"execution": execution, "session": session}
            spent = e.BudgetSpent(**where, budget="calls", limit=2, reason="its 2 calls are used up")
            await self.add("gateway", spent)
        reason = "timed_out" if kind == 1 else "completed"
        await self.add(
            "dispatcher",
            e.ExecutionFinished(
                execution=execution,
                reason=reason,  # type: ignore[arg-type]
                exit_code=0,
                wall_s=2.0,
                detail="",
                held_s=0.5,
            ),
        )
        if kind == 2:
            await self.add("dispatcher", e.EvaluationFailed(execution=execution, attempt=1, reason="no shell"))
        parts = (e.Part(name="exists", passed=True), e.Part(name="equal", passed=slot == 0))
        for event in (
            *_kept(execution, "milestone", 1.0),
            e.MilestoneScored(
                execution=execution, snapshot="s1.0", after_s=1.0, score=0.25, parts=parts[1:], wall_s=0.1
            ),
            *_kept(execution, "end", 2.0),
            e.ExecutionScored(
                execution=execution,
                score=0.5 if slot else 1.0,
                parts=parts,
                wall_s=0.5,
                snapshot="s2.0",
                findings=(e.Finding(rule="test_skipped", path="test_a.py"),) if slot else (),
                graded=0.75 if slot else None,
            ),
            e.ExecutionRegraded(
                execution=execution, snapshot="s2.0", grader="tests", score=1.0, parts=parts, reason=""
            ),
        ):
            await self.add("dispatcher", event)

    async def _calls(self, execution: str, session: str) -> None:
        marks = (e.Mark(digest="m", end=5),)
        told = {"placed_by": "nothing", "classed_by": "header", "header": "x-claude-code-request-class"}
        for event in call_events(execution, f"{session}-c0", "", 0, range(5), range(5, 8), marks=marks, **told):
            if isinstance(event, e.CallCompleted):
                event = msgspec.structs.replace(event, finish="tool_calls", tools=("bash", "read"))
            await self.add("gateway", event)
        first = call_events(execution, f"{session}-c1", f"{session}-c0", 8, [1, 2], [3, 4], tool_s=0.5)
        await self.add("gateway", first[0])
        cut = e.CallCut(
            execution=execution,
            session=session,
            call=f"{session}-c1",
            sampled=first[1].sampled,  # type: ignore[attr-defined]
            logprobs=first[1].logprobs,  # type: ignore[attr-defined]
            spans=first[1].spans,  # type: ignore[attr-defined]
            reason="client went away",
        )
        await self.add("gateway", cut)
        retry = call_events(execution, f"{session}-c2", f"{session}-c1", 10, [], [3, 5, 6])
        await self.add("gateway", retry[0])
        where = {"execution": execution, "session": session, "call": f"{session}-c2"}
        await self.add("gateway", e.BranchForked(base=f"{session}-c1", shared=10, kind="retry", **where))
        superseded = e.CallSuperseded(by=f"{session}-c2", **(where | {"call": f"{session}-c1"}))
        await self.add("gateway", superseded)
        await self.add(
            "gateway", e.TokensDrifted(source=f"{session}-c0", sampled=pack_ids([7]), shown=pack_ids([8, 9]), **where)
        )
        await self.add("gateway", e.ContextCompacted(summary_call=f"{session}-c0", **where))
        await self.add("gateway", e.SubAgentSpawned(parent_call=f"{session}-c0", **where))
        await self.add("gateway", retry[1])
        await self.add("gateway", retry[2])
        refused = call_events(execution, f"{session}-c3", f"{session}-c2", 13, [9], [])
        await self.add("gateway", refused[0])
        await self.add("gateway", e.CallFailed(status=400, reason="too long", **(where | {"call": f"{session}-c3"})))

    async def _train(self, step: int, *, reject: bool = False) -> None:
        cause = await self.add("scheduler", e.Ticked(term=1, now_s=float(step)))
        if step == 1:
            await self.add("operator", e.DrainRequested(cell="c0", reason="a core cannot be drained"))
            await self.add("operator", e.DrainLifted(cell="c0"))
            refused = {"policy": "waterlevel", "cell": "c1", "role": "train", "reason": "none", "inputs_digest": ""}
            await self.add("scheduler", e.MoveRefused(term=1, **refused))  # type: ignore[arg-type]
            for tick in range(3):
                cause = await self.add("scheduler", e.Ticked(term=1, now_s=1.25 + tick))
        decided = self.scheduler.recompute(self._scheduled, CONFIG)
        seq = await self.add("scheduler", decided, cause=cause)
        epoch = decided.epoch
        await self.add("scheduler", e.SwitchRequested(cell="c0", role="train", epoch=epoch, term=1), cause=seq)
        await self.add("cell", e.CellLeased(cell="c0", role="train", epoch=epoch))
        await self.add("cell", e.CellFenced(cell="c0", epoch=epoch))
        await self.add("gateway", e.SessionsRerouted(cell="c0", epoch=epoch, num_sessions=3, num_calls_moved=1))
        await self.add("cell", e.EngineReleased(cell="c0", epoch=epoch, seconds=0.5))
        await self.add("cell", self._switched("train", epoch, step - 1))
        cohort = next_cohort(self._experience.cohorts, CONFIG.pipeline)
        assert cohort is not None
        through = self._experience.seq
        await self.add(
            "trainer",
            e.CohortConsumed(
                step=step,
                groups=cohort.groups,
                executions=cohort.executions,
                digest=cohort.digest,
                through_seq=through,
            ),
        )
        batch = assemble(self._experience, cohort, CONFIG, step)
        await self.add(
            "trainer",
            e.BatchAssembled(
                step=step,
                digest=batch.digest,
                through_seq=self._experience.seq,
                seed=batch.seed,
                num_executions=batch.num_executions,
                num_trajectories=len(batch.rows),
                num_tokens=batch.num_tokens,
                num_targets=batch.num_targets,
                num_microsteps=len(batch.microsteps),
            ),
        )
        await self._share(step, epoch)
        for micro in batch.microsteps:
            claim = {"step": step, "microstep": micro.index, "cell": "c0", "epoch": epoch}
            await self.add("trainer", e.MicrostepClaimed(**claim))
            await self.add("trainer", e.MicrostepAccepted(loss_sum=0.25, **claim))
        if reject:
            await self._reject(step)
            return
        await self.add(
            "trainer",
            e.StepCompleted(
                step=step,
                weights_digest=f"w{step}",
                loss=0.1,
                grad_norm=0.2,
                entropy=0.3,
                clip_fraction=0.0,
                logprob_gap_mean=0.0,
                logprob_gap_max=0.0,
                kl=0.01,
                staleness_mean=batch.staleness_mean,
                staleness_max=batch.staleness_max,
                learning_rate=5e-4,
                score_mean=batch.score_mean,
                num_tokens=batch.num_tokens,
                num_targets=batch.num_targets,
                phases=(e.Phase(name="forward", seconds=1.5),),
            ),
        )
        await self._published(step)
        pulled = (e.Phase(name="pull", seconds=0.125),)
        await self.add("cell", e.CellLeased(cell="c0", role="rollout", epoch=epoch + 1))
        await self.add(
            "cell",
            e.WeightsPulled(cell="c0", epoch=epoch + 1, version=step, digest="w", num_bytes=64, phases=pulled),
        )
        await self.add("cell", self._switched("rollout", epoch + 1, step))

    async def _share(self, step: int, epoch: int) -> None:
        """A satellite that comes too late: what it offered is not taken."""
        of = {"step": step, "cell": "c1", "epoch": 1}
        sums = e.GradientSums(
            loss=0.5, entropy=1.0, num_clipped=1, logprob_gap=0.5, logprob_gap_max=0.25, kl=0.125, num_tokens=9,
            num_targets=3,
        )  # fmt: skip
        await self.add("trainer", e.WeightsLocated(version=step - 1, digest=f"w{step}", num_bytes=4, manifest="{}"))
        await self.add(
            "trainer",
            e.WeightsExposed(
                step=step, minibatch=0, cell="c0", epoch=epoch, digest=f"m{step}", num_bytes=4, manifest="{}"
            ),
        )
        await self.add(
            "trainer-c1",
            e.GradientOffered(
                **of, minibatch=0, base=f"m{step}", microsteps=(0,), losses=(0.5,), sums=sums, session="127.0.0.1:9",
                address=64, num_bytes=4, digest="g",
            ),
        )  # fmt: skip
        await self.add("trainer", e.ClaimsReturned(**of, microsteps=(0,), reason="no gradient in 120 s"))

    async def _reject(self, step: int) -> None:
        refused = e.StepRejected(
            step=step, guard="kl", value=2.0, bound=1.0, detail="kl is 2, above guards.max_kl 1", action="rollback"
        )
        seq = await self.add("trainer", refused)
        back = e.PolicyRolledBack(from_step=step, to_version=step - 1, reason="kl")
        await self.add("trainer", back, cause=seq)


async def written() -> MemoryLog:
    return await SyntheticRun().write()


def _kept(execution: str, kind: Literal["milestone", "end"], after_s: float) -> tuple[e.SnapshotTaken, ...]:
    taken = e.SnapshotTaken(
        execution=execution,
        snapshot=f"s{after_s}",
        kind=kind,
        after_s=after_s,
        num_files=2,
        num_bytes=20,
        new_bytes=10,
    )
    return (taken,)
