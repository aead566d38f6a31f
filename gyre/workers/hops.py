"""Shell. Does what `roles.py` says is next for a cell, and records it.

Invariants: a hop is done, then recorded, then read back, and only then the next one is looked for; a role is
leased by compare-and-set against the cell's subject; every switch ends arrived or rolled back by its deadline.

Consumes: the log, and whether the engine is up. Produces: the cell's events. Waits for: a change of its own
roles, or of its engine. Is unblocked by: the deadline of a switch, a cancel.

A cell whose engine died in rollout is lost and joins again with a new one, under a new epoch. In training
nobody needs the engine: it is started again, and must be there by the way back.
"""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from gyre.config import Config
from gyre.errors import ConfigError, ConflictError, EngineError, ProcessError
from gyre.events.codec import Recorded
from gyre.events.follow import catch_up
from gyre.events.log import Log, Writer
from gyre.events.types import (
    Aggregate,
    CellFenced,
    CellJoined,
    CellLeased,
    CellLost,
    CellSwitched,
    EngineReleased,
    Event,
    Phase,
    RunFinished,
    SwitchRolledBack,
    WeightsPulled,
)
from gyre.workers.kv_mover import KvMover
from gyre.workers.laps import Laps
from gyre.workers.manifest import WeightManifest
from gyre.workers.memory import EngineMemory, Tenancy
from gyre.workers.roles import CellRoles, Hop, evolve, next_hop

AGGREGATES: tuple[Aggregate, ...] = ("run", "cell", "scheduler", "policy")
"""What a cell's role depends on: not what executions do."""
POLL_S = 0.1
RELEASE_S = 30.0
"""After a rollback: an engine that hangs is not waited for."""


