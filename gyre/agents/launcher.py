"""Shell. One execution of a harness: task, session -> files, sandbox, harness -> Exit.

Invariant: what the harness leaves is its workspace and its Exit. A harness that fails is an Exit with a
`failure`, not an exception; SandboxError and HarnessError mean that it was never started.
"""

import shutil
import tempfile
from pathlib import Path

from gyre.agents.harness_install import require
from gyre.agents.harnesses import find_recipe, launch
from gyre.agents.places import Exit
from gyre.agents.unsandboxed import AnySandbox
from gyre.config import HarnessConfig


async def run_harness(
    sandbox: AnySandbox,
    config: HarnessConfig,
    *,
    instruction: str,
    session: str,
    gateway: str,
    socket_path: Path,
    workspace: Path,
    model: str,
    home: Path | None = None,
) -> Exit:
    """Run the configured harness in `workspace` until it ends or its deadline comes.

    gateway: its TCP address `http://host:port`, used only without a sandbox; socket_path: its socket file.
    home: where harnesses are installed. Raises HarnessError, SandboxError, ConfigError.
    """
    recipe = find_recipe(config.name)
    venv = require(config.name, home)
    with tempfile.TemporaryDirectory(prefix="gyre-harness-") as folder:
        files = Path(folder)
        places = sandbox.places(workspace=workspace, config=files, gateway=gateway)
        start = launch(
            recipe,
            base_url=f"{places.gateway}/s/{session}/v1",
            instruction=instruction,
            places=places,
            max_turns=config.max_turns,
            model=model,
            python=sandbox.python,
            venv=str(venv or ""),
            command=config.command,
        )
        for name, source in start.files:
            shutil.copyfile(Path(__file__).with_name(source), files / name)
        return await sandbox.run(
            start.argv,
            env=start.env,
            workspace=workspace,
            config=files,
            extra_ro=(venv,) if venv else (),
            socket_path=socket_path,
            deadline_s=config.deadline_s,
        )
