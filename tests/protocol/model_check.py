"""Shell. The long form of the model check: `python -m tests.protocol.model_check [STATES]`, behind `make model-check`.

At least a million states over the configurations below, then each broken variant, which must be caught. Prints a line
for each and exits with 1 when an invariant does not hold, or a variant was not caught.
"""

import sys
import time
from contextlib import ExitStack
from typing import Any
from unittest import mock

from tests.protocol.broken_variants import VARIANTS
from tests.protocol.model_gradients import GradientModel
from tests.protocol.model_search import Found, Search
from tests.protocol.model_switching import Model, small_config

CONFIGS: tuple[tuple[dict[str, object], float], ...] = (
    ({}, 0.35),
    ({"num_steps": 3, "lookahead": 0}, 0.25),
    ({"dwell_s": 3.0}, 0.2),
    ({"policy": "colocated"}, 0.1),
    ({"policy": "static"}, 0.1),
)
"""Of `small_config`, and their shares of the states."""
STATES = 1_000_000
VARIANT_STATES = 600_000


def check(options: dict[str, object], budget: int, *, near: float = 0.4, hops: float = 0.3) -> Found:
    return Search(Model(small_config(**options)), budget).run(faults=2, near=near, hops=hops)  # type: ignore[arg-type]


def check_gradients(budget: int, *, starts_over: bool = True) -> Found:
    """The exchange of gradients; without `starts_over` the core commits whatever it has summed."""
    model: Any = GradientModel()
    model.starts_over = starts_over
    return Search(model, budget).run(faults=2)


def check_variant(name: str, budget: int = VARIANT_STATES) -> Found:
    """The model with one part of the code broken."""
    variant = VARIANTS[name]
    with ExitStack() as stack:
        for target, attribute, broken in variant.patches:
            stack.enter_context(mock.patch.object(target, attribute, broken))
        return check(dict(variant.options), budget, near=0.2, hops=0.7)


def main() -> int:
    num_states = int(sys.argv[1]) if len(sys.argv) > 1 else STATES
    total, failed = 0, False
    for options, share in CONFIGS:
        begun = time.monotonic()
        found = check(options, int(share * num_states) + 1)
        total += found.num_states
        words = ", ".join(f"{name}={value}" for name, value in options.items()) or "defaults"
        rate = found.num_states / (time.monotonic() - begun)
        print(
            f"{words}: {found.num_states:,} states, {found.num_logs:,} logs, {found.num_ends:,} ways to the end; "
            f"{rate:,.0f} states/s: " + (f"BROKEN {found.broken}" if found.broken else "all invariants hold"),
            flush=True,
        )
        if found.broken:
            failed = True
            print("  " + "\n  ".join(found.way[-60:]))
    found = check_gradients(num_states // 4)
    total += found.num_states
    failed = failed or found.broken is not None
    print(f"gradients: {found.num_states:,} states: " + str(found.broken or "all invariants hold"), flush=True)
    for name, variant in VARIANTS.items():
        found = check_variant(name)
        caught = found.broken is not None and found.broken.name in variant.breaks
        failed = failed or not caught
        print(
            f"{'caught' if caught else 'NOT CAUGHT'}: {name}: {found.broken} ({found.num_states:,} states)", flush=True
        )
    print(f"{total:,} states in all")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
