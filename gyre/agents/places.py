"""Pure. What a program in a sandbox sees of the world, what one execution may use of it, and what a sandbox is.

Invariant: whatever kind of sandbox runs a program, nothing of the program lives on when `run` has ended, and all that
it can write to is the workspace and a private `/tmp`. `tests/agents/test_sandbox.py` has the contract.
Direction: argv, Places, Limits -> AnySandbox -> Exit.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, Self

import msgspec

HARNESS_PORT = 8080
"""Where the gateway answers inside a sandbox."""
WORKSPACE = "/workspace"
CONFIG = "/config"
HOME = "/tmp"
DEFAULT_ENV = {
    "HOME": HOME,
    "TMPDIR": HOME,
    "USER": "gyre",
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
}
ETC_HOSTS = b"127.0.0.1 localhost gyre\n"
TIME_TO_LIVE_S = 24 * 3600.0
"""No program runs for longer, whatever became of those who should have stopped it."""


class Places(msgspec.Struct, frozen=True, kw_only=True):
    """The paths and the address that a program sees."""

    workspace: str
    config: str
    """Files that were written for this execution."""
    home: str
    """Writable, private, gone afterwards."""
    gateway: str
    """`http://host:port`, without the session."""


class Bind(msgspec.Struct, frozen=True, kw_only=True):
    """A path outside, and where a program sees it."""

    source: Path
    target: str
    writable: bool = False


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one execution may use; sizes in bytes."""

    max_processes: int = 256
    max_memory: int = 4 << 30
    """Private resident memory of all processes together, looked at four times a second."""
    process_memory: int = 3 << 30
    """Writable private memory of one process (RLIMIT_DATA)."""
    file_size: int = 512 << 20
    workspace_size: int = 2 << 30
    """As allocated, looked at four times a second."""
    tmp_size: int = 128 << 20
    output_size: int = 64 << 20
    """A program that writes more than this to its stdout and stderr is stopped."""
    cpu_s: int = 4 * 3600
    """CPU seconds of all processes together, looked at four times a second."""
    max_files: int = 4096
    """Open at once, of one process."""


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """How a program ended."""

    code: int
    """Exit code, or -N for signal N; -9 too if it was ended by force."""
    wall_s: float
    timed_out: bool = False
    output_tail: str = ""
    """The end of what it wrote to stdout and stderr."""
    broken_limit: str = ""
    """`processes`, `memory`, `disk`, `cpu` or `output`: the limit that it was stopped for."""
    codes: tuple[int, ...] = ()
    """When graded: one exit code for each command line."""

    @property
    def failure(self) -> str:
        """Why the program itself failed; empty if it ended well or at its deadline."""
        if self.broken_limit:
            return f"stopped: more {self.broken_limit} than the limit"
        if self.timed_out or self.code == 0:
            return ""
        how = f"signal {-self.code}" if self.code < 0 else f"exit code {self.code}"
        return f"{how}: {self.output_tail.strip()[-2000:] or 'without a word'}"


class AnySandbox(Protocol):
    """Runs programs where they can do no harm. One value serves any number of executions at once."""

    @property
    def limits(self) -> Limits: ...

    @property
    def python(self) -> str:
        """An interpreter that programs find at this path."""
        ...

    def with_limits(self, limits: Limits) -> Self: ...

    def places(self, *, workspace: Path, config: Path, gateway: str, workdir: str = WORKSPACE) -> Places:
        """What the program sees, whatever the paths and the address are outside."""
        ...

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        workspace: Path,
        deadline_s: float,
        socket_path: Path | None = None,
        config: Path | None = None,
        extra_ro: Sequence[Path] = (),
        read_only: bool = False,
        workdir: str = WORKSPACE,
        binds: Sequence[Bind] = (),
        grade_s: float | None = None,
        stdout_limit: int = 16384,
        held: Callable[[], float] = lambda: 0.0,
    ) -> Exit:
        """Run `argv` in `workspace` for at most `deadline_s`; then SIGTERM, and soon after the end of all of it.

        socket_path: where the gateway listens, alone in its folder; without it there is no network at all.
        config: read-only at `/config`. extra_ro: read-only at their own paths. read_only: the workspace too.
        workdir: where the workspace is inside. binds: what else is seen, and where.
        grade_s: `argv` is a list of shell command lines instead, each with this many seconds; `Exit.codes` holds
        what they returned.
        stdout_limit: bytes of output that are kept.
        held: as in `Child.watch`. Raises SandboxError when the program was never started.
        """
        ...

    def end_strays(self, folder: Path) -> None:
        """End what is left of runs that are over: programs whose workspace lies in `folder`, and any that have
        outlived their time. To be called before the first `run`."""
        ...
