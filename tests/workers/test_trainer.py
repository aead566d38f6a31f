"""The trainer: its arithmetic against transformers and NumPy, its determinism, its checkpoints, its refusals."""

import os
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from tiny_policies import VOCAB, minibatches, random_rows, write_tiny_policy  # noqa: E402

from gyre.config import TrainerConfig  # noqa: E402
from gyre.errors import MissingError, PolicyError, TrainingError  # noqa: E402
from gyre.projections.batches import Row  # noqa: E402
from gyre.workers.batch_tensors import TokenRow, batch_tensors  # noqa: E402
from gyre.workers.forward import target_logprobs  # noqa: E402
from gyre.workers.manifest import weights_digest  # noqa: E402
from gyre.workers.policy_files import load_policy, save_policy  # noqa: E402
from gyre.workers.trainer import Trainer  # noqa: E402

pytestmark = pytest.mark.stack
CONFIG = TrainerConfig(learning_rate=1e-3)


def digest(trainer: Trainer) -> str:
    return weights_digest({name: weight.numpy() for name, weight in trainer.published.named.items()})


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return write_tiny_policy(tmp_path / "policy")


def test_published_weights_are_the_policy_and_move_in_place(policy: Path) -> None:
    trainer = Trainer(policy, CONFIG, seed=1)
    named = trainer.published.named
    loaded = load_policy(policy)[1]
    assert named.keys() == loaded.keys()
    assert all(torch.equal(named[n], loaded[n]) and named[n].is_contiguous() for n in named)
    addresses = {n: w.data_ptr() for n, w in named.items()}
    low = trainer.published.buffer.data_ptr()
    high = low + trainer.published.buffer.nbytes
    assert all(low <= a and a + named[n].nbytes <= high and (a - low) % 64 == 0 for n, a in addresses.items())
    trainer.train_step(minibatches(random_rows(4)))
    after = trainer.published.named
    assert {n: w.data_ptr() for n, w in after.items()} == addresses
    assert all(not torch.equal(after[n], loaded[n]) for n in after)


def test_published_weights_have_the_dtype_of_the_policy(tmp_path: Path) -> None:
    path = write_tiny_policy(tmp_path / "bf16", dtype="bfloat16")
    trainer = Trainer(path, CONFIG, seed=1)
    assert {w.dtype for w in trainer.published.named.values()} == {torch.bfloat16}


@pytest.mark.parametrize("token", [VOCAB, -1])
def test_a_token_that_the_policy_does_not_have_is_refused(token: int, policy: Path) -> None:
    trainer, (row,) = Trainer(policy, CONFIG, seed=1), random_rows(1)
    foreign = msgspec.structs.replace(row, ids=np.where(np.arange(len(row.ids)) == 1, np.int32(token), row.ids))
    with pytest.raises(TrainingError, match=f"execution {row.execution}: token ids .* the policy has {VOCAB}"):
        trainer.gradients([foreign])
    assert trainer.result.num_targets == 0


def test_loss_is_the_mean_over_executions_of_means_over_targets(policy: Path) -> None:
    """Several rows an execution, several micro-steps; the plain reading runs each row alone and averages in NumPy."""
    rows = random_rows(5, rows_each=2)
    trainer = Trainer(policy, CONFIG, seed=1)
    by_execution: dict[str, list[np.ndarray]] = {}
    entropies, gaps, num_clipped = [], [], 0
    with torch.no_grad():
        for row in rows:
            batch = batch_tensors([row], torch.device("cpu"))
            logprob, entropy = target_logprobs(trainer._model, batch, 1.0)
            old = row.logprob[row.target]
            ratio = np.exp(logprob.numpy() - old)
            loss = -np.minimum(ratio * row.advantage, np.clip(ratio, 0.8, 1.28) * row.advantage)
            by_execution.setdefault(row.execution, []).append(loss)
            num_clipped += int((ratio > 1.28).sum() if row.advantage > 0 else (ratio < 0.8).sum())
            entropies.append(entropy.numpy())
            gaps.append(np.abs(logprob.numpy() - old))
    expected = np.mean([np.concatenate(parts).mean() for parts in by_execution.values()])
    for i in range(0, len(rows), 3):
        trainer.gradients(rows[i : i + 3])
    metrics = trainer.commit(5)
    assert metrics.loss == pytest.approx(expected, rel=1e-5)
    assert metrics.entropy == pytest.approx(np.concatenate(entropies).mean(), rel=1e-5)
    assert metrics.logprob_gap_mean == pytest.approx(np.concatenate(gaps).mean(), rel=1e-4)
    assert metrics.logprob_gap_max == pytest.approx(np.concatenate(gaps).max(), rel=1e-4)
    assert metrics.num_targets == sum(int(r.target.sum()) for r in rows)
    assert metrics.num_tokens == sum(len(r.ids) for r in rows)
    assert metrics.clip_fraction == pytest.approx(num_clipped / metrics.num_targets)
    assert 0 < metrics.clip_fraction < 1


