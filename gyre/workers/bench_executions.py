"""Shell. `gyre bench executions`: many executions at once, all of them stopped by a deadline at about the same time.

Gateway and dispatcher run as in a run, sandboxes and the reference harness with them; only the engine is scripted, and
never says that it is done. This process adopts whatever loses its parent, so an orphan of any of them is found.

Direction: config -> log, processes -> what the log says and what is left on the machine -> figures.
"""

import asyncio
import ctypes
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import msgspec
import psutil
from tokenizers import Tokenizer

from gyre.config import Config, load_config
from gyre.errors import ProcessError
from gyre.events.codec import Recorded
from gyre.events.log import Log, open_writer
from gyre.events.permissions import ServerRole
from gyre.events.run_dir import RunDir
from gyre.events.types import (
    CallCompleted,
    CellJoined,
    CellLeased,
    CellSwitched,
    ExecutionDropped,
    ExecutionFinished,
    ExecutionScored,
    ExecutionStarted,
    ExecutionTimedOut,
    PolicyPublished,
    RunFinished,
)
from gyre.projections.progress import Progress
from gyre.workers.bench import Figure, figure
from gyre.workers.bench_engine import WORDS
from gyre.workers.children import Child, last_words, spawn
from gyre.workers.doctor import versions
from gyre.workers.run import begin, open_run

MAX_LATE_S = 1.0
"""The goal: between a deadline and the end of all that the execution was."""
ENGINE_S = 5.0
"""What a call takes, as that of a large policy does."""
PERIOD_S = 1.0
PROCESSES: tuple[ServerRole, ...] = ("gateway", "dispatcher")
_PR_SET_CHILD_SUBREAPER = 36
_END_OF_TURN = "<|im_end|>"
_CONFIG = """\
tasks: {{num_goals: 2}}
harness: {{deadline_s: {deadline}, overall_deadline_s: {overall}, max_turns: 100000, max_concurrent: {num}}}
evaluation: {{num_tasks: {num}, temperatures: [1.0]}}
engine: {{context_tokens: 100000, capacity: {num}}}
policy: {{path: {policy}, init: false}}
pipeline: {{num_steps: 0}}
log: {{min_free_gb: 0}}
"""


class Seen(msgspec.Struct, kw_only=True):
    """What the log says of one run. Seconds."""

    started: dict[str, float] = msgspec.field(default_factory=dict)
    late: dict[str, list[float]] = msgspec.field(default_factory=lambda: {"harness": [], "overall": []})
    num_live: int = 0
    most_live: int = 0
    num_finished: int = 0
    num_scored: int = 0
    num_dropped: int = 0
    num_calls: int = 0
    graded_s: float = 0.0
    """From the first deadline to the last score."""
    first_late: float = 0.0

    def evolve(self, recorded: Recorded, deadline_s: float) -> None:
        event, at_s = recorded.event, recorded.envelope.time_ns / 1e9
        match event:
            case ExecutionStarted():
                self.started[event.execution] = at_s
                self.num_live += 1
                self.most_live = max(self.most_live, self.num_live)
            case ExecutionTimedOut(kind="harness"):
                self.first_late = self.first_late or at_s
                self.late["harness"].append(event.after_s - deadline_s)
            case ExecutionTimedOut():
                self.late["overall"].append(at_s - self.started[event.execution] - event.after_s)
            case ExecutionFinished():
                self.num_live -= 1
                self.num_finished += 1
            case ExecutionScored():
                self.num_scored += 1
                self.graded_s = at_s - self.first_late
            case ExecutionDropped():
                self.num_dropped += 1
            case CallCompleted():
                self.num_calls += 1
            case _:
                pass


class Left(msgspec.Struct, kw_only=True):
    """What the machine says of it. Bytes."""

    memory: dict[str, int] = msgspec.field(default_factory=dict)
    """The most that each process had, and one sandbox's share."""
    num_processes: int = 0
    num_orphans: int = 0
    num_paths: int = 0