class Pulled(Protocol):
    """`PullReport` of the engine."""

    @property
    def version(self) -> int: ...
    @property
    def digest(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def seconds(self) -> dict[str, float]: ...


class CellEngine(Protocol):
    """What a cell needs of its engine; `SglangEngine` has it. Failures are EngineErrors."""

    base_url: str

    async def wait_ready(self, timeout_s: float) -> None: ...
    async def idle(self) -> bool: ...
    async def release(self) -> None: ...
    async def restore(self) -> None: ...
    async def pull_weights(self, manifest: WeightManifest) -> Pulled: ...


class Hops:
    """The role of one cell, as long as its process lives."""

    def __init__(
        self,
        log: Log,
        writer: Writer,
        config: Config,
        *,
        cell_id: str,
        index: int,
        run_dir: Path,
        model_digest: str,
        engine: CellEngine,
        clock: Callable[[], float],
        mover: KvMover | None = None,
    ) -> None:
        """`mover`: of KV, where engines keep it in a store."""
        self.mover = mover
        self.log, self.writer, self.config = log, writer, config
        self.roles = CellRoles(cell=cell_id)
        self.index, self.run_dir, self.model_digest = index, run_dir, model_digest
        self.engine, self.clock = engine, clock
        self.memory = EngineMemory(Tenancy(run_dir, cell_id), engine)
        self.run_model = ""
        """`model_digest` of the first cell that joined: every other has the same."""
        self.finished = asyncio.Event()
        self.changed = asyncio.Event()
        self.engine_up = asyncio.Event()
        self.appended_seq = 0
        """The last event of this process; nothing is looked at before it is read back."""
        self.num_arrivals = 0
        self.num_engines = 0
        """Engines that were ready so far: the number of the newest."""
        self.loaded_engine = 0
        """Number of the engine that holds pulled weights; 0 for none."""
        self.laps = Laps(clock)
        """Of the last switch."""

    async def catch_up(self) -> None:
        """Fold what is there."""
        if await catch_up(self.log, self._fold):
            self.finished.set()

    def _fold(self, recorded: Recorded) -> None:
        if self.mover is not None:
            self.mover.evolve(recorded)
        self.roles = evolve(self.roles, recorded)
        if isinstance(recorded.event, CellJoined):
            self.run_model = self.run_model or recorded.event.model_digest

    async def follow(self) -> None:
        async for recorded in self.log.read(self.roles.seq + 1, only=AGGREGATES if self.mover is None else ()):
            before = self.roles
            self._fold(recorded)
            if isinstance(recorded.event, RunFinished):
                self.finished.set()
            is_told = msgspec.structs.replace(before, seq=recorded.seq) != self.roles
            if is_told:
                self.changed.set()

    async def append(self, event: Event, *, cause: int = 0, expect_last: int | None = None) -> None:
        self.appended_seq = await self.writer.append(event, cause=cause, expect_last=expect_last)
        self.changed.set()

    def engine_started(self) -> None:
        self.num_engines += 1
        self.engine_up.set()
        self.changed.set()

    def engine_ended(self) -> None:
        self.engine_up.clear()
        self.changed.set()

    async def obey(self) -> None:
        """Take one hop after the other, for ever."""
        while True:
            self.changed.clear()
            hop = next_hop(self.roles)
            if self.roles.seq < self.appended_seq:
                await self.changed.wait()
            elif self._has_lost_engine():
                await self.append(CellLost(cell=self.roles.cell, reason="its engine ended"))
            elif hop is None:
                await self.changed.wait()
            elif hop.kind == "join":
                await self._join()
            elif hop.kind == "lease":
                await self._lease(hop)
            elif hop.kind == "pull" and self.roles.lease is None:
                await self._refresh(hop)
            else:
                await self._take(hop)

    def _has_lost_engine(self) -> bool:
        """The cell serves, or may say so next, and the engine that pulled its weights is gone."""
        roles = self.roles
        if not roles.is_joined or roles.role == "train" or (roles.lease is not None and roles.lease.role == "train"):
            return False
        has_pulled = roles.role == "rollout" or (roles.lease is not None and roles.lease.pulled_seq > 0)
        return not self.engine_up.is_set() or (has_pulled and self.num_engines != self.loaded_engine)

    async def _join(self) -> None:
        """With an engine that is ready; it serves the checkpoint, and no call until weights were pulled.

        Raises ConfigError when its model is another than that of the run.
        """
        await self.engine_up.wait()
        self._refuse_stranger()
        joined = CellJoined(
            cell=self.roles.cell,
            index=self.index,
            capacity=self.config.engine.capacity,
            engine_url=self.engine.base_url,
            model_digest=self.model_digest,
            standalone=self.roles.cell in self.config.cells.standalone,
        )
        await self.append(joined)

    def _refuse_stranger(self) -> None:
        """Before it joins, and after: another cell may have been first."""
        if self.run_model not in ("", self.model_digest):
            raise ConfigError(
                f"cell {self.roles.cell}: its policy's config.json has digest {self.model_digest[:12]}, the run's "
                f"cells have {self.run_model[:12]}; give it the policy that the run began with"
            )

    async def _lease(self, hop: Hop) -> None:
        """Compare-and-set: a command that came first is read first."""
        self._refuse_stranger()
        self.laps = Laps(self.clock)
        lease = CellLeased(cell=self.roles.cell, role=hop.role, epoch=hop.epoch)
        try:
            await self.append(lease, cause=hop.cause, expect_last=self.roles.subject_seq)
        except ConflictError:
            await self.changed.wait()

    async def _take(self, hop: Hop) -> None:
        """One hop of a switch. The deadline is for its work, never for an append, which may have happened."""
        try:
            async with asyncio.timeout(self._rest_s()):
                event = await self._work(hop)
        except TimeoutError:
            event = self._rolled_back(hop)
            if self.roles.role == "train":  # it trains on, and what the engine has taken by now is the trainer's
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RELEASE_S):
                        await self._release()
                self.memory.forget()
        if event is not None:
            await self.append(event, cause=hop.cause)

    async def _work(self, hop: Hop) -> Event | None:
        cell = self.roles.cell
        match hop.kind:
            case "fence":
                return CellFenced(cell=cell, epoch=hop.epoch)
            case "release":
                self.laps.end("fence")
                await self._settle_kv(hop)
                await self._release()
                spent_s = sum(phase.seconds for phase in self.laps.phases if phase.name in ("drain", "release"))
                return EngineReleased(cell=cell, epoch=hop.epoch, seconds=spent_s)
            case "pull":
                return await self._pull(hop)
            case "arrive":
                self.num_arrivals += 1
                return CellSwitched(
                    cell=cell, role=hop.role, epoch=hop.epoch, version=hop.version, phases=self.laps.phases
                )
        await self.changed.wait()  # await_reroute, await_publish
        return None

    def _rest_s(self) -> float | None:
        """Until the deadline of the switch; a first arrival has none, since there is no role to fall back to."""
        if self.roles.role is None:
            return None
        return max(0.0, self.config.scheduler.switch_deadline_s - self.laps.total_s())

    def _rolled_back(self, hop: Hop) -> Event:
        role = self.roles.role
        if role is None:
            raise ProcessError(f"cell {self.roles.cell}: {hop.kind} timed out before the cell had a role")
        reason = f"{hop.kind} of the switch to {hop.role} was not done in {self.config.scheduler.switch_deadline_s} s"
        return SwitchRolledBack(cell=self.roles.cell, role=role, epoch=hop.epoch, reason=reason)

    async def _settle_kv(self, hop: Hop) -> None:
        """Each session whose KV is here is moved or given up, one compare-and-set after the other."""
        mover, cell = self.mover, self.roles.cell
        if mover is None:
            return
        while sessions := mover.owners.unsettled(cell):
            event = await mover.decide(sessions[0], cell=cell, epoch=hop.epoch)
            # Shielded: a deadline must not leave open whether it was appended.
            append = self.append(event, cause=hop.cause, expect_last=self.roles.subject_seq)
            with contextlib.suppress(ConflictError):
                await asyncio.shield(asyncio.ensure_future(append))
            while self.roles.seq < self.appended_seq:
                self.changed.clear()
                await self.changed.wait()
        self.laps.end("kv")

    async def _release(self) -> None:
        """Wait until the engine is idle, then give its memory to the trainer. A dead engine holds none."""
        while self.engine_up.is_set():
            with contextlib.suppress(EngineError, TimeoutError):  # dying, or busy after all: look again
                if await self.engine.idle():
                    self.laps.end("drain")
                    self.loaded_engine = 0  # whatever comes of it, these weights do not count any more
                    await self.memory.let_go()
                    break
            await asyncio.sleep(POLL_S)
        self.memory.forget()
        self.laps.end("release")

    async def _pull(self, hop: Hop) -> WeightsPulled:
        """Have the memory back of the trainer, and pull what was published last, until it arrives whole."""
        while True:
            await self.engine_up.wait()
            engine, manifest = self.num_engines, self._manifest()
            if manifest is not None:
                await self.memory.tenancy.begin()  # a wait for the trainer, no part of the restore
                self.laps.end("wait")
                with contextlib.suppress(EngineError):  # it died, or the source did: both are started again
                    await self.memory.take()
                    self.laps.end("restore")
                    pulled = await self.engine.pull_weights(manifest)
                    break
            await asyncio.sleep(POLL_S)
        self.loaded_engine = engine
        event = self._pulled(hop, pulled)
        for phase in event.phases:
            self.laps.add(phase)
        return event

    async def _refresh(self, hop: Hop) -> None:
        """What was published while the cell serves: calls go on, with a pause. One try, since a command may come."""
        manifest = self._manifest()
        if manifest is not None:
            with contextlib.suppress(EngineError):  # it died, or the source did, or the version is not the newest
                await self.append(self._pulled(hop, await self.engine.pull_weights(manifest)), cause=hop.cause)
                return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await self.changed.wait()

    def _pulled(self, hop: Hop, pulled: Pulled) -> WeightsPulled:
        return WeightsPulled(
            cell=self.roles.cell,
            epoch=hop.epoch,
            version=pulled.version,
            digest=pulled.digest,
            num_bytes=pulled.num_bytes,
            phases=tuple(Phase(name=name, seconds=seconds) for name, seconds in pulled.seconds.items()),
        )

    def _manifest(self) -> WeightManifest | None:
        """The core's, once it is about the version that the log says is published."""
        if not self.roles.manifest:
            return None
        manifest = msgspec.json.decode(self.roles.manifest, type=WeightManifest)
        wanted = (self.roles.published_version, self.roles.published_digest)
        return manifest if (manifest.version, manifest.digest) == wanted else None
