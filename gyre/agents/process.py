"""Shell. A child process with bounded output and a certain end: command -> Child -> its tail and code.

Invariant: leaving `Child.watch`, however that happens, the child has been ended and reaped. The
event loop's thread must be the one that lives as long as the process: the kernel ties a sandbox's
life to the thread that started it.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from gyre.agents.held_clock import HeldClock
from gyre.agents.places import TIME_TO_LIVE_S, Exit, Limits
from gyre.errors import SandboxError

CHUNK = 65536
GRACE_S = 0.4
"""Between the request to end (SIGTERM) and the end."""


def base_python() -> str:
    """The interpreter itself, outside of any virtual environment."""
    return str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())


def check_workspace(workspace: Path) -> None:
    """Raises SandboxError unless it is there."""
    if not workspace.is_dir():
        raise SandboxError(f"sandbox: workspace {workspace} is not a directory; create it first")


def check_alone(socket_path: Path) -> None:
    """Raises SandboxError unless the gateway's socket is there, with nothing else in its folder."""
    try:
        others = set(os.listdir(socket_path.parent)) - {socket_path.name}  # noqa: PTH208
    except OSError as error:
        raise SandboxError(
            f"sandbox: gateway socket {socket_path}: {error.strerror}; start the gateway first"
        ) from None
    if others:
        raise SandboxError(
            f"sandbox: gateway socket {socket_path}: its folder is shown to harnesses and holds {min(others)} too;"
            " give it a folder of its own"
        )


def relay_limits(limits: Limits) -> tuple[str, ...]:
    """As `relay.py` is told them."""
    return (
        f"max_processes={limits.max_processes}",
        f"max_memory={limits.max_memory}",
        f"max_disk={limits.workspace_size}",
        f"max_cpu={limits.cpu_s}",
        f"data={limits.process_memory}",
        f"fsize={limits.file_size}",
        f"nofile={limits.max_files}",
        f"ttl={TIME_TO_LIVE_S}",
    )


class Child:
    """One started process, its stdout and stderr together in a bounded tail."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        kill: Callable[[], None] | None = None,
        stop: Callable[[], None] | None = None,
        cwd: Path | None = None,
        pass_fds: Sequence[int] = (),
        stdin: int = subprocess.DEVNULL,
        stderr: int | None = None,
        tail_size: int,
        output_size: int,
    ) -> None:
        """`stop` asks the program to end, `kill` ends all of it; by default both act on its process group.

        stderr: where it goes instead of to the tail.
        """
        self._loop = asyncio.get_running_loop()
        self._tail = bytearray()
        self._tail_size, self._room = tail_size, output_size
        self.broken_limit = ""
        self._done = self._loop.create_future()
        self._output, output_w = os.pipe()
        try:
            self.popen = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=output_w,
                stderr=output_w if stderr is None else stderr,
                env=dict(env),
                cwd=cwd,
                pass_fds=pass_fds,
                start_new_session=True,
            )
        except OSError:
            os.close(self._output)
            raise
        finally:
            os.close(output_w)
        self._kill = kill or (lambda: self._signal_group(signal.SIGKILL))
        self._stop = stop or (lambda: self._signal_group(signal.SIGTERM))
        self._killed = False
        os.set_blocking(self._output, False)
        self._pidfd = os.pidfd_open(self.popen.pid)
        self._loop.add_reader(self._output, self._read)
        self._loop.add_reader(self._pidfd, self._finish)

    async def watch(self, deadline_s: float, held: Callable[[], float] = lambda: 0.0) -> bool:
        """Wait for the end, or bring it about; True if the deadline did.

        held: as of `HeldClock`; the deadline is one of that clock.
        """
        clock, timed_out = HeldClock(held), False
        try:
            while not await self._ended_in(deadline_s - clock()):
                if clock() < deadline_s:
                    continue
                timed_out = True
                self._stop()
                await self._ended_in(GRACE_S)
                break
            return timed_out
        finally:
            self._end()
            try:
                await asyncio.shield(self._done)
            finally:
                self._close()

    async def _ended_in(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, 0.0)):
                await asyncio.shield(self._done)
        return self._done.done()

    def tail(self) -> str:
        return self._tail[-self._tail_size :].decode("utf-8", "replace")

    def _read(self) -> None:
        try:
            chunk = os.read(self._output, CHUNK)
        except BlockingIOError:
            return
        if not chunk:
            self._loop.remove_reader(self._output)
            return
        if self.broken_limit:
            return  # still read, or who passes it on would wait for us and not see the end
        self._room -= len(chunk)
        self._tail += chunk
        if len(self._tail) > 2 * self._tail_size:
            del self._tail[: -self._tail_size]
        if self._room < 0:
            self.broken_limit = "output"
            self._end()

    def _finish(self) -> None:
        self._loop.remove_reader(self._pidfd)
        # Also after a normal end: what the program left running goes with it. Before it is reaped, since
        # its number may belong to another process afterwards.
        self._end()
        self.popen.wait()
        if not self._done.done():
            self._done.set_result(None)

    def _close(self) -> None:
        self._loop.remove_reader(self._output)
        self._loop.remove_reader(self._pidfd)
        self.popen.wait()
        # What is in the pipe was written before the end; nobody can write any more than its capacity now.
        while self._room >= 0:
            try:
                chunk = os.read(self._output, CHUNK)
            except BlockingIOError:
                break
            if not chunk:
                break
            self._room -= len(chunk)
            self._tail += chunk
        os.close(self._output)
        os.close(self._pidfd)

    def _end(self) -> None:
        if not self._killed and self.popen.returncode is None:
            self._killed = True
            self._kill()

    def _signal_group(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)


def ending(child: Child, report: Sequence[str], *, wall_s: float, timed_out: bool, graded: bool) -> Exit:
    """report: what the relay said after `started`. Raises SandboxError when it said nothing, for no reason we know."""
    output = child.tail()
    codes = tuple(-signal.SIGKILL if line.isalpha() else int(line) for line in report)
    if not (codes or timed_out or child.broken_limit):
        raise SandboxError(f"sandbox: the relay ended without a report: {one_line(output) or 'was it killed?'}")
    limit = next((line for line in report if line.isalpha()), "")
    return Exit(
        code=0 if graded else (*codes, -signal.SIGKILL)[0],
        wall_s=wall_s,
        timed_out=timed_out,
        output_tail=output,
        broken_limit=child.broken_limit or limit,
        codes=codes if graded else (),
    )


def one_line(text: str) -> str:
    return " ".join(text.split())[-400:]


class Pipe:
    """A pipe whose ends are closed at the latest when the block is left."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close_read()
        self.close_write()

    def close_read(self) -> None:
        if self.read_fd >= 0:
            os.close(self.read_fd)
            self.read_fd = -1

    def close_write(self) -> None:
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def available(self) -> bytes:
        """What has been written so far, without waiting."""
        os.set_blocking(self.read_fd, False)
        with suppress(BlockingIOError):
            return os.read(self.read_fd, CHUNK)
        return b""
