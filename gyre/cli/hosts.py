"""Shell. Commands for the other hosts of a run: `gyre cell --nats URL`, and `gyre cell ranks`.

A host gets a run directory of its own, with what a cell leaves on disk: its logs. All else comes over the log.
"""

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from gyre.cli.apps import cell_app
from gyre.errors import ConfigError, ProcessError


@cell_app.callback(
    invoke_without_command=True,
    epilog="Example, on another host: `gyre cell --nats nats://10.0.0.1:4222 --run elastic --cell c1 "
    "--advertise 10.0.0.2 --dir runs/elastic`",
)
def cell(
    context: typer.Context,
    nats: Annotated[str, typer.Option(help="The run's NATS server, or several with commas; a login in --creds.")] = "",
    run: Annotated[str, typer.Option(help="Name of the run, as `gyre runs` shows it where it was started.")] = "",
    name: Annotated[str, typer.Option("--cell", help="c1, c2, ...: one of the last `cells.elsewhere`.")] = "",
    advertise: Annotated[
        str, typer.Option(help="Address of this host, as the others reach it. Default: cells.advertise.")
    ] = "",
    policy: Annotated[
        Path | None, typer.Option(help="The policy that the run began with, on this host. Default: policy.path.")
    ] = None,
    directory: Annotated[Path | None, typer.Option("--dir", help="Of its logs. Default: runs/RUN-CELL.")] = None,
    creds: Annotated[
        Path | None, typer.Option(help="NATS creds file; or a token, or user:password, in GYRE_NATS_TOKEN.")
    ] = None,
    tls_ca: Annotated[Path | None, typer.Option(help="PEM file of what signs the server's certificate.")] = None,
) -> None:
    """Serve and train as one cell of a run on another host; or take a cell of a running run out of use, and back."""
    if context.invoked_subcommand:
        return
    if not (nats and run and name):
        missing = [option for option, value in (("--nats", nats), ("--run", run), ("--cell", name)) if not value]
        raise ConfigError(f"gyre cell: {', '.join(missing)}: missing; `gyre cell --help` has an example")
    from gyre.cli.apps import RUNS
    from gyre.events.run_dir import Address, RunDir
    from gyre.workers.output import tell

    run_dir = RunDir((directory or RUNS / f"{run}-{name}").resolve())
    address = Address(
        run=run,
        url=nats,
        token=os.environ.get("GYRE_NATS_TOKEN", ""),
        tls_ca=str(tls_ca.absolute()) if tls_ca else "",
        credentials=str(creds.absolute()) if creds else "",
    )
    argv = [sys.executable, "-m", "gyre.cli", "process", "cell", str(run_dir.path), "--cell", name]
    argv += ["--advertise", advertise] if advertise else []
    argv += ["--policy", str(policy.absolute())] if policy else []
    with run_dir.lock():
        run_dir.save_address(address)
        tell(f"cell {name} of run {run}: logs in {run_dir.logs}")
        _keep(f"cell-{name}", argv, {}, run_dir.logs)


@cell_app.command("ranks", epilog="Example, on a cell's second host: `gyre cell ranks 10.0.0.2:29500 --hosts 2`")
def ranks(
    rendezvous: Annotated[str, typer.Argument(help="HOST:PORT of the cell's first host, as in cells.rendezvous.")],
    hosts: Annotated[int, typer.Option(min=2, help="As cells.hosts.")] = 2,
    host: Annotated[int, typer.Option(min=1, help="Which of them this is: 1, 2, ...; the first is 0.")] = 1,
    per_host: Annotated[int, typer.Option("--ranks", min=1, help="As cells.ranks_per_host.")] = 1,
    directory: Annotated[Path, typer.Option("--dir", help="Of their log.")] = Path("runs/ranks"),
) -> None:
    """The ranks of a cell's trainer on a host that is not its first: they meet at HOST:PORT, again and again."""
    from gyre.config import is_host_port
    from gyre.events.run_dir import RunDir
    from gyre.workers.cell import torchrun

    if not is_host_port(rendezvous):
        raise ConfigError(f"gyre cell ranks: {rendezvous!r} is no HOST:PORT, as in 10.0.0.2:29500 (cells.rendezvous)")

    program = ("-m", "gyre.cli", "process", "ranks")
    argv = torchrun(program, num_hosts=hosts, host=host, ranks_per_host=per_host, rendezvous=rendezvous)
    run_dir = RunDir(directory.resolve())
    with run_dir.lock():
        _keep("ranks", argv, {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}, run_dir.logs)


def _keep(name: str, argv: Sequence[str], env: Mapping[str, str], logs: Path) -> None:
    """One process, started again whenever it dies, until its work is done. Raises ProcessError when it keeps dying."""
    from gyre.workers.children import last_words, spawn
    from gyre.workers.output import tell
    from gyre.workers.supervisor import Deaths

    log_file = logs / f"{name}.log"

    async def work() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        deaths = Deaths(itertools.count().__next__)
        while True:
            deaths.born()
            child = await spawn(argv, env=env, log_file=log_file)
            try:
                code = await child.wait()
            finally:
                await child.stop()
            if code == 0:
                return
            if not deaths.died(code):
                raise ProcessError(f"{name}: ended with {code}: {last_words(log_file)}; all of it: {log_file}")
            tell(f"{name}: ended with {code}, is started again", sys.stderr)
            await asyncio.sleep(deaths.pause_s)

    try:
        asyncio.run(work())
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise typer.Exit(130) from None
