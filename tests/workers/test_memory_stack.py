"""What a real trainer does without on each device, and that all comes back. CUDA's way moves bytes of the CPU here."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytest.importorskip("mooncake.engine")

from test_satellite import Cells, play  # noqa: E402
from test_trainer_loop import ARRIVED, Run, config, departure, groups, until, write  # noqa: E402
from tiny_policies import minibatches, random_rows, write_tiny_policy  # noqa: E402

from gyre.config import TrainerConfig  # noqa: E402
from gyre.events.types import CellLeased, CellSwitched, PolicyPublished  # noqa: E402
from gyre.workers import trainer as trainer_module  # noqa: E402
from gyre.workers.memory import Tenancy  # noqa: E402
from gyre.workers.offload import CpuOffload, CudaOffload, Offload  # noqa: E402
from gyre.workers.trainer import Trainer  # noqa: E402

pytestmark = pytest.mark.stack
DEVICES: dict[str, Callable[[], Offload]] = {"cpu": CpuOffload, "cuda": lambda: CudaOffload(torch.device("cpu"))}
CONFIG = TrainerConfig(learning_rate=1e-3, warmup_steps=0, kl="k3", kl_weight=0.1)


@pytest.fixture(params=DEVICES)
def device(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    monkeypatch.setattr(trainer_module, "offload_of", lambda device: DEVICES[name]())
    return name


def state_of(trainer: Trainer) -> list[Any]:
    moments = [value for state in trainer._optimizer.state.values() for value in state.values()]
    kept = (*moments, *trainer._earlier.copies)
    return [*trainer.own_weights().values(), trainer.gradient, *kept, trainer.published.buffer]


def held_bytes(trainer: Trainer) -> int:
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in (*state_of(trainer), trainer._fresh))}
    return sum(storages.values()) - trainer.published.buffer.untyped_storage().nbytes()


def test_all_that_counts_comes_back_bit_for_bit(tmp_path: Path, device: str) -> None:
    policy = write_tiny_policy(tmp_path / "policy")
    trainer, other = Trainer(policy, CONFIG, seed=1), Trainer(policy, CONFIG, seed=1)
    rows = random_rows(6)
    for one in (trainer, other):
        one.train_step(minibatches(rows))
        one.gradients(rows[:2])  # a sum that is under way
    before = [tensor.clone() for tensor in state_of(trainer)]
    assert trainer._earlier.reference is not None and any(m.count_nonzero() for m in before)
    whole, published = held_bytes(trainer), trainer.published.buffer.data_ptr()
    for _ in range(2):
        trainer.offload()
        trainer.offload()
        assert held_bytes(trainer) == (whole - trainer._sum.nbytes if device == "cpu" else 0)
        assert torch.equal(trainer.published.buffer, before[-1]) and trainer.published.buffer.data_ptr() == published
        trainer.onload()
        trainer.onload()
        assert held_bytes(trainer) == whole
        assert all(torch.equal(now, was) for now, was in zip(state_of(trainer), before, strict=True))
    gradients = {p.grad.untyped_storage().data_ptr() for p in trainer._parameters.values()}
    assert gradients == {trainer._fresh.untyped_storage().data_ptr()}, "gradients are views of one buffer still"
    for one in (trainer, other):
        one.commit(2)
        one.train_step(minibatches(random_rows(5, seed=2)))
    assert all(torch.equal(a, b) for a, b in zip(state_of(trainer), state_of(other), strict=True))


def test_a_trainer_has_the_memory_while_its_cell_trains(tmp_path: Path, device: str) -> None:
    run = Run(tmp_path, config())
    engine = Tenancy(tmp_path, "c0")

    async def work() -> None:
        await until(run.log, PolicyPublished)
        await asyncio.wait_for(engine.begin(), 60)
        await write(run.log, *ARRIVED, *groups(0, 1))
        engine.end()
        await write(run.log, *departure("c0", 2, 0))
        await until(run.log, PolicyPublished, 2)
        waiting = asyncio.create_task(engine.begin())
        await asyncio.wait((waiting,), timeout=0.2)
        assert not waiting.done(), "its cell trains still"
        await write(run.log, CellLeased(cell="c0", role="rollout", epoch=3))
        await asyncio.wait_for(waiting, 60)
        assert (await run.pull())["model.norm.weight"].isfinite().all(), "engines read what is published"
        engine.end()
        await write(run.log, CellSwitched(cell="c0", role="rollout", epoch=3, version=1, phases=()))
        await write(run.log, *groups(2, 3), *departure("c0", 4, 1))
        await until(run.log, PolicyPublished, 3)

    asyncio.run(run.during(work))


def test_several_cells_find_each_others_memory_where_it_went(tmp_path: Path, device: str) -> None:
    """All have let go before they train, so whatever others read of them has moved to other addresses."""

    async def case() -> None:
        cells = Cells(tmp_path, 2)
        await cells.begin()
        await cells.take()
        await cells.check("c0", "c1")

    play(case())
