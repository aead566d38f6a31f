"""The trainer's process with the real trainer and the real transfer engine, over a log in memory."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytest.importorskip("mooncake.engine")

from cell_logs import arrival, departure, dispatched, joined, published, scored, started  # noqa: E402
from tiny_policies import VOCAB, tiny_config, tiny_tensors, write_tiny_policy  # noqa: E402

from gyre.config import Config, GuardsConfig, PipelineConfig, TrainerConfig  # noqa: E402
from gyre.errors import FoldError, PolicyError  # noqa: E402
from gyre.events.codec import decode  # noqa: E402
from gyre.events.log import Ack, Item, open_writer  # noqa: E402
from gyre.events.memory import MemoryLog  # noqa: E402
from gyre.events.tokens import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs  # noqa: E402
from gyre.events.types import (  # noqa: E402
    BatchAssembled,
    CallCompleted,
    CallDelivered,
    CallStarted,
    CellLeased,
    CellLost,
    CellSwitched,
    CohortConsumed,
    DemonstrationsLearned,
    Event,
    ExecutionFinished,
    MicrostepAccepted,
    MicrostepClaimed,
    PolicyPublished,
    PolicyRolledBack,
    RunFinished,
    RunResumed,
    SessionOpened,
    StepCompleted,
    StepRejected,
    VersionSpan,
    WeightsLocated,
)
from gyre.workers.manifest import WeightManifest  # noqa: E402
from gyre.workers.policy_files import DEMONSTRATIONS, save_policy  # noqa: E402
from gyre.workers.trainer_loop import run_trainer  # noqa: E402
from gyre.workers.transfer import TransferEndpoint, WeightSink  # noqa: E402

pytestmark = pytest.mark.stack
NUM_SLOTS = 3
GUARDS = GuardsConfig(max_logprob_gap_mean=1.5, max_kl=1.5)
"""Wider than the defaults: the recorded log-probabilities are made up."""


def config(**pipeline: int) -> Config:
    sizes = {"num_steps": 2, "groups_per_step": 2, "executions_per_group": NUM_SLOTS, "max_staleness": 2} | pipeline
    trainer = TrainerConfig(num_threads=1, max_tokens_per_microstep=64)
    return Config(pipeline=PipelineConfig(**sizes), trainer=trainer, guards=GUARDS)


def execution_events(group: int, slot: int) -> list[Event]:
    """One call of an execution; its score depends on the slot, so that there is something to learn."""
    rng = np.random.default_rng([group, slot])
    name, session = f"g{group:04}-{slot}", f"g{group:04}-{slot}-s"
    ids, reply = rng.integers(0, VOCAB, 12 + slot), rng.integers(0, VOCAB, 8)
    call: dict[str, Any] = {"execution": name, "session": session, "call": f"{session}-c0"}
    return [
        started(group, slot),
        SessionOpened(execution=name, session=session, temperature=1.0, top_p=1.0),
        CallStarted(
            **call, base="", shared=0, context=pack_ids(ids), role_class="main", rule="root", marks=(),
            temperature=1.0, top_p=1.0, max_tokens=64, cell="c0",
        ),
        CallCompleted(
            **call, sampled=pack_ids(reply), logprobs=pack_logprobs(rng.uniform(-5.5, -4, len(reply))),
            spans=(VersionSpan(version=0, start=0, end=len(reply)),), finish="stop", reply="",
            num_prompt_tokens=len(ids), num_cached_tokens=0, num_retries=0, engine_s=0.1,
        ),
        CallDelivered(**call, delivered=True),
        ExecutionFinished(execution=name, reason="completed", exit_code=0, wall_s=1.0, detail=""),
        msgspec.structs.replace(scored(group, slot), score=float(slot == 0)),
    ]  # fmt: skip


def groups(*indices: int) -> list[Event]:
    out: list[Event] = []
    for index in indices:
        out.append(dispatched(index, NUM_SLOTS, 0))
        for slot in range(NUM_SLOTS):
            out += execution_events(index, slot)
    return out


class Crash(Exception):
    """The process ends here."""


class CrashingLog(MemoryLog):
    """Ends its writer once: before, or after, an event of a type is stored."""

    def __init__(self) -> None:
        super().__init__("r")
        self.crash_at: tuple[type[Event], str] | None = None
        self.lost: Event | None = None
        """What was not stored because of the crash."""

    async def publish_all(self, items: Sequence[Item], *, expect_last: int | None = None) -> Ack:
        event = decode(items[0].body).event
        is_here = self.crash_at is not None and isinstance(event, self.crash_at[0])
        if is_here and self.crash_at is not None and self.crash_at[1] == "before":
            self.crash_at, self.lost = None, event
            raise Crash
        ack = await super().publish_all(items, expect_last=expect_last)
        if is_here:
            self.crash_at = None
            raise Crash
        return ack


async def write(log: MemoryLog, *events: Event) -> None:
    writer = await open_writer(log, "hand", time.time_ns)
    for event in events:
        await writer.append(event)


async def until(log: MemoryLog, kind: type[Event], num: int = 1) -> Any:
    async with asyncio.timeout(60):
        async for recorded in log.read(1):
            num -= isinstance(recorded.event, kind)
            if not num:
                return recorded.event


async def events_of(log: MemoryLog, kind: type[Any]) -> list[Any]:
    return [r.event async for r in log.read(1, until=await log.last_seq()) if isinstance(r.event, kind)]


class Run:
    """A run directory, a policy and a log, for trainers that come and go."""

    def __init__(self, path: Path, settings: Config) -> None:
        self.path, self.config = path, settings
        self.policy = path / "policy"
        if not self.policy.exists():
            write_tiny_policy(self.policy)
        self.log = CrashingLog()

    async def trainer(self) -> None:
        writer = await open_writer(self.log, "trainer", time.time_ns)
        await run_trainer(self.log, writer, self.config, cell_id="c0", run_dir=self.path, policy_dir=self.policy)

    async def during(self, work: Callable[[], Awaitable[None]]) -> None:
        """`work` while a trainer lives, which then sees the end of the run."""
        task = asyncio.create_task(self.trainer())
        try:
            await work()
            await write(self.log, RunFinished(reason="interrupted"))
            await asyncio.wait_for(task, 120)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def manifest(self) -> WeightManifest:
        located = (await events_of(self.log, WeightsLocated))[-1]
        return msgspec.json.decode(located.manifest, type=WeightManifest)

    async def pull(self) -> dict[str, Any]:
        return WeightSink(TransferEndpoint()).pull(await self.manifest())


ARRIVED = (joined(), *arrival("c0", 1, 0))
STARTED = (published(0), *ARRIVED)


LEARNED = DemonstrationsLearned(
    stage="clean", num_steps=2, num_demonstrations=32, num_tokens=640, num_targets=96, loss=0.5, digest="d"
)


def test_what_the_policy_was_made_from_is_told_once_before_its_first_version(tmp_path: Path) -> None:
    run = Run(tmp_path, config())
    (run.policy / DEMONSTRATIONS).write_bytes(msgspec.json.encode([LEARNED]))

    async def play() -> None:
        for _ in range(2):
            await run.during(lambda: until(run.log, PolicyPublished))
            await write(run.log, RunResumed(versions=()))
        events = [r.event async for r in run.log.read(1, until=await run.log.last_seq())]
        assert [event for event in events if isinstance(event, DemonstrationsLearned)] == [LEARNED]
        first = next(i for i, event in enumerate(events) if isinstance(event, PolicyPublished))
        assert events[first - 1] == LEARNED

    asyncio.run(play())


def test_it_publishes_trains_and_publishes_again(tmp_path: Path) -> None:
    run = Run(tmp_path, config())

    async def work() -> None:
        first = await until(run.log, PolicyPublished)
        assert (first.version, first.checkpoint) == (0, "")
        assert first.digest == (await run.manifest()).digest
        assert (await run.pull()).keys() == tiny_tensors(tiny_config()).keys()
        await write(run.log, *ARRIVED, *groups(0, 1, 2, 3), *departure("c0", 2, 0))
        second = await until(run.log, PolicyPublished, 2)
        assert (second.version, second.checkpoint) == (1, "checkpoints/step-1")
        manifest = await run.manifest()
        assert (manifest.version, manifest.digest) == (1, second.digest)
        assert (await run.pull())["model.norm.weight"].isfinite().all()
        renewed = CellLeased(cell="c0", role="train", epoch=3)
        await write(run.log, renewed, CellSwitched(cell="c0", role="train", epoch=3, version=1, phases=()))
        await until(run.log, PolicyPublished, 3)

    async def play() -> None:
        await run.during(work)
        steps = await events_of(run.log, StepCompleted)
        versions = await events_of(run.log, PolicyPublished)
        assert [s.step for s in steps] == [1, 2]
        assert [v.digest for v in versions[1:]] == [s.weights_digest for s in steps]
        assert len({v.digest for v in versions}) == 3
        assert [phase.name for phase in steps[0].phases] == ["assemble", "gradients", "commit", "digest", "checkpoint"]
        assert steps[0].num_targets == 2 * NUM_SLOTS * 8 and 0 < steps[0].score_mean < 1
        batches = await events_of(run.log, BatchAssembled)
        assert batches[0].num_microsteps > 1
        claims = [(c.step, c.microstep, c.epoch) for c in await events_of(run.log, MicrostepClaimed)]
        assert claims == [(b.step, m, b.step + 1) for b in batches for m in range(b.num_microsteps)]
        assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-1", "step-2"]

    asyncio.run(play())


async def train_once(run: Run) -> list[Event]:
    """A run of two steps in one burst, started again whenever it crashes; its policy events."""
    await write(run.log, *STARTED, *groups(0, 1, 2, 3), *departure("c0", 2, 0))
    for _ in range(3):
        task = asyncio.create_task(run.trainer())
        done = asyncio.create_task(until(run.log, PolicyPublished, 2))
        await asyncio.wait((task, done), return_when=asyncio.FIRST_COMPLETED)
        is_over = done.done()
        for waiting in (task, done):
            waiting.cancel()
        results = await asyncio.gather(task, done, return_exceptions=True)
        if is_over:
            break
        assert isinstance(results[0], Crash), results
    kinds = (CohortConsumed, BatchAssembled, MicrostepClaimed, MicrostepAccepted, StepCompleted, PolicyPublished)
    return [e for kind in kinds for e in await events_of(run.log, kind)]


def comparable(events: list[Event]) -> list[Event]:
    """Without what a crash may change: seconds and places in the log."""
    out = []
    for event in events:
        if isinstance(event, StepCompleted):
            event = msgspec.structs.replace(event, phases=())
        if isinstance(event, CohortConsumed | BatchAssembled):
            event = msgspec.structs.replace(event, through_seq=0)
        out.append(event)
    return out


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    run = Run(tmp_path_factory.mktemp("undisturbed"), config(steps_per_burst=2))

    async def play() -> list[Event]:
        return comparable(await train_once(run))

    return asyncio.run(play())


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("kind", [CohortConsumed, BatchAssembled, MicrostepClaimed, MicrostepAccepted, StepCompleted])
def test_a_crash_changes_no_weights_and_counts_nothing_twice(
    tmp_path: Path, undisturbed: list[Event], kind: type[Event], moment: str
) -> None:
    run = Run(tmp_path, config(steps_per_burst=2))
    run.log.crash_at = (kind, moment)
    assert comparable(asyncio.run(train_once(run))) == undisturbed


def test_a_step_that_a_dead_trainer_told_of_late_is_loaded_before_it_is_published(tmp_path: Path) -> None:
    run = Run(tmp_path, config())

    async def play() -> None:
        await write(run.log, *STARTED, *groups(0, 1), *departure("c0", 2, 0))
        run.log.crash_at = (StepCompleted, "before")
        with pytest.raises(Crash):
            await asyncio.wait_for(run.trainer(), 60)
        late = run.log.lost
        assert isinstance(late, StepCompleted)
        await write(run.log, CellLost(cell="c0", reason="x"))

        async def work() -> None:
            await until(run.log, WeightsLocated, 2)  # its successor has read the log, and loaded version 0
            await write(run.log, late)
            assert (await until(run.log, PolicyPublished, 2)).digest == late.weights_digest

        await run.during(work)
        manifest = await run.manifest()
        assert (manifest.version, manifest.digest) == (1, late.weights_digest)
        assert len(await events_of(run.log, PolicyPublished)) == 2

    asyncio.run(play())


def test_a_step_begun_under_an_older_epoch_claims_again_what_was_not_accepted(tmp_path: Path) -> None:
    run = Run(tmp_path, config())

    async def play() -> None:
        await write(run.log, *STARTED)
        run.log.crash_at = (MicrostepAccepted, "before")
        task = asyncio.create_task(run.trainer())
        await until(run.log, PolicyPublished)
        await write(run.log, *groups(0, 1), *departure("c0", 2, 0))
        with pytest.raises(Crash):
            await asyncio.wait_for(task, 120)
        await write(run.log, CellLost(cell="c0", reason="x"), joined(), *arrival("c0", 3, 0), *departure("c0", 4, 0))

        async def work() -> None:
            await until(run.log, StepCompleted)

        await run.during(work)
        claims = [(c.microstep, c.epoch) for c in await events_of(run.log, MicrostepClaimed)]
        assert claims[:2] == [(0, 2), (0, 4)] and all(epoch == 4 for _, epoch in claims[1:])
        accepted = [a.microstep for a in await events_of(run.log, MicrostepAccepted)]
        assert accepted == sorted(set(accepted))
        assert len(await events_of(run.log, CohortConsumed)) == 1

    asyncio.run(play())


def test_a_restart_offers_the_published_weights_again(tmp_path: Path) -> None:
    run = Run(tmp_path, config())

    async def play() -> None:
        await write(run.log, *STARTED, *groups(0, 1), *departure("c0", 2, 0))

        async def one_step() -> None:
            await until(run.log, PolicyPublished, 2)

        await run.during(one_step)
        run.log = await resumed(run.log)
        before = await run.manifest()

        async def look() -> None:
            async with asyncio.timeout(120):
                while (await run.manifest()).session == before.session:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            manifest = await run.manifest()
            assert (manifest.version, manifest.digest) == (1, before.digest)
            assert await run.pull()

        await run.during(look)
        assert len(await events_of(run.log, PolicyPublished)) == 2

    asyncio.run(play())


async def resumed(log: MemoryLog) -> CrashingLog:
    """The same log without its end."""
    copy = CrashingLog()
    async for recorded in log.read(1, until=await log.last_seq()):
        if not isinstance(recorded.event, RunFinished):
            await copy.publish(recorded.subject, await log.body(recorded.seq), recorded.envelope.id)
    return copy


def guarded(on_breach: str = "pause", *, max_rollbacks: int = 3, **bounds: float) -> Config:
    guards = msgspec.structs.replace(GUARDS, on_breach=on_breach, max_rollbacks=max_rollbacks, **bounds)
    return msgspec.structs.replace(config(num_steps=1), guards=guards)


def shifted(events: list[Event], by: float) -> list[Event]:
    """The same replies, as an engine with other weights would have reported them."""
    return [
        msgspec.structs.replace(e, logprobs=(unpack_logprobs(e.logprobs) + by).astype("<f4").tobytes())
        if isinstance(e, CallCompleted)
        else e
        for e in events
    ]


BREACHES = [
    pytest.param("logprob_gap_mean", {}, 3.0, id="mean gap"),
    pytest.param("logprob_gap_max", {"max_logprob_gap_mean": 99.0, "max_kl": 99.0}, 25.0, id="largest gap"),
    pytest.param("kl", {"max_kl": 1e-6}, 0.0, id="kl"),
    pytest.param("entropy", {"min_entropy": 50.0}, 0.0, id="entropy"),
    pytest.param("non_finite", {}, 0.0, id="a poisoned weight"),
]


@pytest.mark.parametrize(("guard", "bounds", "shift"), BREACHES)
def test_a_breach_commits_nothing_and_pauses_with_its_reason(
    tmp_path: Path, guard: str, bounds: dict[str, float], shift: float
) -> None:
    if guard == "non_finite":
        tensors = tiny_tensors(tiny_config())
        tensors["model.norm.weight"].fill_(3e38)
        save_policy(tmp_path / "policy", tiny_config(), tensors)
    run = Run(tmp_path, guarded(**bounds))

    async def play() -> None:
        await write(run.log, *STARTED, *shifted(groups(0, 1), shift), *departure("c0", 2, 0))
        await asyncio.wait_for(run.trainer(), 120)
        (rejected,) = await events_of(run.log, StepRejected)
        assert (rejected.step, rejected.guard, rejected.action) == (1, guard, "pause")
        assert (await events_of(run.log, PolicyRolledBack))[0].to_version == 0
        (finished,) = await events_of(run.log, RunFinished)
        assert finished.reason == "paused"
        assert finished.detail == f"step 1 rejected: {rejected.detail}"
        assert not await events_of(run.log, StepCompleted)
        assert not (tmp_path / "checkpoints").exists()

    asyncio.run(play())


async def one_step_after(run: Run, *events: Event) -> StepCompleted:
    """What a trainer that goes on makes of fresh groups."""

    async def work() -> None:
        await write(run.log, RunResumed(versions=()), CellLost(cell="c0", reason="x"), joined())
        await write(run.log, *arrival("c0", 5, 0), *events, *departure("c0", 6, 0))
        await until(run.log, StepCompleted)

    await run.during(work)
    (step,) = await events_of(run.log, StepCompleted)
    return step


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> StepCompleted:
    """The step that groups 2 and 3 make when nothing came before them."""
    run = Run(tmp_path_factory.mktemp("healthy"), guarded())

    async def play() -> StepCompleted:
        await write(run.log, *STARTED)
        return await one_step_after(run, *groups(2, 3))

    return asyncio.run(play())


def test_a_paused_run_goes_on_as_if_the_rejected_step_had_not_been(tmp_path: Path, healthy: StepCompleted) -> None:
    run = Run(tmp_path, guarded())

    async def play() -> None:
        await write(run.log, *STARTED, *shifted(groups(0, 1), 3.0), *departure("c0", 2, 0))
        await asyncio.wait_for(run.trainer(), 120)
        step = await one_step_after(run, *groups(2, 3))
        assert (step.step, step.weights_digest) == (1, healthy.weights_digest)
        cohorts = [(c.step, c.groups) for c in await events_of(run.log, CohortConsumed)]
        assert cohorts == [(1, ("g0000", "g0001")), (1, ("g0002", "g0003"))]

    asyncio.run(play())


@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_a_rollback_restores_what_a_step_changed_before_it_was_refused(tmp_path: Path, num_minibatches: int) -> None:
    """With two mini-batches the second is refused: the first one's update has been made by then."""
    settings = guarded("rollback")
    trainer = msgspec.structs.replace(settings.trainer, num_minibatches=num_minibatches)
    run = Run(tmp_path, msgspec.structs.replace(settings, trainer=trainer))
    twin = Run(tmp_path / "twin", run.config)

    async def work() -> None:
        await until(run.log, PolicyRolledBack)
        renewed = CellLeased(cell="c0", role="train", epoch=3)
        await write(run.log, *groups(2, 3), renewed)
        await write(run.log, CellSwitched(cell="c0", role="train", epoch=3, version=0, phases=()))
        await until(run.log, PolicyPublished, 2)

    async def play() -> None:
        await write(run.log, *STARTED, *groups(0), *shifted(groups(1), 3.0), *departure("c0", 2, 0))
        await run.during(work)
        (rejected,) = await events_of(run.log, StepRejected)
        # After an update of the same step the gap is no fault by itself, but such a distance is one of KL.
        guard = "logprob_gap_mean" if num_minibatches == 1 else "kl"
        assert (rejected.guard, rejected.action) == (guard, "rollback")
        (step,) = await events_of(run.log, StepCompleted)
        await write(twin.log, *STARTED)
        assert step.weights_digest == (await one_step_after(twin, *groups(2, 3))).weights_digest
        assert [e.reason for e in await events_of(run.log, RunFinished)] == ["interrupted"]

    asyncio.run(play())


