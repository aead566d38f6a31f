"""A cell's own state machine: which hop is next, and which commands count."""

import msgspec
import pytest
from cell_logs import arrival, departure, fold, joined, published, records
from hypothesis import given
from hypothesis import strategies as st

from gyre.events.types import (
    CellFenced,
    CellLeased,
    CellLost,
    Decided,
    Event,
    KvMigrated,
    SwitchRequested,
    SwitchRolledBack,
    TermStarted,
    WeightsLocated,
)
from gyre.workers.roles import CellRoles, evolve, next_hop

SERVING = (TermStarted(term=2), published(0), joined(), *arrival("c0", 1, 0))


def command(role: str = "train", epoch: int = 2, term: int = 2) -> SwitchRequested:
    return SwitchRequested(cell="c0", role=role, epoch=epoch, term=term)  # type: ignore[arg-type]


def after(*events: Event) -> CellRoles:
    state: CellRoles = fold(evolve, CellRoles(cell="c0"), records(events))
    return state


def hop(*events: Event) -> tuple[str, str, int, int] | None:
    """Kind, role, epoch and cause of what comes next."""
    found = next_hop(after(*events))
    return None if found is None else (found.kind, found.role, found.epoch, found.cause)


def test_a_cell_arrives_in_rollout_by_itself() -> None:
    start = (joined(), *arrival("c0", 1, 0))
    assert hop() == ("join", "rollout", 1, 0)
    assert hop(*start[:1]) == ("lease", "rollout", 1, 1)
    assert hop(*start[:2]) == ("await_publish", "rollout", 1, 2)
    log = (start[0], start[1], published(0), start[2], start[3])
    assert hop(*log[:3]) == ("pull", "rollout", 1, 3)
    assert hop(*log[:4]) == ("arrive", "rollout", 1, 4)
    assert hop(*log) is None


def test_a_cell_that_serves_takes_each_version_under_the_lease_that_it_has() -> None:
    newer = (*SERVING, published(1))
    assert hop(*newer) == ("pull", "rollout", 1, len(newer))
    assert hop(*newer, published(1)) == hop(*newer), "what is told twice counts once"
    pulled = arrival("c0", 1, 1)[1]
    assert hop(*newer, pulled) is None and after(*newer, pulled).version == 1
    assert after(*newer, pulled, arrival("c0", 1, 0)[1]).version == 1, "what is told twice"
    late = arrival("c0", 0, 5)[1]
    assert after(*newer, late).version == 0, "of another lease"
    assert hop(*newer, command()) == ("lease", "train", 2, len(newer) + 1), "a command comes first"


def test_what_a_cell_pulls_is_what_the_log_tells_of_last() -> None:
    located = WeightsLocated(version=1, digest="d1", num_bytes=4, manifest="{1}")
    state = after(*SERVING, located, published(1), published(0))
    assert (state.manifest, state.published_version, state.published_digest) == ("{1}", 1, "d1")
    assert state.seq == len(SERVING) + 3
    pull = next_hop(state)
    assert pull is not None and (pull.kind, pull.version) == ("pull", 1)
    arrive = next_hop(after(*SERVING, command(), *departure("c0", 2, 0), *arrival("c0", 3, 7)[:2]))
    assert arrive is not None and (arrive.kind, arrive.version) == ("arrive", 7)


def test_what_another_cell_does_is_none_of_its_business() -> None:
    others = (joined("c9", 9), *arrival("c9", 4, 0), *departure("c9", 5, 0)[:2], CellLost(cell="c9", reason="x"))
    state = after(*SERVING, *others)
    assert msgspec.structs.replace(state, seq=len(SERVING)) == after(*SERVING)
    assert state.subject_seq == len(SERVING), "what its next lease is compared with"


def test_each_hop_into_training_follows_from_the_one_before() -> None:
    log = (*SERVING, command(), *departure("c0", 2, 0))
    kinds = [hop(*log[:n]) for n in range(len(SERVING), len(log) + 1)]
    assert kinds == [
        None,
        ("lease", "train", 2, 7),
        ("fence", "train", 2, 8),
        ("await_reroute", "train", 2, 9),
        ("release", "train", 2, 10),
        ("arrive", "train", 2, 11),
        None,
    ]


def test_the_way_back_pulls_the_newest_version() -> None:
    log = (*SERVING, command(), *departure("c0", 2, 0), published(3), command("rollout", 3))
    assert hop(*log) == ("lease", "rollout", 3, 14)
    found = next_hop(after(*log, CellLeased(cell="c0", role="rollout", epoch=3)))
    assert found is not None and (found.kind, found.version) == ("pull", 3)


def test_a_renewed_training_lease_needs_no_hop() -> None:
    log = (*SERVING, command(), *departure("c0", 2, 0), published(1), command("train", 3))
    found = next_hop(after(*log, CellLeased(cell="c0", role="train", epoch=3)))
    assert found is not None and (found.kind, found.role, found.version) == ("arrive", "train", 1)


