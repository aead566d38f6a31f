"""Shell. One cell: an engine and a trainer as child processes, and the role that the two share. Or an engine alone.

Invariant: its children live as long as the cell, and no longer; one that ends is started again. A child that
ends again and again without a single arrival in between ends the cell.

Consumes and produces: what `hops.py` does. Waits for: the end of a child. Is unblocked by: `run.finished`, a cancel.
"""

import asyncio
import contextlib
import hashlib
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from gyre.config import EMBEDDED, Config, EngineConfig
from gyre.errors import REFUSED, ConfigError, EngineError, MissingError, ProcessError
from gyre.events.log import Log, Writer
from gyre.events.server import free_ports
from gyre.events.types import CellLost, ProcessExited
from gyre.workers.children import last_words, spawn
from gyre.workers.engine import SglangEngine, engine_command
from gyre.workers.hops import Hops
from gyre.workers.kv_mover import KvMover
from gyre.workers.kv_store import open_store
from gyre.workers.signs_of_life import give_signs

MAX_DEATHS = 3
RESTART_S = 1.0
FAREWELL_S = 10.0
"""A trainer that ended well has read the end of the run, which this process reads so much later at most."""
TRAINER_ENV = {"GLOG_minloglevel": "2", "MC_LOG_LEVEL": "ERROR", "PYTHONUNBUFFERED": "1"}
"""Mooncake says a dozen lines for each connection otherwise."""


class Child(Protocol):
    async def wait(self) -> int: ...
    async def stop(self) -> None: ...


Start = Callable[[], Awaitable[Child]]


