"""Pure. Where the time of something that is done in phases went.

clock -> Laps -> phases of an event. Invariant: the seconds of all phases add up to the time from the beginning to the
end of the last one; a phase that comes again adds up.
"""

from collections.abc import Callable

from gyre.events.types import Phase


class Laps:
    """Begins when it is made."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._begun_s = clock, clock()
        self._seconds: dict[str, float] = {}

    def end(self, name: str) -> None:
        """Of a phase that began at the end of the one before."""
        self.add(Phase(name=name, seconds=self.total_s() - sum(self._seconds.values())))

    def add(self, phase: Phase) -> None:
        """One that somebody else has measured."""
        self._seconds[phase.name] = self._seconds.get(phase.name, 0.0) + phase.seconds

    def total_s(self) -> float:
        """Since the beginning."""
        return self._clock() - self._begun_s

    @property
    def phases(self) -> tuple[Phase, ...]:
        """In the order in which each first ended."""
        return tuple(Phase(name=name, seconds=seconds) for name, seconds in self._seconds.items())
