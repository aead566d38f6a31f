"""Shell. One program run where it can do no harm: argv -> bubblewrap -> relay -> program -> Exit.

Invariant: whatever ends `run` (the program, the deadline, a limit, cancellation, the death of this
process), nothing of the program lives on. The program sees the workspace (the only writable path
beside a small private /tmp), the system's programs, its own environment, and 127.0.0.1 of a network
of its own, where one port leads to the gateway's socket file. It sees no home, no variable and no
process of the host.
"""

import asyncio
import json
import os
import py_compile
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path

import psutil

from gyre.agents.places import (
    CONFIG,
    DEFAULT_ENV,
    ETC_HOSTS,
    HARNESS_PORT,
    HOME,
    WORKSPACE,
    Bind,
    Exit,
    Limits,
    Places,
)
from gyre.agents.process import Child, Pipe, base_python, check_alone, check_workspace, ending, one_line, relay_limits
from gyre.errors import SandboxError

_GATEWAY = "/run/gyre/gateway"
_RELAY = "/run/gyre/relay"
"""Bytecode or source: the interpreter tells them apart by their first bytes."""
_ETC_FILES = {
    "/etc/passwd": b"root:x:0:0::/:/bin/sh\ngyre:x:1000:1000::/tmp:/bin/sh\n",
    "/etc/group": b"root:x:0:\ngyre:x:1000:\n",
    "/etc/hosts": ETC_HOSTS,
}
_OLDEST = (0, 8, 0)
_INSTALL = "install bubblewrap 0.8 or newer (Debian, Ubuntu: apt-get install bubblewrap)"


class Sandbox:
    """Runs programs in bubblewrap. One value serves any number of executions at once."""

    def __init__(self, *, limits: Limits | None = None, python: str = "") -> None:
        """`python`: runs the relay, and is found at the same path inside. Raises SandboxError without bubblewrap."""
        found = shutil.which("bwrap")
        if not found:
            raise SandboxError(f"sandbox: bwrap is not installed; {_INSTALL}")
        _check_version(found)
        self.limits = limits or Limits()
        self.python = python or base_python()
        self._bwrap = found

    def with_limits(self, limits: Limits) -> "Sandbox":
        return Sandbox(limits=limits, python=self.python)

    def end_strays(self, folder: Path) -> None:
        end_strays(folder)

    def places(self, *, workspace: Path, config: Path, gateway: str, workdir: str = WORKSPACE) -> Places:
        return Places(workspace=workdir, config=CONFIG, home=HOME, gateway=f"http://127.0.0.1:{HARNESS_PORT}")

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
        """As `AnySandbox.run`."""
        check_workspace(workspace)
        mounts = ["--ro-bind" if read_only else "--bind", str(workspace), workdir, "--chdir", workdir]
        for bind in binds:
            mounts += ["--bind" if bind.writable else "--ro-bind", str(bind.source), bind.target]
        if config is not None:
            mounts += ["--ro-bind", str(config), CONFIG]
        for path in extra_ro:
            mounts += ["--ro-bind", str(path), str(path)]
        relay = [] if grade_s is None else [f"grade={grade_s}"]
        if socket_path is not None:
            # The folder, not the file: a gateway that starts again makes a new one.
            check_alone(socket_path)
            mounts += ["--ro-bind", str(socket_path.parent), _GATEWAY]
            relay += [f"port={HARNESS_PORT}", f"socket={_GATEWAY}/{socket_path.name}"]
        for key, value in (DEFAULT_ENV | dict(env)).items():
            mounts += ["--setenv", key, value]
        started = time.monotonic()
        with ExitStack() as stack:
            lifeline, report, info = (stack.enter_context(Pipe()) for _ in range(3))
            etc = []
            for name, content in _ETC_FILES.items():
                pipe = stack.enter_context(Pipe())
                os.write(pipe.write_fd, content)
                pipe.close_write()
                etc += ["--file", str(pipe.read_fd), name]
            passed = [lifeline.read_fd, report.write_fd, info.write_fd, *(int(fd) for fd in etc[1::3])]
            command = [self._bwrap, *_system_mounts(self.python, self.limits.tmp_size), *etc, *mounts]
            command += ["--remount-ro", "/", "--info-fd", str(info.write_fd), "--", self.python, "-I", "-S", _RELAY]
            command += [*relay_limits(self.limits), f"nproc={self.limits.max_processes}", *relay]
            command += [f"lifeline={lifeline.read_fd}", f"report={report.write_fd}", "--", *argv]
            child = Child(
                command,
                env={},  # not only --clearenv: /proc would show what bwrap itself was given
                stop=lambda: _stop(lifeline),
                kill=lambda: _kill(child.popen.pid, info),
                pass_fds=passed,
                tail_size=stdout_limit,
                output_size=self.limits.output_size,
            )
            lifeline.close_read()
            report.close_write()
            timed_out = await child.watch(deadline_s, held)
            lines = report.available().decode().split()
        if not lines:
            raise SandboxError(f"sandbox: the program was not started: {_explain(child.tail())}")
        return ending(
            child, lines[1:], wall_s=time.monotonic() - started, timed_out=timed_out, graded=grade_s is not None
        )


