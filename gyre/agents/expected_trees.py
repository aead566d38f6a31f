"""Pure. The tree that a scenario makes: call events -> lines, and the lines that were written by hand.

Invariant: a line says what one call was for and how it was placed, and names calls by role class and number within
it, of sub-agents one after the other. So the lines of two runs are the same whichever of calls that overlap came first.

    main 0          root
    main 1          continue main 0
    sub-agent 0     sub-agent of main 0
    main 1          continue main 0 (superseded)
    main 2          retry main 1

Expected lines lie in expected/<harness>.txt, a `[section]` a scenario; `not offered: why` stands for all of them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from gyre.errors import ConfigError
from gyre.events.types import BranchForked, CallStarted, CallSuperseded, ContextCompacted, Event, SubAgentSpawned

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
    """One line a call, role class by role class and sub-agent by sub-agent, in the order of the log."""
    started: dict[str, CallStarted] = {}
    place: dict[str, tuple[str, str]] = {}
    superseded: set[str] = set()
    for event in events:
        match event:
            case CallStarted():
                started[event.call] = event
                place[event.call] = (event.rule, event.base)
            case BranchForked():
                place[event.call] = (event.kind, event.base)
            case SubAgentSpawned():
                place[event.call] = ("sub-agent of", event.parent_call)
            case ContextCompacted():
                place[event.call] = ("compaction of", event.summary_call)
                if event.summary_class and event.summary_call in started:
                    asked = started[event.summary_call]
                    started[event.summary_call] = msgspec.structs.replace(asked, role_class=event.summary_class)
            case CallSuperseded():
                superseded.add(event.call)
            case _:
                pass
    agents: dict[str, list[str]] = {}
    """First call of a sub-agent, or any other role class -> its calls."""
    agent: dict[str, str] = {}
    for call, event in started.items():
        goes_on = event.base in agent and place[call][0] != "sub-agent of"
        own = agent[event.base] if goes_on else call
        agent[call] = own if event.role_class.startswith("sub-agent") else event.role_class
        agents.setdefault(agent[call], []).append(call)
    names: dict[str, str] = {}
    numbers: Counter[str] = Counter()
    for calls in agents.values():
        for call in calls:
            role_class = started[call].role_class
            names[call] = f"{role_class} {numbers[role_class]}"
            numbers[role_class] += 1
    lines = []
    for call, (how, source) in place.items():
        lines.append(" ".join([names[call], how, *filter(None, [names.get(source)])]))
        lines[-1] += " (superseded)" if call in superseded else ""
    return tuple(sorted(lines, key=_order))


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
