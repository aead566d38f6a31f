from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import pytest
from event_stream import completed, cut, delivered, done, failed, grow, started, superseded
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from gyre.events.types import ContextCompacted, Event, RoleClass, VersionSpan
from gyre.projections import tree
from gyre.projections.selection import PRIORITY, draw, select
from gyre.projections.tree import Tree, leaves, left_out, stats, tips, token_ids

History = tuple[list[Event], dict[str, list[int]]]
BACK = VersionSpan(version=0, start=3, end=2)
ENDINGS = ("delivered", "delivered", "undelivered", "superseded", "cut", "failed")


def full(grown: Tree, call: str) -> list[int]:
    found = grown.find(call)
    assert found is not None
    return token_ids(grown, found.index, found.end).tolist()


def reasons(grown: Tree) -> dict[tuple[str, str], int]:
    return {(call, reason): num for call, reason, num in left_out(grown)}


@st.composite
def histories(
    draw: st.DrawFn, classes: Sequence[RoleClass] = get_args(RoleClass), endings: Sequence[str] = ENDINGS
) -> History:
    """Events of a random session, calls overlapping, with `full` of every call computed the slow way.

    All tokens differ, so a token's value says which token it is.
    """
    sequences: dict[str, list[int]] = {}
    open_calls: list[str] = []
    events: list[Event] = []
    fresh = iter(range(10**6))
    for number in range(draw(st.integers(1, 14))):
        call = f"c{number}"
        base = draw(st.sampled_from(["", *sequences]))
        shared = draw(st.integers(0, len(sequences[base]))) if base else 0
        context = [next(fresh) for _ in range(draw(st.integers(0 if shared else 1, 4)))]
        role = draw(st.sampled_from(classes))
        events.append(started(call, base, shared, context, role_class=role))
        sequences[call] = (sequences[base][:shared] if base else []) + context
        open_calls.append(call)
        while open_calls and draw(st.booleans()):
            ending = open_calls.pop(draw(st.integers(0, len(open_calls) - 1)))
            sampled = [next(fresh) for _ in range(draw(st.integers(0, 4)))]
            how = draw(st.sampled_from(endings))
            if how == "failed":
                events.append(failed(ending))
                continue
            events.append(cut(ending, sampled) if how == "cut" else completed(ending, sampled))
            if how != "cut":
                events.append(delivered(ending, how != "undelivered"))
            if how == "superseded":
                events.append(superseded(ending))
            sequences[ending] = sequences[ending] + sampled
    return events, sequences


@given(histories())
def test_full_sequence_of_every_call(history: History) -> None:
    events, sequences = history
    grown = grow(*events)
    assert {call: full(grown, call) for call in sequences} == sequences


@given(histories())
def test_leaves_are_the_calls_whose_last_token_is_on_no_other_path(history: History) -> None:
    events, sequences = history
    grown = grow(*events)
    own = {c.call for c in grown.calls if c.end > c.shared}
    expected = {c for c in own if not any(sequences[c][-1] in sequences[other] for other in own - {c})}
    assert {grown.calls[i].call for i in leaves(grown)} == expected


@given(histories())
def test_every_target_lies_on_the_path_to_a_tip(history: History) -> None:
    grown = grow(*history[0])
    targets: set[int] = set()
    for call in grown.calls:
        targets |= set(full(grown, call.call)[call.prompt_end : call.target_end])
    on_paths: set[int] = set()
    for index in tips(grown):
        on_paths |= set(token_ids(grown, index, grown.calls[index].target_end).tolist())
    assert targets <= on_paths


@given(histories(), st.integers(0, 5), st.integers(0, 3), st.sampled_from(["drawn", "longest", "all"]))
def test_a_target_is_trained_at_most_once_and_exactly_once_without_limit(
    history: History, limit: int, seed: int, policy: str
) -> None:
    grown = grow(*history[0])
    trained: list[int] = []
    options: dict[str, Any] = {"max_trajectories": limit, "policy": policy}
    for trajectory in select(grown, seed=seed, execution="e", **options):
        ids = token_ids(grown, trajectory.index, trajectory.num_tokens)
        for part in trajectory.targets:
            owner = full(grown, grown.calls[part.index].call)
            assert ids[part.start : part.end].tolist() == owner[part.start : part.end]
            trained += ids[part.start : part.end].tolist()
    assert len(trained) == len(set(trained))
    targets = [t for c in grown.calls for t in full(grown, c.call)[c.prompt_end : c.target_end]]
    assert set(trained) <= set(targets)
    if limit == 0 or policy == "all":
        assert sorted(trained) == sorted(targets)


