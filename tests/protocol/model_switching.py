"""Pure. The switching protocol as a transition system: two schedulers, two cells, gateway, trainer, KV, one log.

What decides is the code that runs: `scheduler.decide`, `roles.next_hop`, `cluster`, `routes`, `steps`, `cohorts`,
`dispatch`, `kv_migration`. What is written here is what the shells around them do, one action at a time, and what can
go wrong between any two of those: a crash of each process, an append that lands late, twice, or after its sender died,
two leaders, a shard that arrives torn or is overwritten while it is pulled, a page of KV that is missing, a deadline, a
drain. Every fault takes one of the state's `faults`; what lands in which order, and who reads when, takes none.

Direction: World -> (name of an action, World), as many as there are.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from gyre.agents import routes
from gyre.agents.dispatch import Dispatch, executions_wanted, groups_wanted
from gyre.config import Config, EngineConfig, PipelineConfig, SchedulerConfig
from gyre.events.tokens import pack_ids
from gyre.events.types import (
    BatchAssembled,
    CallCompleted,
    CallCut,
    CallStarted,
    CellFenced,
    CellJoined,
    CellLeased,
    CellLost,
    CellSwitched,
    CohortConsumed,
    DrainLifted,
    DrainRequested,
    EngineReleased,
    Event,
    ExecutionDropped,
    ExecutionFinished,
    ExecutionScored,
    ExecutionStarted,
    GroupDispatched,
    MicrostepAccepted,
    PolicyPublished,
    SessionsRerouted,
    StepCompleted,
    StepRejected,
    SwitchRequested,
    SwitchRolledBack,
    TermStarted,
    Ticked,
    VersionSpan,
    WeightsPulled,
)
from gyre.projections import cluster as cluster_fold
from gyre.projections import cohorts as cohorts_fold
from gyre.projections.cluster import Cluster
from gyre.projections.cohorts import CohortState
from gyre.workers import kv_migration, roles, scheduler, steps
from gyre.workers.kv_migration import KvManifest, KvOwners, KvPage
from gyre.workers.roles import CellRoles, Hop, next_hop
from gyre.workers.scheduler import SchedulerState
from tests.protocol.model_logs import ROOT, Logs
from tests.protocol.model_rules import Audit, Seen, conserved, demand, judge

VOID, TORN = -1, -9
"""A shard that holds no weights, and one that holds nobody's."""
CELLS = ("c0", "c1")
SCHEDULERS = ("s0", "s1")
TOKENS = 1
"""That a call samples."""
TURNS = 2
"""Calls of an execution; in between it is in a tool, and its KV waits at its cell."""


class Sent(NamedTuple):
    """An append on its way. `sender` is empty when its process is gone, or no longer waits for it."""

    event: Event
    expect: int
    cause: int
    writer: str
    sender: str


class Actor(NamedTuple):
    """A process that folds the log: where it is, and the end of its own last append (-1: on its way)."""

    place: int = ROOT
    appended: int = 0
    term: int = 0
    """Of a scheduler that leads."""


class Engine(NamedTuple):
    """What a cell's engine holds, shard by shard, and a pull under way."""

    shards: tuple[int, int] = (VOID, VOID)
    shadow: tuple[int, ...] = ()
    wanted: int = VOID
    """Version of the manifest that is pulled; VOID: no pull."""


class Call(NamedTuple):
    """The call of a session, as the gateway has it, or its time in a tool. Its execution is the session."""

    session: str
    cell: str = ""
    """Where it stands; empty: it waits for a cell."""
    is_started: bool = False
    sampled: tuple[int, ...] = ()
    """Version of each token that the gateway has."""
    attempt: int = 0
    last: str = ""
    """Where it stood before."""
    turn: int = 0
    is_in_tool: bool = False


