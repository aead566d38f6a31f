"""Shell. `gyre process NAME RUN_DIR`: each process of a run by itself, with what it needs of other folders."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gyre.cli.apps import (
    RunPath,
    process_app,
)
from gyre.cli.wiring import find_run
from gyre.errors import ConfigError, MissingError

if TYPE_CHECKING:
    from gyre.config import Config
    from gyre.events.log import Log, Writer
    from gyre.events.run_dir import RunDir


REST_S = 0.5
"""Between two looks at the log, for a reader that nobody waits for."""


@process_app.command("gateway", epilog="Example: `gyre process gateway runs/quickstart`")
def process_gateway(run_path: RunPath) -> None:
    """Harness requests in, call events out."""
    from gyre.agents.checkpoint import load_renderer
    from gyre.agents.gateway import run_gateway
    from gyre.workers.engine import SglangEngine

    async def work(log: "Log", writer: "Writer", config: "Config") -> None:
        run_dir = find_run(run_path)

        run_dir.socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        port_file = run_dir.path / "gateway.port"

        def ready(port: int) -> None:
            port_file.write_text(str(port))

        async with AsyncExitStack() as engines:

            def engine_for(url: str) -> SglangEngine:
                engine = SglangEngine(url, call_timeout_s=config.engine.call_timeout_s)
                engines.push_async_callback(engine.close)
                return engine

            await run_gateway(
                log,
                writer,
                config,
                engine_for=engine_for,
                renderer=load_renderer(config.policy.path),
                socket_path=run_dir.socket,
                host=config.gateway.host,
                port=config.gateway.port,
                last_port=int(port_file.read_text() or 0) if port_file.exists() else 0,
                ready=ready,
            )

    _process(run_path, "gateway", work)


@process_app.command("dispatcher", epilog="Example: `gyre process dispatcher runs/quickstart`")
def process_dispatcher(
    run_path: RunPath,
    unsafe_no_sandbox: Annotated[bool, typer.Option("--unsafe-no-sandbox", help="As for `gyre run`.")] = False,
) -> None:
    """Groups and executions: sandboxes, harnesses, scores."""
    import secrets

    from gyre.agents.dispatcher import Dispatcher
    from gyre.agents.execution import HarnessRunner
    from gyre.agents.sandboxes import open_sandbox

    async def work(log: "Log", writer: "Writer", config: "Config") -> None:
        run_dir = find_run(run_path.resolve())
        sandbox = open_sandbox(config.harness, unsafe=unsafe_no_sandbox, gateway_host=config.gateway.host)
        sandbox.end_strays(run_dir.path)
        port = await wait_for_port(run_dir, config.gateway.host) if config.harness.sandbox in ("none", "harbor") else 0
        runner = HarnessRunner(
            config.harness,
            sandbox,
            socket_path=run_dir.socket,
            gateway_url=f"http://{config.gateway.host}:{port}",
            engine=config.engine,
            sampling=config.sampling,
        )
        dispatcher = Dispatcher(
            log,
            writer,
            config,
            runner=runner,
            run_dir=run_dir.path,
            mint=lambda: secrets.token_hex(8),
            gateway=None if port else partial(wait_for_socket, run_dir.socket),
        )
        await dispatcher.run()

    _process(run_path, "dispatcher", work)


@process_app.command("projector", epilog="Example: `gyre process projector runs/quickstart`")
def process_projector(run_path: RunPath) -> None:
    """The log into DuckDB, and SQL for whoever asks."""
    from gyre.projections.projector import run_projector

    async def work(log: "Log", writer: "Writer", config: "Config") -> None:
        await run_projector(log, writer, run_dir=find_run(run_path).path)

    _process(run_path, "projector", work, rest_s=REST_S)


@process_app.command("scheduler", epilog="Example: `gyre process scheduler runs/quickstart --name standby`")
def process_scheduler(
    run_path: RunPath, name: Annotated[str, typer.Option(help="Of one beside the run's own: it stands by.")] = ""
) -> None:
    """Decisions from the log, commands to cells."""
    from gyre.workers.scheduler_loop import run_scheduler

    async def work(log: "Log", writer: "Writer", config: "Config") -> None:
        await run_scheduler(log, writer, config, clock=time.time)

    _process(run_path, f"scheduler-{name}" if name else "scheduler", work)


Cell = Annotated[
    str, typer.Option(help="Its name: c0 is the core, c1, c2, ... are satellites, p0, p1, ... standalone engines.")
]


Host = Annotated[str, typer.Option(help="Address under which other hosts reach it. Default: cells.advertise.")]
Policy = Annotated[str, typer.Option(help="The run's policy on this host. Default: policy.path.")]


@process_app.command("cell", epilog="Example: `gyre process cell runs/elastic --cell c1`")
def process_cell(run_path: RunPath, cell: Cell = "c0", advertise: Host = "", policy: Policy = "") -> None:
    """One elastic cell: an engine and a trainer, one role at a time."""
    import msgspec

    from gyre.workers.cell import run_cell, with_store

    async def work(log: "Log", writer: "Writer", config: "Config") -> None:
        config = _on_this_host(config, advertise, policy)
        run_dir = find_run(run_path)
        engine = with_store(config.engine, run_dir.load_address().kv_store)
        config = msgspec.structs.replace(config, engine=engine)
        trainer = ("-m", "gyre.cli", "process", "trainer", str(run_path), "--cell", cell)
        await run_cell(
            log,
            writer,
            config,
            cell_id=cell,
            index=_index(config, cell),
            run_dir=run_dir.path,
            host=config.cells.advertise,
            trainer=(*trainer, "--advertise", config.cells.advertise, "--policy", config.policy.path),
        )

    _process(run_path, "cell", work, cell)


@process_app.command("trainer", epilog="Example: `gyre process trainer runs/elastic --cell c1`")
def process_trainer(run_path: RunPath, cell: Cell = "c0", advertise: Host = "", policy: Policy = "") -> None:
    """The trainer of a cell: cohorts in, steps and weights out; of a satellite, gradients out."""
    from gyre.workers.ranks import follow, is_follower, leading
    from gyre.workers.satellite import run_satellite
    from gyre.workers.trainer import Trainer
    from gyre.workers.trainer_loop import run_trainer

    if is_follower():
        end_with_parent()
        follow(Trainer)
        return

    async def work(log: "Log", writer: "Writer", config: "Config") -> None:
        config = _on_this_host(config, advertise, policy)
        run_dir, folder, host = find_run(run_path).path, Path(config.policy.path), config.cells.advertise
        index = _index(config, cell)
        with leading() as ranks:
            mine: dict[str, Any] = {
                "cell_id": cell,
                "policy_dir": folder,
                "ranks": ranks,
                "host": host,
                "run_dir": run_dir,
            }
            if index:
                await run_satellite(log, writer, config, **mine)
            else:
                await run_trainer(log, writer, config, **mine)

    _process(run_path, "trainer", work, cell)


@process_app.command("ranks", epilog="Example: `gyre cell ranks 10.0.0.2:29500 --hosts 2 --ranks 8` starts it.")
def process_ranks() -> None:
    """A rank of a cell's trainer, started by torchrun on a host that is not the cell's first."""
    from gyre.workers.ranks import follow
    from gyre.workers.trainer import Trainer

    end_with_parent()
    follow(Trainer)


def _on_this_host(config: "Config", advertise: str, policy: str) -> "Config":
    """What is another on each host; the rest is the run's."""
    import msgspec

    replace = msgspec.structs.replace
    cells = replace(config.cells, advertise=advertise or config.cells.advertise)
    return replace(config, cells=cells, policy=replace(config.policy, path=policy or config.policy.path))