@settings(max_examples=200)
@given(histories(("main", "sub-agent"), ("delivered",)), st.integers(0, 1_000))
def test_every_draw_is_in_proportion_to_the_targets_that_are_unmasked_by_then(history: History, seed: int) -> None:
    """The rule as it is written down, with a lot for each such target and all of them counted anew for every draw."""
    grown = grow(*history[0])
    targets = {t for c in grown.calls for t in full(grown, c.call)[c.prompt_end : c.target_end]}
    left = {i: targets & {*token_ids(grown, i, grown.calls[i].target_end).tolist()} for i in tips(grown)}
    masked: set[int] = set()
    for number, trajectory in enumerate(select(grown, seed=seed, execution="e", max_trajectories=0)):
        rank = {i: PRIORITY.index(grown.calls[i].role_class) for i in left}
        lots = [i for i in left if rank[i] == min(rank.values()) for _ in left[i] - masked]
        assert trajectory.index == lots[draw(seed, "e", number) * len(lots) >> 64]
        masked |= left.pop(trajectory.index)
    assert not left


@given(histories())
def test_every_token_is_a_target_or_has_a_reason(history: History) -> None:
    grown = grow(*history[0])
    numbers = stats(grown)
    assert numbers.num_targets + sum(num for _, _, num in left_out(grown)) == numbers.num_tokens


@given(st.lists(st.tuples(st.sampled_from(["", "c0", "c1", "c9"]), st.integers(-3, 9)), max_size=6))
def test_the_fold_is_total(calls: list[tuple[str, int]]) -> None:
    events: list[Event] = []
    for number, (base, shared) in enumerate(calls):
        events += done(f"c{number}", base, shared, [1, 2], [3])
    nobody = (completed("c9", [1]), cut("c9", [1]), failed("c9"), delivered("c9"), superseded("c9"))
    grown = grow(*nobody, *events, *nobody)
    for index in leaves(grown):
        assert len(token_ids(grown, index, grown.calls[index].end)) == grown.calls[index].end
    chosen = select(grown, seed=1, execution="e", max_trajectories=0)
    assert sum(t.num_targets for t in chosen) == stats(grown).num_targets


def test_a_call_may_build_on_one_that_still_runs() -> None:
    first = [started("a", "", 0, [1, 2]), started("b", "a", 1, [7])]
    grown = grow(*first, completed("a", [3, 4]), completed("b", [8]), delivered("a"))
    assert full(grown, "a") == [1, 2, 3, 4]
    assert full(grown, "b") == [1, 7, 8]
    assert {grown.calls[i].call for i in leaves(grown)} == {"a", "b"}


def test_retry_orphans_are_no_tips() -> None:
    """AReaL#1627: an attempt that was cut and repeated leads to no trajectory."""
    grown = grow(
        *done("a", "", 0, [1, 2], [3]),
        started("b", "a", 3, [4]),
        cut("b", [5, 6]),
        *done("c", "b", 4, [], [9]),
    )
    assert [grown.calls[i].call for i in tips(grown)] == ["c"]
    assert reasons(grown)[("b", "cut")] == 2
    (trajectory,) = select(grown, seed=1, execution="e", max_trajectories=0)
    assert token_ids(grown, trajectory.index, trajectory.num_tokens).tolist() == [1, 2, 3, 4, 9]
    assert trajectory.num_targets == 2


def test_a_cut_reply_that_the_harness_continues_is_trained_as_far_as_it_goes() -> None:
    grown = grow(started("a", "", 0, [1]), cut("a", [2, 3, 4]), *done("b", "a", 3, [7], [8]))
    found = grown.find("a")
    assert found is not None
    assert (found.prompt_end, found.target_end, found.end) == (1, 3, 4)
    assert reasons(grown)[("a", "cut")] == 1
    unproven = grow(started("a", "", 0, [1]), cut("a", [2, 3, 4]), delivered("a"))
    assert stats(unproven).num_targets == 0, "whatever says that it was delivered"


