"""A cell's process: hops over a log in memory, with scripted engine, trainer and gateway; and its real children."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from cell_logs import joined
from scripted_cell import FINISHED, serving

from gyre.config import CellsConfig, EngineConfig
from gyre.errors import ConfigError, EngineError, ProcessError
from gyre.events.types import (
    CellFenced,
    CellJoined,
    CellLeased,
    CellLost,
    CellSwitched,
    EngineReleased,
    ProcessExited,
    SwitchRolledBack,
    WeightsPulled,
)
from gyre.workers import cell as cell_module
from gyre.workers.children import spawn

INTO_ROLLOUT = ["leased", "weights_pulled", "switched"]
INTO_TRAINING = ["switch_requested", "leased", "fenced", "sessions_rerouted", "engine_released", "switched"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_module, "RESTART_S", 0.01)
    monkeypatch.setattr(cell_module, "FAREWELL_S", 0.05)


def test_a_cell_goes_to_training_and_back(tmp_path: Path) -> None:
    async def play() -> None:
        stage = await serving(tmp_path)
        async with stage.cell() as cell:
            await stage.until(CellSwitched, role="rollout", epoch=1, version=0)
            await stage.command("train", 2)
            arrived = await stage.until(CellSwitched, role="train", epoch=2)
            assert [phase.name for phase in arrived.event.phases] == ["fence", "drain", "release"]
            assert all(phase.seconds >= 0 for phase in arrived.event.phases)
            assert stage.engine.is_released
            await stage.publish(1)
            await stage.command("rollout", 3)
            back = await stage.until(CellSwitched, role="rollout", epoch=3, version=1)
            assert [phase.name for phase in back.event.phases] == ["wait", "restore", "fetch"]
            pulled = await stage.until(WeightsPulled, version=1)
            assert (pulled.event.digest, back.envelope.cause) == ("d1", pulled.seq)
            await stage.write(FINISHED)
            await asyncio.wait_for(cell, 120)
        assert await stage.names() == [
            "joined", *INTO_ROLLOUT, *INTO_TRAINING, "switch_requested", *INTO_ROLLOUT,
        ]  # fmt: skip
        assert stage.engine.children[0].stopped and stage.trainers[0].stopped

    asyncio.run(play())


def test_a_serving_cell_takes_what_is_published_and_goes_on_serving(tmp_path: Path) -> None:
    async def play() -> None:
        stage = await serving(tmp_path)
        stage.engine.num_running = 2
        async with stage.cell():
            await stage.until(CellSwitched, role="rollout", epoch=1, version=0)
            await stage.publish(1)
            pulled = await stage.until(WeightsPulled, version=1)
            assert (pulled.event.epoch, pulled.event.digest) == (1, "d1")
            await stage.publish(2)
            await stage.until(WeightsPulled, version=2)
            await stage.write(FINISHED)
        assert await stage.names() == ["joined", *INTO_ROLLOUT, "weights_pulled", "weights_pulled"]
        assert stage.engine.did == ["pull 0", "pull 1", "pull 2"], "no release, no call waited for"

    asyncio.run(play())


def test_a_standalone_engine_has_no_trainer_and_takes_weights_like_the_others(tmp_path: Path) -> None:
    async def play() -> None:
        stage = await serving(tmp_path)
        stage.name, stage.config = "p0", msgspec.structs.replace(stage.config, cells=CellsConfig(count=1, pool=1))
        async with stage.cell():
            await stage.until(CellSwitched, role="rollout", epoch=1, version=0)
            await stage.publish(1)
            await stage.until(WeightsPulled, version=1)
            await stage.write(FINISHED)
        joined = (await stage.until(CellJoined)).event
        assert (joined.cell, joined.index, joined.standalone) == ("p0", 1, True)
        assert stage.trainers == [] and stage.engine.did == ["pull 0", "pull 1"]

    asyncio.run(play())


def test_a_command_does_not_wait_for_weights_that_cannot_be_had(tmp_path: Path) -> None:
    async def play() -> None:
        stage = await serving(tmp_path)
        async with stage.cell():
            await stage.until(CellSwitched, role="rollout", epoch=1, version=0)

            def gone() -> None:
                raise EngineError("engine: 409: the source is gone")

            stage.engine.before_pull = gone
            await stage.publish(1)
            await stage.command("train", 2)
            await stage.until(CellSwitched, role="train", epoch=2)
            await stage.write(FINISHED)

    asyncio.run(play())


def test_repeated_and_stale_commands_do_nothing(tmp_path: Path) -> None:
    async def play() -> None:
        stage = await serving(tmp_path)
        async with stage.cell():
            await stage.until(CellSwitched, role="rollout", epoch=1)
            for _ in range(3):
                await stage.command("train", 2)
            await stage.until(CellSwitched, role="train", epoch=2)
            await stage.command("rollout", 2)
            await stage.command("rollout", 3, term=0)
            await asyncio.sleep(0.05)
        assert stage.engine.did == ["pull 0", "release"]
        assert (await stage.names()).count("leased") == 2

    asyncio.run(play())


def test_it_waits_until_the_engine_is_idle(tmp_path: Path) -> None:
    async def play() -> None:
        stage = await serving(tmp_path)
        stage.engine.num_running = 1
        async with stage.cell():
            await stage.until(CellSwitched, role="rollout", epoch=1)
            await stage.command("train", 2)
            await stage.until(CellFenced, epoch=2)
            await asyncio.sleep(0.05)
            assert "release" not in stage.engine.did
            stage.engine.num_running = 0
            await stage.until(CellSwitched, role="train", epoch=2)

    asyncio.run(play())


@pytest.mark.parametrize("obstacle", ["gateway", "engine"])
def test_a_switch_that_takes_too_long_is_rolled_back(tmp_path: Path, obstacle: str) -> None:
    async def play() -> None:
        stage = await serving(tmp_path, deadline_s=1.0)
        stage.answers = obstacle != "gateway"
        stage.engine.num_running = int(obstacle == "engine")
        async with stage.cell():
            await stage.until(CellSwitched, role="rollout", epoch=1)
            await stage.command("train", 2)
            rolled = await stage.until(SwitchRolledBack, role="rollout", epoch=2)
            assert "was not done in 1.0 s" in rolled.event.reason
            stage.answers, stage.engine.num_running = True, 0
            await stage.command("train", 3)
            await stage.until(CellSwitched, role="train", epoch=3)

    asyncio.run(play())


def test_without_the_published_weights_it_stays_in_training(tmp_path: Path) -> None:
    async def play() -> None:
        stage = await serving(tmp_path, deadline_s=1.0)
        async with stage.cell():
            await stage.until(CellSwitched, role="rollout", epoch=1)
            await stage.command("train", 2)
            await stage.until(CellSwitched, role="train", epoch=2)
            await stage.publish(1, located=False)
            await stage.command("rollout", 3)
            await stage.until(SwitchRolledBack, role="train", epoch=3)
            assert stage.engine.did == ["pull 0", "release", "release"], "the trainer has the memory to itself again"

    asyncio.run(play())


def test_an_engine_that_dies_in_rollout_is_lost_and_joins_again_with_the_same_version(tmp_path: Path) -> None:
    async def play() -> None:
        stage = await serving(tmp_path)
        await stage.publish(4)
        async with stage.cell():
            await stage.until(CellSwitched, role="rollout", epoch=1, version=4)
            stage.engine.children[-1].die()
            await stage.until(CellLost)
            await stage.until(ProcessExited, process="c0-engine", code=-9, restarted=True)
            await stage.until(CellSwitched, role="rollout", epoch=2, version=4)
            assert stage.engine.version == 4
        assert await stage.names() == ["joined", *INTO_ROLLOUT, "lost", "joined", *INTO_ROLLOUT]

    asyncio.run(play())


def test_an_engine_that_dies_in_training_is_there_again_for_the_way_back(tmp_path: Path) -> None:
    async def play() -> None:
        stage = await serving(tmp_path)
        async with stage.cell():
            await stage.until(CellSwitched, role="rollout", epoch=1)
            await stage.command("train", 2)
            await stage.until(CellSwitched, role="train", epoch=2)
            stage.engine.children[-1].die()
            await stage.until(ProcessExited, process="c0-engine")
            await stage.publish(1)
            await stage.command("rollout", 3)
            await stage.until(CellSwitched, role="rollout", epoch=3, version=1)
        assert "lost" not in await stage.names()

    asyncio.run(play())


def test_an_engine_that_dies_while_it_drains_has_released_all_it_had(tmp_path: Path) -> None:
    async def play() -> None:
        stage = await serving(tmp_path)
        stage.engine.num_running = 1
        async with stage.cell():
            await stage.until(CellSwitched, role="rollout", epoch=1)
            await stage.command("train", 2)
            await stage.until(CellFenced, epoch=2)
            stage.engine.children[-1].die()
            stage.engine.num_running = 0
            await stage.until(EngineReleased, epoch=2)
            await stage.until(CellSwitched, role="train", epoch=2)
        assert "lost" not in await stage.names()

    asyncio.run(play())


def test_an_engine_that_dies_during_a_pull_is_pulled_into_again(tmp_path: Path) -> None:
    async def play() -> None:
        stage = await serving(tmp_path)

        def die_once() -> None:
            stage.engine.before_pull = lambda: None
            stage.engine.children[-1].die()

        stage.engine.before_pull = die_once
        async with stage.cell():
            await stage.until(CellSwitched, role="rollout", version=0)
            assert len(stage.engine.children) == 2 and stage.engine.did == ["pull 0"]

    asyncio.run(play())


def test_a_cell_that_starts_again_goes_on_above_the_epochs_of_its_log(tmp_path: Path) -> None:
    async def play() -> None:
        stage = await serving(tmp_path)
        async with stage.cell():
            await stage.until(CellSwitched, role="rollout", epoch=1)
            stage.answers = False
            await stage.command("train", 2)
            await stage.until(CellFenced, epoch=2)
        stage.answers = True
        async with stage.cell():
            await stage.until(CellSwitched, role="rollout", epoch=3, version=0)
        leases = [r.event async for r in stage.log.read(1, until=await stage.log.last_seq())]
        epochs = [e.epoch for e in leases if isinstance(e, CellLeased)]
        assert epochs == [1, 2, 3]

    asyncio.run(play())


def test_a_finished_run_starts_nothing(tmp_path: Path) -> None:
    async def play() -> None:
        stage = await serving(tmp_path)
        await stage.write(FINISHED)
        async with stage.cell() as cell:
            await asyncio.wait_for(cell, 120)
        assert not stage.engine.children and await stage.names() == []

    asyncio.run(play())


@pytest.mark.parametrize("which", ["engine", "trainer"])
def test_a_child_that_ends_again_and_again_ends_the_cell(tmp_path: Path, which: str) -> None:
    async def play() -> None:
        stage = await serving(tmp_path)
        async with stage.cell() as cell:
            await stage.until(CellSwitched, role="rollout", epoch=1)
            if which == "engine":
                # Every engine from now on dies before it has the weights.
                stage.engine.before_pull = lambda: stage.engine.children[-1].die(1)
                stage.engine.children[-1].die(1)
            else:
                for num in range(1, 4):
                    while len(stage.trainers) < num:  # noqa: ASYNC110
                        await asyncio.sleep(0.005)
                    stage.trainers[-1].die(1)
            with pytest.raises(ExceptionGroup) as caught:
                await asyncio.wait_for(cell, 120)
        assert caught.group_contains(ProcessError, match=f"c0-{which} ended 3 times in a row")

    asyncio.run(play())


def test_an_embedded_kv_store_is_of_the_machine_that_runs_it() -> None:
    asked = EngineConfig(kv_store="embedded")
    assert cell_module.with_store(asked, "127.0.0.1:5").kv_store == "127.0.0.1:5"
    own = EngineConfig(kv_store="kv.example:8650")
    assert cell_module.with_store(own, "127.0.0.1:5") == own
    assert cell_module.with_store(EngineConfig(), "127.0.0.1:5").kv_store == ""
    with pytest.raises(ConfigError, match="embedded is a store beside `gyre run`, on its machine; give host:port"):
        cell_module.with_store(asked, "")


def test_joining_says_what_the_others_must_know(tmp_path: Path) -> None:
    async def play() -> None:
        stage = await serving(tmp_path)
        async with stage.cell():
            joined = (await stage.until(CellJoined)).event
        assert (joined.cell, joined.index, joined.capacity) == ("c0", 0, 4)
        assert joined.engine_url == stage.engine.base_url

    asyncio.run(play())


# ---------------------------------------------------------------- real children


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_stopped_child_takes_its_own_children_with_it(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); time.sleep(60)"
    )

    async def play() -> int:
        child = await spawn((sys.executable, "-c", code), log_file=tmp_path / "logs/child.log")
        while not (said := (tmp_path / "logs/child.log").read_text()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await child.stop()
        assert await child.wait() == -signal.SIGTERM
        return int(said)

    grandchild = asyncio.run(play())
    deadline = time.monotonic() + 120
    while _is_alive(grandchild) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _is_alive(grandchild)


def test_a_killed_parent_takes_its_children_with_it(tmp_path: Path) -> None:
    code = f"""
import asyncio, pathlib
from gyre.workers.children import spawn
async def main():
    child = await spawn(("sleep", "60"), log_file=pathlib.Path({str(tmp_path / "child.log")!r}))
    print(child.pid, flush=True)
    await child.wait()
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert _is_alive(child)
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    deadline = time.monotonic() + 120
    while _is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _is_alive(child)


def test_a_cell_with_another_model_is_refused(tmp_path: Path) -> None:
    async def play() -> None:
        stage = await serving(tmp_path)
        await stage.write(msgspec.structs.replace(joined("c1", 1), model_digest="another"))
        async with stage.cell() as cell:
            with pytest.raises(ExceptionGroup) as refused:
                await asyncio.wait_for(cell, 120)
        assert refused.group_contains(ConfigError, match="cell c0: .* has digest m, the run's cells have another; give")
        assert await stage.names() == ["joined"]

    asyncio.run(play())
