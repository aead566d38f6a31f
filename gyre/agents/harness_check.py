"""Shell. Whether a harness works with gyre: harness in its sandbox, real gateway, scripted policy -> Check.

Invariant: harness, recipe, sandbox, gateway and lineage are those of a run; only the policy is scripted, the log is
in memory, and the line between harness and gateway may break once. A Check holds what was seen on the log, in what the
engine was asked and in the workspace, beside the tree that was written down for it (expected/<harness>.txt).
"""

import asyncio
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from gyre.agents.broken_line import BrokenLine
from gyre.agents.dialect import Request
from gyre.agents.dispatcher import Ended
from gyre.agents.execution import HarnessRunner
from gyre.agents.expected_trees import Expected, describe_tree, parse_expected
from gyre.agents.gateway import run_gateway
from gyre.agents.harness_findings import Check, count_again, count_exact
from gyre.agents.places import AnySandbox
from gyre.agents.scenarios import CONTENT, FILE, INSTRUCTION, SCENARIOS, Scenario
from gyre.agents.scripted_policy import MERGES, ScriptedPolicy, make_renderer
from gyre.agents.tasks import GradedTest, Task
from gyre.config import Config, EngineConfig, HarnessConfig, SamplingConfig
from gyre.errors import SandboxError
from gyre.events.log import open_writer
from gyre.events.memory import MemoryLog
from gyre.events.types import (
    CallCut,
    CallFailed,
    CellJoined,
    CellSwitched,
    RunFinished,
    SessionOpened,
)

MAX_TOKENS = 32_000
ROOMY = 2_000_000
"""Bytes are about as many tokens here, and the system prompts of some harnesses are long."""
CONTEXTS = {"claude-code": 120_000, "codex": 75_000, "qwen-code": 135_000, "opencode": 90_000}
"""In which a harness is to compact: more than its system prompt and one long reply, less than with a few."""
PATIENCE_S = {"retry": 0.01}
"""For how long an engine may fail before the harness is told so."""
SESSION = "check-0"


def read_expected(name: str) -> Mapping[str, Expected]:
    """Scenario -> what was written down for harness `name`; nothing for one that nobody wrote about."""
    path = Path(__file__).parent / f"expected/{name}.txt"
    return parse_expected(path.read_text(), path.name) if path.is_file() else {}


async def check_harness(
    name: str,
    sandbox: AnySandbox,
    scenario: Scenario = SCENARIOS["main"],
    *,
    command: tuple[str, ...] = (),
    folder: str = "",
    deadline_s: float = 90.0,
) -> Check:
    """Raises HarnessError when it is not installed, ConfigError for no harness."""
    expected = read_expected(name).get(scenario.name, Expected())
    if expected.not_offered:
        return Check(name=name, scenario=scenario.name, not_offered=expected.not_offered)
    context_tokens = CONTEXTS.get(name, ROOMY) if scenario.name == "compaction" else ROOMY
    config = Config(
        harness=HarnessConfig(name=name, command=command, folder=folder, deadline_s=deadline_s),
        engine=EngineConfig(
            context_tokens=context_tokens, call_timeout_s=PATIENCE_S.get(scenario.name, EngineConfig().call_timeout_s)
        ),
        sampling=SamplingConfig(max_tokens=MAX_TOKENS),
    )
    requests: list[str] = []

    def seen(endpoint: str, request: Request) -> None:
        requests.append(f"{endpoint}{' (stream)' if request.stream else ''}")

    with _folders() as (workspace, gateway_socket, line_socket):
        log = MemoryLog("check")
        world = await open_writer(log, "world", time.time_ns)
        await world.append(CellJoined(cell="c0", index=0, capacity=8, engine_url="scripted", model_digest=""))
        await world.append(CellSwitched(cell="c0", role="rollout", epoch=1, version=0, phases=()))
        await world.append(SessionOpened(execution="check", session=SESSION, temperature=1.0, top_p=1.0))
        renderer = make_renderer(MERGES)
        policy = ScriptedPolicy(renderer, scenario, context_tokens)
        ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        line = BrokenLine(gateway_socket, scenario.breaks_at)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                run_gateway(
                    log,
                    await open_writer(log, "gateway", time.time_ns),
                    config,
                    engine_for=lambda url: policy,
                    renderer=renderer,
                    socket_path=gateway_socket,
                    ready=ready.set_result,
                    seen=seen,
                )
            )
            await ready
            try:
                async with line.listen(line_socket) as gateway_url:
                    runner = HarnessRunner(
                        config.harness,
                        sandbox,
                        socket_path=line_socket,
                        gateway_url=gateway_url,
                        engine=config.engine,
                        sampling=config.sampling,
                    )
                    ended: Ended | None = await runner.run(_task(), SESSION, workspace)
                failure = ""
            except SandboxError as error:
                ended, failure = None, str(error)
            finally:
                await world.append(RunFinished(reason="completed"))
        wrote = _written(workspace)
    events = [recorded.event async for recorded in log.read(1, until=await log.last_seq())]
    num_kept, num_exact = count_exact(events, policy.asked)
    timed_out = ended is not None and ended.timed_out
    return Check(
        name=name,
        scenario=scenario.name,
        expected=expected.lines,
        started=ended is not None,
        requests=tuple(requests),
        tree=describe_tree(events),
        num_kept=num_kept,
        num_exact=num_exact,
        num_tokens_again=count_again(
            policy.asked, lambda ids: str(renderer.tokenizer.decode(ids, skip_special_tokens=False))
        ),
        num_unanswered=sum(isinstance(event, CallCut | CallFailed) for event in events),
        broken=line.broken,
        wrote=wrote,
        ended=ended is not None and not timed_out and ended.exit_code == 0,
        wall_s=ended.wall_s if ended else 0.0,
        detail=failure or ("stopped at its deadline" if timed_out else ended.detail if ended else ""),
    )


@contextmanager
def _folders() -> Iterator[tuple[Path, Path, Path]]:
    """(workspace, the gateway's socket file, the line's), for as long as the block lasts."""
    with tempfile.TemporaryDirectory(prefix="gyre-harness-check-") as folder:
        workspace, gateway, line = (Path(folder, name) for name in ("workspace", "gateway", "line"))
        for each in (workspace, gateway, line):
            each.mkdir()
        yield workspace, gateway / "gateway.sock", line / "line.sock"


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
