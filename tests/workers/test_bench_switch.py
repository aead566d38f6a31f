"""`gyre bench switch` in small: real engines, the real store, real weights; and a miss that costs a prefill only."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sglang")
pytest.importorskip("mooncake.engine")

from gyre.workers.bench_switch import MAX_PREFILLED, PAGE_TOKENS, bench_switch

pytestmark = [pytest.mark.stack, pytest.mark.timeout(280)]


def test_a_context_moves_between_two_engines_and_is_not_computed_again(tmp_path: Path) -> None:
    figures = bench_switch(tmp_path, num_prompt=512, bulk=(4, 4 << 20))
    print({name: (found.value, found.unit, found.ratio) for name, found in figures.items()})
    context = figures["context"].value
    assert context > 512 + 200, "decoded tokens are part of it"
    assert figures["kv_moved"].value >= context - PAGE_TOKENS - 1
    assert figures["prefilled_again"].value <= 2 * PAGE_TOKENS
    assert figures["prefilled_again"].value / figures["prefilled_again_without_migration"].value <= MAX_PREFILLED
    assert figures["tokens_that_differ_from_a_run_without_a_switch"].value == 0
    assert figures["kv_moved_bytes"].value > 0 and figures["weight_pull"].value > 0
    phases = {name for name in figures if name.startswith("to_")}
    assert {"to_training_cut", "to_training_kv", "to_training_owner", "to_training_release"} <= phases
    assert {"to_rollout_restore", "to_rollout_fetch", "to_rollout_verify", "to_rollout_load"} <= phases