def _index(config: "Config", cell: str) -> int:
    """Its place in the fixed order. Raises ConfigError for a cell that the run does not have."""
    if cell not in config.cells.names:
        raise ConfigError(
            f"cell {cell}: the run has {', '.join(config.cells.names)}: cells.count is {config.cells.count}, "
            f"cells.pool is {config.cells.pool}"
        )
    return config.cells.names.index(cell)


def _process(
    path: Path,
    name: str,
    work: "Callable[[Log, Writer, Config], Awaitable[None]]",
    cell: str = "c0",
    rest_s: float = 0.0,
) -> None:
    """Run one process over the run's log until its work is done, or SIGTERM.

    `cell`: that it is of, if of any. `rest_s`: it looks for new events so often, rather than be told of each.
    """
    import uvloop

    from gyre import __version__
    from gyre.config import CORE, decode_config
    from gyre.events.access import connect_run
    from gyre.events.log import open_writer
    from gyre.projections.progress import Progress
    from gyre.workers.supervisor import KILL_GRACE_S

    end_with_parent()

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None

        def end() -> None:
            signal.alarm(int(KILL_GRACE_S))  # the end of a supervisor that was killed is nobody's to enforce but ours
            task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
        async with connect_run(find_run(path), rest_s=rest_s) as log:
            progress = Progress()
            async for recorded in log.read(1, until=await log.last_seq()):
                progress.evolve(recorded)
            if not progress.config:
                raise MissingError(f"{path}: the log has no run.started yet; start the run with `gyre run`")
            if (theirs := progress.versions.get("gyre", __version__)) != __version__:
                raise ConfigError(
                    f"{name} {cell}: this is gyre {__version__}, the run goes on with gyre {theirs}; install that one, "
                    "so that all processes fold the log alike"
                )
            writer = await open_writer(log, name if cell == CORE else f"{name}-{cell}", time.time_ns)
            await work(log, writer, decode_config(progress.config))

    try:
        uvloop.run(main())
    except asyncio.CancelledError:
        raise typer.Exit(0) from None


def end_with_parent() -> None:
    """Where this process was started to end with its parent: with torchrun, if that started it."""
    from gyre.events.parent import die_with

    if parent := os.environ.get("GYRE_PARENT"):
        die_with(os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else int(parent))


async def wait_for_socket(path: Path) -> None:
    """Until the gateway listens: the file may be of a gateway before this one."""
    while True:
        try:
            _, writer = await asyncio.open_unix_connection(path)
            writer.close()
            return
        except OSError:
            await asyncio.sleep(0.05)


async def wait_for_port(run_dir: "RunDir", host: str) -> int:
    """The gateway's TCP port, once it listens: the file may be of a gateway before this one."""
    path = run_dir.path / "gateway.port"
    while True:
        try:
            port = int(path.read_text())
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
            return port
        except (OSError, ValueError):
            await asyncio.sleep(0.05)