async def run_cell(
    log: Log,
    writer: Writer,
    config: Config,
    *,
    cell_id: str,
    index: int,
    run_dir: Path,
    host: str,
    trainer: Sequence[str],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Runs until the run is finished. `host`: the address under which others reach this one. `trainer`: arguments of
    python that start the trainer's process; a standalone engine has none.

    Raises ProcessError when a child ends again and again.
    """
    logs = run_dir / "logs"
    async with SglangEngine("", call_timeout_s=config.engine.call_timeout_s) as engine:

        async def start_engine() -> Child:
            # Until the cell has joined under an address, each try takes another port: this one may have been taken.
            if not (engine.base_url and hops.roles.is_joined):
                engine.base_url = f"http://{host}:{free_ports(1)[0]}"
            port = int(engine.base_url.rpartition(":")[2])
            argv, env = engine_command(config.policy.path, port, config.engine, host=host)
            return await spawn(argv, env=env, log_file=logs / f"{cell_id}-engine.log")

        mover = await _kv_mover(config)
        hops = Hops(
            log,
            writer,
            config,
            cell_id=cell_id,
            index=index,
            run_dir=run_dir,
            model_digest=model_digest(Path(config.policy.path)),
            engine=engine,
            clock=clock,
            mover=mover,
        )

        async def start_trainer() -> Child:
            return await spawn(
                trainer_command(trainer, config, index),
                env=TRAINER_ENV | {"OMP_NUM_THREADS": str(config.trainer.num_threads)},
                log_file=logs / f"{cell_id}-trainer.log",
            )

        is_standalone = cell_id in config.cells.standalone
        await keep_cell(hops, start_engine=start_engine, start_trainer=None if is_standalone else start_trainer)


def trainer_command(program: Sequence[str], config: Config, index: int) -> tuple[str, ...]:
    """Of a cell on its first host: by itself where the cell is one rank, else through torchrun."""
    cells = config.cells
    if cells.num_ranks == 1:
        return (sys.executable, *program)
    meet = cells.rendezvous[index] if cells.rendezvous else f"127.0.0.1:{free_ports(1)[0]}"
    return torchrun(program, num_hosts=cells.hosts, host=0, ranks_per_host=cells.ranks_per_host, rendezvous=meet)


def torchrun(
    program: Sequence[str], *, num_hosts: int, host: int, ranks_per_host: int, rendezvous: str
) -> tuple[str, ...]:
    """What starts `program` (arguments of python) as the ranks of one host, and ends when one of them does.

    `host` counts from 0, the one of the first rank; `rendezvous` is an address of it, as in `10.0.0.1:29500`.
    """
    address, _, port = rendezvous.rpartition(":")
    flags = {
        "nnodes": num_hosts,
        "node-rank": host,
        "nproc-per-node": ranks_per_host,
        "master-addr": address,
        "master-port": port,
        "max-restarts": 0,
    }
    options = (f"--{name}={value}" for name, value in flags.items())
    return (sys.executable, "-m", "torch.distributed.run", *options, *program)


async def keep_cell(hops: Hops, *, start_engine: Start, start_trainer: Start | None) -> None:
    """`run_cell` with an engine and children that somebody else made."""
    await hops.catch_up()
    if hops.finished.is_set():
        return
    if hops.roles.is_joined:
        await hops.append(CellLost(cell=hops.roles.cell, reason="its process ended"))
    keeper = _Keeper(hops)
    with hops.memory.tenancy:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(hops.follow()),
                group.create_task(hops.obey()),
                group.create_task(give_signs(hops.log, hops.roles.cell, hops.config.cells.lease_s)),
                group.create_task(keeper.keep("engine", lambda: keeper.serve(start_engine))),
            ]
            if start_trainer is not None:
                tasks.append(group.create_task(keeper.keep("trainer", lambda: keeper.train(start_trainer))))
            await hops.finished.wait()
            for task in tasks:
                task.cancel()


class _Keeper:
    """The children of one cell."""

    def __init__(self, hops: Hops) -> None:
        self.hops = hops

    async def keep(self, what: str, live: Callable[[], Awaitable[int]]) -> None:
        """One life of the child after the other."""
        hops, name = self.hops, f"{self.hops.roles.cell}-{what}"
        deaths, arrivals = 0, -1
        while True:
            try:
                code = await live()
            except EngineError:
                code = -1
            if hops.finished.is_set():
                return
            deaths = deaths + 1 if hops.num_arrivals == arrivals else 1
            arrivals = hops.num_arrivals
            is_restarted = code != REFUSED and deaths < MAX_DEATHS
            await hops.writer.append(ProcessExited(process=name, code=code, restarted=is_restarted))
            if not is_restarted:
                log_file = hops.run_dir / "logs" / f"{name}.log"
                raise ProcessError(
                    f"cell {hops.roles.cell}: {name} ended {deaths} times in a row, last with {code}: "
                    f"{last_words(log_file)}; see {log_file}"
                )
            await asyncio.sleep(RESTART_S)

    async def serve(self, start: Start) -> int:
        """The life of an engine; its exit code. Raises EngineError when it did not get ready."""
        child = await start()
        try:
            await self._until_ready(child)
            self.hops.engine_started()
            return await child.wait()
        finally:
            self.hops.engine_ended()
            await child.stop()

    async def train(self, start: Start) -> int:
        """The life of a trainer; its exit code."""
        child = await start()
        try:
            code = await child.wait()
            if code == 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(FAREWELL_S):
                        await self.hops.finished.wait()
            return code
        finally:
            await child.stop()

    async def _until_ready(self, child: Child) -> None:
        ready = asyncio.ensure_future(self.hops.engine.wait_ready(self.hops.config.engine.start_timeout_s))
        ended = asyncio.ensure_future(child.wait())
        try:
            await asyncio.wait((ready, ended), return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise EngineError(f"engine of {self.hops.roles.cell}: ended with {ended.result()} at its start")
            await ready
        finally:
            for task in (ready, ended):
                task.cancel()
            await asyncio.gather(ready, ended, return_exceptions=True)


def with_store(config: EngineConfig, kv_store: str) -> EngineConfig:
    """With the address of the KV store that the run keeps, where the config asks for that one. Raises ConfigError."""
    if config.kv_store != EMBEDDED:
        return config
    if not kv_store:
        raise ConfigError(
            "engine.kv_store: embedded is a store beside `gyre run`, on its machine; give host:port of one that all "
            "hosts reach"
        )
    return msgspec.structs.replace(config, kv_store=kv_store)


async def _kv_mover(config: Config) -> KvMover | None:
    """Raises TransferError when the store is not there."""
    options = config.engine
    if not options.kv_store:
        return None
    store = await asyncio.to_thread(open_store, options.kv_store)
    return KvMover(store, model=config.policy.path, page_tokens=options.kv_page_tokens)


def model_digest(policy: Path) -> str:
    """Of the architecture: every engine and trainer of the run must have the same."""
    try:
        return hashlib.sha256((policy / "config.json").read_bytes()).hexdigest()[:32]
    except FileNotFoundError:
        raise MissingError(f"{policy}/config.json: no policy; make one with `gyre policy init {policy}`") from None
