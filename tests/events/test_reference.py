"""docs/events.md is what the types say."""

from pathlib import Path

from gyre.events.reference import render_reference
from gyre.events.types import EVENT_TYPES

PAGE = Path(__file__).parents[2] / "docs" / "events.md"


def test_the_reference_is_up_to_date() -> None:
    assert PAGE.read_text() == render_reference(), "run `python -m gyre.events.reference > docs/events.md`"


def test_every_type_is_in_it() -> None:
    text = PAGE.read_text()
    assert all(f"### `{name}`\n" in text for name in EVENT_TYPES)
