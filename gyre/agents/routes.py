"""Pure. Which cells take calls: a fold of the cell events, and the choice among them.

Invariants: a cell is open from `cell.switched` to rollout until its next fence, and only then; what comes late or twice
of a switch that has ended changes nothing. A fence stays owed an answer until `cell.sessions_rerouted` with its epoch,
or the end of its switch, across restarts of the gateway.
"""

from collections.abc import Mapping

import msgspec

from gyre.events.types import (
    CellFenced,
    CellJoined,
    CellLost,
    CellSwitched,
    Event,
    SessionsRerouted,
    SwitchRolledBack,
    WeightsPulled,
)


class Route(msgspec.Struct, frozen=True, kw_only=True):
    cell: str
    index: int
    engine_url: str
    capacity: int
    """C_e: calls that it has room for when others move to it."""
    open: bool = False
    epoch: int = 0
    """The newest that any event of the cell names."""
    is_settled: bool = True
    """No switch is under way."""
    version: int = 0
    """Of the weights that its engine holds: separates KV that must not be shared."""
    fence: int | None = None
    """Epoch of a fence that is not answered."""
    fence_seq: int = 0
    lost: bool = False
    """Nobody answers there, until it joins again."""


Routes = Mapping[str, Route]


def evolve(routes: Routes, event: Event, seq: int) -> Routes:
    """Total: other events, and cells that never joined, change nothing."""
    if isinstance(event, CellJoined):
        epoch = routes[event.cell].epoch if event.cell in routes else 0
        joined = Route(
            cell=event.cell,
            index=event.index,
            engine_url=event.engine_url,
            capacity=event.capacity,
            epoch=epoch,
        )
        return {**routes, event.cell: joined}
    route = routes.get(str(getattr(event, "cell", "")))
    if route is None:
        return routes
    after = _evolve(route, event, seq)
    return routes if after is route else {**routes, route.cell: after}


def _evolve(route: Route, event: Event, seq: int) -> Route:
    replace, epoch = msgspec.structs.replace, int(getattr(event, "epoch", 0))
    if isinstance(event, CellLost):
        return replace(route, open=False, fence=None, is_settled=True, lost=True)
    if epoch > route.epoch:
        route = replace(route, epoch=epoch, is_settled=False, fence=None)
    match event:
        case _ if epoch < route.epoch:
            return route
        case WeightsPulled():
            return replace(route, version=max(route.version, event.version))
        case SessionsRerouted():
            return replace(route, fence=None)
        case CellFenced() if not route.is_settled:
            return replace(route, open=False, fence=epoch, fence_seq=seq)
        case CellSwitched() if not route.is_settled:
            is_open = event.role == "rollout"
            return replace(route, open=is_open, version=event.version, is_settled=True, fence=None)
        case SwitchRolledBack() if not route.is_settled:
            return replace(route, open=event.role == "rollout", is_settled=True, fence=None)
    return route


def choose(routes: Routes, num_calls: Mapping[str, int], last: str) -> Route | None:
    """The session's last cell while it is open, for its KV is there. One that has to move goes to the last cell in the
    fixed order that has room: it stays in rollout longest. A new one goes to the cell with the fewest calls."""
    if last in routes and routes[last].open:
        return routes[last]
    found = [route for route in routes.values() if route.open]
    roomy = [route for route in found if num_calls.get(route.cell, 0) < route.capacity]
    if last in routes and roomy:
        return max(roomy, key=lambda route: route.index)
    return min(found, key=lambda route: (num_calls.get(route.cell, 0), route.index), default=None)
