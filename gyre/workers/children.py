"""Shell. Child processes that never outlive their parent.

Invariant: however this process ends, even by SIGKILL, its children are gone soon after: the kernel kills each
with it, and a clean stop ends the whole process group of each. Direction: argv -> process -> exit code.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from gyre.events.parent import die_with


class Child:
    """A running process, and the log file of what it says."""

    def __init__(self, process: asyncio.subprocess.Process, log_file: Path) -> None:
        self._process = process
        self.log_file = log_file
        self.pid = process.pid

    async def wait(self) -> int:
        """The exit code; negative for a signal."""
        return await self._process.wait()

    async def stop(self, grace_s: float = 10.0) -> None:
        """SIGTERM to the process, and SIGKILL to all of its group when it is gone or `grace_s` is over."""
        if self._process.returncode is None:
            self._process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()


def last_words(log_file: Path) -> str:
    """The last line of a process's output that says something: of a traceback, the error."""
    lines = log_file.read_text(errors="replace").splitlines() if log_file.exists() else []
    words = (line.strip(" |+-") for line in reversed(lines))
    return next((line for line in words if line), "no output")


async def spawn(argv: Sequence[str], *, env: Mapping[str, str] | None = None, log_file: Path) -> Child:
    """Start `argv` in a process group of its own; `env` is added to this process's, output goes to `log_file`."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *argv,
            # A `gyre process` asks for the death of this parent, not of the one that this process has.
            env={**os.environ, **(env or {}), "GYRE_PARENT": str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(die_with, os.getpid(), signal.SIGKILL),
        )
    return Child(process, log_file)
