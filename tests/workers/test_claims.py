"""Who computes which micro-step, and what is added in which order."""

from typing import Any

import msgspec
import pytest
from cell_logs import arrival, completed, consumed, departure, fold, joined, published, record, records
from hypothesis import given
from hypothesis import strategies as st

from gyre.events.types import (
    BatchAssembled,
    CellLeased,
    CellLost,
    ClaimsReturned,
    DrainRequested,
    Event,
    GradientOffered,
    GradientSums,
    MicrostepAccepted,
    MicrostepClaimed,
    StepRejected,
    WeightsExposed,
)
from gyre.workers import claims as claims_fold
from gyre.workers.claims import Claims, Sum, next_duty, next_offer, order_of, waited_for

CELLS = ("c0", "c1", "c2")
ALL = (0, 1, 2, 3)


def training(*cells: str) -> tuple[Event, ...]:
    return tuple(
        event
        for cell in cells
        for event in (joined(cell, CELLS.index(cell)), *arrival(cell, 1, 0), *departure(cell, 2, 0))
    )


BATCH = BatchAssembled(
    step=1, digest="b", through_seq=1, seed=1, num_executions=1, num_trajectories=1, num_tokens=1, num_targets=1,
    num_microsteps=4,
)  # fmt: skip
BEGUN = (published(0), *training(*CELLS), consumed(1, (0,)), BATCH)


def exposed(digest: str = "w", minibatch: int = 0) -> WeightsExposed:
    return WeightsExposed(step=1, minibatch=minibatch, cell="c0", epoch=2, digest=digest, num_bytes=1, manifest="{}")


def claimed(cell: str, microstep: int, epoch: int = 2, step: int = 1) -> MicrostepClaimed:
    return MicrostepClaimed(step=step, microstep=microstep, cell=cell, epoch=epoch)


def offered(cell: str, *microsteps: int, base: str = "w", epoch: int = 2) -> GradientOffered:
    sums = GradientSums(
        loss=0.0, entropy=0.0, num_clipped=0, logprob_gap=0.0, logprob_gap_max=0.0, kl=0.0, num_tokens=0, num_targets=0
    )
    return GradientOffered(
        step=1, minibatch=0, cell=cell, epoch=epoch, base=base, microsteps=microsteps, losses=(0.0,) * len(microsteps),
        sums=sums, session="s", address=1, num_bytes=1, digest="g",
    )  # fmt: skip


Happened = Event | tuple[Event, int]
"""With its cause, where that matters."""


def accepted(cell: str, microstep: int, offer_seq: int = 0) -> Happened:
    return MicrostepAccepted(step=1, microstep=microstep, cell=cell, epoch=2, loss_sum=0.0), offer_seq


def returned(cell: str, *microsteps: int) -> ClaimsReturned:
    return ClaimsReturned(step=1, cell=cell, epoch=2, microsteps=microsteps, reason="late")


def append(claims: Claims, happened: Happened) -> Claims:
    event, cause = happened if isinstance(happened, tuple) else (happened, 0)
    return claims_fold.evolve(claims, record(claims.seq + 1, event, cause))


def after(*events: Happened) -> Claims:
    claims: Claims = fold(claims_fold.evolve, Claims(), records((*BEGUN, exposed())))
    for event in events:
        claims = append(claims, event)
    return claims


def place(*events: Happened) -> int:
    """Where the last of these stands on the log of `after`."""
    return len(BEGUN) + 1 + len(events)


def test_the_first_valid_claim_wins() -> None:
    found = after(claimed("c1", 0), claimed("c2", 0), claimed("c2", 1, epoch=1), claimed("c2", 2, step=2))
    assert [(c.microstep, c.cell) for c in found.held] == [(0, "c1")]
    assert found.free(ALL) == (1, 2, 3)


def test_claims_go_back_when_their_cell_leaves_or_the_core_returns_them() -> None:
    held = (claimed("c1", 0), claimed("c2", 1), claimed("c1", 2))
    lost = after(*held, CellLost(cell="c1", reason="x"))
    assert (lost.held_by("c1"), lost.held_by("c2"), lost.free(ALL)) == ((), (1,), (0, 2, 3))
    assert after(*held, CellLeased(cell="c1", role="rollout", epoch=3)).held_by("c1") == ()
    assert after(*held, returned("c1", 0, 2)).free(ALL) == (0, 2, 3)
    assert after(*held, returned("c1", 0)).held_by("c1") == (2,), "claimed while the core gave back what it saw"


