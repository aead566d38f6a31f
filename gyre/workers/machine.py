"""Shell. The machine that figures were measured on: operating system -> Machine."""

import os
import platform
from pathlib import Path

import psutil

from gyre.workers.bench import Machine
from gyre.workers.doctor import versions


def this_machine() -> Machine:
    """Cores are those that this process may use."""
    found = versions()
    return Machine(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gb=round(psutil.virtual_memory().total / 1e9, 1),
        cpu=_cpu_model(),
        os=f"{platform.system()} {platform.release()}",
        python=found.pop("python"),
        versions=found,
    )


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
