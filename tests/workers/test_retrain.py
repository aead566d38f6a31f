"""The recorded steps again: the real trainer over the log that a real trainer wrote."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytest.importorskip("mooncake.engine")

from cell_logs import arrival, departure, joined  # noqa: E402
from test_trainer_loop import CrashingLog, Run, config, events_of, groups, shifted, until, write  # noqa: E402

from gyre.config import Config, config_digest, encode_config  # noqa: E402
from gyre.errors import PolicyError, ReplayError  # noqa: E402
from gyre.events.codec import decode, encode  # noqa: E402
from gyre.events.memory import MemoryLog  # noqa: E402
from gyre.events.tokens import unpack_logprobs  # noqa: E402
from gyre.events.types import (  # noqa: E402
    BatchAssembled,
    CallCompleted,
    CellLeased,
    CellSwitched,
    ConfigChanged,
    Event,
    PolicyPublished,
    PolicyRolledBack,
    RunResumed,
    RunStarted,
    StepCompleted,
    Versioned,
)
from gyre.workers.cell import model_digest  # noqa: E402
from gyre.workers.retrain import retrain, version_differences  # noqa: E402

pytestmark = pytest.mark.stack
HERE = {"gyre": "1", "torch": "2", "megatron-core": "3", "nats-py": "4"}


def run_started(settings: Config, versions: dict[str, str] = HERE) -> RunStarted:
    return RunStarted(
        run="r", config=encode_config(settings), config_digest=config_digest(settings), seed=settings.seed,
        versions=tuple(Versioned(name=n, version=v) for n, v in versions.items()),
        num_threads=settings.trainer.num_threads,
    )  # fmt: skip


def train_again(epoch: int, version: int) -> tuple[Event, ...]:
    leased = CellLeased(cell="c0", role="train", epoch=epoch)
    return leased, CellSwitched(cell="c0", role="train", epoch=epoch, version=version, phases=())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return record(tmp_path_factory.mktemp("run"), num_minibatches=2)


def record(path: Path, **changes: Any) -> Run:
    """Step 1, a rejected cohort, and step 2 with another learning rate after a restart; its end is there twice, as of a
    trainer that was heard after its successor."""
    settings = config()
    trainer = msgspec.structs.replace(settings.trainer, **changes)
    guards = msgspec.structs.replace(settings.guards, on_breach="rollback")
    settings = msgspec.structs.replace(settings, trainer=trainer, guards=guards)
    run = Run(path, settings)

    async def first() -> None:
        await until(run.log, PolicyPublished)
        await write(run.log, *arrival("c0", 1, 0), *groups(0, 1, 2), *shifted(groups(3), 3.0))
        await write(run.log, *departure("c0", 2, 0))
        await until(run.log, PolicyPublished, 2)
        await write(run.log, *train_again(3, 1))
        await until(run.log, PolicyRolledBack)

    async def second() -> None:
        await write(run.log, *groups(4, 5), *train_again(4, 1))
        await until(run.log, PolicyPublished, 3)

    async def play() -> None:
        await write(run.log, run_started(settings))
        await write(run.log, msgspec.structs.replace(joined(), model_digest=model_digest(run.policy)))
        await run.during(first)
        changed = msgspec.structs.replace(trainer, learning_rate=1e-4)
        run.config = msgspec.structs.replace(settings, trainer=changed)
        text, digest = encode_config(run.config), config_digest(run.config)
        await write(run.log, ConfigChanged(config=text, config_digest=digest, changed=("trainer.learning_rate",)))
        await write(run.log, RunResumed(versions=()))
        await run.during(second)
        steps = await events_of(run.log, StepCompleted)
        assert [s.step for s in steps] == [1, 2]
        await write(run.log, steps[1])
        assert len(await events_of(run.log, PolicyRolledBack)) == 1

    asyncio.run(play())
    return run


async def altered(log: MemoryLog, seq: int, **fields: Any) -> MemoryLog:
    """The log with other values in one event."""
    copy = CrashingLog()
    async for recorded in log.read(1, until=await log.last_seq()):
        envelope = decode(await log.body(recorded.seq))
        if recorded.seq == seq:
            envelope = msgspec.structs.replace(envelope, event=msgspec.structs.replace(envelope.event, **fields))
        await copy.publish(recorded.subject, encode(envelope), envelope.id)
    return copy


async def find(log: MemoryLog, kind: type[Event], num: int = 1) -> Any:
    """The num-th event of a type, with its sequence."""
    found = [r async for r in log.read(1, until=await log.last_seq()) if isinstance(r.event, kind)]
    return found[num - 1]


def again(run: Run, log: MemoryLog | None = None, policy: Path | None = None, **versions: str) -> list[str]:
    lines: list[str] = []
    where = policy or run.policy
    lines.append(str(asyncio.run(retrain(log or run.log, where, versions=HERE | versions, show=lines.append))))
    return lines


def test_every_step_reaches_its_recorded_weights_whatever_came_between(run: Run) -> None:
    lines = again(run)
    steps = asyncio.run(events_of(run.log, StepCompleted))
    assert [line.split()[1] for line in lines[:-1]] == ["1:", "2:"]
    assert all(s.weights_digest[:12] in line for s, line in zip(steps, lines[:-1], strict=False))
    assert lines[-1] == "2"


def test_steps_on_trees_reach_their_recorded_weights(tmp_path: Path) -> None:
    run = record(tmp_path, layout="tree")
    steps = asyncio.run(events_of(run.log, StepCompleted))
    lines = again(run)
    assert all(s.weights_digest[:12] in line for s, line in zip(steps, lines[:-1], strict=False))
    assert lines[-1] == "2"


def test_an_altered_logprob_is_caught_before_its_batch_is_trained(run: Run) -> None:
    async def alter() -> tuple[MemoryLog, int]:
        call = await find(run.log, CallCompleted)
        logprobs = unpack_logprobs(call.event.logprobs).copy()
        logprobs[0] = np.nextafter(logprobs[0], np.float32(0))
        batch = await find(run.log, BatchAssembled)
        return await altered(run.log, call.seq, logprobs=logprobs.tobytes()), batch.seq

    log, seq = asyncio.run(alter())
    with pytest.raises(ReplayError, match=f"differs first at sequence {seq}: the batch of step 1"):
        again(run, log)


@pytest.mark.parametrize("step", [1, 2])
def test_other_weights_than_recorded_name_their_step_and_sequence(run: Run, step: int) -> None:
    async def alter() -> tuple[MemoryLog, int]:
        completed = await find(run.log, StepCompleted, step)
        return await altered(run.log, completed.seq, weights_digest="0" * 64), completed.seq

    log, seq = asyncio.run(alter())
    with pytest.raises(ReplayError, match=f"sequence {seq}: step {step} gives weights"):
        again(run, log)


def test_another_policy_is_refused(run: Run, tmp_path: Path) -> None:
    from tiny_policies import tiny_config, tiny_tensors, write_tiny_policy

    from gyre.workers.policy_files import save_policy

    other = write_tiny_policy(tmp_path / "shape", rope_theta=5000.0)
    with pytest.raises(PolicyError, match=r"config.json: has digest .* the run began with"):
        again(run, policy=other)
    save_policy(tmp_path / "weights", tiny_config(), tiny_tensors(tiny_config(), seed=1))
    with pytest.raises(PolicyError, match="--policy"):
        again(run, policy=tmp_path / "weights")


def test_other_versions_are_warned_of(run: Run) -> None:
    lines = again(run, torch="9")
    assert lines[0] == "warning: torch was 2, is 9: digests may differ"
    assert lines[-1] == "2"


def test_only_versions_that_decide_the_arithmetic_count() -> None:
    recorded = run_started(Config()).versions
    assert version_differences(recorded, HERE) == ()
    assert version_differences(recorded, HERE | {"nats-py": "9"}) == ()
    assert version_differences(recorded, {}) == (
        "gyre was 1, is missing", "torch was 2, is missing", "megatron-core was 3, is missing",
    )  # fmt: skip


def test_a_log_without_steps_trains_nothing() -> None:
    log = MemoryLog("r")
    asyncio.run(write(log, run_started(Config())))
    assert asyncio.run(retrain(log, None, versions=HERE, show=print)) == 0
