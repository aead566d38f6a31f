"""docs/events.md and docs/configuration.md are what the types say."""

import re
from pathlib import Path

import msgspec

from gyre.config import Config
from gyre.events.reference import render_config, render_reference
from gyre.events.types import EVENT_TYPES

DOCS = Path(__file__).parents[2] / "docs"
EVENTS, CONFIGURATION = DOCS / "events.md", DOCS / "configuration.md"


def test_the_reference_is_up_to_date() -> None:
    assert EVENTS.read_text() == render_reference(), "run `python -m gyre.events.reference > docs/events.md`"


def test_every_type_is_in_it() -> None:
    text = EVENTS.read_text()
    assert all(f"### `{name}`\n" in text for name in EVENT_TYPES)


def test_the_keys_are_up_to_date() -> None:
    made = "python -m gyre.events.reference config > docs/configuration.md"
    assert CONFIGURATION.read_text() == render_config(), f"run `{made}`"


def keys(tree: object, path: str = "") -> set[str]:
    """Of every value of a config, as `trainer.learning_rate`; of a list, its own."""
    if not isinstance(tree, dict):
        return {path.removesuffix(".")}
    return set().union(*(keys(value, f"{path}{name}.") for name, value in tree.items()))


def test_every_key_is_in_it_with_its_meaning() -> None:
    rows = re.findall(r"^\| `([\w.\[\]]+)` \| (.+) \| (.+) \| (.*) \|$", CONFIGURATION.read_text(), re.M)
    assert keys(msgspec.to_builtins(Config())) <= {key for key, *_ in rows}
    assert [key for key, *_, meaning in rows if not meaning] == []