def test_rollbacks_in_a_row_end_in_a_pause(tmp_path: Path) -> None:
    run = Run(tmp_path, guarded("rollback", max_rollbacks=1))

    async def play() -> None:
        await write(run.log, *STARTED, *shifted(groups(0, 1, 2, 3), 3.0), *departure("c0", 2, 0))
        task = asyncio.create_task(run.trainer())
        await until(run.log, PolicyRolledBack)
        renewed = CellLeased(cell="c0", role="train", epoch=3)
        await write(run.log, renewed, CellSwitched(cell="c0", role="train", epoch=3, version=0, phases=()))
        await asyncio.wait_for(task, 120)
        assert [e.action for e in await events_of(run.log, StepRejected)] == ["rollback", "pause"]
        assert [e.reason for e in await events_of(run.log, RunFinished)] == ["paused"]

    asyncio.run(play())


def test_an_update_that_ruins_the_weights_is_taken_back(tmp_path: Path) -> None:
    """Decay turns a huge weight that no token uses into an infinite one; the gradient says nothing of it."""
    settings = guarded()
    ruinous = msgspec.structs.replace(settings.trainer, weight_decay=1e5)
    used = {i for e in groups(0, 1) if isinstance(e, CallStarted) for i in unpack_ids(e.context)}
    used |= {i for e in groups(0, 1) if isinstance(e, CallCompleted) for i in unpack_ids(e.sampled)}
    shape = tiny_config(tie_word_embeddings=False)
    tensors = tiny_tensors(shape)
    tensors["model.embed_tokens.weight"][min(set(range(VOCAB)) - used)] = 3e38
    save_policy(tmp_path / "policy", shape, tensors)
    run = Run(tmp_path, msgspec.structs.replace(settings, trainer=ruinous))

    async def play() -> None:
        await write(run.log, *STARTED, *groups(0, 1), *departure("c0", 2, 0))
        await asyncio.wait_for(run.trainer(), 120)
        (rejected,) = await events_of(run.log, StepRejected)
        assert rejected.guard == "non_finite" and "weights" in rejected.detail
        assert not await events_of(run.log, StepCompleted)
        assert (await run.manifest()).version == 0

    asyncio.run(play())


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("kind", [StepRejected, PolicyRolledBack, RunFinished])
def test_a_crash_during_a_rejection_records_nothing_twice(tmp_path: Path, kind: type[Event], moment: str) -> None:
    run = Run(tmp_path, guarded())
    run.log.crash_at = (kind, moment)

    async def play() -> None:
        await write(run.log, *STARTED, *shifted(groups(0, 1), 3.0), *departure("c0", 2, 0))
        with pytest.raises(Crash):
            await asyncio.wait_for(run.trainer(), 120)
        await asyncio.wait_for(run.trainer(), 120)
        for each in (CohortConsumed, StepRejected, PolicyRolledBack, RunFinished):
            assert len(await events_of(run.log, each)) == 1

    asyncio.run(play())


