"""What commands do when their output cannot be written, or nobody reads it any more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gyre.workers.output import tell


def unread(*args: str, cwd: Path) -> tuple[int, str]:
    """Exit code and errors of a command whose reader has gone before it begins."""
    reading, writing = os.pipe()
    os.close(reading)
    argv = [sys.executable, "-m", "gyre.cli", *args]
    with os.fdopen(writing, "w") as pipe:
        done = subprocess.run(argv, cwd=cwd, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("args", [("runs",), ("runs", "--json")], ids=" ".join)
def test_a_command_whose_reader_has_gone_ends_as_others_do(args: tuple[str, ...], tmp_path: Path) -> None:
    assert unread(*args, cwd=tmp_path) == (141, "")


def test_what_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "gyre.cli", "runs", "--json"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(argv, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr and done.stderr.count("\n") == 1


def test_work_goes_on_when_its_reader_has_gone() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as pipe:
        tell("one", pipe)
        assert os.read(reading, 100) == b"one\n"
        os.close(reading)
        tell("two", pipe)
        print("three", file=pipe, flush=True)
