"""Training on trees: loss and gradient are those of the flattened branches, for every loss, mode and precision."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from tiny_policies import tiny_config, tiny_tensors, write_tiny_policy  # noqa: E402

from gyre.config import TrainerConfig  # noqa: E402
from gyre.errors import PolicyError  # noqa: E402
from gyre.events.server import free_ports  # noqa: E402
from gyre.projections.batches import Microstep, Minibatch, Row  # noqa: E402
from gyre.projections.forest import num_computed, plant  # noqa: E402
from gyre.projections.packing import pack  # noqa: E402
from gyre.workers import megatron  # noqa: E402
from gyre.workers.batch_tensors import passes, sequences  # noqa: E402
from gyre.workers.checkpoint_map import to_megatron  # noqa: E402
from gyre.workers.forward import backward  # noqa: E402
from gyre.workers.manifest import weights_digest  # noqa: E402
from gyre.workers.policy_shape import read_shape  # noqa: E402
from gyre.workers.step_metrics import MicrostepResult, StepMetrics  # noqa: E402
from gyre.workers.trainer import Trainer  # noqa: E402
from tests.projections.random_forests import random_branches  # noqa: E402

pytestmark = pytest.mark.stack
CPU = torch.device("cpu")
LOSSES = ("ppo", "gspo", "cispo", "policy_gradient")
HARD = TrainerConfig(clip_low=0.05, clip_high=0.08)
"""Bounds that about half of the ratios are beyond."""


def build(dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    config = tiny_config(vocab_size=40, hidden_size=32, intermediate_size=48, max_position_embeddings=4096, **changes)
    shape = read_shape(config)
    megatron.start_process_group(1, 2)
    model = megatron.build_model(shape)
    # The scale at which log-probabilities of the model and of the rows lie within each other's reach.
    megatron.copy_weights(model, to_megatron(shape, tiny_tensors(config)))
    return model.to(dtype)


def gradient(
    model: Any, rows: Sequence[Row], config: TrainerConfig, layout: str, max_tokens: int = 1 << 30
) -> tuple[MicrostepResult, torch.Tensor]:
    total = MicrostepResult()
    model.zero_grad()
    for batch in passes(rows, max_tokens, layout, CPU):
        total = total.plus(backward(model, batch, config, 1.0))
    return total, torch.cat([p.grad.flatten() for p in model.parameters()])


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, of the whole gradient."""
    return float((found - expected).norm() / expected.norm())


def same(found: MicrostepResult, expected: MicrostepResult, rel: float) -> bool:
    pairs = zip(msgspec.structs.astuple(found), msgspec.structs.astuple(expected), strict=True)
    return all(one == pytest.approx(other, rel=rel) for one, other in pairs)


def big_tree(targets: str) -> list[Row]:
    """300 branches, up to 50 nodes deep, of 3 executions."""
    return random_branches(7, num_branches=100, depth=50, num_executions=3, max_node=3, targets=targets)


