"""Buckets lose no target and repeat none."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from tiny_policies import random_rows  # noqa: E402

from gyre.workers.batch_tensors import TokenRow, batch_tensors, buckets, sequences  # noqa: E402

pytestmark = pytest.mark.stack
CPU = torch.device("cpu")


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 12), st.sampled_from([1, 64, 200, 10_000]))
def test_every_target_is_predicted_once_from_the_token_before_it(seed: int, num: int, max_tokens: int) -> None:
    rows = random_rows(num, seed=seed)
    seen = []
    for bucket in buckets(rows, max_tokens):
        batch = batch_tensors(bucket, CPU)
        num_rows, length = batch.ids_BT.shape
        assert num_rows == 1 or num_rows * length <= max_tokens
        columns = (batch.place_P, batch.token_P, batch.behaviour_N, batch.advantage_N, batch.weight_N)
        for place, token, behaviour, advantage, weight in zip(*(c.tolist() for c in columns), strict=True):
            t, b = divmod(place, num_rows)
            assert batch.ids_BT[b, : t + 1].tolist() == bucket[b].ids[: t + 1].tolist()
            assert bucket[b].target[t + 1] and bucket[b].ids[t + 1] == token
            assert bucket[b].logprob[t + 1] == np.float32(behaviour) and bucket[b].weight[t + 1] == np.float32(weight)
            assert np.float32(bucket[b].advantage) == np.float32(advantage)
            seen.append((bucket[b].execution, t + 1))
    expected = [(row.execution, int(t)) for row in rows for t in np.flatnonzero(row.target)]
    assert sorted(seen) == sorted(expected)


def row(ids: list[int], target: list[bool], execution: str = "e") -> TokenRow:
    zeros = np.zeros(len(ids), np.float32)
    return TokenRow(
        ids=np.array(ids, np.int32), target=np.array(target), weight=zeros, logprob=zeros, execution=execution
    )


def test_a_row_without_a_target_is_left_out_and_a_first_target_is_refused() -> None:
    assert buckets([row([1, 2], [False, False])], 100) == []
    with pytest.raises(ValueError, match="execution 'e'"):
        buckets([row([1, 2], [True, False])], 100)


def test_tokens_after_the_last_target_are_not_computed() -> None:
    batch = batch_tensors([row([5, 6, 7, 8, 9], [False, True, True, False, False])], CPU)
    assert batch.ids_BT.tolist() == [[5, 6]]
    assert batch.token_P.tolist() == [6, 7]


def test_a_sequence_is_what_was_sampled_at_one_go() -> None:
    positions = [np.array(at, np.int64) for at in ([1, 2, 5, 6, 7], [8], [], [9, 10, 12])]
    assert sequences(positions).tolist() == [0, 0, 1, 1, 1, 2, 3, 3, 4]
    assert sequences([np.array([], np.int64)]).tolist() == []
