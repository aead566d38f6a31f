"""One step over several cells: real trainers and the real transfer engine, over a log in memory."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytest.importorskip("mooncake.engine")

import test_claims  # noqa: E402
from cell_logs import arrival, departure, joined  # noqa: E402
from test_trainer_loop import Crash, config, events_of, groups, write  # noqa: E402
from tiny_policies import write_tiny_policy  # noqa: E402

from gyre.config import CellsConfig, Config  # noqa: E402
from gyre.errors import TransferError  # noqa: E402
from gyre.events.codec import decode  # noqa: E402
from gyre.events.log import Ack, Item, open_writer  # noqa: E402
from gyre.events.memory import MemoryLog  # noqa: E402
from gyre.events.types import (  # noqa: E402
    BatchAssembled,
    CellLost,
    ClaimsReturned,
    Event,
    GradientOffered,
    MicrostepAccepted,
    MicrostepClaimed,
    PolicyPublished,
    RunFinished,
    RunStarted,
    StepCompleted,
    WeightsExposed,
)
from gyre.workers import megatron, satellite  # noqa: E402
from gyre.workers.claims import Claims  # noqa: E402
from gyre.workers.gathering import Exchange, Gathering  # noqa: E402
from gyre.workers.retrain import retrain  # noqa: E402
from gyre.workers.satellite import run_satellite  # noqa: E402
from gyre.workers.step_metrics import MicrostepResult  # noqa: E402
from gyre.workers.trainer_loop import run_trainer  # noqa: E402

pytestmark = pytest.mark.stack
NUM_OWN = 2
"""Micro-steps that the core claims before it lets the satellites have the rest."""


async def until(log: MemoryLog, kind: type[Any]) -> Any:
    """Its first event; `play` has the only limit of time."""
    async for recorded in log.read(1):
        if isinstance(recorded.event, kind):
            return recorded.event


class SharingLog(MemoryLog):
    """Holds back claims of cells that have theirs already, until every satellite that is awaited has claimed too."""

    def __init__(self) -> None:
        super().__init__("r")
        self.awaited: set[str] = set()
        self.taken: set[int] = set()
        """Micro-steps that were claimed: a later claim of one is void."""
        self.num_microsteps = 0
        self.num_taken = Counter[str]()
        """By cell."""
        self.crash: Callable[[Event], bool] = lambda event: False
        self.is_stored = False
        """Whether it is when the crash comes."""
        self.claimed = asyncio.Condition()

    async def publish_all(self, items: Sequence[Item], *, expect_last: int | None = None) -> Ack:
        event = decode(items[0].body).event
        is_end = self.crash(event)
        if is_end:
            self.crash = lambda event: False
            if not self.is_stored:
                raise Crash
        if isinstance(event, BatchAssembled):
            self.num_microsteps = event.num_microsteps
        if isinstance(event, MicrostepClaimed):
            cell, microstep, share = event.cell, event.microstep, NUM_OWN if event.cell == "c0" else 1
            async with self.claimed:
                await self.claimed.wait_for(
                    lambda: not self.awaited or self.num_taken[cell] < share or microstep in self.taken
                )
                if microstep not in self.taken:
                    self.awaited.discard(cell)
                    self.num_taken[cell] += 1
                self.taken.add(microstep)
                self.claimed.notify_all()
        ack = await super().publish_all(items, expect_last=expect_last)
        if is_end:
            raise Crash
        return ack


class Cells:
    """A run directory, a policy, a log, and the trainers of K cells."""

    def __init__(self, path: Path, count: int, **trainer: Any) -> None:
        settings = config(num_steps=1)
        changed = msgspec.structs.replace(settings.trainer, max_tokens_per_microstep=32, **trainer)
        cells = CellsConfig(count=count, claim_deadline_s=30)
        self.config: Config = msgspec.structs.replace(settings, trainer=changed, cells=cells)
        self.path, self.policy, self.log = path, path / "policy", SharingLog()
        self.tasks: dict[str, asyncio.Task[None]] = {}
        write_tiny_policy(self.policy)

    def start(self, cell: str) -> None:
        async def live() -> None:
            writer = await open_writer(self.log, f"trainer-{cell}", time.time_ns)
            mine: Any = {"cell_id": cell, "run_dir": self.path, "policy_dir": self.policy}
            if cell == "c0":
                await run_trainer(self.log, writer, self.config, **mine)
            else:
                await run_satellite(self.log, writer, self.config, **mine)

        self.tasks[cell] = asyncio.create_task(live())

    async def end(self, cell: str) -> None:
        self.tasks[cell].cancel()
        await asyncio.gather(self.tasks[cell], return_exceptions=True)

    async def begin(self) -> None:
        """All trainers are there, and the core has published."""
        names = self.config.cells.names
        self.log.awaited = set(names[1:])
        started = RunStarted(
            run="r", config=msgspec.json.encode(self.config).decode(), config_digest="", seed=1, versions=(),
            num_threads=1,
        )  # fmt: skip
        await write(self.log, started)
        for name in names:
            self.start(name)
        await until(self.log, PolicyPublished)
        for index, name in enumerate(names):
            digest = (await events_of(self.log, PolicyPublished))[0].digest
            await write(self.log, msgspec.structs.replace(joined(name, index), model_digest=self.model_digest()))
            await write(self.log, *arrival(name, 1, 0))
            assert digest
        await write(self.log, *groups(0, 1))
        for name in names[1:]:
            await write(self.log, *departure(name, 2, 0))

    def model_digest(self) -> str:
        from gyre.workers.cell import model_digest

        return model_digest(self.policy)

    async def take(self) -> StepCompleted:
        """The core trains; the step that comes of it."""
        await write(self.log, *departure("c0", 2, 0))
        return await self.finish()

    async def finish(self) -> StepCompleted:
        done = asyncio.create_task(until(self.log, StepCompleted))
        await asyncio.wait((done, *self.tasks.values()), return_when=asyncio.FIRST_COMPLETED)
        for task in self.tasks.values():
            if task.done() and not task.cancelled():
                task.result()
        step: StepCompleted = await done
        await write(self.log, RunFinished(reason="interrupted"))
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        return step

    async def check(self, *cells: str) -> list[MicrostepAccepted]:
        """Every micro-step was counted once, by these cells, and the log alone gives the same weights."""
        found = await events_of(self.log, MicrostepAccepted)
        indices = sorted(a.microstep for a in found)
        assert indices == list(range(len(indices))) and len(indices) >= 4
        assert {a.cell for a in found} == set(cells)
        recorded = [r async for r in self.log.read(1, until=await self.log.last_seq())]
        offers = {r.seq: r.event for r in recorded if isinstance(r.event, GradientOffered)}
        for event, cause in ((r.event, r.envelope.cause) for r in recorded):
            if isinstance(event, MicrostepAccepted) and event.cell != "c0":
                assert event.microstep in offers[cause].microsteps, "it was added as it came, not computed again"
        told: list[str] = []
        assert await retrain(self.log, self.policy, versions={}, show=told.append) == 1
        if len(cells) > 1:
            what, _, apart = told[-1].partition(" as of one within ")
            assert what.endswith(f"gradient of {len(cells)} cells") and float(apart) < 1e-5
        return found


@pytest.fixture(scope="module", autouse=True)
def _groups() -> None:
    """Process groups are of the process: all trainers of these tests share them."""
    megatron.start_process_group(1, 1)


def play(case: Any) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(280):
            return await case

    return asyncio.run(limited())


def one_cell(path: Path, **trainer: Any) -> StepCompleted:
    async def case() -> StepCompleted:
        cells = Cells(path, 1, **trainer)
        await cells.begin()
        step = await cells.take()
        assert not await events_of(cells.log, WeightsExposed)
        return step

    step: StepCompleted = play(case())
    return step


@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_the_gradients_of_several_cells_equal_those_of_one_on_the_same_batch(
    tmp_path: Path, num_minibatches: int
) -> None:
    alone = one_cell(tmp_path / "alone", num_minibatches=num_minibatches)

    async def case() -> None:
        cells = Cells(tmp_path / "cells", 3, num_minibatches=num_minibatches)
        await cells.begin()
        step = await cells.take()
        found = await cells.check("c0", "c1", "c2")
        assert len(await events_of(cells.log, WeightsExposed)) == num_minibatches
        order = [a.cell for a in found]
        if num_minibatches == 1:
            assert order == sorted(order), "cells are added in their fixed order"
        for name in ("loss", "grad_norm", "entropy", "kl", "logprob_gap_mean"):
            assert getattr(step, name) == pytest.approx(getattr(alone, name), rel=1e-5, abs=1e-7), name
        assert (step.num_tokens, step.num_targets) == (alone.num_tokens, alone.num_targets)

    play(case())


def test_the_claims_of_a_satellite_that_dies_return_before_the_commit(tmp_path: Path) -> None:
    async def case() -> None:
        cells = Cells(tmp_path, 3)
        await cells.begin()
        # c1 ends with claims and no gradient; its cell says so a little later.
        cells.log.crash = lambda event: isinstance(event, GradientOffered) and event.cell == "c1"
        await write(cells.log, *departure("c0", 2, 0))
        with pytest.raises(Crash):
            await cells.tasks["c1"]
        del cells.tasks["c1"]
        assert any(c.cell == "c1" for c in await events_of(cells.log, MicrostepClaimed))
        await write(cells.log, CellLost(cell="c1", reason="it died"))
        await cells.finish()
        found = await cells.check("c0", "c2")
        assert len({a.microstep for a in found}) == len(found)

    play(case())


def test_a_satellites_trainer_that_is_started_again_computes_what_its_cell_holds(tmp_path: Path) -> None:
    async def case() -> None:
        cells = Cells(tmp_path, 2)
        await cells.begin()
        cells.log.crash = lambda event: isinstance(event, GradientOffered)
        await write(cells.log, *departure("c0", 2, 0))
        with pytest.raises(Crash):
            await cells.tasks["c1"]
        cells.start("c1")
        await cells.finish()
        await cells.check("c0", "c1")

    play(case())


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_core_that_dies_takes_the_step_again_with_what_satellites_computed(tmp_path: Path, is_stored: bool) -> None:
    """It ends right before, or after, a satellite's gradient is accepted."""

    async def case() -> None:
        cells = Cells(tmp_path, 2)
        await cells.begin()
        cells.log.crash = lambda event: isinstance(event, MicrostepAccepted) and event.cell == "c1"
        cells.log.is_stored = is_stored
        await write(cells.log, *departure("c0", 2, 0))
        with pytest.raises(Crash):
            await cells.tasks["c0"]
        cells.start("c0")
        await cells.finish()
        await cells.check("c0", "c1")
        assert len(await events_of(cells.log, WeightsExposed)) == 2 - is_stored

    play(case())