def test_what_was_computed_on_other_weights_is_given_up_and_on_the_same_ones_kept() -> None:
    held = (claimed("c1", 0), claimed("c0", 1))
    for other in (exposed("other weights"), exposed(minibatch=1)):  # an update whose gradient is 0 moves no weight
        found = after(*held, other)
        assert (found.held_by("c1"), found.held_by("c0"), found.exposed) == ((), (1,), other)
    assert after(*held, exposed()).held_by("c1") == (0,), "a core that starts again in the step exposes them once more"


REJECTED = StepRejected(step=1, guard="kl", value=1.0, bound=0.0, detail="", action="rollback")
LATE: tuple[Event, ...] = (
    consumed(1, (0,)), BATCH, exposed("v"), claimed("c1", 2), offered("c2", 1), returned("c1", 0), completed(1),
    REJECTED, MicrostepAccepted(step=1, microstep=3, cell="c0", epoch=2, loss_sum=0.0),
)  # fmt: skip
"""What may be heard of a step after its end: its writer died before it heard that it was written."""


@pytest.mark.parametrize("event", [*LATE, consumed(2, (0,))], ids=lambda e: f"{type(e).__name__}{e.step}")
def test_what_comes_late_leaves_the_claims_as_they_are(event: Event) -> None:
    """Otherwise no claim would hold any more, and the core would claim again and again, for ever."""
    second = (consumed(2, (0,)), *(msgspec.structs.replace(e, step=2) for e in (BATCH, exposed("w2"))))
    claims = after(completed(1), *second, claimed("c1", 0, step=2), claimed("c2", 1, step=2))
    assert (claims.step, claims.held_by("c1"), claims.batch_digest) == (2, (0,), "b")
    found = append(claims, event)
    assert msgspec.structs.replace(found, seq=claims.seq, cluster=claims.cluster) == claims


def test_a_batch_that_comes_twice_takes_no_claim_away() -> None:
    assert after(claimed("c1", 0), BATCH).held_by("c1") == (0,)


def test_a_step_that_was_rejected_begins_at_nothing_under_its_number() -> None:
    found = after(claimed("c1", 0), accepted("c0", 1), REJECTED, BATCH)
    assert (found.step, found.held, found.parts, found.exposed) == (1, (), (), None)
    assert append(found, claimed("c1", 1)).held_by("c1") == (1,)


def test_nobody_knows_a_stranger() -> None:
    found = after(claimed("c9", 0), offered("c9", 0))
    assert found.held == () and next_offer(found, ALL) is None
    assert next_duty(found, "c9", Sum(), ALL) is None


def test_a_gradient_is_accepted_as_a_whole_and_in_the_order_of_its_claims() -> None:
    events = (claimed("c0", 0), claimed("c1", 3), claimed("c1", 1), offered("c1", 3, 1))
    seq = place(*events)
    found = after(*events, accepted("c0", 0), accepted("c1", 3, seq))
    assert [(p.cell, p.microsteps, p.offer_seq) for p in found.parts] == [("c0", (0,), 0), ("c1", (3, 1), seq)]
    assert after(*events, accepted("c0", 0), accepted("c1", 3, seq), accepted("c1", 1, seq)).parts == found.parts
    assert found.free(ALL) == (2,)
    assert order_of(found.parts, ALL) == ((0,), (3, 1)) and order_of(found.parts, (1, 3)) == ((3, 1),)
    assert after(*events, completed(1)).step == 0
    other = after(claimed("c2", 2), *events, accepted("c1", 3, seq + 1))
    assert other.held_by("c2") == (2,), "whose micro-steps are others goes on"


def test_the_core_takes_gradients_in_the_order_of_the_cells() -> None:
    events = (claimed("c1", 0), claimed("c2", 1), offered("c2", 1))
    assert next_offer(after(*events), ALL) is None
    assert waited_for(after(*events), ALL) == "c1"
    second = after(*events, offered("c1", 0))
    taken = next_offer(second, ALL)
    assert taken is not None and taken.gradient.cell == "c1"
    gone = next_offer(after(*events, CellLost(cell="c1", reason="x")), ALL)
    assert gone is not None and gone.gradient.cell == "c2"
    assert next_offer(after(*events, offered("c1", 0, base="old")), ALL) is None
    last = next_offer(append(second, accepted("c1", 0, second.seq)), ALL)
    assert last is not None and last.gradient.cell == "c2"
    assert waited_for(after(*events), (1, 2)) == "c2" and waited_for(after(*events), (2, 3)) == ""


