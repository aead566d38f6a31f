"""Shell. The sandbox's contract in a container: argv -> `docker run` or `podman run` -> relay -> program -> Exit.

Invariant: as for bubblewrap. The relay is the container's first process; it ends, and all of it with it, when its
standard input does, and that does when this process ends or closes it. So nothing outlives a dispatcher that was
killed, whatever becomes of the daemon's client; labels say whose a container is and until when, and `end_strays`
removes what is left all the same. The image is the root, read-only; nothing is pulled.

One implementation for both programs: they take the same options. The host's users, paths and memory are the program's
own, so a daemon on another machine will not do.
"""

import asyncio
import os
import resource
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal

from gyre.agents.places import (
    CONFIG,
    DEFAULT_ENV,
    ETC_HOSTS,
    HARNESS_PORT,
    HOME,
    TIME_TO_LIVE_S,
    WORKSPACE,
    Bind,
    Exit,
    Limits,
    Places,
)
from gyre.agents.process import Child, Pipe, check_alone, check_workspace, ending, one_line, relay_limits
from gyre.errors import SandboxError

WORKSPACE_LABEL, EXPIRES_LABEL = "gyre.workspace", "gyre.expires"
_RUN = "/run/gyre"
_CLIENT_S = 30.0
"""For the daemon to answer."""
_STUCK_S = 10.0
"""For a container to end by itself."""
_MAX_PROCESSES_OF_USER = 32768
Program = Literal["docker", "podman"]


class ContainerSandbox:
    """Runs programs in containers of one image, which has to have `sh` and `python3`."""

    def __init__(self, program: Program, image: str, *, limits: Limits | None = None) -> None:
        """Raises SandboxError without the program."""
        found = shutil.which(program)
        if not found:
            raise SandboxError(f"sandbox: {program} is not installed; install it, or set harness.sandbox to bubblewrap")
        self.limits = limits or Limits()
        self.python = "python3"
        self._program, self._image, self._path = program, image, found

    def with_limits(self, limits: Limits) -> "ContainerSandbox":
        return ContainerSandbox(self._program, self._image, limits=limits)

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
        seen = [Bind(source=workspace, target=workdir, writable=not read_only), *binds]
        seen += [Bind(source=path, target=str(path)) for path in extra_ro]
        if config is not None:
            seen.append(Bind(source=config, target=CONFIG))
        relay = [*relay_limits(self.limits), "lifeline=0", "report=2"]
        if grade_s is not None:
            relay.append(f"grade={grade_s}")
        if socket_path is not None:
            check_alone(socket_path)
            seen.append(Bind(source=socket_path.parent, target=f"{_RUN}/gateway"))
            relay += [f"port={HARNESS_PORT}", f"socket={_RUN}/gateway/{socket_path.name}"]
        name = f"gyre-{secrets.token_hex(8)}"
        started = time.monotonic()
        with ExitStack() as stack:
            # Beside the workspace, so that it goes with the workspaces of a dispatcher that was killed.
            own = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f".{name}-", dir=workspace.parent)))
            seen += _own_files(own)
            lifeline, report = stack.enter_context(Pipe()), stack.enter_context(Pipe())
            command = [
                self._path,
                *run_options(
                    self._program,
                    name,
                    limits=self.limits,
                    labels={
                        WORKSPACE_LABEL: str(workspace),
                        EXPIRES_LABEL: str(int(time.time() + TIME_TO_LIVE_S)),
                    },
                    env=DEFAULT_ENV | dict(env),
                    seen=seen,
                    workdir=workdir,
                ),
                self._image,
                *("-I", "-S", f"{_RUN}/relay", *relay, "--", *argv),
            ]
            forcing = _Later()

            def end() -> None:
                """The relay ends with its input; a container that does not is removed, and its client ended."""
                lifeline.close_write()
                forcing.begin(_STUCK_S, lambda: self._force(name, child))

            child = Child(
                command,
                env=_client_env(),
                stop=lambda: _tell(lifeline),
                kill=end,
                stdin=lifeline.read_fd,
                stderr=report.write_fd,
                tail_size=stdout_limit,
                output_size=self.limits.output_size,
            )
            lifeline.close_read()
            report.close_write()
            try:
                timed_out = await child.watch(deadline_s, held)
            finally:
                forcing.cancel()
            said = report.available().decode("utf-8", "replace")
        before, is_started, lines = said.partition("started\n")
        if not is_started:
            raise SandboxError(f"sandbox: {self._program}: {one_line(before + child.tail()) or 'it said nothing'}")
        codes = [line for line in lines.split() if line.isalpha() or line.lstrip("-").isdigit()]
        return ending(child, codes, wall_s=time.monotonic() - started, timed_out=timed_out, graded=grade_s is not None)

    def end_strays(self, folder: Path) -> None:
        try:
            names = self._ask("ps", "--all", "--quiet", "--filter", f"label={WORKSPACE_LABEL}").split()
            labels = f'{{{{index .Config.Labels "{WORKSPACE_LABEL}"}}}}\t{{{{index .Config.Labels "{EXPIRES_LABEL}"}}}}'
            lines = self._ask("inspect", "--format", labels, *names).splitlines() if names else []
        except SandboxError:
            return  # one that ended meanwhile, or no daemon, which the first `run` says better
        over = [
            name
            for name, line in zip(names, lines, strict=False)
            if line.partition("\t")[0].startswith(f"{folder}/") or float(line.partition("\t")[2] or 0) < time.time()
        ]
        if over:
            with suppress(SandboxError):
                self._ask("rm", "--force", *over)

    def _force(self, name: str, child: Child) -> None:
        quiet = subprocess.DEVNULL
        command = [self._path, "rm", "--force", name]
        subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, env=_client_env())
        child.popen.kill()

    def _ask(self, *words: str) -> str:
        try:
            done = subprocess.run(
                [self._path, *words], capture_output=True, text=True, timeout=_CLIENT_S, check=False, env=_client_env()
            )
        except subprocess.TimeoutExpired:
            raise SandboxError(f"sandbox: {self._program} {words[0]}: no answer in {_CLIENT_S:g} s") from None
        if done.returncode:
            raise SandboxError(f"sandbox: {self._program} {words[0]}: {one_line(done.stderr)}")
        return done.stdout


