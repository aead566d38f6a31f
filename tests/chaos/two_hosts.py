"""One run on two hosts: `gyre run` with the core on one, a satellite that knows only the log's address on the other.

    python -m tests.chaos.two_hosts DIR [--cut]

The hosts are network namespaces where the machine allows them, else two addresses of the loopback; each has its own
files, and each cell two ranks. `--cut`: cells of one rank; the satellite's host is lost while it serves (its wire is
unplugged; on the loopback, all of it is killed) and comes back. Prints one JSON object: what the run's tables say, and
what does not hold.
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil

from gyre.config import load_config
from gyre.events.access import open_log
from gyre.events.cluster import Host
from gyre.events.codec import Recorded
from gyre.events.run_dir import RunDir
from gyre.events.server import Server, free_ports, make_passwords, read_passwords
from gyre.events.types import CallCut, CallFailed, CallStarted, CellJoined, CellLost, Event
from tests.chaos import namespaces
from tests.chaos.driver import core_engine, make_config
from tests.chaos.invariants import broken

RUN_S = 300.0
CELLS = {"count": 2, "elsewhere": 1, "claim_deadline_s": 60, "lease_s": 6}
NUM_STEPS, NUM_STEPS_CUT = 3, 10
LOOPBACKS = (Host("127.0.0.1"), Host("127.0.0.2"))
NUM = "select cell, count(*) as num from {} group by cell order by cell"
GYRE = (sys.executable, "-m", "gyre.cli")


class World:
    """Two hosts, a NATS server on the first, and a policy that each has a copy of."""

    def __init__(self, root: Path, hosts: tuple[Host, ...], num_steps: int, num_ranks: int) -> None:
        self.here, self.there = hosts[:2]
        self.folders = [root / "here", root / "there"]
        policy = root / "here/policy"
        init = [*GYRE, "policy", "init", str(policy), "--random"]
        subprocess.run(init, check=True, stdout=subprocess.DEVNULL, timeout=120)
        shutil.copytree(policy, root / "there/policy")
        nats = root / "nats"
        nats.mkdir()
        make_passwords(nats)
        self.server = Server(
            nats,
            free_ports(1)[0],
            read_passwords(nats),
            "always",
            root / "nats.log",
            "",
            self.here.address,
            self.here.via,
        )
        self.server.start()
        settings = make_config(policy, cells=True)
        settings |= {
            "cells": CELLS | {"advertise": self.here.address, "ranks_per_host": num_ranks},
            "pipeline": settings["pipeline"] | {"num_steps": num_steps},
            "log": {"url": self.server.url, "min_free_gb": 0},
            "scheduler": {"policy": "colocated"},  # so that the satellite trains, too, however few the executions
        }
        self.config_path = root / "here/hosts.yaml"
        self.config_path.write_bytes(msgspec.yaml.encode(settings))
        self.run_dir = RunDir(root / "here/run")

    def start(self, host: Host, folder: Path, *args: str) -> subprocess.Popen[bytes]:
        env = os.environ | {"GYRE_NATS_TOKEN": self.server.token}
        with (folder / "printed.txt").open("ab") as output:
            command = [*host.via, *GYRE, *args]
            return subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=output)

    def start_run(self) -> subprocess.Popen[bytes]:
        return self.start(self.here, self.folders[0], "run", str(self.config_path), "--dir", str(self.run_dir.path))

    def start_satellite(self) -> subprocess.Popen[bytes]:
        where = ("--nats", self.server.url, "--run", "run", "--cell", "c1", "--advertise", self.there.address)
        return self.start(self.there, self.folders[1], "cell", *where, "--policy", "policy", "--dir", "cell")


def play(root: Path, hosts: tuple[Host, ...], *, is_cut: bool) -> dict[str, Any]:
    world = World(root, hosts, *((NUM_STEPS_CUT, 1) if is_cut else (NUM_STEPS, 2)))
    children: list[subprocess.Popen[bytes]] = []
    try:
        run = world.start_run()
        children.append(run)
        give_up = time.monotonic() + RUN_S
        while not (world.run_dir.path / "gateway.port").exists() and run.poll() is None:  # it has begun
            time.sleep(0.1)
        engine = asyncio.run(core_engine(run.pid))
        engine.suspend()  # until the satellite serves, however late it is
        try:
            children.append(world.start_satellite())
            asyncio.run(until(world.run_dir, lambda e: isinstance(e, CallStarted) and e.cell == "c1", give_up))
        finally:
            engine.resume()
        if is_cut:
            lose(world, children[-1])
            asyncio.run(until(world.run_dir, lambda e: isinstance(e, CellLost) and e.cell == "c1", give_up))
            if namespaces.is_inside():
                namespaces.plug(world.there.via[-1].rpartition("/")[2])
            else:
                children[-1] = world.start_satellite()
        codes = [child.wait(max(1.0, give_up - time.monotonic())) for child in children]
        events = asyncio.run(events_of(world.run_dir))
        return {
            "codes": codes,
            "cells": query(world.run_dir, "select cell, engine_url from cells order by cell"),
            "calls": query(world.run_dir, "select cell, count(*) as num from calls group by cell order by cell"),
            "microsteps": query(
                world.run_dir, "select cell, count(*) as num from microsteps group by all order by all"
            ),
            "lost": [r.event.reason for r in events if isinstance(r.event, CellLost) and r.event.cell == "c1"],
            "joined": sum(isinstance(r.event, CellJoined) and r.event.cell == "c1" for r in events),
            "not_completed": sum(isinstance(r.event, CallCut | CallFailed) for r in events),
            "faults": [*broken(events, load_config(world.config_path.read_text()), {})],
        }
    finally:
        for child in children:
            if child.poll() is None:
                child.terminate()
                child.wait(30)
        world.server.stop()


def lose(world: World, satellite: subprocess.Popen[bytes]) -> None:
    if namespaces.is_inside():
        namespaces.unplug(world.there.via[-1].rpartition("/")[2])
        return
    process = psutil.Process(satellite.pid)
    for victim in (process, *process.children(recursive=True)):
        victim.kill()
    satellite.wait()


async def until(run_dir: RunDir, is_it: Callable[[Event], bool], give_up: float) -> None:
    async with asyncio.timeout(give_up - time.monotonic()), open_log(run_dir) as (log, _):
        async for recorded in log.read(1):
            if is_it(recorded.event):
                return


async def events_of(run_dir: RunDir) -> list[Recorded]:
    async with open_log(run_dir) as (log, _):
        return [recorded async for recorded in log.read(1, until=await log.last_seq())]


def query(run_dir: RunDir, text: str) -> list[dict[str, Any]]:
    done = subprocess.run([*GYRE, "sql", str(run_dir.path), text, "--json"], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(prog="two_hosts", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root", type=Path)
    parser.add_argument("--cut", action="store_true")
    args = parser.parse_args()
    namespaces.enter(["-m", "tests.chaos.two_hosts", *sys.argv[1:]])
    hosts = namespaces.make_hosts() if namespaces.is_inside() else LOOPBACKS
    print(json.dumps(play(args.root.resolve(), hosts, is_cut=args.cut)), flush=True)


if __name__ == "__main__":
    main()
