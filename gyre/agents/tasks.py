"""Pure. Tasks: an instruction, the files of a workspace, and the graded tests that score it.

(family, split, seed, index, num_goals) -> Task. The same arguments give the same task on every host,
and the two splits draw from different seeds, so no heldout task is a function of a train seed.
A graded test is a shell command, run with `sh -c` in the workspace, that exits 0 when it holds; every
one of them fails on the untouched workspace, so that doing nothing scores 0 and the oracle scores 1.
"""

import hashlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import PurePosixPath
from random import Random
from typing import Literal, get_args

import msgspec

from gyre.errors import TaskError

Split = Literal["train", "heldout"]


class GradedTest(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    command: str


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """Of the Dockerfile: what of `environment/` goes where in the workspace. Both are relative paths."""

    source: str
    target: str


class FolderTask(msgspec.Struct, frozen=True, kw_only=True):
    """Where a task in the Harbor format lies, and what its task.toml and Dockerfile say."""

    path: str
    digest: str
    """Of all files of the folder."""
    workdir: str = "/workspace"
    """Where the workspace is in the sandbox."""
    copies: tuple[Copy, ...] = ()
    agent_s: float = 600.0
    verifier_s: float = 120.0
    memory: int = 0
    """Bytes, all processes together; 0: the sandbox's own limit."""
    protected: tuple[str, ...] = ()
    """Paths of the workspace that are put back to the originals before it is scored."""
    num_tests: int = 0
    """Graded checks that the verifier must report; 0: any number."""
    empty_score: float = 0.0
    """What doing nothing is worth."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """An immutable problem. `solution` is the oracle: one shell command a turn, in order."""

    id: str
    family: str
    split: Split
    instruction: str
    files: tuple[tuple[str, str], ...]
    """(path relative to the workspace, content)."""
    tests: tuple[GradedTest, ...] = ()
    solution: tuple[str, ...] = ()
    folder: FolderTask | None = None
    """Of a task in a folder: its files, tests and solution stay there, and `files`, `tests`, `solution` are empty."""

    def __post_init__(self) -> None:
        if not self.tests and self.folder is None:
            raise TaskError(f"task {self.id}: it has no graded tests, so it cannot be scored: give it at least one")
        for path, _ in self.files:
            if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or path in ("", "."):
                raise TaskError(f"task {self.id}: file {path!r} is not inside the workspace: use a relative path")


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """One numbered line of an instruction and what it needs; the parts of a Task before they are joined."""

    kind: str
    text: str
    files: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]
    solution: tuple[str, ...]
    confused: tuple[str, ...] = ()
    """A plausible wrong solution: another command with the same arguments (for noisy demonstrations)."""


Family = Callable[[Random, int], tuple[Goal, ...]]


def task_digest(task: Task) -> str:
    """Of a generated task what it says; of one in a folder, its files."""
    described = msgspec.to_builtins(task)
    if task.folder is None:
        del described["folder"]  # generated tasks had a digest before there were others
    else:
        described["folder"]["path"] = ""  # the same files are the same task wherever they lie
    return hashlib.sha256(msgspec.json.encode(described)).hexdigest()


def make_goals(family: str, split: Split, seed: int, index: int, num_goals: int) -> tuple[Goal, ...]:
    """The goals that `make_task` joins. Raises TaskError for arguments that name no task."""
    if family not in FAMILIES:
        raise TaskError(f"tasks: there is no family {family!r}: choose one of {', '.join(FAMILIES)}")
    if split not in get_args(Split):
        raise TaskError(f"tasks: there is no split {split!r}: choose one of {', '.join(get_args(Split))}")
    if index < 0 or num_goals < 1:
        raise TaskError(f"tasks: index {index} with {num_goals} goals names no task: use index >= 0, num_goals >= 1")
    key = hashlib.sha256(f"{family}\0{split}\0{seed}\0{index}\0{num_goals}".encode()).digest()
    return FAMILIES[family](Random(int.from_bytes(key, "big")), num_goals)


@lru_cache(maxsize=256)  # all executions of a group ask for the same one
def make_task(family: str, split: Split, seed: int, index: int, num_goals: int) -> Task:
    """The task at `index` of a split. Raises TaskError for arguments that name no task."""
    goals = make_goals(family, split, seed, index, num_goals)
    lines = [f"{number}. {goal.text}" for number, goal in enumerate(goals, 1)]
    return Task(
        id=f"{family}-{split}-{seed}-{num_goals}-{index}",
        family=family,
        split=split,
        instruction="\n".join(["Do this:", *lines]),
        files=tuple(file for goal in goals for file in goal.files),
        tests=tuple(
            GradedTest(name=f"{number}-{goal.kind}-{part}", command=command)
            for number, goal in enumerate(goals, 1)
            for part, command in enumerate(goal.tests, 1)
        ),
        solution=tuple(command for goal in goals for command in goal.solution),
    )


# fmt: off
WORDS = (
    "amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "ivory", "jolly", "karma", "lemon",
    "maple", "noble", "ocean", "pearl", "quilt", "river", "solar", "tulip", "umbra", "vivid", "walnut", "zebra",
)
STEMS = (
    "notes", "data", "list", "plan", "draft", "report", "index", "table", "diary", "memo", "recipe", "ledger",
)
# fmt: on
EXTENSIONS = ("txt", "md", "log")

_MAX_FILE_GOALS = 6
_KINDS = ("write", "append", "rename", "delete", "copy", "count", "sum", "find")


def _make_files_goals(rng: Random, num_goals: int) -> tuple[Goal, ...]:
    """Distinct kinds on distinct files and words, so that goals do not depend on each other's order."""
    if num_goals > _MAX_FILE_GOALS:
        raise TaskError(f"tasks: family files: {num_goals} goals: it has names for at most {_MAX_FILE_GOALS}")
    names = [f"{stem}.{extension}" for stem in STEMS for extension in EXTENSIONS]
    rng.shuffle(names)
    words = rng.sample(WORDS, len(WORDS))
    return tuple(_make_file_goal(rng, kind, names, words) for kind in rng.sample(_KINDS, num_goals))


def _make_file_goal(rng: Random, kind: str, names: list[str], words: list[str]) -> Goal:
    """Takes its names and words from the ends of the two lists."""
    name, other = names.pop(), names.pop()
    word, second = words.pop(), words.pop()
    one = f"{second}\n"
    match kind:
        case "write":
            return Goal(
                kind=kind,
                text=f"Write {word} to {name}",
                files=((name, one),),
                tests=(f"grep -qx {word} {name}", f"test $(cat {name} | tr -d '[:space:]') = {word}"),
                solution=(f"echo {word} > {name}",),
                confused=(f"echo {word} >> {name}",),
            )
        case "append":
            return Goal(
                kind=kind,
                text=f"Append {word} to {name}",
                files=((name, one),),
                tests=(f"grep -qx {word} {name}", f"test $(cat {name} | tr -d '[:space:]') = {second}{word}"),
                solution=(f"echo {word} >> {name}",),
                confused=(f"echo {word} > {name}",),
            )
        case "rename":
            return Goal(
                kind=kind,
                text=f"Rename {name} to {other}",
                files=((name, one),),
                tests=(f"grep -qx {second} {other}", f"test ! -e {name}"),
                solution=(f"mv {name} {other}",),
                confused=(f"cp {name} {other}",),
            )
        case "delete":
            return Goal(
                kind=kind,
                text=f"Delete {name}",
                files=((name, one), (other, f"{word}\n")),
                tests=(f"test ! -e {name}", f"test ! -e {name} && grep -qx {word} {other}"),
                solution=(f"rm {name}",),
                confused=(f"cat {name}",),
            )
        case "copy":
            return Goal(
                kind=kind,
                text=f"Copy {name} to {other}",
                files=((name, one),),
                tests=(f"grep -qx {second} {other}", f"test $(cat {name}) = {second} && grep -qx {second} {other}"),
                solution=(f"cp {name} {other}",),
                confused=(f"mv {name} {other}",),
            )
        case "count":
            num_hits = rng.randint(2, 5)
            lines = [word] * num_hits + [second] * rng.choice([n for n in range(1, 5) if n != num_hits])
            rng.shuffle(lines)
            return Goal(
                kind=kind,
                text=f"Count lines with {word} in {name} into {other}",
                files=((name, "".join(f"{line}\n" for line in lines)),),
                tests=(f"test -s {other}", f"test $(cat {other}) = {num_hits}"),
                solution=(f"grep -c {word} {name} > {other}",),
                confused=(f"grep {word} {name} > {other}",),
            )
        case "sum":
            column = rng.randint(1, 2)
            rows = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(rng.randint(2, 4))]
            totals = [sum(row[0] for row in rows), sum(row[1] for row in rows)]
            if totals[0] == totals[1]:
                rows.append((1, 2))
                totals = [totals[0] + 1, totals[1] + 2]
            return Goal(
                kind=kind,
                text=f"Sum column {column} of {name} into {other}",
                files=((name, "".join(f"{left} {right}\n" for left, right in rows)),),
                tests=(f"test -s {other}", f"test $(cat {other}) = {totals[column - 1]}"),
                solution=(f"awk '{{s+=${column}}} END {{print s}}' {name} > {other}",),
                confused=(f"awk '{{s+=${3 - column}}} END {{print s}}' {name} > {other}",),
            )
        case "find":
            third, another = words.pop(), names.pop()
            files = [(name, f"{second}\n{word}\n"), (other, f"{third}\n"), (another, f"{words.pop()}\n")]
            rng.shuffle(files)
            return Goal(
                kind=kind,
                text=f"Find the file with {word} and delete it",
                files=tuple(files),
                tests=(f"test ! -e {name}", f"test ! -e {name} && grep -qx {third} {other}"),
                solution=(f"grep -l {word} *", f"rm {name}"),
                confused=(f"grep -l {word} *", f"cat {name}"),
            )
        case _:
            raise TaskError(f"tasks: family files: there is no goal {kind!r}: choose one of {', '.join(_KINDS)}")


FAMILIES: Mapping[str, Family] = {"files": _make_files_goals}
