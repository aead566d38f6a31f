"""Pure. A cell's own part of a switch: what it has recorded says what it does next.

Invariants: a command counts once, and only if its term is the newest and its epoch above every lease; a cell
holds one lease at a time; a hop is taken only after the hop before it is on the log. So a cell that starts
again in the middle of a switch, or sees a command k times, goes on where the log ends.

Direction: events -> CellRoles -> Hop -> (the shell does it and records it) -> events.

    train:    lease, fence, await_reroute, release, arrive      (a renewal: lease, arrive)
    rollout:  lease, await_publish, pull, arrive

A cell that serves takes each version that is published while it does, without a lease: pull, and calls go on.
"""

from typing import Literal

import msgspec

from gyre.events.codec import Recorded
from gyre.events.types import (
    CellFenced,
    CellJoined,
    CellLeased,
    CellLost,
    CellSwitched,
    Decided,
    EngineReleased,
    Event,
    PolicyPublished,
    Role,
    SessionsRerouted,
    SwitchRequested,
    SwitchRolledBack,
    TermStarted,
    Value,
    WeightsLocated,
    WeightsPulled,
)

HopKind = Literal["join", "lease", "fence", "await_reroute", "release", "await_publish", "pull", "arrive"]


class Command(Value, frozen=True, kw_only=True):
    """An accepted `cell.switch_requested` whose lease is not taken yet."""

    role: Role
    epoch: int
    seq: int


class Lease(Value, frozen=True, kw_only=True):
    """A switch under way, and its hops that are on the log (0: not yet)."""

    role: Role
    epoch: int
    seq: int
    fenced_seq: int = 0
    rerouted_seq: int = 0
    released_seq: int = 0
    pulled_seq: int = 0
    pulled_version: int = -1


class CellRoles(Value, frozen=True, kw_only=True):
    cell: str
    seq: int = 0
    """The prefix that was folded ends here."""
    subject_seq: int = 0
    """Last event on the cell's subject: what its next lease is compared and set against."""
    term: int = 0
    is_joined: bool = False
    joined_seq: int = 0
    role: Role | None = None
    """Where it arrived last; None from a join, or a loss, to the first arrival."""
    version: int = -1
    leased_epoch: int = 0
    top_epoch: int = 0
    """Highest epoch that anybody named for this cell; a lease of its own goes above it."""
    command: Command | None = None
    lease: Lease | None = None
    published_version: int = -1
    published_digest: str = ""
    published_seq: int = 0
    manifest: str = ""
    """Where the core's weights were to be read last; JSON."""


class Hop(Value, frozen=True, kw_only=True):
    kind: HopKind
    role: Role
    epoch: int
    cause: int
    """Sequence of what led to it."""
    version: int = -1


def evolve(state: CellRoles, recorded: Recorded) -> CellRoles:
    """The cell after one more event of the log. Total: what is stale or about another cell changes no role."""
    return msgspec.structs.replace(_heard(state, recorded), seq=recorded.seq)


def _heard(state: CellRoles, recorded: Recorded) -> CellRoles:
    event, seq, replace = recorded.event, recorded.seq, msgspec.structs.replace
    match event:
        case TermStarted(term=term):
            return replace(state, term=max(state.term, term))
        case PolicyPublished(version=version) if version > state.published_version:
            return replace(state, published_version=version, published_digest=event.digest, published_seq=seq)
        case WeightsLocated(manifest=manifest):
            return replace(state, manifest=manifest)
        case Decided(cell=state.cell, epoch=epoch):
            return replace(state, top_epoch=max(state.top_epoch, epoch))
        case SwitchRequested(cell=state.cell, epoch=epoch):
            return _accept(replace(state, top_epoch=max(state.top_epoch, epoch)), event, seq)
    if not recorded.subject.endswith(f".cell.{state.cell}"):
        return state
    epoch = getattr(event, "epoch", 0)
    return _apply(replace(state, subject_seq=seq, top_epoch=max(state.top_epoch, epoch)), event, seq)


def _apply(state: CellRoles, event: Event, seq: int) -> CellRoles:
    replace = msgspec.structs.replace
    match event:
        case CellJoined():
            return replace(state, is_joined=True, joined_seq=seq, role=None, lease=None, command=None)
        case CellLost():
            return replace(state, is_joined=False, role=None)  # the rest goes with the next join
        case CellLeased(role=role, epoch=epoch) if epoch > state.leased_epoch:
            waiting = state.command if state.command is not None and state.command.epoch > epoch else None
            return replace(state, leased_epoch=epoch, lease=Lease(role=role, epoch=epoch, seq=seq), command=waiting)
    lease = state.lease
    if lease is None:
        if isinstance(event, WeightsPulled) and event.epoch == state.leased_epoch:
            return replace(state, version=max(state.version, event.version))
        return state
    if getattr(event, "epoch", 0) != lease.epoch:
        return state
    match event:
        case CellFenced():
            return replace(state, lease=replace(lease, fenced_seq=seq))
        case SessionsRerouted():
            return replace(state, lease=replace(lease, rerouted_seq=seq))
        case EngineReleased():
            return replace(state, lease=replace(lease, released_seq=seq))
        case WeightsPulled(version=version):
            return replace(state, lease=replace(lease, pulled_seq=seq, pulled_version=version))
        case CellSwitched(role=role, version=version):
            return replace(state, role=role, version=version, lease=None)
        case SwitchRolledBack():
            return replace(state, lease=None)
    return state


def _accept(state: CellRoles, command: SwitchRequested, seq: int) -> CellRoles:
    is_known = state.command is not None and command.epoch <= state.command.epoch
    if command.term < state.term or command.epoch <= state.leased_epoch or state.role is None or is_known:
        return state
    return msgspec.structs.replace(
        state, term=command.term, command=Command(role=command.role, epoch=command.epoch, seq=seq)
    )


def next_hop(state: CellRoles) -> Hop | None:
    """What the cell does now; None while it stands in its role with nothing asked of it."""
    if not state.is_joined:
        return Hop(kind="join", role="rollout", epoch=state.top_epoch + 1, cause=0)
    if state.lease is not None:
        return _next_under(state.lease, state)
    if state.command is not None:
        command = state.command
        return Hop(kind="lease", role=command.role, epoch=command.epoch, cause=command.seq)
    if state.role is None:
        return Hop(kind="lease", role="rollout", epoch=state.top_epoch + 1, cause=state.joined_seq)
    if state.role == "rollout" and state.version < state.published_version:
        return Hop(
            kind="pull",
            role="rollout",
            epoch=state.leased_epoch,
            cause=state.published_seq,
            version=state.published_version,
        )
    return None


def _next_under(lease: Lease, state: CellRoles) -> Hop:
    def hop(kind: HopKind, cause: int, version: int = state.version) -> Hop:
        return Hop(kind=kind, role=lease.role, epoch=lease.epoch, cause=cause, version=version)

    if lease.role == "rollout":
        if state.published_version < 0:
            return hop("await_publish", lease.seq)
        if not lease.pulled_seq:
            return hop("pull", max(lease.seq, state.published_seq), state.published_version)
        return hop("arrive", lease.pulled_seq, lease.pulled_version)
    if state.role == "train":
        return hop("arrive", lease.seq, state.published_version)
    if not lease.fenced_seq:
        return hop("fence", lease.seq)
    if not lease.rerouted_seq:
        return hop("await_reroute", lease.fenced_seq)
    if not lease.released_seq:
        return hop("release", lease.rerouted_seq)
    return hop("arrive", lease.released_seq)
