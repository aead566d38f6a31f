"""Shell. `gyre bench train`: forward and backward passes over the branches of recorded sessions, in both layouts.

Every session is an execution: its tree is folded, its trajectories are selected and packed as a step's are, and the
trainer computes the gradient of all micro-steps, with a policy of the tiny size whose weights are random (what they are
costs nothing). Lengths are divided by `SCALE`: attention then takes of the tiny policy about the share that it takes
of a large one on the real lengths. Seconds are CPU seconds of one thread, so other programs do not count.

Floating-point operations are counted, not measured: of the layers for each token, of attention for each pair of tokens
that see each other, of the head for each prediction. Those of the paths are of real tokens, no padding; those of the
tree have each token of it once, however it is cut.

Direction: file -> shapes -> events -> trees -> rows -> seconds and operations -> figures.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from gyre.config import TrainerConfig
from gyre.errors import ConfigError
from gyre.projections import tree
from gyre.projections.batches import Row, make_row
from gyre.projections.forest import num_computed, plant
from gyre.projections.packing import Layout, pack
from gyre.projections.selection import select
from gyre.projections.tree import Tree
from gyre.workers.batch_tensors import LAYOUTS
from gyre.workers.bench import Figure, figure
from gyre.workers.policy_shape import PolicyShape
from gyre.workers.session_shapes import Drawn, Shape, call_events, read_sessions, shortened
from gyre.workers.trainer import Trainer

SCALE = 128
EVERY = 8
"""Of the sessions, every eighth: some minutes."""
REPEATS = 2
GOAL = 0.8
J_MAX = (1, 5, 0)
PAPER = {1: 0.414, 5: 0.748}
"""Forward-backward time, next to that without a limit (arXiv 2609.33848)."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What one layout does for all rows."""

    num_tokens: int
    num_pairs: int
    num_predictions: int

    def flops(self, shape: PolicyShape) -> float:
        """Forward and backward; the backward pass is twice the forward pass."""
        heads, groups, size = shape.num_heads, shape.num_kv_heads, shape.head_size
        matrices = shape.hidden * (2 * heads + 2 * groups) * size + 3 * shape.hidden * shape.ffn
        layer = 2 * matrices * self.num_tokens + 4 * heads * size * self.num_pairs
        return 3.0 * (shape.num_layers * layer + 2 * shape.hidden * shape.vocab * self.num_predictions)


def bench_train(policy: Path, sessions: Path, *, every: int = EVERY, repeats: int = REPEATS) -> dict[str, Figure]:
    """Raises ConfigError when the file is not there, not of the form, or holds no session."""
    trainer = Trainer(policy, TrainerConfig(num_threads=1), seed=1)
    trees = list(_trees(sessions, every, trainer.shape.vocab))
    if not trees:
        raise ConfigError(f"{sessions}: it holds no session; see benchmarks/data/README.md")
    rows = {j_max: _rows(trees, j_max) for j_max in J_MAX}
    seconds = _measure(trainer, rows, repeats)
    work = {(j_max, layout): _work(rows[j_max], layout) for j_max in J_MAX for layout in LAYOUTS}
    return {
        **_speed_up(seconds, work, trainer.shape),
        **_limits(seconds, work, trainer.shape),
        **_sizes(trees, rows, work),
    }


def _trees(sessions: Path, every: int, vocab: int) -> Iterator[Tree]:
    for number, shapes in enumerate(read_sessions(sessions)):
        if shapes and number % every == 0:
            yield _tree(shortened(shapes, SCALE), Drawn(number, vocab))


def _tree(shapes: Sequence[Shape], drawn: Drawn) -> Tree:
    grown = Tree("s")
    for event in (event for triple in call_events(shapes, drawn) for event in triple):
        grown = tree.evolve(grown, event)
    return grown