def check_sandbox() -> str:
    """Start one; what is missing and how to get it in one line, or nothing if all is well."""
    try:
        with tempfile.TemporaryDirectory(prefix="gyre-check-") as workspace:
            ended = asyncio.run(Sandbox().run(["true"], env={}, workspace=Path(workspace), deadline_s=20))
    except SandboxError as error:
        return str(error)
    return "" if ended.code == 0 else f"sandbox: `true` ended with {ended.code}: {one_line(ended.output_tail)}"


def sandbox_cpu_s(num_starts: int = 40) -> float:
    """CPU seconds that a sandbox adds to the program in it, which here does nothing: one with it, less one without."""

    async def sandboxed() -> None:
        with tempfile.TemporaryDirectory(prefix="gyre-check-") as workspace:
            for _ in range(num_starts):
                await Sandbox().run(["true"], env={}, workspace=Path(workspace), deadline_s=20)

    begun_s = _children_cpu_s()
    for _ in range(num_starts):
        subprocess.run(["true"], env=DEFAULT_ENV, check=True)
    bare_s = _children_cpu_s()
    asyncio.run(sandboxed())
    return ((_children_cpu_s() - bare_s) - (bare_s - begun_s)) / num_starts


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


_GONE_S = 20.0
_ASKED = 3
"""Times, where somebody kills it meanwhile."""


@cache
def _check_version(bwrap: str) -> None:
    for _ in range(_ASKED):
        asked = subprocess.run([bwrap, "--version"], capture_output=True, text=True, check=False)
        if asked.returncode >= 0:  # else it was killed, which says nothing of it
            break
    shown = asked.stdout
    numbers = tuple(int(number) for number in re.findall(r"\d+", shown)[:3])
    if numbers < _OLDEST:
        raise SandboxError(f"sandbox: {bwrap} is {shown.strip() or 'of no known version'}; {_INSTALL}")


