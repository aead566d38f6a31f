"""Pure. Ways through the states of a model: all that are near, one fault at every hop, and long ones by chance.

Direction: model, limits, seed -> Found (how many states, what is broken and how one gets there). States are told apart
by a hash of 64 bits where there are too many of them to keep.
"""

import random
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from tests.protocol.model_rules import INVARIANTS, Broken
from tests.protocol.model_switching import Model, World


class Found(NamedTuple):
    num_states: int
    num_logs: int
    num_ends: int
    """Ways that were followed, without another fault, to the end of the run."""
    broken: Broken | None = None
    way: tuple[str, ...] = ()
    """The actions that led there."""


class Search:
    """Counts the states that its ways meet. `budget` states end it."""

    def __init__(self, model: Model, budget: int) -> None:
        self.model, self.budget = model, budget
        self.met: set[int] = set()
        self.num_ends = 0
        self.way: list[str] = []

    def run(self, *, faults: int, drains: int = 1, seed: int = 1, near: float = 0.4, hops: float = 0.3) -> Found:
        """Shares of the budget go to what is near the milestones, and to faults at every hop; the rest is chance."""
        try:
            milestones = self.milestones(faults, drains=drains, seed=seed)
            self.nearest(milestones, int(near * self.budget))
            self.every_hop(milestones, int((near + hops) * self.budget), random.Random(seed))
            self.chance(faults + 2, drains, seed)
        except Broken as broken:
            return self._found(broken)
        return self._found(None)

    def milestones(self, faults: int, *, drains: int = 0, seed: int = 1) -> list[World]:
        """The states of a whole run without a fault, each with as many faults to come."""
        worlds = self.fair(self.model.start(0), random.Random(seed), slow="g00001")
        return [world._replace(faults=faults, drains=drains, ticks=8) for world in worlds]

    def nearest(self, beginnings: list[World], budget: int) -> None:
        """Breadth first, from all beginnings at once."""
        came_from: dict[World, tuple[World | None, str]] = dict.fromkeys(beginnings, (None, ""))
        queue = deque(came_from)
        while queue and len(self.met) < budget:
            world, name = queue.popleft(), ""
            try:
                for name, after in self.model.successors(world):
                    if after not in came_from:
                        came_from[after] = (world, name)
                        queue.append(after)
                        self._meet(after)
            except Broken:
                self.way = [*_way(came_from, world), f"then one of: {name}, ..."]
                raise

    def every_hop(self, beginnings: list[World], budget: int, rng: random.Random) -> None:
        """One fault at each of the beginnings, and from there on none: the run must end well.

        Each kind of fault once, then each a second time somewhere else, and so on.
        """
        kinds: dict[str, list[tuple[int, World]]] = {}
        for at, world in enumerate(beginnings):
            for name, after in self.model.successors(world):
                if after.faults < world.faults:
                    kinds.setdefault(name, []).append((at, after))
        for places in kinds.values():
            rng.shuffle(places)
        while kinds and len(self.met) < budget:
            for name in list(kinds):
                at, world = kinds[name].pop()
                if not kinds[name]:
                    del kinds[name]
                self.way = [f"milestone {at}", name]
                self._meet(world)
                self.fair(world, rng)

    def chance(self, faults: int, drains: int, seed: int) -> None:
        """Long ways with several faults, each to its end."""
        number = 0
        while len(self.met) < self.budget:
            number += 1
            rng = random.Random(f"{seed}-{number}")
            self.way = []
            world = self.model.start(faults, drains=drains)._replace(ticks=30)
            for name, world in _walk(self.model, world, rng, 60 + number % 240):  # noqa: B020 - the last one is kept
                self.way.append(name)
                self._meet(world)
            self.fair(world, rng)

    def fair(self, world: World, rng: random.Random, max_actions: int = 4000, slow: str = "") -> list[World]:
        """On without a fault: every action gets its turn, until the run is done. Raises Broken if it is not.

        What has `slow` in its name waits longer: executions that live while their cell leaves.
        """
        model = self.model
        world = world._replace(faults=0, drains=0, ticks=max_actions)
        worlds, last = [world], dict[str, int]()
        for number in range(max_actions):
            if model.is_done(world):
                model.replays(world)
                self.num_ends += 1
                return worlds
            ways = list(model.successors(world))
            if not ways:
                break
            # The one that has waited longest; a draw among equals.
            name, world = min(ways, key=lambda way: (_turn(last, way[0], slow), rng.random()))
            last[name] = number
            self._meet(world)
            worlds.append(world)
        cluster = model.cluster(world.head)
        states = ", ".join(f"{c.cell} {c.state}" for c in cluster.cells)
        raise Broken("ends", f"not done after {len(worlds)} actions: version {cluster.published_version}, {states}")

    def _meet(self, world: World) -> None:
        before = len(self.met)
        self.met.add(hash(world))
        if len(self.met) > before:
            self.model.check(world)

    def _found(self, broken: Broken | None) -> Found:
        return Found(len(self.met), len(self.model.logs.parent), self.num_ends, broken, tuple(self.way))


SLOW = 60


def _turn(last: dict[str, int], name: str, slow: str) -> int:
    return last.get(name, -1) + (SLOW if slow and slow in name else 0)


def _way(came_from: dict[World, tuple[World | None, str]], world: World) -> list[str]:
    names: list[str] = []
    at: World | None = world
    while at is not None:
        at, name = came_from[at]
        names.append(name)
    return names[-2::-1]


def _walk(model: Model, world: World, rng: random.Random, num_actions: int) -> Iterator[tuple[str, World]]:
    """One way, chosen by `rng`; faults are rarer than what goes well."""
    for _ in range(num_actions):
        ways = list(model.successors(world))
        usual = [way for way in ways if way[1].faults == world.faults]
        if not ways:
            return
        name, world = rng.choice(ways if rng.random() < 0.15 or not usual else usual)
        yield name, world


__all__ = ["INVARIANTS", "Broken", "Found", "Search"]
