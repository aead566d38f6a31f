"""The benchmark of training: its rows are those of the sessions, its operations are counted right, and it runs."""

import gzip
import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from tiny_policies import write_tiny_policy  # noqa: E402

from gyre.errors import ConfigError  # noqa: E402
from gyre.workers.bench_train import SCALE, Work, bench_train  # noqa: E402
from gyre.workers.policy_files import load_policy  # noqa: E402
from gyre.workers.policy_shape import read_shape  # noqa: E402
from gyre.workers.session_shapes import Shape, shortened  # noqa: E402

pytestmark = pytest.mark.stack


@pytest.fixture
def sessions(tmp_path: Path) -> Path:
    """Two sessions: a stem of 64 tokens once shortened, and two branches that share all of it."""
    stem = {"in": 48 * SCALE, "out": 16 * SCALE, "base": -1, "shared": 0}
    branches = [{"in": n * SCALE, "out": 8 * SCALE, "base": 0, "shared": 48 * SCALE} for n in (72, 76)]
    path = tmp_path / "sessions.jsonl.gz"
    with gzip.open(path, "wt") as file:
        for _ in range(2):
            file.write(json.dumps({"requests": [stem, *branches]}) + "\n")
    return path


def test_shortened_calls_keep_their_places() -> None:
    shapes = [
        Shape(base=-1, shared=0, num_context=1000, num_sampled=5, role_class="main"),
        Shape(base=0, shared=1005, num_context=250, num_sampled=300, role_class="main"),
        Shape(base=1, shared=1100, num_context=90, num_sampled=300, role_class="sub-agent"),
    ]
    found = shortened(shapes, 100)
    assert [(s.shared, s.num_context, s.num_sampled) for s in found] == [(0, 10, 1), (11, 2, 3), (11, 1, 3)]
    assert [s.base for s in found] == [-1, 0, 1]


def test_operations_are_those_of_a_forward_and_two_backward_passes(tmp_path: Path) -> None:
    """Against what torch counts of the matrices; attention by its formula, since its kernel is one operator."""
    from torch.utils.flop_counter import FlopCounterMode

    from gyre.config import TrainerConfig
    from gyre.workers.trainer import Trainer
    from tests.projections.random_forests import random_branches

    policy = write_tiny_policy(tmp_path / "policy")
    shape = read_shape(load_policy(policy)[0])
    (row,) = random_branches(1, num_branches=1, depth=20, vocab=100)
    num = len(row.ids) - 1
    work = Work(num_tokens=num, num_pairs=0, num_predictions=row.num_targets)
    trainer = Trainer(policy, TrainerConfig(), seed=1)
    with FlopCounterMode(display=False) as counter:
        trainer.gradients([row])
    counts = counter.get_flop_counts()["Global"]
    matrices = sum(count for operator, count in counts.items() if operator in (torch.ops.aten.mm, torch.ops.aten.addmm))
    assert int(row.target[-1]) and work.flops(shape) == pytest.approx(matrices, rel=1e-6)


def test_the_benchmark_runs_and_counts(tmp_path: Path, sessions: Path) -> None:
    figures = bench_train(write_tiny_policy(tmp_path / "policy"), sessions, every=1, repeats=1)
    assert figures["sessions"].value == 2 and figures["branches"].value == 4
    stem, branches = 64, (8 + 8, 12 + 8)
    paths = [stem + n - 1 for n in branches]  # the last token of a branch predicts nothing
    assert figures["tokens_paths"].value == pytest.approx(2 * sum(paths) / 1e3)
    assert figures["tokens_tree"].value == pytest.approx(2 * (sum(paths) - stem) / 1e3)
    fewer = figures["speed_up_no_limit"].reference
    assert fewer is not None and 1.4 < fewer < 1.7
    assert figures["speed_up_j_max_1"].reference == 1.0
    assert "0.414" in figures["time_tree_j_max_1"].unit and "0.748" in figures["time_paths_j_max_5"].unit
    assert all(figure.value > 0 for figure in figures.values())


def test_a_file_without_sessions_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl.gz"
    with gzip.open(empty, "wt"):
        pass
    with pytest.raises(ConfigError, match="holds no session"):
        bench_train(write_tiny_policy(tmp_path / "policy"), empty)
