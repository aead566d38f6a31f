"""Pure. What an execution has asked of each tool, and which budget of a tool that uses up.

Invariant: what is counted follows from the events of the calls alone, so a gateway that starts again counts on. Calls
of a tool are those of the replies; its seconds are the time from a reply to the request that goes on from it, divided
among the tools that the reply asked for: a gateway sees no more of tools that run in a harness.

Direction: call events -> ToolUse; ToolUse, `harness.tool_budgets` -> the budget that is spent.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from gyre.config import ToolBudget
from gyre.events.types import CallCompleted, CallStarted


class ToolUse(msgspec.Struct, kw_only=True):
    """Fold. `evolve` changes this object in place, O(1)."""

    num_calls: Counter[str] = msgspec.field(default_factory=Counter)
    seconds: dict[str, float] = msgspec.field(default_factory=dict)
    asked: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """Call -> tools that its reply asked for, until a request goes on from it."""

    def evolve(self, event: CallStarted | CallCompleted) -> None:
        if isinstance(event, CallCompleted):
            if event.tools:
                self.asked[event.call] = event.tools
                self.num_calls.update(event.tools)
        elif event.rule == "continue":
            for tool, seconds in self._shares(event.base, event.tool_s):
                self.seconds[tool] = self.seconds.get(tool, 0.0) + seconds
            self.asked.pop(event.base, None)

    def spent(
        self, budgets: Sequence[ToolBudget], base: str = "", tool_s: float = 0.0
    ) -> tuple[Literal["tool_calls", "tool_seconds"], str, int] | None:
        """(budget, tool, limit) of the first that is used up, once a request goes on from `base` after `tool_s`."""
        new = dict[str, float]()
        for tool, seconds in self._shares(base, tool_s):
            new[tool] = new.get(tool, 0.0) + seconds
        for budget in budgets:
            if budget.max_calls and self.num_calls[budget.tool] >= budget.max_calls:
                return "tool_calls", budget.tool, budget.max_calls
            used_s = self.seconds.get(budget.tool, 0.0) + new.get(budget.tool, 0.0)
            if budget.max_seconds and used_s >= budget.max_seconds:
                return "tool_seconds", budget.tool, budget.max_seconds
        return None

    def _shares(self, base: str, tool_s: float) -> Iterator[tuple[str, float]]:
        tools = self.asked.get(base, ())
        return ((tool, tool_s / len(tools)) for tool in tools)