def bench_executions(
    policy: Path, folder: Path, *, num: int = 200, deadline_s: float = 60.0, engine_s: float = ENGINE_S
) -> dict[str, Figure]:
    """Twice `num` executions: first harness deadlines, then overall ones. Raises ProcessError when they do not end."""
    settings = {"num": num, "policy": policy.resolve()}
    soft = load_config(_CONFIG.format(deadline=deadline_s, overall=0, **settings))
    hard = load_config(_CONFIG.format(deadline=10 * deadline_s, overall=deadline_s, **settings))
    with _adopting():
        graded, left = asyncio.run(_measure(soft, folder / "harness", engine_s))
        discarded, also_left = asyncio.run(_measure(hard, folder / "overall", engine_s))
    late, overall = graded.late["harness"], discarded.late["overall"]
    return {
        "executions_at_once": figure(graded.most_live, "executions", reference=num, min_ratio=1.0),
        "timed_out_and_scored": figure(min(len(late), graded.num_scored), "executions", reference=num, min_ratio=1.0),
        "timed_out_and_discarded": figure(
            min(len(overall), discarded.num_dropped), "executions", reference=num, min_ratio=1.0
        ),
        "harness_deadline_late_max": figure(max(late, default=deadline_s), "s", max_value=MAX_LATE_S),
        "harness_deadline_late_median": figure(sorted(late)[len(late) // 2] if late else deadline_s, "s"),
        "overall_deadline_late_max": figure(max(overall, default=deadline_s), "s", max_value=MAX_LATE_S),
        "processes_at_once": figure(max(left.num_processes, also_left.num_processes), "processes"),
        "orphan_processes": figure(left.num_orphans + also_left.num_orphans, "processes", max_value=0),
        "leftover_paths": figure(left.num_paths + also_left.num_paths, "paths", max_value=0),
        "calls": figure(graded.num_calls, "calls"),
        "graded_in": figure(graded.graded_s, "s"),
        **{f"memory_{name}": figure(size / 2**20, "MiB") for name, size in sorted(left.memory.items())},
    }


@contextmanager
def _adopting() -> Iterator[None]:
    """Within it whatever loses its parent becomes a child of this process."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


async def _measure(config: Config, folder: Path, engine_s: float) -> tuple[Seen, Left]:
    run_dir = RunDir(folder / "run")
    scratch = folder / "tmp"
    scratch.mkdir(parents=True)
    seen, left = Seen(), Left()
    num = config.evaluation.num_tasks
    before = {child.pid for child in psutil.Process().children()}
    limit_s = (config.harness.overall_deadline_s or config.harness.deadline_s) + 60 + num
    async with _processes(config, run_dir, scratch, engine_s) as (log, children):
        watching = asyncio.create_task(_watch(children, left, seen, num))
        try:
            async with asyncio.timeout(limit_s):
                async for recorded in log.read(1):
                    seen.evolve(recorded, config.harness.deadline_s)
                    if isinstance(recorded.event, RunFinished):
                        break
                await asyncio.gather(*(child.wait() for name, child in children.items() if name != "engine"))
        except TimeoutError:
            said = "; ".join(f"{name}: {last_words(child.log_file)}" for name, child in children.items())
            raise ProcessError(f"gyre bench executions: not over after {limit_s:g} s: {said}") from None
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
    left.num_orphans = sum(child.pid not in before for child in psutil.Process().children())
    folders = (scratch, run_dir.path / "workspaces", run_dir.path / "grading")
    left.num_paths = sum(len(list(path.iterdir())) for path in folders if path.is_dir())
    return seen, left


@asynccontextmanager
async def _processes(
    config: Config, run_dir: RunDir, scratch: Path, engine_s: float
) -> AsyncIterator[tuple[Log, dict[str, Child]]]:
    """A run without a cell of its own: its one cell is the scripted engine, in rollout for good."""
    tokenizer = Tokenizer.from_file(str(Path(config.policy.path) / "tokenizer.json"))
    reply = [*tokenizer.encode(WORDS, add_special_tokens=False).ids, tokenizer.token_to_id(_END_OF_TURN)]
    options = ("--reply", ",".join(map(str, reply)), "--delay-s", str(engine_s))
    children: dict[str, Child] = {}
    try:
        argv = (sys.executable, "-m", "gyre.workers.bench_engine", *options)
        engine = children["engine"] = await spawn(argv, log_file=run_dir.logs / "engine.log")
        async with open_run(run_dir, config, "executions", lambda: 0) as opened:
            log = opened.log
            await begin(log, await open_writer(log, "supervisor", time.time_ns), config, versions(), Progress())
            cell = await open_writer(log, "cell", time.time_ns)
            url = await _first_line(engine)
            await cell.append(
                CellJoined(cell="c0", index=0, capacity=config.engine.capacity, engine_url=url, model_digest="")
            )
            await cell.append(CellLeased(cell="c0", role="rollout", epoch=1))
            await cell.append(CellSwitched(cell="c0", role="rollout", epoch=1, version=0, phases=()))
            for name in PROCESSES:
                command = (sys.executable, "-m", "gyre.cli", "process", name, str(run_dir.path))
                env = {**opened.env(name), "TMPDIR": str(scratch)}
                children[name] = await spawn(command, env=env, log_file=run_dir.logs / f"{name}.log")
            await _until_open(run_dir, children["gateway"])
            trainer = await open_writer(log, "trainer", time.time_ns)
            await trainer.append(PolicyPublished(version=0, digest="", num_bytes=0, checkpoint=""))
            yield log, children
    finally:
        for child in children.values():
            await child.stop()


async def _until_open(run_dir: RunDir, gateway: Child) -> None:
    """Before it listens an execution could not be started, and would be dropped as an infrastructure failure."""
    for _ in range(600):
        if run_dir.socket.exists():
            return
        await asyncio.sleep(0.1)
    raise ProcessError(f"gyre bench executions: the gateway did not start: {last_words(gateway.log_file)}")


async def _first_line(engine: Child) -> str:
    for _ in range(600):
        if said := engine.log_file.read_text().strip():
            return said.splitlines()[0]
        await asyncio.sleep(0.1)
    raise ProcessError("gyre bench executions: the scripted engine did not start")


async def _watch(children: dict[str, Child], left: Left, seen: Seen, num: int) -> None:
    """Endless. The sandboxes are looked at once, when all of them are there: it takes a second."""
    dispatcher = psutil.Process(children["dispatcher"].pid)
    while True:
        for name in PROCESSES:
            left.memory[name] = max(left.memory.get(name, 0), _resident(children[name].pid))
        if seen.num_live == num and "sandbox" not in left.memory and seen.num_calls >= num:
            found = await asyncio.to_thread(dispatcher.children, recursive=True)
            left.num_processes = len(found)
            left.memory["sandbox"] = await asyncio.to_thread(_share, found) // num
        await asyncio.sleep(PERIOD_S)


def _resident(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _share(processes: Sequence[psutil.Process]) -> int:
    """Of the machine's memory, pages that several have divided among them."""
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += int(process.memory_full_info().pss)
    return total
