"""Pure. A tree as text: what `gyre tree` prints.

A call that continues the one above it stands below it without indentation; a call that branches off stands indented
under the call that holds the last token that it shares. What a milestone found stands at the last call that had ended
when the workspace was kept for it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from gyre.errors import ConfigError
from gyre.events.codec import Recorded
from gyre.events.tokens import num_tokens, unpack_ids
from gyre.events.types import (
    CallCompleted,
    CallCut,
    ExecutionDropped,
    ExecutionFinished,
    ExecutionScored,
    MilestoneScored,
    SessionOpened,
    SnapshotTaken,
)
from gyre.projections import tree
from gyre.projections.tree import Call, Tree

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text."""


class Sketch:
    """Fold of one execution; with an empty name, of all, and the text is of the one with most calls."""

    def __init__(self, execution: str = "") -> None:
        self._wanted = execution
        self._trees: dict[str, dict[str, Tree]] = {}
        self._ends: dict[str, list[str]] = {}
        self._last: dict[str, str] = {}
        """Execution -> its call that ended last."""
        self._kept: dict[tuple[str, float], str] = {}
        """(execution, seconds of a milestone) -> the call that had ended last; empty for none."""
        self._marks: dict[str, list[str]] = {}
        """By call."""

    def evolve(self, recorded: Recorded) -> None:
        event = recorded.event
        execution = getattr(event, "execution", "")
        if not execution or self._wanted not in ("", execution):
            return
        trees = self._trees.setdefault(execution, {})
        match event:
            case SessionOpened():
                trees.setdefault(event.session, Tree(event.session))
            case _ if isinstance(event, tree.TreeEvent):
                tree.evolve(trees.setdefault(event.session, Tree(event.session)), event)
                if isinstance(event, CallCompleted | CallCut):
                    self._last[execution] = event.call
            case SnapshotTaken(kind="milestone"):
                self._kept[execution, event.after_s] = self._last.get(execution, "")
            case MilestoneScored():
                call, text = self._kept.get((execution, event.after_s), ""), f"score {event.score:.3g}"
                if call:
                    self._marks.setdefault(call, []).append(f"{text} at {event.after_s:g} s")
                else:
                    self._note(execution, f"{text} at {event.after_s:g} s, before its first call")
            case ExecutionFinished():
                why = event.detail.strip().rpartition("\n")[2]
                self._note(execution, f"{event.reason} after {event.wall_s:.1f} s" + (f" ({why:.120})" if why else ""))
            case ExecutionScored():
                passed = sum(part.passed for part in event.parts)
                self._note(execution, f"score {event.score:.3g} ({passed} of {len(event.parts)} tests)")
            case ExecutionDropped():
                self._note(execution, f"dropped: {event.reason}")
            case _:
                pass

    def _note(self, execution: str, text: str) -> None:
        self._ends.setdefault(execution, []).append(text)

    def text(self, decode: Decode | None = None) -> str:
        """One line a call, ended by none; with `decode`, then what it read (`<`) and said (`>`). Raises ConfigError
        where there is no such execution."""
        if not self._trees:
            which = f" {self._wanted}" if self._wanted else ""
            raise ConfigError(f'no execution{which}: `gyre sql RUN_DIR "select execution from executions"` lists them')
        execution = self._wanted or max(self._trees, key=lambda e: sum(len(t.calls) for t in self._trees[e].values()))
        lines = [", ".join([execution, *self._ends.get(execution, ["not finished"])])]
        for grown in self._trees[execution].values():
            lines += draw(grown, self._marks, decode)
        return "\n".join(lines)


def draw(grown: Tree, marks: Mapping[str, Sequence[str]] | None = None, decode: Decode | None = None) -> list[str]:
    """The lines of one session's tree; marks: by call, what is to be said of it besides; decode: as `Sketch.text`."""
    marked = marks or {}
    stats = tree.stats(grown)
    lines = [
        f"session {grown.session}: {_many(stats.num_calls, 'call')}, {_many(stats.num_leaves, 'leaf', 'leaves')}, "
        f"{_many(stats.num_tokens, 'token')}, {stats.num_sampled} sampled, {_many(stats.num_targets, 'target')}"
    ]
    children: dict[int, list[Call]] = {}
    for call in grown.calls:
        children.setdefault(_parent(grown, call), []).append(call)
    leaves = set(tree.leaves(grown))
    stack: list[tuple[Call, int]] = [(call, 1) for call in reversed(children.get(-1, []))]
    while stack:
        call, depth = stack.pop()
        lines.append("  " * depth + _line(call, grown, call.index in leaves, marked.get(call.call, ())))
        if decode is not None:
            lines += ("  " * (depth + 1) + line for line in _said(call, decode))
        below = children.get(call.index, [])
        follows = next((c for c in reversed(below) if c.shared == call.end), None)
        if follows is not None:
            stack.append((follows, depth))
        stack += [(c, depth + 1) for c in reversed(below) if c is not follows]
    return lines


def _parent(grown: Tree, call: Call) -> int:
    """The call that holds the last token that this one shares; -1 for none."""
    index = call.base
    while index >= 0 and (call.shared == 0 or call.shared <= grown.calls[index].shared):
        index = grown.calls[index].base
    return index


def _line(call: Call, grown: Tree, is_leaf: bool, marks: Sequence[str]) -> str:
    name = call.call.removeprefix(grown.session).lstrip("-") or call.call
    shared = f"{call.shared} shared + " if call.shared else ""
    parts = [
        f"{name} {call.role_class}: {shared}{num_tokens(call.context)} context + {num_tokens(call.sampled)} sampled"
    ]
    parts.append(call.finish or call.status)
    versions = sorted({span.version for span in call.spans})
    if versions:
        parts.append("v" + "-".join(map(str, versions[:: max(1, len(versions) - 1)])))
    if call.end > call.target_end:
        parts.append(f"{call.end - call.target_end} not trained: {call.reason}")
    elif call.fault:
        parts.append(f"not trained: {call.fault}")
    if is_leaf:
        parts.append("leaf")
    parts += marks
    return ", ".join(parts)


def _said(call: Call, decode: Decode) -> Iterator[str]:
    """What the call adds to the one that it builds on. What would steer a terminal is shown as a mark."""
    for mark, ids in (("<", call.context), (">", call.sampled)):
        for line in decode(unpack_ids(ids).tolist()).splitlines():
            yield f"{mark} " + "".join(c if c.isprintable() else "\ufffd" for c in line.expandtabs())


def _many(num: int, one: str, more: str = "") -> str:
    return f"{num:,} {one if num == 1 else more or one + 's'}"
