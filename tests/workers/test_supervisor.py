"""Supervised processes: started again when they die, given up when that does not help, gone with their supervisor."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gyre.errors import REFUSED, ConfigError, PolicyError, ProcessError, StreamError, is_passing
from gyre.events.follow import Follower
from gyre.events.log import open_writer
from gyre.events.memory import MemoryLog
from gyre.events.run_dir import RunDir
from gyre.events.types import RunFinished
from gyre.projections.progress import Progress
from gyre.workers import supervisor as supervisor_module
from gyre.workers.run import _until_over
from gyre.workers.supervisor import HEALTHY_S, MAX_DEATHS, Deaths, Supervisor


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "RESTART_S", 0.01)


def python(text: str) -> tuple[str, ...]:
    return sys.executable, "-I", "-S", "-c", text


def play(path: Path, script: Callable[[Supervisor, list[tuple[str, int, bool]]], object]) -> None:
    """`script` with a supervisor whose lock is any open file; it is stopped in the end."""

    async def main() -> None:
        exits: list[tuple[str, int, bool]] = []

        async def exited(name: str, code: int, restarted: bool) -> None:
            exits.append((name, code, restarted))

        with (path / "lock").open("a") as lock:
            supervisor = Supervisor(path / "logs", lock=lock.fileno(), moved=lambda: 0, exited=exited)
            try:
                await asyncio.wait_for(script(supervisor, exits), 120)  # type: ignore[arg-type]
            finally:
                await supervisor.stop()

    asyncio.run(main())


def test_a_child_that_dies_is_started_again_until_its_work_is_done(tmp_path: Path) -> None:
    async def script(supervisor: Supervisor, exits: list[tuple[str, int, bool]]) -> None:
        once = f"import os, pathlib, sys; p = pathlib.Path({str(tmp_path / 'died')!r}); sys.exit(0) if p.exists() else p.touch() or os.kill(os.getpid(), 9)"  # noqa: E501
        supervisor.keep("worker", python(once))
        await supervisor.wait_all(120)
        assert exits == [("worker", -9, True)]

    play(tmp_path, script)


@pytest.mark.parametrize("is_over", [True, False])
def test_processes_may_read_of_the_end_before_their_supervisor_does(tmp_path: Path, is_over: bool) -> None:
    """Its connection to the log may be the last that comes back."""

    async def script(supervisor: Supervisor, exits: list[tuple[str, int, bool]]) -> None:
        log, progress = MemoryLog("r"), Progress()
        writer = await open_writer(log, "dispatcher", lambda: 0)
        if is_over:
            await writer.append(RunFinished(reason="completed"))
        follower = Follower(log, progress.evolve)
        supervisor.keep("dispatcher", python(""))
        serving = asyncio.create_task(asyncio.sleep(120))
        until_over = asyncio.create_task(_until_over(supervisor, serving, follower, progress))
        await supervisor.wait_all(120)
        await asyncio.sleep(0.1)
        following = asyncio.create_task(follower.run())
        if is_over:
            assert await until_over is None
        else:
            with pytest.raises(ProcessError, match="the run did not"):
                await until_over
        for task in (serving, following):
            task.cancel()

    play(tmp_path, script)


def test_a_child_that_keeps_dying_is_given_up_with_its_last_words(tmp_path: Path) -> None:
    async def script(supervisor: Supervisor, exits: list[tuple[str, int, bool]]) -> None:
        supervisor.keep("other", python("import time; time.sleep(60)"))
        supervisor.keep("worker", python("print('no such thing'); raise SystemExit(3)"))
        failed = await supervisor.first_failure()
        assert (failed.name, failed.last_words()) == ("worker", "no such thing")
        assert exits == [("worker", 3, True)] * (MAX_DEATHS - 1) + [("worker", 3, False)]

    play(tmp_path, script)


def test_a_child_that_refuses_is_not_started_again(tmp_path: Path) -> None:
    async def script(supervisor: Supervisor, exits: list[tuple[str, int, bool]]) -> None:
        supervisor.keep("worker", python(f"raise SystemExit({REFUSED})"))
        assert (await supervisor.first_failure()).name == "worker"
        assert exits == [("worker", REFUSED, False)]

    play(tmp_path, script)


def test_what_a_stop_ends_was_no_death(tmp_path: Path) -> None:
    async def script(supervisor: Supervisor, exits: list[tuple[str, int, bool]]) -> None:
        supervisor.keep("worker", python("import time; time.sleep(60)"))
        while "worker" not in supervisor.children:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await supervisor.stop()
        assert supervisor.children["worker"].process.returncode == -signal.SIGTERM
        assert exits == []

    play(tmp_path, script)


def test_deaths_in_a_row_count_until_a_life_lasted_and_the_run_moved() -> None:
    now, moves = [0.0], [0]
    deaths = Deaths(lambda: moves[0], lambda: now[0])

    def life(seconds: float, moved: int) -> bool:
        deaths.born()
        now[0] += seconds
        moves[0] += moved
        return deaths.died(-9)

    assert [life(1, 1) for _ in range(MAX_DEATHS)] == [True] * (MAX_DEATHS - 1) + [False], "moving alone is not enough"
    assert not life(HEALTHY_S + 1, 0), "nor is lasting"
    assert life(HEALTHY_S + 1, 1)
    assert deaths.num == 1
    assert not deaths.died(REFUSED)


def test_only_what_may_pass_is_worth_another_start() -> None:
    assert is_passing(StreamError("away"))
    assert not is_passing(PolicyError("torn"))
    assert not is_passing(ZeroDivisionError())


def test_a_directory_is_in_use_while_its_supervisor_lives(tmp_path: Path) -> None:
    with RunDir(tmp_path).lock(), pytest.raises(ConfigError, match=f"in use by another run .process {os.getpid()}"):
        RunDir(tmp_path).lock().__enter__()


def test_a_directory_is_free_again_when_the_processes_of_a_killed_supervisor_are_gone(tmp_path: Path) -> None:
    """Also where nobody has asked yet how the supervisor ended."""
    text = (
        "import os, pathlib, subprocess, sys; from gyre.events.run_dir import RunDir\n"
        f"with RunDir(pathlib.Path({str(tmp_path)!r})).lock() as lock:\n"
        "    code = 'import sys; sys.stdin.read()'\n"
        "    subprocess.Popen([sys.executable, '-c', code], pass_fds=(lock,), stdout=subprocess.DEVNULL)\n"
        "    print('held', flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    command = (sys.executable, "-c", text)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as killed:
        assert killed.stdin is not None and killed.stdout is not None
        assert killed.stdout.read() == b"held\n"  # to its end: it is gone, but for what its parent may ask
        ending = threading.Timer(0.5, killed.stdin.close)  # which ends the process that it left behind
        ending.start()
        with RunDir(tmp_path).lock():
            assert ending.finished.is_set(), "not while that one was there"
        ending.join()
    assert killed.returncode == -9
