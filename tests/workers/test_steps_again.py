"""Checkpoints that are torn or gone: the trainer takes the recorded steps again and reaches the recorded weights."""

import asyncio
import shutil
from pathlib import Path

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytest.importorskip("mooncake.engine")

from cell_logs import departure  # noqa: E402
from test_trainer_loop import STARTED, Run, config, events_of, groups, resumed, until, write  # noqa: E402
from tiny_policies import tiny_config, tiny_tensors  # noqa: E402

from gyre.config import Config  # noqa: E402
from gyre.errors import PolicyError  # noqa: E402
from gyre.events.types import PolicyPublished, StepCompleted  # noqa: E402
from gyre.workers.policy_files import save_policy  # noqa: E402

pytestmark = pytest.mark.stack


def keeping(num_checkpoints: int) -> Config:
    settings = config(steps_per_burst=2)
    return msgspec.structs.replace(
        settings, trainer=msgspec.structs.replace(settings.trainer, keep_checkpoints=num_checkpoints)
    )


async def trained(path: Path, num_checkpoints: int = 2) -> Run:
    """After two steps and their publish."""
    run = Run(path, keeping(num_checkpoints))
    await write(run.log, *STARTED[1:])

    async def two_steps() -> None:
        await until(run.log, PolicyPublished)
        await write(run.log, *groups(0, 1, 2, 3), *departure("c0", 2, 0))
        await until(run.log, PolicyPublished, 2)

    await run.during(two_steps)
    run.log = await resumed(run.log)
    return run


async def restarted(run: Run) -> None:
    """A trainer that starts again, until it says where its weights lie; it records nothing else."""
    before, num_events = await run.manifest(), await run.log.last_seq()

    async def look() -> None:
        async with asyncio.timeout(120):
            while (await run.manifest()).session == before.session:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    await run.during(look)
    assert (await run.manifest()).digest == before.digest
    assert await run.log.last_seq() == num_events + 2, "and the end that the test wrote"
    run.log = await resumed(run.log)


def tear(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "common.pt", "metadata.json"])
def test_a_torn_checkpoint_is_made_again_from_the_one_before(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    async def play() -> None:
        run = await trained(tmp_path)
        tear(tmp_path / "checkpoints/step-2", name)
        await restarted(run)
        said = capfd.readouterr().err
        assert "checkpoints/step-2: " in said and "steps 2 to 2 are taken again" in said
        await restarted(run)
        assert "again" not in capfd.readouterr().err, "it is whole now"

    asyncio.run(play())


def test_without_any_checkpoint_the_policy_and_the_log_are_enough(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def play() -> None:
        run = await trained(tmp_path)
        await write(run.log, *await events_of(run.log, StepCompleted))  # of a trainer heard after its successor
        shutil.rmtree(tmp_path / "checkpoints")
        (tmp_path / "checkpoints/.step-2.torn").mkdir(parents=True)
        await restarted(run)
        assert "steps 1 to 2 are taken again" in capfd.readouterr().err
        assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-1", "step-2"]

    asyncio.run(play())


def test_another_policy_than_the_run_began_with_is_refused(tmp_path: Path) -> None:
    async def play() -> None:
        run = await trained(tmp_path)
        shutil.rmtree(tmp_path / "checkpoints")
        shutil.rmtree(tmp_path / "policy")
        tensors = tiny_tensors(tiny_config())
        tensors["model.norm.weight"].mul_(1.5)
        save_policy(tmp_path / "policy", tiny_config(), tensors)
        with pytest.raises(PolicyError, match="the run began with"):
            await asyncio.wait_for(run.trainer(), 120)

    asyncio.run(play())


def test_a_step_that_comes_out_otherwise_is_refused_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    async def play() -> None:
        run = await trained(tmp_path)
        steps = await events_of(run.log, StepCompleted)
        tear(tmp_path / "checkpoints/step-2", "common.pt")
        run.config = msgspec.structs.replace(
            run.config, trainer=msgspec.structs.replace(run.config.trainer, learning_rate=0.5)
        )  # the log of this test holds no config, so this one counts for the past too
        with pytest.raises(PolicyError, match=f"the log says {steps[1].weights_digest[:12]}"):
            await asyncio.wait_for(run.trainer(), 120)
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-1"]

    asyncio.run(play())


@pytest.mark.parametrize(("num_kept", "names"), [(1, ["step-2"]), (0, ["step-1", "step-2"])])
def test_as_many_checkpoints_stay_as_the_config_says(tmp_path: Path, num_kept: int, names: list[str]) -> None:
    asyncio.run(trained(tmp_path, num_kept))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == names
