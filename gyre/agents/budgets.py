"""Pure. What an execution has used, and which of its budgets that uses up.

Invariant: what is counted follows from the events of the calls alone, so a gateway that starts again counts on. Calls
of a tool are those of the replies; its seconds are the time from a reply to the request that goes on from it, divided
among the tools that the reply asked for: a gateway sees no more of tools that run in a harness.

Direction: call events -> Use; Use, `harness` in the config -> the budget that is spent.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Literal

import msgspec

from gyre.config import HarnessConfig
from gyre.events.tokens import num_tokens
from gyre.events.types import BudgetSpent, CallCompleted, CallCut, CallFailed, CallStarted

Budget = Literal["calls", "output_tokens", "tool_calls", "tool_seconds"]


class Use(msgspec.Struct, kw_only=True):
    """Fold. `evolve` changes this object in place, O(1)."""

    num_calls: int = 0
    """Started, without those that failed."""
    num_sampled: int = 0
    """Tokens of all replies, those that were cut among them."""
    num_tool_calls: Counter[str] = msgspec.field(default_factory=Counter)
    tool_s: dict[str, float] = msgspec.field(default_factory=dict)
    asked: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """Call -> tools that its reply asked for, until a request goes on from it."""

    def evolve(self, event: CallStarted | CallCompleted | CallCut | CallFailed) -> None:
        if isinstance(event, CallStarted):
            self.num_calls += 1
            if event.rule == "continue":
                _add(self.tool_s, self.asked.pop(event.base, ()), event.tool_s)
        elif isinstance(event, CallFailed):
            self.num_calls -= 1
        else:
            self.num_sampled += num_tokens(event.sampled)
            if isinstance(event, CallCompleted) and event.tools:
                self.asked[event.call] = event.tools
                self.num_tool_calls.update(event.tools)


def find_spent(
    use: Use, config: HarnessConfig, *, execution: str, session: str, base: str, tool_s: float
) -> BudgetSpent | None:
    """The first that is used up, once a request goes on from `base`, whose tools took `tool_s`."""
    for budget, tool, limit, used in _budgets(use, config, base, tool_s):
        if limit and used >= limit:
            what = budget.removeprefix("tool_").replace("_", " ") + (f" of {tool}" if tool else "")
            key = "tool_budgets" if tool else f"max_{budget}"
            reason = f"execution {execution}: its {limit} {what} are used up (harness.{key})"
            return BudgetSpent(
                execution=execution, session=session, budget=budget, limit=limit, reason=reason, tool=tool
            )
    return None


def _budgets(use: Use, config: HarnessConfig, base: str, tool_s: float) -> Iterator[tuple[Budget, str, int, float]]:
    """(budget, its tool, limit, what is used of it)"""
    yield "calls", "", config.max_calls, use.num_calls
    yield "output_tokens", "", config.max_output_tokens, use.num_sampled
    new = dict[str, float]()
    _add(new, use.asked.get(base, ()), tool_s)
    for of in config.tool_budgets:
        yield "tool_calls", of.tool, of.max_calls, use.num_tool_calls[of.tool]
        yield "tool_seconds", of.tool, of.max_seconds, use.tool_s.get(of.tool, 0.0) + new.get(of.tool, 0.0)


def _add(seconds: dict[str, float], tools: tuple[str, ...], tool_s: float) -> None:
    for tool in tools:
        seconds[tool] = seconds.get(tool, 0.0) + tool_s / len(tools)
