"""Live harnesses in their sandbox, against the gateway and a scripted policy: the trees that were written by hand.

`make harness-test` runs them all. Here run those that are installed, the slow ones in fewer scenarios, and two that are
quick to install are installed for this test, where their registry is within reach.
"""

import asyncio
from pathlib import Path

import pytest

from gyre.agents.harness_check import check_harness, read_expected
from gyre.agents.harness_install import harness_home, install, installed
from gyre.agents.harnesses import RECIPES
from gyre.agents.sandbox import Sandbox, check_sandbox
from gyre.agents.scenarios import SCENARIOS
from gyre.errors import HarnessError

QUICK_TO_INSTALL = ("mini-swe-agent", "claude-code")
SLOW = {"qwen-code": ("twins", "compaction"), "opencode": ("twins", "compaction"), "pi": ("main", "retry")}
CASES = [
    (name, scenario)
    for name in RECIPES
    if name != "command"
    for scenario in SLOW.get(name, SCENARIOS)
    if not read_expected(name)[scenario].not_offered
]
MISSING = check_sandbox()

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path | str]:
    """Harness -> where it is installed, or why it is not."""
    found: dict[str, Path | str] = {name: harness_home() for name in RECIPES if installed(name)}
    fresh = tmp_path_factory.mktemp("harnesses")
    for name in QUICK_TO_INSTALL:
        if name not in found:
            try:
                install(name, fresh)
                found[name] = fresh
            except HarnessError as error:
                found[name] = str(error)
    return found


@pytest.mark.parametrize(("name", "scenario"), CASES)
def test_a_live_harness_makes_the_tree_that_was_written_by_hand(
    name: str, scenario: str, homes: dict[str, Path | str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = homes.get(name, f"{name} is not installed: gyre harness install {name}")
    if MISSING or isinstance(home, str):
        pytest.skip(MISSING or str(home))
    monkeypatch.setenv("GYRE_HARNESSES", str(home))
    check = asyncio.run(check_harness(name, Sandbox(), SCENARIOS[scenario], deadline_s=180))
    assert check.ok, "\n".join([name, *check.lines()])
    assert check.num_exact == check.num_kept > 0
    assert check.num_tokens_again == 0
    assert check.unexplained == ()
