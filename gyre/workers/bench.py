"""Pure. What a benchmark says: figures, each with what it is compared to, and the page that shows them all.

Invariant: a figure that has a goal says whether it holds, and its reference was measured in the same run, on the same
machine. Direction: measurements -> Figure -> Result (one JSON object) -> docs/benchmarks.md.
"""

from collections.abc import Sequence
from textwrap import wrap

import msgspec


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """Made by `figure`, which sees to it that ratio and holds follow from the rest."""

    value: float
    unit: str
    reference: float | None = None
    ratio: float | None = None
    """value / reference."""
    goal: str = ""
    """As in `ratio <= 0.1`; empty for a figure that is only told."""
    holds: bool | None = None


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    cores: int
    memory_gb: float
    cpu: str
    os: str
    python: str
    versions: dict[str, str]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    bench: str
    machine: Machine
    figures: dict[str, Figure]


def figure(
    value: float,
    unit: str,
    *,
    reference: float | None = None,
    max_ratio: float | None = None,
    min_ratio: float | None = None,
    max_value: float | None = None,
    min_value: float | None = None,
) -> Figure:
    """At most one goal. Raises ValueError for a bound on a ratio without a reference."""
    ratio = value / reference if reference else None
    goal, holds = "", None
    if ratio is None and (max_ratio is not None or min_ratio is not None):
        raise ValueError(f"figure {value:g} {unit}: a ratio needs a reference that is not 0")
    if ratio is not None and max_ratio is not None:
        goal, holds = f"ratio <= {max_ratio:g}", ratio <= max_ratio
    elif ratio is not None and min_ratio is not None:
        goal, holds = f"ratio >= {min_ratio:g}", ratio >= min_ratio
    elif max_value is not None:
        goal, holds = f"value <= {max_value:g}", value <= max_value
    elif min_value is not None:
        goal, holds = f"value >= {min_value:g}", value >= min_value
    return Figure(
        value=_short(value),
        unit=unit,
        reference=None if reference is None else _short(reference),
        ratio=None if ratio is None else _short(ratio),
        goal=goal,
        holds=holds,
    )


def encode_result(result: Result) -> bytes:
    """One JSON object in one line."""
    return msgspec.json.encode(result)


def decode_result(content: bytes) -> Result:
    return msgspec.json.decode(content, type=Result)


def render_page(results: Sequence[Result], about: dict[str, str]) -> str:
    """The whole page; `about` says by benchmark what it measures and how."""
    lines = [
        "# Benchmarks",
        "",
        "Made by `make bench` from `benchmarks/results/`. `gyre bench NAME` prints the same figures as JSON.",
        "References were measured in the same run; *ratio* is value / reference.",
    ]
    for result in sorted(results, key=lambda result: result.bench):
        machine = result.machine
        lines += ["", f"## {result.bench}", "", *wrap(about.get(result.bench, ""), 118), ""]
        lines += ["| Figure | Value | Unit | Reference | Ratio | Goal | Holds |", "|---|---|---|---|---|---|---|"]
        lines += [_row(name, found) for name, found in result.figures.items()]
        versions = ", ".join(f"{name} {version}" for name, version in sorted(machine.versions.items()))
        lines += [
            "",
            f"{machine.cores} cores, {machine.memory_gb:g} GB, {machine.cpu}; {machine.os}; Python {machine.python}; "
            + versions,
        ]
    return "\n".join(lines) + "\n"


def _row(name: str, found: Figure) -> str:
    holds = {None: "", True: "yes", False: "**no**"}[found.holds]
    cells = (name, _text(found.value), found.unit, _text(found.reference), _text(found.ratio), found.goal, holds)
    return f"| {' | '.join(cells)} |"


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _short(value: float) -> float:
    """Four digits: more would only be noise."""
    return float(f"{value:.4g}")
