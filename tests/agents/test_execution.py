"""Real harnesses in a real sandbox against a scripted gateway on a socket file."""

import asyncio
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from gyre.agents.containers import check_container
from gyre.agents.dispatcher import Ended
from gyre.agents.execution import HarnessRunner
from gyre.agents.harness_install import harness_home, install, installed, require
from gyre.agents.harnesses import RECIPES, find_recipe, launch
from gyre.agents.places import AnySandbox, Places
from gyre.agents.sandbox import Sandbox, check_sandbox
from gyre.agents.sandboxes import open_sandbox
from gyre.agents.tasks import GradedTest, Task
from gyre.agents.unsandboxed import NoSandbox
from gyre.config import HarnessConfig
from gyre.errors import ConfigError, HarnessError

MISSING = check_sandbox()
needs_sandbox = pytest.mark.skipif(bool(MISSING), reason=MISSING)
needs_mini = pytest.mark.skipif(
    not installed("mini-swe-agent"),
    reason="mini-swe-agent is not installed: gyre harness install mini-swe-agent takes about 10 s and 40 MB",
)
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
Reply = dict[str, Any]
Turn = Reply | web.Response


def bash(*commands: str, call: str = "c") -> Reply:
    calls = [
        {"id": f"{call}{n}", "type": "function", "function": {"name": "bash", "arguments": json.dumps({"command": c})}}
        for n, c in enumerate(commands)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def play(
    config: HarnessConfig,
    workspace: Path,
    script: Sequence[Turn] | Callable[[int], Turn],
    *,
    sandbox: AnySandbox | None = None,
    instruction: str = "Do this:\n1. Write amber to a.txt",
) -> tuple[Ended, list[Reply]]:
    """One execution against a gateway that answers with `script`, turn by turn; and the bodies it was sent."""
    bodies: list[Reply] = []
    workspace.mkdir(exist_ok=True)
    task = Task(
        id="t",
        family="files",
        split="train",
        instruction=instruction,
        files=(),
        tests=(GradedTest(name="t", command="true"),),
    )

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.path == "/s/s1/v1/chat/completions"
        bodies.append(await request.json())
        turn = script(len(bodies) - 1) if callable(script) else script[len(bodies) - 1]
        if isinstance(turn, web.Response):
            return turn
        return web.json_response({"choices": [{"index": 0, "message": turn, "finish_reason": "stop"}]})

    async def execute() -> Ended:
        application = web.Application()
        application.router.add_post("/{path:.*}", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        path = workspace.parent / "gateway/gateway.sock"
        path.parent.mkdir(exist_ok=True)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        await web.UnixSite(runner, str(path)).start()
        try:
            return await HarnessRunner(
                config,
                sandbox or Sandbox(),
                socket_path=path,
                gateway_url=f"http://127.0.0.1:{runner.addresses[0][1]}",
            ).run(task, "s1", workspace)
        finally:
            await runner.cleanup()

    return asyncio.run(execute()), bodies


@pytest.mark.parametrize("kind", ["bubblewrap", "docker", "podman", "none"])
def test_reference_harness(tmp_path: Path, kind: str) -> None:
    image = os.environ.get("GYRE_TEST_IMAGE", HarnessConfig().image)
    why = {"bubblewrap": check_sandbox, "none": str}.get(kind, lambda: check_container(kind, image))()
    if why:
        pytest.skip(why)
    workspace = tmp_path / "w"
    config = HarnessConfig(sandbox=kind, image=image)  # type: ignore[arg-type]
    sandbox = open_sandbox(config, unsafe=True)
    ended, bodies = play(config, workspace, [bash("echo amber > a.txt; ls"), bash(SUBMIT)], sandbox=sandbox)
    assert (ended.exit_code, ended.detail) == (0, "")
    assert (workspace / "a.txt").read_text() == "amber\n"
    assert bodies[0]["messages"] == [{"role": "user", "content": "Do this:\n1. Write amber to a.txt"}]
    assert bodies[1]["messages"][-1] == {"role": "tool", "tool_call_id": "c0", "content": "rc=0\na.txt"}


@needs_sandbox
@needs_mini
def test_mini_swe_agent(tmp_path: Path) -> None:
    workspace = tmp_path / "w"
    config = HarnessConfig(name="mini-swe-agent")
    first, second = bash("echo amber > a.txt; ls", "exit 3", call="a"), bash("cat none", call="b")
    ended, bodies = play(config, workspace, [first, second, bash(SUBMIT)])
    assert (ended.exit_code, ended.detail) == (0, "")
    assert (workspace / "a.txt").read_text() == "amber\n"
    assert [path.name for path in workspace.iterdir()] == ["a.txt"]
    assert [body["model"] for body in bodies] == ["gyre-policy"] * 3
    assert bodies[0]["tools"][0]["function"]["name"] == "bash"
    # The prompt is as short as that of the reference harness, and each request extends the one before it.
    assert bodies[0]["messages"] == [{"role": "user", "content": "Do this:\n1. Write amber to a.txt"}]
    assert bodies[2]["messages"] == [
        *bodies[0]["messages"],
        first,
        {"role": "tool", "tool_call_id": "a0", "content": "rc=0\na.txt"},
        {"role": "tool", "tool_call_id": "a1", "content": "rc=3"},
        second,
        {"role": "tool", "tool_call_id": "b0", "content": "rc=1\ncat: none: No such file or directory"},
    ]
    assert bodies[2]["messages"][: len(bodies[1]["messages"])] == bodies[1]["messages"]


@needs_sandbox
@needs_mini
def test_mini_swe_agent_honours_the_turn_limit(tmp_path: Path) -> None:
    config = HarnessConfig(name="mini-swe-agent", max_turns=3)
    ended, bodies = play(config, tmp_path / "w", lambda turn: bash("true", call=f"t{turn}"))
    assert (ended.exit_code, len(bodies)) == (0, 3)


@needs_sandbox
@needs_mini
def test_mini_swe_agent_keeps_replies_that_it_cannot_use(tmp_path: Path) -> None:
    text: Reply = {"role": "assistant", "content": "I would rather talk"}
    broken = bash("x")
    broken["tool_calls"][0]["function"]["arguments"] = '{"command": '
    ended, bodies = play(
        HarnessConfig(name="mini-swe-agent"), tmp_path / "w", [text, broken, bash("true"), bash(SUBMIT)]
    )
    assert ended.detail == ""
    assert bodies[3]["messages"][1:] == [
        text,
        {"role": "user", "content": "error: call the tool bash"},
        broken,
        {"role": "tool", "tool_call_id": "c0", "content": 'error: arguments must be JSON like {"command": "ls"}'},
        bash("true"),
        {"role": "tool", "tool_call_id": "c0", "content": "rc=0"},
    ]


@needs_sandbox
@needs_mini
def test_mini_swe_agent_waits_for_a_gateway_that_is_busy(tmp_path: Path) -> None:
    script: list[Turn] = [web.Response(status=503), web.Response(text="{"), bash(SUBMIT)]
    ended, bodies = play(HarnessConfig(name="mini-swe-agent"), tmp_path / "w", script)
    assert (ended.detail, len(bodies)) == ("", 3)


@needs_sandbox
@pytest.mark.parametrize("name", ["reference", pytest.param("mini-swe-agent", marks=needs_mini)])
def test_harness_that_is_refused_fails_with_the_reason(tmp_path: Path, name: str) -> None:
    ended, _ = play(HarnessConfig(name=name), tmp_path / "w", [web.Response(status=400, text="no such session")])
    assert ended.exit_code != 0
    assert "no such session" in ended.detail


def command(*argv: str, deadline_s: float = 60) -> HarnessConfig:
    return HarnessConfig(name="command", command=argv, deadline_s=deadline_s)


@needs_sandbox
def test_harness_that_exits_at_once(tmp_path: Path) -> None:
    ended, _ = play(command("sh", "-c", "echo no licence >&2; exit 9"), tmp_path / "w", [])
    assert ended.detail == "exit code 9: no licence"
    ended, _ = play(command("no-such-harness"), tmp_path / "w", [])
    assert ended.detail == "exit code 127: no-such-harness: No such file or directory"


@needs_sandbox
def test_a_program_of_one_s_own_is_found_in_its_folder(tmp_path: Path) -> None:
    mine = tmp_path / "my agents"
    mine.mkdir()
    (mine / "agent.py").write_text("import sys\nopen('said', 'w').write(sys.argv[1])\nopen(sys.argv[2], 'w')")
    argv = ("python3", "{folder}/agent.py", "{instruction}", "{folder}/mark")
    config = HarnessConfig(name="command", command=argv, folder=str(mine))
    ended, _ = play(config, tmp_path / "w", [])
    assert "Read-only file system" in ended.detail
    assert (tmp_path / "w/said").read_text()
    with pytest.raises(HarnessError, match=r"holds .*, which agents must not see"):
        play(msgspec.structs.replace(config, folder=str(tmp_path)), tmp_path / "w2", [])
    with pytest.raises(HarnessError, match="no such directory"):
        play(msgspec.structs.replace(config, folder=str(mine / "no")), tmp_path / "w3", [])


@needs_sandbox
def test_harness_that_hangs_keeps_its_workspace(tmp_path: Path) -> None:
    began = time.monotonic()
    ended, _ = play(command("sh", "-c", "echo part > done; sleep 999", deadline_s=3), tmp_path / "w", [])
    assert ended.timed_out
    assert time.monotonic() - began < 60
    assert (tmp_path / "w/done").read_text() == "part\n"


@needs_sandbox
def test_harness_that_speaks_rubbish(tmp_path: Path) -> None:
    script = "import socket,os; s=socket.create_connection(('127.0.0.1',8080)); s.sendall(os.urandom(5000)); s.recv(9)"
    ended, bodies = play(
        command("python3", "-c", script + "; os.write(1, bytes(range(128,256))); os._exit(3)"), tmp_path / "w", []
    )
    assert bodies == []
    assert ended.detail.startswith("exit code 3: \ufffd")
    ended.detail.encode()  # can be recorded


@needs_sandbox
def test_gateway_speaks_rubbish_to_the_harness(tmp_path: Path) -> None:
    reply: Reply = {"role": "assistant", "content": None, "tool_calls": [{"id": "c0", "function": None}]}
    ended, bodies = play(HarnessConfig(max_turns=2), tmp_path / "w", [reply, reply])
    assert (ended.exit_code, len(bodies)) == (0, 2)


@needs_sandbox
def test_command_is_filled_in(tmp_path: Path) -> None:
    config = command("sh", "-c", 'echo "$@" > told', "-", "{base_url}", "{workspace}", "<{instruction}>", "{other}")
    play(config, tmp_path / "w", [], instruction="put {workspace} in $(a)")
    assert (
        tmp_path / "w/told"
    ).read_text() == "http://127.0.0.1:8080/s/s1/v1 /workspace <put {workspace} in $(a)> {other}\n"


def test_harness_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYRE_HARNESSES", str(tmp_path / "home"))
    with pytest.raises(HarnessError, match="gyre harness install mini-swe-agent"):
        play(HarnessConfig(name="mini-swe-agent"), tmp_path / "w", [], sandbox=NoSandbox())
    assert require("reference", tmp_path) is None


def test_half_an_installation_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "mini-swe-agent/bin").mkdir(parents=True)
    assert not installed("mini-swe-agent", tmp_path)
    (tmp_path / "mini-swe-agent/.gyre-installed").write_text("2.0.0")
    assert not installed("mini-swe-agent", tmp_path)


def test_failed_installation_says_what_the_installer_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(HarnessError, match=r"mini-swe-agent==.*No matching distribution"):
        install("mini-swe-agent", tmp_path / "home")
    assert not installed("mini-swe-agent", tmp_path / "home")


def test_home_of_harnesses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYRE_HARNESSES", str(tmp_path))
    assert harness_home() == tmp_path


def test_unknown_harness_and_empty_command() -> None:
    with pytest.raises(ConfigError, match=r"reference, .*mini-swe-agent, claude-code, .*, command"):
        find_recipe("nothing")
    places = Places(workspace="/w", config="/c", home="/h", gateway="http://g")
    with pytest.raises(ConfigError, match=r"harness\.command is empty"):
        launch(
            RECIPES["command"], base_url="u", instruction="i", places=places, max_turns=1, model="m", python="python3"
        )
