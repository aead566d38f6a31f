"""Recipes of harnesses: what each is given, and whether those that are installed work."""

import asyncio
import json
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from gyre.agents import npm_harnesses
from gyre.agents.harness_check import check_harness
from gyre.agents.harness_findings import Check
from gyre.agents.harness_install import install, installed
from gyre.agents.harnesses import RECIPES, launch
from gyre.agents.places import AnySandbox, Exit, Limits, Places
from gyre.agents.recipe import Launch
from gyre.agents.sandbox import Sandbox, check_sandbox
from gyre.agents.scenarios import CONTENT
from gyre.agents.unsandboxed import NoSandbox
from gyre.errors import HarnessError

URL = "http://127.0.0.1:8080/s/s1/v1"
PLACES = Places(workspace="/workspace", config="/config", home="/tmp", gateway="http://127.0.0.1:8080")
NPM = [recipe.name for recipe in npm_harnesses.RECIPES]
MISSING = check_sandbox()


def start(name: str, instruction: str = "Do this") -> Launch:
    return launch(
        RECIPES[name],
        base_url=URL,
        instruction=instruction,
        places=PLACES,
        max_turns=7,
        model="gyre-policy",
        python="python3",
        folder=f"/h/{name}",
        context_tokens=50_000,
        max_tokens=900,
    )


def settings(launched: Launch) -> dict[str, object]:
    """What is written for it, as a mapping."""
    ((name, content),) = launched.written
    found: dict[str, object] = tomllib.loads(content) if name.endswith(".toml") else json.loads(content)
    return found


@pytest.mark.parametrize("name", NPM)
def test_recipe_is_pinned_and_gets_the_session_the_context_and_the_instruction(name: str) -> None:
    recipe = RECIPES[name]
    assert all(package.rpartition("@")[2][0].isdigit() for package in recipe.packages)
    assert recipe.packages[0].endswith(f"@{recipe.version}")
    launched = start(name, "-v 'quoted' $(x)\nDo it")
    assert any("-v 'quoted' $(x)\nDo it" in word for word in launched.argv)
    told = json.dumps([launched.argv, dict(launched.env), launched.written])
    assert "http://127.0.0.1:8080/s/s1" in told
    assert "50000" in told
    assert "gyre-policy" in told
    assert any(word.startswith(f"/h/{name}/bin/") for word in launched.argv)


def test_claude_code() -> None:
    launched = start("claude-code")
    assert launched.argv[:2] == ("/h/claude-code/bin/claude", "-p")
    assert launched.argv[-4:] == ("--max-turns", "7", "--", "Do this")
    assert launched.env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8080/s/s1"
    assert launched.env["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "gyre-small"
    assert launched.env["CLAUDE_CODE_GATEWAY_HINT_HEADERS"] == "1"
    assert launched.env["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert launched.env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "50000"


def test_codex_waits_for_a_slow_policy_and_compacts_before_its_context_is_full() -> None:
    launched = start("codex")
    told = settings(launched)
    assert told["model_provider"] == "gyre"
    assert told["model_context_window"] == 50_000
    assert told["model_auto_compact_token_limit"] == 40_000
    (provider,) = told["model_providers"].values()  # type: ignore[attr-defined]
    assert provider["base_url"] == URL
    assert provider["wire_api"] == "responses"
    assert provider["stream_idle_timeout_ms"] == 3_600_000
    assert provider["env_key"] in launched.env
    assert launched.argv[0] == "/bin/sh"
    assert {"/config/config.toml", launched.env["CODEX_HOME"]} <= set(launched.argv)


def test_opencode_and_pi_know_only_this_provider() -> None:
    told = settings(start("opencode"))
    assert (told["model"], told["small_model"]) == ("gyre/gyre-policy", "gyre/gyre-small")
    provider = told["provider"]["gyre"]  # type: ignore[index]
    assert provider["options"]["baseURL"] == URL
    assert provider["models"]["gyre-policy"]["limit"] == {"context": 50_000, "output": 900}
    (pi,) = settings(start("pi"))["providers"].values()  # type: ignore[attr-defined]
    assert (pi["baseUrl"], pi["models"][0]["contextWindow"]) == (URL, 50_000)


def test_addresses_that_a_harness_is_given_lie_within_its_session() -> None:
    for name in NPM:
        launched = start(name)
        words = [*launched.env.values(), *json.dumps(launched.written).replace('\\"', " ").split()]
        addresses = [urlsplit(word) for word in words if word.startswith("http")]
        assert addresses
        assert all(a.netloc == "127.0.0.1:8080" and a.path.startswith("/s/s1") for a in addresses)


def test_a_recipe_that_needs_more_memory_changes_that_limit_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYRE_HARNESSES", str(tmp_path))
    for recipe in (RECIPES["opencode"], RECIPES["codex"]):
        (tmp_path / recipe.name).mkdir()
        (tmp_path / recipe.name / ".gyre-installed").write_text(recipe.version)
    given: dict[str, Limits] = {}

    class Told(NoSandbox):
        async def run(self, argv: Sequence[str], **_: Any) -> Exit:
            given[argv[0]] = self.limits
            return Exit(code=0, wall_s=0.0)

    for name in ("opencode", "codex"):
        checked(name, sandbox=Told())
    roomy, usual = given[f"{tmp_path}/opencode/bin/opencode"], given["/bin/sh"]
    assert usual == Limits()
    assert roomy == msgspec.structs.replace(usual, process_memory=8 << 30)


def test_install_without_npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HarnessError, match="npm is not installed"):
        install("codex", tmp_path / "home")
    assert not installed("codex", tmp_path / "home")


def checked(
    name: str, command: tuple[str, ...] = (), deadline_s: float = 90.0, sandbox: AnySandbox | None = None
) -> Check:
    sandbox = sandbox or (NoSandbox() if MISSING else Sandbox())
    return asyncio.run(check_harness(name, sandbox, command=command, deadline_s=deadline_s))


def test_check_says_what_a_harness_does_not_do() -> None:
    check = checked("command", ("sh", "-c", "echo no licence; exit 3"))
    assert (check.ok, check.started, check.num_calls, check.ended) == (False, True, 0, False)
    assert check.lines()[-1].strip() == "exit code 3: no licence"
    lazy = checked("command", ("sh", "-c", f"printf '{CONTENT.strip()}\\n' > hello.txt"))
    assert (lazy.ok, lazy.wrote, lazy.ended, lazy.num_calls) == (False, True, True, 0)
    slow = checked("command", ("sleep", "300"), deadline_s=2.0)
    assert slow.lines()[-1].strip() == "stopped at its deadline"


def test_any_other_program_is_checked_without_a_tree() -> None:
    """The reference harness, as one of which nothing was written down."""
    source = Path(npm_harnesses.__file__).parent / "reference_harness.py"
    script = f"OPENAI_BASE_URL=$1 exec python3 -c {shlex.quote(source.read_text())}"
    check = checked("command", ("sh", "-c", script, "sh", "{base_url}"))
    assert check.ok, "\n".join(check.lines())
    assert check.tree == ("main 0 root", "main 1 continue main 0")
