"""Tasks of the user's own families: the function of the documentation, and what is wrong with others."""

import asyncio
import re
from pathlib import Path

import pytest

from gyre.agents.sandbox import Sandbox, check_sandbox
from gyre.agents.task_check import check_task
from gyre.agents.task_source import TaskSource
from gyre.agents.tasks import task_digest
from gyre.config import load_config
from gyre.errors import GyreError

PAGE = Path(__file__).parents[2] / "docs/tasks.md"
MISSING = check_sandbox()


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """The file of the page."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    path = tmp_path / "mytasks.py"
    path.write_text(block)
    return path


def source(family: str, more: str = "num_goals: 3") -> TaskSource:
    return TaskSource(load_config(f"tasks: {{family: {family!r}, {more}}}"))


def test_a_function_gives_the_same_task_for_the_same_index_and_another_for_another(mine: Path) -> None:
    one, again = source(f"{mine}:reverse"), source(f"{mine}:reverse")
    tasks = [one.get(purpose, index) for purpose in ("train", "eval") for index in range(50)]
    assert tasks == [again.get(purpose, index) for purpose in ("train", "eval") for index in range(50)]
    assert len({task_digest(task) for task in tasks}) == 100
    first = tasks[0]
    assert (first.id, first.family, first.split, len(first.tests)) == ("reverse-train-1-3-0", "reverse", "train", 6)
    assert first.instruction.splitlines()[1] == "1. Write the lines of in1.txt to out1.txt, the last one first"
    assert tasks[50].split == "heldout"


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_its_tasks_grade_right(mine: Path) -> None:
    checked = asyncio.run(check_task(source(f"{mine}:reverse").get("train", 7), Sandbox()))
    assert (checked.problems, checked.scores) == ((), (("empty", 0.0), ("solve.sh", 1.0)))


def test_a_function_of_a_module(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(mine.parent)
    monkeypatch.syspath_prepend(str(mine.parent))
    mine.rename(mine.with_name("my_own_tasks.py"))
    assert source("my_own_tasks:reverse").get("train", 0).family == "reverse"


WRONG = {
    "nobody": "there is no nobody in ",
    "number": "no function of ",
    "fails": "ValueError: no luck",
    "words": r"Expected `object`, got `str` - at `\$\[0\]`",
    "text": r"Expected `array`, got `str` - at `\$\[0\]\.tests`",
    "nothing": "no graded tests",
    "outside": "file '../x' is not inside the workspace",
}


@pytest.mark.parametrize("name", WRONG)
def test_what_makes_no_task_is_named_before_anything_starts(mine: Path, name: str) -> None:
    mine.write_text(
        "from gyre.agents.tasks import Goal\n"
        "number = 3\n"
        "def fails(rng, num_goals): raise ValueError('no luck')\n"
        "def words(rng, num_goals): return ('Do it',)\n"
        "def text(rng, num_goals): return (Goal(kind='k', text='t', files=(), tests='true', solution=()),)\n"
        "def nothing(rng, num_goals): return ()\n"
        "def outside(rng, num_goals):\n"
        "    return (Goal(kind='k', text='t', files=(('../x', ''),), tests=('true',), solution=()),)\n"
    )
    with pytest.raises(GyreError, match=WRONG[name]) as raised:
        source(f"{mine}:{name}")
    assert name in str(raised.value)


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("chess", "there is no family 'chess': choose one of files, or name a function of your own"),
        ("nowhere.py:x", "tasks.family nowhere.py:x: no such file: nowhere.py"),
        ("nowhere.at_all:x", "tasks.family nowhere.at_all:x: no module nowhere here or on PYTHONPATH"),
    ],
)
def test_a_family_that_is_not_there_is_named(family: str, said: str) -> None:
    with pytest.raises(GyreError, match=re.escape(said)):
        source(family)
