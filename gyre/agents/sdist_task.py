"""Shell. A source distribution -> a task: its documents are the specification, its tests the verifier, its code hidden.

    instruction.md                 which package to write
    environment/workspace/SPEC.*   its README, all that the workspace holds
    tests/original/                its tests and packaging files, put over the agent's before scoring
    solution/source/               its code, the oracle

Invariants: nothing of the distribution is run outside a sandbox, or taken out of it by a link or a path; the tests that
count are those that pass on its own code, each by its name. Direction: archive -> folder in the Harbor format.
"""

import asyncio
import errno
import hashlib
import json
import shutil
import tarfile
import tempfile
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath

import msgspec

from gyre.agents.evaluator import GRADING_PACKAGES, grade, prepare_workspace, solve
from gyre.agents.places import AnySandbox
from gyre.agents.task_folder import load_task
from gyre.errors import TaskError

_PACKAGING = ("pyproject.toml", "setup.py", "setup.cfg", "tox.ini", "pytest.ini", "MANIFEST.in")
_STARTERS = ("sitecustomize.py", "usercustomize.py", "sitecustomize", "usercustomize")
_GUARDED = ("conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml", *_STARTERS)
"""Of the root of a workspace: an agent's own would change how the tests run."""
_TESTS = ("tests", "test", "testing")
_MANY = 1_000_000
"""Tests, before it is known how many there are."""
_NOT_CODE = (*_TESTS, "docs", "doc", "examples", "benchmarks", "scripts", "tools", "bin")
_TEST_SH = """\
#!/bin/bash
# Each test that counts weighs the same: reward = passed / all. Package and test files are the originals, whatever the
# agent left in their place.
mkdir -p /logs/verifier
rm -rf PATHS
cp -r /tests/original/. .
report=/logs/verifier/ctrf.json
options="-q -p no:cacheprovider -o addopts= --continue-on-collection-errors --import-mode=append"
# Last on the path, so that nothing of the workspace takes the name of a module of the runner's.
run='import os, sys, pytest; sys.path += map(os.path.abspath, ("src", ".")); sys.exit(pytest.main(sys.argv[1:]))'
python3 -P -B -c "$run" $options --ctrf=$report @/tests/arguments.txt
status=$?
# What is graded runs in the runner's process: where it keeps the tests from being collected, none has passed.
none='{"results": {"summary": {"tests": 0, "passed": 0}, "tests": []}}'
[ -e $report ] || [ $status -gt 128 ] || echo "$none" > $report
exit $status
"""
_SOLVE = "#!/bin/bash\nset -e\ncp -r /solution/source/. .\n"


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """What of a source distribution is what; relative paths."""

    name: str
    version: str
    license: str
    code: tuple[str, ...]
    tests: tuple[str, ...]
    packaging: tuple[str, ...]
    spec: str


def make_task(archive: Path, folder: Path, sandbox: AnySandbox, *, sha256: str = "") -> Layout:
    """Write the task into `folder`, which must not be there. Raises TaskError for an archive that makes none.

    sha256: what the archive has to be.
    """
    if folder.exists():
        raise TaskError(f"{folder}: exists already; choose another name or remove it")
    digest = _digest(archive)
    if sha256 and sha256 != digest:
        raise TaskError(f"{archive}: its sha256 is {digest}, expected {sha256}: it is not the archive that was meant")
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".gyre-sdist-", dir=folder.absolute().parent) as scratch:
        root = _extract(archive, Path(scratch) / "source")
        layout = read_layout(root)
        made = Path(scratch) / folder.name
        _write(made, root, layout, digest)
        passing = asyncio.run(_passing_tests(made, sandbox, Path(scratch) / "workspace"))
        _finish(made, layout, digest, passing)
        made.rename(folder)
    return layout


def read_layout(root: Path) -> Layout:
    """Raises TaskError."""
    info = HeaderParser().parsestr(_text(root / "PKG-INFO"))
    name, version = info["Name"] or root.name, info["Version"] or ""
    if name.lower() in GRADING_PACKAGES:
        raise TaskError(f"{name}: the verifier brings this package along: nothing would be left to write")
    code_root = root / "src" if (root / "src").is_dir() else root
    code = [
        path
        for path in sorted(code_root.iterdir())
        if (path.suffix == ".py" and path.name not in (*_PACKAGING, "conftest.py") and not _is_test(path))
        or (path.is_dir() and path.name not in _NOT_CODE and path.suffix != ".egg-info" and any(path.glob("**/*.py")))
    ]
    tests = [path for path in sorted(root.iterdir()) if path.name in _TESTS or _is_test(path)]
    specs = [path for path in sorted(root.iterdir()) if path.name.upper().startswith("README") and path.is_file()]
    for found, what in ((code, "code"), (tests, "tests"), (specs, "README")):
        if not found:
            raise TaskError(f"{name} {version}: no {what} in its source distribution: take another package")
    if (root / "conftest.py").exists():
        tests.append(root / "conftest.py")
    return Layout(
        name=name,
        version=version,
        license=info["License-Expression"] or info["License"] or "",
        code=tuple(str(path.relative_to(root)) for path in code),
        tests=tuple(str(path.relative_to(root)) for path in tests),
        packaging=tuple(name for name in _PACKAGING if (root / name).is_file()),
        spec=specs[0].name,
    )


