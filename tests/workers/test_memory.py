"""The hand-over of a device's memory: both sides of it, in turns of every kind, over a real lock and a real server."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web
from scripted_cell import serving

from gyre.errors import EngineError
from gyre.events.server import free_ports
from gyre.events.types import CellSwitched, SessionsRerouted, SwitchRolledBack
from gyre.workers.engine import SglangEngine
from gyre.workers.memory import DeviceMemory, EngineMemory, Tenancy, TrainerMemory


async def here(work: Callable[[], None]) -> None:
    """As if in the one thread of torch."""
    await asyncio.sleep(0)
    work()


class Device:
    """Says when memory of one device is used twice. Both sides write down what they did."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.did: list[str] = []
        self.users: set[str] = set()

    def use(self, user: str, what: str) -> None:
        self.did.append(what)
        self.users.add(user)
        assert len(self.users) == 1, self.did

    def leave(self, user: str, what: str) -> None:
        self.did.append(what)
        self.users.discard(user)

    async def release(self) -> None:
        await asyncio.sleep(0)
        self.leave("engine", "release")

    async def restore(self) -> None:
        self.use("engine", "restore")

    def offload(self) -> None:
        self.leave("trainer", "offload")

    def onload(self) -> None:
        self.use("trainer", "onload")

    def engine_side(self) -> EngineMemory:
        return EngineMemory(Tenancy(self.path, "c0"), self)

    def trainer_side(self) -> TrainerMemory:
        return TrainerMemory(
            Tenancy(self.path, "c0"), self, here, show=lambda: self.use("trainer", "show"),
            hide=lambda: self.leave("trainer", "hide"),
        )  # fmt: skip

    def sides(self, first: str) -> tuple[DeviceMemory, DeviceMemory]:
        engine, trainer = self.engine_side(), self.trainer_side()
        return (engine, trainer) if first == "engine" else (trainer, engine)


async def is_waiting(task: "asyncio.Task[None]") -> bool:
    done, _ = await asyncio.wait((task,), timeout=0.1)
    return not done


@pytest.mark.parametrize("first", ["engine", "trainer"])
def test_nobody_takes_before_the_other_has_let_go(tmp_path: Path, first: str) -> None:
    async def play() -> None:
        device = Device(tmp_path)
        mine, other = device.sides(first)
        if first == "engine":
            await other.let_go()  # as a trainer does that starts, and sees that its cell does not train
        for _ in range(2):
            await mine.take()
            before = list(device.did)
            taking = asyncio.create_task(other.take())
            assert await is_waiting(taking) and device.did == before
            await mine.let_go()
            await asyncio.wait_for(taking, 120)
            mine, other = other, mine
        leaves, returns = ["hide", "offload"], ["onload", "show"]
        expected = {
            "engine": [*leaves, "restore", "release", *returns, *leaves, "restore"],
            "trainer": [*leaves, "restore", "restore", "release", *returns],
        }
        assert device.did == expected[first]

    asyncio.run(play())


@pytest.mark.parametrize("first", ["engine", "trainer"])
def test_both_calls_of_both_sides_can_be_repeated(tmp_path: Path, first: str) -> None:
    async def play() -> None:
        device = Device(tmp_path)
        mine, other = device.sides(first)
        for side in (mine, other, mine):
            await side.let_go()
            await side.let_go()
            await side.take()
            await side.take()
            await side.let_go()
            await side.let_go()
        assert device.did.count("offload") == device.did.count("onload") + 1
        assert not device.users

    asyncio.run(play())


@pytest.mark.parametrize("seed", range(8))
def test_whatever_the_two_ask_for_it_is_never_used_twice(tmp_path: Path, seed: int) -> None:
    """Each side goes its own way, now and then dies in the middle, and begins again. `Device.use` looks."""
    device, chance = Device(tmp_path), random.Random(seed)

    async def live(make: Callable[[], EngineMemory | TrainerMemory], user: str) -> None:
        side = make()
        await side.let_go()
        for _ in range(40):
            call: Awaitable[None] = chance.choice((side.take, side.let_go))()
            try:
                async with asyncio.timeout(chance.choice((0.05, 1e-4))):  # a switch has a deadline, too
                    await call
            except TimeoutError:
                pass
            if chance.random() < 0.2:  # its memory goes with the process, and so does the lock
                device.users.discard(user)
                side.tenancy.end()
                side = make()
                await side.let_go()
        await side.let_go()

    async def play() -> None:
        await asyncio.gather(live(device.engine_side, "engine"), live(device.trainer_side, "trainer"))
        assert not device.users

    asyncio.run(play())
    assert {"release", "restore", "offload"} <= set(device.did)