def test_gradient_is_the_same_for_any_division_into_microsteps(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows(6)
    trainer = Trainer(policy, CONFIG, seed=1)
    trainer.gradients(rows)
    whole = trainer.gradient.clone()
    trainer.discard()
    monkeypatch.setattr(trainer, "_tokens_per_pass", {"paths": 1})
    for row in rows:
        trainer.gradients([row])
    assert whole.abs().max() > 1e-3
    assert (trainer.gradient - whole).abs().max() < 1e-5 * whole.abs().max()


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "policy_gradient"])
def test_splitting_an_execution_into_more_rows_changes_neither_loss_nor_gradient(policy: Path, loss: str) -> None:
    """miles#2378, agent-lightning#593, uni-agent#185: each target goes to one of up to four branches that share what
    stands before it; with `gspo` each reply, since a reply has one ratio."""
    whole = random_rows(4, rows_each=2)
    rng = np.random.default_rng(7)
    split = []
    for row in whole:
        unit = np.cumsum(np.diff(row.target, prepend=False)) if loss == "gspo" else np.arange(row.num_tokens)
        owner = rng.integers(0, 4, row.num_tokens)[unit]
        for branch in range(4):
            mine = row.target & (owner == branch)
            if mine.any():
                end = int(np.flatnonzero(mine)[-1]) + 1
                split.append(
                    msgspec.structs.replace(
                        row,
                        call=f"{row.call}-{branch}",
                        ids=row.ids[:end],
                        target=mine[:end],
                        logprob=np.where(mine, row.logprob, 0)[:end].astype(np.float32),
                        weight=np.where(mine, row.weight, 0)[:end].astype(np.float32),
                    )
                )
    assert len(split) > 2 * len(whole)
    trainer = Trainer(policy, msgspec.structs.replace(CONFIG, loss=loss), seed=1)
    losses, gradients = [], []
    for rows in (whole, split):
        losses.append(trainer.gradients(rows).loss)
        gradients.append(trainer.gradient.clone())
        trainer.discard()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert (gradients[1] - gradients[0]).abs().max() < 1e-5 * gradients[0].abs().max()


def test_gradient_is_that_of_finite_differences(policy: Path) -> None:
    rows = random_rows(3)
    trainer = Trainer(policy, CONFIG, seed=1)
    trainer.gradients(rows)
    gradient = trainer.gradient.clone()
    trainer.discard()
    generator = torch.Generator().manual_seed(3)
    parameters = list(trainer._parameters.values())
    directions = [torch.randn(p.shape, generator=generator) for p in parameters]
    slope = float(torch.cat([d.flatten() for d in directions]) @ gradient)
    losses = []
    for scale in (1e-4, -2e-4):
        with torch.no_grad():
            for p, d in zip(parameters, directions, strict=True):
                p += scale * d
        losses.append(trainer.gradients(rows).loss)
        trainer.discard()
    assert (losses[0] - losses[1]) / 2e-4 == pytest.approx(slope, rel=0.03)


def test_gradients_of_another_cell_count_as_ones_own(policy: Path) -> None:
    rows = random_rows(6)
    core, cell = (Trainer(policy, CONFIG, seed=1) for _ in range(2))
    core.gradients(rows[:3])
    cell.gradients(rows[3:])
    core.add_gradient(cell.gradient, cell.result)
    shared = core.commit(6)
    alone = Trainer(policy, CONFIG, seed=1)
    alone.gradients(rows[:3])
    alone.gradients(rows[3:])
    assert alone.commit(6) == shared
    assert digest(alone) == digest(core)
    with pytest.raises(PolicyError, match="shape"):
        core.add_gradient(torch.zeros(3), cell.result)