class World(NamedTuple):
    head: int = ROOT
    schedulers: tuple[Actor, ...] = (Actor(), Actor())
    cells: tuple[Actor, ...] = (Actor(), Actor())
    engines: tuple[Engine, ...] = (Engine(), Engine())
    gateway: Actor = Actor()
    calls: tuple[Call, ...] = ()
    trainer: Actor = Actor()
    buffer: tuple[int, int] = (0, 0)
    """The core's own weights, shard by shard, which others pull."""
    sent: tuple[Sent, ...] = ()
    faults: int = 0
    drains: int = 0
    ticks: int = 0
    """As many as there are still to come, in a model with a dwell."""
    clock: int = 1


def small_config(*, dwell_s: float = 0.0, policy: str = "waterlevel", num_steps: int = 2, lookahead: int = 1) -> Config:
    pipeline = PipelineConfig(
        num_steps=num_steps, groups_per_step=1, executions_per_group=2, lookahead=lookahead, max_staleness=1 + lookahead
    )
    return Config(
        engine=EngineConfig(capacity=2),
        pipeline=pipeline,
        scheduler=SchedulerConfig(policy=policy, dwell_s=dwell_s, tick_s=1.0),  # type: ignore[arg-type]
    )


_EXECUTION = (
    GroupDispatched, ExecutionStarted, ExecutionScored, ExecutionDropped, CohortConsumed, StepCompleted, StepRejected,
    PolicyPublished,
)  # fmt: skip
LAG = 3
"""Events that a reader may be behind; one more and it reads."""


