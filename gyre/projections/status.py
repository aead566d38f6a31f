"""Pure. Where cells and queues stand: what `gyre status` and `gyre cells` show of a run, live or finished.

A fold of the log, O(1) an event; `figures` turns it into plain values and `lines` those into text. Invariant: it says
only what the log says at that sequence, so it is the same for whoever reads the same prefix.
"""

from collections import Counter, deque
from typing import Any

from gyre.config import Config, decode_config
from gyre.events import types as e
from gyre.events.codec import Recorded
from gyre.projections import cluster as cluster_fold
from gyre.projections import cohorts as cohorts_fold
from gyre.projections.cluster import Cell, Cluster
from gyre.projections.cohorts import CohortState, num_ready

NUM_SWITCHES = 8
"""How many of the last ones are kept."""
_NS = 1e9


class Status:
    """Changed in place by `evolve`."""

    def __init__(self) -> None:
        self.run, self.state, self.detail = "", "not started", ""
        self.config = Config()
        self.seq = 0
        self.now_ns = 0
        """The newest recorded time."""
        self.cluster = Cluster()
        self.cohorts = CohortState()
        self.switches: deque[dict[str, Any]] = deque(maxlen=NUM_SWITCHES)
        """Oldest first."""
        self.num_switches: Counter[str] = Counter()
        self.refused: e.MoveRefused | None = None
        self._calls: dict[str, str] = {}
        """Cell of each open call."""
        self._since_ns: dict[str, int] = {}
        self._leased_ns: dict[str, int] = {}
        self._decided: dict[tuple[str, int], e.Decided] = {}
        self._step = 0
        self._num_microsteps = 0
        self._claimed: dict[int, str] = {}
        self._accepted: set[int] = set()

    def evolve(self, recorded: Recorded) -> None:
        event, at = recorded.event, recorded.envelope.time_ns
        self.seq, self.now_ns = recorded.seq, max(self.now_ns, at)
        self.cluster = cluster_fold.evolve(self.cluster, recorded)
        self.cohorts = cohorts_fold.evolve(self.cohorts, recorded)
        match event:
            case e.RunStarted():
                self.run, self.state, self.config = event.run, "running", decode_config(event.config)
            case e.ConfigChanged():
                self.config = decode_config(event.config)
            case e.RunResumed():
                self.state, self.detail = "running", ""
            case e.RunFinished():
                self.state, self.detail = event.reason, event.detail
            case e.CallStarted():
                self._calls[event.call] = event.cell
            case e.CallCompleted() | e.CallCut() | e.CallFailed():
                self._calls.pop(event.call, None)
            case e.Decided():
                self._decided[event.cell, event.epoch], self.refused = event, None
            case e.MoveRefused():
                self.refused = event
            case e.CellLeased():
                self._leased_ns[event.cell] = at
            case e.CellSwitched() | e.SwitchRolledBack():
                self._switch(event, at, recorded.seq)
            case e.BatchAssembled():
                self._step, self._num_microsteps = event.step, event.num_microsteps
                self._claimed, self._accepted = {}, set()
            case e.MicrostepClaimed() if event.step == self._step:
                self._claimed[event.microstep] = event.cell
            case e.MicrostepAccepted() if event.step == self._step:
                self._accepted.add(event.microstep)
            case e.StepCompleted() | e.StepRejected():
                self._num_microsteps = 0
            case _:
                pass

    def _switch(self, event: e.CellSwitched | e.SwitchRolledBack, at: int, seq: int) -> None:
        decided = self._decided.pop((event.cell, event.epoch), None)
        outcome, phases = "switched", {}
        if isinstance(event, e.CellSwitched):
            self.num_switches[event.cell] += 1
            self._since_ns[event.cell] = at
            phases = {p.name: round(p.seconds, 3) for p in event.phases}
        else:
            outcome = f"rolled back: {event.reason}"
        self.switches.append(
            {
                "seq": seq,
                "cell": event.cell,
                "role": event.role,
                "epoch": event.epoch,
                "outcome": outcome,
                "seconds": round((at - self._leased_ns.get(event.cell, at)) / _NS, 3),
                "phases": phases,
                "policy": decided.policy if decided else "",
                "waterlevel": decided.waterlevel if decided else None,
                "capacity": decided.capacity if decided else None,
                "reason": decided.reason if decided else "of its own",
                "time_ns": at,
            }
        )

    # ------------------------------------------------------------ as plain values

    def figures(self) -> dict[str, Any]:
        """JSON-ready. Queues are counted in what their name says; times in seconds of the writers' clocks."""
        cluster, cohorts, open_ = self.cluster, self.cohorts, self.cluster.decision
        decision = None
        if open_ is not None:
            state = "commanded" if open_.commanded_seq else "decided"
            decision = {"cell": open_.decided.cell, "role": open_.decided.role, "state": state, "seq": open_.seq}
        return {
            "run": self.run,
            "state": self.state,
            "detail": self.detail,
            "seq": self.seq,
            "policy": self.config.scheduler.policy,
            "term": cluster.term,
            "step": cluster.step,
            "num_steps": self.config.pipeline.num_steps,
            "version": cluster.published_version,
            "waterlevel": cohorts.waterlevel,
            "capacity": cluster.rollout_capacity,
            "executions": {
                "dispatched": cohorts.dispatched,
                "started": cohorts.started,
                "finished": cohorts.finished,
            },
            "queues": {
                "executions_waiting": cohorts.dispatched - cohorts.started,
                "executions_live": cohorts.started - cohorts.finished,
                "calls_open": len(self._calls),
                "groups_ready": num_ready(cohorts),
                "groups_per_step": self.config.pipeline.groups_per_step,
                "microsteps": self._num_microsteps,
                "microsteps_claimed": len(self._claimed) if self._num_microsteps else 0,
                "microsteps_accepted": len(self._accepted) if self._num_microsteps else 0,
            },
            "decision": decision,
            "refused": {"cell": self.refused.cell, "role": self.refused.role, "reason": self.refused.reason}
            if self.refused
            else None,
            "cells": [self._cell(cell) for cell in cluster.cells],
            "switches": list(self.switches),
        }

    def _cell(self, cell: Cell) -> dict[str, Any]:
        since = self._since_ns.get(cell.cell)
        return {
            "cell": cell.cell,
            "index": cell.index,
            "state": cell.state,
            "role": cell.role,
            "drained": cell.cell in self.cluster.drained,
            "standalone": cell.cell in self.cluster.standalone,
            "epoch": cell.epoch,
            "version": cell.version,
            "capacity": cell.capacity,
            "calls_open": sum(name == cell.cell for name in self._calls.values()),
            "microsteps_claimed": sum(n == cell.cell for n in self._claimed.values()) if self._num_microsteps else 0,
            "num_switches": self.num_switches[cell.cell],
            "since_s": None if since is None else round((self.now_ns - since) / _NS, 1),
            "engine_url": cell.engine_url,
        }