HOLDER = """
import asyncio, sys
from pathlib import Path
from gyre.workers.memory import Tenancy
async def hold():
    await Tenancy(Path(sys.argv[1]), "c0").begin()
    print("held", flush=True)
    await asyncio.sleep(600)
asyncio.run(hold())
"""


def test_a_process_that_is_killed_has_let_go(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"

    async def play() -> None:
        mine, stranger = Tenancy(tmp_path, "c0"), Tenancy(tmp_path, "c1")
        await asyncio.wait_for(stranger.begin(), 120)  # of another cell
        taking = asyncio.create_task(mine.begin())
        assert await is_waiting(taking) and not mine.is_held
        os.kill(holder.pid, signal.SIGKILL)
        await asyncio.wait_for(taking, 120)
        assert mine.is_held
        for tenancy in (mine, stranger):
            tenancy.end()

    try:
        asyncio.run(play())
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def test_an_engine_that_cannot_release_keeps_the_memory(tmp_path: Path) -> None:
    """Over HTTP, with what `engine_host.py` answers while a call is in flight."""
    asked: list[str] = []
    num_running = 1

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        is_refused = request.path == "/gyre/release" and num_running
        return web.json_response({"reason": "drain first"} if is_refused else {}, status=409 if is_refused else 200)

    async def play() -> None:
        nonlocal num_running
        app = web.Application()
        for path in ("/gyre/release", "/gyre/restore"):
            app.router.add_post(path, answer)
        runner = web.AppRunner(app)
        await runner.setup()
        (port,) = free_ports(1)
        await web.TCPSite(runner, "127.0.0.1", port).start()
        async with SglangEngine(f"http://127.0.0.1:{port}") as engine:
            side = EngineMemory(Tenancy(tmp_path, "c0"), engine)
            await side.take()
            with pytest.raises(EngineError, match="drain first"):
                await side.let_go()
            taking = asyncio.create_task(Device(tmp_path).trainer_side().take())
            assert await is_waiting(taking)
            num_running = 0
            await side.let_go()
            await asyncio.wait_for(taking, 120)
            again = asyncio.create_task(side.take())
            assert await is_waiting(again), "it has not asked the engine to take what the trainer has"
            again.cancel()
        await runner.cleanup()
        assert asked == ["/gyre/restore", "/gyre/release", "/gyre/release"]

    asyncio.run(play())


def test_the_way_back_waits_for_the_trainer(tmp_path: Path) -> None:
    async def play() -> None:
        stage = await serving(tmp_path, deadline_s=0.5)
        trainer = Tenancy(stage.run_dir, "c0")
        async with stage.cell():
            await stage.until(CellSwitched, role="rollout", epoch=1)
            taking = asyncio.create_task(trainer.begin())
            assert await is_waiting(taking), "the engine has it"
            await stage.command("train", 2)
            await stage.until(CellSwitched, role="train", epoch=2)
            await asyncio.wait_for(taking, 120)
            await stage.publish(1)
            await stage.command("rollout", 3)
            await stage.until(SwitchRolledBack, role="train", epoch=3)
            assert stage.engine.is_released, "it never took what the trainer did not let go"
            trainer.end()
            await stage.command("rollout", 4)
            await stage.until(CellSwitched, role="rollout", epoch=4, version=1)
            assert not stage.engine.is_released
            again = asyncio.create_task(trainer.begin())
            assert await is_waiting(again)
            again.cancel()

    asyncio.run(play())


def test_an_engine_that_died_has_let_go(tmp_path: Path) -> None:
    async def play() -> None:
        stage = await serving(tmp_path)
        stage.engine.num_running = 1
        trainer = Tenancy(stage.run_dir, "c0")
        async with stage.cell():
            await stage.until(CellSwitched, role="rollout", epoch=1)
            taking = asyncio.create_task(trainer.begin())
            await stage.command("train", 2)
            await stage.until(SessionsRerouted, epoch=2)
            assert await is_waiting(taking), "its calls are in flight"
            stage.engine.children[-1].die()
            stage.engine.num_running = 0
            await stage.until(CellSwitched, role="train", epoch=2)
            await asyncio.wait_for(taking, 120)
        assert "release" not in stage.engine.did
        trainer.end()

    asyncio.run(play())


def test_a_cell_that_ends_has_let_go(tmp_path: Path) -> None:
    async def play() -> None:
        stage = await serving(tmp_path)
        trainer = Tenancy(stage.run_dir, "c0")
        async with stage.cell():
            await stage.until(CellSwitched, role="rollout", epoch=1)
            taking = asyncio.create_task(trainer.begin())
            assert await is_waiting(taking)
        await asyncio.wait_for(taking, 120)
        trainer.end()
        async with stage.cell():
            await stage.until(CellSwitched, num=2, role="rollout")

    asyncio.run(play())