def test_a_satellite_that_does_not_come_back_loses_its_claims_at_the_deadline(tmp_path: Path) -> None:
    """It ends as soon as it has claimed: at its gradient it may be later than the deadline."""

    async def case() -> None:
        cells = Cells(tmp_path, 2)
        short = msgspec.structs.replace(cells.config.cells, claim_deadline_s=1.0)
        cells.config = msgspec.structs.replace(cells.config, cells=short)
        await cells.begin()
        taken, cells.log.is_stored = cells.log.taken, True
        cells.log.crash = lambda e: isinstance(e, MicrostepClaimed) and e.cell == "c1" and e.microstep not in taken
        await write(cells.log, *departure("c0", 2, 0))
        with pytest.raises(Crash):
            await cells.tasks["c1"]
        del cells.tasks["c1"]
        await cells.finish()
        await cells.check("c0")
        (returned,) = await events_of(cells.log, ClaimsReturned)
        assert (returned.cell, returned.reason) == ("c1", "no gradient in 1 s")

    play(case())


def test_claims_that_go_back_at_the_deadline_itself_are_not_returned_again() -> None:
    class AtOnce(Gathering):
        """The cell is lost after the time was over, and before who waited for it looks."""

        async def _followed(self, wait: Any) -> Any:
            try:
                return await super()._followed(wait)
            except asyncio.CancelledError:
                self.claims = test_claims.append(self.claims, CellLost(cell="c1", reason="it died"))
                raise

    claims = Claims()
    for event in (*test_claims.BEGUN, test_claims.claimed("c1", 0)):
        claims = test_claims.append(claims, event)

    async def append(*events: Event, cause: int) -> int:
        raise AssertionError(events)

    async def case() -> None:
        cell, nothing = claims.cluster.cells[0], cast(Any, None)
        gathering = AtOnce(
            MemoryLog("r"), append, nothing, cell=cell, trainer=nothing, claims=claims, exchange=None, deadline_s=0.01
        )
        async with gathering:
            await gathering._wait(1, {0: ()})
        assert not gathering.claims.held

    play(case())