def test_only_a_gradient_of_what_its_cell_still_holds_is_added() -> None:
    """Anything else would be counted twice, or is not in the memory of that cell any more."""
    whole = (claimed("c1", 0), claimed("c1", 1), offered("c1", 0, 1))
    assert next_offer(after(*whole), ALL) is not None
    again = (returned("c1", 0, 1), claimed("c1", 0), claimed("c0", 1))
    assert next_offer(after(*whole, *again, accepted("c0", 1)), ALL) is None, "micro-step 1 is the core's by now"
    lost = CellLost(cell="c1", reason="x")
    assert next_offer(after(*whole, lost, claimed("c2", 0), claimed("c2", 1)), ALL) is None, "of the cell before"
    back = (*arrival("c1", 3, 0), *departure("c1", 4, 0))
    retaken = (claimed("c1", 0, epoch=4), claimed("c1", 1, epoch=4))
    assert next_offer(after(*whole, lost, *back, *retaken), ALL) is None, "of its life before"
    assert next_offer(after(claimed("c1", 0), offered("c1")), ALL) is None, "of nothing"


def test_a_newer_gradient_of_a_cell_stands_for_an_older_one() -> None:
    events = (claimed("c1", 0), offered("c1", 0), offered("c1", 0))
    taken = next_offer(after(*events), ALL)
    assert taken is not None and taken.seq == place(*events)


def test_who_claimed_what_was_accepted_of_a_lost_cell_begins_again() -> None:
    """The core had read the gradient before the cell was lost; another cell has one of its micro-steps by then."""
    events = (claimed("c1", 0), claimed("c1", 1), offered("c1", 0, 1))
    seq = place(*events)
    late = (CellLost(cell="c1", reason="x"), claimed("c2", 0), claimed("c2", 2), accepted("c1", 0, seq))
    found = after(*events, *late)
    assert found.accepted == {0, 1} and found.held_by("c2") == ()
    duty = next_duty(found, "c2", Sum(step=1, base="w", microsteps=(0, 2)), ALL)
    assert duty == "discard"


def test_what_a_satellite_does() -> None:
    mine = Sum(step=1, base="w")

    def duty(mine: Sum, *events: Happened, cell: str = "c1") -> str | None:
        return next_duty(after(*events), cell, mine, ALL)

    assert duty(Sum()) == "pull"
    assert duty(mine) == "claim"
    assert duty(mine, claimed("c1", 0)) == "compute"
    one = msgspec.structs.replace(mine, microsteps=(0,))
    assert duty(one, claimed("c1", 0)) == "claim"
    rest = (claimed("c0", 1), claimed("c0", 2), claimed("c2", 3))
    assert duty(one, claimed("c1", 0), *rest) == "offer"
    assert duty(msgspec.structs.replace(one, is_offered=True), claimed("c1", 0), *rest) is None
    assert duty(one, claimed("c1", 0), CellLost(cell="c1", reason="x")) is None
    assert duty(one, exposed("v")) == "pull"
    assert duty(mine, *rest, claimed("c0", 0)) is None
    drained = DrainRequested(cell="c1", reason="x")
    assert duty(Sum(), drained) is None and duty(mine, drained) is None
    assert duty(mine, claimed("c1", 0), drained) == "compute" and duty(one, claimed("c1", 0), drained) == "offer"
    fresh: Any = fold(claims_fold.evolve, Claims(), records(BEGUN))
    assert next_duty(fresh, "c1", mine, ALL) is None, "nothing is exposed"


@st.composite
def happenings(draw: st.DrawFn) -> list[Event]:
    cells, microsteps = st.sampled_from(CELLS), st.sampled_from(ALL)
    kinds: list[st.SearchStrategy[Event]] = [
        st.builds(claimed, cells, microsteps),
        st.builds(lambda cell: CellLost(cell=cell, reason="x"), cells),
        st.builds(lambda cell: ClaimsReturned(step=1, cell=cell, epoch=2, microsteps=ALL, reason="x"), cells),
        st.builds(lambda: exposed()),
    ]
    return draw(st.lists(st.one_of(kinds), max_size=30))


@given(happenings(), st.data())
def test_every_microstep_is_in_one_part_at_most_and_held_by_one_cell_at_most(events: list[Event], data: Any) -> None:
    """Whatever happens: satellites offer what they hold, and the core accepts offers and its own, at any time."""
    claims = after()
    for event in events:
        more: list[Happened] = [event]
        cell = data.draw(st.sampled_from(CELLS[1:]))
        if held := claims.held_by(cell):
            more.append(offered(cell, *held))
        if claims.offers and data.draw(st.booleans()):
            offer = data.draw(st.sampled_from(claims.offers))
            if not set(offer.gradient.microsteps) & claims.accepted:
                more.append(accepted(offer.gradient.cell, offer.gradient.microsteps[0], offer.seq))
        for each in more:
            claims = append(claims, each)
        parts = [m for part in claims.parts for m in part.microsteps]
        assert len(parts) == len(set(parts))
        holders = [claim.microstep for claim in claims.held]
        assert len(holders) == len(set(holders)) and not set(holders) & set(parts)
