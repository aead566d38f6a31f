"""Pure. Events of cells and of the scheduler -> changes of their rows.

Invariant: what a row of `switches` says of its request and of the sessions that moved is of the cell's last request
before its end, or NULL. Direction: event -> `put`.
"""

from gyre.events import types as e
from gyre.events.codec import Recorded
from gyre.projections.changes import Put, columns_of, put_phases


class CellRows:
    """The fold."""

    def __init__(self, put: Put) -> None:
        self._put = put
        self._requested: dict[str, tuple[int, int]] = {}
        """Sequence and time of each cell's open switch request."""
        self._rerouted: dict[str, e.SessionsRerouted] = {}
        self._num_switches: dict[str, int] = {}
        self._drained: set[str] = set()

    def evolve(self, recorded: Recorded) -> None:
        event, seq, at = recorded.event, recorded.seq, recorded.envelope.time_ns
        match event:
            case e.CellJoined():
                drained = event.cell in self._drained
                self._put("cells", event.cell, **columns_of(event, "cell"), joined_ns=at, lost="", drained=drained)
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
                put_phases(self._put, seq, event.phases)
                self._put("cells", event.cell, version=event.version)
            case e.CellSwitched():
                num = self._num_switches[event.cell] = self._num_switches.get(event.cell, 0) + 1
                columns = {f: getattr(event, f) for f in ("role", "epoch", "version")}
                self._put("cells", event.cell, **columns, num_switches=num)
                self._put("switches", seq, role=event.role, version=event.version, outcome="switched", reason="")
                self._put("switches", seq, phase_s=sum((p.seconds for p in event.phases), 0.0))
                put_phases(self._put, seq, event.phases)
                self._switch_ended(event.cell, event.epoch, seq, at)
            case e.SwitchRolledBack():
                self._put("switches", seq, role=event.role, outcome="rolled_back", reason=event.reason)
                self._switch_ended(event.cell, event.epoch, seq, at)
            case e.KvMigrated() | e.KvMissed():
                self._put("kv_moves", seq, **columns_of(event))
            case e.CellLost():
                self._put("cells", event.cell, lost=event.reason)
            case e.Decided():
                self._put("decisions", seq, cause=recorded.envelope.cause, **columns_of(event))

    def _switch_ended(self, cell: str, epoch: int, seq: int, at: int) -> None:
        self._put("switches", seq, cell=cell, epoch=epoch, ended_ns=at)
        requested = self._requested.pop(cell, None)
        if requested is not None:
            self._put("switches", seq, requested_seq=requested[0], wall_s=(at - requested[1]) / 1e9)
        rerouted = self._rerouted.pop(cell, None)
        if rerouted is not None:
            self._put("switches", seq, num_sessions=rerouted.num_sessions, num_calls_moved=rerouted.num_calls_moved)
