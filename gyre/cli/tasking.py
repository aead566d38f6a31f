"""Shell. Commands about tasks: `gyre tasks list`, `check` and `from-sdist`."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gyre.cli.apps import tasks_app
from gyre.cli.wiring import plain_console

if TYPE_CHECKING:
    from gyre.agents.places import AnySandbox
    from gyre.agents.task_check import Checked

Directory = Annotated[Path, typer.Argument(help="A folder with a task.toml, or a folder of such folders.")]


@tasks_app.command("list", epilog="Example: `gyre tasks list examples/tasks`")
def tasks_list(directory: Directory) -> None:
    """The tasks of a directory: name, time limits, first line of the instruction."""
    from rich.table import Table

    from gyre.agents.task_folder import load_tasks

    table = Table("task", "agent", "verifier", "instruction", box=None)
    for task in load_tasks(directory):
        assert task.folder is not None
        first = next((line.strip("# ") for line in task.instruction.splitlines() if line.strip()), "")
        table.add_row(task.id, f"{task.folder.agent_s:g} s", f"{task.folder.verifier_s:g} s", first)
    plain_console().print(table)


@tasks_app.command(
    "check", epilog="Examples: `gyre tasks check examples/tasks` - `gyre tasks check mytasks.py:reverse --num-goals 3`"
)
def tasks_check(
    source: Annotated[
        str,
        typer.Argument(
            metavar="DIRECTORY|FAMILY",
            help="A folder with a task.toml, or a folder of such folders; or a family, as `tasks.family` names it.",
        ),
    ],
    parallel: Annotated[int, typer.Option(help="Tasks at the same time.", min=1)] = 2,
    num_goals: Annotated[int, typer.Option(help="Of a family: goals of one task.", min=1)] = 2,
    kind: Annotated[
        Literal["bubblewrap", "docker", "podman"], typer.Option("--sandbox", help="As `harness.sandbox`.")
    ] = "bubblewrap",
    image: Annotated[str, typer.Option(help="Of containers, as `harness.image`.")] = "python:3.11-slim",
    unsafe_no_sandbox: Annotated[bool, typer.Option("--unsafe-no-sandbox", help="As for `gyre run`.")] = False,
) -> None:
    """Run the empty solution, the partial ones and the oracle of each task, and say whether it grades them right.

    Of a family: of its first tasks, some to train on and some held out.
    """
    from gyre.agents.containers import require_container
    from gyre.agents.sandboxes import open_sandbox
    from gyre.config import HarnessConfig

    config = HarnessConfig(sandbox="none" if unsafe_no_sandbox else kind, image=image)
    require_container(config.sandbox, image)
    sandbox = open_sandbox(config, unsafe=unsafe_no_sandbox)
    checked = asyncio.run(_check_all(_checks(source, num_goals, sandbox), parallel))
    wrong = sum(not each.ok for each in checked)
    print(f"{len(checked)} checked, {wrong} wrong")
    if wrong:
        raise typer.Exit(1)


@tasks_app.command(
    "from-sdist",
    epilog="Example: `pip download --no-deps --no-binary :all: inflection==0.5.1`, then "
    "`gyre tasks from-sdist inflection-0.5.1.tar.gz tasks/inflection`",
)
def tasks_from_sdist(
    archive: Annotated[Path, typer.Argument(help="The source distribution of a package of pure Python.")],
    directory: Annotated[Path, typer.Argument(help="Where the task is written: a new folder.")],
    sha256: Annotated[str, typer.Option(help="That the archive must have.")] = "",
    unsafe_no_sandbox: Annotated[bool, typer.Option("--unsafe-no-sandbox", help="As for `gyre run`.")] = False,
) -> None:
    """Make a task of a package: to write it from its README in an empty workspace, with its own tests as the verifier.

    They run in bubblewrap, which has to be there.
    """
    from gyre.agents.sandboxes import usual_sandbox
    from gyre.agents.sdist_task import make_task
    from gyre.agents.task_folder import load_task

    made = make_task(archive, directory, usual_sandbox(unsafe=unsafe_no_sandbox), sha256=sha256)
    folder = load_task(directory).folder
    assert folder is not None
    print(f"{made.name} {made.version}, {made.license or 'its license is not said'}: {folder.num_tests} tests count")
    print(f"next:\n  gyre tasks check {directory}")


def _checks(source: str, num_goals: int, sandbox: "AnySandbox") -> "list[Coroutine[None, None, Checked]]":
    """One a task, not begun yet."""
    from gyre.agents.task_check import check_folder, check_task
    from gyre.agents.task_folder import find_folders
    from gyre.agents.task_source import find_families
    from gyre.agents.tasks import FAMILIES, make_task

    if Path(source).is_dir() or (":" not in source and source not in FAMILIES):
        return [check_folder(folder, sandbox) for folder in find_folders(Path(source))]
    family, families = find_families(source)
    tasks = [make_task(family, split, 0, n, num_goals, families) for split in ("train", "heldout") for n in range(4)]
    return [check_task(task, sandbox) for task in tasks]


async def _check_all(checks: "list[Coroutine[None, None, Checked]]", parallel: int) -> "list[Checked]":
    turn = asyncio.Semaphore(parallel)

    async def check(one: "Coroutine[None, None, Checked]") -> "Checked":
        async with turn:
            checked = await one
            print(checked.line(), flush=True)
            return checked

    return await asyncio.gather(*map(check, checks))
