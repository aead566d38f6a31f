"""Tree attention: runs and block masks say the same as the mask that holds every pair."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from gyre.workers.tree_attention import RUN, TreeMask, attend, block_mask, blocks, dense_mask, runs  # noqa: E402

pytestmark = pytest.mark.stack
CPU = torch.device("cpu")


@st.composite
def ends(draw: st.DrawFn, size: int = 0) -> NDArray[np.int64]:
    """Subtree ends of a random forest in preorder: each token hangs below one on the path to the token before it."""
    num = size or draw(st.integers(1, 60))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    bushy = draw(st.sampled_from([0.02, 0.2, 0.7]))
    end, path = np.full(num, num, np.int64), []
    for t in range(num):
        while path and rng.random() < bushy:
            end[path.pop()] = t
        path.append(t)
    return end


def random_heads(num: int, heads: int = 4, groups: int = 2, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num)
    return [torch.randn(1, h, num, 8, generator=generator, dtype=dtype) for h in (heads, groups, groups)]


@given(ends(), st.sampled_from([1, 3, 16, 100]))
def test_runs_see_what_the_dense_mask_shows(end: NDArray[np.int64], size: int) -> None:
    dense = dense_mask(torch.from_numpy(end))
    seen = torch.zeros_like(dense)
    for run in runs(end, size):
        keys = torch.cat([torch.arange(a, b) for a, b in run.keys])
        assert len(keys) == run.hidden.shape[1] and set(run.hidden.unique().tolist()) <= {0.0, float("-inf")}
        for q in range(run.start, run.stop):
            seen[q, keys] = run.hidden[q - run.start] == 0
    assert torch.equal(seen, dense)


@given(ends(size=48), st.sampled_from([1, 4, 16]))
def test_blocks_see_what_the_dense_mask_shows(end: NDArray[np.int64], size: int) -> None:
    tiles = dense_mask(torch.from_numpy(end)).view(48 // size, size, 48 // size, size).permute(0, 2, 1, 3)
    found = blocks(end, size)
    for q in range(48 // size):
        part, whole = found.part[q, : found.num_part[q]], found.whole[q, : found.num_whole[q]]
        assert not set(part.tolist()) & set(whole.tolist())
        assert set(whole.tolist()) == {k for k in range(48 // size) if tiles[q, k].all() and k < q}
        assert {k for k in range(48 // size) if tiles[q, k].any()} <= {*part.tolist(), *whole.tolist()}


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@settings(max_examples=5)
@given(ends(size=3 * RUN))
def test_flex_attention_under_the_block_mask_is_masked_attention(end: NDArray[np.int64]) -> None:
    """Forward only: that is all of FlexAttention that a CPU has. `make gpu-check` shows the rest."""
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = random_heads(len(end), dtype=torch.float32)
    mask = block_mask(end, CPU)
    dense = dense_mask(torch.from_numpy(end))
    assert torch.equal(mask.to_dense()[0, 0].bool(), dense.view(3, RUN, 3, RUN).any(3).any(1))
    found = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    expected = functional.scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True)
    assert (found - expected).abs().max() < 1e-5


@settings(max_examples=20)
@given(ends(), st.booleans())
def test_attention_and_its_gradient_are_those_under_the_dense_mask(end: NDArray[np.int64], shared: bool) -> None:
    end = np.concatenate([end + i * len(end) for i in range(1 + 2 * RUN // len(end))])  # more than two runs
    inputs = [x.requires_grad_() for x in random_heads(len(end), groups=2 if shared else 4)]
    dense = dense_mask(torch.from_numpy(end))
    results = []
    for mixed in (
        attend(*inputs, TreeMask(end, CPU)),
        functional.scaled_dot_product_attention(*inputs, attn_mask=dense, enable_gqa=shared),
    ):
        weight = torch.linspace(-1, 1, mixed.numel(), dtype=torch.float64).view_as(mixed)
        results.append([mixed, *torch.autograd.grad((mixed * weight).sum(), inputs)])
    for found, expected in zip(*results, strict=True):
        assert (found - expected).abs().max() <= 1e-12 * max(1.0, float(expected.detach().abs().max()))


def test_a_forest_that_is_no_whole_number_of_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="pad it to a multiple of 128"):
        block_mask(np.array([2, 2]), CPU)
