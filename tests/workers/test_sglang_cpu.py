import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from gyre.workers import sglang_cpu  # noqa: E402

pytestmark = pytest.mark.stack


def reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """One query `[heads, size]` over keys `[S, groups, size]`, by the definition."""
    share = query.shape[0] // key.shape[1]
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    weight = torch.softmax(torch.einsum("hd,shd->hs", query, key) * query.shape[1] ** -0.5, -1)
    return torch.einsum("hs,shd->hd", weight, value)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("num_new", "num_all"), [(1, 1), (1, 9), (5, 5), (4, 9)])
def test_new_tokens_see_the_prefix_and_no_future(groups: int, num_new: int, num_all: int) -> None:
    query = torch.randn(num_new, 4, 8)
    key, value = torch.randn(2, num_all, groups, 8)
    found = sglang_cpu.attend_new(query, key, value, None)
    for i in range(num_new):
        seen = num_all - num_new + i + 1
        torch.testing.assert_close(found[i], reference(query[i], key[:seen], value[:seen]))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[7], [5, 5, 5], [6, 4, 3], [40, 1, 3, 19, 2, 33, 1]])
def test_a_decode_batch_sees_each_sequence_only(groups: int, lengths: list[int]) -> None:
    num_slots, longest = 200, max(lengths)
    key, value = torch.randn(2, num_slots, groups, 8)
    # Beyond its length a row holds leftovers of earlier requests, here slots that do not exist.
    table = torch.full((len(lengths) + 2, longest + 3), 10**6, dtype=torch.int32)
    rows = torch.randperm(len(lengths) + 2)[: len(lengths)]
    free = torch.randperm(num_slots)
    for row, length in zip(rows.tolist(), lengths, strict=True):
        table[row, :length], free = free[:length].to(torch.int32), free[length:]
    query = torch.randn(len(lengths), 4, 8)
    output = torch.full_like(query, torch.nan)
    for part, slots, mask in sglang_cpu.plan_decode(torch.tensor(lengths), table, rows):
        output[part] = sglang_cpu.attend_last(query[part], key[slots], value[slots], mask, None)
    for i, (row, length) in enumerate(zip(rows.tolist(), lengths, strict=True)):
        seen = table[row, :length].long()
        torch.testing.assert_close(output[i], reference(query[i], key[seen], value[seen]))


def test_a_mixed_batch_is_at_most_half_padding() -> None:
    lengths = [1000, *range(1, 64)]
    table = torch.zeros(64, 1000, dtype=torch.int32)
    plan = sglang_cpu.plan_decode(torch.tensor(lengths), table, torch.arange(64))
    assert sum(slots.numel() for _, slots, _ in plan) <= 2 * sum(lengths)
    assert sorted(row for part, _, _ in plan for row in part.tolist()) == list(range(64))


@pytest.mark.parametrize(
    ("module", "absent"),
    [("gyre.workers.sglang_cpu", ("torch", "sglang")), ("gyre.workers.engine", ("torch", "sglang", "mooncake"))],
)
def test_import_stays_light(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([name for name in {absent!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the plugin stands aside where CUDA is there")
def test_the_plugin_gives_sglang_its_platform() -> None:
    pytest.importorskip("sglang")
    code = (
        "from sglang.srt.platforms import current_platform as p;"
        "import torchvision; print(type(p).__name__, p.device_type, p.get_default_attention_backend())"
    )
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["GyreCpuPlatform", "cpu", "torch_native"]
