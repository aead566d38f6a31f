"""Pure. What a harness is to gyre: where it comes from, and all that a sandbox needs to start it once.

Invariant: a Launch names only paths and addresses that the harness sees.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from gyre.agents.places import Places

Kind = Literal["file", "venv", "npm", "command"]
POLICY_MODEL = "gyre-policy"
HELPER_MODEL = "gyre-small"
"""Harnesses are told to use this name for titles and the like."""
API_KEY = "none"
"""The session in the address is the credential; some clients refuse to start without any key."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    kind: Kind
    """`file`: one file of gyre, run by the sandbox's Python. `venv`, `npm`: installed first, from the Python package
    index or the npm registry. `command`: from the config."""
    version: str = ""
    files: tuple[tuple[str, str], ...] = ()
    """(name in the config folder, file of gyre/agents)."""
    packages: tuple[str, ...] = ()
    """`npm`: each with its version; `{arch}` is x64 or arm64."""
    programs: tuple[tuple[str, str], ...] = ()
    """`npm`: (name under bin/, program in the folder), `{arch}` as above. The first is the harness."""
    process_memory: int = 0
    """Bytes of writable private memory that one of its processes needs beyond the sandbox's own limit."""
    about: str = ""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """One start of a harness."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    files: tuple[tuple[str, str], ...] = ()
    """(name in the config folder, file of gyre/agents)."""
    written: tuple[tuple[str, str], ...] = ()
    """(name in the config folder, content)."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What one start is to do, and where."""

    base_url: str
    """`http://host:port/s/<session>/v1`, as the harness reaches it."""
    instruction: str
    places: Places
    max_turns: int
    model: str
    context_tokens: int
    """Of the engine: harnesses compact by it, so that they are told rather than left to guess."""
    max_tokens: int
    """Of one reply."""
    folder: str = ""
    """Where it is installed."""

    @property
    def root_url(self) -> str:
        """The base URL of Messages, which adds `/v1` itself."""
        return self.base_url.removesuffix("/v1")
