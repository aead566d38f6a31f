"""Shell. The sandbox's contract in an environment of Harbor's, on a host of its provider: argv -> `exec` -> Exit.

An environment is made for each program: workspace and files are uploaded, what is left of the workspace is downloaded
over the old one, and the environment is deleted. Invariant: it is deleted however `run` ends. What a program may use is
what the provider holds it to; gyre asks for memory and disk, and for no network but the gateway's host.

`harbor` needs Python 3.12 and is imported when the first environment is made. The provider's hosts must reach the
gateway: give `gateway.host` an address that they know. What a dispatcher that was killed left ends by the provider's
own time limit.
"""

import asyncio
import importlib
import posixpath
import secrets
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gyre.agents.places import CONFIG, DEFAULT_ENV, HOME, WORKSPACE, Bind, Exit, Limits, Places
from gyre.agents.process import GRACE_S, check_workspace, one_line
from gyre.errors import SandboxError

_INSTALL = "harness.sandbox is harbor: pip install 'gyre[harbor]', with Python 3.12 or later"
_PID = "/tmp/.gyre-pid"
_CONTROL_S = 60
"""For commands of gyre's own."""


class HarborSandbox:
    """Runs programs in environments of one kind, from one image, which has `sh` and `python3`."""

    def __init__(self, environment: str, image: str, *, gateway_host: str, limits: Limits | None = None) -> None:
        """environment: Harbor's name of it, as in `daytona`, or `module:Class`. gateway_host: all that a harness may
        reach. Raises SandboxError without Harbor."""
        self.limits = limits or Limits()
        self.python = "python3"
        self._environment, self._image, self._gateway_host = environment, image, gateway_host
        _load("harbor.environments.factory")

    def with_limits(self, limits: Limits) -> "HarborSandbox":
        return HarborSandbox(self._environment, self._image, gateway_host=self._gateway_host, limits=limits)

    def places(self, *, workspace: Path, config: Path, gateway: str, workdir: str = WORKSPACE) -> Places:
        return Places(workspace=workdir, config=CONFIG, home=HOME, gateway=gateway)

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
        """As `AnySandbox.run`. `socket_path`: there is a network, to the gateway's host alone."""
        check_workspace(workspace)
        started = time.monotonic()
        shown = [Bind(source=workspace, target=workdir, writable=not read_only), *binds]
        shown += [Bind(source=path, target=str(path)) for path in extra_ro]
        if config is not None:
            shown.append(Bind(source=config, target=CONFIG))
        variables = DEFAULT_ENV | dict(env)
        with tempfile.TemporaryDirectory(prefix=".gyre-harbor-", dir=workspace.parent) as scratch:
            try:
                place = self._make(Path(scratch), network=socket_path is not None)
                async with asyncio.timeout(deadline_s + held()) as starting:
                    await place.start(False)
                    await _upload(place, shown)
                    starting.reschedule(None)
            except SandboxError:
                raise
            except Exception as error:  # whatever a provider raises, nothing was started
                raise SandboxError(f"sandbox: harbor: {self._environment}: {one_line(str(error))}") from error
            try:
                left_s = deadline_s - (time.monotonic() - started)
                if grade_s is None:
                    ended = await _run_one(place, argv, variables, workdir, left_s, held)
                else:
                    ended = await _run_all(place, argv, variables, workdir, left_s, grade_s)
                for bind in shown:
                    if bind.writable:
                        await _download(place, bind, Path(scratch))
            except OSError as error:
                raise SandboxError(f"sandbox: harbor: {self._environment}: {error}") from error
            finally:
                await asyncio.shield(place.stop(True))
        code, codes, output, timed_out = ended
        is_flood = len(output) > self.limits.output_size
        return Exit(
            code=-9 if is_flood else code,
            wall_s=time.monotonic() - started,
            timed_out=timed_out,
            output_tail=output[-stdout_limit:],
            broken_limit="output" if is_flood else "",
            codes=codes,
        )

    def end_strays(self, folder: Path) -> None:
        """The provider's time limit does: environments cannot be listed over Harbor."""

    def _make(self, scratch: Path, *, network: bool) -> Any:
        factory, models = _load("harbor.environments.factory"), _load("harbor.models.task.config")
        trial = _load("harbor.models.trial.paths").TrialPaths(trial_dir=scratch / "trial")
        trial.mkdir()
        (scratch / "environment").mkdir()
        mode = models.NetworkMode.ALLOWLIST if network else models.NetworkMode.NO_NETWORK
        hosts = [self._gateway_host] if network else []
        kwargs = {
            "environment_dir": scratch / "environment",
            "environment_name": "gyre",
            "session_id": f"gyre-{secrets.token_hex(8)}",
            "trial_paths": trial,
            "task_env_config": models.EnvironmentConfig(
                docker_image=self._image,
                memory_mb=self.limits.max_memory >> 20,
                storage_mb=self.limits.workspace_size >> 20,
            ),
            "network_policy": models.NetworkPolicy(network_mode=mode, allowed_hosts=hosts),
        }
        if ":" in self._environment:
            chosen = factory.EnvironmentFactory.get_environment_class(import_path=self._environment)
            return chosen(**kwargs)
        kinds = _load("harbor.models.environment_type").EnvironmentType
        return factory.EnvironmentFactory.create_environment(type=kinds(self._environment), **kwargs)


