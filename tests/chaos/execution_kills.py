"""Kills what an execution is made of, by kind and seed, and checks that each execution ends once and says how.

    python -m tests.chaos.execution_kills [SEED | FIRST-LAST ...]

The dispatcher is the real process, on a log of its own; harness and evaluator are the sandboxes that it starts. A seed
fixes how long after the last kill the next one comes, and how deep in the victim. One line a kind and seed.
"""

import asyncio
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random

import msgspec
import psutil

from gyre.config import Config, load_config
from gyre.events.codec import Recorded
from gyre.events.log import Log, open_writer
from gyre.events.run_dir import RunDir
from gyre.events.types import (
    EvaluationFailed,
    ExecutionDropped,
    ExecutionFinished,
    ExecutionScored,
    PolicyPublished,
    RunFinished,
)
from gyre.projections.progress import Progress
from gyre.workers.children import Child, spawn
from gyre.workers.doctor import versions
from gyre.workers.run import begin, open_run
from tests.chaos.driver import is_running
from tests.chaos.invariants import broken_executions

KINDS = ("dispatcher", "harness", "evaluator")
NUM_KILLS = 4
LIMIT_S = 120.0
GONE_S = 30.0
SCORE = 0.5
"""Of every execution that has one."""
CONFIG = """
tasks: {{path: {tasks}}}
harness: {{name: command, command: [sh, -c, "echo x > made; sleep 0.6"], deadline_s: 30, max_concurrent: 3}}
grading: {{milestones_s: [0.2], attempts: 3, on_tampering: record}}
evaluation: {{num_tasks: {num}, temperatures: [1.0]}}
pipeline: {{num_steps: 0}}
log: {{min_free_gb: 0}}
"""
TASK = {
    "task.toml": "[verifier]\ntimeout_sec = 30\n",
    "instruction.md": "Make it.\n",
    "tests/test.sh": f"sleep 0.5; echo {SCORE} > /logs/verifier/reward.txt\n",
}


class Outcome(msgspec.Struct, kw_only=True):
    kind: str
    seed: int
    num_kills: int = 0
    answers: Counter[str] = msgspec.field(default_factory=Counter)
    """What the log says of them."""
    faults: list[str] = []

    def line(self) -> str:
        state = "ok    " if not self.faults else "FAILED"
        said = ", ".join(f"{num} {what}" for what, num in sorted(self.answers.items())) or "nothing"
        return "\n    ".join([f"{self.kind:<10} {self.seed:3d} {state} {self.num_kills} kills: {said}", *self.faults])