def status_lines(figures: dict[str, Any]) -> list[str]:
    """What `gyre status` prints."""
    executions, queues = figures["executions"], figures["queues"]
    detail = f" ({figures['detail']})" if figures["detail"] else ""
    lines = [
        f"run {figures['run']}: {figures['state']}{detail}, {figures['seq']:,} events",
        f"  steps       {figures['step']}/{figures['num_steps']}, version {figures['version']}",
        f"  waterlevel  w {figures['waterlevel']}, C_R {figures['capacity']}; {executions['dispatched']} dispatched, "
        f"{executions['started']} started, {executions['finished']} finished",
        f"  queues      {queues['executions_waiting']} executions wait, {queues['executions_live']} live, "
        f"{queues['calls_open']} calls open; {queues['groups_ready']} groups ready, a step takes "
        f"{queues['groups_per_step']}",
    ]
    if queues["microsteps"]:
        lines.append(
            f"  micro-steps {queues['microsteps_accepted']} accepted, {queues['microsteps_claimed']} claimed, of "
            f"{queues['microsteps']}"
        )
    lines.append(f"  scheduler   {figures['policy']}, term {figures['term']}{_decision(figures)}")
    lines += [f"  {line}" for line in cell_lines(figures)]
    if figures["switches"]:
        lines.append("  last switches")
        lines += [f"    {_switch(item)}" for item in figures["switches"]]
    return lines


def cell_lines(figures: dict[str, Any]) -> list[str]:
    """A table of the cells, in their fixed order: what `gyre cells` prints."""
    head = ("cell", "state", "epoch", "version", "capacity", "calls", "switches", "for", "")
    rows = [head]
    for cell in figures["cells"]:
        since = "" if cell["since_s"] is None else f"{cell['since_s']:.0f} s"
        numbers = (cell[name] for name in ("epoch", "version", "capacity", "calls_open", "num_switches"))
        note = "drained" if cell["drained"] else "core" if cell["index"] == 0 else ""
        note = "standalone" if cell["standalone"] else note
        rows.append((cell["cell"], cell["state"], *map(str, numbers), since, note))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _decision(figures: dict[str, Any]) -> str:
    decision, refused = figures["decision"], figures["refused"]
    if decision:
        return f"; {decision['state']}: {decision['cell']} to {decision['role']}"
    return f"; refused: {refused['cell']} to {refused['role']}: {refused['reason']}" if refused else ""


def _switch(item: dict[str, Any]) -> str:
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in item["phases"].items())
    why = item["reason"] if item["waterlevel"] is None else f"w {item['waterlevel']}, C_R {item['capacity']}: "
    why += item["reason"] if item["waterlevel"] is not None else ""
    outcome = "" if item["outcome"] == "switched" else f" {item['outcome']}"
    spent = f"{item['seconds']:.2f} s" + (f" ({phases})" if phases else "")
    return f"{item['seq']:>6} {item['cell']} to {item['role']}{outcome} in {spent}; {why}"
