"""What of the sandbox's contract is gyre's own where the walls are a provider's: with the real package, if it is there.

`local_environment.py` stands in for a provider's host.
"""

import asyncio
import sys
import time
from pathlib import Path

import pytest

from gyre.agents.harbor_sandbox import HarborSandbox
from gyre.agents.places import Bind, Limits
from gyre.errors import SandboxError

HERE = Path(__file__).parent


def test_without_harbor_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "harbor", None)
    monkeypatch.setitem(sys.modules, "harbor.environments.factory", None)
    with pytest.raises(SandboxError, match=r"pip install 'gyre\[harbor\]', with Python 3.12"):
        HarborSandbox("daytona", "python:3.12", gateway_host="127.0.0.1")


@pytest.fixture
def sandbox(monkeypatch: pytest.MonkeyPatch) -> HarborSandbox:
    pytest.importorskip("harbor.environments.factory", reason="harbor is not installed: it needs Python 3.12")
    monkeypatch.syspath_prepend(str(HERE))
    return HarborSandbox("local_environment:LocalEnvironment", "python:3.12", gateway_host="127.0.0.1")


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    path = tmp_path / "workspaces/g0"
    path.mkdir(parents=True)
    return path


def test_the_workspace_goes_there_and_comes_back(sandbox: HarborSandbox, workspace: Path) -> None:
    from local_environment import MADE

    (workspace / "old").write_text("old")
    (workspace / "gone").write_text("gone")
    script = "cat old; rm gone; mkdir d; echo new > d/new; ln -s old link; echo err >&2; exit 7"
    run = sandbox.run(
        ["sh", "-c", script], env={"A": "b"}, workspace=workspace, deadline_s=20, socket_path=Path("/gateway")
    )
    ended = asyncio.run(run)
    assert (ended.code, ended.output_tail, ended.timed_out) == (7, "olderr\n", False)
    assert sorted(path.name for path in workspace.iterdir()) == ["d", "link", "old"]
    assert (workspace / "d/new").read_text() == "new\n"
    assert MADE[-1].stopped
    assert MADE[-1]._network_policy.allowed_hosts == ["127.0.0.1"]
    assert MADE[-1].task_env_config.memory_mb == Limits().max_memory >> 20
    assert [path.name for path in workspace.parent.iterdir()] == ["g0"], "nothing is left beside it"


def test_the_deadline_is_told_first_and_kept(sandbox: HarborSandbox, workspace: Path) -> None:
    began = time.monotonic()
    script = "trap 'echo saved > file; exit 5' TERM; while :; do sleep 0.05; done"
    ended = asyncio.run(sandbox.run(["sh", "-c", script], env={}, workspace=workspace, deadline_s=2))
    assert (ended.timed_out, ended.code) == (True, 5)
    assert (workspace / "file").read_text() == "saved\n"
    ended = asyncio.run(
        sandbox.run(["sh", "-c", "trap '' TERM; echo x > y; sleep 60"], env={}, workspace=workspace, deadline_s=1)
    )
    assert (ended.timed_out, ended.code) == (True, -9)
    assert (workspace / "y").exists()
    assert time.monotonic() - began < 30


def test_graded_commands_and_a_workspace_that_is_only_read(sandbox: HarborSandbox, workspace: Path) -> None:
    from local_environment import MADE

    run = sandbox.run(
        ["exit 3", "sleep 20", "true"], env={}, workspace=workspace, read_only=True, grade_s=1.5, deadline_s=30
    )
    assert asyncio.run(run).codes == (3, -9, 0)
    assert MADE[-1]._network_policy.network_mode.value == "no-network"


def test_what_a_verifier_reports_comes_back(sandbox: HarborSandbox, workspace: Path, tmp_path: Path) -> None:
    tests, logs = tmp_path / "tests", tmp_path / "logs"
    tests.mkdir()
    (tests / "test.sh").write_text("mkdir -p ../logs/verifier; echo 0.5 > ../logs/verifier/reward.txt")
    logs.mkdir()
    binds = (Bind(source=tests, target="/tests"), Bind(source=logs, target="/logs", writable=True))
    run = sandbox.run(["sh", "/tests/test.sh"], env={}, workspace=workspace, binds=binds, deadline_s=20)
    assert asyncio.run(run).code == 0
    assert (logs / "verifier/reward.txt").read_text() == "0.5\n"


def test_a_cancelled_program_leaves_no_environment(sandbox: HarborSandbox, workspace: Path) -> None:
    from local_environment import MADE

    async def cancelled() -> None:
        argv = ["sh", "-c", "echo > here; sleep 60"]
        task = asyncio.create_task(sandbox.run(argv, env={}, workspace=workspace, deadline_s=60))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert MADE[-1].stopped
    assert not MADE[-1].root.exists()


def test_a_provider_that_fails_is_no_program_that_failed(
    sandbox: HarborSandbox, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from local_environment import LocalEnvironment

    async def start(self: LocalEnvironment, force_build: bool) -> None:
        raise RuntimeError("quota exceeded")

    monkeypatch.setattr(LocalEnvironment, "start", start)
    with pytest.raises(SandboxError, match="quota exceeded"):
        asyncio.run(sandbox.run(["true"], env={}, workspace=workspace, deadline_s=5))
