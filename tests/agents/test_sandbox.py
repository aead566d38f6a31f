"""The contract of the sandbox, checked with a real one."""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gyre.agents import process
from gyre.agents import sandbox as sandbox_module
from gyre.agents.containers import check_container
from gyre.agents.places import HARNESS_PORT, Exit, Limits
from gyre.agents.process import base_python
from gyre.agents.relay import used_bytes
from gyre.agents.sandbox import Sandbox, check_sandbox, end_strays
from gyre.agents.sandboxes import open_sandbox
from gyre.agents.unsandboxed import NoSandbox
from gyre.config import HarnessConfig
from gyre.errors import SandboxError

MISSING = check_sandbox()
needs_sandbox = pytest.mark.skipif(bool(MISSING), reason=MISSING)
IMAGE = os.environ.get("GYRE_TEST_IMAGE", HarnessConfig().image)
"""Of containers: any with `sh`, `python3` and Debian's usual programs."""


def missing(kind: str) -> str:
    """Why a sandbox of this kind cannot be had here, or nothing."""
    if kind == "bubblewrap":
        return MISSING
    return check_container(kind, IMAGE)


KINDS = [
    pytest.param(kind, marks=pytest.mark.skipif(bool(why), reason=why))
    for kind in ("bubblewrap", "docker", "podman")
    for why in [missing(kind)]
]


