"""Shell. Starts the processes of a run, watches them, and stops them.

Invariant: no process outlives its supervisor, whatever ends it: each child asks the kernel for a
signal on its parent's death, and runs in a process group of its own, so that Ctrl-C in a terminal
reaches the supervisor only, which then stops the children in order.
"""

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gyre.errors import ProcessError

_PR_SET_PDEATHSIG = 1
KILL_GRACE_S = 5.0


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to end this process (SIGTERM) when its parent ends. Linux; elsewhere a no-op."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent_pid:  # the parent ended before the line above
            os.kill(os.getpid(), signal.SIGTERM)


class Child:
    """One supervised process; its output goes to `<logs>/<name>.log`."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self.name = name
        self.process = process
        self.log_path = log_path

    def last_words(self) -> str:
        """The last line of its output that says something: of a traceback, the error."""
        lines = self.log_path.read_text(errors="replace").splitlines() if self.log_path.exists() else []
        words = (line.strip(" |+-") for line in reversed(lines))
        return next((line for line in words if line), "no output")


class Supervisor:
    """Children by name, in start order."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.children: dict[str, Child] = {}

    async def start(self, name: str, argv: Sequence[str], env: Mapping[str, str] | None = None) -> Child:
        self.logs.mkdir(parents=True, exist_ok=True)
        path = self.logs / f"{name}.log"
        with path.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **(env or {}), "GYRE_PARENT": str(os.getpid())},
            )
        child = self.children[name] = Child(name, process, path)
        return child

    async def first_failure(self) -> Child:
        """Waits until a child ends with an error; children that end with 0 have done their work."""
        waiting = {asyncio.create_task(c.process.wait()): c for c in self.children.values()}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    child = waiting.pop(task)
                    if task.result() != 0:
                        return child
            raise ProcessError("all processes ended, but the run did not: see the logs directory")
        finally:
            for task in waiting:
                task.cancel()

    async def wait_all(self, timeout_s: float) -> tuple[Child, ...]:
        """Waits for every child to end by itself; returns those that did not."""
        waits = [asyncio.create_task(c.process.wait()) for c in self.children.values()]
        if waits:
            _, late = await asyncio.wait(waits, timeout=timeout_s)
            for task in late:
                task.cancel()
        return tuple(c for c in self.children.values() if c.process.returncode is None)

    async def stop(self) -> None:
        """SIGTERM in reverse start order, then SIGKILL to whole groups. Safe to call twice."""
        for child in reversed(self.children.values()):
            if child.process.returncode is None:
                child.process.terminate()
        late = await self.wait_all(KILL_GRACE_S)
        for child in late:
            os.killpg(child.process.pid, signal.SIGKILL)
        await self.wait_all(KILL_GRACE_S)
