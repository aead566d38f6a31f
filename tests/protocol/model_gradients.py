"""Pure. The exchange of gradients as a transition system: a core, two satellites, claims on one log, sums in memory.

What decides is the code that runs: `claims.evolve`, `next_offer`, `waited_for`, `next_duty`. What is written here is
what `gathering.py` and `satellite.py` do around it, one action at a time, and what goes wrong in between: any of the
three dies, an append lands late or after its sender died, a claim is taken back while its gradient is on the way, a
gradient changes while it is read. One step of three micro-steps; `model_search.py` goes through this model too.

Direction: Exchange -> (name of an action, Exchange), as many as there are.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from gyre.events.types import (
    BatchAssembled,
    CellFenced,
    CellJoined,
    CellLeased,
    CellLost,
    CellSwitched,
    ClaimsReturned,
    CohortConsumed,
    Event,
    GradientOffered,
    GradientSums,
    MicrostepAccepted,
    MicrostepClaimed,
    WeightsExposed,
)
from gyre.projections import cluster as cluster_fold
from gyre.projections.cluster import Cluster, find_cell
from gyre.workers import claims as claims_fold
from gyre.workers.claims import Claims, Sum, next_duty, next_offer, order_of, waited_for
from tests.protocol.model_logs import ROOT, Logs
from tests.protocol.model_rules import demand

CORE, SATELLITES = "c0", ("c1", "c2")
MICROSTEPS = (0, 1, 2)
SUMS = GradientSums(
    loss=0.0, entropy=0.0, num_clipped=0, logprob_gap=0.0, logprob_gap_max=0.0, kl=0.0, num_tokens=0, num_targets=0
)
LAG = 3


class Place(NamedTuple):
    node: int = ROOT
    appended: int = 0
    """The end of its own last append; -1: on its way."""


class Exchange(NamedTuple):
    head: int = ROOT
    places: tuple[Place, ...] = (Place(), Place(), Place())
    """Of the core and the satellites."""
    sums: tuple[tuple[int, ...], ...] = ((), (), ())
    """Micro-steps that are in the memory of each, as often as they were added."""
    bases: tuple[str, ...] = ("", "", "")
    offered: tuple[bool, ...] = (False, False, False)
    refused: frozenset[int] = frozenset()
    due: tuple[tuple[MicrostepAccepted, int], ...] = ()
    """What the core has added and not recorded yet, and the offer that is its cause (0: none)."""
    is_exposed: bool = False
    is_committed: bool = False
    sent: tuple[tuple[Event, int, int], ...] = ()
    """Appends that are late, their causes, and whose they are (its place in `places`; -1: nobody waits)."""
    epochs: tuple[int, ...] = (2, 2, 2)
    faults: int = 0
    drains: int = 0
    ticks: int = 0


class GradientModel:
    starts_over = True
    """Whether the core compares its sum with the log before it commits."""

    def __init__(self) -> None:
        self.logs = Logs({"claims": (Claims(), claims_fold.evolve), "cluster": (Cluster(), cluster_fold.evolve)}, {})

    def start(self, faults: int, *, drains: int = 0) -> Exchange:
        """All three are in training, the batch of step 1 is assembled, its weights are exposed."""
        world = Exchange(faults=faults)
        for index, cell in enumerate((CORE, *SATELLITES)):
            for event in _to_training(cell, index, 2):
                world = self._append(world, event)
        consumed = CohortConsumed(step=1, groups=(), executions=(), digest="", through_seq=0)
        batch = BatchAssembled(
            step=1, digest="b", through_seq=0, seed=0, num_executions=0, num_trajectories=0, num_tokens=0,
            num_targets=0, num_microsteps=len(MICROSTEPS),
        )  # fmt: skip
        world = self._append(self._append(world, consumed), batch)
        return world._replace(places=tuple(Place(node=world.head) for _ in range(3)))

    def claims(self, node: int) -> Claims:
        return self.logs.state("claims", node)  # type: ignore[no-any-return]

    def cluster(self, node: int) -> Cluster:
        return self.logs.state("cluster", node)  # type: ignore[no-any-return]

    # ------------------------------------------------------------ the log

    def _append(self, world: Exchange, event: Event, cause: int = 0) -> Exchange:
        head, is_new = self.logs.append(world.head, event, "w", cause)
        if is_new:
            parts = Counter(m for part in self.claims(head).parts for m in part.microsteps)
            demand("counted once", all(num == 1 for num in parts.values()), f"accepted twice: {parts}")
            held = Counter(claim.microstep for claim in self.claims(head).held)
            demand("one owner", all(num == 1 for num in held.values()), f"held by two: {self.claims(head).held}")
        world = world._replace(head=head)
        for who in range(3):  # nobody lags for ever
            if self.logs.depth[head] - self.logs.depth[world.places[who].node] > LAG:
                node = self.logs.after(world.places[who].node, head)
                world = world._replace(places=_put(world.places, who, world.places[who]._replace(node=node)))
        return world

    def _send(self, world: Exchange, who: int, event: Event, cause: int = 0) -> Iterator[tuple[str, Exchange]]:
        name = f"c{who} {type(event).__name__}"
        landed = self._append(world, event, cause)
        place = landed.places[who]._replace(appended=self.logs.depth[landed.head])
        yield name, landed._replace(places=_put(landed.places, who, place))
        if world.faults:
            less = world._replace(faults=world.faults - 1)
            waiting = less._replace(places=_put(less.places, who, less.places[who]._replace(appended=-1)))
            yield f"{name} late", waiting._replace(sent=_add(less.sent, (event, cause, who)))
            died = self._die(less, who)
            yield f"{name} crash", died._replace(sent=_add(died.sent, (event, cause, -1)))

    def _is_free(self, world: Exchange, who: int) -> bool:
        place = world.places[who]
        return place.appended >= 0 and self.logs.depth[place.node] >= place.appended

    # ------------------------------------------------------------ actions

    def successors(self, world: Exchange) -> Iterator[tuple[str, Exchange]]:
        """Raises Broken as soon as one of them breaks an invariant."""
        if world.is_committed:
            return
        for who, place in enumerate(world.places):
            if place.node != world.head:
                node = self.logs.after(place.node, world.head)
                yield f"c{who} reads", world._replace(places=_put(world.places, who, place._replace(node=node)))
        for late in set(world.sent):
            rest = world._replace(sent=tuple(item for item in world.sent if item != late))
            landed, who = self._append(rest, late[0], late[1]), late[2]
            if who >= 0:
                place = landed.places[who]._replace(appended=self.logs.depth[landed.head])
                landed = landed._replace(places=_put(landed.places, who, place))
            else:
                yield f"lost {type(late[0]).__name__}", rest
            yield f"lands {type(late[0]).__name__}", landed
        yield from self._core(world)
        for who in (1, 2):
            yield from self._satellite(world, who)
        if world.faults:
            for who in range(3):
                yield f"c{who} dies", self._die(world._replace(faults=world.faults - 1), who)

    def _die(self, world: Exchange, who: int) -> Exchange:
        """Its memory is gone; it joins again in training, under a new epoch."""
        world = world._replace(
            sums=_put(world.sums, who, ()),
            bases=_put(world.bases, who, ""),
            offered=_put(world.offered, who, False),
            epochs=_put(world.epochs, who, world.epochs[who] + 2),
            sent=_sorted(tuple((event, cause, -1 if by == who else by) for event, cause, by in world.sent)),
        )
        if who == 0:
            world = world._replace(due=(), refused=frozenset(), is_exposed=False)
        cell = (CORE, *SATELLITES)[who]
        world = self._append(world, CellLost(cell=cell, reason="dies"))
        for event in _to_training(cell, who, world.epochs[who]):
            world = self._append(world, event)
        world = world._replace(places=_put(world.places, who, Place(node=world.head)))
        if who == 0:  # what was accepted is computed again, whoever computed it before
            again = tuple(m for part in self.claims(world.head).parts for m in part.microsteps)
            world = world._replace(sums=_put(world.sums, 0, again))
        return world

    def _core(self, world: Exchange) -> Iterator[tuple[str, Exchange]]:
        if not self._is_free(world, 0):
            return
        claims = self.claims(world.places[0].node)
        if world.due:
            accepted, cause = world.due[0]
            yield from self._send(world._replace(due=world.due[1:]), 0, accepted, cause)
            return
        if not set(MICROSTEPS) - claims.accepted:
            order = tuple(m for part in order_of(claims.parts, MICROSTEPS) for m in part)
            if world.sums[0] != order and self.starts_over:
                yield "c0 adds again, as the log says", world._replace(sums=_put(world.sums, 0, order))
                return
            added = Counter(world.sums[0])
            demand("counted once", added == Counter(MICROSTEPS), f"the optimizer commits {added}")
            yield "commits", world._replace(is_committed=True)
            return
        epoch = world.epochs[0]
        if not world.is_exposed:
            exposed = WeightsExposed(step=1, minibatch=0, cell=CORE, epoch=epoch, digest="w", num_bytes=1, manifest="")
            for name, after in self._send(world, 0, exposed):
                yield name, after._replace(is_exposed="crash" not in name)
            return
        if mine := claims.held_by(CORE):
            added_ = world._replace(sums=_put(world.sums, 0, (*world.sums[0], mine[0])))
            own = MicrostepAccepted(step=1, microstep=mine[0], cell=CORE, epoch=epoch, loss_sum=0.0)
            yield "c0 computes", added_._replace(due=((own, 0),))
        elif free := claims.free(MICROSTEPS):
            yield from self._send(world, 0, MicrostepClaimed(step=1, microstep=free[0], cell=CORE, epoch=epoch))
        else:
            offer = next_offer(claims, MICROSTEPS)
            if offer is not None and offer.seq not in world.refused:
                yield from self._take(world, offer)
            elif world.faults and (cell := waited_for(claims, MICROSTEPS)):
                held = tuple(c for c in claims.held if c.cell == cell)
                back = ClaimsReturned(
                    step=1, cell=cell, epoch=held[0].epoch, microsteps=tuple(c.microstep for c in held), reason="late"
                )
                yield from self._send(world._replace(faults=world.faults - 1), 0, back)

    def _take(self, world: Exchange, offer: Any) -> Iterator[tuple[str, Exchange]]:
        """What lies in the satellite's memory now is read; its digest is of the micro-steps that were offered."""
        gradient = offer.gradient
        who = (CORE, *SATELLITES).index(gradient.cell)
        is_whole = world.sums[who] == gradient.microsteps and world.epochs[who] == gradient.epoch
        refused = world._replace(refused=world.refused | {offer.seq})
        if not is_whole:
            yield "c0 refuses a gradient", refused
            return
        due = tuple(
            (
                MicrostepAccepted(step=1, microstep=m, cell=gradient.cell, epoch=gradient.epoch, loss_sum=0.0),
                offer.seq,
            )
            for m in gradient.microsteps
        )
        yield (
            "c0 takes a gradient",
            world._replace(sums=_put(world.sums, 0, (*world.sums[0], *world.sums[who])), due=due),
        )

    def _satellite(self, world: Exchange, who: int) -> Iterator[tuple[str, Exchange]]:
        if not self._is_free(world, who):
            return
        cell, claims = SATELLITES[who - 1], self.claims(world.places[who].node)
        base, in_sum = world.bases[who], world.sums[who]
        mine = Sum(step=1 if base else 0, minibatch=0, base=base, microsteps=in_sum, is_offered=world.offered[who])
        empty = world._replace(sums=_put(world.sums, who, ()), offered=_put(world.offered, who, False))
        match next_duty(claims, cell, mine, MICROSTEPS):
            case "pull":
                yield f"{cell} pulls", empty._replace(bases=_put(world.bases, who, "w"))
            case "discard":
                yield f"{cell} discards", empty
            case "compute":
                fresh = next(m for m in claims.held_by(cell) if m not in in_sum)
                sums = _put(world.sums, who, (*in_sum, fresh))
                yield f"{cell} computes", world._replace(sums=sums, offered=_put(world.offered, who, False))
            case "claim":
                free = claims.free(MICROSTEPS)[0]
                found = find_cell(claims.cluster, cell)
                epoch = found.epoch if found is not None else 0
                yield from self._send(world, who, MicrostepClaimed(step=1, microstep=free, cell=cell, epoch=epoch))
            case "offer":
                offer = GradientOffered(
                    step=1, minibatch=0, cell=cell, epoch=world.epochs[who], base="w", microsteps=in_sum,
                    losses=(0.0,) * len(in_sum), sums=SUMS, session="", address=0, num_bytes=1, digest=str(in_sum),
                )  # fmt: skip
                told = world._replace(offered=_put(world.offered, who, True))
                yield from self._send(told, who, offer)

    # ------------------------------------------------------------ for the search

    def check(self, world: Exchange) -> None:
        """What holds in every state. Raises Broken."""
        recorded = Counter(m for part in self.claims(world.head).parts for m in part.microsteps)
        demand("counted once", all(num == 1 for num in recorded.values()), f"recorded {recorded}")

    def replays(self, world: Exchange) -> None:
        """From nothing but the log, the order of addition is the same. Raises Broken."""
        again = Claims()
        for recorded in self.logs.path(world.head):
            again = claims_fold.evolve(again, recorded)
        demand("replay", again == self.claims(world.head), "another order of addition")

    def is_done(self, world: Exchange) -> bool:
        return world.is_committed


def _to_training(cell: str, index: int, epoch: int) -> tuple[Event, ...]:
    """Joined, through rollout, into training."""
    return (
        CellJoined(cell=cell, index=index, capacity=1, engine_url="", model_digest="m"),
        CellLeased(cell=cell, role="rollout", epoch=epoch - 1),
        CellSwitched(cell=cell, role="rollout", epoch=epoch - 1, version=0, phases=()),
        CellLeased(cell=cell, role="train", epoch=epoch),
        CellFenced(cell=cell, epoch=epoch),
        CellSwitched(cell=cell, role="train", epoch=epoch, version=0, phases=()),
    )


def _put(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])


def _sorted(sent: tuple[tuple[Event, int, int], ...]) -> tuple[tuple[Event, int, int], ...]:
    return tuple(sorted(sent, key=repr))


def _add(sent: tuple[tuple[Event, int, int], ...], one: tuple[Event, int, int]) -> tuple[tuple[Event, int, int], ...]:
    return _sorted((*sent, one))