class Model:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.logs = Logs(
            {
                "cluster": (Cluster(), cluster_fold.evolve),
                "c0": (CellRoles(cell="c0"), roles.evolve),
                "c1": (CellRoles(cell="c1"), roles.evolve),
                "routes": ({}, lambda state, recorded: routes.evolve(state, recorded.event, recorded.seq)),
                "steps": (steps.Steps(), steps.evolve),
                "kv": (KvOwners(), kv_migration.evolve),
            },
            {"executions": _EXECUTION},
        )
        self._audits: dict[int, Audit] = {ROOT: Audit()}
        self._cohorts: dict[tuple[Event, ...], CohortState] = {}
        self._dispatch: dict[tuple[Event, ...], Dispatch] = {}
        self._decisions: dict[int, tuple[Any, ...]] = {}

    def start(self, faults: int, *, drains: int = 0, ticks: int = 0) -> World:
        return World(faults=faults, drains=drains, ticks=ticks)

    # ------------------------------------------------------------ what folds say

    def cluster(self, node: int) -> Cluster:
        return self.logs.state("cluster", node)  # type: ignore[no-any-return]

    def roles(self, cell: str, node: int) -> CellRoles:
        return self.logs.state(cell, node)  # type: ignore[no-any-return]

    def owners(self, node: int) -> KvOwners:
        return self.logs.state("kv", node)  # type: ignore[no-any-return]

    def cohorts(self, node: int) -> CohortState:
        """Of the events that it looks at; read it only."""
        selected = self.logs.selected("executions", node)
        key = tuple(recorded.event for recorded in selected)
        found = self._cohorts.get(key)
        if found is None:
            found = cohorts_fold.CohortState()
            for recorded in selected:
                cohorts_fold.evolve(found, recorded)
            self._cohorts[key] = found
        return found

    def dispatch(self, node: int) -> Dispatch:
        selected = self.logs.selected("executions", node)
        key = tuple(recorded.event for recorded in selected)
        found = self._dispatch.get(key)
        if found is None:
            found = Dispatch()
            for recorded in selected:
                found.evolve(recorded)
            self._dispatch[key] = found
        return found

    def decisions(self, node: int) -> tuple[Any, ...]:
        """What the scheduler's core calls for at this prefix."""
        found = self._decisions.get(node)
        if found is None:
            found = self._decisions[node] = scheduler.decide(self.scheduler_state(node), self.config)
        return found

    def scheduler_state(self, node: int) -> SchedulerState:
        return SchedulerState(seq=self.logs.depth[node], cluster=self.cluster(node), cohorts=self.cohorts(node))

    def num_pending(self, node: int) -> int:
        return scheduler.read_inputs(self.scheduler_state(node), self.config).num_pending

    # ------------------------------------------------------------ the log

    def append(self, world: World, event: Event, writer: str, cause: int = ROOT) -> World:
        """One event lands. Raises Broken. `cause` is a node."""
        node, is_new = self.logs.append(world.head, event, writer, cause)
        if is_new:
            seen = Seen(
                before=self.cluster(world.head),
                after=self.cluster(node),
                owners=self.owners(world.head),
                at_cause=self.cluster(cause),
                num_pending=self.num_pending(cause),
            )
            self._audits[node] = judge(self._audits[world.head], self.logs.recorded[node - 1], seen, self.config)
        return self._hurry(world._replace(head=node))

    def _hurry(self, world: World) -> World:
        def read(actor: Actor) -> Actor:
            behind = self.logs.depth[world.head] - self.logs.depth[actor.place]
            return actor._replace(place=self.logs.after(actor.place, world.head)) if behind > LAG else actor

        return world._replace(
            schedulers=tuple(read(a) if a.term else a for a in world.schedulers),
            cells=tuple(map(read, world.cells)),
            gateway=read(world.gateway),
            trainer=read(world.trainer),
        )

    def _send(
        self, world: World, who: str, event: Event, *, cause: int = ROOT, expect: int = -1
    ) -> Iterator[tuple[str, World]]:
        """The ways of one append: it lands; it lands later while its sender waits; its sender dies meanwhile."""
        writer = who if who in SCHEDULERS else "trainer" if who == "trainer" else who
        name = f"{who} {type(event).__name__}"
        sent = Sent(event, expect, cause, writer, who)
        yield name, self._land(world, sent)
        if world.faults:
            less = world._replace(faults=world.faults - 1)
            waiting = self._with(less, who, self.actor(less, who)._replace(appended=-1))
            yield f"{name} late", waiting._replace(sent=_add(less.sent, sent))
            died = self._crash(less, who)
            yield f"{name} crash", died._replace(sent=_add(died.sent, sent._replace(sender="")))
            twice = self._land(less, sent)
            yield f"{name} twice", twice._replace(sent=_add(twice.sent, sent._replace(sender="")))

    def _land(self, world: World, sent: Sent) -> World:
        """The log takes it, or refuses it as a compare-and-set that lost; the sender goes on."""
        if sent.expect >= 0 and sent.expect != self.logs.last_of(sent.event, world.head):
            if sent.sender:
                actor = self.actor(world, sent.sender)
                world = self._with(
                    world, sent.sender, actor._replace(appended=0 if actor.appended < 0 else actor.appended)
                )
            return world
        world = self.append(world, sent.event, sent.writer, sent.cause)
        if sent.sender:
            actor = self.actor(world, sent.sender)
            term = sent.event.term if isinstance(sent.event, TermStarted) else actor.term
            world = self._with(world, sent.sender, actor._replace(appended=self.logs.depth[world.head], term=term))
        return world

    # ------------------------------------------------------------ actors

    def actor(self, world: World, who: str) -> Actor:
        if who in SCHEDULERS:
            return world.schedulers[SCHEDULERS.index(who)]
        if who in CELLS:
            return world.cells[CELLS.index(who)]
        return world.gateway if who == "gateway" else world.trainer

    def _with(self, world: World, who: str, actor: Actor) -> World:
        if who in SCHEDULERS:
            return world._replace(schedulers=_put(world.schedulers, SCHEDULERS.index(who), actor))
        if who in CELLS:
            return world._replace(cells=_put(world.cells, CELLS.index(who), actor))
        return world._replace(**{"gateway" if who == "gateway" else "trainer": actor})

    def is_free(self, actor: Actor) -> bool:
        """Nothing of its own is on its way, and it has read what it appended last."""
        return actor.appended >= 0 and self.logs.depth[actor.place] >= actor.appended

    def successors(self, world: World) -> Iterator[tuple[str, World]]:
        """Raises Broken as soon as one of them breaks an invariant."""
        for who in (*SCHEDULERS, *CELLS, "gateway", "trainer"):
            actor = self.actor(world, who)
            if actor.place != world.head and (who not in SCHEDULERS or actor.term):
                place = self.logs.after(actor.place, world.head)
                yield f"{who} reads", self._with(world, who, actor._replace(place=place))
        for sent in set(world.sent):
            rest = _remove(world.sent, sent)
            yield f"lands {type(sent.event).__name__}", self._land(world._replace(sent=rest), sent)
            if not sent.sender:
                yield f"lost {type(sent.event).__name__}", world._replace(sent=rest)
        for who in SCHEDULERS:
            yield from self._schedule(world, who)
        for who in CELLS:
            yield from self._cell(world, who)
        yield from self._gateway(world)
        yield from self._trainer(world)
        yield from self._dispatcher(world)
        yield from self._operator(world)
        if world.faults:
            less = world._replace(faults=world.faults - 1)
            for who in (*SCHEDULERS, *CELLS, "gateway", "trainer"):
                if who not in SCHEDULERS or self.actor(world, who).term:
                    yield f"{who} crashes", self._crash(less, who)

    def _crash(self, world: World, who: str) -> World:
        """Its process ends and another takes its place, which reads the log to its end first."""
        sent = tuple(item._replace(sender="") if item.sender == who else item for item in world.sent)
        world = world._replace(sent=tuple(sorted(sent, key=repr)))
        fresh = Actor(place=world.head)
        if who in SCHEDULERS:
            return self._with(world, who, Actor())
        if who == "trainer":
            step = self.logs.state("steps", world.head).step
            return self._with(world, who, fresh)._replace(buffer=(step, step))
        if who == "gateway":
            world = self._with(world, who, fresh)
            for call in world.calls:
                if call.is_started:  # orphans are cut first; their harnesses ask again
                    world = self.append(world, _end(call, cut=True), "gateway")
            calls = tuple(c._replace(cell="", is_started=False, sampled=(), attempt=c.attempt + 1) for c in world.calls)
            return world._replace(calls=calls)
        index = CELLS.index(who)
        world = self._with(world, who, fresh)._replace(engines=_put(world.engines, index, Engine()))
        world = world._replace(calls=tuple(_unseat(call, who) for call in world.calls))
        if self.roles(who, world.head).is_joined:
            world = self.append(world, CellLost(cell=who, reason="crash"), who)
            world = self._with(world, who, Actor(place=world.head))
        # The new trainer starts when the log says that the old one's cell was lost.
        return self._crash(world, "trainer") if who == "c0" else world

    # ------------------------------------------------------------ scheduler

    def _schedule(self, world: World, who: str) -> Iterator[tuple[str, World]]:
        actor = self.actor(world, who)
        if not actor.term:
            if actor.appended < 0:
                return
            # The second one only ever starts as a rival of the first: that is a fault.
            rival = any(other.term for other in world.schedulers)
            if rival and not world.faults:
                return
            less = world._replace(faults=world.faults - 1) if rival else world
            read = self._with(less, who, Actor(place=world.head))
            event = TermStarted(term=self.cluster(world.head).term + 1)
            yield from self._send(read, who, event, expect=self.logs.last_of(event, world.head))
            return
        cluster = self.cluster(actor.place)
        if cluster.term > actor.term:
            yield f"{who} is deposed", self._with(world, who, Actor())
            return
        if not self.is_free(actor):
            return
        open_ = cluster.decision
        if open_ is None:
            for event in self.decisions(actor.place):
                yield from self._send(world, who, event, cause=actor.place)
        elif not open_.commanded_seq:
            d = open_.decided
            command = SwitchRequested(cell=d.cell, role=d.role, epoch=d.epoch, term=actor.term)
            yield from self._send(world, who, command, cause=actor.place)
        if world.ticks and scheduler.is_dwelling(self.scheduler_state(actor.place), self.config):
            ahead = 100.0 if who == "s1" else 0.0
            tick = Ticked(term=actor.term, now_s=ahead + world.clock)
            after = world._replace(ticks=world.ticks - 1, clock=world.clock + 1)
            yield f"{who} ticks", self._land(after, Sent(tick, -1, ROOT, who, who))

    # ------------------------------------------------------------ cells

    def _cell(self, world: World, cell: str) -> Iterator[tuple[str, World]]:
        actor, state = self.actor(world, cell), self.roles(cell, self.actor(world, cell).place)
        if not self.is_free(actor):
            return
        if self._has_lost_engine(world, cell, state):
            yield from self._send(world, cell, CellLost(cell=cell, reason="its engine ended"))
            return
        yield from self._migrate(world, cell, state)
        hop = next_hop(state)
        if hop is None:
            return
        if hop.kind == "lease":
            event = CellLeased(cell=cell, role=hop.role, epoch=hop.epoch)
            yield from self._send(world, cell, event, expect=state.subject_seq)
            return
        if state.role is not None and state.lease is not None and world.faults:
            back = SwitchRolledBack(cell=cell, role=state.role, epoch=hop.epoch, reason="late")
            less = world._replace(faults=world.faults - 1)
            if state.role == "train":
                less = less._replace(engines=_put(less.engines, CELLS.index(cell), Engine()))
            yield from self._send(less, cell, back)
        yield from self._hop(world, cell, state, hop)

    def _has_lost_engine(self, world: World, cell: str, state: CellRoles) -> bool:
        """As `Hops._has_lost_engine`."""
        lease = state.lease
        if not state.is_joined or state.role == "train" or (lease is not None and lease.role == "train"):
            return False
        has_pulled = state.role == "rollout" or (lease is not None and lease.pulled_seq > 0)
        return has_pulled and world.engines[CELLS.index(cell)].shards == (VOID, VOID)

    def _hop(self, world: World, cell: str, state: CellRoles, hop: Hop) -> Iterator[tuple[str, World]]:
        index, epoch = CELLS.index(cell), hop.epoch
        match hop.kind:
            case "join":
                joined = CellJoined(
                    cell=cell, index=index, capacity=self.config.engine.capacity, engine_url=cell, model_digest="m"
                )
                yield from self._send(world, cell, joined)
            case "fence":
                yield from self._send(world, cell, CellFenced(cell=cell, epoch=epoch))
            case "release":
                if self._may_release(world, cell):
                    void = world._replace(engines=_put(world.engines, index, Engine()))
                    yield from self._send(void, cell, EngineReleased(cell=cell, epoch=epoch, seconds=0.0))
            case "pull":
                yield from self._pull(world, cell, hop)
            case "arrive":
                engine = world.engines[index]
                if hop.role == "rollout":
                    demand(
                        "whole", set(engine.shards) == {hop.version}, f"{cell} serves {engine.shards} as {hop.version}"
                    )
                else:
                    demand(
                        "one role", engine.shards == (VOID, VOID), f"{cell} trains with an engine that holds weights"
                    )
                arrived = CellSwitched(cell=cell, role=hop.role, epoch=epoch, version=hop.version, phases=())
                yield from self._send(world, cell, arrived)

    def _may_release(self, world: World, cell: str) -> bool:
        idle = all(call.cell != cell for call in world.calls)
        return idle and kv_migration.is_settled(self.owners(self.actor(world, cell).place), cell)

    def _migrate(self, world: World, cell: str, state: CellRoles) -> Iterator[tuple[str, World]]:
        """Once no call is at the cell, its sessions are moved or given up one by one."""
        lease = state.lease
        if lease is None or lease.role != "train" or not lease.rerouted_seq or lease.released_seq:
            return
        place = self.actor(world, cell).place
        owners = self.owners(place)
        open_to = [c.cell for c in self.cluster(place).cells if c.state == "SERVING" and c.cell != cell]
        for session in owners.unsettled(cell)[:1]:
            pages = (KvPage(key=f"{session}0", checksum="x"), KvPage(key=f"{session}1", checksum="y"))
            manifest = KvManifest(session=session, version=state.version, num_tokens=2, num_bytes=2, pages=pages)
            whole = {page.key: page.checksum for page in pages}
            tries = [whole] if open_to else [{}]
            if world.faults and open_to:
                tries += [{pages[0].key: "x"}, {**whole, pages[1].key: "torn"}]
            for found in tries:
                event = kv_migration.decide_move(
                    manifest, found, cell=cell, epoch=lease.epoch, target=open_to[0] if open_to else "",
                    session=session, num_tokens=2,
                )  # fmt: skip
                spent = world if found in (whole, {}) else world._replace(faults=world.faults - 1)
                yield from self._send(spent, cell, event, expect=state.subject_seq)

    def _pull(self, world: World, cell: str, hop: Hop) -> Iterator[tuple[str, World]]:
        """Shard by shard into the shadow; the flip is whole or not at all."""
        index = CELLS.index(cell)
        engine = world.engines[index]

        def then(engine: Engine) -> World:
            return world._replace(engines=_put(world.engines, index, engine))

        if engine.wanted == VOID:
            yield f"{cell} begins to pull", then(Engine(shards=engine.shards, wanted=hop.version))
        elif len(engine.shadow) < 2:
            shard = world.buffer[len(engine.shadow)]
            yield f"{cell} pulls", then(engine._replace(shadow=(*engine.shadow, shard)))
            if world.faults:
                torn = then(engine._replace(shadow=(*engine.shadow, TORN)))
                yield f"{cell} pulls a torn shard", torn._replace(faults=world.faults - 1)
        elif self.verifies(engine):
            flipped = then(Engine(shards=(engine.shadow[0], engine.shadow[1])))
            pulled = WeightsPulled(cell=cell, epoch=hop.epoch, version=engine.wanted, digest="", num_bytes=2, phases=())
            yield from self._send(flipped, cell, pulled)
        else:
            yield f"{cell} pulls again", then(Engine(shards=engine.shards))

    def verifies(self, engine: Engine) -> bool:
        """Every shard has the digest of the manifest."""
        return set(engine.shadow) == {engine.wanted}

    # ------------------------------------------------------------ gateway

    def _gateway(self, world: World) -> Iterator[tuple[str, World]]:
        actor = world.gateway
        known = self.logs.state("routes", actor.place)
        seats: dict[str, int] = {}
        for call in world.calls:
            if call.cell:
                seats[call.cell] = seats.get(call.cell, 0) + 1
        for i, call in enumerate(world.calls):
            if call.is_in_tool:
                yield (
                    f"{call.session} asks again",
                    world._replace(calls=_put(world.calls, i, call._replace(is_in_tool=False))),
                )
                continue
            if not call.cell:
                route = routes.choose(known, seats, call.last)
                if route is not None:
                    yield f"admits {call.session}", self._admit(world, i, call, route)
                continue
            route = known.get(call.cell)
            if len(call.sampled) < TOKENS:
                yield from self._sample(world, i, call)
            else:
                ended = self.append(world, _end(call, cut=False), "gateway")
                if call.turn + 1 < TURNS:
                    again = Call(
                        session=call.session,
                        attempt=call.attempt + 1,
                        last=call.cell,
                        turn=call.turn + 1,
                        is_in_tool=True,
                    )
                    yield f"answers {call.session}", ended._replace(calls=_put(world.calls, i, again))
                    continue
                finished = ExecutionFinished(
                    execution=call.session, reason="completed", exit_code=0, wall_s=0.0, detail=""
                )
                ended = self.append(ended, finished, "d")
                ended = self.append(
                    ended, ExecutionScored(execution=call.session, score=1.0, parts=(), wall_s=0.0), "d"
                )
                yield f"finishes {call.session}", ended._replace(calls=world.calls[:i] + world.calls[i + 1 :])
            if route is None or route.fence is not None or not route.open:
                yield f"cuts {call.session}", world._replace(calls=_put(world.calls, i, _unseat(call, call.cell)))
        if self.is_free(actor):
            for route in known.values():
                if route.fence is not None and not seats.get(route.cell):
                    event = SessionsRerouted(cell=route.cell, epoch=route.fence, num_sessions=0, num_calls_moved=0)
                    yield from self._send(world, "gateway", event)

    def _admit(self, world: World, i: int, call: Call, route: routes.Route) -> World:
        if not call.is_started:
            started = CallStarted(
                execution=call.session, session=call.session, call=f"{call.session}.{call.attempt}", base="", shared=0,
                context=b"", role_class="main", rule="root", marks=(), temperature=1.0, top_p=1.0, max_tokens=TOKENS,
                cell=route.cell,
            )  # fmt: skip
            world = self.append(world, started, "gateway")
        return world._replace(calls=_put(world.calls, i, call._replace(cell=route.cell, is_started=True)))

    def _sample(self, world: World, i: int, call: Call) -> Iterator[tuple[str, World]]:
        """An engine without weights answers with an error, and the call is asked again elsewhere."""
        shards = world.engines[CELLS.index(call.cell)].shards
        if VOID in shards:
            yield f"{call.session} gets no answer", world._replace(calls=_put(world.calls, i, _unseat(call, call.cell)))
            return
        demand("whole", shards[0] == shards[1] >= 0, f"{call.cell} samples from {shards}")
        yield (
            f"{call.session} samples",
            world._replace(calls=_put(world.calls, i, call._replace(sampled=(*call.sampled, shards[0])))),
        )

    # ------------------------------------------------------------ trainer

    def _trainer(self, world: World) -> Iterator[tuple[str, World]]:
        actor = world.trainer
        if not self.is_free(actor):
            return
        if world.buffer[0] != world.buffer[1]:  # nothing is read in the middle of a step
            yield "the optimizer has written", world._replace(buffer=(world.buffer[0], world.buffer[0]))
            return
        cluster, cohorts = self.cluster(actor.place), self.cohorts(actor.place)
        pipeline = self.config.pipeline
        taken: steps.Steps = self.logs.state("steps", actor.place)
        deed = steps.next_deed(cluster, cohorts, "c0", pipeline)
        if deed == "publish":
            version = taken.step
            if world.buffer != (version, version):
                # Its predecessor's step was told of after it had read the log: it loads that step first.
                yield "the trainer loads", world._replace(buffer=(version, version))
                return
            demand("whole", set(world.buffer) == {version}, f"{world.buffer} is published as {version}")
            event: Event = PolicyPublished(version=version, digest=f"d{version}", num_bytes=2, checkpoint="")
            yield from self._send(world, "trainer", event)
        elif deed == "step":
            step = taken.step + 1
            cohort = steps.cohort_of(cohorts, step, pipeline)
            if cohort is None:
                return
            if not taken.cohort_seq:
                event = CohortConsumed(
                    step=step, groups=cohort.groups, executions=(), digest=cohort.digest, through_seq=0
                )
                yield from self._send(world, "trainer", event)
            elif not taken.batch_seq:
                event = BatchAssembled(
                    step=step, digest="", through_seq=0, seed=0, num_executions=0, num_trajectories=0, num_tokens=0,
                    num_targets=0, num_microsteps=1,
                )  # fmt: skip
                yield from self._send(world, "trainer", event)
            elif taken.last_seq == taken.batch_seq:
                core = self.cluster(world.head).cells[0]
                demand("one role", core.state == "TRAINING", f"the core trains in {core.state}")
                event = MicrostepAccepted(step=step, microstep=0, cell="c0", epoch=core.epoch, loss_sum=0.0)
                yield from self._send(world, "trainer", event)
            elif world.buffer != (step, step):
                yield "the optimizer writes", world._replace(buffer=(step, world.buffer[1]))
            else:
                yield from self._send(world, "trainer", _completed(step))

    # ------------------------------------------------------------ dispatcher, operator

    def _dispatcher(self, world: World) -> Iterator[tuple[str, World]]:
        """Groups and executions, at the log's end: their order with all else is what matters here."""
        state = self.dispatch(world.head)
        wanted = groups_wanted(state, self.config)
        if wanted:
            group = wanted[0]
            event = GroupDispatched(
                group=group.group, index=group.index, purpose="train", task="t", task_digest="", task_index=0,
                num_slots=group.num_slots, policy_version=group.policy_version, temperature=1.0,
            )  # fmt: skip
            yield "dispatches", self.append(world, event, "d")
            return
        for slot in executions_wanted(state, 1):
            name = f"{slot.group}-{slot.slot}"
            started = ExecutionStarted(
                execution=name, group=slot.group, slot=slot.slot, attempt=0, harness="h", sandbox="n", deadline_s=1.0
            )
            after = self.append(world, started, "d")
            yield "starts", after._replace(calls=tuple(sorted((*after.calls, Call(session=name)))))

    def _operator(self, world: World) -> Iterator[tuple[str, World]]:
        if world.drains:
            is_drained = "c1" in self.cluster(world.head).drain_orders
            event = DrainLifted(cell="c1") if is_drained else DrainRequested(cell="c1", reason="")
            yield (
                "undrains" if is_drained else "drains",
                self.append(world._replace(drains=world.drains - 1), event, "o"),
            )

    # ------------------------------------------------------------ rules of a world

    def check(self, world: World) -> None:
        """What holds in every state, beside what `append` checks. Raises Broken."""
        audit = self._audits[world.head]
        conserved(
            audit,
            {call.session for call in world.calls},
            {f"{call.session}.{call.attempt}" for call in world.calls if call.is_started},
        )
        sessions = [call.session for call in world.calls]
        demand("one owner", len(sessions) == len(set(sessions)), f"two calls of one session: {sessions}")

    def replays(self, world: World) -> None:
        """All decisions on this log again, from nothing but the log. Raises Broken."""
        state, path = scheduler.initial(), self.logs.path(world.head)
        wanted: dict[int, list[Event]] = {}
        for recorded in path:
            if isinstance(recorded.event, scheduler.Decided):
                wanted.setdefault(self.logs.depth[recorded.envelope.cause], []).append(recorded.event)
        for recorded in path:
            state = scheduler.evolve(state, recorded)
            for event in wanted.get(recorded.seq, ()):
                again = scheduler.recompute(msgspec.structs.replace(state, refused=None), self.config)
                same = msgspec.json.encode(again) == msgspec.json.encode(event)
                demand("replay", same, f"sequence {recorded.seq} calls for {again}, recorded is {event}")

    def is_done(self, world: World) -> bool:
        """All steps are published, everybody serves, nothing is under way."""
        cluster = self.cluster(world.head)
        all_serve = len(cluster.cells) == len(CELLS) and all(
            c.state == "SERVING" or c.cell in cluster.drained or self.config.scheduler.policy == "static"
            for c in cluster.cells
        )
        return cluster.published_version == self.config.pipeline.num_steps and all_serve and not world.calls