def test_an_undelivered_reply_is_no_target_until_a_request_builds_on_it() -> None:
    """miles#1714: generated and delivered are recorded apart."""
    events = [started("a", "", 0, [1]), completed("a", [2, 3]), delivered("a", False)]
    assert stats(grow(*events)).num_targets == 0
    assert stats(grow(*events, started("b", "a", 3, [4]))).num_targets == 2


def test_a_superseded_reply_is_no_target_until_a_request_builds_on_it() -> None:
    """Its last byte went out, and its harness asked the same again."""
    events = [*done("a", "", 0, [1], [2, 3]), *done("b", "a", 1, [], [4]), superseded("a")]
    assert reasons(grow(*events))[("a", "superseded")] == 2 and stats(grow(*events)).num_targets == 1
    assert stats(grow(*events, started("c", "a", 3, [5]))).num_targets == 3


def test_a_summary_that_only_its_compaction_shows_has_its_class_from_there() -> None:
    where = {"execution": "e", "session": "s", "call": "b", "summary_call": "a"}
    events = [*done("a", "", 0, [1], [2]), *done("b", "", 0, [3], [4])]
    for summary_class in ("", "main-summary"):
        grown = grow(*events, ContextCompacted(**where, summary_class=summary_class))  # type: ignore[arg-type]
        assert [call.role_class for call in grown.calls] == [summary_class or "main", "main"]


def test_rejected_attempts_claim_no_shared_prefix() -> None:
    """prime-rl#3478: trainability is decided before deduplication."""
    orphans: list[Event] = []
    for n in range(20):
        orphans += [started(f"x{n}", "a", 2, [5]), completed(f"x{n}", [6] * 50), delivered(f"x{n}", False)]
    grown = grow(*done("a", "", 0, [1], [2]), *orphans, *done("b", "a", 2, [3], [4]))
    for seed in range(20):
        chosen = select(grown, seed=seed, execution="e", max_trajectories=1)
        assert [t.call for t in chosen] == ["b"]
        assert chosen[0].num_targets == 2


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        (completed("a", [2, 3], logprobs=np.array([np.nan, -1], "<f4").tobytes()), "logprob_not_finite"),
        (completed("a", [2, 3], logprobs=np.array([-1], "<f4").tobytes()), "logprob_missing"),
        (completed("a", [2, 3], spans=(VersionSpan(version=0, start=0, end=1),)), "span_missing"),
        (completed("a", [2, 3], spans=()), "span_missing"),
        (completed("a", [2, 3], spans=(VersionSpan(version=0, start=1, end=2),)), "span_missing"),
        (completed("a", [2, 3], spans=(VersionSpan(version=0, start=0, end=3),)), "span_missing"),
        (completed("a", [2, 3], spans=tuple(VersionSpan(version=v, start=0, end=2) for v in (0, 1))), "span_missing"),
        (completed("a", [2, 3], spans=(VersionSpan(version=0, start=0, end=3), BACK)), "span_missing"),
        (completed("a", [2, 3], logprobs=np.array([-1, -np.inf], "<f4").tobytes()), "logprob_not_finite"),
        (completed("a", [2, 3], logprobs=b""), "logprob_missing"),
    ],
)
def test_a_record_that_cannot_be_trained_on_has_a_reason(ending: Event, reason: str) -> None:
    grown = grow(started("a", "", 0, [1]), ending, delivered("a"))
    assert reasons(grown)[("a", reason)] == 2
    assert select(grown, seed=1, execution="e", max_trajectories=0) == ()


def test_an_empty_reply_is_no_fault_and_no_target() -> None:
    grown = grow(*done("a", "", 0, [1], []), *done("b", "a", 1, [2], [3]))
    assert reasons(grown) == {("a", "context"): 1, ("b", "context"): 1}
    (trajectory,) = select(grown, seed=1, execution="e", max_trajectories=0)
    assert (trajectory.call, trajectory.num_tokens, trajectory.num_targets) == ("b", 3, 1)
    assert select(grow(*done("a", "", 0, [1], [])), seed=1, execution="e", max_trajectories=0) == ()
    spans = (VersionSpan(version=0, start=0, end=0), VersionSpan(version=1, start=0, end=2))
    newer = grow(started("a", "", 0, [1]), completed("a", [2, 3], spans=spans), delivered("a"))
    assert stats(newer).num_targets == 2, "nor is a version that sampled nothing before the next one came"