@cache
def _system_mounts(python: str, tmp_size: int) -> tuple[str, ...]:
    """Namespaces and the read-only system; the same for all executions."""
    size = str(tmp_size)
    args = ["--unshare-all", "--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000"]
    args += [
        "--hostname",
        "gyre",
        "--cap-drop",
        "ALL",
        "--die-with-parent",
        "--new-session",
        "--as-pid-1",
        "--clearenv",
    ]
    args += ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            args += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            args += ["--ro-bind", str(path), str(path)]
    for name in ("ld.so.cache", "alternatives", "localtime"):
        if Path("/etc", name).exists():
            args += ["--ro-bind", f"/etc/{name}", f"/etc/{name}"]
    # Every place that bubblewrap leaves writable is either of limited size or made read-only.
    args += ["--proc", "/proc", "--dev", "/dev", "--size", size, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    args += ["--size", size, "--tmpfs", "/tmp"]
    prefix = Path(python).resolve().parent.parent
    if not prefix.is_relative_to("/usr"):
        args += ["--ro-bind", str(prefix), str(prefix)]
    # Packages that were installed for others: an agent is to write them, not to find them.
    for folder in _package_folders(prefix):
        args += ["--tmpfs", str(folder), "--remount-ro", str(folder)]
    args += ["--ro-bind", str(_compiled(Path(__file__).with_name("relay.py"), python)), _RELAY]
    return tuple(args)


def _package_folders(prefix: Path) -> list[Path]:
    """Of the interpreter and of the system's."""
    found = [*prefix.glob("lib/python3*/site-packages"), *Path("/usr/lib").glob("python3*/dist-packages")]
    found += Path("/usr/local/lib").glob("python3*/dist-packages")
    return sorted({path.resolve() for path in found if path.is_dir()})


def _compiled(source: Path, python: str) -> Path:
    """Its bytecode, which that interpreter would make at every start; the source where it cannot be kept or used."""
    if python != base_python():
        return source
    with suppress(OSError, py_compile.PyCompileError):
        return Path(py_compile.compile(str(source), doraise=True) or source)
    return source


def _stop(lifeline: Pipe) -> None:
    with suppress(BrokenPipeError):
        os.write(lifeline.write_fd, b"T")


def _kill(bwrap: int, info: Pipe) -> None:
    """End process 1 of the namespace, and so all of it; bwrap itself ends when nothing is left."""
    told = info.available()
    if not told:
        _kill_unfinished(bwrap)
        return
    pid = json.loads(told)["child-pid"]
    with suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            # It may have ended already and its number may have been given away, but not that of its parent.
            if _parent(pid) == bwrap:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)


def _kill_unfinished(bwrap: int) -> None:
    """Its child waits for a word of bwrap's, for ever if that never comes: both end, and none is born meanwhile."""
    with suppress(ProcessLookupError):
        os.kill(bwrap, signal.SIGSTOP)
        try:
            children = Path(f"/proc/{bwrap}/task/{bwrap}/children").read_text().split()
        except OSError:
            children = []
        for child in children:
            os.kill(int(child), signal.SIGKILL)
        os.kill(bwrap, signal.SIGKILL)


def end_strays(folder: Path) -> None:
    """End what a dispatcher that was killed left of its sandboxes: one that was just being built does not notice.

    folder: the absolute path of the folder that all workspaces of one run lie in, those that are graded among them.
    """
    first: list[psutil.Process] = []
    for process in psutil.process_iter(["name", "cmdline"]):
        words = process.info["cmdline"] or ()
        if process.info["name"] == "bwrap" and any(word.startswith(f"{folder}/") for word in words):
            with suppress(psutil.NoSuchProcess):
                first += process.children()
                process.kill()
    for process in first:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    # Process 1 of a namespace is gone when all the others of it are: until then they may write to the workspace, which
    # is removed next.
    give_up = time.monotonic() + _GONE_S
    while any(map(_is_alive, first)) and time.monotonic() < give_up:
        time.sleep(0.01)


def _is_alive(process: psutil.Process) -> bool:
    try:
        # The first thread may have ended before the others have.
        return bool(process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1)
    except psutil.NoSuchProcess:
        return False


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


_NO_NAMESPACES = (
    "user namespaces are off: sysctl -w user.max_user_namespaces=10000 kernel.unprivileged_userns_clone=1"
    " (Ubuntu 24.04: kernel.apparmor_restrict_unprivileged_userns=0)"
)
_CONTAINER = (
    "in a container, allow it: docker run --cap-add SYS_ADMIN"
    " --security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined"
)


def _explain(output: str) -> str:
    """What bubblewrap said, with the remedy."""
    said = one_line(output) or "it said nothing before the deadline"
    if "namespace" in said or "uid map" in said:
        return f"{said}; {_NO_NAMESPACES}; {_CONTAINER}"
    if "mount" in said or "ermi" in said:
        return f"{said}; {_CONTAINER}"
    return said
