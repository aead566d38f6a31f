"""Pure. Who computes which micro-step of the step under way, and in what order their gradients are added.

Invariants: the first valid claim in stream order wins; a claim lasts until its micro-step is accepted, its cell leaves
the training role, or the core returns it; a micro-step is accepted once, by the core. The order of acceptance is the
order of addition, so the log alone says what a replay must compute: a micro-step of the core is added by itself, those
of another cell's gradient are summed in the order of their claims, and the sum is added.

Direction: events -> Claims -> what the core, or a satellite, does next -> events.
"""

from collections.abc import Collection
from typing import Literal

import msgspec

from gyre.events.codec import Recorded
from gyre.events.types import (
    BatchAssembled,
    ClaimsReturned,
    GradientOffered,
    MicrostepAccepted,
    MicrostepClaimed,
    StepCompleted,
    StepRejected,
    Value,
    WeightsExposed,
)
from gyre.projections import cluster as cluster_fold
from gyre.projections.cluster import Cell, Cluster, find_cell


class Claim(Value, frozen=True, kw_only=True):
    """One that still holds."""

    microstep: int
    cell: str
    epoch: int
    seq: int


class Offer(Value, frozen=True, kw_only=True):
    gradient: GradientOffered
    seq: int


class Part(Value, frozen=True, kw_only=True):
    """What was added to the sum at once."""

    cell: str
    microsteps: tuple[int, ...]
    """In the order of their claims."""
    offer_seq: int
    """0: a micro-step of the core's own."""


class Claims(Value, frozen=True, kw_only=True):
    seq: int = 0
    cluster: Cluster = Cluster()
    step: int = 0
    """The step whose batch is assembled and that is neither completed nor rejected; 0: none."""
    batch_digest: str = ""
    exposed: WeightsExposed | None = None
    """What satellites compute on: the weights of the newest update of the step."""
    held: tuple[Claim, ...] = ()
    offers: tuple[Offer, ...] = ()
    parts: tuple[Part, ...] = ()
    """In the order of acceptance."""

    @property
    def accepted(self) -> frozenset[int]:
        return frozenset(m for part in self.parts for m in part.microsteps)

    def free(self, microsteps: Collection[int]) -> tuple[int, ...]:
        """Those that nobody holds and that are not accepted."""
        taken = self.accepted.union(claim.microstep for claim in self.held)
        return tuple(m for m in microsteps if m not in taken)

    def held_by(self, cell: str) -> tuple[int, ...]:
        """In the order of the claims."""
        return tuple(claim.microstep for claim in self.held if claim.cell == cell)


def evolve(claims: Claims, recorded: Recorded) -> Claims:
    """The claims after one more event. Total: what comes too late, or second, changes nothing."""
    replace = msgspec.structs.replace
    cluster = cluster_fold.evolve(claims.cluster, recorded)
    if cluster is not claims.cluster:
        claims = replace(claims, cluster=cluster)
        held = tuple(claim for claim in claims.held if _trains(cluster, claim.cell, claim.epoch))
        claims = replace(claims, held=held) if held != claims.held else claims
    return replace(_apply(claims, recorded), seq=recorded.seq)


def _apply(claims: Claims, recorded: Recorded) -> Claims:
    event, seq, replace = recorded.event, recorded.seq, msgspec.structs.replace
    match event:
        case BatchAssembled() if event.step == claims.cluster.step + 1 and event.step != claims.step:
            return Claims(cluster=claims.cluster, step=event.step, batch_digest=event.digest)
        case StepCompleted() | StepRejected() if event.step == claims.step:
            return Claims(cluster=claims.cluster)
        case WeightsExposed() if event.step == claims.step:
            before = claims.exposed
            if before is not None and (before.minibatch, before.digest) != (event.minibatch, event.digest):
                # A gradient on other weights is of no use.
                held = tuple(claim for claim in claims.held if claim.cell == event.cell)
                claims = replace(claims, held=held)
            return replace(claims, exposed=event)
        case MicrostepClaimed() if event.step == claims.step and _trains(claims.cluster, event.cell, event.epoch):
            if not claims.free((event.microstep,)):
                return claims
            claim = Claim(microstep=event.microstep, cell=event.cell, epoch=event.epoch, seq=seq)
            return replace(claims, held=(*claims.held, claim))
        case GradientOffered() if event.step == claims.step:
            return replace(claims, offers=(*claims.offers, Offer(gradient=event, seq=seq)))
        case ClaimsReturned() if event.step == claims.step:
            held = tuple(c for c in claims.held if c.cell != event.cell or c.microstep not in event.microsteps)
            return replace(claims, held=held)
        case MicrostepAccepted() if event.step == claims.step:
            return _accept(claims, event, recorded.envelope.cause)
    return claims