class Run:
    """Runs shell scripts in a sandbox of one kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.config = HarnessConfig(sandbox=kind, image=IMAGE)  # type: ignore[arg-type]
        self.sandbox = open_sandbox(self.config, unsafe=False)
        self.python = self.sandbox.python

    def __call__(
        self, workspace: Path, script: str, *, deadline_s: float = 60, limits: Limits | None = None, **options: object
    ) -> Exit:
        sandbox = self.sandbox.with_limits(limits) if limits else self.sandbox
        argv = ["sh", "-c", script]
        return asyncio.run(sandbox.run(argv, env={}, workspace=workspace, deadline_s=deadline_s, **options))  # type: ignore[arg-type]


@pytest.fixture(params=KINDS)
def run(request: pytest.FixtureRequest) -> Run:
    """What takes it is the contract: it holds whatever the sandbox."""
    return Run(request.param)


@pytest.fixture
def run_bubblewrap() -> Run:
    return Run("bubblewrap")


def test_a_version_that_was_killed_before_it_was_said_is_asked_for_again(tmp_path: Path) -> None:
    for answers, fails in (("1", False), ("9", True)):
        program = tmp_path / f"bwrap-{answers}"
        program.write_text(
            f"#!/bin/sh\necho >> $0.asked\n[ $(wc -l < $0.asked) -gt {answers} ] || kill -9 $$\necho 0.8.0\n"
        )
        program.chmod(0o755)
        with pytest.raises(SandboxError, match="of no known version") if fails else contextlib.nullcontext():
            sandbox_module._check_version(str(program))


def running(mark: str) -> list[int]:
    """Processes of this machine whose command line holds `mark`."""
    found = []
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if path.name.isdigit() and mark.encode() in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found


def wait_until(holds: object, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():  # type: ignore[operator]
            return True
        time.sleep(0.01)
    return False


def until_ready(workspace: Path) -> Callable[[], float]:
    """Holds the clock of a deadline until the program has made the file `ready`, however long its start takes."""
    begun, ready = time.monotonic(), list[float]()

    def held() -> float:
        if not ready and (workspace / "ready").exists():
            ready.append(time.monotonic())
        return (ready or [time.monotonic()])[0] - begun

    return held


@pytest.fixture
def mark() -> str:
    """A number of seconds to sleep that no other process sleeps."""
    return f"{int(time.monotonic_ns() % 10**9) + 10**6}.25"


@pytest.fixture
def echo_socket(tmp_path: Path) -> Iterator[Path]:
    """A socket file, on a path far longer than an address may be, where each connection gets back what it sent."""
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    here = Path.cwd()
    server = socket.socket(socket.AF_UNIX)
    os.chdir(folder)
    try:
        server.bind("gateway.sock")
    finally:
        os.chdir(here)
    server.listen()

    def echo(connection: socket.socket) -> None:
        with connection:
            while chunk := connection.recv(65536):
                connection.sendall(chunk)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=echo, args=(server.accept()[0],), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield folder / "gateway.sock"
    server.shutdown(socket.SHUT_RDWR)
    server.close()


def test_exit_code_and_output(run: Run, tmp_path: Path) -> None:
    ended = run(tmp_path, "echo out; echo err >&2; exit 7")
    assert (ended.code, ended.timed_out, ended.broken_limit) == (7, False, "")
    assert ended.output_tail == "out\nerr\n"
    assert ended.failure == "exit code 7: out\nerr"
    assert run(tmp_path, "kill -KILL $$").code == -9


def test_program_that_is_not_there(run: Run, tmp_path: Path) -> None:
    ended = asyncio.run(run.sandbox.run(["no-such-program"], env={}, workspace=tmp_path, deadline_s=60))
    assert ended.code == 127
    assert "no-such-program" in ended.failure


def test_only_workspace_and_tmp_are_writable(run: Run, tmp_path: Path) -> None:
    """Every directory that the program can reach is tried."""
    prefix = Path(run.python).parent.parent
    ended = run(
        tmp_path,
        f"find / -path /proc -prune -o -path /usr -prune -o -path {prefix} -prune -o -type d -print | while read d; do"
        " (: > $d/probe) 2>/dev/null && echo $d:$(stat -f -c %T $d);"
        " done | sort; (: > /usr/probe) 2>/dev/null && echo /usr;"
        " for f in /etc/passwd /run/gyre/relay; do (: >> $f) 2>/dev/null && echo $f; done; true",
    )
    found = dict(line.split(":") for line in ended.output_tail.split())
    found["/workspace"] = "a disk"  # or memory, as the folder that it is has it
    assert {place for place, system in found.items() if system not in ("tmpfs", "mqueue")} == {"/workspace"}
    if run.kind == "bubblewrap":  # what containers have besides is in memory, which is bounded
        assert set(found) == {"/dev/shm", "/tmp", "/workspace"}
    assert [path.name for path in tmp_path.iterdir()] == ["probe"]


def test_tmp_is_bounded(run: Run, tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        "for d in /tmp /dev/shm; do head -c 20000000 /dev/zero > $d/big; wc -c < $d/big; done",
        limits=Limits(tmp_size=1 << 20),
    )
    assert [int(word) for word in ended.output_tail.split() if word.isdigit()] == [1 << 20, 1 << 20]


def test_host_is_not_visible(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYRE_TEST_SECRET", "swordfish")
    secret = tmp_path / "secret"
    secret.write_text("swordfish")
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "link").symlink_to(secret)
    ended = run(
        workspace,
        f"cat /proc/[0-9]*/environ | tr '\\0' '\\n'; env; cat {secret} link 2>&1; ls -d /proc/[0-9]* | wc -l",
    )
    assert "swordfish" not in ended.output_tail
    assert ended.output_tail.count("No such file") == 2
    assert int(ended.output_tail.split()[-1]) <= 6


@needs_sandbox
def test_packages_of_the_interpreter_are_not_there(run_bubblewrap: Run, tmp_path: Path) -> None:
    """An agent that is to write one finds no copy to take."""
    outside = subprocess.run(
        [base_python(), "-c", "import pip; print(pip.__file__)"], capture_output=True, text=True, check=False
    ).stdout.strip()
    if not outside:
        pytest.skip("the interpreter has no package of its own")
    look = f"{base_python()} -c 'import json, ssl; print(1); import pip'; ls -A {Path(outside).parents[1]} | wc -l"
    said = run_bubblewrap(tmp_path, look).output_tail
    assert "No module named 'pip'" in said
    assert said.split()[-2:] == ["1", "0"]


@needs_sandbox
def test_nothing_but_the_system_is_there(run_bubblewrap: Run, tmp_path: Path) -> None:
    look = "ls /home /mnt /srv /var /root/.ssh /etc/shadow 2>&1 | grep -v 'No such'; id -u; unshare -U true; echo $?"
    uid, *_, code = run_bubblewrap(tmp_path, look).output_tail.split()
    assert uid == "1000"
    assert code != "0", "no namespace of its own"


def test_no_capability(run: Run, tmp_path: Path) -> None:
    ended = run(tmp_path, "grep -E 'Cap(Eff|Prm|Bnd)|NoNewPrivs' /proc/self/status")
    assert ended.output_tail.count("0000000000000000") == 3
    assert "NoNewPrivs:\t1" in ended.output_tail


@needs_sandbox
def test_harness_inherits_no_descriptor(run_bubblewrap: Run, tmp_path: Path) -> None:
    assert run_bubblewrap(tmp_path, "ls /proc/$$/fd").output_tail.split() == ["0", "1", "2"]


def test_host_loopback_is_out_of_reach(run: Run, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
        assert subprocess.run([sys.executable, "-c", connect], check=False).returncode == 0
        ended = run(tmp_path, f'{run.python} -I -c "{connect}"')
    assert ended.code == 1
    assert "ConnectionRefusedError" in ended.output_tail


def test_gateway_is_reached_through_its_socket(run: Run, tmp_path: Path, echo_socket: Path) -> None:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "client.py").write_text(
        "import socket, threading\n"
        "def talk(n):\n"
        f"    s = socket.create_connection(('localhost', {HARNESS_PORT}), 10)\n"
        "    data = bytes([n]) * 3_000_000\n"
        "    threading.Thread(target=lambda: (s.sendall(data), s.shutdown(socket.SHUT_WR))).start()\n"
        "    got = b''\n"
        "    while chunk := s.recv(1 << 20): got += chunk\n"
        "    assert got == data\n"
        "    print('whole')\n"
        "threads = [threading.Thread(target=talk, args=(n,)) for n in range(8)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
    )
    ended = run(workspace, f"{run.python} -I client.py", socket_path=echo_socket)
    assert ended.output_tail.split() == ["whole"] * 8
    assert ended.code == 0


def test_gateway_that_is_away(run: Run, tmp_path: Path) -> None:
    """A socket file that nobody listens on: a refused connection, not a hang."""
    path = tmp_path / "gateway/gateway.sock"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    script = f"import socket; s=socket.create_connection(('127.0.0.1',{HARNESS_PORT}),5); print(s.recv(1))"
    ended = run(tmp_path, f'{run.python} -I -c "{script}"', socket_path=path)
    assert ended.output_tail.split("\n")[-2].startswith(("ConnectionResetError", "BrokenPipeError"))


def test_gateway_that_starts_again_is_reached(run: Run, tmp_path: Path) -> None:
    """By a program that was started before it."""
    path = tmp_path / "gateway/gateway.sock"
    path.parent.mkdir()
    script = (
        "import socket, time\n"
        "while True:\n"
        "    try:\n"
        f"        s = socket.create_connection(('127.0.0.1', {HARNESS_PORT}), 5)\n"
        "        print(s.recv(9)); break\n"
        "    except OSError:\n        open('waiting', 'w'); time.sleep(0.05)\n"
    )
    with socket.socket(socket.AF_UNIX) as first:
        first.bind(str(path))

    def start_again() -> None:
        wait_until((tmp_path / "waiting").exists, 60)
        path.unlink()
        with socket.socket(socket.AF_UNIX) as second:
            second.bind(str(path))
            second.listen()
            second.settimeout(60)
            second.accept()[0].sendall(b"again")

    thread = threading.Thread(target=start_again)
    thread.start()
    ended = asyncio.run(
        run.sandbox.run([run.python, "-c", script], env={}, workspace=tmp_path, deadline_s=60, socket_path=path)
    )
    thread.join()
    assert ended.output_tail == "b'again'\n"


def test_folder_of_the_socket_shows_nothing_else(run: Run, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("token")
    with pytest.raises(SandboxError, match=r"holds run\.json too"):
        run(tmp_path, "true", socket_path=tmp_path / "gateway.sock")
    with pytest.raises(SandboxError, match="start the gateway first"):
        run(tmp_path, "true", socket_path=tmp_path / "none/gateway.sock")


def test_abort_of_the_gateway_is_no_clean_end(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "gateway/gateway.sock"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def cut() -> None:
            connection, _ = server.accept()
            connection.recv(4)
            connection.sendall(b"part")
            wait_until((tmp_path / "got").exists, 60)
            connection.close()  # with unread bytes: the other side gets a reset

        threading.Thread(target=cut, daemon=True).start()
        script = (
            f"import socket; s=socket.create_connection(('127.0.0.1',{HARNESS_PORT}),5); s.sendall(b'request');"
            " print(s.recv(9)); open('got', 'w'); print(s.recv(9))"
        )
        ended = run(tmp_path, f'{run.python} -I -c "{script}"', socket_path=path)
    assert "b'part'" in ended.output_tail
    assert "ConnectionResetError" in ended.output_tail


def test_everything_ends_with_the_program(run: Run, tmp_path: Path, mark: str) -> None:
    ended = run(tmp_path, f"setsid nohup sleep {mark} >/dev/null 2>&1 & (sleep {mark} &); echo started")
    assert ended.output_tail == "started\n"
    assert running(mark) == []


def test_deadline_ends_everything(run: Run, tmp_path: Path, mark: str) -> None:
    began = time.monotonic()
    script = f"trap '' TERM; setsid nohup sleep {mark} & (trap '' TERM; sleep {mark}) & > ready"
    script += f"; while :; do sleep {mark}; done"
    ended = run(tmp_path, script, deadline_s=0.5, held=until_ready(tmp_path))
    assert ended.timed_out
    assert ended.code == -9
    assert ended.failure == ""
    assert time.monotonic() - began < 60
    assert running(mark) == []


def test_nothing_outlives_its_time_though_nobody_ends_it(
    run: Run, tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "TIME_TO_LIVE_S", 1.0)
    ended = run(tmp_path, f"trap '' TERM; setsid sleep {mark} & sleep {mark}", deadline_s=60)
    assert (ended.code, ended.timed_out) == (-9, False)
    assert running(mark) == []


def test_harness_may_clean_up_at_the_deadline(run: Run, tmp_path: Path) -> None:
    script = "trap 'echo saved > file; exit 5' TERM; > ready; while :; do sleep 0.05; done"
    ended = run(tmp_path, script, deadline_s=0.5, held=until_ready(tmp_path))
    assert (ended.timed_out, ended.code) == (True, 5)
    assert (tmp_path / "file").read_text() == "saved\n"


def test_program_cannot_hold_off_its_end(run: Run, tmp_path: Path, mark: str) -> None:
    """It stops or kills every process that it sees, the relay included."""
    script = f"> ready; kill -STOP 1; kill -KILL 1; kill -TERM 1; sleep {mark}; : {mark}"
    ended = run(tmp_path, script, deadline_s=0.5, held=until_ready(tmp_path))
    assert ended.timed_out
    assert running(mark) == []


def test_cancellation_ends_everything(run: Run, tmp_path: Path, mark: str) -> None:
    async def cancelled() -> None:
        sandbox = run.sandbox
        argv = ["sh", "-c", f"setsid sleep {mark} & sleep {mark}"]
        task = asyncio.create_task(sandbox.run(argv, env={}, workspace=tmp_path, deadline_s=60))
        while len(running(mark)) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert running(mark) == []

    asyncio.run(asyncio.wait_for(cancelled(), 60))


def test_cancellation_while_it_is_being_built_leaves_nothing(run: Run, tmp_path: Path, mark: str) -> None:
    async def cancelled(after_s: float) -> None:
        task = asyncio.create_task(run.sandbox.run(["sleep", mark], env={}, workspace=tmp_path, deadline_s=60))
        await asyncio.sleep(after_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    for step in range(40):
        asyncio.run(asyncio.wait_for(cancelled(step / 2000), 60))
    assert wait_until(lambda: running(mark) == [], 60)


@needs_sandbox
def test_strays_of_one_run_are_ended_and_others_are_not(tmp_path: Path) -> None:
    strays = []
    for run_name in ("mine", "other"):
        workspace = tmp_path / run_name / "workspaces/g0"
        workspace.mkdir(parents=True)
        command = ["bwrap", "--ro-bind", "/", "/", "--chdir", str(workspace), "sleep", "600"]
        strays.append(subprocess.Popen(command))
    mine, other = strays
    try:
        assert wait_until(lambda: len(running(str(tmp_path))) >= 2, 60)
        end_strays(tmp_path / "mine/workspaces")
        assert mine.wait(60) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        end_strays(tmp_path / "other/workspaces")
        other.wait(60)


def test_death_of_the_parent_ends_everything(run: Run, tmp_path: Path, mark: str) -> None:
    program = (
        "import asyncio, sys; from pathlib import Path; from gyre.agents.sandboxes import open_sandbox\n"
        "from gyre.config import HarnessConfig\n"
        f"sandbox = open_sandbox(HarnessConfig(sandbox={run.kind!r}, image={run.config.image!r}), unsafe=False)\n"
        "asyncio.run(sandbox.run(['sh', '-c', sys.argv[1]], env={}, workspace=Path(sys.argv[2]), deadline_s=600))\n"
    )
    script = f"trap '' TERM HUP; setsid nohup sleep {mark} & sleep {mark}"
    parent = subprocess.Popen([sys.executable, "-c", program, script, str(tmp_path)])
    assert wait_until(lambda: len(running(f"sleep\0{mark}")) == 2, 60)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert wait_until(lambda: running(mark) == [], 60)


def test_flood_of_output_is_bounded(run: Run, tmp_path: Path) -> None:
    began = time.monotonic()
    ended = run(tmp_path, "yes flood", limits=Limits(output_size=8 << 20), stdout_limit=4096)
    assert ended.broken_limit == "output"
    assert 0 < len(ended.output_tail) <= 4096
    assert ended.failure == "stopped: more output than the limit"
    assert time.monotonic() - began < 60


def test_tail_is_the_end_of_the_output(run: Run, tmp_path: Path) -> None:
    ended = run(tmp_path, "seq 300000; echo last", stdout_limit=1000)
    assert len(ended.output_tail) == 1000
    assert ended.output_tail.endswith("300000\nlast\n")


def test_fork_bomb_is_stopped(run: Run, tmp_path: Path, mark: str) -> None:
    ended = run(tmp_path, f"while :; do sleep {mark} & done", limits=Limits(max_processes=100))
    # The kernel refuses more to an ordinary user; for root, the relay counts.
    assert ended.broken_limit == "processes" or ended.code != 0
    assert running(mark) == []


def test_memory_is_bounded(run: Run, tmp_path: Path) -> None:
    eat = f"{run.python} -I -c \"import time; x=bytearray(300 << 20); x[::4096]=b'x'*len(x[::4096]); time.sleep(50)\""
    ended = run(tmp_path, eat, limits=Limits(process_memory=100 << 20))
    assert ended.code == 1
    assert "MemoryError" in ended.output_tail
    ended = run(tmp_path, eat, limits=Limits(max_memory=200 << 20))
    assert ended.broken_limit == "memory"


def test_cpu_seconds_are_bounded(run: Run, tmp_path: Path) -> None:
    """Of what has ended and of what still runs."""
    spin = f"{run.python} -I -S -c 'while True: pass'"
    ended = run(tmp_path, f"timeout 0.7 {spin}; {spin} & {spin}", limits=Limits(cpu_s=1), deadline_s=60)
    assert ended.broken_limit == "cpu"
    assert ended.failure == "stopped: more cpu than the limit"


def test_open_files_are_bounded(run: Run, tmp_path: Path) -> None:
    ended = run(tmp_path, "ulimit -n; ulimit -Hn", limits=Limits(max_files=64))
    assert ended.output_tail.split() == ["64", "64"]


def test_command_lines_are_run_one_by_one_and_only_codes_come_out(run: Run, tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    lines = ["exit 3", "echo hello > new", "sleep 20", "echo forged >&2; echo 0 >&2", "test ! -e /proc/1/fd/2"]
    ended = asyncio.run(run.sandbox.run(lines, env={}, workspace=workspace, read_only=True, grade_s=2.0, deadline_s=60))
    assert ended.codes[0] == 3
    assert ended.codes[1] != 0
    assert ended.codes[2:] == (-9, 0, 0)
    assert list(workspace.iterdir()) == []


def test_what_a_dead_run_left_is_removed_and_that_of_others_is_not(run: Run, tmp_path: Path, mark: str) -> None:
    async def strays() -> None:
        tasks = []
        for name in ("mine", "other"):
            workspace = tmp_path / name / "workspaces/g0"
            workspace.mkdir(parents=True)
            argv = ["sh", "-c", f"echo > here; sleep {mark}; : {name}"]
            tasks.append(asyncio.create_task(run.sandbox.run(argv, env={}, workspace=workspace, deadline_s=60)))
        while len(list(tmp_path.glob("*/workspaces/g0/here"))) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await asyncio.to_thread(run.sandbox.end_strays, tmp_path / "mine")
        with pytest.raises(SandboxError):
            await tasks[0]
        assert not tasks[1].done()
        assert running(mark)
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert running(mark) == []

    asyncio.run(asyncio.wait_for(strays(), 60))


def test_file_size_is_bounded(run: Run, tmp_path: Path) -> None:
    run(tmp_path, "head -c 9000000 /dev/zero > big", limits=Limits(file_size=1 << 20))
    assert (tmp_path / "big").stat().st_size == 1 << 20


def test_workspace_is_bounded_however_many_files(run: Run, tmp_path: Path) -> None:
    """What is deleted again counts for nothing."""
    limits = Limits(workspace_size=8 << 20)
    write = "head -c 3000000 /dev/zero > f; sleep 0.1; rm f"
    ended = run(tmp_path, f"i=0; while [ $i -lt 6 ]; do {write}; i=$((i+1)); done; echo whole", limits=limits)
    assert (ended.output_tail, ended.broken_limit) == ("whole\n", "")
    write = "head -c 1000000 /dev/zero > f$i; sleep 0.02"
    ended = run(tmp_path, f"i=0; while [ $i -lt 400 ]; do {write}; i=$((i+1)); done", limits=limits)
    assert ended.broken_limit == "disk"
    assert ended.failure == "stopped: more disk than the limit"
    hide = f"mkdir -p d; chmod 700 d; {write.replace('> f', '> d/f')}; chmod 0 d"
    assert run(tmp_path, f"i=0; while [ $i -lt 400 ]; do {hide}; i=$((i+1)); done", limits=limits).broken_limit
    (tmp_path / "d").chmod(0o700)


def test_what_is_deleted_while_it_is_open_counts(run: Run, tmp_path: Path) -> None:
    write = "i=0; while [ $i -lt 400 ]; do head -c 1000000 /dev/zero >&3; sleep 0.02; i=$((i+1)); done"
    ended = run(tmp_path, f"exec 3> f; rm f; {write}", limits=Limits(workspace_size=8 << 20))
    assert ended.broken_limit == "disk"
    assert list(tmp_path.glob("f")) == []


def test_a_workspace_is_counted_as_it_is_allocated(tmp_path: Path) -> None:
    """Each file once, whatever its names; no link is followed; a hole is nothing."""
    (tmp_path / "a/b").mkdir(parents=True)
    before = used_bytes(str(tmp_path))
    (tmp_path / "a/b/f").write_bytes(b"x" * 1_000_000)
    once = used_bytes(str(tmp_path)) - before
    assert 1_000_000 <= once < 1_200_000
    (tmp_path / "g").hardlink_to(tmp_path / "a/b/f")
    (tmp_path / "h").symlink_to(tmp_path / "a/b/f")
    (tmp_path / "a/loop").symlink_to(tmp_path)
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(50_000_000)
    assert used_bytes(str(tmp_path)) - before < once + 100_000


@needs_sandbox
def test_sandbox_that_cannot_be_built(run_bubblewrap: Run, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="not a directory"):
        run_bubblewrap(tmp_path / "none", "true")
    with pytest.raises(SandboxError, match=r"was not started.*nowhere"):
        run_bubblewrap(tmp_path, "true", extra_ro=[tmp_path / "nowhere"])
    with pytest.raises(SandboxError, match="was not started"):
        sandbox = Sandbox(python="/usr/bin/false")
        asyncio.run(sandbox.run(["true"], env={}, workspace=tmp_path, deadline_s=60))


@needs_sandbox
def test_many_at_once(tmp_path: Path) -> None:
    async def many() -> list[Exit]:
        sandbox = Sandbox()
        starts = (sandbox.run(["sh", "-c", f"exit {n}"], env={}, workspace=tmp_path, deadline_s=60) for n in range(32))
        return await asyncio.gather(*starts)

    gc.collect()  # what tests before left open may be closed at any time
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert [ended.code for ended in asyncio.run(many())] == list(range(32))
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


@needs_sandbox
@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests already run without root")
def test_works_without_root() -> None:
    """As `nobody`, whom the kernel holds to the limit on processes."""
    python = Path("/usr/bin/python3")
    if not python.exists():
        pytest.skip("nobody needs an interpreter outside of root's home: /usr/bin/python3 is missing")
    folder = Path(subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip())
    os.chown(folder, 65534, 65534)
    sandbox = Sandbox(python=str(python), limits=Limits(max_processes=50))
    script = "id -u; echo mine > file; i=0; while [ $i -lt 80 ]; do sleep 99 & i=$((i+1)); done; echo all"
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        ended = asyncio.run(sandbox.run(["sh", "-c", script], env={}, workspace=folder, deadline_s=60))
        (folder / "told").write_text(f"{ended.output_tail}{ended.code}")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    told = (folder / "told").read_text().split()
    assert told[0] == "1000"
    assert (folder / "file").read_text() == "mine\n"
    assert "all" not in told
    subprocess.run(["rm", "-r", str(folder)], check=True)


def test_no_sandbox_needs_both(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="--unsafe-no-sandbox"):
        open_sandbox(HarnessConfig(sandbox="none"), unsafe=False)
    sandbox = open_sandbox(HarnessConfig(sandbox="none"), unsafe=True)
    assert isinstance(sandbox, NoSandbox)
    ended = asyncio.run(sandbox.run(["sh", "-c", "env; exit 3"], env={"A": "b"}, workspace=tmp_path, deadline_s=60))
    assert ended.code == 3
    assert "A=b" in ended.output_tail
    assert "PYTEST" not in ended.output_tail


def test_no_sandbox_ends_the_process_group(tmp_path: Path, mark: str) -> None:
    run = NoSandbox().run(["sh", "-c", f"sleep {mark} & sleep {mark}"], env={}, workspace=tmp_path, deadline_s=0.3)
    ended = asyncio.run(run)
    assert ended.timed_out
    assert wait_until(lambda: running(mark) == [], 60)


def test_missing_bubblewrap_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "apt-get install bubblewrap" in check_sandbox()


@pytest.mark.parametrize(
    ("version", "said", "remedy"),
    [
        ("bubblewrap 0.4.1", "", "install bubblewrap 0.8 or newer"),
        ("bubblewrap 0.11.0", "No permissions to create new namespace", "kernel.unprivileged_userns_clone=1"),
        ("bubblewrap 0.11.0", "setting up uid map: Permission denied", "apparmor_restrict_unprivileged_userns=0"),
        ("bubblewrap 0.11.0", "Can't mount proc on /newroot/proc: Operation not permitted", "docker run --cap-add"),
    ],
)
def test_what_is_missing_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, said: str, remedy: str
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo {version} && exit\necho "bwrap: {said}" >&2\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    told = check_sandbox()
    assert remedy in told
    assert said in told
    assert "\n" not in told
