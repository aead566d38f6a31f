"""Pure. What a scenario showed of a harness: events, what the engine was asked, expected tree -> Check -> lines.

Invariant: counts are of what the engine had, id by id; nothing is inferred from what lineage says about itself.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from gyre.agents.expected_trees import compare, forks
from gyre.agents.scenarios import FILE, SCENARIOS
from gyre.agents.scripted_policy import Asked
from gyre.events.types import CallStarted, Event


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """What one start of a harness showed."""

    name: str
    scenario: str = "main"
    expected: tuple[str, ...] = ()
    """Lines of the tree, as written by hand; none for a harness that nobody has written them for."""
    not_offered: str = ""
    """Why it was not started."""
    started: bool = False
    requests: tuple[str, ...] = ()
    """Endpoints that it called, with `stream` where it asked for one."""
    tree: tuple[str, ...] = ()
    num_kept: int = 0
    """Calls that share tokens with an earlier one."""
    num_exact: int = 0
    """Those of them whose prompt begins with exactly the ids that the engine had, and sampled, in that call."""
    num_tokens_again: int = 0
    """Sampled tokens that came back as the same text and other ids."""
    num_unanswered: int = 0
    """Calls that were cut or failed."""
    broken: bool = False
    """The line was, as the scenario wants it."""
    wrote: bool = False
    """The tool call was executed: its file is in the workspace."""
    ended: bool = False
    """By itself, with exit code 0."""
    wall_s: float = 0.0
    detail: str = ""

    @property
    def num_calls(self) -> int:
        return len(self.tree)

    @property
    def unexplained(self) -> tuple[str, ...]:
        """Forks that are not among the expected."""
        known = set(self.expected)
        return tuple(line for line in forks(self.tree) if line not in known)

    @property
    def ok(self) -> bool:
        return bool(self.not_offered) or not self.problems()

    def problems(self) -> tuple[str, ...]:
        """What is not as it should be, in words."""
        asked = SCENARIOS[self.scenario]
        if not self.started:
            return (self.detail,)
        if not self.requests:
            return tuple(filter(None, ("no request reached the gateway", self.detail)))
        main = [line for line in self.tree if line.startswith("main ")]
        continued = sum(line.split()[2] == "continue" for line in main)
        found = {
            f"{FILE} is not as it should be: the tool call was not executed": not self.wrote,
            "the history was not gone on with": (
                self.scenario == "main" and not 0 < continued == len(main) - 1 and not self.expected
            ),
            f"{self.num_kept - self.num_exact} prompts do not begin with the ids that they share": (
                self.num_exact != self.num_kept
            ),
            f"{self.num_tokens_again} sampled tokens were tokenised again": self.num_tokens_again > 0,
            f"{self.num_unanswered} calls got no answer": self.num_unanswered != bool(asked.fails_at),
            "the line did not break": bool(asked.breaks_at) and not self.broken,
            "it did not end by itself": not self.ended,
            self.detail: bool(self.detail),
        }
        differing = compare(self.expected, self.tree) if self.expected else ()
        return (*(text for text, wrong in found.items() if wrong), *differing)

    def lines(self) -> list[str]:
        """A row of the table, and below it what is wrong, or the tree where none was written down."""
        if self.not_offered:
            return [f"  {'--':<3} {self.scenario:<16} not offered: {self.not_offered}"]
        reasons = ", ".join(line.split()[2] for line in forks(self.tree)) or "none"
        row = (
            f"  {'ok' if self.ok else 'NO':<3} {self.scenario:<16} {self.num_calls} calls, "
            f"{self.num_exact} of {self.num_kept} to the id, {self.num_tokens_again} tokens tokenised again, "
            f"forks: {reasons}; {', '.join(sorted(set(self.requests)))}; {self.wall_s:.1f} s"
        )
        return [row, *(f"      {line}" for line in self.problems() or (() if self.expected else self.tree))]


def close(checks: Sequence[Check], absent: Mapping[str, str]) -> str:
    """The last line: what ran, and what did not and why. `absent`: harness -> why none of its scenarios was run."""
    ran = [check for check in checks if not check.not_offered]
    harnesses = {check.name for check in checks}
    return (
        f"{len(ran)} scenarios of {len(harnesses)} harnesses ran: {sum(check.ok for check in ran)} as expected, "
        f"{sum(not check.ok for check in ran)} not; {sum(len(check.unexplained) for check in ran)} unexplained forks, "
        f"{sum(check.num_tokens_again for check in ran)} tokens tokenised again; "
        f"{len(checks) - len(ran)} are not offered; "
        + (f"not run: {', '.join(f'{name} ({why})' for name, why in absent.items())}" if absent else "all were run")
    )


def count_exact(events: Sequence[Event], asked: Sequence[Asked]) -> tuple[int, int]:
    """(calls that share tokens with an earlier one, those whose prompt begins with exactly its ids).

    One that goes on with a history shares all of it: the prompt that the engine had and every token that it sampled.
    """
    known = {one.rid: one for one in asked}
    num_kept = num_exact = 0
    for event in events:
        if not isinstance(event, CallStarted) or event.base not in known or event.call not in known:
            continue
        base, prompt = known[event.base].ids, known[event.call].input_ids
        whole = event.rule != "continue" or event.shared == len(base)
        num_kept += 1
        num_exact += whole and prompt[: event.shared] == base[: event.shared]
    return num_kept, num_exact


def count_again(asked: Sequence[Asked], decode: Callable[[list[int]], str]) -> int:
    """Sampled tokens that come back in a later prompt after the same history, as the same text but as other ids."""
    num = 0
    texts = [decode(list(one.input_ids)) for one in asked]
    for index, one in enumerate(asked):
        whole = decode(list(one.ids))
        num += any(
            texts[later].startswith(whole) and asked[later].input_ids[: len(one.ids)] != one.ids
            for later in range(index + 1, len(asked))
        ) * len(one.output_ids)
    return num
