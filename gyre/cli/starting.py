"""Shell. From a config to a supervised run: what is checked before anything starts, then `run_to_the_end`."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gyre.cli.apps import (
    RUNS,
)
from gyre.errors import ConfigError, MissingError

if TYPE_CHECKING:
    from gyre.config import Config
    from gyre.events.run_dir import RunDir
    from gyre.projections.progress import Progress


def read_config(path: Path) -> "Config":
    from gyre.config import load_config

    try:
        return load_config(path.read_text(), str(path))
    except FileNotFoundError:
        raise MissingError(f"{path}: no such config; examples/ has some to start from") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read: {reason}; give a YAML file, as in examples/") from None


def check_before_start(config: "Config", unsafe: bool) -> None:
    """What would fail only after minutes fails here at once, in one line."""
    from gyre.agents.checkpoint import load_renderer
    from gyre.agents.containers import require_container
    from gyre.agents.harness_install import require
    from gyre.agents.harnesses import find_recipe
    from gyre.agents.sandboxes import open_sandbox
    from gyre.agents.task_source import TaskSource
    from gyre.config import EMBEDDED
    from gyre.events.access import check_reachable
    from gyre.workers.doctor import missing_for_run
    from gyre.workers.run import own_server

    if config.sampling.temperature == 0 and config.pipeline.num_steps:
        raise ConfigError(
            "sampling.temperature: 0 is greedy: the executions of a group would be alike, with nothing to train on; "
            "give one above 0 (evaluation.temperatures has that of evaluations)"
        )
    find_recipe(config.harness.name)
    require(config.harness.name)
    if config.harness.pauses_s and config.harness.name != "reference":
        raise ConfigError(f"harness.pauses_s: of the reference harness, but harness.name is {config.harness.name}")
    if config.harness.folder and config.harness.name != "command":
        raise ConfigError(f"harness.folder: of `name: command`, but harness.name is {config.harness.name}")
    if config.scheduler.policy == "static" and config.scheduler.num_training >= len(config.cells.names):
        raise ConfigError(
            f"scheduler: policy static with num_training {config.scheduler.num_training} leaves none of "
            f"{config.cells.count} cells to serve: raise cells.count or cells.pool, or take another policy"
        )
    if config.engine.kv_store == EMBEDDED and config.cells.elsewhere:
        raise ConfigError(
            f"engine.kv_store: embedded, but cells.elsewhere is {config.cells.elsewhere}: start a store that all hosts "
            "reach (python -m gyre.workers.kv_store), and give its host:port"
        )
    open_sandbox(config.harness, unsafe=unsafe)
    require_container(config.harness.sandbox, config.harness.image)
    TaskSource(config)  # a wrong task is an error now, not in the dispatcher
    if missing := missing_for_run():
        raise MissingError(f"not installed: {', '.join(missing)}; run: make setup (gyre doctor says more)")
    path = Path(config.policy.path)
    if path.is_dir():
        from gyre.workers.policy_files import check_policy  # safetensors is there, then

        check_policy(path)
        load_renderer(path)  # raises PolicyError for a template that gyre cannot continue
    elif path.exists():
        raise ConfigError(f"policy.path: {path}: is a file; give a directory in Hugging Face format")
    elif not config.policy.init:
        raise MissingError(f"policy.path: {path}: no such directory; make one with `gyre policy init {path}`")
    if config.log.url:
        asyncio.run(check_reachable(own_server(config.log)))


def ensure_policy(config: "Config") -> None:
    """Make the policy in a process of its own, so that this one never loads torch. It ends with this one."""
    import subprocess

    from gyre.agents.tasks import FAMILIES
    from gyre.events.parent import die_with
    from gyre.workers.output import tell

    if Path(config.policy.path).is_dir():
        return
    # Demonstrations are played in a shell that knows the commands of gyre's own families.
    family = config.tasks.family if config.tasks.family in FAMILIES else "files"
    kind = "--warm-start" if config.policy.warm_start else "--random"
    argv = [sys.executable, "-m", "gyre.cli", "policy", "init", config.policy.path, "--seed", str(config.seed), kind]
    argv += ["--family", family, "--num-goals", str(config.tasks.num_goals)]
    argv += ["--num-threads", str(config.trainer.num_threads)]
    tell(f"policy.path: {config.policy.path}: not there yet: a tiny policy is made, which takes minutes")
    if subprocess.run(argv, check=False, preexec_fn=partial(die_with, os.getpid(), signal.SIGKILL)).returncode:
        raise MissingError(f"policy.path: {config.policy.path}: could not be made; see above")


def run_to_the_end(
    run_dir: "RunDir",
    config: "Config",
    unsafe: bool,
    lock: int,
    *,
    quiet: bool = False,
    policy_of: tuple[str, int] = ("", 0),
) -> "Progress":
    """Supervise all processes of a run, until it is over. The directory is locked by the caller.

    `policy_of`: run and step of the checkpoint that is evaluated."""
    import uvloop
    from rich.console import Console

    from gyre.agents.harness_install import own_folder
    from gyre.workers.doctor import versions
    from gyre.workers.output import tell
    from gyre.workers.run import run as supervise

    run_id = run_id_of(run_dir)
    own_folder(config.harness.folder, run_dir.path)
    extra = ("--unsafe-no-sandbox",) if unsafe else ()

    def argv(name: str) -> Sequence[str]:
        name, _, which = name.partition("-")  # cell, cell-c1, cell-c2, ..., scheduler, scheduler-2, ...
        option = "--name" if name == "scheduler" else "--cell"
        flags = (option, which) if which else extra if name == "dispatcher" else ()
        return (sys.executable, "-m", "gyre.cli", "process", name, str(run_dir.path), *flags)

    if not quiet:
        tell(f"run {run_id} in {run_dir.path}")
    console = Console(stderr=quiet)
    work = supervise(
        run_dir, config, run_id, argv=argv, versions=versions(), lock=lock, console=console, policy_of=policy_of
    )
    return uvloop.run(work)


def exit_unless_completed(progress: "Progress") -> None:
    """130 for a run that was interrupted, 3 for one that a guard paused, 1 for one that failed."""
    finished = progress.finished
    if finished is None or finished.reason != "completed":
        raise typer.Exit({"interrupted": 130, "paused": 3}.get(finished.reason, 1) if finished is not None else 1)


def choose_run_dir(asked: Path | None, stem: str) -> "RunDir":
    """What --dir says; else runs/<stem>, or the first free runs/<stem>-N. Raises ConfigError for what cannot be one."""
    from gyre.events.run_dir import RunDir

    stem = re.sub(r"[^\w-]", "-", stem, flags=re.ASCII)[:60]
    paths = (RUNS / (stem if n == 1 else f"{stem}-{n}") for n in range(1, 10000))
    path = asked or next(path for path in paths if not path.exists())
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--dir {path}: is a file; give a directory, new or of an unfinished run")
    run_dir = RunDir(path)
    if path.is_dir() and any(path.iterdir()) and not run_dir.was_used:
        raise ConfigError(f"--dir {path}: holds other things than a run; give a new directory, or of an unfinished run")
    run_id_of(run_dir)  # a name that cannot be one is an error now, not when a policy has been made
    return run_dir


def run_id_of(run_dir: "RunDir") -> str:
    """The directory's name, so that subjects and paths say the same."""
    from gyre.events.subjects import check_token

    if run_dir.address_file.exists():
        return run_dir.load_address().run
    return check_token(run_dir.path.resolve().name, "run directory")


def export_checkpoint(run_path: Path, target: Path, step: int) -> None:
    """In a process of its own, so that this one never loads torch."""
    import subprocess

    argv = [sys.executable, "-m", "gyre.cli", "policy", "export", str(run_path), str(target), "--step", str(step)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MissingError(done.stderr.strip().rpartition("\n")[2].removeprefix("gyre: "))