@pytest.mark.parametrize(
    "refused",
    [command(term=1), command(epoch=1), command(epoch=0), SwitchRequested(cell="c9", role="train", epoch=2, term=2)],
    ids=["older term", "epoch in use", "older epoch", "another cell"],
)
def test_what_is_refused_leads_to_nothing(refused: Event) -> None:
    assert hop(*SERVING, refused) is None


def test_a_command_to_a_cell_without_a_role_is_refused() -> None:
    assert hop(*SERVING, CellLost(cell="c0", reason="x"), command()) == ("join", "rollout", 3, 0)


def test_of_commands_the_newest_counts_and_what_it_says_first() -> None:
    assert hop(*SERVING, command(), command()) == ("lease", "train", 2, 7)
    assert hop(*SERVING, command(), command(epoch=3)) == ("lease", "train", 3, 8)
    assert hop(*SERVING, command(epoch=3), command()) == ("lease", "train", 3, 7)


def test_a_command_that_counts_ends_the_word_of_every_scheduler_before() -> None:
    log = (*SERVING, command(term=3), *departure("c0", 2, 0))
    assert hop(*log, command("rollout", 3, term=2)) is None
    assert hop(*log, command("rollout", 3, term=3)) == ("lease", "rollout", 3, len(log) + 1)


def test_a_lease_ends_the_commands_up_to_its_epoch() -> None:
    assert hop(*SERVING, command(), *arrival("c0", 3, 0)) is None
    assert hop(*SERVING, command(epoch=4), *arrival("c0", 3, 0)) == ("lease", "train", 4, 7)


@pytest.mark.parametrize("begun", [(), (command(),), (command(), *departure("c0", 2, 0)[:2]), departure("c0", 2, 0)])
def test_a_cell_that_starts_again_begins_in_rollout_whatever_it_was_at(begun: tuple[Event, ...]) -> None:
    """Its engine and its trainer are new processes, whether or not anybody said that it was lost."""
    top = 2 if begun else 1
    assert after(*SERVING, *begun, CellLost(cell="c0", reason="x")).role is None
    for lost in ((), (CellLost(cell="c0", reason="x"),)):
        log = (*SERVING, *begun, *lost, joined())
        assert hop(*log) == ("lease", "rollout", top + 1, len(log))
        assert hop(*log, command(epoch=7)) == ("lease", "rollout", 8, len(log)), "it has no role to leave yet"


@pytest.mark.parametrize("num_hops", range(1, 6))
def test_nothing_of_another_epoch_advances_a_switch(num_hops: int) -> None:
    """Else weights could be taken from a device that the engine still has."""
    log = (*SERVING, command(), *departure("c0", 2, 0)[:num_hops])
    others = [event for epoch in (1, 3) for event in departure("c0", epoch, 0)[1:]]
    others += [KvMigrated(cell="c0", epoch=2, target="c1", num_tokens=1, num_bytes=1)]
    for event in (*others, CellLeased(cell="c0", role="rollout", epoch=2)):
        assert hop(*log, event) == hop(*log), event


def test_a_lease_of_its_own_goes_above_every_epoch_that_was_named() -> None:
    decided = Decided(
        term=2, policy="waterlevel", cell="c0", role="train", epoch=2, waterlevel=0, capacity=4, cell_capacity=4,
        reason="", inputs_digest="",
    )  # fmt: skip
    lost = CellLost(cell="c0", reason="x")
    assert hop(*SERVING, decided, lost, joined()) == ("lease", "rollout", 3, 9)
    assert hop(*SERVING, decided, command(), lost, joined()) == ("lease", "rollout", 3, 10)


def test_a_roll_back_ends_the_switch_and_keeps_the_role() -> None:
    log = (*SERVING, command(), *departure("c0", 2, 0)[:2])
    state = after(*log, SwitchRolledBack(cell="c0", role="rollout", epoch=2, reason="late"))
    assert next_hop(state) is None
    assert (state.role, state.leased_epoch) == ("rollout", 2)
    # A late answer to the fence of that epoch changes nothing.
    assert next_hop(fold(evolve, state, records(departure("c0", 2, 0)[2:3]))) is None


@given(st.data())
def test_a_command_k_times_is_a_command_once(data: st.DataObject) -> None:
    log: list[Event] = [*SERVING]
    for event in (command(), *departure("c0", 2, 0), published(1), command("rollout", 3), *arrival("c0", 3, 1)):
        log.append(event)
        log += [command()] * data.draw(st.integers(0, 2))
        if event == command("rollout", 3) or log.count(command("rollout", 3)):
            log += [command("rollout", 3)] * data.draw(st.integers(0, 2))
    state = after(*log)
    assert next_hop(state) is None
    assert (state.role, state.version, state.leased_epoch) == ("rollout", 1, 3)


@given(st.permutations(departure("c0", 2, 0)))
def test_events_of_an_epoch_without_a_lease_change_no_role(events: list[Event]) -> None:
    state = after(*SERVING, *(e for e in events if not isinstance(e, CellLeased)))
    assert (state.role, state.leased_epoch, state.lease) == ("rollout", 1, None)
    assert next_hop(after(*SERVING, CellFenced(cell="c0", epoch=2))) is None
