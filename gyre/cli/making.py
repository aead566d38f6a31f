"""Shell. Commands that make what a run needs: `gyre policy`, `harness`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gyre.cli.apps import RunPath, harness_app, policy_app
from gyre.cli.wiring import config_of, find_run
from gyre.errors import ConfigError

if TYPE_CHECKING:
    pass


@policy_app.command("init", epilog="Example: `gyre policy init policies/tiny --seed 1`")
def policy_init(
    path: Annotated[Path, typer.Argument(help="Directory to make.")] = Path("policies/tiny"),
    seed: Annotated[int, typer.Option(help="Fixes tokenizer, weights and warm start.")] = 1,
    family: Annotated[str, typer.Option(help="Family of tasks that it is warmed up on.")] = "files",
    num_goals: Annotated[int, typer.Option(help="Goals of one task.")] = 2,
    warm_start: Annotated[bool, typer.Option("--warm-start/--random", help="Supervised steps first, or none.")] = True,
    num_threads: Annotated[int, typer.Option(help="Threads of the warm start.")] = 2,
    size: Annotated[str, typer.Option(help="tiny: 0.6 million parameters; small: 1.7 million.")] = "tiny",
) -> None:
    """Make a tiny policy: tokenizer, template and weights, warmed up on oracle demonstrations."""
    from gyre.workers.tiny_policy import SHAPES, init_policy

    if size not in SHAPES:
        raise ConfigError(f"--size {size}: choose one of {', '.join(SHAPES)}")
    if path.exists():
        raise ConfigError(f"{path}: exists already; choose another path or remove it")
    if not warm_start:
        print(f"{path}: {init_policy(path, seed, family=family, shape=SHAPES[size])}")
        return
    from gyre.workers.warm_start import warm_policy

    digest = warm_policy(
        path,
        seed,
        family=family,
        num_goals=num_goals,
        num_threads=num_threads,
        show=_show_warm_start,
        shape=SHAPES[size],
    )
    print(f"{path}: {digest}")


@policy_app.command("export", epilog="Example: `gyre policy export runs/quickstart out/policy`")
def policy_export(
    run_path: RunPath,
    target: Annotated[Path, typer.Argument(help="Directory to make, in Hugging Face format.")],
    step: Annotated[int, typer.Option(help="Step to export; 0: the last checkpoint.")] = 0,
) -> None:
    """Write a checkpoint of a run as a Hugging Face model directory."""
    run_dir = find_run(run_path)
    written = run_dir.kept_step(step)
    from gyre.workers.export import export_policy

    config = config_of(run_path)
    export_policy(run_dir.checkpoints / f"step-{written}", Path(config.policy.path), target, config.seed)
    print(f"{target}: the policy after step {written}")


@harness_app.command("list")
def harness_list() -> None:
    """Which harnesses there are, and which are installed."""
    from rich.console import Console
    from rich.table import Table

    from gyre.agents.harness_install import installed
    from gyre.agents.harnesses import RECIPES

    table = Table("harness", "version", "state", "about", box=None)
    for column in table.columns[:3]:
        column.no_wrap = True
    for name, recipe in RECIPES.items():
        state = "ready" if installed(name) else f"gyre harness install {name}"
        table.add_row(name, recipe.version, state, recipe.about)
    Console().print(table)


@harness_app.command("install", epilog="Example: `gyre harness install mini-swe-agent`")
def harness_install(name: Annotated[str, typer.Argument(help="As `gyre harness list` shows it.")]) -> None:
    """Install a harness, unmodified, in an environment of its own."""
    from gyre.agents.harness_install import install

    print(f"{name}: {install(name) or 'comes with gyre'}")


@harness_app.command("check", epilog="Examples: `gyre harness check claude-code` - `gyre harness check`")
def harness_check(
    name: Annotated[str, typer.Argument(help="As `gyre harness list` shows it. Default: all that are installed.")] = "",
    command: Annotated[list[str] | None, typer.Argument(metavar="[ARGV]...", help="For `command`.")] = None,
    deadline_s: Annotated[float, typer.Option("--deadline", help="Seconds after which it is stopped.")] = 90.0,
    unsafe_no_sandbox: Annotated[bool, typer.Option("--unsafe-no-sandbox", help="As for `gyre run`.")] = False,
) -> None:
    """Run a harness on a small task against the gateway and a scripted policy, and show what works."""
    import asyncio

    from gyre.agents.harness_check import check_harness
    from gyre.agents.harness_install import installed
    from gyre.agents.harnesses import RECIPES, find_recipe
    from gyre.agents.unsandboxed import open_sandbox

    programs = [recipe.name for recipe in RECIPES.values() if recipe.kind != "command"]
    names = [name] if name else [program for program in programs if installed(program)]
    sandbox = open_sandbox("none" if unsafe_no_sandbox else "bubblewrap", unsafe=unsafe_no_sandbox)
    failed = []
    for each in names:
        version = find_recipe(each).version
        check = asyncio.run(check_harness(each, sandbox, command=tuple(command or ()), deadline_s=deadline_s))
        print("\n".join([f"{each} {version}".rstrip(), *check.lines()]), flush=True)
        failed += [] if check.ok else [each]
    if not name:
        absent = ", ".join(program for program in programs if program not in names) or "none"
        print(f"{len(names)} checked, {len(failed)} failed; not installed, so not checked: {absent}")
    if failed:
        raise typer.Exit(1)


def _show_warm_start(text: str) -> None:
    print(text, flush=True)
