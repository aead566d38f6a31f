"""Pure. What a program in a sandbox sees of the world, and what one execution may use of it."""

from pathlib import Path

import msgspec


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


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """How a program ended."""

    code: int
    """Exit code, or -N for signal N; -9 too if it was ended by force."""
    wall_s: float
    timed_out: bool = False
    output_tail: str = ""
    """The end of what it wrote to stdout and stderr."""
    broken_limit: str = ""
    """`processes`, `memory`, `disk` or `output`: the limit that it was stopped for."""
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
