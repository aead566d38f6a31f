"""Shell. The reference of all events, from their types: `python -m gyre.events.reference > docs/events.md`.

Invariant: what it prints is what `types.py` says; a test compares docs/events.md with it.
"""

import ast
import inspect
from typing import get_args

from gyre.events import types
from gyre.events.types import EVENT_TYPES, Aggregate

_INTRO = """# Events

Everything that happens in a run is one of these, appended to the run's stream and never changed.
Generated from `gyre/events/types.py` by `python -m gyre.events.reference`.

Each event stands on the subject `gyre.<run>.<aggregate>.<id>` inside an envelope:

| Field | Meaning |
|---|---|
| `type` | the versioned name, as below |
| `id` | hash of type, writer, incarnation and number; the server drops a repeat by it |
| `writer`, `incarnation`, `writer_seq` | who wrote it; 1, 2, 3, ... within an incarnation |
| `prev` | digest of the same writer's previous body; empty for the first of an incarnation |
| `time_ns` | recorded, never ordered by: the order is the stream's sequence |
| `cause` | sequence of the event that led here; 0 for none |

A body is a 4-byte big-endian header length, the header as JSON with sorted keys and no spaces, and a
binary tail. A `bytes` field stands in the header as its length, and its bytes in the tail, in the
order of the fields below: token arrays are little-endian int32 ids and float32 logprobs.
"""


def render_reference() -> str:
    """The whole page, as Markdown."""
    tree = ast.parse(inspect.getsource(types))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    aliases = {
        node.targets[0].id: ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    parts = [_INTRO]
    for aggregate in get_args(Aggregate):
        parts.append(f"## {aggregate}\n")
        parts.extend(
            _render_class(classes[cls.__name__], f"`{name}`", aliases)
            for name, cls in EVENT_TYPES.items()
            if cls.aggregate == aggregate
        )
    parts.append("## Parts of events\n")
    parts.extend(
        _render_class(node, f"`{name}`", aliases)
        for name, node in classes.items()
        if any(isinstance(base, ast.Name) and base.id == "Value" for base in node.bases)
    )
    return "\n".join(parts)


def _render_class(node: ast.ClassDef, title: str, aliases: dict[str, str]) -> str:
    lines = [f"### {title}\n"]
    doc = ast.get_docstring(node)
    if doc:
        lines.append(f"{' '.join(doc.split())}\n")
    rows = []
    for at, item in enumerate(node.body):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.target.id != "aggregate":
            kind, meaning = ast.unparse(item.annotation), _text_after(node, at)
            cells = (f"`{item.target.id}`", f"`{aliases.get(kind, kind)}`", meaning)
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    if rows:
        lines += ["| Field | Type | Meaning |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _text_after(node: ast.ClassDef, at: int) -> str:
    """The string that stands below a field."""
    after = node.body[at + 1] if at + 1 < len(node.body) else None
    if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
        return " ".join(str(after.value.value).split())
    return ""


if __name__ == "__main__":
    print(render_reference(), end="")
