"""The base install has no torch: log, projections, SQL and CLI work all the same."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from gyre.cli import app
from gyre.cli.starting import choose_run_dir

NO_STACK = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "sglang", "megatron", "mooncake", "transformers", "safetensors"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from gyre.cli import main
sys.argv = ["gyre", *sys.argv[1:]]
main()
"""


def without_stack(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", NO_STACK, *args], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["runs"],
        ["harness", "list"],
        ["sql", "--help"],
        ["consume", "--help"],
        ["log", "verify", "--help"],
        ["batch", "show", "--help"],
        ["export", "--help"],
    ],
    ids=" ".join,
)
def test_commands_that_need_no_stack_work_without_it(args: list[str], tmp_path: Path) -> None:
    done = without_stack(*args, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def commands(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    for key, command in group.commands.items():
        yield from commands(command, f"{name} {key}") if hasattr(command, "commands") else [(f"{name} {key}", command)]


@pytest.mark.parametrize(("name", "command"), list(commands(typer.main.get_command(app), "gyre")))
def test_every_command_has_an_example_and_each_option_is_explained(name: str, command: Any) -> None:
    assert re.search(r"`gyre .*`", command.epilog or ""), name
    assert command.help
    assert [p.name for p in command.params if p.param_type_name == "option" and not p.help] == []


def test_a_run_says_in_one_line_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("seed: 1")
    done = without_stack("run", "c.yaml", cwd=tmp_path)
    assert done.returncode == 1
    assert "not installed: torch" in done.stderr
    assert "make setup" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pipelin: {}", "pipelin: unknown key; did you mean pipeline?"),
        ("harness: {name: claude}", "there is no harness 'claude'"),
        ("policy: {path: nowhere, init: false}", "gyre policy init nowhere"),
        ("policy: {path: c.yaml}", "policy.path: c.yaml: is a file; give a directory"),
        ("tasks: {family: chess}", "there is no family 'chess'"),
        ("harness: {sandbox: none}", "--unsafe-no-sandbox"),
        ("harness: {name: command}", "harness.command"),
    ],
)
def test_bad_input_is_one_clear_line_before_anything_starts(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    argv = [sys.executable, "-m", "gyre.cli", "run", "c.yaml"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["run", "folder"], "folder: cannot be read: Is a directory"),
        (["run", "bytes.yaml"], "bytes.yaml: cannot be read: not UTF-8 text"),
        (["run", "absent.yaml"], "absent.yaml: no such config; examples/ has some"),
        (["run", "good.yaml", "--dir", "good.yaml"], "--dir good.yaml: is a file; give a directory"),
        (["run", "good.yaml", "--dir", "."], "--dir .: holds other things than a run; give a new directory"),
        (["run", "good.yaml", "--dir", "a b"], "run directory 'a b': use 1 to 64 letters"),
        (["harness", "check", "command"], "which? add -- my-agent --base-url {base_url}"),
        (["gateway", "--engine", "127.0.0.1:30000", "--policy", "p"], "give its URL, as in http://127.0.0.1:30000"),
        (["gateway", "--engine", "http://127.0.0.1:1", "--policy", "p"], "p/config.json: missing; give the directory"),
    ],
)
def test_what_cannot_be_read_or_reached_is_one_clear_line(args: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe")
    (tmp_path / "good.yaml").write_text("seed: 3")
    argv = [sys.executable, "-m", "gyre.cli", *args]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "args", [["harness", "check", "reference"], ["tasks", "check", "files"], ["tasks", "from-sdist", "a.tar.gz", "a"]]
)
def test_what_needs_bubblewrap_says_so_in_one_line(args: list[str], tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "gyre.cli", *args]
    env = os.environ | {"PATH": str(tmp_path)}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("gyre: sandbox: bwrap is not installed; install bubblewrap 0.8 or newer")
    assert len(done.stderr.splitlines()) == 1
    assert not any(tmp_path.iterdir())


def test_a_run_directory_is_named_after_its_config_in_letters_that_subjects_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert choose_run_dir(None, "qwen2.5 long").path == Path("runs/qwen2-5-long")
    Path("runs/qwen2-5-long").mkdir(parents=True)
    assert choose_run_dir(None, "qwen2.5 long").path == Path("runs/qwen2-5-long-2")
