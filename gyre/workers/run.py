"""Shell. `gyre run`: one run from its first event to its summary, on one machine.

Direction: config -> log and processes -> what the log says happened -> summary.json. The log decides:
the run is over when `run.finished` is on it, whoever wrote it, and each process stops by itself then.
A process that dies is started again, nats-server included. Whatever happens, the children are stopped before this
returns, and the log can be gone on with; a run whose supervisor was killed goes on in the same way.
"""

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import orjson
from rich.console import Console

from gyre.config import EMBEDDED, MUTABLE, Config, LogConfig, changed_paths, config_digest, decode_config, encode_config
from gyre.errors import ConfigError, HeldError, ProcessError
from gyre.events.access import connect_at
from gyre.events.codec import Recorded
from gyre.events.follow import Follower
from gyre.events.log import Log, Writer, open_writer
from gyre.events.permissions import ServerRole
from gyre.events.run_dir import Address, RunDir
from gyre.events.server import Server, free_ports, start_server
from gyre.events.streams import load_streams
from gyre.events.types import ConfigChanged, ProcessExited, RunFinished, RunResumed, RunStarted, Versioned
from gyre.projections.progress import Progress
from gyre.workers.disk import disk_watch
from gyre.workers.kv_store import store_command
from gyre.workers.supervisor import Child, Deaths, Supervisor
from gyre.workers.view import LiveView

PROCESSES: tuple[ServerRole, ...] = ("cell", "gateway", "scheduler", "dispatcher", "projector")
"""In start order: the cell first, whose engine takes longest."""
SERVER = "nats-server"
KV_STORE = "kv-store"
SERVER_POLL_S = 0.1
REST_S = 0.25
"""Between two looks at the log: it drives nothing but the view, and the end."""
ROOM_S = 45.0
"""How long a full disk may stay full."""
WIND_DOWN_S = {"completed": 60.0, "interrupted": 20.0, "paused": 20.0, "failed": 10.0}
"""For the processes to finish by themselves once the log says that the run is over, by its reason."""


class Opened(NamedTuple):
    """A run's log, and what is known of its embedded server, if it has one."""

    log: Log
    serving: "asyncio.Task[None]"
    """Keeps the server up; ends, with ProcessError, only when that cannot be done."""
    deaths: "asyncio.Queue[int]"
    """Exit codes of servers that were started again."""
    env: Callable[[ServerRole], dict[str, str]]
    """How a process reaches the log in its own role."""
    kv_store: str
    """`host:port` that the run's own KV store is to have; empty for none."""


@asynccontextmanager
async def open_run(
    run_dir: RunDir, config: Config, run: str, moved: Callable[[], int], *, rest_s: float = 0.0
) -> AsyncIterator[Opened]:
    """The run's log, over an embedded server unless the config names one. `moved` grows as the run gets somewhere;
    `rest_s` as in `connect`."""
    kv_store = f"127.0.0.1:{free_ports(1)[0]}" if config.engine.kv_store == EMBEDDED else ""
    if config.log.url:
        address = own_server(config.log, run, kv_store)
        server = None
    else:
        server = start_server(run_dir.nats, sync=config.log.sync, log=run_dir.path / "nats-server.log")
        reader = server.credential("reader")
        address = Address(run=run, url=server.url, token=server.token, reader=reader, kv_store=kv_store)

    def env(role: ServerRole) -> dict[str, str]:
        # On a server of one's own all processes have what the supervisor has.
        return {} if server is None else {"GYRE_NATS_URL": server.url, "GYRE_NATS_TOKEN": server.credential(role)}

    deaths: asyncio.Queue[int] = asyncio.Queue()
    serving = asyncio.create_task(keep_server(server, moved, deaths))
    try:
        run_dir.save_address(address)
        log = await connect_at(address, create=load_streams().with_replicas(config.log.num_replicas), rest_s=rest_s)
        try:
            yield Opened(log, serving, deaths, env, kv_store)
        finally:
            await log.close()
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        if server is not None:
            server.stop()


def own_server(config: LogConfig, run: str = "", kv_store: str = "") -> Address:
    """Where the log of a run is, whose config names a server of the user's own."""
    return Address(
        run=run,
        url=config.url,
        token=os.environ.get("GYRE_NATS_TOKEN", ""),
        tls_ca=_absolute(config.tls_ca),
        credentials=_absolute(config.credentials),
        num_replicas=config.num_replicas,
        kv_store=kv_store,
    )


