"""Shell. The references of all events and of all keys of a config, from their types.

    python -m gyre.events.reference > docs/events.md
    python -m gyre.events.reference config > docs/configuration.md

Invariant: what it prints is what `types.py` and `config.py` say; a test compares both pages with it.
"""

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import orjson

from gyre import config
from gyre.config import MUTABLE, Base, Config
from gyre.events import types
from gyre.events.permissions import writers
from gyre.events.types import EVENT_TYPES, ID_FIELDS, MAIN, Aggregate

_INTRO = """# Events

Everything that happens in a run is one of these, appended to the run's stream and never changed.
Generated from `gyre/events/types.py` by `python -m gyre.events.reference`.

Each event stands on the subject `gyre.<run>.<aggregate>.<id>`, which each part of this page names, inside an envelope:

| Field | Meaning |
|---|---|
| `type` | the versioned name, as below |
| `id` | hash of type, writer, incarnation and number; the server drops a repeat by it |
| `writer`, `incarnation`, `writer_seq` | who wrote it; which of its starts; 1, 2, 3, ... within an incarnation |
| `prev` | digest of the same writer's previous body; empty for the first of an incarnation |
| `time_ns` | by the writer's clock, since 1970; never ordered by: the order is the stream's sequence |
| `cause` | sequence of the event that led here; 0 for none |
| `payload` | the event's own fields, as below, and `type` again |

Both hashes are the first 32 hexadecimal digits of a SHA-256: of the body, and of the four values of the id with spaces
between, as in `call.failed.v1 gateway 1 7`. The id stands in the header `Nats-Msg-Id` too.

A body is a 4-byte big-endian header length, the header as JSON with sorted keys and no spaces, and a
binary tail. A `bytes` field stands in the header as its length, and its bytes in the tail, in the
order of the fields below: token arrays are little-endian int32 ids and float32 logprobs. Integers may have 63 bits.
How a large body is stored is in [log.md](log.md#without-gyre). A released type keeps its fields and their meaning;
later ones have a default, which the header may leave out. A change of meaning is a new type beside the old one
(`call.completed.v2`): pass over types and fields that you do not know.

`_s` at the end of a name says seconds, `num_` at its beginning a count, `_ns` nanoseconds. `run`, `group`, `execution`,
`session`, `call`, `cell` are names, unique within a run; `step` and `version` count from 1 (version 0 is what the run
began with); `epoch` and `term` are fencing numbers of a cell and of the scheduler.

All events of a run have one order, their sequences: 1, 2, 3, ... without holes. In it

- `call.started` comes before the one end of its call (`call.completed`, `call.cut` or `call.failed`), and that before
  `call.delivered` and `call.superseded`; `base` names a call that was started before. Calls that a killed gateway left
  open are cut when it is back;
- `execution.started` comes before all else of an execution. It ends once, as `execution.scored` or as
  `execution.dropped`, after which another attempt may start under another name;
- `policy.cohort_consumed`, `policy.batch_assembled` and `policy.step_completed`, or `policy.step_rejected`, of a step
  follow one another, and the steps do; `policy.published` comes after the last step of a burst;
- `scheduler.decided`, `cell.switch_requested` (its cause is the decision), `cell.leased`, and `cell.switched` or
  `cell.rolled_back` of a switch follow one another and have one `epoch`; a cell that is lost or starts again may leave
  the last of them out;
- `run.finished` may be followed by the seal (`run.tables_recorded`), and by `run.resumed` when the run goes on.
"""


