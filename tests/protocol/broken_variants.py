"""Pure. Ways to break the protocol on purpose, by name: each is a patch of code that decides, and what it must break.

A model check that does not find them has no worth. Direction: name -> patches of modules, the invariant that fails.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from gyre.agents import dispatch
from gyre.events.codec import Recorded
from gyre.events.types import CohortConsumed, SwitchRequested
from gyre.projections import cluster as cluster_fold
from gyre.workers import kv_migration, roles, scheduler, scheduler_policies
from gyre.workers.roles import CellRoles, Command
from tests.protocol import model_switching


class Variant(NamedTuple):
    patches: tuple[tuple[Any, str, Callable[..., Any]], ...]
    breaks: tuple[str, ...]
    """Any of these invariants: which one is met first depends on the way."""
    options: tuple[tuple[str, Any], ...] = ()
    """Of `small_config`."""


def _accept_anything(state: CellRoles, command: SwitchRequested, seq: int) -> CellRoles:
    return msgspec.structs.replace(state, command=Command(role=command.role, epoch=command.epoch, seq=seq))


def _leave_at_once(inputs: scheduler_policies.Inputs, cell: Any) -> Any:
    if cell.state != "SERVING" or (cell.index == 0 and not inputs.is_step_ready):
        return None
    return scheduler_policies.Move(cell=cell, role="train", reason="whatever w is")


def _arrive_again(cell: Any, event: Any, seq: int) -> Any:
    return _arrive(msgspec.structs.replace(cell, settled_epoch=0), event, seq)


def _land_unchecked(model: Any, world: Any, sent: Any) -> Any:
    return _land(model, world, sent._replace(expect=-1))


def _count_twice(state: dispatch.Dispatch, recorded: Recorded) -> None:
    if isinstance(recorded.event, CohortConsumed):
        state._consumed.clear()
    _evolve_dispatch(state, recorded)


_arrive, _land = cluster_fold._arrive, model_switching.Model._land
_evolve_dispatch = dispatch.Dispatch.evolve
MODEL = model_switching.Model

VARIANTS: dict[str, Variant] = {
    "a cell obeys every command that it reads": Variant(
        ((roles, "_accept", _accept_anything),), ("one role", "once", "ends")
    ),
    "leases and terms without compare-and-set": Variant(
        ((MODEL, "_land", _land_unchecked),), ("one role", "one leader")
    ),
    "an engine flips before every shard was verified": Variant(
        ((MODEL, "verifies", lambda self, engine: True),), ("whole",)
    ),
    "memory is freed before the KV has another owner": Variant(
        ((kv_migration, "is_settled", lambda state, cell: True),), ("kv",)
    ),
    "cells leave whatever the waterlevel is": Variant(
        ((scheduler_policies, "_leave", _leave_at_once),), ("rollout",), (("num_steps", 3), ("lookahead", 2))
    ),
    "what comes late of a switch that ended still counts": Variant(
        ((cluster_fold, "_arrive", _arrive_again),), ("once",)
    ),
    "no dwell": Variant(((scheduler, "_dwelling", lambda cluster, dwell_s: ()),), ("dwell",), (("dwell_s", 3.0),)),
    "a cohort that is told of twice is two": Variant(
        ((dispatch.Dispatch, "evolve", _count_twice),), ("bounds",), (("num_steps", 3), ("lookahead", 0))
    ),
}
