"""Attempts that are joined say what one attempt would have said; an engine that breaks its contract is refused."""

from itertools import groupby

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import generation

from gyre.agents.attempts import FIRST_PAUSE_S, MAX_PAUSE_S, Patience
from gyre.agents.engine_client import Generation
from gyre.agents.generations import check_generation, join_generations
from gyre.errors import EngineError
from gyre.events.types import VersionSpan


def attempt(version: int, first: int, num: int) -> Generation:
    """Ids that count on from `first`."""
    ids = list(range(first, first + num))
    said = generation(ids, "abort", version=version, num_prompt_tokens=9 + first)
    return msgspec.structs.replace(said, engine_s=float(1 + first))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=6))
def test_attempts_join_to_the_tokens_of_all_of_them_in_runs_of_one_version(pieces: list[tuple[int, int]]) -> None:
    whole, attempts = None, []
    for version, num in pieces:
        attempts.append(attempt(version, sum(n for _, n in pieces[: len(attempts)]), num))
        whole = join_generations(whole, attempts[-1])
    assert whole is not None
    versions = [version for version, num in pieces for _ in range(num)]
    assert whole.output_ids == tuple(range(len(versions)))
    assert whole.logprobs == tuple(logprob for a in attempts for logprob in a.logprobs)
    runs = [(version, len(list(run))) for version, run in groupby(versions)]
    assert [(span.version, span.end - span.start) for span in whole.spans] == runs
    assert check_generation(whole, len(versions)) is whole
    prompt = (whole.num_prompt_tokens, whole.num_cached_tokens)
    assert prompt == (attempts[0].num_prompt_tokens, attempts[0].num_cached_tokens)
    assert whole.engine_s == sum(a.engine_s for a in attempts)
    last = msgspec.structs.replace(attempt(0, len(versions), 1), finish="stop")
    assert join_generations(whole, last).finish == "stop"


def spans(*bounds: tuple[int, int]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(version=0, start=start, end=end) for start, end in bounds)


GOOD = msgspec.structs.replace(generation([5, 6, 7], "stop"), spans=spans((0, 1), (1, 3)))


@pytest.mark.parametrize(
    ("broken", "max_tokens", "named"),
    [
        ({}, 2, "3 tokens for a call of at most 2"),
        ({"logprobs": (-1.0, -1.0)}, 3, "2 logprobs for 3 tokens"),
        ({"logprobs": (-1.0,) * 4}, 3, "4 logprobs for 3 tokens"),
        ({"logprobs": (-1.0, float("nan"), -1.0)}, 3, "not a finite number"),
        ({"logprobs": (-1.0, -1.0, float("-inf"))}, 3, "not a finite number"),
        ({"spans": ()}, 3, "end at token 0 of 3"),
        ({"spans": spans((0, 2))}, 3, "end at token 2 of 3"),
        ({"spans": spans((0, 4))}, 3, "end at token 4 of 3"),
        ({"spans": spans((1, 3))}, 3, r"\[1, 3\) does not follow token 0"),
        ({"spans": spans((0, 2), (1, 3))}, 3, r"\[1, 3\) does not follow token 2"),
        ({"spans": spans((0, 3), (3, 3))}, 3, r"\[3, 3\) does not follow token 3"),
    ],
)
def test_what_does_not_cover_the_same_tokens_is_refused_by_name(
    broken: dict[str, object], max_tokens: int, named: str
) -> None:
    assert check_generation(GOOD, 3) is GOOD
    with pytest.raises(EngineError, match=named):
        check_generation(msgspec.structs.replace(GOOD, **broken), max_tokens)


def test_pauses_double_up_to_a_bound_and_are_as_long_as_the_engine_asks() -> None:
    patience, pauses = Patience(), []
    for _ in range(8):
        patience = patience.fail(0.5, 0)
        pauses.append(patience.pause_s)
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-2:] == [MAX_PAUSE_S, MAX_PAUSE_S]
    assert patience.failing_s == pytest.approx(8 * 0.5 + sum(pauses))
    asked = patience.fail(0.5, 7)
    assert (asked.pause_s, asked.fail(0.5, 0).pause_s) == (7, MAX_PAUSE_S)
    assert asked.failing_s == pytest.approx(patience.failing_s + 7.5)
