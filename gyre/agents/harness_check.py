"""Shell. Whether a harness works with gyre: harness in its sandbox, real gateway, scripted policy -> Check.

Invariant: harness, recipe, sandbox, gateway and lineage are those of a run; only the policy is scripted, and the log is
in memory. A Check says what was seen on the log and in the workspace, not what was expected.
"""

import asyncio
import itertools
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from gyre.agents.dialect import Request
from gyre.agents.dispatcher import Ended
from gyre.agents.execution import HarnessRunner
from gyre.agents.gateway import run_gateway
from gyre.agents.scripted_policy import ScriptedPolicy, make_renderer
from gyre.agents.tasks import GradedTest, Task
from gyre.agents.unsandboxed import AnySandbox
from gyre.config import Config, EngineConfig, HarnessConfig, SamplingConfig
from gyre.errors import SandboxError
from gyre.events.log import open_writer
from gyre.events.memory import MemoryLog
from gyre.events.types import (
    CallCompleted,
    CallCut,
    CallFailed,
    CallStarted,
    CellJoined,
    CellSwitched,
    RunFinished,
    SessionOpened,
)

FILE, CONTENT = "hello.txt", "written by a tool\n"
COMMAND = f"printf 'written by a tool\\n' > {FILE}"
INSTRUCTION = f"Write `{CONTENT.strip()}` to the file {FILE}, with a shell command. Then end."
CONTEXT_TOKENS = 2_000_000
"""Bytes are tokens here, and the system prompts of some harnesses are long."""
SESSION = "check-0"


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """What one start of a harness showed."""

    name: str
    started: bool = False
    requests: tuple[str, ...] = ()
    """Endpoints that it called, with `stream` where it asked for one."""
    num_calls: int = 0
    num_main: int = 0
    num_continued: int = 0
    """Main calls that go on exactly where the one before them ended."""
    num_unanswered: int = 0
    """Calls that were cut or failed."""
    wrote: bool = False
    """The tool call was executed: its file is in the workspace."""
    ended: bool = False
    """By itself, with exit code 0."""
    wall_s: float = 0.0
    detail: str = ""

    @property
    def history_continued(self) -> bool:
        """Every main call after the first; false when there was none after it."""
        return self.num_main > 1 and self.num_continued == self.num_main - 1

    @property
    def ok(self) -> bool:
        return self.started and self.history_continued and self.wrote and self.ended and not self.num_unanswered

    def lines(self) -> list[str]:
        """One for each thing that was looked at."""
        called = ", ".join(sorted(set(self.requests)))
        rows = (
            (self.started, "started", ""),
            (bool(self.requests), "called", called or "no request reached the gateway"),
            (self.wrote, "tool call executed", FILE if self.wrote else f"{FILE} is not as it should be"),
            (
                self.history_continued,
                "history continued",
                f"{self.num_main} main calls, {self.num_continued} continue the one before, "
                f"{self.num_calls - self.num_main} side calls",
            ),
            (not self.num_unanswered, "every call answered", f"{self.num_unanswered} not" * bool(self.num_unanswered)),
            (self.ended, "ended by itself", f"after {self.wall_s:.1f} s"),
        )
        shown = [f"  {'ok' if ok else 'NO':<3} {what:<20} {note}".rstrip() for ok, what, note in rows]
        return shown if self.ok or not self.detail else [*shown, f"      {self.detail}"]


async def check_harness(
    name: str, sandbox: AnySandbox, *, command: tuple[str, ...] = (), deadline_s: float = 90.0
) -> Check:
    """Raises HarnessError when it is not installed, ConfigError for no harness."""
    config = Config(
        harness=HarnessConfig(name=name, command=command, deadline_s=deadline_s),
        engine=EngineConfig(context_tokens=CONTEXT_TOKENS),
        sampling=SamplingConfig(max_tokens=8192),
    )
    requests: list[str] = []

    def seen(endpoint: str, request: Request) -> None:
        requests.append(f"{endpoint}{' (stream)' if request.stream else ''}")

    with _folders() as (workspace, socket_path):
        log = MemoryLog("check")
        world = await open_writer(log, "world", time.time_ns)
        await world.append(CellJoined(cell="c0", index=0, capacity=8, engine_url="scripted", model_digest=""))
        await world.append(CellSwitched(cell="c0", role="rollout", epoch=1, version=0, phases=()))
        await world.append(SessionOpened(execution="check", session=SESSION, temperature=1.0, top_p=1.0))
        renderer = make_renderer()
        policy = ScriptedPolicy(renderer, COMMAND)
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                run_gateway(
                    log,
                    await open_writer(log, "gateway", time.time_ns),
                    config,
                    engine_for=lambda url: policy,
                    renderer=renderer,
                    socket_path=socket_path,
                    host="127.0.0.1",
                    ready=port.set_result,
                    seen=seen,
                )
            )
            runner = HarnessRunner(
                config.harness,
                sandbox,
                socket_path=socket_path,
                gateway_url=f"http://127.0.0.1:{await port}",
                engine=config.engine,
                sampling=config.sampling,
            )
            try:
                ended: Ended | None = await runner.run(_task(), SESSION, workspace)
                failure = ""
            except SandboxError as error:
                ended, failure = None, str(error)
            finally:
                await world.append(RunFinished(reason="completed"))
        wrote = _written(workspace)
    return await _judge(name, log, ended, requests, wrote=wrote, failure=failure)


@contextmanager
def _folders() -> Iterator[tuple[Path, Path]]:
    """(workspace, the gateway's socket file), for as long as the block lasts."""
    with tempfile.TemporaryDirectory(prefix="gyre-harness-check-") as folder:
        workspace, gateway = Path(folder, "workspace"), Path(folder, "gateway")
        workspace.mkdir()
        gateway.mkdir()
        yield workspace, gateway / "gateway.sock"


def _written(workspace: Path) -> bool:
    file = workspace / FILE
    return file.is_file() and file.read_text() == CONTENT


def _task() -> Task:
    return Task(
        id="check",
        family="check",
        split="train",
        instruction=INSTRUCTION,
        files=(),
        tests=(GradedTest(name="file", command="true"),),
    )


async def _judge(
    name: str, log: MemoryLog, ended: Ended | None, requests: list[str], *, wrote: bool, failure: str
) -> Check:
    events = [recorded.event async for recorded in log.read(1, until=await log.last_seq())]
    started = [event for event in events if isinstance(event, CallStarted)]
    sampled = {event.call for event in events if isinstance(event, CallCompleted)}
    main = [call for call in started if call.role_class == "main"]
    continued = [
        after
        for before, after in itertools.pairwise(main)
        if after.rule == "continue" and after.base == before.call and before.call in sampled
    ]
    timed_out = ended is not None and ended.timed_out
    return Check(
        name=name,
        started=ended is not None,
        requests=tuple(requests),
        num_calls=len(started),
        num_main=len(main),
        num_continued=len(continued),
        num_unanswered=sum(isinstance(event, CallCut | CallFailed) for event in events),
        wrote=wrote,
        ended=ended is not None and not timed_out and ended.exit_code == 0,
        wall_s=ended.wall_s if ended else 0.0,
        detail=failure or ("stopped at its deadline" if timed_out else ended.detail if ended else ""),
    )
