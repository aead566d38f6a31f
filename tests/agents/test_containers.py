"""Containers without a daemon: what is asked of `docker` and `podman` is what they say that they take.

The contract itself is in test_sandbox.py, for each program whose daemon is there.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyre.agents.containers import EXPIRES_LABEL, ContainerSandbox, run_options
from gyre.agents.places import Bind, Limits
from gyre.cli import app
from gyre.cli.starting import check_before_start
from gyre.config import load_config
from gyre.errors import SandboxError

PROGRAMS = ("docker", "podman")


def options(program: str, *, source: str = "/w", limits: Limits | None = None) -> list[str]:
    return run_options(
        program,  # type: ignore[arg-type]
        "gyre-x",
        limits=limits or Limits(),
        labels={EXPIRES_LABEL: "9"},
        env={"A": "b c"},
        seen=(Bind(source=Path(source), target="/workspace", writable=True), Bind(source=Path("/c"), target="/config")),
        workdir="/workspace",
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_option_is_one_that_the_program_has(program: str) -> None:
    if not shutil.which(program):
        pytest.skip(f"{program} is not installed")
    told = subprocess.run([program, "run", "--help"], capture_output=True, text=True, check=True).stdout
    known = set(re.findall(r"--[a-z][a-z-]*", told))
    asked = {word.partition("=")[0] for word in options(program) if word.startswith("--")}
    assert not asked - known
    assert {"--rm", "--interactive", "--read-only", "--network", "--memory", "--pids-limit", "--cap-drop"} <= asked


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_network_no_rights_and_bounds_on_everything(program: str) -> None:
    found = options(program, limits=Limits(max_processes=7, max_memory=99 << 20, tmp_size=5 << 20, max_files=64))
    for word in (
        "--network=none", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--pull=never",
        "--pids-limit=7", f"--memory={99 << 20}", f"--memory-swap={99 << 20}", f"--shm-size={5 << 20}",
        "--ulimit=nofile=64:64", "--log-driver=none", "--label=gyre.expires=9", "--env=A=b c",
        "--mount=type=bind,source=/w,target=/workspace", "--mount=type=bind,source=/c,target=/config,readonly",
    ):  # fmt: skip
        assert word in found
    assert f"size={5 << 20}" in next(word for word in found if word.startswith("--tmpfs=/tmp:"))
    assert "--privileged" not in found


def test_a_path_that_cannot_be_written_down_is_refused() -> None:
    with pytest.raises(SandboxError, match="a path with a comma"):
        options("docker", source="/a,readonly=false")


def test_a_program_that_is_missing_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SandboxError, match="docker is not installed; install it, or set"):
        ContainerSandbox("docker", "image")


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_left_of_dead_runs_is_removed_by_label_and_by_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    """Against a program that lists four containers: ours, another run's, one that is out of its time, one as ours by
    name alone."""
    fake = tmp_path / program
    fake.write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\ncase $1 in\nps) printf "a\\nb\\nc\\nd\\n";;\n'
        'inspect) printf "/runs/mine/workspaces/g\\t99999999999\\n/runs/other/w\\t99999999999\\n/runs/other/w\\t5\\n'
        '/runs/mine-2/w\\t99999999999\\n";;\nesac\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    ContainerSandbox(program, "image").end_strays(Path("/runs/mine"))  # type: ignore[arg-type]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[0] == "ps --all --quiet --filter label=gyre.workspace"
    assert asked[-1] == "rm --force a c"


def test_a_run_without_a_daemon_ends_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docker").write_text("#!/bin/sh\necho 'docker: Cannot connect to the Docker daemon' >&2\nexit 125\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxError, match=r"Cannot connect to the Docker daemon.*docker pull python:3\.11-slim"):
        check_before_start(load_config("harness: {sandbox: docker}"), unsafe=False)
    done = CliRunner().invoke(app, ["tasks", "check", "files", "--sandbox", "docker", "--image", "mine"])
    assert isinstance(done.exception, SandboxError) and "docker pull mine" in str(done.exception)
