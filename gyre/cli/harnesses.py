"""Shell. Commands about the agent programs: `gyre harness list`, `install`, `check`."""

from typing import Annotated

import typer

from gyre.cli.apps import harness_app
from gyre.cli.wiring import plain_console, say
from gyre.errors import ConfigError, HarnessError


@harness_app.command("list", epilog="Example: `gyre harness list`")
def harness_list() -> None:
    """Which harnesses there are, and which are installed."""
    from rich.table import Table

    from gyre.agents.harness_install import installed
    from gyre.agents.harnesses import RECIPES

    table = Table("harness", "version", "state", "about", box=None)
    for column in table.columns[:3]:
        column.no_wrap = True
    for name, recipe in RECIPES.items():
        state = "ready" if installed(name) else f"gyre harness install {name}"
        table.add_row(name, recipe.version, state, recipe.about)
    plain_console().print(table)


@harness_app.command("install", epilog="Example: `gyre harness install mini-swe-agent`")
def harness_install(name: Annotated[str, typer.Argument(help="As `gyre harness list` shows it.")]) -> None:
    """Install a harness, unmodified, in an environment of its own."""
    from gyre.agents.harness_install import install, installed

    if not installed(name):
        say(f"{name}: being installed, which takes minutes")
    print(f"{name}: {install(name) or 'comes with gyre'}")


@harness_app.command(
    "check",
    epilog="Examples: `gyre harness check claude-code` - `gyre harness check codex --scenario compaction` - "
    "`gyre harness check --install`",
)
def harness_check(
    name: Annotated[str, typer.Argument(help="As `gyre harness list` shows it. Default: all that are installed.")] = "",
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGV]...", help="Of NAME `command`: the program and its arguments.")
    ] = None,
    folder: Annotated[str, typer.Option(help="For `command`: a directory that the sandbox shows, read-only.")] = "",
    scenario: Annotated[list[str] | None, typer.Option(help="One of them; may be given again. Default: all.")] = None,
    install_first: Annotated[bool, typer.Option("--install", help="Install what is missing.")] = False,
    deadline_s: Annotated[float, typer.Option("--deadline", min=1, help="Seconds after which it is stopped.")] = 180.0,
    unsafe_no_sandbox: Annotated[bool, typer.Option("--unsafe-no-sandbox", help="As for `gyre run`.")] = False,
) -> None:
    """Put harnesses through what agents meet, against the gateway and a scripted policy, and show what comes out.

    Each scenario starts the harness once in bubblewrap: main, sub-agent, twins, background, compaction, retry, cut,
    cut-after-block. The tree of its calls is compared with the one that was written down by hand: what each call was
    for, where histories fork and why. `to the id`: calls that begin with exactly the token ids of the call that they go
    on from, of all that share its history. Ends with 1 if anything is not as expected.
    """
    import asyncio

    from gyre.agents.harness_check import check_harness, read_expected
    from gyre.agents.harness_findings import close
    from gyre.agents.harness_install import install, installed, require
    from gyre.agents.harnesses import RECIPES, find_recipe
    from gyre.agents.sandboxes import usual_sandbox
    from gyre.agents.scenarios import SCENARIOS

    if unknown := set(scenario or ()) - set(SCENARIOS):
        raise ConfigError(f"--scenario {', '.join(unknown)}: choose of {', '.join(SCENARIOS)}")
    if name == "command" and not command:
        raise ConfigError("gyre harness check command: which? add -- my-agent --base-url {base_url}")
    if name != "command" and folder:
        raise ConfigError("gyre harness check: --folder is of `command`")
    names = [name] if name else [recipe.name for recipe in RECIPES.values() if recipe.kind != "command"]
    sandbox = usual_sandbox(unsafe=unsafe_no_sandbox)
    checks, absent = [], {}
    for each in names:
        print(f"{each} {find_recipe(each).version}".rstrip(), flush=True)
        try:
            if install_first and not installed(each):
                print(f"  {'..':<3} being installed", flush=True)
                install(each)
            require(each)
        except HarnessError as error:
            absent[each] = str(error)
            print(f"  {'--':<3} not run: {error}", flush=True)
            continue
        for which in scenario or (SCENARIOS if read_expected(each) else ["main"]):
            argv = tuple(command or ())
            check = asyncio.run(
                check_harness(each, sandbox, SCENARIOS[which], command=argv, folder=folder, deadline_s=deadline_s)
            )
            print("\n".join(check.lines()), flush=True)
            checks.append(check)
    print(close(checks, absent))
    if (name and absent) or not all(check.ok for check in checks):
        raise typer.Exit(1)
