"""Pure. Which cells take calls: a fold of the cell events, and the choice among them.

Invariant: a cell is open from `cell.switched` to rollout until its next fence, and only then. A fence
stays owed an answer until `cell.sessions_rerouted` with its epoch, across restarts of the gateway.
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
    version: int = 0
    """Of the weights that its engine holds: separates KV that must not be shared."""
    fence: int | None = None
    """Epoch of a fence that is not answered."""
    fence_seq: int = 0


Routes = Mapping[str, Route]


def evolve(routes: Routes, event: Event, seq: int) -> Routes:
    """Total: other events, and cells that never joined, change nothing."""
    if isinstance(event, CellJoined):
        fresh = Route(cell=event.cell, index=event.index, engine_url=event.engine_url, capacity=event.capacity)
        return {**routes, event.cell: fresh}
    route = routes.get(str(getattr(event, "cell", "")))
    if route is None:
        return routes
    match event:
        case CellSwitched():
            route = msgspec.structs.replace(route, open=event.role == "rollout", version=event.version)
        case WeightsPulled():
            route = msgspec.structs.replace(route, version=event.version)
        case CellFenced():
            route = msgspec.structs.replace(route, open=False, fence=event.epoch, fence_seq=seq)
        case SessionsRerouted() if event.epoch == route.fence:
            route = msgspec.structs.replace(route, fence=None)
        case SwitchRolledBack():
            route = msgspec.structs.replace(route, open=event.role == "rollout")
        case CellLost():
            route = msgspec.structs.replace(route, open=False, fence=None)
        case _:
            return routes
    return {**routes, route.cell: route}


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
