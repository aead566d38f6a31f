"""Shell. Tasks in the Harbor format: a folder -> Task.

    task.toml            time limits and resources; `[metadata.gyre]` holds what Harbor has no word for
    instruction.md       what the agent is told
    environment/         Dockerfile and the files that its COPY lines put into WORKDIR
    tests/test.sh        the verifier: writes /logs/verifier/reward.txt or reward.json, and ctrf.json beside it
    solution/solve.sh    the oracle

Invariant: the agent sees the instruction and the workspace, never `tests/` or `solution/`. In bubblewrap there is no
image: of the Dockerfile WORKDIR and COPY hold, and the system's programs take the place of what RUN would install.
Direction: folder -> Task -> `lay_out` -> workspace.
"""

import hashlib
import re
import shutil
import tomllib
from pathlib import Path, PurePosixPath
from typing import Annotated

import msgspec

from gyre.agents.tasks import Copy, FolderTask, Task
from gyre.errors import TaskError

_Seconds = Annotated[float, msgspec.Meta(gt=0)]
_MIB = 1 << 20
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", re.IGNORECASE)


class _Verifier(msgspec.Struct, frozen=True):
    timeout_sec: _Seconds = 120.0


class _Agent(msgspec.Struct, frozen=True):
    timeout_sec: _Seconds = 600.0


class _Environment(msgspec.Struct, frozen=True):
    memory_mb: Annotated[int, msgspec.Meta(gt=0)] | None = None
    memory: str = ""
    docker_image: str = ""