def _rows(trees: Sequence[Tree], j_max: int) -> list[Row]:
    out: list[Row] = []
    for number, grown in enumerate(trees):
        execution = f"e{number}"
        chosen = select(grown, seed=1, execution=execution, max_trajectories=j_max)
        num_targets = sum(t.num_targets for t in chosen)
        advantage = 1.0 if number % 2 else -1.0
        out += [make_row(grown, t, execution=execution, advantage=advantage, num_targets=num_targets) for t in chosen]
    return out


def _measure(trainer: Trainer, rows: dict[int, list[Row]], repeats: int) -> dict[tuple[int, Layout], float]:
    """CPU seconds of all micro-steps, the least of the repeats, which take turns."""
    seconds: dict[tuple[int, Layout], float] = {}
    for lap in range(repeats + 1):
        for j_max in J_MAX:
            for layout in LAYOUTS:
                trainer.config = msgspec.structs.replace(trainer.config, layout=layout)
                microsteps = pack(rows[j_max], trainer.config.max_tokens_per_microstep, layout)
                if not lap:  # one to warm up
                    trainer.gradients(microsteps[0])
                    continue
                begun_s = time.process_time()
                for microstep in microsteps:
                    trainer.gradients(microstep)
                spent = time.process_time() - begun_s
                seconds[j_max, layout] = min(spent, seconds.get((j_max, layout), spent))
                trainer.discard()
    return seconds


def _work(rows: Sequence[Row], layout: Layout) -> Work:
    num_targets = sum(row.num_targets for row in rows)
    if layout == "tree":
        forest = plant(rows)
        return Work(num_tokens=forest.num_tokens, num_pairs=forest.num_pairs, num_predictions=num_targets)
    lengths = [num_computed(row) for row in rows]
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    return Work(num_tokens=sum(lengths), num_pairs=pairs, num_predictions=num_targets)


def _speed_up(
    seconds: dict[tuple[int, Layout], float], work: dict[tuple[int, Layout], Work], shape: PolicyShape
) -> dict[str, Figure]:
    """Of the tree over the paths, next to what the operations say."""
    out = {}
    for j_max in reversed(J_MAX):
        faster = seconds[j_max, "paths"] / seconds[j_max, "tree"]
        fewer = work[j_max, "paths"].flops(shape) / work[j_max, "tree"].flops(shape)
        out[f"speed_up_{_name(j_max)}"] = figure(faster, "times", reference=fewer, min_ratio=GOAL)
    return out


def _limits(
    seconds: dict[tuple[int, Layout], float], work: dict[tuple[int, Layout], Work], shape: PolicyShape
) -> dict[str, Figure]:
    out = {}
    for layout in LAYOUTS:
        for j_max, paper in PAPER.items():
            share = seconds[j_max, layout] / seconds[0, layout]
            out[f"time_{layout}_{_name(j_max)}"] = figure(share, f"of no limit; the paper's: {paper}")
            fewer = work[j_max, layout].flops(shape) / work[0, layout].flops(shape)
            out[f"flops_{layout}_{_name(j_max)}"] = figure(fewer, "of no limit")
        out[f"seconds_{layout}"] = figure(seconds[0, layout], "s")
        rate = work[0, layout].flops(shape) / seconds[0, layout]
        out[f"rate_{layout}"] = figure(rate / 1e9, "GFLOP/s")
    return out


def _sizes(
    trees: Sequence[Tree], rows: dict[int, list[Row]], work: dict[tuple[int, Layout], Work]
) -> dict[str, Figure]:
    return {
        "sessions": figure(len(trees), "sessions"),
        "branches": figure(len(rows[0]), "branches"),
        "tokens_paths": figure(work[0, "paths"].num_tokens / 1e3, "thousand"),
        "tokens_tree": figure(work[0, "tree"].num_tokens / 1e3, "thousand"),
        "targets": figure(work[0, "tree"].num_predictions / 1e3, "thousand"),
    }


def _name(j_max: int) -> str:
    return f"j_max_{j_max}" if j_max else "no_limit"