async def keep_server(server: Server | None, moved: Callable[[], int], dead: "asyncio.Queue[int]") -> None:
    """Start the embedded server again, on its port and store, whenever it dies; who uses it connects again.

    One whose disk was full is ended and started when there is room again. Raises ProcessError when it keeps dying,
    or when there is no room for `ROOM_S`. Waits for nothing of the log, which is away meanwhile.
    """
    if server is None:
        await asyncio.Event().wait()
        return
    deaths = Deaths(moved)
    while True:
        deaths.born()
        while (code := server.poll()) is None:
            await asyncio.sleep(SERVER_POLL_S)
            if server.cannot_store:
                await _until_room(server)
                server.kill()
        while server.poll() is not None:
            if not deaths.died(code):
                raise ProcessError(f"{SERVER}: ended {deaths.num} times in a row, last with {code}; see {server.log}")
            await asyncio.sleep(deaths.pause_s)
            with suppress(ProcessError, HeldError):  # somebody else may be at the store, or the port, for a moment
                server.start()
        dead.put_nowait(code)


async def _until_room(server: Server) -> None:
    """What was not acknowledged is sent again meanwhile, for longer than this waits."""
    give_up = time.monotonic() + ROOM_S
    while server.is_disk_full:
        if time.monotonic() > give_up:
            raise ProcessError(
                f"{SERVER}: disk full: it stores nothing more under {server.directory}; nothing recorded is lost: free "
                "some space and start the run again, it goes on"
            )
        await asyncio.sleep(SERVER_POLL_S)


async def begin(
    log: Log,
    writer: Writer,
    config: Config,
    versions: dict[str, str],
    progress: Progress,
    policy_of: tuple[str, int] = ("", 0),
) -> None:
    """`run.started`, or `run.resumed` after what may have changed. Raises ConfigError if it cannot go on.

    `policy_of`: run and step of the checkpoint that is evaluated."""
    named = tuple(Versioned(name=name, version=version) for name, version in versions.items())
    if not progress.run:
        await writer.append(
            RunStarted(
                run=log.run,
                config=encode_config(config),
                config_digest=config_digest(config),
                seed=config.seed,
                versions=named,
                num_threads=config.trainer.num_threads,
                policy_run=policy_of[0],
                policy_step=policy_of[1],
            )
        )
        return
    if progress.policy_of not in (("", 0), policy_of):
        name, step = progress.policy_of
        raise ConfigError(f"run {log.run}: it evaluates step {step} of {name}; ask for that, or give another --dir")
    theirs, ours = progress.versions.get("gyre", ""), versions.get("gyre", "")
    if _numbers(theirs) > _numbers(ours):
        raise ConfigError(
            f"run {log.run}: gyre {theirs} wrote it last, this is gyre {ours}, which may not understand it; "
            f"install gyre {theirs} or newer, or give another --dir for a new run"
        )
    if progress.finished and progress.finished.reason == "completed":
        if progress.is_sealed:
            raise ConfigError(f"run {log.run}: it is complete; give another --dir for a new one")
        return  # killed between its last step and the record of its tables: only that is left to do
    changed = changed_paths(decode_config(progress.config), config)
    fixed = [path for path in changed if not any(path == m or path.startswith(f"{m}.") for m in MUTABLE)]
    if fixed:
        raise ConfigError(
            f"run {log.run}: {', '.join(fixed)}: changed since it started, which would make its past untrue; "
            "change it back, or give another --dir for a new run"
        )
    now = ConfigChanged(config=encode_config(config), config_digest=config_digest(config), changed=changed)
    resumed = RunResumed(versions=named)
    await writer.append_all((now, resumed) if changed else (resumed,))


