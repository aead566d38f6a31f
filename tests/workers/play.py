"""Pure. A whole run as a play in which every process is some events behind the log: who acts next is an argument.

Each actor folds one more event and then does what its process would do, or nothing. Direction: actor names -> log.
"""

from typing import Any

from cell_logs import completed, consumed, dispatched, joined, published, record, scored, started

from gyre.agents.dispatch import Dispatch, groups_wanted
from gyre.config import Config
from gyre.events.codec import Recorded
from gyre.events.types import (
    CellFenced,
    CellLeased,
    CellLost,
    CellSwitched,
    Decided,
    EngineReleased,
    Event,
    PolicyRolledBack,
    SessionsRerouted,
    StepRejected,
    SwitchRequested,
    SwitchRolledBack,
    TermStarted,
    WeightsPulled,
)
from gyre.projections import cluster as cluster_fold
from gyre.projections.cluster import Cluster
from gyre.workers import roles, scheduler
from gyre.workers.roles import CellRoles, Hop, next_hop
from gyre.workers.scheduler import SchedulerState, decide


class Play:
    def __init__(self, config: Config, num_cells: int) -> None:
        self.config = config
        self.log: list[Recorded] = []
        self.cluster = Cluster()
        self.cells = [Actor(roles.evolve, CellRoles(cell=f"c{i}")) for i in range(num_cells)]
        self.scheduler = Actor(scheduler.evolve, SchedulerState())
        self.term = 0
        self.unsettled: list[tuple[int, int]] = []
        self.num_groups = 0
        self.dispatcher = Dispatch()
        self.trained: list[int] = []
        """Groups that a step consumed, all steps."""
        self.actors = {
            "scheduler": self.schedule,
            "new scheduler": self.restart_scheduler,
            "gateway": self.reroute,
            "dispatcher": self.dispatch,
            "execution": self.settle,
            "trainer": self.train,
            "guard": lambda: self.train(refused=True),
            **{f"c{i}": lambda i=i: self.obey(i) for i in range(num_cells)},
            **{f"crash c{i}": lambda i=i: self.crash(i) for i in range(num_cells)},
            **{f"deadline c{i}": lambda i=i: self.roll_back(i) for i in range(num_cells)},
        }
        self.append(published(0))

    def append(self, event: Event, cause: int = 0) -> int:
        recorded = record(len(self.log) + 1, event, cause)
        self.log.append(recorded)
        self.cluster = cluster_fold.evolve(self.cluster, recorded)
        self.dispatcher.evolve(recorded)
        return recorded.seq

    # ------------------------------------------------------------ actors

    def schedule(self) -> None:
        actor = self.scheduler
        if not self.term:
            return self.restart_scheduler()
        if not actor.read(self.log) or actor.state.seq < actor.appended_seq or actor.state.cluster.term != self.term:
            return None
        open_ = actor.state.cluster.decision
        if open_ is None:
            for decided in decide(actor.state, self.config):
                actor.appended_seq = self.append(decided, cause=actor.state.seq)
        elif not open_.commanded_seq:
            d = open_.decided
            command = SwitchRequested(cell=d.cell, role=d.role, epoch=d.epoch, term=self.term)
            actor.appended_seq = self.append(command, cause=open_.seq)
        return None

    def restart_scheduler(self) -> None:
        self.scheduler = Actor(scheduler.evolve, SchedulerState())
        while self.scheduler.read(self.log):
            pass
        self.term = self.scheduler.state.cluster.term + 1
        self.scheduler.appended_seq = self.append(TermStarted(term=self.term))

    def obey(self, index: int) -> None:
        actor = self.cells[index]
        actor.read(self.log)
        hop = next_hop(actor.state)
        if hop is None or actor.state.seq < actor.appended_seq:
            return
        event = self.event_of(actor.state, hop, index)
        if isinstance(event, CellLeased) and self.last_of(event.cell) != actor.state.subject_seq:
            return  # compare-and-set lost
        if event is not None:
            actor.appended_seq = self.append(event, cause=hop.cause)

    def event_of(self, state: CellRoles, hop: Hop, index: int) -> Event | None:
        cell, epoch = state.cell, hop.epoch
        match hop.kind:
            case "join":
                return joined(cell, index, self.config.engine.capacity)
            case "lease":
                return CellLeased(cell=cell, role=hop.role, epoch=epoch)
            case "fence":
                return CellFenced(cell=cell, epoch=epoch)
            case "release":
                return EngineReleased(cell=cell, epoch=epoch, seconds=0.0)
            case "pull":
                return WeightsPulled(cell=cell, epoch=epoch, version=hop.version, digest="", num_bytes=0, phases=())
            case "arrive":
                return CellSwitched(cell=cell, role=hop.role, epoch=epoch, version=hop.version, phases=())
        return None

    def crash(self, index: int) -> None:
        """A new process of the cell: folds all of the log, and says that its predecessor is gone."""
        self.cells[index] = actor = Actor(roles.evolve, CellRoles(cell=f"c{index}"))
        while actor.read(self.log):
            pass
        if actor.state.is_joined:
            actor.appended_seq = self.append(CellLost(cell=actor.state.cell, reason="crash"))

    def roll_back(self, index: int) -> None:
        """The deadline of a switch: the cell gives up what it waits for."""
        state = self.cells[index].state
        hop = next_hop(state)
        if hop is None or state.seq < self.cells[index].appended_seq or state.role is None:
            return
        if hop.kind in ("await_reroute", "pull") and state.lease is not None:
            event = SwitchRolledBack(cell=state.cell, role=state.role, epoch=hop.epoch, reason="late")
            self.cells[index].appended_seq = self.append(event, cause=hop.cause)

    def reroute(self) -> None:
        answered = {(e.cell, e.epoch) for e in self.events(SessionsRerouted)}
        for fence in self.events(CellFenced):
            if (fence.cell, fence.epoch) not in answered:
                self.append(SessionsRerouted(cell=fence.cell, epoch=fence.epoch, num_sessions=0, num_calls_moved=0))

    def dispatch(self) -> None:
        for wanted in groups_wanted(self.dispatcher, self.config):
            assert wanted.index == self.num_groups
            self.append(dispatched(wanted.index, wanted.num_slots, wanted.policy_version))
            self.unsettled += [(wanted.index, slot) for slot in range(wanted.num_slots)]
            self.num_groups += 1

    def settle(self) -> None:
        """The first execution ends, if any cell serves it."""
        if self.unsettled and self.cluster.rollout_capacity:
            place = self.unsettled.pop(0)
            self.append(started(*place))
            self.append(scored(*place))

    def train(self, refused: bool = False) -> None:
        """The publish of a completed step, whatever role it is in by now; or a step, while the core has the role.

        `refused`: a guard refuses the step, if one is taken.
        """
        if self.cluster.step > max(self.cluster.published_version, 0):
            self.append(published(self.cluster.step))
            return
        core = next((c for c in self.cluster.cells if c.index == 0), None)
        if core is None or core.state != "TRAINING" or self.cluster.published_seq > core.switched_seq:
            return
        size = self.config.pipeline.groups_per_step
        settled = [g for g in range(self.num_groups) if g not in {g for g, _ in self.unsettled}]
        ready = tuple(g for g in settled if g not in self.trained)[:size]
        if len(ready) == size:
            self.append(consumed(self.cluster.step + 1, ready))
            self.trained += ready
            if refused:
                self.append(rejected(self.cluster.step + 1))
                back = self.cluster.step
                self.append(PolicyRolledBack(from_step=back + 1, to_version=back, reason="kl"))
            else:
                self.append(completed(self.cluster.step + 1))

    # ------------------------------------------------------------ what happened

    def events(self, kind: type[Any]) -> list[Any]:
        return [recorded.event for recorded in self.log if isinstance(recorded.event, kind)]

    def decisions(self) -> list[tuple[Recorded, Decided]]:
        return [(r, r.event) for r in self.log if isinstance(r.event, Decided)]

    def last_of(self, cell: str) -> int:
        return max((r.seq for r in self.log if r.subject.endswith(f".cell.{cell}")), default=0)

    def run(self, num_rounds: int = 400) -> None:
        """Everybody acts in turn, nobody crashes, until all steps are published and the core serves again."""
        fair = ["scheduler", "gateway", "dispatcher", "execution", "trainer", *(c.state.cell for c in self.cells)]
        for _ in range(num_rounds):
            for name in fair:
                for _ in range(5):
                    self.actors[name]()
            if self.is_done():
                return

    def is_done(self) -> bool:
        has_all = self.cluster.published_version == self.config.pipeline.num_steps
        return has_all and all(cell.state == "SERVING" for cell in self.cluster.cells)


def rejected(step: int) -> StepRejected:
    return StepRejected(step=step, guard="kl", value=2.0, bound=1.0, detail="kl", action="rollback")


class Actor:
    """A fold with a place in the log."""

    def __init__(self, evolve: Any, state: Any) -> None:
        self.evolve, self.state, self.appended_seq = evolve, state, 0

    def read(self, log: list[Recorded]) -> bool:
        """One more event, if there is one."""
        if self.state.seq < len(log):
            self.state = self.evolve(self.state, log[self.state.seq])
            return True
        return False
