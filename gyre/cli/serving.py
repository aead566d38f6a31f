"""Shell. `gyre gateway`: in front of any SGLang server, a gateway that records every agent that points at it.

agents -> gateway -> SGLang, and all of it -> log -> tables. There is no dispatcher, scheduler or trainer: a session is
opened by whoever uses it first, and nothing is scored. The run directory is like any other: `gyre sql`, `tail` and
`tree` work on it.
"""

import asyncio
import json
import signal
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gyre.cli.apps import app
from gyre.cli.starting import choose_run_dir, run_id_of
from gyre.errors import ConfigError, MissingError

if TYPE_CHECKING:
    from gyre.config import Config
    from gyre.events.log import Log
    from gyre.events.run_dir import RunDir
    from gyre.workers.engine import SglangEngine

CALL_TIMEOUT_S = 1800.0
CELL = "c0"


@app.command(
    epilog="Example: `gyre gateway --engine http://sglang:30000 --policy models/qwen3-4b` - Ctrl-C ends it; "
    "the same --dir goes on."
)
def gateway(
    engine_url: Annotated[str, typer.Option("--engine", help="URL of an SGLang server.")],
    policy: Annotated[Path, typer.Option(help="The model that it serves: tokenizer and template, as a directory.")],
    directory: Annotated[Path | None, typer.Option("--dir", help="Run directory. Default: a new one.")] = None,
    port: Annotated[int, typer.Option(help="0: that of the last time in the same --dir, else any free one.")] = 0,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Whoever can reach it may use the engine.")
    ] = "127.0.0.1",
    context_tokens: Annotated[
        int, typer.Option("--context", help="Tokens of a call. Default: as the policy's config.json says.")
    ] = 0,
    temperature: Annotated[float, typer.Option(help="At which all sessions sample.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="At which they sample as well.")] = 1.0,
    call_deadline_s: Annotated[
        float, typer.Option("--call-deadline", help="Seconds after which a call is ended. 0: none.")
    ] = 0,
    session_deadline_s: Annotated[
        float,
        typer.Option(
            "--session-deadline", help="Seconds after its first call for which a session may make others. 0: no limit."
        ),
    ] = 0,
) -> None:
    """In front of any SGLang server, record every agent that points at this gateway; no training."""
    import uvloop

    from gyre.config import (
        Config,
        EngineConfig,
        GatewayConfig,
        PipelineConfig,
        PolicyConfig,
        SamplingConfig,
        checked,
    )

    if not engine_url.startswith(("http://", "https://")):
        raise ConfigError(f"--engine {engine_url}: give its URL, as in http://127.0.0.1:30000")
    context_tokens = context_tokens or _context_of(policy)
    config = Config(
        policy=PolicyConfig(path=str(policy.resolve()), init=False),
        sampling=SamplingConfig(temperature=temperature, top_p=top_p, max_tokens=context_tokens),
        engine=EngineConfig(context_tokens=context_tokens, call_timeout_s=CALL_TIMEOUT_S),
        pipeline=PipelineConfig(num_steps=0),
        gateway=GatewayConfig(
            host=host, port=port, call_deadline_s=call_deadline_s, session_deadline_s=session_deadline_s
        ),
    )
    config = checked(config, "gyre gateway")
    uvloop.run(serve(choose_run_dir(directory, "gateway"), config, engine_url))


async def serve(run_dir: "RunDir", config: "Config", engine_url: str) -> None:
    """Until Ctrl-C or SIGTERM: then what is in flight is finished briefly, and the tables are completed."""
    from gyre.agents.checkpoint import load_renderer
    from gyre.agents.gateway import run_gateway
    from gyre.events.log import open_writer
    from gyre.projections.progress import Progress
    from gyre.workers.doctor import versions
    from gyre.workers.engine import SglangEngine
    from gyre.workers.output import tell
    from gyre.workers.run import begin, open_run

    renderer = load_renderer(config.policy.path)
    port_file = run_dir.path / "gateway.port"
    last_port = int(port_file.read_text() or 0) if port_file.exists() else 0

    def ready(port: int) -> None:
        port_file.write_text(str(port))
        _tell(run_dir, f"http://{config.gateway.host}:{port}", engine_url)

    engine = SglangEngine(engine_url, call_timeout_s=CALL_TIMEOUT_S, plain=True)
    progress = Progress()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(engine)
        await engine.check_health()  # before there is a directory
        stack.enter_context(run_dir.lock())
        opened = await stack.enter_async_context(open_run(run_dir, config, run_id_of(run_dir), lambda: 0))
        log = opened.log
        writer = await open_writer(log, "supervisor", time.time_ns)
        last, epoch = await log.last_seq(), 1
        if last:
            async for recorded in log.read(1, until=last):
                progress.evolve(recorded)
                epoch = max(epoch, getattr(recorded.event, "epoch", 0) + 1)
        await begin(log, writer, config, versions(), progress)
        await _join(log, engine, epoch)
        async with asyncio.TaskGroup() as tasks:
            down = tasks.create_task(_watch(opened.serving))
            ending = tasks.create_task(_end_on_signal(log))
            projecting = tasks.create_task(_project(run_dir, opened.env("projector")))
            await run_gateway(
                log,
                await open_writer(log, "gateway", time.time_ns),
                config,
                engine_for=lambda url: engine,
                renderer=renderer,
                host=config.gateway.host,
                port=config.gateway.port,
                last_port=last_port,
                ready=ready,
                open_sessions=True,
            )
            await asyncio.gather(ending, projecting)
            down.cancel()
    tell(f"ended; all of it is in {run_dir.path}")


async def _project(run_dir: "RunDir", env: dict[str, str]) -> None:
    """The tables, by a process of their own: making them must not hold up a call. Ends with the run."""
    from gyre.errors import ProcessError
    from gyre.workers.children import last_words, spawn

    argv = (sys.executable, "-m", "gyre.cli", "process", "projector", str(run_dir.path))
    child = await spawn(argv, env=env, log_file=run_dir.path / "logs" / "projector.log")
    try:
        if code := await child.wait():
            raise ProcessError(f"gyre gateway: the projector ended with {code}: {last_words(child.log_file)}")
    finally:
        await child.stop()


async def _join(log: "Log", engine: "SglangEngine", epoch: int) -> None:
    """The engine as the log knows it: one cell, in rollout for good."""
    from gyre.events.log import open_writer
    from gyre.events.types import CellJoined, CellLeased, CellSwitched

    cell = await open_writer(log, "cell", time.time_ns)
    await cell.append_all(
        (
            CellJoined(cell=CELL, index=0, capacity=1, engine_url=engine.base_url, model_digest=""),
            CellLeased(cell=CELL, role="rollout", epoch=epoch),
            CellSwitched(cell=CELL, role="rollout", epoch=epoch, version=0, phases=()),
        )
    )


async def _end_on_signal(log: "Log") -> None:
    """Waits for Ctrl-C or SIGTERM; produces `run.finished`, which ends gateway and projector."""
    from gyre.events.log import open_writer
    from gyre.events.types import RunFinished

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
    writer = await open_writer(log, "operator", time.time_ns)
    await writer.append(RunFinished(reason="interrupted", detail="stopped by a signal"))


async def _watch(serving: "asyncio.Task[None]") -> None:
    """Fails with whoever keeps the log's server up."""
    await asyncio.shield(serving)


def _tell(run_dir: "RunDir", url: str, engine_url: str) -> None:
    from gyre.workers.output import tell

    tell(
        f"gateway {url} -> {engine_url}, recorded in {run_dir.path}; Ctrl-C ends it\n"
        f"  OPENAI_BASE_URL={url}/s/NAME/v1 or ANTHROPIC_BASE_URL={url}/s/NAME, with a NAME for each task\n"
        f"  gyre tail {run_dir.path}\n  gyre tree {run_dir.path}"
    )


def _context_of(policy: Path) -> int:
    """Raises MissingError, ConfigError."""
    path = policy / "config.json"
    try:
        found = json.loads(path.read_text())
    except OSError:
        raise MissingError(f"{path}: missing; give the directory of the model that the engine serves") from None
    except ValueError:
        raise ConfigError(f"{path}: not JSON; copy the model again") from None
    length = found.get("max_position_embeddings") or found.get("text_config", {}).get("max_position_embeddings")
    if not isinstance(length, int):
        raise ConfigError(f"{path}: no max_position_embeddings; give --context")
    return length
