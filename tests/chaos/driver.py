"""Kills processes of real runs, by seed, lets the runs go on until they are complete, and checks what must hold.

    python -m tests.chaos.driver [SEED | FIRST-LAST ...] [--cells] [--kills N] [--root DIR]

One line a seed, then one JSON object. A seed fixes what is killed and when: after how many events of the log, or how
long after the last kill, and how often. What then happens is up to the machine, so a seed repeats its kills, not its
log. The directory of a failed seed stays.
"""

import argparse
import asyncio
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random

import msgspec
import psutil

from gyre.agents.process import base_python
from gyre.config import load_config
from gyre.errors import GyreError
from gyre.events.access import open_log
from gyre.events.codec import Recorded
from gyre.events.jetstream import connect
from gyre.events.log import Log
from gyre.events.run_dir import RunDir
from gyre.events.types import RunFinished, SilenceNoticed
from gyre.projections.changes import MemoryTables
from gyre.projections.store import Store
from gyre.projections.tables import Tables
from tests.chaos.invariants import broken

SUPERVISOR, ALL = "supervisor", "all"
TARGETS = (
    "harness", "gateway", "projector", "dispatcher", "scheduler", "cell", "engine", "trainer", "nats-server",
    ALL, SUPERVISOR,
)  # fmt: skip
MAX_EVENTS = 225
"""A run has about this many."""
MAX_KILLS = 4
AT_END = 10**9
RUN_S, KILL_S = 180.0, 20.0
"""For one seed, and for each of its kills."""
APPEAR_S = 5.0
"""How long to wait for a process that is not there at its time."""
GONE_S = 30.0
REPLAY_S = 120.0
CONFIG = {
    "seed": 3,
    "policy": {"warm_start": False},
    "sampling": {"max_tokens": 12},
    "pipeline": {"num_steps": 3, "groups_per_step": 2, "executions_per_group": 2},
    "trainer": {"weight_decay": 0.1, "learning_rate": 0.01},
    "evaluation": {"num_tasks": 1, "temperatures": [0.0]},
    "log": {"min_free_gb": 0},
}


CELLS = {
    "cells": {"count": 3, "claim_deadline_s": 20},
    "pipeline": {"num_steps": 6, "groups_per_step": 2, "executions_per_group": 2, "lookahead": 1, "max_staleness": 2},
    "engine": {"capacity": 4, "max_total_tokens": 16384},
    "scheduler": {"num_standby": 1, "lease_s": 2},
}
"""Of a core and two satellites, and two schedulers: `cell`, `engine`, `trainer` and `scheduler` are any of them."""
CELLS_EVENTS = 420
CELLS_TRAINER = {"max_tokens_per_microstep": 96, "num_threads": 1, "learning_rate": 0.003}


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    target: str
    after_events: int
    """0: by time alone. `AT_END`: after `run.finished`."""
    delay_s: float
    """After these events, or after the kill before."""

    def __str__(self) -> str:
        place = "end" if self.after_events == AT_END else self.after_events
        when = f"@{place}" if place else f"+{self.delay_s:.1f}s"
        return f"{self.target}{when}"


class Outcome(msgspec.Struct, kw_only=True):
    seed: int
    kills: list[str] = []
    """That came about."""
    missed: list[str] = []
    """Whose process was not there, or whose time did not come."""
    num_resumes: int = 0
    num_events: int = 0
    num_restarts: int = 0
    seconds: float = 0.0
    faults: list[str] = []

    def line(self) -> str:
        state = "ok    " if not self.faults else "FAILED"
        kills = ", ".join(self.kills) or "none"
        missed = f"; missed {', '.join(self.missed)}" if self.missed else ""
        text = (
            f"seed {self.seed:3d}  {state} {self.seconds:5.1f} s  {self.num_events} events  {self.num_resumes} resumes"
        )
        return "\n         ".join([f"{text}  killed: {kills}{missed}", *self.faults])