def _is_test(path: Path) -> bool:
    return path.suffix == ".py" and (path.name.startswith("test_") or path.stem.endswith("_test"))


def _write(made: Path, root: Path, layout: Layout, digest: str) -> None:
    spec = f"SPEC{PurePosixPath(layout.spec).suffix}"
    _put(root / layout.spec, made / "environment/workspace" / spec)
    (made / "environment/Dockerfile").write_text(
        "FROM python:3.11-slim\nRUN pip install --no-cache-dir pytest==9.2.0 pytest-json-ctrf==0.6.1\n"
        "WORKDIR /workspace\nCOPY workspace/ /workspace/\n"
    )
    names = ", ".join(f"`{path}`" for path in layout.code)
    (made / "instruction.md").write_text(
        f"# {layout.name}\n\nWrite the Python package {layout.name} as `{spec}` describes it, in this workspace: "
        f"{names}.\nThere is no network, and no other copy of it. Its own tests score it: the fraction that passes.\n"
    )
    for path in (*layout.tests, *layout.packaging):
        _put(root / path, made / "tests/original" / path)
    guarded = dict.fromkeys((*layout.tests, *layout.packaging, *_GUARDED, *(f"src/{name}" for name in _STARTERS)))
    (made / "tests/test.sh").write_text(_TEST_SH.replace("PATHS", " ".join(guarded)))
    (made / "tests/arguments.txt").write_text("".join(f"{path}\n" for path in layout.tests if path != "conftest.py"))
    for path in layout.code:
        _put(root / path, made / "solution/source" / path)
    (made / "solution/solve.sh").write_text(_SOLVE)
    _finish(made, layout, digest, ())


def _finish(made: Path, layout: Layout, digest: str, passing: tuple[str, ...]) -> None:
    """task.toml, and which tests count: before they are known, all."""
    if passing:
        (made / "tests/arguments.txt").write_text("\n".join(passing) + "\n")
    spec = f"SPEC{PurePosixPath(layout.spec).suffix}"  # the rest is put back by test.sh: an agent may write its own
    lines = [
        'version = "1.0"',
        "",
        "[metadata]",
        'category = "library"',
        f"source = {json.dumps(f'{layout.name} {layout.version}')}",
        f"source_sha256 = {json.dumps(digest)}",
        f"license = {json.dumps(layout.license.strip().splitlines()[0] if layout.license.strip() else '')}",
        "",
        "[metadata.gyre]",
        f"num_tests = {len(passing) or _MANY}",
        f"protected = {json.dumps([spec])}",
        "",
        "[agent]",
        "timeout_sec = 3600",
        "",
        "[verifier]",
        "timeout_sec = 300",
    ]
    (made / "task.toml").write_text("\n".join(lines) + "\n")


async def _passing_tests(made: Path, sandbox: AnySandbox, workspace: Path) -> tuple[str, ...]:
    """Names of the tests that pass on the package's own code, and not without it."""
    task = load_task(made)
    assert task.folder is not None
    passing = list[set[str]]()
    for is_solved in (True, False):
        prepare_workspace(workspace, task)
        if is_solved and (failure := await solve(sandbox, workspace, task.folder)):
            raise TaskError(f"{made.name}: its code could not be put into a workspace: {failure}")
        passing.append({name for name, passed in (await grade(sandbox, workspace, task)).parts if passed})
        shutil.rmtree(workspace)
    found = tuple(sorted(passing[0] - passing[1]))
    if len(found) < 5:
        raise TaskError(f"{made.name}: {len(found)} of its tests pass on its own code: it has to have five")
    return found


def _extract(archive: Path, target: Path) -> Path:
    """Plain files alone: no link leads out. (Debian's Python 3.11 does not know tarfile's filters.)"""
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts:
                    raise TaskError(f"{archive}: no source distribution: {member.name} lies outside of it")
                content = tar.extractfile(member) if member.isfile() else None
                if content is not None:
                    (target / path).parent.mkdir(parents=True, exist_ok=True)
                    (target / path).write_bytes(content.read())
    except (OSError, tarfile.TarError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        raise TaskError(f"{archive}: no source distribution: {error}") from None
    found = [info.parent for info in target.glob("*/PKG-INFO")]
    if len(found) != 1:
        raise TaskError(f"{archive}: no source distribution: one folder with PKG-INFO is expected")
    return found[0]


def _put(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    else:
        shutil.copyfile(source, target)


def _digest(archive: Path) -> str:
    try:
        return hashlib.sha256(archive.read_bytes()).hexdigest()
    except OSError as error:
        raise TaskError(f"{archive}: {error.strerror}") from None


def _text(path: Path) -> str:
    return path.read_text(errors="replace")
