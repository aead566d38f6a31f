"""Shell. `gyre grade`: the kept workspaces of a run, graded again."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gyre.cli.apps import RunPath, app
from gyre.cli.wiring import config_of, find_run, with_log
from gyre.errors import ConfigError

if TYPE_CHECKING:
    from gyre.agents.tasks import Task
    from gyre.events.log import Log


@app.command(epilog="Examples: `gyre grade runs/tasks --with tests` - `gyre grade runs/tasks --with other/tasks`")
def grade(
    run_path: RunPath,
    grader: Annotated[
        str,
        typer.Option(
            "--with", help="`tests`: the tasks' own tests; or a directory of tasks of the same names with other tests."
        ),
    ] = "tests",
    execution: Annotated[str, typer.Option(help="Only this one. Default: all that have a snapshot.")] = "",
    parallel: Annotated[int, typer.Option(help="Graders at the same time.", min=1)] = 2,
    unsafe_no_sandbox: Annotated[bool, typer.Option("--unsafe-no-sandbox", help="As for `gyre run`.")] = False,
) -> None:
    """Grade the snapshots of a finished run again. New events say what came out; no score and no batch changes.

    In a sandbox of the run's own kind (`harness.sandbox`).
    """
    import time

    from gyre.agents.containers import require_container
    from gyre.agents.regrading import Regrading
    from gyre.agents.sandboxes import open_sandbox
    from gyre.agents.task_folder import load_tasks
    from gyre.agents.task_source import TaskSource
    from gyre.events.log import open_writer
    from gyre.projections.rebuild import rebuild

    run_dir, config = find_run(run_path), config_of(run_path)
    others: dict[str, Task] = {}
    if grader != "tests":
        others = {task.id: task for task in load_tasks(Path(grader))}
    require_container(config.harness.sandbox, config.harness.image)
    sandbox = open_sandbox(config.harness, unsafe=unsafe_no_sandbox)  # that of the run: the same programs are there
    source = TaskSource(config)

    def find(purpose: str, index: int, name: str) -> "Task":
        if not others:
            return source.get(purpose, index)
        if name not in others:
            raise ConfigError(f"gyre grade: --with {grader}: it has no task {name}, which the run has")
        return others[name]

    async def work(log: "Log", live: bool) -> None:
        if live:
            raise ConfigError(f"{run_path}: the run goes on; grade it again when it is finished")
        writer = await open_writer(log, "grader", time.time_ns)
        regrading = Regrading(log, writer, sandbox, run_dir.path, grader, find)
        await regrading.run(execution, parallel, lambda line: print(line, flush=True))
        await rebuild(log, run_dir.tables)

    with_log(run_path, work, access="owner")
