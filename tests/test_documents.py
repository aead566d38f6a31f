"""What the documents lead to and name is there: files, headings, keys of a config."""

import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from gyre.config import Base, Config
from gyre.events.permissions import may_publish
from gyre.events.types import EVENT_TYPES

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def prose(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.S)


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = target.partition("#")
        if path.startswith(("http:", "https:")):
            continue
        found = page.parent / path if path else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


@each_page
def test_files_that_are_named_are_there(page: Path) -> None:
    for name in re.findall(r"`((?:gyre|tests|benchmarks|examples|docs|requirements)/[\w./-]+)`", page.read_text()):
        assert (ROOT / name).exists() or page.name == "tasks.md", name  # a task has a folder tests/ of its own


@each_page
def test_keys_that_are_named_are_of_the_config(page: Path) -> None:
    sections: Any = get_type_hints(Config)
    events = {name.rpartition(".v")[0] for name in EVENT_TYPES} | set(EVENT_TYPES)
    for key in re.findall(rf"`((?:{'|'.join(sections)})\.[a-z_0-9.]+)[`:]", page.read_text()):
        if key in events:
            continue
        branch: Any = Config
        for name in key.split("."):
            assert isinstance(branch, type) and issubclass(branch, Base) and name in get_type_hints(branch), key
            branch = get_type_hints(branch)[name]


def test_who_may_write_what_is_what_the_log_grants() -> None:
    table = (ROOT / "docs/log.md").read_text().partition("| Role | May write |")[2].partition("\n\n")[0]
    rows = dict(re.findall(r"^\| (\w+)[^|]* \| (.*?) \|", table, re.M))
    granted = {"owner": "everything", "reader": "nothing"}
    assert rows | granted == rows
    for role in ("gateway", "dispatcher", "projector", "scheduler", "cell"):
        aggregates = {subject.split(".")[2] for subject in may_publish(role) if subject.startswith("gyre.")}
        assert set(re.findall(r"`(\w+)`", rows[role])) == aggregates, role
