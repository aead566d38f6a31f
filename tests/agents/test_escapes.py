"""What an agent may try to get out, to get at secrets or to take all there is: contained, and recorded on the log.

Each is one execution by a real dispatcher in a real sandbox; what it saw lies in the snapshot of its workspace.
`test_sandbox.py` has the contract of the sandbox itself, one limit at a time.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from gyre.agents.dispatcher import Dispatcher
from gyre.agents.execution import HarnessRunner
from gyre.agents.places import Limits
from gyre.agents.process import base_python
from gyre.agents.sandbox import Sandbox, check_sandbox
from gyre.agents.snapshots import Snapshots
from gyre.config import Config, load_config
from gyre.events.log import Writer
from gyre.events.memory import MemoryLog
from gyre.events.types import (
    EvaluationFailed,
    Event,
    ExecutionDropped,
    ExecutionFinished,
    ExecutionScored,
    PolicyPublished,
    RunFinished,
    SnapshotTaken,
)

E = TypeVar("E", bound=Event)
MISSING = check_sandbox()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)
EXAMPLES = Path(__file__).parents[2] / "examples/tasks"
SECRET = "swordfish"


def of(events: list[Event], cls: type[E]) -> list[E]:
    return [event for event in events if isinstance(event, cls)]


def running(mark: str) -> list[int]:
    found = []
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if path.name.isdigit() and mark.encode() in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found


@pytest.fixture
def mark() -> str:
    """A number of seconds to sleep that no other process sleeps."""
    return f"{int(time.monotonic_ns() % 10**9) + 10**6}.75"


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "gateway/gateway.sock"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        yield path


def attempt(
    tmp_path: Path, gateway: Path, script: str, *, limits: Limits | None = None, grading: str = "{}", tasks: str = "{}"
) -> list[Event]:
    """One execution whose harness is `script`. Whatever it does, the run goes on to its end."""
    config: Config = load_config(
        "pipeline: {num_steps: 0}\nevaluation: {num_tasks: 1, temperatures: [0.0]}\nlog: {min_free_gb: 0}\n"
        f"grading: {grading}\ntasks: {tasks}\nharness: {{name: command, command: [x], deadline_s: 30}}\n"
    )
    harness = msgspec.structs.replace(config.harness, command=("sh", "-c", script))

    async def main() -> list[Event]:
        log = MemoryLog("r")
        published = PolicyPublished(version=0, digest="d", num_bytes=1, checkpoint="")
        await Writer(log, "trainer", 1, lambda: 0).append(published)
        runner = HarnessRunner(harness, Sandbox(limits=limits), socket_path=gateway, gateway_url="http://127.0.0.1:1")
        writer = Writer(log, "dispatcher", 1, lambda: 0)
        dispatching = Dispatcher(log, writer, config, runner=runner, run_dir=tmp_path / "run", mint=lambda: "s")
        async with asyncio.timeout(90):
            await dispatching.run()
        return [recorded.event async for recorded in log.read(1, until=await log.last_seq())]

    (tmp_path / "run").mkdir()
    events = asyncio.run(main())
    assert events[-1] == RunFinished(reason="completed")
    assert not list((tmp_path / "run/workspaces").iterdir())
    return events


def left(tmp_path: Path, events: list[Event], name: str) -> str:
    """A file that the execution left in its workspace."""
    snapshots = Snapshots(tmp_path / "run/snapshots")
    (taken,) = of(events, SnapshotTaken)
    (entry,) = (entry for entry in snapshots.entries(taken.snapshot) if entry.path == name)
    return snapshots.read(entry.content).decode()


HOG = (
    f"{base_python()} -I -c \"import time; x = bytearray(300 << 20); x[::4096] = b'x' * len(x[::4096]); time.sleep(9)\""
)


FILL = "mkdir -p a/b; i=0; while [ $i -lt 400 ]; do head -c 1000000 /dev/zero > a/b/f$i; i=$((i+1)); sleep 0.02; done"


@pytest.mark.parametrize(
    ("script", "limits", "said"),
    [
        ("head -c 2147483648 /dev/zero", Limits(), "more output than the limit"),
        (HOG, Limits(max_memory=200 << 20), "more memory than the limit"),
        (FILL, Limits(workspace_size=4 << 20), "more disk than the limit"),
        (f"{HOG} & {HOG} & wait", Limits(max_memory=400 << 20), "more memory than the limit"),
    ],
    ids=[
        "2 GB of output",
        "a memory hog",
        "many files, each within the limit of one file",
        "two hogs, each within the limit of one process",
    ],
)
def test_taking_all_there_is_is_stopped_and_scored_with_the_reason(
    tmp_path: Path, gateway: Path, script: str, limits: Limits, said: str
) -> None:
    events = attempt(tmp_path, gateway, script, limits=limits)
    (finished,), (scored,) = of(events, ExecutionFinished), of(events, ExecutionScored)
    assert (finished.reason, scored.score) == ("harness_failed", 0.0)
    assert said in finished.detail


def test_a_fork_bomb_ends_with_its_execution(tmp_path: Path, gateway: Path, mark: str) -> None:
    bomb = f"while :; do sleep {mark} & done"
    (finished,) = of(attempt(tmp_path, gateway, bomb, limits=Limits(max_processes=80)), ExecutionFinished)
    # The kernel refuses more to an ordinary user; for root, process 1 of the sandbox counts.
    assert finished.reason == "harness_failed"
    assert "more processes than the limit" in finished.detail or "exit code" in finished.detail
    assert running(mark) == []


def test_more_than_a_snapshot_may_hold_has_no_score(tmp_path: Path, gateway: Path) -> None:
    fill = "i=0; while [ $i -lt 40 ]; do head -c 100000 /dev/zero > f$i; i=$((i+1)); done"
    events = attempt(tmp_path, gateway, fill, grading="{max_snapshot_mb: 1, attempts: 1}")
    (failed,), (dropped,) = of(events, EvaluationFailed), of(events, ExecutionDropped)
    assert "more than 1 MiB" in failed.reason
    assert (dropped.reason, dropped.final) == ("evaluation failed", True)


def test_a_daemon_that_is_left_behind_is_gone_before_the_score(tmp_path: Path, gateway: Path, mark: str) -> None:
    daemon = f"setsid nohup sh -c 'trap \"\" TERM HUP; sleep {mark}' > /dev/null 2>&1 & (sleep {mark} &); echo > here"
    events = attempt(tmp_path, gateway, daemon)
    assert of(events, ExecutionFinished)[0].reason == "completed"
    assert len(of(events, ExecutionScored)) == 1
    assert running(mark) == []


def test_links_and_dots_lead_to_nothing_outside(tmp_path: Path, gateway: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text(SECRET)
    up = "../" * 12
    script = (
        f"ln -s {outside} out; ln -s {up}{outside} dots; ln -s /proc/1/root root; ln {outside}/secret hard; for d in"
        f" out dots {outside} {up}{outside} root/{outside} /proc/1/cwd/..; do cat $d/secret; echo x > $d/new; done;"
        f" touch ../beside; mkdir -p {outside}; mv . ../moved; umount /workspace; mount --bind / /mnt; chroot .; true"
    )
    events = attempt(tmp_path, gateway, f"({script}) > seen 2>&1; true")
    assert of(events, ExecutionScored)
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert SECRET not in left(tmp_path, events, "seen")
    store = tmp_path / "run/snapshots"
    assert not [path for path in store.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert {path.name for path in (tmp_path / "run").iterdir()} <= {"workspaces", "snapshots", "grading"}


def test_hidden_tests_solutions_and_credentials_are_nowhere_to_be_found(
    tmp_path: Path, gateway: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYRE_NATS_TOKEN", SECRET)
    (tmp_path / "run.json").write_text(SECRET)
    places = (
        f"{EXAMPLES} {tmp_path / 'run.json'} {Path.home() / '.ssh'} {Path.home() / '.config'} /tests /solution /logs"
    )
    script = (
        f"env; cat /proc/*/environ | tr '\\0' '\\n'; ls {places} /proc/1/root/tests; cat {tmp_path / 'run.json'};"
        " find / \\( -path /proc -o -path /usr -o -path /opt \\) -prune -o \\("
        " -name test.sh -o -name solve.sh -o -name 'test_booking*' -o -name '*.creds' -o -name booking.py \\) -print"
    )
    events = attempt(
        tmp_path, gateway, f"({script}) > seen 2> errors; true", grading="{attempts: 1}", tasks=f"{{path: {EXAMPLES}}}"
    )
    seen = left(tmp_path, events, "seen")
    assert "OPENAI_BASE_URL" in seen
    assert "GYRE_NATS_TOKEN" not in seen and SECRET not in seen
    assert [line for line in seen.splitlines() if line.startswith("/")] == ["/workspace/booking.py"]
    assert left(tmp_path, events, "errors").count("No such file") >= 8


def test_engine_log_and_sockets_of_the_host_are_out_of_reach(tmp_path: Path, gateway: Path) -> None:
    """On loopback, on every address of the host, and by a name in no file; the port of the gateway is there."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("0.0.0.0", 0)))
        port = server.getsockname()[1]
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        name = f"\0gyre-{os.getpid()}-{port}"
        abstract.bind(name)
        abstract.listen()
        hosts = sorted({"127.0.0.1", "169.254.169.254", *socket.gethostbyname_ex(socket.gethostname())[2]})
        script = (
            "import socket\n"
            f"for host in {hosts!r}:\n"
            "    try: socket.create_connection((host, {port}), 2); print('reached', host)\n"
            "    except OSError: print('refused')\n"
            f"try: socket.socket(socket.AF_UNIX).connect({name!r}); print('reached abstract')\n"
            "except OSError: print('refused')\n"
            "try: socket.getaddrinfo('example.com', 80); print('reached names')\n"
            "except OSError: print('refused')\n"
            "socket.create_connection(('127.0.0.1', 8080), 5); print('gateway')\n"
        ).replace("{port}", str(port))
        socket.create_connection(("127.0.0.1", port), 5).close()
        events = attempt(tmp_path, gateway, f"{base_python()} -I - > seen <<'END'\n{script}END")
    assert left(tmp_path, events, "seen").split() == ["refused"] * (len(hosts) + 2) + ["gateway"]