def plan(seed: int, *, num_kills: int = 0, num_events: int = MAX_EVENTS) -> list[Kill]:
    """The first targets of consecutive seeds cover all processes. `num_kills` 0: some."""
    rng = Random(seed)
    targets = [TARGETS[seed % len(TARGETS)], *rng.choices(TARGETS, k=rng.randrange(MAX_KILLS))]
    if num_kills:
        targets = [TARGETS[(seed + i) % len(TARGETS)] for i in range(num_kills)]
        rng.shuffle(targets)
    events = sorted(rng.randint(1, num_events) for _ in targets)
    kills = [
        Kill(target=target, after_events=0, delay_s=rng.uniform(0, 8.0))
        if rng.random() < 0.3
        else Kill(target=target, after_events=number, delay_s=rng.uniform(0, 0.2))
        for target, number in zip(targets, events, strict=True)
    ]
    if seed % 7 == 0:  # between the end of the work and the end of the run there is little to kill, and little time
        kills.append(
            Kill(target=rng.choice(("projector", "nats-server", ALL, SUPERVISOR)), after_events=AT_END, delay_s=0)
        )
    return kills


class Reader:
    """An independent reader of the log: what it has seen must stay."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self.seen: dict[int, str] = {}
        self.is_over = False
        """`run.finished` was seen."""
        self._url = ""

    async def run(self) -> None:
        """For ever; goes over to a new address when the run has one."""
        while True:
            await asyncio.sleep(0.1)
            with suppress(GyreError):
                address = self.run_dir.load_address()
                self._url = address.url
                log = await connect(address.url, address.run, token=address.token, timeout_s=2)
                reading = asyncio.create_task(self._read(log))
                try:
                    while not reading.done() and self.run_dir.load_address().url == address.url:
                        await asyncio.wait({reading}, timeout=0.2)
                finally:
                    reading.cancel()
                    await asyncio.gather(reading, return_exceptions=True)
                    await log.close()

    async def _read(self, log: Log) -> None:
        async for recorded in log.read(len(self.seen) + 1):
            self.seen[recorded.seq] = recorded.digest
            self.is_over = self.is_over or isinstance(recorded.event, RunFinished)


class Seed:
    def __init__(self, seed: int, root: Path, config: dict, kills: list[Kill]) -> None:
        self.outcome = Outcome(seed=seed)
        self.pending, self.run_s = kills, RUN_S + len(kills) * KILL_S
        self.rng = Random(f"victims {seed}")
        self.directory = root / f"seed-{seed}"
        self.directory.mkdir(parents=True)
        self.config_path = self.directory / "chaos.yaml"
        self.config_path.write_bytes(msgspec.yaml.encode(config))
        self.config = load_config(self.config_path.read_text())
        self.run_dir = RunDir(self.directory / "run")
        self.reader = Reader(self.run_dir)
        self.processes: dict[int, psutil.Process] = {}
        self.last_kill = time.monotonic()
        self.reached = 0.0

    async def run(self) -> Outcome:
        begun = time.monotonic()
        reading = asyncio.create_task(self.reader.run())
        try:
            await self._until_complete(begun + self.run_s)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            self.outcome.missed += [str(kill) for kill in self.pending]
        if not self.outcome.faults:
            await self._check()
        self.outcome.seconds = time.monotonic() - begun
        if not self.outcome.faults:
            shutil.rmtree(self.directory)
        return self.outcome

    async def _until_complete(self, give_up: float) -> None:
        while True:
            with (self.directory / "printed.txt").open("ab") as output:
                command = [
                    sys.executable,
                    "-m",
                    "gyre.cli",
                    "run",
                    str(self.config_path),
                    "--dir",
                    str(self.run_dir.path),
                ]
                supervisor = psutil.Popen(command, cwd=self.directory, stdout=output, stderr=output)
            self.last_kill = time.monotonic()
            try:
                was_killed = await self._until_ended(supervisor, give_up)
            finally:
                if supervisor.poll() is None:
                    supervisor.terminate()
                    supervisor.wait(30)
            if self.outcome.faults or supervisor.returncode == 0:
                break
            if not was_killed:
                if self.outcome.num_resumes and "it is complete" in self._last_words():
                    break  # killed behind its very last record: nothing was left to do
                self.outcome.faults.append(f"gyre run ended with {supervisor.returncode}: {self._last_words()}")
                break
            self.outcome.num_resumes += 1
            if self.rng.random() < 0.5:  # else go on at once, beside what is still ending
                await self._until_gone()
        await self._until_gone()

    async def _until_ended(self, supervisor: psutil.Popen, give_up: float) -> bool:
        """Whether the supervisor was killed."""
        was_killed = False
        while supervisor.poll() is None:
            self._note(supervisor)
            if self._is_due():
                was_killed = await self._strike(supervisor) or was_killed
            if time.monotonic() > give_up:
                self.outcome.faults.append(f"not complete after {self.run_s:g} s: {self._last_words()}")
                break
            await asyncio.sleep(0.02)
        return was_killed

    def _note(self, supervisor: psutil.Process) -> None:
        with suppress(psutil.Error):
            for process in (supervisor, *supervisor.children(recursive=True)):
                self.processes.setdefault(process.pid, process)

    def _is_due(self) -> bool:
        if not self.pending:
            return False
        kill, now = self.pending[0], time.monotonic()
        if kill.after_events:
            is_reached = (
                self.reader.is_over if kill.after_events == AT_END else len(self.reader.seen) >= kill.after_events
            )
            if not is_reached:
                return False
            self.reached = self.reached or now
            return now >= self.reached + kill.delay_s
        return now >= self.last_kill + kill.delay_s

    async def _strike(self, supervisor: psutil.Popen) -> bool:
        """Whether the supervisor was killed."""
        kill, self.reached = self.pending.pop(0), 0.0
        give_up = time.monotonic() + APPEAR_S
        while not (victims := self._victims(kill.target, supervisor)):
            if time.monotonic() > give_up or supervisor.poll() is not None:
                self.outcome.missed.append(str(kill))
                return False
            await asyncio.sleep(0.01)
        self._note(supervisor)
        for victim in victims:
            with suppress(psutil.NoSuchProcess):
                victim.send_signal(signal.SIGKILL)
        self.last_kill = time.monotonic()
        self.outcome.kills.append(f"{kill} at {len(self.reader.seen)}")
        if kill.target in (ALL, SUPERVISOR):
            await asyncio.to_thread(supervisor.wait)
            return True
        return False

    def _victims(self, target: str, supervisor: psutil.Popen) -> list[psutil.Process]:
        if target == SUPERVISOR:
            return [supervisor]
        with suppress(psutil.Error):
            everyone = supervisor.children(recursive=True)
            if target == ALL:
                return [supervisor, *self.rng.sample(everyone, len(everyone))]
            if target == "harness":
                dispatcher = next((p for p in everyone if _names(p, "dispatcher")), None)
                inside = dispatcher.children(recursive=True) if dispatcher else []
                return [self.rng.choice(inside)] if inside else []
            found = [p for p in everyone if _names(p, target)]
            # An engine is several processes, all but the first forked from it.
            return [self.rng.choice(found)] if found else []
        return []

    async def _until_gone(self) -> None:
        """No process is left behind, soon after the supervisor has ended."""
        give_up = time.monotonic() + GONE_S
        while left := [process for process in self.processes.values() if is_running(process)]:
            if time.monotonic() > give_up:
                self.outcome.faults.append(f"left behind: {', '.join(_command(process) for process in left)}")
                return
            await asyncio.sleep(0.05)

    async def _check(self) -> None:
        faults = self.outcome.faults
        workspaces = self.run_dir.path / "workspaces"
        if workspaces.exists() and (left := [path.name for path in workspaces.iterdir()]):
            faults.append(f"workspaces left: {', '.join(left)}")
        async with open_log(self.run_dir) as (log, _):
            events = [recorded async for recorded in log.read(1, until=await log.last_seq())]
        faults += list(broken(events, self.config, self.reader.seen))
        silent = [r.seq for r in events if isinstance(r.event, SilenceNoticed)]
        away = sum(kill.startswith(("cell", ALL, SUPERVISOR)) for kill in self.outcome.kills)
        if len(silent) > away:
            faults.append(f"sequences {silent}: cells were taken for silent, but only {away} kills were of one")
        # Also every step again: weights, and by those of the next step the optimizer's state, came through whole.
        command = [sys.executable, "-m", "gyre.cli", "replay", str(self.run_dir.path), "--verify", "--train"]
        replay = await asyncio.to_thread(
            subprocess.run, command, cwd=self.directory, capture_output=True, text=True, check=False, timeout=REPLAY_S
        )
        if replay.returncode or f"same weights as recorded: {self.config.pipeline.num_steps}" not in replay.stdout:
            faults.append(f"replay: {replay.stdout.strip()} {replay.stderr.strip()[-500:]}")
        faults += _tables_differ(self.run_dir.tables, events)
        self.outcome.num_events = len(events)
        self.outcome.num_restarts = sum(getattr(r.event, "restarted", False) for r in events)
        state = msgspec.json.decode(self.run_dir.summary.read_bytes())["state"]
        if state != "completed":
            faults.append(f"summary.json: state is {state}")

    def _last_words(self) -> str:
        lines = (self.directory / "printed.txt").read_text().splitlines()
        return " / ".join(lines[-2:])


def _tables_differ(path: Path, events: list[Recorded]) -> list[str]:
    with Store(path, read_only=True) as store:
        through, found = store.through_seq, {t.table: t for t in store.table_digests()}
    tables, memory = Tables(), MemoryTables()
    for recorded in events[:through]:
        tables.evolve(recorded)
        memory.apply(tables.take())
    return [f"table {t.table} differs from the log's" for t in memory.digests() if found.get(t.table) != t]


def _names(process: psutil.Process, target: str) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    if target == "engine":
        return "gyre.workers.engine_host" in words
    if target == "nats-server":
        return bool(words) and words[0].endswith("nats-server")
    return words[2:5] == ["gyre.cli", "process", target]


async def core_engine(run_pid: int) -> psutil.Process:
    """The engine of the first cell, as soon as it is there: long before it can serve."""
    while True:
        for process in psutil.Process(run_pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                cell = process.parent()
                if _names(process, "engine") and cell is not None and "--cell" not in cell.cmdline():
                    return process
        await asyncio.sleep(0.05)


def is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:120]
    except psutil.Error:
        return str(process.pid)


def make_config(policy: Path, cells: bool = False) -> dict:
    harness = (Path(__file__).parent / "lucky_harness.py").read_text()
    command = [base_python(), "-I", "-S", "-c", harness, "{base_url}", "{instruction}"]
    more = CELLS | {"trainer": CONFIG["trainer"] | CELLS_TRAINER} if cells else {}
    return (
        CONFIG
        | more
        | {
            "policy": {"path": str(policy), "warm_start": False},
            "harness": {"name": "command", "command": command, "deadline_s": 90, "max_concurrent": 4},
        }
    )


def run_seeds(seeds: list[int], root: Path, *, cells: bool = False, num_kills: int = 0) -> list[Outcome]:
    """Prints a line a seed as it ends."""
    policy = root / "policy"
    if not policy.exists():
        init = [sys.executable, "-m", "gyre.cli", "policy", "init", str(policy), "--random"]
        subprocess.run(init, check=True, stdout=subprocess.DEVNULL, timeout=120)
    outcomes = []
    for seed in seeds:
        shutil.rmtree(root / f"seed-{seed}", ignore_errors=True)
        kills = plan(seed, num_kills=num_kills, num_events=CELLS_EVENTS if cells else MAX_EVENTS)
        outcome = asyncio.run(Seed(seed, root, make_config(policy, cells), kills).run())
        print(outcome.line(), flush=True)
        outcomes.append(outcome)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(prog="chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("seeds", nargs="*", default=["1-33"], help="as in 7 or 1-33")
    parser.add_argument("--root", type=Path, help="where the runs are made; default: a temporary directory")
    parser.add_argument("--cells", action="store_true", help="runs with a core and two satellites")
    parser.add_argument("--kills", type=int, default=0, help="in each run; default: a few, by its seed")
    args = parser.parse_args()
    seeds = [n for text in args.seeds for n in range(int(text.split("-")[0]), int(text.split("-")[-1]) + 1)]
    root = (args.root or Path(tempfile.mkdtemp(prefix="gyre-chaos-"))).resolve()
    begun = time.monotonic()
    outcomes = run_seeds(seeds, root, cells=args.cells, num_kills=args.kills)
    failed = [outcome.seed for outcome in outcomes if outcome.faults]
    by_process = Counter(kill.partition("@")[0].partition("+")[0] for o in outcomes for kill in o.kills)
    closing = {
        "seeds": len(seeds),
        "failed": failed,
        "kills": dict(by_process.most_common()),
        "missed": sum(len(outcome.missed) for outcome in outcomes),
        "restarts": sum(outcome.num_restarts for outcome in outcomes),
        "resumes": sum(outcome.num_resumes for outcome in outcomes),
        "events": sum(outcome.num_events for outcome in outcomes),
        "seconds": round(time.monotonic() - begun, 1),
    }
    print(msgspec.json.encode(closing).decode())
    if failed:
        print(f"what failed is in {root}; again: make chaos SEEDS='{' '.join(map(str, failed))}'", file=sys.stderr)
        sys.exit(1)
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
