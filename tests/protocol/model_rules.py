"""Pure. The invariants of elastic scheduling, as a fold of the log that raises Broken at the event that breaks one.

Each is written from the specification alone, and uses none of the folds that it judges but those that it is given to
look at (`Seen`). Direction: audit, event, writer, what the folds say before and after it -> audit.
"""

from typing import Any, NamedTuple

from gyre.config import Config
from gyre.events.codec import Recorded
from gyre.events.types import (
    CallCompleted,
    CallCut,
    CallStarted,
    CellLeased,
    CellSwitched,
    CohortConsumed,
    Decided,
    EngineReleased,
    ExecutionScored,
    ExecutionStarted,
    GroupDispatched,
    KvMigrated,
    PolicyPublished,
    StepCompleted,
    SwitchRequested,
    TermStarted,
    Ticked,
)
from gyre.projections.cluster import Cluster, find_cell
from gyre.workers.kv_migration import KvOwners


class Broken(Exception):
    """An invariant, by the name that it has in `INVARIANTS`."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{name}: {what}")
        self.name = name


INVARIANTS = {
    "one role": "one role per (cell, epoch), epochs increase",
    "one leader": "commands of a term come from one scheduler",
    "once": "executing a command k times is executing it once",
    "one owner": "every live session has one owner",
    "conserved": "admitted = live + completed + explicitly dropped with a reason",
    "tokens": "token logs only grow, and each token carries its policy version",
    "commits": "committed version + 1 each, only the core commits",
    "whole": "no cell serves or trains on a mixed or unverified version",
    "counted once": "each micro-step is counted once",
    "bounds": "staleness <= S at consumption, outstanding <= Q_b",
    "rollout": "R >= R_min: somebody serves what is unfinished",
    "kv": "source KV is freed only after ownership moved, or was given up",
    "replay": "replay of any log prefix gives byte-identical commands",
    "ends": "each switch ends READY or ROLLED_BACK within a deadline",
    "dwell": "no flip inside the dwell",
}
"""All of `facts/scheduling.md`, in its order."""


class Seen(NamedTuple):
    """The folds around one event."""

    before: Cluster
    after: Cluster
    owners: KvOwners
    """Before it."""
    at_cause: Cluster
    """At the envelope's cause."""
    num_pending: int
    """Unfinished and owed executions at the cause."""


class Audit(NamedTuple):
    leaders: tuple[tuple[int, str], ...] = ()
    roles: tuple[tuple[str, int, str], ...] = ()
    """(cell, epoch, role) of each lease."""
    arrived: tuple[tuple[str, int], ...] = ()
    commands: tuple[tuple[str, int, int], ...] = ()
    dispatched: tuple[tuple[str, int], ...] = ()
    """(group, version)"""
    consumed: tuple[tuple[int, tuple[str, ...]], ...] = ()
    """(step, groups); what stands twice on the log is one."""
    consumed_at_publish: int = 0
    started: frozenset[str] = frozenset()
    ended: frozenset[str] = frozenset()
    open_calls: frozenset[str] = frozenset()
    step: int = 0
    version: int = -1
    clock_s: float = 0.0
    """Ticks of the newest term, added up."""
    last_tick: tuple[int, float] = (0, 0.0)
    flipped: tuple[tuple[str, str, float], ...] = ()
    """(cell, role, clock at its arrival)"""


