"""The model check in its short form, and that it finds what is broken on purpose; `make model-check` does more."""

import pytest

from tests.protocol.broken_variants import VARIANTS
from tests.protocol.model_check import CONFIGS, check, check_gradients, check_variant
from tests.protocol.model_rules import INVARIANTS
from tests.protocol.model_search import Search
from tests.protocol.model_switching import Model, small_config

SHORT = 10_000


@pytest.mark.parametrize("options", [options for options, _ in CONFIGS], ids=str)
def test_no_state_within_reach_breaks_an_invariant(options: dict[str, object]) -> None:
    found = check(options, SHORT)
    assert found.broken is None, "\n".join((str(found.broken), *found.way))
    assert found.num_states >= SHORT and found.num_ends > 5


QUICK = (
    "a cell obeys every command that it reads",
    "leases and terms without compare-and-set",
    "an engine flips before every shard was verified",
    "memory is freed before the KV has another owner",
    "cells leave whatever the waterlevel is",
    "no dwell",
)
"""Those that are caught within seconds; the long form has them all."""


@pytest.mark.parametrize("name", QUICK)
def test_a_broken_variant_is_caught(name: str) -> None:
    found = check_variant(name, 100_000)
    assert found.broken is not None, f"{found.num_states} states, nothing found"
    assert found.broken.name in VARIANTS[name].breaks, found.broken


def test_each_micro_step_is_in_the_update_once_and_in_the_order_of_the_log() -> None:
    found = check_gradients(SHORT)
    assert found.broken is None, "\n".join((str(found.broken), *found.way))
    assert found.num_ends > 20


def test_a_core_that_does_not_compare_its_sum_with_the_log_is_caught() -> None:
    found = check_gradients(60_000, starts_over=False)
    assert found.broken is not None and found.broken.name == "counted once", found


def test_the_variants_break_many_invariants() -> None:
    named = {invariant for variant in VARIANTS.values() for invariant in variant.breaks}
    assert named <= set(INVARIANTS) and len(named) >= 7


def test_a_run_without_a_fault_goes_through_every_hop() -> None:
    model = Model(small_config())
    world = Search(model, 10**6).milestones(0)[-1]
    names = {type(recorded.event).__name__ for recorded in model.logs.path(world.head)}
    hops = {
        "CellLeased",
        "CellFenced",
        "SessionsRerouted",
        "KvMigrated",
        "EngineReleased",
        "WeightsPulled",
        "CellSwitched",
    }
    assert hops <= names