class Kills:
    def __init__(self, kind: str, seed: int, folder: Path, num_kills: int) -> None:
        self.outcome = Outcome(kind=kind, seed=seed)
        self._num_kills = num_kills
        self._kind, self._rng, self._folder = kind, Random(f"{kind} {seed}"), folder
        self._run_dir = RunDir(folder / "run")
        self._processes: set[psutil.Process] = set()
        self._is_busy = True
        """The next dispatcher to be killed has sandboxes; else it is killed whatever it does."""

    async def run(self) -> Outcome:
        for name, text in TASK.items():
            path = self._folder / "tasks/make" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (self._folder / "tmp").mkdir()
        config = load_config(CONFIG.format(tasks=self._folder / "tasks", num=2 * self._num_kills))
        self._run_dir.socket.parent.mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as gateway:
            gateway.bind(str(self._run_dir.socket))
            gateway.listen()
            async with open_run(self._run_dir, config, "kills", lambda: 0) as opened:
                log = opened.log
                await begin(log, await open_writer(log, "supervisor", time.time_ns), config, versions(), Progress())
                published = PolicyPublished(version=0, digest="", num_bytes=0, checkpoint="")
                await (await open_writer(log, "trainer", time.time_ns)).append(published)
                try:
                    async with asyncio.timeout(LIMIT_S):
                        await self._until_finished(log, opened.env("dispatcher"))
                except TimeoutError:
                    self.outcome.faults.append(f"not finished after {LIMIT_S:g} s: {self._folder}")
                events = [recorded async for recorded in log.read(1, until=await log.last_seq())]
        await self._check(events, config)
        return self.outcome

    async def _until_finished(self, log: Log, env: dict[str, str]) -> None:
        """Starts the dispatcher as often as it is killed, and ends with it."""
        finished = asyncio.create_task(_finished(log))
        pauses = [self._rng.uniform(0.0, 1.5) for _ in range(self._num_kills)]
        while True:
            dispatcher = await self._start(env)
            exited = asyncio.create_task(dispatcher.wait())
            try:
                while pauses and not (finished.done() or exited.done()):
                    await asyncio.sleep(pauses.pop())
                    with suppress(psutil.NoSuchProcess):
                        await self._strike(psutil.Process(dispatcher.pid), finished)
                    if self._kind == "dispatcher":
                        break
                await exited
            finally:
                await dispatcher.stop()
            if finished.done():
                return
            if self._kind != "dispatcher":
                self.outcome.faults.append("the dispatcher ended before its work was done")
                return

    async def _start(self, env: dict[str, str]) -> Child:
        argv = (sys.executable, "-m", "gyre.cli", "process", "dispatcher", str(self._run_dir.path))
        env = env | {"TMPDIR": str(self._folder / "tmp")}
        return await spawn(argv, env=env, log_file=self._run_dir.logs / "dispatcher.log")

    async def _strike(self, dispatcher: psutil.Process, finished: "asyncio.Task[None]") -> None:
        """As soon as there is a victim, and a moment of its life later."""
        self._is_busy = not self.outcome.num_kills or self._rng.random() < 0.7
        num_before = self.outcome.num_kills
        while self.outcome.num_kills == num_before:
            while not (victims := self._victims(dispatcher)):
                if finished.done() or not dispatcher.is_running():
                    return
                await asyncio.sleep(0.01)
            await asyncio.sleep(self._rng.uniform(0.0, 0.4))
            with suppress(psutil.Error):  # gone by itself: the next one
                self._processes |= {dispatcher, *dispatcher.children(recursive=True)}
                victim = self._rng.choice(self._victims(dispatcher) or victims)
                victim.kill()
                self.outcome.num_kills += 1

    def _victims(self, dispatcher: psutil.Process) -> list[psutil.Process]:
        """A dispatcher; or of one sandbox bubblewrap, its process 1 and the program."""
        if self._kind == "dispatcher":
            return [dispatcher] if not self._is_busy or dispatcher.children() else []
        place = {"harness": "workspaces", "evaluator": "grading"}[self._kind]
        inside = f"{self._run_dir.path / place}/"
        found = []
        with suppress(psutil.Error):
            for child in dispatcher.children():
                if any(word.startswith(inside) for word in child.cmdline()):
                    found += [child, *child.children(), *(p for c in child.children() for p in c.children())]
        return found

    async def _check(self, events: list[Recorded], config: Config) -> None:
        faults = self.outcome.faults
        faults += broken_executions(events, config)
        for recorded in events:
            event = recorded.event
            if isinstance(event, ExecutionDropped | EvaluationFailed):
                self.outcome.answers[f"{event.reason.partition(':')[0]}"] += 1
                if not event.reason:
                    faults.append(f"sequence {recorded.seq}: without a reason")
            elif isinstance(event, ExecutionScored) and event.score != SCORE:
                faults.append(f"sequence {recorded.seq}: a kill was taken for a score of {event.score}")
            elif isinstance(event, ExecutionFinished) and event.reason != "completed":
                self.outcome.answers[event.reason] += 1
        if sum(isinstance(recorded.event, RunFinished) for recorded in events) != 1:
            faults.append("the run is not finished once")
        give_up = time.monotonic() + GONE_S
        while left := [process for process in self._processes if is_running(process)]:
            if time.monotonic() > give_up:
                faults.append(f"left behind: {left}")
                break
            await asyncio.sleep(0.05)
        for place in ("run/workspaces", "run/grading", "tmp"):
            faults += [f"left behind: {path}" for path in (self._folder / place).glob("*")]
        faults += [f"left behind: {path}" for path in (self._folder / "run/snapshots/objects").glob(".*")]


async def _finished(log: Log) -> None:
    async for recorded in log.read(1):
        if isinstance(recorded.event, RunFinished):
            return


def kill_executions(kind: str, seed: int, folder: Path, num_kills: int = NUM_KILLS) -> Outcome:
    folder.mkdir()
    return asyncio.run(Kills(kind, seed, folder, num_kills).run())


def main(seeds: list[int]) -> None:
    root = Path(tempfile.mkdtemp(prefix="gyre-kills-"))
    outcomes = []
    for seed in seeds:
        for kind in KINDS:
            outcomes.append(kill_executions(kind, seed, root / f"{kind}-{seed}"))
            print(outcomes[-1].line(), flush=True)
    failed = [f"{outcome.kind} {outcome.seed}" for outcome in outcomes if outcome.faults]
    num_kills = sum(outcome.num_kills for outcome in outcomes)
    print(f"{len(outcomes)} runs, {num_kills} kills, {len(failed)} failed: {', '.join(failed) or 'none'}")
    if failed:
        print(f"what failed is in {root}", file=sys.stderr)
        sys.exit(1)
    shutil.rmtree(root)


if __name__ == "__main__":
    ranges = [text.split("-") for text in sys.argv[1:] or ["1-20"]]
    main([n for ends in ranges for n in range(int(ends[0]), int(ends[-1]) + 1)])