def judge(audit: Audit, recorded: Recorded, seen: Seen, config: Config) -> Audit:
    """The audit after one more event. Raises Broken."""
    event, writer = recorded.event, recorded.envelope.writer
    match event:
        case TermStarted(term=term):
            _demand("one leader", all(known < term for known, _ in audit.leaders), f"term {term} was started before")
            return audit._replace(leaders=(*audit.leaders, (term, writer)))
        case Decided() | SwitchRequested():
            leader = dict(audit.leaders).get(event.term)
            _demand("one leader", leader == writer, f"{writer} commands under term {event.term} of {leader}")
            return _decided(audit, event, seen, config) if isinstance(event, Decided) else audit
        case Ticked(term=term, now_s=now_s) if term == max(known for known, _ in audit.leaders):
            same = audit.last_tick[0] == term
            passed = max(0.0, now_s - audit.last_tick[1]) if same else 0.0
            return audit._replace(clock_s=audit.clock_s + passed, last_tick=(term, now_s))
        case CellLeased(cell=cell, epoch=epoch, role=role):
            newest = max((e for c, e, _ in audit.roles if c == cell), default=0)
            _demand("one role", epoch > newest, f"{cell} leases epoch {epoch} after {newest}")
            return audit._replace(roles=(*audit.roles, (cell, epoch, role)))
        case CellSwitched(cell=cell, epoch=epoch):
            return _switched(audit, event, seen)
        case EngineReleased(cell=cell, epoch=epoch):
            found = find_cell(seen.before, cell)
            is_valid = found is not None and found.epoch == epoch and found.state in ("FENCED", "DRAINING")
            left = seen.owners.unsettled(cell)
            _demand("kv", not is_valid or not left, f"{cell} freed its memory, the KV of {', '.join(left)} was there")
        case KvMigrated(cell=cell, target=target):
            _demand("one owner", target != cell, f"{cell} moved KV to itself")
        case GroupDispatched(group=group, policy_version=version):
            dispatched = (*audit.dispatched, (group, version))
            outstanding = len(dispatched) - audit.consumed_at_publish
            _demand("bounds", outstanding <= config.pipeline.dispatch_depth, f"{outstanding} groups are outstanding")
            return audit._replace(dispatched=dispatched)
        case CohortConsumed(step=step, groups=groups):
            if (step, groups) in audit.consumed:
                return audit
            stale = max(step - dict(audit.dispatched)[group] for group in groups)
            _demand("bounds", stale <= config.pipeline.max_staleness, f"step {step} consumes what is {stale} old")
            _demand("commits", step == audit.step + 1, f"step {step} consumes after {audit.step}")
            taken = {group for _, names in audit.consumed for group in names}
            _demand("counted once", not taken & set(groups), f"step {step} consumes {groups} again")
            return audit._replace(consumed=(*audit.consumed, (step, groups)))
        case StepCompleted(step=step) if step != audit.step:
            _demand("commits", step == audit.step + 1, f"step {step} after {audit.step}")
            _demand("commits", writer == "trainer", f"{writer} committed")
            return audit._replace(step=step)
        case PolicyPublished(version=version) if version != audit.version:
            _demand("commits", version == audit.version + 1, f"version {version} after {audit.version}")
            _demand("commits", version == audit.step, f"version {version} at step {audit.step}")
            return audit._replace(version=version, consumed_at_publish=sum(len(g) for _, g in audit.consumed))
        case ExecutionStarted(execution=execution):
            _demand("once", execution not in audit.started, f"{execution} started twice")
            return audit._replace(started=audit.started | {execution})
        case ExecutionScored(execution=execution):
            _demand("conserved", execution in audit.started - audit.ended, f"{execution} ended, but is not live")
            return audit._replace(ended=audit.ended | {execution})
        case CallStarted(call=call):
            return audit._replace(open_calls=audit.open_calls | {call})
        case CallCompleted() | CallCut():
            _demand("conserved", event.call in audit.open_calls, f"{event.call} ended, but is not open")
            versions = [span.version for span in event.spans]
            known = all(0 <= version <= audit.version for version in versions)
            _demand("tokens", known, f"{event.call} has tokens of versions {versions}, published is {audit.version}")
            covered = sum(span.end - span.start for span in event.spans) * 4
            _demand("tokens", covered == len(event.sampled), f"{event.call}: tokens without a version")
            return audit._replace(open_calls=audit.open_calls - {event.call})
        case _:
            pass
    return audit


def _decided(audit: Audit, event: Decided, seen: Seen, config: Config) -> Audit:
    cell = find_cell(seen.at_cause, event.cell)
    _demand("one role", cell is not None and event.epoch > cell.epoch, f"{event.cell}: epoch {event.epoch} is not new")
    if cell is not None and cell.state == "SERVING":
        others = [c for c in seen.at_cause.cells if c.state == "SERVING" and c.cell != event.cell]
        _demand("rollout", bool(others) or not seen.num_pending, f"{event.cell} leaves {seen.num_pending} to nobody")
        is_watched = event.policy != "static" and event.reason != "drained by the operator"
        covered = seen.num_pending <= event.capacity - event.cell_capacity
        _demand(
            "rollout", not is_watched or covered, f"{event.cell} leaves, the rest does not cover {seen.num_pending}"
        )
    since = {c: (role, at_s) for c, role, at_s in audit.flipped}.get(event.cell)
    if config.scheduler.dwell_s and since is not None and since[0] != event.role:
        stayed_s = audit.clock_s - since[1]
        _demand("dwell", stayed_s >= config.scheduler.dwell_s, f"{event.cell} flips after {stayed_s} s")
    return audit


def _switched(audit: Audit, event: CellSwitched, seen: Seen) -> Audit:
    key = (event.cell, event.epoch)
    roles = {(cell, epoch): role for cell, epoch, role in audit.roles}
    before, after = find_cell(seen.before, event.cell), find_cell(seen.after, event.cell)
    if before is None or before.epoch != event.epoch:
        _demand("once", before == after, f"{event.cell}: an arrival under epoch {event.epoch} counts, it is over")
        return audit
    _demand(
        "one role", roles.get(key) == event.role, f"{key} was leased for {roles.get(key)}, it arrives in {event.role}"
    )
    if key in audit.arrived:
        _demand("once", before == after, f"{key}: a second arrival changes the cell")
        return audit
    flipped = tuple(item for item in audit.flipped if item[0] != event.cell)
    same = [item for item in audit.flipped if item[0] == event.cell and item[1] == event.role]
    at_s = same[0][2] if same else audit.clock_s
    return audit._replace(arrived=(*audit.arrived, key), flipped=(*flipped, (event.cell, event.role, at_s)))


def _demand(name: str, holds: bool, what: str) -> None:
    if not holds:
        raise Broken(name, what)


def conserved(audit: Audit, live: set[str], calls: set[str]) -> None:
    """What is live in the processes is what the log says is live."""
    _demand("conserved", audit.started - audit.ended == live, f"live are {sorted(live)}")
    _demand(
        "conserved", audit.open_calls == calls, f"open are {sorted(calls)}, the log says {sorted(audit.open_calls)}"
    )


def demand(name: str, holds: Any, what: str) -> None:
    """For the rules of a world, which are not about one event."""
    _demand(name, bool(holds), what)