def test_other_weights_than_the_log_tells_of_are_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, config())

    async def play() -> None:
        await write(run.log, *STARTED, *groups(0, 1), *departure("c0", 2, 0))

        async def one_step() -> None:
            await until(run.log, PolicyPublished, 2)

        await run.during(one_step)
        (step,) = await events_of(run.log, StepCompleted)
        other = CrashingLog()
        await write(other, msgspec.structs.replace(step, weights_digest="another"))
        run.log = other
        with pytest.raises(PolicyError, match="restore the run's own checkpoints"):
            await asyncio.wait_for(run.trainer(), 120)

    asyncio.run(play())


def test_another_batch_than_the_one_begun_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, config())

    async def play() -> None:
        await write(run.log, *STARTED, *groups(0, 1), *departure("c0", 2, 0))
        cohort = CohortConsumed(
            step=1, groups=("g0000", "g0001"), executions=(), digest="another", through_seq=await run.log.last_seq()
        )
        await write(run.log, cohort)
        with pytest.raises(FoldError, match="cohort of step 1"):
            await asyncio.wait_for(run.trainer(), 120)

    asyncio.run(play())


def test_without_the_role_it_does_nothing_and_costs_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, config())

    async def work() -> None:
        await until(run.log, PolicyPublished)
        await write(run.log, *ARRIVED, *groups(0, 1))
        for _ in range(40):  # what began before may still be on its way
            before = time.process_time()
            await asyncio.sleep(0.5)
            if (spent_s := time.process_time() - before) < 0.1:
                return
        raise AssertionError(f"{spent_s} CPU seconds in half a second")

    async def play() -> None:
        await run.during(work)
        assert not await events_of(run.log, CohortConsumed)

    asyncio.run(play())