def _load(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SandboxError(f"sandbox: {error}; {_INSTALL}") from None


_Ended = tuple[int, tuple[int, ...], str, bool]
"""(code, codes of graded commands, output, whether the deadline came)."""


async def _run_one(
    place: Any, argv: Sequence[str], env: Mapping[str, str], workdir: str, left_s: float, held: Callable[[], float]
) -> _Ended:
    begun, held_before = time.monotonic(), held()
    # A group of its own, so that the deadline's signal reaches all of it.
    script = f"setsid --wait sh -c 'echo $$ > {_PID}; exec \"$@\"' sh {shlex.join(argv)} 2>&1 < /dev/null"
    running = asyncio.ensure_future(place.exec(script, cwd=workdir, env=dict(env)))
    timed_out = False
    try:
        while not running.done():
            rest_s = begun + left_s + held() - held_before - time.monotonic()
            await asyncio.wait({running}, timeout=max(rest_s, 0.0))
            if running.done() or time.monotonic() < begun + left_s + held() - held_before:
                continue
            timed_out = True
            for signal in ("TERM", "KILL"):
                await place.exec(f"kill -s {signal} -- -$(cat {_PID})", timeout_sec=_CONTROL_S)
                await asyncio.wait({running}, timeout=GRACE_S)
            break
        if not running.done():
            return -9, (), "", True
        result = running.result()
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(running, return_exceptions=True)
    code = int(result.return_code)
    return (code - 256 if code > 127 + 64 else 128 - code if code > 128 else code), (), _output(result), timed_out


async def _run_all(
    place: Any, lines: Sequence[str], env: Mapping[str, str], workdir: str, left_s: float, grade_s: float
) -> _Ended:
    begun, codes = time.monotonic(), list[int]()
    for line in lines:
        if time.monotonic() > begun + left_s:
            return 0, tuple(codes), "", True
        script = f"timeout -s KILL {grade_s:g} sh -c {shlex.quote(line)} > /dev/null 2>&1 < /dev/null"
        result = await place.exec(script, cwd=workdir, env=dict(env))
        codes.append(-9 if result.return_code in (124, 137) else int(result.return_code))
    return 0, tuple(codes), "", False


def _output(result: Any) -> str:
    return f"{result.stdout or ''}{result.stderr or ''}"


async def _upload(place: Any, shown: Sequence[Bind]) -> None:
    for bind in shown:
        above = bind.target if bind.source.is_dir() else posixpath.dirname(bind.target)
        await _do(place, f"mkdir -p {shlex.quote(above)}")
        if bind.source.is_dir():
            await place.upload_dir(bind.source, bind.target)
        else:
            await place.upload_file(bind.source, bind.target)
        if not bind.writable:
            await _do(place, f"chmod -R a-w {shlex.quote(bind.target)}")


async def _download(place: Any, bind: Bind, scratch: Path) -> None:
    """What is there now, over what was; the old one stays when that fails."""
    new = Path(tempfile.mkdtemp(dir=scratch)) / "new"
    new.mkdir()
    await place.download_dir(bind.target, new)
    await asyncio.to_thread(_replace, bind.source, new)


def _replace(old: Path, new: Path) -> None:
    for path in old.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for path in new.iterdir():
        shutil.move(path, old / path.name)


async def _do(place: Any, command: str) -> None:
    result = await place.exec(command, timeout_sec=_CONTROL_S)
    if result.return_code:
        raise SandboxError(f"sandbox: harbor: {command}: {one_line(_output(result))}")
