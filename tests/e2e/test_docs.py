"""Every gyre command of README, guide, log and export page is run as it stands, on a small run of the same name."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
DOCS = ("README.md", "docs/guide.md", "docs/log.md", "docs/export.md")
SMALL = """
seed: 3
harness: {{name: {harness}, deadline_s: 60, max_turns: 3, max_concurrent: 4}}
policy: {{path: policies/tiny, warm_start: false}}
sampling: {{max_tokens: 24}}
pipeline: {{num_steps: 2, groups_per_step: 2, executions_per_group: 2}}
log: {{min_free_gb: 0}}
"""
ELSEWHERE = ("gyre policy init",)
"""Minutes long: the warm start has tests of its own."""


def commands() -> list[str]:
    """Lines of the bash blocks that call gyre, in the order of the documents, each once."""
    found: list[str] = []
    for name in DOCS:
        for block in re.findall(r"```bash\n(.*?)```", (ROOT / name).read_text(), re.S):
            found += [line.split(" #")[0].strip() for line in block.splitlines() if line.startswith("gyre ")]
    return [c for c in dict.fromkeys(found) if not c.startswith(ELSEWHERE)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `gyre run examples/quickstart.yaml` has made runs/quickstart, with a small config of that name."""
    directory = tmp_path_factory.mktemp("docs")
    (directory / "examples").mkdir()
    for name, harness in (("quickstart", "reference"), ("mini-swe-agent", "mini-swe-agent")):
        (directory / "examples" / f"{name}.yaml").write_text(SMALL.format(harness=harness))
    (directory / "examples" / "elastic.yaml").write_text(SMALL.format(harness="reference") + "cells: {count: 2}\n")
    done = run("gyre run examples/quickstart.yaml", directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


def run(command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "gyre.cli", *shlex.split(command)[1:]]
    return subprocess.run(argv, cwd=directory, capture_output=True, text=True, timeout=300, check=False)


def test_there_are_commands_in_the_documents() -> None:
    assert len(commands()) >= 10


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_documents_works(command: str, directory: Path) -> None:
    if command == "gyre run examples/quickstart.yaml --dir runs/quickstart":
        assert "complete" in run(command, directory).stderr, "it goes on with unfinished runs only"
        return
    done = run(command, directory)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert done.stdout.strip(), "it says something"


def test_a_notebook_reads_the_tables_of_two_runs(directory: Path) -> None:
    """Both ended; `runs/again` as the log page makes it."""
    for command in ("gyre log export runs/quickstart two.gyre", "gyre log import two.gyre runs/again"):
        done = run(command, directory)
        assert done.returncode == 0 or (directory / "runs" / "again").exists(), done.stderr
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/export.md").read_text(), re.S)
    done = subprocess.run(
        [sys.executable, "-c", block], cwd=directory, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "score_mean" in done.stdout
    assert (directory / "calls.parquet").stat().st_size > 0


def test_what_make_runs_is_what_the_readme_says() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "gyre run examples/quickstart.yaml" in makefile
    assert "-m pytest" in makefile
    assert "make test" in (ROOT / ".ci/run").read_text()
    assert {p.name for p in (ROOT / "examples").glob("*.yaml")} >= {"quickstart.yaml", "mini-swe-agent.yaml"}
