"""Programs of the agent run in a process of their own: they can neither see nor change the test that asks."""

import secrets
import subprocess
import sys

import pytest

WORKSPACE = "/workspace"


@pytest.fixture
def check():
    def run(code, timeout=10):
        """Python code in the workspace; what it printed. It fails unless the code ran to its last line."""
        word = secrets.token_hex(8)
        done = subprocess.run(
            [sys.executable, "-B", "-c", f"{code}\nprint({word!r})"],
            cwd=WORKSPACE, capture_output=True, text=True, timeout=timeout,
        )
        assert done.returncode == 0, done.stderr[-500:]
        assert done.stdout.rstrip().endswith(word), "it ended early"
        return done.stdout.rsplit(word, 1)[0]

    return run


@pytest.fixture
def shell():
    def run(command, timeout=10):
        """A shell command in the workspace; what it printed. It fails unless the command returns 0."""
        done = subprocess.run(["sh", "-c", command], cwd=WORKSPACE, capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, done.stderr[-500:]
        return done.stdout

    return run