def test_a_gradient_that_cannot_be_read_is_asked_for_once_and_its_claims_go_back() -> None:
    class Gone:
        num_pulls = 0

        def pull(self, *_: object) -> None:
            self.num_pulls += 1
            raise TransferError("nobody is there")

    claims, sink, written = Claims(), Gone(), list[Event]()
    begun = (*test_claims.BEGUN, test_claims.exposed(), *(test_claims.claimed("c1", m) for m in test_claims.ALL))
    for event in (*begun, test_claims.offered("c1", *test_claims.ALL)):
        claims = test_claims.append(claims, event)

    async def append(*events: Event, cause: int) -> int:
        written.extend(events)
        return claims.seq

    async def at_once(work: Callable[[], Any]) -> Any:
        return work()

    async def case() -> None:
        cell, exchange = claims.cluster.cells[0], Exchange(source=cast(Any, None), sink=cast(Any, sink))
        gathering = Gathering(
            MemoryLog("r"), append, at_once, cell=cell, trainer=cast(Any, None), claims=claims, exchange=exchange,
            deadline_s=0.01,
        )  # fmt: skip
        async with gathering:
            for _ in range(2):
                await gathering._advance(1, dict.fromkeys(test_claims.ALL, ()))

    play(case())
    (returned,) = written
    assert isinstance(returned, ClaimsReturned) and (returned.cell, returned.microsteps) == ("c1", test_claims.ALL)
    assert sink.num_pulls == 1


def test_a_slow_satellite_does_less_and_holds_nobody_up_for_more_than_a_microstep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So slow that the core has claimed all the rest by then."""
    logs: list[SharingLog] = []

    class SlowTrainer(satellite.Trainer):
        def gradients(self, microstep: Any) -> MicrostepResult:
            while len(logs[0].taken) < logs[0].num_microsteps:
                time.sleep(0.02)
            return super().gradients(microstep)

    monkeypatch.setattr(satellite, "Trainer", SlowTrainer)

    async def case() -> None:
        cells = Cells(tmp_path, 2)
        logs.append(cells.log)
        await cells.begin()
        await cells.take()
        found = await cells.check("c0", "c1")
        assert sum(a.cell == "c1" for a in found) == 1

    play(case())