async def run(
    run_dir: RunDir,
    config: Config,
    run_id: str,
    *,
    argv: Callable[[str], Sequence[str]],
    versions: dict[str, str],
    lock: int,
    console: Console,
    policy_of: tuple[str, int] = ("", 0),
) -> Progress:
    """Run to the end, or to the first Ctrl-C, SIGTERM or process that keeps dying; returns the closing figures.

    lock: the descriptor of the directory's lock, for the processes to hold as well. policy_of: as of `begin`.
    """
    progress = Progress()
    async with open_run(run_dir, config, run_id, lambda: progress.num_moves, rest_s=REST_S) as (
        log,
        serving,
        deaths,
        env,
        kv_store,
    ):
        view = LiveView(progress, config, console)

        def evolve(recorded: Recorded) -> None:
            progress.evolve(recorded)
            view.saw()

        follower = Follower(log, evolve)
        following = asyncio.create_task(follower.run())
        writer = await open_writer(log, "supervisor", time.time_ns)

        async def exited(name: str, code: int, restarted: bool) -> None:
            await writer.append(ProcessExited(process=name, code=code, restarted=restarted))

        async def record_deaths() -> None:
            while True:
                await exited(SERVER, await deaths.get(), True)

        recording = asyncio.create_task(record_deaths())
        supervisor = Supervisor(run_dir.logs, lock=lock, moved=lambda: progress.num_moves, exited=exited)
        try:
            await follower.catch_up()
            await begin(log, writer, config, versions, progress, policy_of)
            await follower.catch_up()
            low = disk_watch(run_dir.path, config.log.min_free_gb, view.say)
            async with view, low:
                if kv_store:
                    supervisor.keep(KV_STORE, store_command(kv_store), is_endless=True)
                others = tuple(f"cell-{name}" for name in (*config.cells.satellites_here, *config.cells.standalone))
                standby = tuple(f"scheduler-{number + 2}" for number in range(config.scheduler.num_standby))
                for name in (*others, *PROCESSES, *standby):
                    supervisor.keep(name, argv(name), env(_role(name)))
                failed = await _until_over(supervisor, serving, follower, progress)
                if failed is not None:
                    code = failed.process.returncode
                    detail = (
                        f"{failed.name} ended with code {code}: {failed.last_words()}; all of it: {failed.log_path}"
                    )
                    await writer.append(RunFinished(reason="failed", detail=detail))
                elif progress.finished is None:
                    await writer.append(RunFinished(reason="interrupted", detail="stopped by a signal"))
                await follower.catch_up()
                await supervisor.wait_all(WIND_DOWN_S[progress.finished.reason if progress.finished else "failed"])
                await supervisor.stop()
                await follower.catch_up()
        finally:
            await supervisor.stop()
            for task in (recording, following):
                task.cancel()
            await asyncio.gather(recording, following, return_exceptions=True)
            if progress.finished is not None:
                _save_summary(run_dir, progress)
    return progress


def _role(name: str) -> ServerRole:
    """Of a process by its name: of a satellite `cell-c1`, of a standalone engine `cell-p0`, of a scheduler that stands
    by `scheduler-2`."""
    return next(role for role in PROCESSES if role == name.partition("-")[0])


async def _until_over(
    supervisor: Supervisor, serving: "asyncio.Task[None]", follower: Follower, progress: Progress
) -> Child | None:
    """The process that died for good; None when the log says finished, or a signal asked to stop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)

    async def finished() -> None:
        while progress.finished is None:
            await follower.changed(follower.seq)

    async def failing() -> Child | None:
        failed = await supervisor.first_failure()
        if failed is None:
            await follower.catch_up()  # they may have been the first to read of the end, or have written it just now
            if progress.finished is None:
                raise ProcessError("all processes ended, but the run did not: see the logs directory")
        return failed

    over = [asyncio.create_task(stop.wait()), asyncio.create_task(finished())]
    failure = asyncio.create_task(failing())
    try:
        await asyncio.wait([*over, failure, serving], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        # A child may fail because the run is over: then the end of the run comes first.
        return failure.result() if failure.done() and not any(task.done() for task in over) else None
    finally:
        for task in (*over, failure):
            task.cancel()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _absolute(path: str) -> str:
    """For processes that were started elsewhere."""
    return str(Path(path).absolute()) if path else ""


def _numbers(version: str) -> tuple[int, ...]:
    """Of a version such as 0.1.0, to be compared."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _save_summary(run_dir: RunDir, progress: Progress) -> None:
    """Also when there was nothing left to do: a supervisor may have been killed just before it got here."""
    new = run_dir.summary.with_suffix(".new")
    try:
        new.write_bytes(orjson.dumps(progress.summary(), option=orjson.OPT_INDENT_2) + b"\n")
        new.replace(run_dir.summary)
    except OSError as error:
        raise ProcessError(
            f"{run_dir.summary}: {error.strerror}; nothing recorded is lost: make room, and start the run again"
        ) from None


def load_summary(run_dir: RunDir) -> dict[str, object]:
    """The closing figures; empty while there are none. Raises ConfigError."""
    try:
        return msgspec.json.decode(run_dir.summary.read_bytes(), type=dict[str, object])
    except FileNotFoundError:
        return {}
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{run_dir.summary}: {error}; was it changed by hand? Remove it: the log has all of it"
        ) from None
