"""An environment as Harbor's providers write them, on this machine: its root is a folder, what it runs is a process.

It stands in for a provider's host, which a test has none of; everything else of Harbor is Harbor's own.
"""

import asyncio
import os
import shutil
import signal
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities

MADE: list["LocalEnvironment"] = []


class LocalEnvironment(BaseEnvironment):
    """Paths of `/workspace`, `/config`, `/tests`, `/logs` and `/tmp` lie below a folder; commands are rewritten so."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.root = self.trial_paths.trial_dir.parent / "root"
        self.stopped = False
        MADE.append(self)

    @staticmethod
    def type() -> str:
        return "local"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(
            disable_internet=True, network_allowlist=True, network_allowlist_hostnames=True,
            network_allowlist_ipv4_addresses=True,
        )  # fmt: skip

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(memory_limit=True, memory_request=True)

    def _validate_definition(self) -> None:
        pass

    async def start(self, force_build: bool) -> None:
        (self.root / "tmp").mkdir(parents=True)

    async def stop(self, delete: bool) -> None:
        self.stopped = True
        shutil.rmtree(self.root, ignore_errors=True)

    def _there(self, text: str) -> str:
        for name in ("/workspace", "/config", "/tests", "/logs", "/tmp/.gyre"):
            text = text.replace(name, f"{self.root}{name}")
        return text

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        shutil.copy2(source_path, self._there(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        shutil.copytree(source_dir, self._there(target_dir), dirs_exist_ok=True, symlinks=True)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        shutil.copy2(self._there(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        shutil.copytree(self._there(source_dir), target_dir, dirs_exist_ok=True, symlinks=True)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        where = self._there(cwd) if cwd else self.root
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", self._there(command), cwd=where, env={"PATH": os.environ["PATH"]} | (env or {}),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        try:
            async with asyncio.timeout(timeout_sec):
                out, err = await process.communicate()
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=process.returncode or 0)
