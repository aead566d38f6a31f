"""Forests: each shared prefix once, the visible keys of each token, and cuts within a budget."""

from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_forests import random_branches

from gyre.projections.batches import Row
from gyre.projections.forest import cut, num_computed, plant
from gyre.projections.packing import pack

FORESTS = st.builds(
    random_branches,
    st.integers(0, 10_000),
    num_branches=st.integers(1, 12),
    depth=st.integers(1, 8),
    num_executions=st.integers(1, 3),
    vocab=st.sampled_from([2, 5, 1000]),
    targets=st.sampled_from(["once", "branches"]),
)


def computed(row: Row) -> tuple[int, ...]:
    return tuple(row.ids[: num_computed(row)].tolist())


def prefixes(rows: list[Row]) -> set[tuple[int, ...]]:
    return {computed(row)[:n] for row in rows for n in range(1, num_computed(row) + 1)}


@given(FORESTS)
def test_a_token_sees_its_own_prefix_and_each_prefix_is_there_once(rows: list[Row]) -> None:
    forest = plant(rows)
    at = np.arange(forest.num_tokens)
    seen = set()
    for q in at:
        visible = at[(at <= q) & (q < forest.end)]
        assert forest.position[visible].tolist() == list(range(len(visible)))
        seen.add(tuple(forest.ids[visible].tolist()))
    assert len(seen) == forest.num_tokens
    assert seen == prefixes(rows)
    assert forest.num_pairs == sum(map(len, seen))


@given(FORESTS)
def test_every_target_is_predicted_from_the_prefix_before_it(rows: list[Row]) -> None:
    forest = plant(rows)
    at = np.arange(forest.num_tokens)
    assert sorted(forest.order) == [i for i, row in enumerate(rows) if row.target.any()]
    for index, places in zip(forest.order, forest.places, strict=True):
        row = rows[index]
        for place, position in zip(places, np.flatnonzero(row.target), strict=True):
            visible = at[(at <= place) & (place < forest.end)]
            assert forest.ids[visible].tolist() == row.ids[:position].tolist()


@given(FORESTS, st.integers(1, 60))
def test_parts_keep_to_the_budget_and_hold_each_branch_once(rows: list[Row], max_tokens: int) -> None:
    parts = cut(rows, max_tokens)
    assert sorted(i for part in parts for i in part) == [i for i, row in enumerate(rows) if row.target.any()]
    for part in parts:
        assert len(part) == 1 or plant([rows[i] for i in part]).num_tokens <= max_tokens


@given(FORESTS)
def test_a_set_that_fits_is_one_part(rows: list[Row]) -> None:
    size = plant(rows).num_tokens
    assert len(cut(rows, max(size, 1))) == (1 if size else 0)


@given(st.integers(0, 10_000), st.integers(4, 40))
def test_no_other_division_of_the_sorted_branches_computes_less(seed: int, max_tokens: int) -> None:
    rows = random_branches(seed, num_branches=7, depth=4, vocab=3)
    rows = [rows[i] for part in cut(rows, 10**9) for i in part]  # as they are sorted
    if not rows:
        return

    def cost(parts: list[list[Row]]) -> tuple[int, int]:
        return sum(plant(part).num_tokens for part in parts), len(parts)

    options = []
    for num in range(len(rows)):
        for places in combinations(range(1, len(rows)), num):
            bounds = [0, *places, len(rows)]
            parts = [rows[i:j] for i, j in pairwise(bounds)]
            if all(len(part) == 1 or plant(part).num_tokens <= max_tokens for part in parts):
                options.append(cost(parts))
    assert cost([[rows[i] for i in part] for part in cut(rows, max_tokens)]) == min(options)


def test_a_tree_that_fits_is_not_cut_to_fill_a_micro_step() -> None:
    """Two trees of 6 tokens, and room for 10."""
    rows = [row([root, 2, 3, 4, leaf, 9]) for root in (1, 7) for leaf in (5, 6)]
    assert cut(rows, 10) == [[0, 1], [2, 3]]
    assert cut(rows, 5) == [[0], [1], [2], [3]]
    assert cut(rows, 3) == [[0], [1], [2], [3]]


def row(ids: list[int], **changes: Any) -> Row:
    target = np.arange(len(ids)) == len(ids) - 1
    zeros = np.zeros(len(ids), np.float32)
    return Row(
        execution="e",
        call="c",
        ids=np.array(ids, np.int32),
        target=target,
        logprob=zeros,
        weight=zeros,
        advantage=0.0,
        spans=(),
    )


def test_executions_of_one_task_share_its_prompt() -> None:
    rows = random_branches(1, num_branches=1, depth=6, num_executions=2)
    prompt = np.arange(100, 120, dtype=np.int32)
    rows = [row([*prompt, *(k.ids + 200 * i)]) for i, k in enumerate(rows)]
    alone = sum(num_computed(r) for r in rows)
    assert plant(rows).num_tokens == alone - 20
    assert [len(part) for part in pack(rows, alone - 20, "tree")] == [2]
    assert [len(part) for part in pack(rows, alone - 21, "tree")] == [1, 1]


def test_a_first_token_that_is_a_target_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing precedes it"):
        plant([row([3])])
    assert plant([]).num_tokens == 0 and cut([], 5) == []
