"""Shell. Which sandbox the config asks for: `harness.sandbox` -> AnySandbox.

Invariant: model-written commands run without one only if the command line says so too.
"""

from gyre.agents.containers import ContainerSandbox
from gyre.agents.harbor_sandbox import HarborSandbox
from gyre.agents.places import AnySandbox, Limits
from gyre.agents.sandbox import Sandbox
from gyre.agents.unsandboxed import NoSandbox
from gyre.config import HarnessConfig
from gyre.errors import SandboxError


def open_sandbox(config: HarnessConfig, *, unsafe: bool, gateway_host: str = "127.0.0.1") -> AnySandbox:
    """`unsafe`: `--unsafe-no-sandbox`. Raises SandboxError."""
    limits = Limits(
        max_processes=config.limits.processes,
        max_memory=config.limits.memory_mb << 20,
        file_size=config.limits.file_mb << 20,
        workspace_size=config.limits.workspace_mb << 20,
        tmp_size=config.limits.tmp_mb << 20,
        cpu_s=config.limits.cpu_s,
        max_files=config.limits.open_files,
    )
    match config.sandbox:
        case "bubblewrap":
            return Sandbox(limits=limits)
        case "docker" | "podman" as program:
            return ContainerSandbox(program, config.image, limits=limits)
        case "harbor":
            return HarborSandbox(config.environment, config.image, gateway_host=gateway_host, limits=limits)
        case "none" if unsafe:
            return NoSandbox(limits=limits)
    raise SandboxError(
        f"config: harness.sandbox is {config.sandbox}: model-written commands would run with your rights; "
        "set it to bubblewrap, or add --unsafe-no-sandbox on a machine that may be lost"
    )


def usual_sandbox(*, unsafe: bool) -> AnySandbox:
    """For commands without a config."""
    return open_sandbox(HarnessConfig(sandbox="none" if unsafe else "bubblewrap"), unsafe=unsafe)
