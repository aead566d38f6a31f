"""Shell. CPU seconds of a run's processes, by part, read from /proc while it goes on. Linux.

Invariant: what is read never falls: the last reading of a process that has ended stands. Sandboxes are counted when
the dispatcher has reaped them, by the kernel, with everything that ran inside.

Direction: /proc -> Reading (one every `PERIOD_S`) -> seconds by part between two times.
"""

import os
import threading
import time
from bisect import bisect_right
from pathlib import Path

PERIOD_S = 0.25
_TICKS = os.sysconf("SC_CLK_TCK")
GYRE = ("supervisor", "nats", "gateway", "dispatcher", "projector", "scheduler", "cell")


class CpuMeter:
    """Readings of the process tree under one `gyre run`, in a thread of their own."""

    def __init__(self, pid: int) -> None:
        self._root = pid
        self._parts: dict[int, str] = {}
        self._seconds: dict[int, float] = {}
        self._sandboxes: dict[int, float] = {}
        self._readings: list[tuple[float, dict[str, float]]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cpu-meter", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def between(self, begin_s: float, end_s: float) -> dict[str, float]:
        """CPU seconds by part between two times since the epoch, interpolated; `machine` is what all cores did."""
        begin, end = self._at(begin_s), self._at(end_s)
        return {name: value - begin.get(name, 0.0) for name, value in end.items()}

    def _run(self) -> None:
        while not self._ended.is_set():
            self._read()
            self._ended.wait(PERIOD_S)
        self._read()

    def _read(self) -> None:
        self._visit(self._root, "supervisor")
        total = {"sandboxes": sum(self._sandboxes.values()), "machine": _machine_s()}
        for pid, seconds in self._seconds.items():
            part = self._parts[pid]
            total[part] = total.get(part, 0.0) + seconds
        self._readings.append((time.time(), total))

    def _visit(self, pid: int, part: str) -> None:
        """One process and those below it; of a dispatcher's only the reaped ones, which come and go too fast."""
        times = _cpu_s(pid)
        if times is None:
            return
        self._parts[pid], self._seconds[pid] = part, times[0]
        if part == "dispatcher":
            self._sandboxes[pid] = times[1]
            return
        for child in _children(pid):
            known = self._parts.get(child, part)
            # Between fork and exec a child still looks like its parent.
            self._visit(child, _part(child, part) if known == part else known)

    def _at(self, at_s: float) -> dict[str, float]:
        index = bisect_right(self._readings, at_s, key=lambda reading: reading[0])
        if index in (0, len(self._readings)):
            return self._readings[min(index, len(self._readings) - 1)][1]
        (before_s, before), (after_s, after) = self._readings[index - 1 : index + 1]
        share = (at_s - before_s) / (after_s - before_s)
        return {name: value - (1 - share) * (value - before.get(name, 0.0)) for name, value in after.items()}


def _part(pid: int, parent: str) -> str:
    """Of a process by its command line; one that says nothing belongs to its parent's part."""
    try:
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return parent
    if "process" in argv[:-1]:
        return argv[argv.index("process") + 1]
    if "gyre.workers.engine_host" in argv:
        return "engine"
    return "nats" if argv[0].endswith("nats-server") else parent


def _cpu_s(pid: int) -> tuple[float, float] | None:
    """(own, reaped children's); None when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    own, reaped = (sum(map(int, fields[i : i + 2])) / _TICKS for i in (11, 13))
    return own, reaped


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, path.read_text().split())
        except OSError:
            continue  # the thread ended
    return found


def _machine_s() -> float:
    """CPU seconds that anybody used since boot: all but idle and waiting for disks."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    return sum(int(value) for index, value in enumerate(fields) if index not in (3, 4)) / _TICKS
