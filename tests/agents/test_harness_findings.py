"""What counts as kept to the id and as tokenised again, and what a check makes of it."""

from typing import Any

import msgspec

from gyre.agents.expected_trees import Expected
from gyre.agents.harness_findings import Check, close, count_again, count_exact
from gyre.agents.scripted_policy import MERGES, Asked, make_renderer, make_tokenizer
from gyre.events.types import CallStarted

RENDERER = make_renderer(MERGES)
SAID = "the thing is in there"


def joined(text: str) -> tuple[int, ...]:
    """As the tokenizer has it."""
    return tuple(RENDERER.tokenizer.encode(text, add_special_tokens=False).ids)


def sampled(text: str) -> tuple[int, ...]:
    """As the policy says it: byte by byte."""
    return tuple(make_tokenizer().encode(text, add_special_tokens=False).ids)


def decode(ids: list[int]) -> str:
    return str(RENDERER.tokenizer.decode(ids, skip_special_tokens=False))


def started(call: str, base: str = "", shared: int = 0, rule: str = "continue") -> CallStarted:
    return CallStarted(
        execution="x", session="s", call=call, base=base, shared=shared, context=b"", role_class="main",
        rule=rule, marks=(), temperature=1.0, top_p=1.0, max_tokens=8, cell="c0",
    )  # fmt: skip


FIRST = Asked(rid="a", input_ids=joined("ask"), output_ids=sampled(SAID))
KEPT = Asked(rid="b", input_ids=(*FIRST.ids, *joined(" more")))
AGAIN = Asked(rid="b", input_ids=joined("ask" + SAID + " more"))


def test_a_reply_that_is_tokenised_again_has_other_ids() -> None:
    assert sampled(SAID) != joined(SAID)
    assert decode(list(sampled(SAID))) == decode(list(joined(SAID))) == SAID
    assert count_again([FIRST, KEPT], decode) == 0
    assert count_again([FIRST, AGAIN], decode) == len(sampled(SAID))
    other = Asked(rid="c", input_ids=joined("another history"))
    assert count_again([FIRST, KEPT, other], decode) == 0


def test_a_history_is_kept_when_prompt_and_reply_come_first() -> None:
    root, whole = started("a", rule="root"), len(FIRST.ids)
    assert count_exact([root, started("b", "a", whole)], [FIRST, KEPT]) == (1, 1)
    assert count_exact([root, started("b", "a", whole)], [FIRST, AGAIN]) == (1, 0)
    # It goes on, and shares less than all.
    assert count_exact([root, started("b", "a", whole - 1)], [FIRST, KEPT]) == (1, 0)
    # A fork may share less, but what it shares is the same.
    fork = started("b", "a", len(FIRST.input_ids), rule="fork")
    assert count_exact([root, fork], [FIRST, AGAIN]) == (1, 1)
    assert count_exact([root], [FIRST]) == (0, 0)


def check(**changed: Any) -> Check:
    tree = ("main 0 root", "main 1 continue main 0")
    good = Check(
        name="h", expected=tree, started=True, requests=("messages",), tree=tree, num_kept=1, num_exact=1, wrote=True,
        ended=True,
    )  # fmt: skip
    return msgspec.structs.replace(good, **changed)


def test_a_check_says_what_is_wrong() -> None:
    assert check().ok
    assert check().problems() == ()
    assert check(wrote=False).problems() == ("hello.txt is not as it should be: the tool call was not executed",)
    assert check(ended=False, detail="exit code 3").problems() == ("it did not end by itself", "exit code 3")
    assert check(num_exact=0).problems() == ("1 prompts do not begin with the ids that they share",)
    assert check(num_tokens_again=4).problems() == ("4 sampled tokens were tokenised again",)
    assert check(started=False, detail="no bubblewrap").problems() == ("no bubblewrap",)
    assert check(requests=()).problems() == ("no request reached the gateway",)
    retried = ("main 0 root", "main 1 retry main 0")
    assert check(tree=retried).problems() == ("- main 1 continue main 0", "+ main 1 retry main 0")
    assert check(tree=retried).unexplained == ("main 1 retry main 0",)
    assert not check(scenario="retry").ok, "a call without an answer is what it is about"
    assert check(scenario="retry", num_unanswered=1).ok
    assert not check(num_unanswered=1).ok
    assert check(scenario="cut").problems() == ("the line did not break",)


def test_a_harness_that_nobody_wrote_a_tree_for_goes_on_with_its_history() -> None:
    assert check(expected=()).ok
    assert check(expected=()).lines()[1:] == ["      main 0 root", "      main 1 continue main 0"]
    assert not check(expected=(), tree=("main 0 root", "main 1 edit main 0")).ok
    assert not check(expected=(), tree=("main 0 root",)).ok


def test_the_closing_line_counts_what_ran_and_what_did_not() -> None:
    absent = {"codex": "not installed"}
    not_offered = Check(name="pi", scenario="sub-agent", not_offered="it has none")
    assert not_offered.ok
    assert not_offered.lines() == ["  --  sub-agent        not offered: it has none"]
    assert Expected(not_offered="it has none").lines == ()
    said = close([check(), check(wrote=False), check(tree=("main 0 root", "main 1 edit main 0")), not_offered], absent)
    assert said == (
        "3 scenarios of 2 harnesses ran: 1 as expected, 2 not; 1 unexplained forks, 0 tokens tokenised again; "
        "1 are not offered; not run: codex (not installed)"
    )
    assert close([check()], {}).endswith("0 are not offered; all were run")
