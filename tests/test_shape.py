"""The shape of the code: pure modules stay pure, shells keep apart, heavy imports have one home."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "gyre"
MODULES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path
    for path in sorted(ROOT.rglob("*.py"))
    if path.name != "__init__.py"
}
STANDALONE = {"gyre.agents.reference_harness", "gyre.agents.relay", "gyre.agents.mini_swe_agent_model"}
"""Run inside the sandbox by another interpreter: they import nothing of gyre, and importing them does nothing, so that
pure modules may use their formats."""
WIRING = {module for module in MODULES if module.startswith("gyre.cli.")}
IMPURE_STDLIB = {"asyncio.subprocess", "subprocess", "socket", "http", "urllib", "shutil", "tempfile", "time", "uuid"}
HEAVY = {
    "nats": {"gyre.events.nats_wire"},
    "duckdb": {"gyre.projections.store"},
    "sglang": {"gyre.workers.sglang_cpu", "gyre.workers.hicache_cpu", "gyre.workers.engine_host"},
    "megatron": {"gyre.workers.megatron", "gyre.workers.megatron_checkpoint", "gyre.workers.megatron_cpu"},
    "mooncake": {"gyre.workers.transfer", "gyre.workers.kv_store"},
}


def kind(module: str) -> str:
    doc = ast.get_docstring(ast.parse(MODULES[module].read_text())) or ""
    found = re.match(r"(Pure|Shell)\. ", doc)
    return found.group(1).lower() if found else "?"


def imports(module: str) -> set[str]:
    """Every module that it imports, at any depth of the code; `from a import b` gives a.b where that is a module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & set(MODULES)
            found |= inner or {node.module}
    return found


@pytest.mark.parametrize("module", MODULES)
def test_every_module_says_whether_it_is_pure(module: str) -> None:
    assert kind(module) in ("pure", "shell"), f'{module}: open it with """Pure. ... or """Shell. ...'


@pytest.mark.parametrize("module", [m for m in MODULES if kind(m) == "pure"])
def test_pure_modules_import_only_pure_modules(module: str) -> None:
    shells = {name for name in imports(module) & set(MODULES) if kind(name) == "shell"}
    assert not shells - STANDALONE
    impure = {name for name in imports(module) if name in IMPURE_STDLIB or name.split(".")[0] in IMPURE_STDLIB}
    assert not impure, f"{module} is pure: time, randomness and I/O come in as arguments"


IMPURE_CALLS = {"open", "print", "input", "exec", "eval", "breakpoint"}
IMPURE_METHODS = {"read_text", "read_bytes", "write_text", "write_bytes", "unlink", "mkdir", "now", "utcnow", "today"}


@pytest.mark.parametrize("module", [m for m in MODULES if kind(m) == "pure"])
def test_pure_modules_call_nothing_that_reads_writes_or_draws(module: str) -> None:
    called = [node.func for node in ast.walk(ast.parse(MODULES[module].read_text())) if isinstance(node, ast.Call)]
    impure = {func.id for func in called if isinstance(func, ast.Name)} & IMPURE_CALLS
    impure |= {func.attr for func in called if isinstance(func, ast.Attribute)} & IMPURE_METHODS
    drawn = {ast.unparse(func) for func in called if ast.unparse(func).startswith(("random.", "np.random."))}
    assert not impure | (drawn - {"random.Random"}), f"{module} is pure: time, randomness and I/O come in as arguments"


@pytest.mark.parametrize("module", [m for m in MODULES if kind(m) == "shell" and m not in WIRING])
def test_shells_of_one_folder_do_not_import_shells_of_another(module: str) -> None:
    folder = module.split(".")[1]
    foreign = {
        name
        for name in imports(module) & set(MODULES)
        if kind(name) == "shell" and name.split(".")[1] not in (folder, "events")
    }
    assert not foreign, f"{module}: let gyre/cli inject what it needs of {foreign}"


@pytest.mark.parametrize("library", HEAVY)
def test_each_heavy_library_has_one_home(library: str) -> None:
    users = {m for m in MODULES if any(i.split(".")[0] == library for i in imports(m))}
    assert users <= HEAVY[library]


@pytest.mark.parametrize("module", sorted(STANDALONE & set(MODULES)))
def test_what_runs_in_the_sandbox_stands_alone(module: str) -> None:
    assert not {i for i in imports(module) if i.split(".")[0] == "gyre"}


DECLARATIONS = ("gyre.config", "gyre.events.types", "gyre.projections.schemas")
"""Lists of keys, events and tables: nothing in them to split."""


@pytest.mark.parametrize("module", MODULES)
def test_modules_stay_small(module: str) -> None:
    lines = len(MODULES[module].read_text().splitlines())
    assert lines <= 400 or module in DECLARATIONS, f"{module} has {lines} lines: split it"