def test_summaries_are_trained_like_any_other_reply() -> None:
    grown = grow(
        *done("a", "", 0, [1], [2]),
        *done("b", "a", 2, [3], [4, 5], role_class="main-summary"),
        *done("c", "", 0, [6], [7], role_class="sub-agent-summary"),
    )
    assert stats(grown).num_targets == 4
    chosen = select(grown, seed=1, execution="e", max_trajectories=0)
    assert [(t.call, t.num_targets) for t in chosen] == [("b", 3), ("c", 1)]


def test_a_torn_context_leaves_the_call_and_what_builds_on_it_out() -> None:
    torn = structs.replace(started("b", "a", 2, [1]), context=b"\1\0\0")
    grown = grow(*done("a", "", 0, [1], [2]), torn, completed("b", [2]), delivered("b"), *done("c", "b", 1, [3], [4]))
    assert {reason for _, reason in reasons(grown)} == {"torn_tokens", "base_excluded", "context"}
    assert [grown.calls[i].call for i in leaves(grown)] == ["a"], "nothing of theirs lies behind it"
    assert [t.call for t in select(grown, seed=1, execution="e", max_trajectories=0)] == ["a"]


def test_calls_without_a_place_are_excluded_with_a_reason() -> None:
    grown = grow(
        *done("a", "", 0, [1], [2]),
        *done("b", "nobody", 1, [1], [2]),
        *done("c", "a", 9, [1], [2]),
        *done("d", "c", 1, [1], [2]),
        *done("e", "", 0, [], [2]),
        *done("f", "a", 2, [1], [2], role_class="auxiliary"),
        *done("g", "d", 1, [1], [2]),
        *done("h", "", 3, [1], [2]),
    )
    faults = {(call, reason) for call, reason in reasons(grown) if reason != "context"}
    assert faults == {
        ("b", "unknown_base"),
        ("c", "shared_beyond_base"),
        ("d", "base_excluded"),
        ("e", "no_context"),
        ("f", "auxiliary"),
        ("g", "base_excluded"),
        ("h", "shared_beyond_base"),
    }
    assert full(grown, "c") == full(grown, "h") == [1, 2], "it stands alone, whatever it claims to share"
    assert [t.call for t in select(grown, seed=1, execution="e", max_trajectories=0)] == ["a"]


def test_torn_token_arrays_are_excluded() -> None:
    torn = structs.replace(completed("b", [2]), sampled=b"\1\0\0\0\2")
    grown = grow(started("b", "", 0, [1]), torn, delivered("b"), *done("c", "b", 2, [5], [6]))
    assert reasons(grown)[("b", "torn_tokens")] == 1
    assert full(grown, "b") == [1, 1], "what is whole of it can be shown"
    assert reasons(grown)[("c", "base_excluded")] == 1, "and nothing is built on it"


def test_the_first_start_and_the_first_end_of_a_call_win() -> None:
    grown = grow(*done("a", "", 0, [1], [2]), started("a", "", 0, [9, 9]), completed("a", [8]), failed("a"))
    assert full(grown, "a") == [1, 2]
    assert stats(grown).num_targets == 1
    late = grow(started("a", "", 0, [1]), failed("a"), completed("a", [2]), delivered("a"))
    assert full(late, "a") == [1] and stats(late).num_targets == 0


def test_ten_thousand_turns_cost_what_they_add() -> None:
    """A path is never put together by the fold: 10,000 turns of a 60,000-token context."""
    events: list[Event] = []
    end = 0
    for number in range(10_000):
        events += done(f"c{number}", f"c{number - 1}" if number else "", end, [1, 2, 3], [4, 5, 6])
        end += 6
    grown = Tree("s")
    for event in events:
        tree.evolve(grown, event)
    (trajectory,) = select(grown, seed=1, execution="e", max_trajectories=0)
    assert trajectory.num_tokens == 60_000
    assert trajectory.num_targets == 30_000
    assert stats(grown).depth == 10_000
