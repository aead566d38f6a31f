"""What commands do when their output cannot be written, or nobody reads it any more."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gyre.cli.wiring import new_place
from gyre.errors import ConfigError
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


def test_an_error_that_names_no_place_gets_the_one_that_was_asked_for(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "what was copied")
    for error, named in ((full, True), (OSError(errno.EROFS, "read-only"), True), (OSError("a bug"), False)):
        with pytest.raises(OSError) as found, new_place(tmp_path / "new"):
            raise error
        assert (found.value.filename == str(tmp_path / "new")) is named
    with pytest.raises(ConfigError, match="exists already"), new_place(tmp_path):
        pass
