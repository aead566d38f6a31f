"""The warning that comes before admission stops."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from gyre.workers import disk


def test_a_low_disk_is_told_once_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([5.0, 0.9, 0.8, 3.0, 0.7])
    done = asyncio.Event()

    def usage(path: Path) -> SimpleNamespace:
        try:
            return SimpleNamespace(free=next(free) * 1e9)
        except StopIteration:
            done.set()
            return SimpleNamespace(free=0.7e9)

    async def main() -> None:
        async with disk.disk_watch(tmp_path, 0.5, said.append):
            await asyncio.wait_for(done.wait(), 120)

    said: list[str] = []
    monkeypatch.setattr(disk, "CHECK_S", 0.001)
    monkeypatch.setattr(disk.shutil, "disk_usage", usage)
    asyncio.run(main())
    assert said == [
        "disk: 0.90 GB free; below 0.5 GB (log.min_free_gb) nothing new starts: make room",
        "disk: 0.70 GB free; below 0.5 GB (log.min_free_gb) nothing new starts: make room",
    ]


def test_no_floor_no_warning() -> None:
    assert disk.disk_warning(0.0, 0.0) == ""
