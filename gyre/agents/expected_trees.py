"""Pure. The tree that a scenario makes: call events -> lines, and the lines that were written by hand.

Invariant: a line says what one call was for and how it was placed, and names calls by role class and number within
it. So the lines of two runs are the same whichever of calls that overlap came first.

    main 0          root
    main 1          continue main 0
    sub-agent 0     sub-agent of main 0

Expected lines lie in expected/<harness>.txt, a `[section]` a scenario; `not offered: why` stands for all of them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from gyre.errors import ConfigError
from gyre.events.types import BranchForked, CallStarted, ContextCompacted, Event, SubAgentSpawned

NOT_OFFERED = "not offered: "
REASONS = ("retry", "edit", "drift")
"""Of forks that need one; a sub-agent and a compacted chain say where they come from."""


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    lines: tuple[str, ...] = ()
    not_offered: str = ""
    """Why the harness cannot do it."""


def parse_expected(text: str, source: str) -> Mapping[str, Expected]:
    """Scenario -> what is expected. Raises ConfigError."""
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("["):
            lines = sections.setdefault(line.strip("[]"), [])
        elif line.strip() and not line.startswith("#"):
            if not sections:
                raise ConfigError(f"{source}: line {number}: {line!r} stands before any [scenario]; put one above it")
            lines.append(" ".join(line.split()))
    return {
        name: Expected(not_offered=lines[0].removeprefix(NOT_OFFERED))
        if lines and lines[0].startswith(NOT_OFFERED)
        else Expected(lines=tuple(lines))
        for name, lines in sections.items()
    }


def describe_tree(events: Iterable[Event]) -> tuple[str, ...]:
    """One line a call, role class by role class, each in the order of the log."""
    names: dict[str, str] = {}
    placed: dict[str, str] = {}
    numbers: Counter[str] = Counter()
    for event in events:
        match event:
            case CallStarted():
                names[event.call] = f"{event.role_class} {numbers[event.role_class]}"
                numbers[event.role_class] += 1
                placed[event.call] = f"{event.rule} {names.get(event.base, '')}".rstrip()
            case BranchForked():
                placed[event.call] = f"{event.kind} {names[event.base]}"
            case SubAgentSpawned():
                placed[event.call] = f"sub-agent of {names[event.parent_call]}"
            case ContextCompacted():
                placed[event.call] = f"compaction of {names[event.summary_call]}"
            case _:
                pass
    return tuple(sorted((f"{name} {placed[call]}" for call, name in names.items()), key=_order))


def forks(lines: Iterable[str]) -> tuple[str, ...]:
    """Those of the lines that say why a history was not gone on with."""
    return tuple(line for line in lines if line.split()[2] in REASONS)


def _order(line: str) -> tuple[str, int]:
    role_class, number = line.split()[:2]
    return role_class, int(number)


def compare(expected: Iterable[str], seen: Iterable[str]) -> tuple[str, ...]:
    """`-` before what is missing, `+` before what was not expected; empty when both are the same."""
    wanted, found = Counter(expected), Counter(seen)
    differing = [f"- {line}" for line in (wanted - found).elements()]
    differing += [f"+ {line}" for line in (found - wanted).elements()]
    return tuple(sorted(differing, key=lambda line: (_order(line[2:]), line[0] == "+")))
