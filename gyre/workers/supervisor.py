"""Shell. Starts the processes of a run, keeps them alive, and stops them.

Invariants: a process that ends when nobody asked it to is started again, unless it says that this would not help
(`REFUSED`) or keeps ending while the run gets nowhere; no process outlives its supervisor, whatever ends that: each
child asks the kernel for a signal on its parent's death, and runs in a process group of its own, so that Ctrl-C in
a terminal reaches the supervisor only, which then stops the children in order.
"""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from gyre.errors import REFUSED
from gyre.workers.children import last_words

KILL_GRACE_S = 5.0
MAX_DEATHS = 4
"""Of one process in a row, with no life between them that lasted and in which the run moved."""
HEALTHY_S = 60.0
RESTART_S = 0.25
"""Before the first restart in a row; twice as long before each one after it."""


class Deaths:
    """Counts the deaths of one process, and says whether it may be started again."""

    def __init__(self, moved: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        """`moved` grows whenever the run gets somewhere."""
        self._moved, self._clock = moved, clock
        self.num = 0
        self.born()

    def born(self) -> None:
        self._since = self._clock(), self._moved()

    def died(self, code: int) -> bool:
        """Whether to start it again, after `pause_s`."""
        born_s, moved = self._since
        is_first = self._clock() - born_s > HEALTHY_S and self._moved() > moved
        self.num = 1 if is_first else self.num + 1
        return code != REFUSED and self.num < MAX_DEATHS

    @property
    def pause_s(self) -> float:
        return RESTART_S * 2.0 ** (self.num - 1)


class Child:
    """One life of a supervised process; its output goes to `<logs>/<name>.log`."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self.name = name
        self.process = process
        self.log_path = log_path

    def last_words(self) -> str:
        return last_words(self.log_path)


class Supervisor:
    """Children by name, in start order."""

    def __init__(
        self,
        logs: Path,
        *,
        lock: int,
        moved: Callable[[], int],
        exited: Callable[[str, int, bool], Awaitable[None]],
    ) -> None:
        """`lock`: a descriptor that every child keeps open. `exited(name, code, restarted)` is told of every death."""
        self.logs, self._lock, self._moved, self._exited = logs, lock, moved, exited
        self.children: dict[str, Child] = {}
        self._keepers: dict[str, asyncio.Task[Child | None]] = {}
        self._endless: set[str] = set()

    def keep(
        self, name: str, argv: Sequence[str], env: Mapping[str, str] = MappingProxyType({}), *, is_endless: bool = False
    ) -> None:
        """Start it, and start it again whenever it dies. `env`: what it alone shall know. `is_endless`: it knows
        nothing of the run, and ends when it is stopped."""
        self._keepers[name] = asyncio.create_task(self._keep(name, argv, env))
        if is_endless:
            self._endless.add(name)

    async def first_failure(self) -> Child | None:
        """Waits until a child dies for good; None once all have ended with 0: they have done their work."""
        waiting = set(self._keepers.values())
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                failed = task.result()
                if failed is not None:
                    return failed
        return None

    async def wait_all(self, timeout_s: float) -> None:
        """Waits for every child that can to end its work by itself."""
        if ending := [task for name, task in self._keepers.items() if name not in self._endless]:
            await asyncio.wait(ending, timeout=timeout_s)

    async def stop(self) -> None:
        """SIGTERM in reverse start order, then SIGKILL to whole groups. Safe to call twice."""
        for keeper in self._keepers.values():
            keeper.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        for child in reversed(self.children.values()):
            if child.process.returncode is None:
                child.process.terminate()
        for child in await self._late():
            os.killpg(child.process.pid, signal.SIGKILL)
        await self._late()

    async def _late(self) -> tuple[Child, ...]:
        """Who is still there after the grace."""
        waits = [asyncio.create_task(c.process.wait()) for c in self.children.values()]
        if waits:
            for task in (await asyncio.wait(waits, timeout=KILL_GRACE_S))[1]:
                task.cancel()
        return tuple(c for c in self.children.values() if c.process.returncode is None)

    async def _keep(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> Child | None:
        """One life after the other; None once its work is done, or the child that died for good."""
        deaths = Deaths(self._moved)
        while True:
            deaths.born()
            child = self.children[name] = await self._start(name, argv, env)
            code = await child.process.wait()
            if code == 0:
                return None
            is_restarted = deaths.died(code)
            await self._exited(name, code, is_restarted)
            if not is_restarted:
                return child
            await asyncio.sleep(deaths.pause_s)

    async def _start(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> Child:
        self.logs.mkdir(parents=True, exist_ok=True)
        path = self.logs / f"{name}.log"
        with path.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=(self._lock,),
                env={**os.environ, **env, "GYRE_PARENT": str(os.getpid())},
            )
        return Child(name, process, path)