def _accept(claims: Claims, event: MicrostepAccepted, cause: int) -> Claims:
    """A gradient is accepted as a whole, by the first of its micro-steps: the cause is its offer."""
    if event.microstep in claims.accepted:
        return claims
    offer = next((offer for offer in claims.offers if offer.seq == cause), None)
    microsteps = (event.microstep,) if offer is None else offer.gradient.microsteps
    part = Part(cell=event.cell, microsteps=microsteps, offer_seq=offer.seq if offer is not None else 0)
    # A cell that claimed one of them meanwhile has it in its sum: what it holds is to be begun again.
    spoilt = {c.cell for c in claims.held if c.microstep in microsteps and c.cell != event.cell}
    held = tuple(c for c in claims.held if c.microstep not in microsteps and c.cell not in spoilt)
    return msgspec.structs.replace(claims, parts=(*claims.parts, part), held=held)


def order_of(parts: Collection[Part], microsteps: Collection[int]) -> tuple[tuple[int, ...], ...]:
    """In which order these micro-steps are added, according to the log."""
    return tuple(part.microsteps for part in parts if part.microsteps[0] in microsteps)


def _trains(cluster: Cluster, cell: str, epoch: int) -> bool:
    found = find_cell(cluster, cell)
    return found is not None and found.state == "TRAINING" and found.epoch == epoch


def waited_for(claims: Claims, microsteps: Collection[int]) -> str:
    """The first cell, in their order, that holds any of these; empty: none. Of a core that holds none itself, the cell
    whose gradient it needs next."""
    cells = (cell.cell for cell in claims.cluster.cells)
    return next((cell for cell in cells if set(claims.held_by(cell)) & set(microsteps)), "")


def next_offer(claims: Claims, microsteps: Collection[int]) -> Offer | None:
    """The gradient that the core adds next; None while the cell that it waits for has not offered what it holds."""
    cell = find_cell(claims.cluster, waited_for(claims, microsteps))
    if cell is None:
        return None
    return next((offer for offer in reversed(claims.offers) if _is_open(claims, offer, cell)), None)


def _is_open(claims: Claims, offer: Offer, cell: Cell) -> bool:
    gradient = offer.gradient
    is_of = (gradient.cell, gradient.epoch) == (cell.cell, cell.epoch)
    is_based = claims.exposed is not None and gradient.base == claims.exposed.digest
    return (
        is_of and is_based and bool(gradient.microsteps) and set(gradient.microsteps) <= set(claims.held_by(cell.cell))
    )


Duty = Literal["pull", "discard", "compute", "claim", "offer"]


class Sum(Value, frozen=True, kw_only=True):
    """What a satellite has in its memory."""

    step: int = 0
    minibatch: int = 0
    base: str = ""
    """Digest of the weights that it holds; empty: none, or some that are of no use any more."""
    microsteps: tuple[int, ...] = ()
    """In the gradient, in the order of their claims."""
    is_offered: bool = False


def next_duty(claims: Claims, cell: str, mine: Sum, microsteps: Collection[int]) -> Duty | None:
    """What a satellite does at this prefix; None: wait. `microsteps` are those of the mini-batch exposed last.

    A drained one finishes what it has claimed, and claims nothing.
    """
    found, exposed = find_cell(claims.cluster, cell), claims.exposed
    if found is None or found.state != "TRAINING" or exposed is None:
        return None
    if (mine.step, mine.minibatch, mine.base) != (exposed.step, exposed.minibatch, exposed.digest):
        return None if cell in claims.cluster.drained else "pull"
    held = claims.held_by(cell)
    num = len(mine.microsteps)
    if held[:num] != mine.microsteps:
        return "discard"
    if len(held) > num:
        return "compute"
    if claims.free(microsteps) and cell not in claims.cluster.drained:
        return "claim"
    return "offer" if mine.microsteps and not mine.is_offered else None
