"""Shell. The sandbox's contract without its protection: argv -> process group -> Exit.

Invariant: only when the config says `harness.sandbox: none` and the command line says
`--unsafe-no-sandbox`. The program runs as this user, with this user's files and network; a program
that leaves its process group outlives its end. It gets the given variables alone.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from gyre.agents.places import WORKSPACE, Bind, Exit, Limits, Places
from gyre.agents.process import Child, base_python, check_workspace
from gyre.errors import SandboxError

_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"


class NoSandbox:
    """Runs programs directly. Of the limits only that of the output holds."""

    def __init__(self, *, limits: Limits | None = None, python: str = "") -> None:
        self.limits = limits or Limits()
        self.python = python or base_python()

    def with_limits(self, limits: Limits) -> Self:
        return type(self)(limits=limits, python=self.python)

    def end_strays(self, folder: Path) -> None:
        """Whatever outlived its execution is among this user's other processes: it is not looked for."""

    def places(self, *, workspace: Path, config: Path, gateway: str, workdir: str = WORKSPACE) -> Places:
        return Places(workspace=str(workspace), config=str(config), home=str(config / "home"), gateway=gateway)

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
        """As `AnySandbox.run`; what only a sandbox can do is ignored."""
        check_workspace(workspace)
        if binds:
            raise SandboxError(f"sandbox: none: {binds[0].target} cannot be shown without a sandbox; use bubblewrap")
        home = workspace if config is None else config / "home"
        home.mkdir(exist_ok=True)
        variables = {"PATH": _PATH, "HOME": str(home), "TMPDIR": str(home), "LANG": "C.UTF-8"} | dict(env)
        commands = [tuple(argv)] if grade_s is None else [("/bin/sh", "-c", line) for line in argv]
        started = time.monotonic()
        codes: list[int] = []
        for command in commands:
            left_s = max(started + deadline_s - time.monotonic(), 0.0)
            try:
                child = Child(
                    command,
                    env=variables,
                    cwd=workspace,
                    tail_size=stdout_limit,
                    output_size=self.limits.output_size,
                )
            except OSError as error:
                return Exit(code=127, wall_s=time.monotonic() - started, output_tail=f"{command[0]}: {error.strerror}")
            timed_out = await child.watch(left_s if grade_s is None else min(left_s, grade_s), held)
            codes.append(child.popen.returncode)
            if timed_out and time.monotonic() >= started + deadline_s:
                break
        return Exit(
            code=-9 if child.broken_limit else codes[0] if grade_s is None else 0,
            wall_s=time.monotonic() - started,
            timed_out=timed_out and (grade_s is None or len(codes) < len(commands)),
            output_tail=child.tail(),
            broken_limit=child.broken_limit,
            codes=tuple(codes) if grade_s is not None else (),
        )