def test_same_rows_give_the_same_bytes(policy: Path) -> None:
    runs = []
    for _ in range(2):
        trainer = Trainer(policy, CONFIG, seed=1)
        metrics = [trainer.train_step(minibatches(random_rows(8, seed=s))) for s in range(3)]
        runs.append((digest(trainer), metrics))
    assert runs[0] == runs[1]


def test_a_checkpoint_resumes_bit_for_bit(policy: Path, tmp_path: Path) -> None:
    batches = [random_rows(6, seed=s) for s in range(4)]
    trainer = Trainer(policy, CONFIG, seed=1)
    for batch in batches[:2]:
        trainer.train_step(minibatches(batch))
    assert trainer.publish() == 2
    children = psutil.Process().children(recursive=True)
    trainer.save(tmp_path / "checkpoint")
    assert psutil.Process().children(recursive=True) == children  # nothing is left running
    saved = digest(trainer)
    last = [trainer.train_step(minibatches(batch)) for batch in batches[2:]]
    resumed = Trainer(policy, CONFIG, seed=1)
    resumed.load(tmp_path / "checkpoint")
    assert (resumed.step, resumed.version, digest(resumed)) == (2, 2, saved)
    assert [resumed.train_step(minibatches(batch)) for batch in batches[2:]] == last
    assert digest(resumed) == digest(trainer) != saved
    trainer.save(tmp_path / "checkpoint")  # over the older one
    resumed.load(tmp_path / "checkpoint")
    assert resumed.step == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "policy"]


def test_a_checkpoint_that_is_absent_or_of_another_policy_is_refused(policy: Path, tmp_path: Path) -> None:
    trainer = Trainer(policy, CONFIG, seed=1)
    with pytest.raises(MissingError, match="no checkpoint"):
        trainer.load(tmp_path / "nothing")
    trainer.save(tmp_path / "checkpoint")
    other = Trainer(write_tiny_policy(tmp_path / "other", intermediate_size=80), CONFIG, seed=1)
    before = digest(other)
    with pytest.raises(PolicyError, match=r"another policy: .*linear_fc1"):
        other.load(tmp_path / "checkpoint")
    assert digest(other) == before
    trainer.train_step(minibatches(random_rows(2)))
    before, weights = digest(trainer), trainer._parameters["decoder.final_layernorm.weight"].detach().clone()
    shard = max((tmp_path / "checkpoint").glob("*.distcp"), key=lambda file: file.stat().st_size)
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    with pytest.raises(PolicyError, match="torn checkpoint"):
        trainer.load(tmp_path / "checkpoint")
    assert digest(trainer) == before
    assert torch.equal(trainer._parameters["decoder.final_layernorm.weight"], weights)


def test_a_checkpoint_that_cannot_be_written_leaves_the_older_one(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(policy, CONFIG, seed=1)
    trainer.save(tmp_path / "checkpoint")
    trainer.train_step(minibatches(random_rows(2)))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        with pytest.raises(PolicyError, match="No space left on device"):
            trainer.save(tmp_path / "checkpoint")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "policy"]
    trainer.load(tmp_path / "checkpoint")
    assert trainer.step == 0


def test_an_exported_policy_trains_on_from_the_same_weights(policy: Path, tmp_path: Path) -> None:
    trainer = Trainer(policy, CONFIG, seed=1)
    trainer.train_step(minibatches(random_rows(4)))
    save_policy(tmp_path / "export", trainer.hf_config, trainer.published.named)
    assert digest(Trainer(tmp_path / "export", CONFIG, seed=1)) == digest(trainer)


def test_minibatches_are_updates_of_one_step(policy: Path) -> None:
    rows = random_rows(8, rows_each=2)
    trainer, twin = (Trainer(policy, CONFIG, seed=1) for _ in range(2))
    merged = trainer.train_step(minibatches(rows, 2))
    parts = []
    for part in minibatches(rows, 2):
        for microstep in part.microsteps:
            twin.gradients(microstep.rows)
        parts.append(twin.commit(part.num_executions, last=part.index == 1))
    assert digest(trainer) == digest(twin) and trainer.step == twin.step == 1
    assert [(m.step, m.num_executions, m.learning_rate) for m in parts] == [(1, 4, CONFIG.learning_rate / 3)] * 2
    assert merged.loss == pytest.approx((parts[0].loss + parts[1].loss) / 2)
    sums = [m.entropy * m.num_targets for m in parts]
    assert merged.entropy == pytest.approx(sum(sums) / sum(int(row.target.sum()) for row in rows))
    assert merged.grad_norm == max(m.grad_norm for m in parts)
    assert merged.num_tokens == sum(row.num_tokens for row in rows)