def render_reference() -> str:
    """The whole page, as Markdown."""
    classes = _classes(types)
    aliases = {
        node.targets[0].id: ast.unparse(node.value)
        for node in ast.parse(inspect.getsource(types)).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    parts = [_INTRO]
    for aggregate in get_args(Aggregate):
        subject = f"`gyre.<run>.{aggregate}.{f'<{ID_FIELDS[aggregate]}>' if aggregate in ID_FIELDS else MAIN}`"
        parts.append(f"## {aggregate}\n\nOn {subject}. Written by: {', '.join(writers(aggregate))}.\n")
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
            default = "" if item.value is None else f", else `{ast.unparse(item.value)}`"
            rows.append(_row(f"`{item.target.id}`", f"`{aliases.get(kind, kind)}`{default}", meaning))
    if rows:
        lines += ["| Field | Type | Meaning |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _text_after(node: ast.ClassDef, at: int) -> str:
    """The string that stands below a field."""
    after = node.body[at + 1] if at + 1 < len(node.body) else None
    if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
        return " ".join(str(after.value.value).split())
    return ""


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _classes(module: ModuleType) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.ClassDef)}


_CONFIG_INTRO = """# Configuration

Every key of the YAML file that `gyre run` takes. A file names only what differs from the defaults, as those in
`examples/` do; a key that is not here is an error that names its path and the nearest valid name. `_s` at the end of a
key says seconds, `_mb` MiB. Generated from `gyre/config.py` by `python -m gyre.events.reference config`.
"""
_MAY_CHANGE = (
    f"When a run goes on, {', '.join(f'`{path}`' for path in MUTABLE[:-1])} and `{MUTABLE[-1]}` may differ from what "
    "it began with: the change is an event. Anything else would make the past untrue and is refused."
)
_WORDS = {int: "integer", float: "number", str: "string", bool: "true or false"}
_LONGEST_DEFAULT = 60


def render_config() -> str:
    """The whole page, as Markdown: a table a branch of the tree."""
    return "\n".join([_CONFIG_INTRO, textwrap.fill(_MAY_CHANGE, 120) + "\n", *_branch(Config, "", _classes(config))])


def _branch(cls: type[Base], path: str, classes: dict[str, ast.ClassDef]) -> Iterator[str]:
    node = classes[cls.__name__]
    meanings = {
        item.target.id: _text_after(node, at)
        for at, item in enumerate(node.body)
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    if path:
        yield f"## `{path.removesuffix('.')}`\n"
    if doc := ast.get_docstring(node):
        yield " ".join(doc.split()) + "\n"
    yield "| Key | Type | Default | Meaning |\n|---|---|---|---|"
    below: list[tuple[type[Base], str]] = []
    for field in msgspec.structs.fields(cls):
        key = f"{path}{field.name}"
        many = get_origin(field.type) is tuple
        inner = get_args(field.type)[0] if many else field.type
        is_branch = isinstance(inner, type) and issubclass(inner, Base)
        if is_branch:
            below.append((inner, f"{key}[]." if many else f"{key}."))
        if many or not is_branch:
            yield _row(f"`{key}`", _kind(field.type), _default(field), meanings[field.name])
    yield ""
    for inner, its_path in below:
        yield from _branch(inner, its_path, classes)


def _kind(hint: Any) -> str:
    """A type in words, as in `integer, at least 1`."""
    if get_origin(hint) is Annotated:
        base, meta = get_args(hint)
        match meta:
            case msgspec.Meta(ge=int(low), le=int(high)):
                bounds = f", {low} to {high}"
            case msgspec.Meta(ge=int(low)):
                bounds = f", at least {low}"
            case _:
                bounds = f" above {meta.gt}"
        return _WORDS[base] + bounds
    if get_origin(hint) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(hint))
    if get_origin(hint) is tuple:
        return f"list, each: {_kind(get_args(hint)[0])}"
    return _WORDS.get(hint, "mapping")


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is msgspec.NODEFAULT:
        return "none: to be given"
    text = orjson.dumps(field.default).decode()
    return f"`{text}`" if len(text) <= _LONGEST_DEFAULT else f"{len(field.default)} of them"


if __name__ == "__main__":
    print(render_config() if sys.argv[1:] == ["config"] else render_reference(), end="")
