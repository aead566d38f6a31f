"""Pure. All logs that a model has met, as a trie: each is a node, and what a fold says of it is computed once.

Invariant: a node stands for one sequence of events, so states that hold nodes instead of logs are small and are equal
when their logs are. Direction: (node, event) -> node -> folds, rules.
"""

from collections.abc import Callable, Mapping
from typing import Any

from gyre.events.codec import Envelope, Recorded
from gyre.events.subjects import event_subject
from gyre.events.types import Event

ROOT = 0
Fold = tuple[Any, Callable[[Any, Recorded], Any]]


class Logs:
    def __init__(self, folds: Mapping[str, Fold], relevant: Mapping[str, tuple[type[Event], ...]]) -> None:
        """`relevant`: by name, the event types of a sub-sequence, which `selected` gives."""
        self.parent = [-1]
        self.depth = [0]
        self.recorded: list[Recorded] = []  # of node n at n - 1
        self._children: dict[tuple[int, Event, str, int], int] = {}
        self._evolve = {name: evolve for name, (_, evolve) in folds.items()}
        self._states: dict[str, dict[int, Any]] = {name: {ROOT: initial} for name, (initial, _) in folds.items()}
        self._relevant = relevant
        self._selected: dict[str, dict[int, tuple[Recorded, ...]]] = {name: {ROOT: ()} for name in relevant}
        self._subjects: list[dict[str, int]] = [{}]

    def append(self, node: int, event: Event, writer: str, cause: int = 0) -> tuple[int, bool]:
        """The log with one more event, and whether it is new here."""
        key = (node, event, writer, cause)
        found = self._children.get(key)
        if found is not None:
            return found, False
        found = len(self.parent)
        self._children[key] = found
        seq = self.depth[node] + 1
        envelope = Envelope(writer=writer, incarnation=1, writer_seq=seq, prev="", time_ns=0, cause=cause, event=event)
        subject = event_subject("r", event)
        self.recorded.append(Recorded(seq=seq, subject=subject, digest="", envelope=envelope))
        self.parent.append(node)
        self.depth.append(seq)
        self._subjects.append({**self._subjects[node], subject: seq})
        return found, True

    def state(self, name: str, node: int) -> Any:
        states = self._states[name]
        found = states.get(node)
        if found is None:
            found = states[node] = self._evolve[name](self.state(name, self.parent[node]), self.recorded[node - 1])
        return found

    def selected(self, name: str, node: int) -> tuple[Recorded, ...]:
        """The events of the relevant types, in order."""
        kept = self._selected[name]
        found = kept.get(node)
        if found is None:
            found, recorded = self.selected(name, self.parent[node]), self.recorded[node - 1]
            if isinstance(recorded.event, self._relevant[name]):
                found = (*found, recorded)
            kept[node] = found
        return found

    def last_of(self, event: Event, node: int) -> int:
        """Sequence of the last event on the subject of this one."""
        return self._subjects[node].get(event_subject("r", event), 0)

    def after(self, place: int, head: int) -> int:
        """The node that a reader at `place` comes to next on its way to `head`."""
        while self.parent[head] != place:
            head = self.parent[head]
        return head

    def path(self, node: int) -> list[Recorded]:
        found = []
        while node != ROOT:
            found.append(self.recorded[node - 1])
            node = self.parent[node]
        return found[::-1]
