"""Pure. When a cell should change role, by policy name: Inputs -> Move.

A policy sees all that a decision may depend on and asks for one move, or for none. Invariant: it has no state and no
clock of its own, so equal inputs give equal moves. What it asks for is checked by `scheduler.py`, whatever its name.

    waterlevel   arXiv 2609.33848: a cell leaves rollout once the capacity that remains covers the unfinished work
    colocated    all cells serve until all executions have finished, then all train
    static       the first cells of the order (`scheduler.num_training`) always train, the others always serve

The waterlevel: w = executions dispatched - finished never rises within a burst, so once the capacity that remains
covers it, it covers it until the burst ends. Executions that a publish entitles the dispatcher to, and that it has
not dispatched yet, count as unfinished here: otherwise a decision could slip in between the publish and the dispatch
that belongs to it.
"""

from typing import Protocol

from gyre.events.types import Role, Value
from gyre.projections.cluster import Cell


class Inputs(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Everything a decision depends on; `inputs_digest` is the digest of this.

    What was added later has a default and is left out of the digest while it has it.
    """

    policy: str
    term: int
    cells: tuple[Cell, ...]
    is_decision_open: bool
    step: int
    num_steps: int
    published_version: int
    published_seq: int
    num_unfinished: int
    """w(t), in executions."""
    num_owed: int
    """Executions that the last publish entitles the dispatcher to, not dispatched yet."""
    capacity: int
    """C_R."""
    next_cohort: tuple[str, ...]
    """Groups of the step to come; empty while it is not ready."""
    drained: tuple[str, ...] = ()
    """Cells that the operator wants no work on; never the core."""
    dwelling: tuple[str, ...] = ()
    """Cells that have not been in their role for `scheduler.dwell_s` yet."""
    num_training: int = 0
    """Of the policy `static`."""
    standalone: tuple[str, ...] = ()
    """Engines without a trainer: they count in C_R, and have no role to change."""

    @property
    def num_pending(self) -> int:
        return self.num_unfinished + self.num_owed

    @property
    def is_step_ready(self) -> bool:
        return bool(self.next_cohort) and self.step < self.num_steps


class Move(Value, frozen=True, kw_only=True):
    cell: Cell
    role: Role
    reason: str


class Policy(Protocol):
    def __call__(self, inputs: Inputs) -> Move | None: ...


def waterlevel(inputs: Inputs) -> Move | None:
    """One move at a time: the training prefix grows during a burst and is given back after its publish."""
    core = _core(inputs)
    if core is None:
        return None
    if _is_bursting(inputs, core):
        satellite = next((cell for cell in inputs.cells if cell.state not in ("TRAINING", "LOST")), None)
        return _leave(inputs, satellite) if satellite is not None else None
    if core.state != "TRAINING":
        return _last_comes_back(inputs) or _leave(inputs, core)
    return _last_comes_back(inputs) or _after_burst(inputs, core, inputs.num_pending <= inputs.capacity)


def colocated(inputs: Inputs) -> Move | None:
    """As the waterlevel with a level of 0: everybody serves, then everybody trains."""
    core = _core(inputs)
    if core is None:
        return None
    if _is_bursting(inputs, core):
        serving = next((cell for cell in inputs.cells if cell.state == "SERVING"), None)
        if serving is None or inputs.num_pending:
            return None
        return Move(cell=serving, role="train", reason=f"all cells train step {inputs.step + 1}")
    if core.state == "TRAINING":
        return _last_comes_back(inputs) or _after_burst(inputs, core, inputs.num_pending == 0)
    if back := _last_comes_back(inputs):
        return back
    if core.state != "SERVING" or inputs.num_pending or not inputs.is_step_ready:
        return None
    return Move(cell=core, role="train", reason=f"step {inputs.step + 1} is ready and no execution is unfinished")


def static(inputs: Inputs) -> Move | None:
    """The first cells leave once and stay, under a new lease for each burst; the rest is never asked."""
    for cell in inputs.cells:
        if cell.index >= inputs.num_training:
            if cell.state == "TRAINING":
                return Move(cell=cell, role="rollout", reason="its place in the order serves")
        elif cell.state == "SERVING":
            return Move(cell=cell, role="train", reason="its place in the order trains")
        elif cell.state == "TRAINING" and cell.switched_seq < inputs.published_seq and inputs.step < inputs.num_steps:
            return Move(cell=cell, role="train", reason=f"a burst begins with version {inputs.published_version}")
    return None


POLICIES: dict[str, Policy] = {"colocated": colocated, "static": static, "waterlevel": waterlevel}


def drain(inputs: Inputs) -> Move | None:
    """Before any policy: what the operator asked for. A drained cell leaves as soon as another one serves."""
    others = any(cell.state == "SERVING" and cell.cell not in inputs.drained for cell in inputs.cells)
    cell = next((c for c in inputs.cells if c.cell in inputs.drained and c.state == "SERVING"), None)
    if cell is None or not (others or inputs.num_pending == 0):
        return None
    return Move(cell=cell, role="train", reason="drained by the operator")


def refusal(inputs: Inputs, move: Move) -> str:
    """Why the move cannot be; empty when it can. Holds for any policy, so the words hold no number that changes."""
    cell = next((c for c in inputs.cells if c.cell == move.cell.cell), None)
    if cell is None:
        return f"{move.cell.cell} is not in the cluster"
    if cell.state not in ("SERVING", "TRAINING"):
        return f"{cell.cell} is {cell.state}; only a cell that has arrived in a role can leave it"
    if move.role == "rollout" and cell.state == "SERVING":
        return f"{cell.cell} serves already"
    if move.role == "train" and cell.cell in inputs.standalone:
        return f"{cell.cell} is a standalone engine: it has no trainer"
    others = any(c.state == "SERVING" and c.cell not in inputs.drained for c in inputs.cells if c.cell != cell.cell)
    if cell.state == "SERVING" and inputs.num_pending and not others:
        return f"{cell.cell} is the last cell in rollout, and executions are unfinished"
    return ""


def _core(inputs: Inputs) -> Cell | None:
    return next((cell for cell in inputs.cells if cell.index == 0), None)


def _is_bursting(inputs: Inputs, core: Cell) -> bool:
    return core.state == "TRAINING" and inputs.published_seq <= core.switched_seq


def _last_comes_back(inputs: Inputs) -> Move | None:
    """No burst is running: satellites come back, the last to leave first, so that the rest stays a prefix."""
    last = next((cell for cell in reversed(inputs.cells) if cell.state == "TRAINING" and cell.index > 0), None)
    if last is None:
        return None
    return Move(cell=last, role="rollout", reason=f"the burst ended with version {inputs.published_version}")


def _leave(inputs: Inputs, cell: Cell) -> Move | None:
    """The next cell of the prefix, when a step is there to be trained and the others can do without it."""
    pending, rest = inputs.num_pending, inputs.capacity - cell.capacity
    if cell.state != "SERVING" or pending > rest or (cell.index == 0 and not inputs.is_step_ready):
        return None
    what = f"step {inputs.step + 1} is ready" if cell.index == 0 else f"joins step {inputs.step + 1}"
    return Move(cell=cell, role="train", reason=f"{what}; {pending} unfinished <= C_R - C_e = {rest}")


def _after_burst(inputs: Inputs, core: Cell, is_covered: bool) -> Move:
    """The core stays, under a new epoch, only if it is not missed in rollout and has something to train."""
    if inputs.is_step_ready and is_covered:
        what = f"{inputs.num_pending} unfinished <= C_R = {inputs.capacity}"
        return Move(cell=core, role="train", reason=f"step {inputs.step + 1} is ready; {what}")
    return Move(cell=core, role="rollout", reason=f"the burst ended with version {inputs.published_version}")
