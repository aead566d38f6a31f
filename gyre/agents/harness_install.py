"""Shell. Harness programs on this machine: name -> a folder with an environment of its own.

Invariant: a folder counts as installed only once its mark is written, which is the last step. Programs
come from the Python package index or the npm registry, in the one version that was tried, and are not
changed; nothing is installed outside the folder, and no script of a package is run. Of mini-swe-agent's
dependencies only those are installed that it imports when it is started as gyre starts it (43 MB
instead of 754). What needs Node brings its own.
"""

import os
import platform
import shutil
import subprocess
from pathlib import Path

from gyre.agents.harnesses import RECIPES, find_recipe
from gyre.agents.process import base_python
from gyre.agents.recipe import Recipe
from gyre.errors import HarnessError

_MARK = ".gyre-installed"
_REQUIREMENTS = {
    "mini-swe-agent": (
        ("--no-deps", "mini-swe-agent=={version}"),
        ("jinja2", "platformdirs", "prompt_toolkit", "pydantic>=2", "python-dotenv", "pyyaml", "rich", "typer"),
    )
}
_TIMEOUT_S = 300
"""Of one step. The largest harness takes twenty seconds where the registry is near."""
_INSTALLED = ("venv", "npm")
_ARCHES = {"x86_64": "x64", "aarch64": "arm64"}


def harness_home() -> Path:
    """`GYRE_HARNESSES`, or a folder of this user."""
    return Path(os.environ.get("GYRE_HARNESSES") or Path.home() / ".local/share/gyre/harnesses").absolute()


def installed(name: str, home: Path | None = None) -> bool:
    """Whether `name` can be started; true for what needs no installation. Raises ConfigError for no harness."""
    recipe = find_recipe(name)
    if recipe.kind not in _INSTALLED:
        return True
    mark = (home or harness_home()) / name / _MARK
    return mark.is_file() and mark.read_text() == recipe.version


def require(name: str, home: Path | None = None) -> Path | None:
    """The folder of `name`, if it has one. Raises HarnessError when it is not installed."""
    if not installed(name, home):
        raise HarnessError(f"harness {name} is not installed; run: gyre harness install {name}")
    return (home or harness_home()) / name if RECIPES[name].kind in _INSTALLED else None


def own_folder(path: str, run_path: Path) -> Path | None:
    """`harness.folder`, if there is one. Raises HarnessError where agents would see the run at `run_path` by it."""
    if not path:
        return None
    folder = Path(path).resolve()
    if not folder.is_dir():
        raise HarnessError(f"harness.folder: {path}: no such directory")
    if run_path.resolve().is_relative_to(folder):
        raise HarnessError(
            f"harness.folder: {path}: holds {run_path}, which agents must not see; give the agent its own directory"
        )
    return folder


def install(name: str, home: Path | None = None) -> Path | None:
    """Install `name` unless it is there already. Raises HarnessError with what the installer said."""
    recipe = find_recipe(name)
    if recipe.kind not in _INSTALLED:
        return None
    folder = (home or harness_home()) / name
    if installed(name, home):
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if recipe.kind == "npm":
        _install_npm(recipe, folder)
    else:
        _install_venv(recipe, folder)
    (folder / _MARK).write_text(recipe.version)
    return folder


def _install_venv(recipe: Recipe, folder: Path) -> None:
    name = recipe.name
    python = str(folder / "bin/python")
    _call(name, [base_python(), "-m", "venv", str(folder)], "Debian, Ubuntu: apt-get install python3-venv")
    for arguments in _REQUIREMENTS[name]:
        packages = [argument.format(version=recipe.version) for argument in arguments]
        _call(name, [python, "-m", "pip", "install", "--quiet", *packages], "is the package index within reach?")
    # Nothing more is installed into it, and pip would be a third of its size.
    _call(name, [python, "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools", "pip"], "")
    _call(name, [str(folder / "bin/mini"), "--help"], "a dependency may have changed: report it")


def _install_npm(recipe: Recipe, folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise HarnessError(f"harness {recipe.name}: npm is not installed; Debian, Ubuntu: apt-get install npm")
    machine = platform.machine()
    if machine not in _ARCHES:
        raise HarnessError(f"harness {recipe.name}: there is none for {machine}; use x86_64 or aarch64")
    names = {"arch": _ARCHES[machine], "machine": machine}
    packages = [package.format(**names) for package in recipe.packages]
    (folder / "bin").mkdir(parents=True)
    options = ("--prefix", str(folder), "--cache", str(folder / ".npm"), "--no-audit", "--no-fund", "--ignore-scripts")
    _call(recipe.name, [npm, "install", *options, *packages], "is the npm registry within reach?")
    shutil.rmtree(folder / ".npm", ignore_errors=True)
    for name, path in recipe.programs:
        program = folder / path.format(**names)
        if not program.is_file():
            raise HarnessError(f"harness {recipe.name}: {program} is not in its packages; report it")
        (folder / "bin" / name).symlink_to(os.path.relpath(program, folder / "bin"))


def _call(name: str, command: list[str], remedy: str) -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    env |= {"MSWEA_SILENT_STARTUP": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S, env=env)
    except subprocess.CalledProcessError as error:
        said = " ".join((error.stderr or error.stdout).split())[-400:]
        raise HarnessError(f"harness {name}: {' '.join(command)} failed: {said}; {remedy}") from None
    except subprocess.TimeoutExpired:
        raise HarnessError(f"harness {name}: {' '.join(command)} took more than {_TIMEOUT_S} s; {remedy}") from None
