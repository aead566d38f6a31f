"""Pure. Events -> changes of the rows of every table.

Invariant: the changes follow from the events alone. The fold knows nothing of what was stored, so a projector that
starts again folds from sequence 1 and applies only what comes after its checkpoint. Direction: recorded events ->
folds of one kind of rows each (executions, cells, steps; those of the run are here) -> changes.

`Tables` changes itself in place, as the folds of its parts do; what others read are `take` and `experience`.
"""

import msgspec
import orjson

from gyre.config import Config, decode_config
from gyre.events import types as e
from gyre.events.codec import Recorded, UnknownEvent
from gyre.projections.cell_rows import CellRows
from gyre.projections.changes import ChangedRows, Changes, columns_of
from gyre.projections.execution_rows import ExecutionRows, held
from gyre.projections.experience import Experience
from gyre.projections.schemas import Row
from gyre.projections.step_rows import StepRows


class Tables:
    def __init__(self) -> None:
        self.seq = 0
        self.experience = Experience()
        self.config = Config()
        self._rows = ChangedRows()
        self._put = self._rows.put
        self._executions, self._cells, self._steps = ExecutionRows(self._put), CellRows(self._put), StepRows(self._put)
        self._run = ""
        self._num_resumed = 0

    def take(self) -> Changes:
        """The changes since the last call."""
        return self._rows.take()

    def evolve(self, recorded: Recorded) -> None:
        """Fold one event. Total but for a bug: a column that no table has."""
        event = recorded.event
        self.seq = recorded.seq
        self._rows.add("events", (recorded.seq,), {"seq": recorded.seq, **event_columns(recorded)})
        before = held(self.experience, event)
        self.experience.evolve(recorded)
        match event.aggregate if not isinstance(event, UnknownEvent) else "":
            case "run":
                self._run_event(event, recorded.envelope.time_ns)
            case "group" | "execution" | "call":
                self._executions.evolve(recorded, before)
            case "cell" | "scheduler":
                self._cells.evolve(recorded)
            case "policy":
                self._steps.evolve(recorded, self.experience, self.config)
            case _:
                pass

    def _run_event(self, event: e.Event, at: int) -> None:
        match event:
            case e.RunStarted():
                self._run = event.run
                self._configure(event.config, event.config_digest)
                self._put("runs", event.run, state="running", detail="", num_resumed=0, started_ns=at)
                self._put("runs", event.run, seed=event.seed, num_threads=event.num_threads)
            case e.ConfigChanged():
                self._configure(event.config, event.config_digest)
            case e.RunResumed():
                self._num_resumed += 1
                self._put("runs", self._run, state="running", detail="", num_resumed=self._num_resumed)
            case e.RunFinished():
                self._put("runs", self._run, state=event.reason, detail=event.detail, ended_ns=at)
            case e.GroupSkipped():
                self._put("skips", self.seq, **columns_of(event))
            case _:
                pass

    def _configure(self, config: str, digest: str) -> None:
        self._put("runs", self._run, config=config, config_digest=digest)
        try:
            self.config = decode_config(config)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.config = Config()


def event_columns(recorded: Recorded) -> Row:
    """What the table `events` says of one event, beside its sequence."""
    event, envelope = recorded.event, recorded.envelope
    place = recorded.subject.split(".", 2)[-1]
    aggregate, _, name = place.partition(".")
    payload = None
    if isinstance(event, UnknownEvent):
        payload = event.payload.decode()
    elif not e.event_type(event).startswith("call."):
        payload = orjson.dumps(msgspec.to_builtins(event), option=orjson.OPT_SORT_KEYS).decode()
    return {
        "type": event.name if isinstance(event, UnknownEvent) else e.event_type(event),
        "aggregate": aggregate,
        "id": name,
        "writer": envelope.writer,
        "incarnation": envelope.incarnation,
        "writer_seq": envelope.writer_seq,
        "cause": envelope.cause,
        "time_ns": envelope.time_ns,
        "digest": recorded.digest,
        "payload": payload,
    }