def test_a_loss_that_is_not_finite_changes_nothing(policy: Path) -> None:
    rows = random_rows(4)
    bad = msgspec.structs.replace(rows[0], advantage=float("nan"))
    trainer, twin = (Trainer(policy, CONFIG, seed=1) for _ in range(2))
    for each in (trainer, twin):
        each.gradients(rows[:2])
    with pytest.raises(TrainingError, match="not finite"):
        trainer.gradients([rows[2], bad])
    with pytest.raises(TrainingError, match="not finite"):
        trainer.add_gradient(torch.full_like(trainer.gradient, float("inf")), trainer.result)
    assert trainer.commit(2) == twin.commit(2)
    assert digest(trainer) == digest(twin)
    before = digest(trainer)
    trainer.gradients(rows[:2])
    trainer.gradient[0] = float("inf")
    with pytest.raises(TrainingError, match="norm is inf"):
        trainer.commit(2)
    assert digest(trainer) == before and trainer.step == 1


def test_no_execution_or_no_advantage_leaves_the_weights(policy: Path) -> None:
    trainer = Trainer(policy, CONFIG, seed=1)
    before = digest(trainer)
    zero = [msgspec.structs.replace(row, advantage=0.0) for row in random_rows(3)]
    assert trainer.train_step(minibatches(zero)).grad_norm == 0
    assert trainer.train_step([]).num_executions == 0
    assert digest(trainer) == before and trainer.step == 2
    with pytest.raises(ValueError, match="-1 executions"):
        trainer.commit(-1)


def test_gradient_norm_is_clipped(policy: Path) -> None:
    """With a first AdamW step the update is scale-free, so the clip shows in the first moment."""
    config = msgspec.structs.replace(CONFIG, max_grad_norm=1e-3)
    trainer = Trainer(policy, config, seed=1)
    metrics = trainer.train_step(minibatches(random_rows(4)))
    moments = [state["exp_avg"].flatten() for state in trainer._optimizer.state.values()]
    assert metrics.grad_norm > 1e-2
    assert float(torch.cat(moments).norm()) == pytest.approx((1 - config.beta1) * 1e-3, rel=1e-4)


def test_reinforced_tokens_become_likelier(policy: Path) -> None:
    trainer = Trainer(policy, msgspec.structs.replace(CONFIG, warmup_steps=0), seed=1)

    def sampled(row: Row, advantage: float) -> Row:
        with torch.no_grad():
            batch = batch_tensors([row], torch.device("cpu"))
            logprob = np.zeros(len(row.ids), np.float32)
            logprob[row.target] = target_logprobs(trainer._model, batch, 1.0)[0].numpy()
        return msgspec.structs.replace(row, logprob=logprob, advantage=advantage)

    rows = [sampled(row, 1.0 if i % 2 else -1.0) for i, row in enumerate(random_rows(8))]
    metrics = trainer.train_step(minibatches(rows))
    assert metrics.logprob_gap_max < 1e-5 and metrics.clip_fraction == 0
    change = [float((sampled(r, 0).logprob - r.logprob)[r.target].mean()) for r in rows]
    assert all((c > 0) == (r.advantage > 0) for c, r in zip(change, rows, strict=True))


def test_supervised_steps_learn_what_they_are_shown(policy: Path) -> None:
    pattern = np.tile(np.arange(10, 20), 4).astype(np.int32)
    target = np.arange(len(pattern)) > 0
    rows = [
        TokenRow(
            ids=np.roll(pattern, k),
            target=target,
            weight=np.where(target, 1.0, 0.0).astype(np.float32),
            logprob=np.zeros(len(pattern), np.float32),
        )
        for k in range(6)
    ]
    trainer = Trainer(policy, CONFIG, seed=1)
    losses = [trainer.supervised_step(rows, rate=3e-3) for _ in range(40)]
    with pytest.raises(ValueError, match="sum to 0"):
        trainer.supervised_step([], rate=1e-3)
    assert losses[0] > 0.8 * np.log(VOCAB) and losses[-1] < 0.2
    assert trainer.step == 0