def check_container(program: str, image: str) -> str:
    """What is missing and how to get it in one line, or nothing if all is well."""
    try:
        sandbox = ContainerSandbox("docker" if program == "docker" else "podman", image)
        with tempfile.TemporaryDirectory(prefix="gyre-check-") as folder:
            workspace = Path(folder) / "workspace"
            workspace.mkdir()
            ended = asyncio.run(sandbox.run(["true"], env={}, workspace=workspace, deadline_s=_CLIENT_S))
    except SandboxError as error:
        return str(error)
    return "" if ended.code == 0 else f"sandbox: {program}: `true` ended with {ended.code}"


def require_container(kind: str, image: str) -> None:
    """Raises SandboxError, with what to do, where `harness.sandbox` is a kind of container that does not start."""
    if kind in ("docker", "podman") and (why := check_container(kind, image)):
        raise SandboxError(f"{why}; harness.image is not pulled: {kind} pull {image}")


def run_options(
    program: Program,
    name: str,
    *,
    limits: Limits,
    labels: Mapping[str, str],
    env: Mapping[str, str],
    seen: Sequence[Bind],
    workdir: str,
) -> list[str]:
    """Everything between the program and the image. Raises SandboxError for a path that cannot be written down."""
    nproc = min(resource.getrlimit(resource.RLIMIT_NPROC)[1], _MAX_PROCESSES_OF_USER)
    options = ["run", "--rm", "--interactive", "--sig-proxy=false", "--pull=never", "--log-driver=none"]
    options += [f"--name={name}", "--hostname=gyre", "--network=none", "--read-only", "--cap-drop=ALL"]
    options += ["--security-opt=no-new-privileges", f"--user={os.getuid()}:{os.getgid()}", f"--workdir={workdir}"]
    if program == "podman":  # which would have more folders writable, and another user, than docker has
        options += ["--read-only-tmpfs=false", *(["--userns=keep-id"] if os.getuid() else [])]
    options += [f"--pids-limit={limits.max_processes}", f"--memory={limits.max_memory}"]
    options += [f"--memory-swap={limits.max_memory}", f"--shm-size={limits.tmp_size}"]
    # Of this process they can be had everywhere; the relay lowers them.
    options += [f"--ulimit=nofile={limits.max_files}:{limits.max_files}", f"--ulimit=nproc={nproc}:{nproc}"]
    options.append(f"--tmpfs={HOME}:rw,exec,nosuid,nodev,mode=1777,size={limits.tmp_size}")
    options += [f"--label={key}={value}" for key, value in labels.items()]
    options += [f"--env={key}={value}" for key, value in env.items()]
    for bind in seen:
        if "," in f"{bind.source}{bind.target}":
            raise SandboxError(f"sandbox: {program}: {bind.source}: a path with a comma cannot be shown; rename it")
        mount = f"--mount=type=bind,source={bind.source.absolute()},target={bind.target}"
        options.append(mount if bind.writable else f"{mount},readonly")
    return [*options, "--entrypoint=python3"]


class _Later:
    """A deed that may be called off, begun or not."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, seconds: float, deed: Callable[[], None]) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, deed)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _own_files(folder: Path) -> list[Bind]:
    """The relay; and what would otherwise be files of the daemon's that the program may write to without a limit."""
    shutil.copyfile(Path(__file__).with_name("relay.py"), folder / "relay")
    (folder / "hosts").write_bytes(ETC_HOSTS)
    (folder / "empty").touch()
    binds = [Bind(source=folder / "relay", target=f"{_RUN}/relay"), Bind(source=folder / "hosts", target="/etc/hosts")]
    return binds + [Bind(source=folder / "empty", target=f"/etc/{name}") for name in ("hostname", "resolv.conf")]


def _client_env() -> dict[str, str]:
    """What the client needs to find its daemon and settings; the program gets none of it."""
    names = ("PATH", "HOME", "DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CONTEXT", "CONTAINER_HOST", "CONTAINERS_CONF")
    return {name: os.environ[name] for name in (*names, "XDG_RUNTIME_DIR") if name in os.environ}


def _tell(lifeline: Pipe) -> None:
    with suppress(BrokenPipeError, OSError):
        os.write(lifeline.write_fd, b"T")