def _put(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])


def _add(sent: tuple[Sent, ...], one: Sent) -> tuple[Sent, ...]:
    return tuple(sorted((*sent, one), key=repr))


def _remove(sent: tuple[Sent, ...], one: Sent) -> tuple[Sent, ...]:
    at = sent.index(one)
    return sent[:at] + sent[at + 1 :]


def _unseat(call: Call, cell: str) -> Call:
    return call._replace(cell="", last=cell) if call.cell == cell else call


def _end(call: Call, *, cut: bool) -> Event:
    ids = pack_ids([1] * len(call.sampled))
    spans = tuple(VersionSpan(version=v, start=i, end=i + 1) for i, v in enumerate(call.sampled))
    name = f"{call.session}.{call.attempt}"
    if cut:
        return CallCut(
            execution=call.session, session=call.session, call=name, sampled=ids, logprobs=ids, spans=spans, reason="x"
        )
    return CallCompleted(
        execution=call.session, session=call.session, call=name, sampled=ids, logprobs=ids, spans=spans, finish="stop",
        reply="", num_prompt_tokens=0, num_cached_tokens=0, num_retries=0, engine_s=0.0,
    )  # fmt: skip


def _completed(step: int) -> StepCompleted:
    return StepCompleted(
        step=step, weights_digest=f"d{step}", loss=0.0, grad_norm=0.0, entropy=0.0, clip_fraction=0.0,
        logprob_gap_mean=0.0, logprob_gap_max=0.0, kl=0.0, staleness_mean=0.0, staleness_max=0,
        learning_rate=0.0, score_mean=0.0, num_tokens=0, num_targets=0, phases=(),
    )  # fmt: skip