class _Gyre(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    protected: tuple[str, ...] = ()
    num_tests: Annotated[int, msgspec.Meta(ge=0)] = 0
    empty_score: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0


class _Metadata(msgspec.Struct, frozen=True):
    gyre: _Gyre = _Gyre()


class _Toml(msgspec.Struct, frozen=True):
    verifier: _Verifier = _Verifier()
    agent: _Agent = _Agent()
    environment: _Environment = _Environment()
    metadata: _Metadata = _Metadata()


def load_tasks(directory: Path, split: str = "train") -> tuple[Task, ...]:
    """Every folder below `directory` that holds a task.toml, by name. Raises TaskError."""
    return tuple(load_task(folder, split) for folder in find_folders(directory))


def find_folders(directory: Path) -> tuple[Path, ...]:
    """`directory` if it is a task, or else the tasks in it, by name. Raises TaskError when there is none."""
    if not directory.is_dir():
        raise TaskError(f"tasks: {directory}: no such directory")
    if (directory / "task.toml").is_file():
        return (directory.resolve(),)
    found = tuple(sorted(path.parent for path in directory.glob("*/task.toml")))
    if not found:
        raise TaskError(f"tasks: {directory}: no folder in it has a task.toml; see docs/tasks.md")
    return found


def load_task(folder: Path, split: str = "train") -> Task:
    """Raises TaskError, naming the file and what is wrong with it."""
    folder = folder.resolve()
    toml = _read_toml(folder)
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise TaskError(f"task {folder.name}: {name} is missing: {_WHY[name]}")
    workdir, copies = _read_dockerfile(folder)
    gyre = toml.metadata.gyre
    for path in gyre.protected:
        _check_inside(path, f"task {folder.name}: task.toml: metadata.gyre.protected")
    return Task(
        id=folder.name,
        family=folder.parent.name,
        split="heldout" if split == "heldout" else "train",
        instruction=_text(folder / "instruction.md"),
        files=(),
        folder=FolderTask(
            path=str(folder),
            digest=_folder_digest(folder),
            workdir=workdir,
            copies=copies,
            agent_s=toml.agent.timeout_sec,
            verifier_s=toml.verifier.timeout_sec,
            memory=_memory(toml.environment, folder.name),
            protected=gyre.protected,
            num_tests=gyre.num_tests,
            empty_score=gyre.empty_score,
        ),
    )


def lay_out(folder: FolderTask, workspace: Path) -> None:
    """Put the task's files into `workspace`, which nobody has written to yet."""
    for copy in folder.copies:
        _copy(Path(folder.path) / "environment" / copy.source, workspace / copy.target)


def put_back(folder: FolderTask, workspace: Path, paths: tuple[str, ...]) -> None:
    """Make these paths of a used workspace what the task had there, or nothing where it had nothing."""
    for path in paths:
        origin = original(folder, path)
        _clear(workspace, PurePosixPath(path))
        if origin is not None and origin.exists():
            _copy(origin, workspace / path)


def original(folder: FolderTask, path: str) -> Path | None:
    """The task's own file or folder behind a path of the workspace; None where no COPY line leads."""
    inside = PurePosixPath(path)
    for copy in reversed(folder.copies):
        if inside.is_relative_to(copy.target):
            return Path(folder.path) / "environment" / copy.source / inside.relative_to(copy.target)
    return None


def _clear(workspace: Path, path: PurePosixPath) -> None:
    """Remove what is there; a link in the place of a folder above must not lead us out of the workspace."""
    for above in reversed(path.parents[:-1]):
        if (workspace / above).is_symlink() or (workspace / above).is_file():
            (workspace / above).unlink()
    target = workspace / path
    if target.is_symlink() or target.is_file():
        target.unlink()
    elif target.is_dir():
        shutil.rmtree(target)


def _copy(origin: Path, target: Path) -> None:
    if origin.is_dir():
        shutil.copytree(origin, target, symlinks=True, dirs_exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(origin, target, follow_symlinks=False)


_WHY = {"instruction.md": "the agent would not know what to do", "tests/test.sh": "it has no graded tests"}


def _read_toml(folder: Path) -> _Toml:
    where = f"task {folder.name}: task.toml"
    try:
        return msgspec.convert(tomllib.loads(_text(folder / "task.toml")), _Toml)
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"{where}: {error}") from None
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        raise TaskError(f"{where}: {path.rstrip('`') or 'top level'}: {reason}") from None


def _read_dockerfile(folder: Path) -> tuple[str, tuple[Copy, ...]]:
    """(WORKDIR, COPY lines that fill it); without a Dockerfile all of `environment/` is the workspace."""
    environment = folder / "environment"
    dockerfile = environment / "Dockerfile"
    if (environment / "docker-compose.yaml").exists():
        raise TaskError(f"task {folder.name}: environment/docker-compose.yaml: services need a container runtime")
    if not dockerfile.is_file():
        return "/workspace", (Copy(source=".", target="."),) if environment.is_dir() else ()
    workdir, copies = "/workspace", list[Copy]()
    text = re.sub(r"\\\n", " ", _text(dockerfile))
    for number, line in enumerate(text.splitlines(), 1):
        word, _, rest = line.strip().partition(" ")
        where = f"task {folder.name}: environment/Dockerfile: instruction in line {number}"
        if word.upper() == "WORKDIR":
            workdir = str(PurePosixPath(workdir) / rest.strip())
        elif word.upper() in ("COPY", "ADD"):
            parts = [part for part in rest.split() if not part.startswith(("--chown", "--chmod"))]
            if len(parts) < 2 or any(part.startswith(("--", "http", "[", "<<")) for part in parts):
                raise TaskError(f"{where}: {word} of this form is not supported: copy files of environment/ by name")
            copies += [
                _read_copy(environment, source, parts[-1], workdir, len(parts) > 2, where) for source in parts[:-1]
            ]
    return workdir, tuple(copies)


def _read_copy(environment: Path, source: str, target: str, workdir: str, is_many: bool, where: str) -> Copy:
    origin = environment / source
    if not origin.resolve().is_relative_to(environment.resolve()) or not origin.exists():
        raise TaskError(f"{where}: {source}: not in environment/")
    absolute = PurePosixPath(workdir) / target
    if not absolute.is_relative_to(workdir):
        raise TaskError(f"{where}: {target} is not in WORKDIR {workdir}: only the workspace is made in bubblewrap")
    inside = absolute.relative_to(workdir)
    if origin.is_file() and (is_many or target.endswith(("/", ".")) or inside == PurePosixPath(".")):
        inside /= origin.name
    return Copy(source=str(PurePosixPath(source)), target=str(inside))


def _memory(environment: _Environment, name: str) -> int:
    if environment.memory_mb:
        return environment.memory_mb * _MIB
    if not environment.memory:
        return 0
    found = _SIZE.fullmatch(environment.memory.strip())
    if not found:
        raise TaskError(f"task {name}: task.toml: environment.memory: {environment.memory!r} is no size; write 2G")
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))


def _check_inside(path: str, where: str) -> None:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or str(pure) == ".":
        raise TaskError(f"{where}: {path!r} is not inside the workspace: use a relative path")


def _folder_digest(folder: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(folder)}\0{content}\n".encode())
    return total.hexdigest()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"task {path.parent.name}: {path.name}: {error}") from None