@pytest.mark.parametrize("targets", ["once", "branches"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_tree_has_the_gradient_of_its_flattened_branches_in_float64(loss: str, targets: str) -> None:
    rows, config = big_tree(targets), msgspec.structs.replace(HARD, loss=loss)
    model = build()
    flat, expected = gradient(model, rows, config, "paths", 4096)
    tree, found = gradient(model, rows, config, "tree")
    assert plant(rows).num_tokens < 0.6 * sum(map(num_computed, rows))
    assert (flat.num_clipped > 0.1 * flat.num_targets) == (loss != "policy_gradient")
    assert same(tree, flat, 1e-9)
    assert distance(found, expected) < 1e-9


@pytest.mark.parametrize("targets", ["once", "branches"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_tree_has_the_gradient_of_its_flattened_branches_in_float32(loss: str, targets: str) -> None:
    # A ratio that lies at its bound by less than the precision may fall on either side of it.
    rows, config = big_tree(targets), TrainerConfig(loss=loss, clip_low=0.9, clip_high=9.0)
    model = build(torch.float32)
    flat, expected = gradient(model, rows, config, "paths", 4096)
    tree, found = gradient(model, rows, config, "tree")
    assert same(tree, flat, 1e-3)
    assert distance(found, expected) < 1e-4


@settings(max_examples=25)
@given(
    st.integers(0, 10_000),
    st.sampled_from(LOSSES),
    st.sampled_from(["once", "branches"]),
    st.integers(20, 200),
)
def test_any_tree_cut_anywhere_has_the_same_gradient(seed: int, loss: str, targets: str, max_tokens: int) -> None:
    rows = random_branches(seed, num_branches=9, depth=9, num_executions=2, targets=targets)
    config, model = msgspec.structs.replace(HARD, loss=loss), build()
    flat, expected = gradient(model, rows, config, "paths")
    for size in (1 << 30, max_tokens):
        tree, found = gradient(model, rows, config, "tree", size)
        assert same(tree, flat, 1e-9)
        assert distance(found, expected) < 1e-9


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_family_of_policies_trains_on_trees(family: str) -> None:
    rows = random_branches(3, num_branches=8, depth=6)
    model = build(model_type=family, head_dim=16, num_key_value_heads=4)
    _, expected = gradient(model, rows, HARD, "paths")
    _, found = gradient(model, rows, HARD, "tree")
    assert distance(found, expected) < 1e-9


def parted(row: Row) -> list[Row]:
    """The row as one branch a reply, each of which goes on where the one before ends."""
    at = np.flatnonzero(row.target)
    reply = sequences([at])
    out = []
    for number in range(reply.max(initial=-1) + 1):
        mine = np.isin(np.arange(len(row.ids)), at[reply == number])
        end = int(np.flatnonzero(mine)[-1]) + 1
        out.append(
            msgspec.structs.replace(
                row,
                ids=row.ids[:end],
                target=mine[:end],
                weight=np.where(mine, row.weight, 0).astype(np.float32)[:end],
                logprob=np.where(mine, row.logprob, 0).astype(np.float32)[:end],
            )
        )
    return out


@pytest.mark.parametrize("loss", LOSSES)
def test_more_branches_of_an_execution_leave_loss_and_gradient_unchanged(loss: str) -> None:
    """And cost nothing: they are in the tree already."""
    rows, config = random_branches(5, num_branches=6, depth=40), msgspec.structs.replace(HARD, loss=loss)
    model = build()
    whole, expected = gradient(model, rows, config, "tree")
    more = [branch for row in rows for branch in parted(row)]
    assert len(more) > 2 * len(rows) and plant(more).num_tokens == plant(rows).num_tokens
    split, found = gradient(model, more, config, "tree")
    assert same(split, whole, 1e-9)
    assert distance(found, expected) < 1e-9


def test_a_branch_that_is_there_twice_changes_nothing_but_the_weights() -> None:
    """With half the weight each, for every loss: GSPO's ratio is that of the reply, whatever its copies."""
    rows = random_branches(5, num_branches=6, depth=10)
    twice = [msgspec.structs.replace(row, weight=row.weight / np.float32(2)) for row in rows for _ in range(2)]
    model = build()
    for loss in LOSSES:
        config = msgspec.structs.replace(HARD, loss=loss)
        once, expected = gradient(model, rows, config, "tree")
        both, found = gradient(model, twice, config, "tree")
        assert both.loss == pytest.approx(once.loss, rel=1e-9)
        assert distance(found, expected) < 1e-9


def steps(rows: list[Row], layout: str, max_tokens: int) -> list[Minibatch]:
    runs = pack(rows, max_tokens, layout)
    microsteps = tuple(Microstep(index=i, minibatch=0, rows=run) for i, run in enumerate(runs))
    num = len({row.execution for row in rows})
    return [Minibatch(index=0, groups=("g",), num_executions=num, microsteps=microsteps)]


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return write_tiny_policy(tmp_path / "policy")


def test_steps_of_a_trainer_are_the_same_in_both_layouts(policy: Path) -> None:
    """Two updates, with all terms that hold other weights: a correction, a KL term."""
    rows = random_branches(2, num_branches=10, depth=8, num_executions=4, vocab=100)
    config = TrainerConfig(correction="truncated", kl="k3", kl_weight=0.1, num_minibatches=2, warmup_steps=0)
    metrics, weights = [], []
    for layout in ("paths", "tree"):
        trainer = Trainer(policy, msgspec.structs.replace(config, layout=layout), seed=1)
        parts = steps(rows, layout, 60)
        assert len(parts[0].microsteps) > 3
        metrics.append([trainer.train_step([*parts, *parts]) for _ in range(2)])
        weights.append(trainer.published.buffer.clone())
    for one, other in zip(*metrics, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-3)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-3)
        assert one.num_targets == other.num_targets
    assert distance(weights[1], weights[0]) < 1e-4


def test_the_same_trees_give_the_same_bytes(policy: Path) -> None:
    digests = set()
    for _ in range(2):
        trainer = Trainer(policy, TrainerConfig(layout="tree"), seed=1)
        for seed in range(2):
            trainer.train_step(steps(random_branches(seed, num_branches=20, depth=8, vocab=100), "tree", 150))
        digests.add(digest(trainer))
    assert len(digests) == 1


RANK_PROGRAM = """
import os
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[3], str(Path(sys.argv[3]) / "workers")]
import test_tree_training as t
trainer, metrics = t.take_steps(Path(sys.argv[1]), 2)
trainer.save(sys.argv[2])
print("RESULT", t.digest(trainer), metrics.loss, metrics.grad_norm, metrics.num_targets, flush=True)
os._exit(0)  # gloo's threads may abort the end of an interpreter
"""
PARALLEL = TrainerConfig(layout="tree", num_threads=1, warmup_steps=0, weight_decay=0.1, max_grad_norm=0.05)


def take_steps(policy: Path, tensor_parallel: int) -> tuple[Trainer, StepMetrics]:
    """Two steps, each of micro-steps whose rows the models of a cell share out."""
    trainer = Trainer(policy, msgspec.structs.replace(PARALLEL, tensor_parallel=tensor_parallel), seed=1)
    for seed in range(2):
        rows = random_branches(seed, num_branches=8, depth=8, num_executions=4, vocab=100)
        for microstep in steps(rows, "tree", 80)[0].microsteps:
            trainer.gradients(microstep.rows)
        metrics = trainer.commit(4)
    return trainer, metrics


def digest(trainer: Trainer) -> str:
    return weights_digest({name: weight.numpy() for name, weight in trainer.published.named.items()})


@pytest.mark.timeout(600)
def test_four_ranks_train_on_trees_as_one(policy: Path, tmp_path: Path) -> None:
    """Two models of two ranks each, on gloo, as torchrun starts them; what they save one rank reads."""
    (port,) = free_ports(1)
    shared = os.environ | {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    argv = [sys.executable, "-c", RANK_PROGRAM, str(policy), str(tmp_path / "saved"), str(Path(__file__).parents[1])]
    ranks = [
        subprocess.Popen(argv, env=shared | {"RANK": str(r), "LOCAL_RANK": str(r)}, stdout=subprocess.PIPE, text=True)
        for r in range(4)
    ]
    outputs = [rank.communicate(timeout=500)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4
    results = {line for out in outputs for line in out.splitlines() if line.startswith("RESULT")}
    assert len(results) == 1
    weights, loss, norm, num_targets = results.pop().split()[1:]
    begun = Trainer(policy, PARALLEL, seed=1).published.buffer.clone()
    alone, metrics = take_steps(policy, 1)
    assert float(loss) == pytest.approx(metrics.loss, rel=1e-4)
    assert float(norm) == pytest.approx(metrics.grad_norm, rel=1e-4)
    assert int(num_targets) == metrics.num_targets
    taken = alone.published.buffer - begun
    alone.load(tmp_path / "saved")
    assert (digest(alone), alone.step) == (weights, 2)
    assert distance(alone.published.buffer - begun, taken) < 1e-2


def test_a_cell_with_too_few_ranks_for_one_model_is_refused(policy: Path) -> None:
    with pytest.raises(PolicyError, match=r"trainer\.tensor_parallel is 2, but the cell has 1 ranks"):
        Trainer(policy, TrainerConfig(tensor_parallel=2), seed=1)