KILL = "import os, signal\\nfor pid in (os.getppid(), 1, -1):\\n    os.kill(pid, signal.SIGKILL)\\n"
KILL_PARENT = "import os, signal\\nos.kill(os.getppid(), signal.SIGKILL)\\n"


@pytest.mark.parametrize("kill", [KILL, KILL_PARENT], ids=["all that it can see", "the runner of the tests"])
@pytest.mark.parametrize("mode", ["record", "zero", "drop"])
def test_work_that_kills_its_grader_gets_no_points_for_it(tmp_path: Path, gateway: Path, kill: str, mode: str) -> None:
    """Its own module kills as soon as the verifier's tests run it: recorded, and scored as the config says."""
    events = attempt(
        tmp_path,
        gateway,
        f"printf '{kill}' > booking.py",
        grading=f"{{attempts: 2, on_tampering: {mode}}}",
        tasks=f"{{path: {EXAMPLES}}}",
    )
    scored, failed, dropped = of(events, ExecutionScored), of(events, EvaluationFailed), of(events, ExecutionDropped)
    assert len(failed) == 2, "it is tried again: somebody else may have killed it"
    assert all("ctrf.json" in event.reason for event in failed)
    if mode == "zero":
        assert not dropped
        assert [(event.score, event.parts) for event in scored] == [(0.0, ())]
        assert [finding.rule for finding in scored[0].findings] == ["grader_killed"]
    else:
        assert not scored
        assert [event.reason for event in dropped] == [
            "evaluation failed" if mode == "record" else "tampering: grader_killed"
        ]
