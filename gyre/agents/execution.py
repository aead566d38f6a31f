"""Shell. One execution's two programs: the harness on a workspace, then the grader of what it left.

Direction: task, session -> files of the launch -> sandbox -> how it ended. One value serves any number
of executions at once.
"""

import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from gyre.agents.dispatcher import Ended
from gyre.agents.evaluator import folder_env, grade, within
from gyre.agents.harness_install import own_folder, require
from gyre.agents.harnesses import POLICY_MODEL, find_recipe, launch
from gyre.agents.places import WORKSPACE, AnySandbox
from gyre.agents.tasks import Task
from gyre.agents.verifier import Grade
from gyre.config import EngineConfig, HarnessConfig, SamplingConfig

_HERE = Path(__file__).parent


class HarnessRunner:
    """The dispatcher's `Runner`, over a sandbox and an installed harness."""

    def __init__(
        self,
        config: HarnessConfig,
        sandbox: AnySandbox,
        *,
        socket_path: Path,
        gateway_url: str,
        engine: EngineConfig | None = None,
        sampling: SamplingConfig | None = None,
    ) -> None:
        """gateway_url: where the gateway answers for a harness without a sandbox. Raises HarnessError, ConfigError."""
        self._config = config
        self._recipe = find_recipe(config.name)
        self._folder = require(config.name) or own_folder(config.folder, socket_path)
        self._sandbox = sandbox
        self._harness_sandbox = _with_memory(sandbox, self._recipe.process_memory)
        self._socket_path = socket_path
        self._gateway_url = gateway_url
        self._engine, self._sampling = engine or EngineConfig(), sampling or SamplingConfig()

    async def run(self, task: Task, session: str, workspace: Path, held: Callable[[], float] = lambda: 0.0) -> Ended:
        """See `Runner.run`. Raises SandboxError when the harness was never started."""
        shape, deadline_s, held_before = task.folder, self._config.deadline_s, held()
        workdir = shape.workdir if shape else WORKSPACE
        # Beside the workspace, so that it goes with the workspaces of a dispatcher that was killed.
        with tempfile.TemporaryDirectory(prefix=f".{workspace.name}-launch-", dir=workspace.parent) as folder:
            places = self._sandbox.places(
                workspace=workspace, config=Path(folder), gateway=self._gateway_url, workdir=workdir
            )
            start = launch(
                self._recipe,
                base_url=f"{places.gateway}/s/{session}/v1",
                instruction=task.instruction,
                places=places,
                max_turns=self._config.max_turns,
                model=POLICY_MODEL,
                python=self._sandbox.python,
                folder=str(self._folder or ""),
                command=self._config.command,
                context_tokens=self._engine.context_tokens,
                max_tokens=self._sampling.max_tokens,
                pause_s=_pause_s(self._config, session),
            )
            for name, source in start.files:
                shutil.copyfile(_HERE / source, Path(folder) / name)
            for name, content in start.written:
                (Path(folder) / name).write_text(content)
            ended = await within(self._harness_sandbox, shape.memory if shape else 0).run(
                start.argv,
                env=start.env if shape is None else folder_env(self._sandbox.python) | dict(start.env),
                workspace=workspace,
                workdir=workdir,
                deadline_s=min(deadline_s, shape.agent_s) if shape else deadline_s,
                held=held,
                socket_path=self._socket_path,
                config=Path(folder),
                extra_ro=(self._folder,) if self._folder else (),
            )
        return Ended(
            exit_code=ended.code,
            wall_s=ended.wall_s,
            timed_out=ended.timed_out,
            detail=ended.failure,
            held_s=held() - held_before,
        )

    async def grade(self, task: Task, workspace: Path) -> Grade:
        """Raises EvaluationError: no score."""
        return await grade(self._sandbox, workspace, task)


def _pause_s(config: HarnessConfig, session: str) -> float:
    """By the name of the execution, which the session's begins with: the same in every run."""
    execution = session.rpartition("-")[0]
    return config.pauses_s[zlib.crc32(execution.encode()) % len(config.pauses_s)] if config.pauses_s else 0.0


def _with_memory(sandbox: AnySandbox, process_memory: int) -> AnySandbox:
    """The same, with at least this much for one process; what all of them use together stays limited as it was."""
    if process_memory <= sandbox.limits.process_memory:
        return sandbox
    limits = msgspec.structs.replace(sandbox.limits, process_memory=process_memory)
    return sandbox.with_limits(limits)
