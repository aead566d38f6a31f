"""The disk of a whole run fills up: it ends with an error that says so, and goes on when there is room.

    python -m tests.chaos.full_disk [--after NUM_EVENTS]

Needs the whole stack and namespaces; `make chaos` runs it. One JSON object at the end.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from gyre.config import load_config
from gyre.events.access import open_log
from gyre.events.run_dir import RunDir
from tests.chaos import namespaces
from tests.chaos.driver import Reader, make_config
from tests.chaos.invariants import broken
from tests.chaos.namespaces import Disk

DISK = "300m"
RUN_S = 400.0
AFTER = 60


async def play(root: Path, after: int) -> dict[str, object]:
    policy = root / "policy"
    await _gyre("policy", "init", str(policy), "--random", cwd=root)
    disk = Disk(root / "disk", DISK)
    config, run_dir = root / "full.yaml", RunDir(root / "disk" / "run")
    config.write_bytes(msgspec.yaml.encode(make_config(policy)))
    command = ("run", str(config), "--dir", str(run_dir.path))
    reader = Reader(run_dir)
    reading = asyncio.create_task(reader.run())
    try:
        first, first_s, words = await _run(command, root, lambda: len(reader.seen) >= after and disk.fill())
        disk.empty()
        num_seen = len(reader.seen)
        second, second_s, _ = await _run(command, root, lambda: True)
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    async with open_log(run_dir) as (log, _):
        events = [recorded async for recorded in log.read(until=await log.last_seq())]
    verified, verify = await _gyre("log", "verify", str(run_dir.path), cwd=root)
    faults = list(broken(events, load_config(config.read_text()), reader.seen))
    if first != 1 or "Traceback" in words or not any(w in words.lower() for w in ("disk full", "no space left")):
        faults.append(f"the first command ended with {first} and said: {words}")
    if second or verified:
        faults.append(f"the second command ended with {second}; verify: {verify}")
    return {
        "seen_before": num_seen,
        "said": words,
        "seconds": [round(first_s), round(second_s)],
        "events": len(events),
        "verify": verify.strip(),
        "faults": faults,
    }


async def _run(command: Sequence[str], root: Path, then: Callable[[], bool]) -> tuple[int, float, str]:
    """Exit code, seconds, and the last line that it printed; `then` is called until it is true."""
    begun, is_done = time.monotonic(), False
    running = asyncio.create_task(_gyre(*command, cwd=root))
    while not running.done():
        is_done = is_done or then()
        await asyncio.sleep(0.05)
    code, text = await running
    return code, time.monotonic() - begun, text.strip().rpartition("\n")[2]


async def _gyre(*args: str, cwd: Path) -> tuple[int, str]:
    """Exit code, and all that it printed."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "gyre.cli", *args)
    child = await asyncio.create_subprocess_exec(*command, cwd=cwd, stdout=pipe, stderr=asyncio.subprocess.STDOUT)
    try:
        async with asyncio.timeout(RUN_S):
            printed, _ = await child.communicate()
    finally:
        if child.returncode is None:
            child.terminate()
            await child.wait()
    return child.returncode or 0, printed.decode()


def main() -> None:
    parser = argparse.ArgumentParser(prog="full-disk", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--after", type=int, default=AFTER, help="how many events are recorded before the disk is full")
    args = parser.parse_args()
    namespaces.enter(["-m", "tests.chaos.full_disk", *sys.argv[1:]])
    if not namespaces.is_inside():
        print(msgspec.json.encode({"skipped": namespaces.why_not()}).decode())
        return
    with tempfile.TemporaryDirectory(prefix="gyre-full-disk-", ignore_cleanup_errors=True) as root:
        outcome = asyncio.run(play(Path(root), args.after))
    print(msgspec.json.encode(outcome).decode())
    sys.exit(1 if outcome["faults"] else 0)


if __name__ == "__main__":
    main()
