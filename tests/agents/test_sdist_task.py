"""A source distribution becomes a task: its own tests score it, and nothing but the README is there to copy from."""

import asyncio
import hashlib
import io
import shutil
import tarfile
from pathlib import Path

import pytest

from gyre.agents.evaluator import grade, prepare_workspace
from gyre.agents.sandbox import Sandbox, check_sandbox
from gyre.agents.sdist_task import make_task
from gyre.agents.task_check import check_task
from gyre.agents.task_folder import load_task
from gyre.errors import TaskError

needs_sandbox = pytest.mark.skipif(bool(check_sandbox()), reason=check_sandbox())

CODE = """\
def total(numbers):
    return sum(numbers)


def mean(numbers):
    return sum(numbers) / len(numbers)
"""
TESTS = """\
import minitally
import pytest


@pytest.mark.parametrize("numbers", [[1], [1, 2], [3, 4, 5]])
def test_total(numbers):
    assert minitally.total(numbers) == sum(numbers)


@pytest.mark.parametrize("numbers", [[1], [1, 2], [3, 4, 5]])
def test_mean(numbers):
    assert minitally.mean(numbers) == sum(numbers) / len(numbers)


def test_of_what_nobody_has():
    import no_such_package
"""
FILES = {
    "PKG-INFO": "Metadata-Version: 2.1\nName: minitally\nVersion: 1.0\nLicense: MIT\n",
    "README.md": "# minitally\n\n`total(numbers)` and `mean(numbers)`.\n",
    "setup.cfg": "[tool:pytest]\naddopts = --no-such-option\n",
    "minitally/__init__.py": CODE,
    "tests/test_minitally.py": TESTS,
    "tests/test_alone.py": "def test_nothing():\n    pass\n",
}


def archive(folder: Path, name: str = "minitally-1.0", **changes: str | None) -> Path:
    """changes: by path; None leaves a file out."""
    path = folder / f"{name}.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for inside, text in (FILES | changes).items():
            if text is not None:
                member = tarfile.TarInfo(f"{name}/{inside}")
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text.encode()))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sdist")
    found = archive(root)
    digest = hashlib.sha256(found.read_bytes()).hexdigest()
    made = make_task(found, root / "tasks/minitally", Sandbox(), sha256=digest)
    assert (made.name, made.version, made.license) == ("minitally", "1.0", "MIT")
    return root / "tasks/minitally"


@needs_sandbox
def test_oracle_is_one_and_empty_is_zero_of_the_tests_that_say_something(folder: Path) -> None:
    checked = asyncio.run(check_task(load_task(folder), Sandbox()))
    assert (checked.problems, checked.scores) == ((), (("empty", 0.0), ("solve.sh", 1.0)))
    assert load_task(folder).folder.num_tests == 6  # type: ignore[union-attr]


@needs_sandbox
def test_the_workspace_holds_the_specification_alone(folder: Path, tmp_path: Path) -> None:
    prepare_workspace(tmp_path / "w", load_task(folder))
    assert [path.name for path in (tmp_path / "w").iterdir()] == ["SPEC.md"]
    assert "minitally" in load_task(folder).instruction


PARTIAL = {"minitally.py": "def total(numbers):\n    return sum(numbers)\n"}
PASS_ALL = "import pytest\n\n\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport():\n" + (
    "    report = (yield).get_result()\n    report.outcome = 'passed'\n"
)


FORGE = (
    "import os\n"
    'report = \'{"results": {"summary": {"tests": 6, "passed": 6}, "tests": [\'\n'
    'report += \', \'.join(\'{"name": "%d", "status": "passed"}\' % n for n in range(6)) + \']}}\'\n'
    "open('/logs/verifier/ctrf.json', 'w').write(report)\nos._exit(0)\n"
)
"""What gets into the runner's process at its start can report what it likes."""


@needs_sandbox
@pytest.mark.parametrize(
    ("files", "score"),
    [
        (PARTIAL, 0.5),
        (PARTIAL | {"tests/test_minitally.py": "def test_total(): pass\n", "setup.cfg": "[tool:pytest]\n"}, 0.5),
        (PARTIAL | {"conftest.py": PASS_ALL, "pytest.ini": "[pytest]\ntestpaths = none\n"}, 0.5),
        (PARTIAL | {"pytest.py": FORGE, "_pytest.py": FORGE, "ctrf.py": FORGE, "json.py": FORGE}, 0.5),
        (PARTIAL | {"sitecustomize.py": FORGE, "src/sitecustomize.py": FORGE, "usercustomize.py": FORGE}, 0.5),
        ({"minitally.py": "import os\nos._exit(0)\n"}, 0.0),
        ({"minitally.py": "raise SystemExit\n"}, 0.0),
    ],
    ids=[
        "half of it",
        "other tests",
        "a conftest of its own",
        "names of the runner's",
        "start-up files",
        "ends the runner",
        "ends the import",
    ],
)
def test_package_and_test_files_are_the_originals_when_it_is_scored(
    folder: Path, tmp_path: Path, files: dict[str, str], score: float
) -> None:
    task, workspace = load_task(folder), tmp_path / "w"
    prepare_workspace(workspace, task)
    for name, text in files.items():
        (workspace / name).parent.mkdir(exist_ok=True)
        (workspace / name).write_text(text)
    assert asyncio.run(grade(Sandbox(), workspace, task)).score == score


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"README.md": None}, "no README in its source distribution"),
        ({"tests/test_minitally.py": None, "tests/test_alone.py": None}, "no tests in its source distribution"),
        ({"minitally/__init__.py": None}, "no code in its source distribution"),
        ({"PKG-INFO": None}, "one folder with PKG-INFO is expected"),
        ({"PKG-INFO": "Name: pluggy\nVersion: 1\n"}, "the verifier brings this package along"),
        ({"../../../outside": "x"}, "no source distribution"),
    ],
)
def test_an_archive_that_makes_no_task_says_why(tmp_path: Path, changes: dict[str, str | None], said: str) -> None:
    with pytest.raises(TaskError, match=said):
        make_task(archive(tmp_path, **changes), tmp_path / "out", Sandbox())
    assert not (tmp_path / "out").exists()
    assert len(list(tmp_path.iterdir())) == 1, "nothing is left beside it"


def test_another_archive_than_the_one_that_was_meant(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="not the archive that was meant"):
        make_task(archive(tmp_path), tmp_path / "out", Sandbox(), sha256="0" * 64)
    (tmp_path / "none.tar.gz").write_text("no archive")
    with pytest.raises(TaskError, match="no source distribution"):
        make_task(tmp_path / "none.tar.gz", tmp_path / "out", Sandbox())
    shutil.copytree(tmp_path, tmp_path.parent / f"{tmp_path.name}-there")
    with pytest.raises(TaskError, match="exists already"):
        make_task(archive(tmp_path), tmp_path.parent / f"{tmp_path.name}-there", Sandbox())


@needs_sandbox
def test_a_package_whose_tests_say_too_little(tmp_path: Path) -> None:
    few = archive(tmp_path, **{"tests/test_minitally.py": "import minitally\n\n\ndef test_one():\n    pass\n"})
    with pytest.raises(TaskError, match="1 of its tests pass on its own code"):
        make_task(few, tmp_path / "out", Sandbox())
