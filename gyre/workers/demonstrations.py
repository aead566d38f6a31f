"""Pure. Oracle demonstrations: what a finished execution of the reference harness looks like.

(family, seed, index) -> messages -> ids with a weight on each. Messages are made with the reference harness's own
functions, so a policy that learned them meets the same format in a rollout. Commands are not run: `simulate` gives
the few shapes that solutions have the effect and output of a real shell, a thousand times faster; a test
runs the same commands for real and compares.
Demonstrations come from train tasks only, and never become RL targets.
"""

import json
import re
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gyre.agents.reference_harness import first_messages, observation
from gyre.agents.renderer import Renderer
from gyre.agents.tasks import Goal, Task, make_goals, make_task
from gyre.agents.template import Message
from gyre.errors import TaskError

FINAL_REPLY = "Done."
"""Ends an execution: one token and no tool call, so nothing has to be learned to submit."""


class Demonstration(msgspec.Struct, frozen=True, kw_only=True):
    task: Task
    commands: tuple[str, ...]
    """The oracle's, or with noise what a careless agent would run instead."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One supervised sequence; `target_T` marks what an assistant says, its end of turn included."""

    ids_T: NDArray[np.int32]
    target_T: NDArray[np.bool_]


def make_demonstration(family: str, seed: int, index: int, num_goals: int, noise: float = 0.0) -> Demonstration:
    """`noise` is the probability that a goal goes wrong; a quarter of those are skipped, the others confused."""
    task = make_task(family, "train", seed, index, num_goals)
    if noise == 0.0:
        return Demonstration(task=task, commands=task.solution)
    rng = Random(f"noise\0{task.id}")
    goals = make_goals(family, "train", seed, index, num_goals)
    return Demonstration(task=task, commands=tuple(c for goal in goals for c in _attempt(rng, goal, noise)))


def _attempt(rng: Random, goal: Goal, noise: float) -> tuple[str, ...]:
    if rng.random() >= noise:
        return goal.solution
    return () if rng.random() < 0.25 else goal.confused


def make_messages(demonstration: Demonstration) -> list[Message]:
    """The whole history of an execution that runs these commands, one a turn."""
    files = dict(demonstration.task.files)
    messages: list[Message] = list(first_messages(demonstration.task.instruction))
    for number, command in enumerate(demonstration.commands, 1):
        call_id = f"call_{number}"
        function = {"name": "bash", "arguments": json.dumps({"command": command})}
        tool_calls = [{"id": call_id, "type": "function", "function": function}]
        rc, output = simulate(command, files)
        messages.append({"role": "assistant", "content": None, "tool_calls": tool_calls})
        messages.append({"role": "tool", "tool_call_id": call_id, "content": observation(rc, output)})
    messages.append({"role": "assistant", "content": FINAL_REPLY})
    return messages


def make_rows(renderer: Renderer, histories: Sequence[Sequence[Message]], tools: Sequence[Any] = ()) -> Iterator[Row]:
    """Render finished histories; targets lie between the opening of an assistant's turn and its end."""
    texts = [renderer.render_text(messages, tools, False) for messages in histories]
    opening = renderer.opening
    for encoding in renderer.tokenizer.encode_batch(texts, add_special_tokens=False):
        ids: list[int] = encoding.ids
        target_T = np.zeros(len(ids), dtype=np.bool_)
        at, num_opening = 0, len(opening)
        while at < len(ids):
            if ids[at : at + num_opening] != opening:
                at += 1
                continue
            start = at + num_opening
            at = ids.index(renderer.end_of_turn_id, start) + 1
            target_T[start:at] = True
        yield Row(ids_T=np.array(ids, dtype=np.int32), target_T=target_T)


_SHAPES = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("write", r"echo (\S+) > (\S+)"),
        ("append", r"echo (\S+) >> (\S+)"),
        ("move", r"mv (\S+) (\S+)"),
        ("copy", r"cp (\S+) (\S+)"),
        ("remove", r"rm (\S+)"),
        ("show", r"cat (\S+)"),
        ("find", r"grep -l (\S+) \*"),
        ("count", r"grep -c (\S+) (\S+) > (\S+)"),
        ("match", r"grep (\S+) (\S+) > (\S+)"),
        ("sum", r"awk '\{s\+=\$(\d)\} END \{print s\}' (\S+) > (\S+)"),
    )
)


def simulate(command: str, files: dict[str, str]) -> tuple[int, str]:
    """(exit status, output) of a command; `files` is changed as the workspace would be.

    Raises TaskError for a command or a file that no demonstration has.
    """
    for kind, pattern in _SHAPES:
        if match := pattern.fullmatch(command):
            try:
                return _apply(kind, match.groups(), files)
            except KeyError as error:
                raise TaskError(f"simulate: {command!r}: there is no file {error}: run it in a real shell") from None
    raise TaskError(f"simulate: {command!r} has no known shape: add it to _SHAPES, or run it in a real shell")


def _apply(kind: str, words: tuple[str, ...], files: dict[str, str]) -> tuple[int, str]:
    match kind, words:
        case "write", (word, name):
            files[name] = f"{word}\n"
        case "append", (word, name):
            files[name] = files.get(name, "") + f"{word}\n"
        case "move", (old, new):
            files[new] = files.pop(old)
        case "copy", (old, new):
            files[new] = files[old]
        case "remove", (name,):
            del files[name]
        case "show", (name,):
            return 0, files[name]
        case "find", (word,):
            # The glob is sorted by the C locale, which the harness's clean environment gives.
            names = [name for name in sorted(files) if word in files[name]]
            return (0 if names else 1), "".join(f"{name}\n" for name in names)
        case "count", (word, name, into):
            num_hits = sum(word in line for line in files[name].splitlines())
            files[into] = f"{num_hits}\n"
            return (0 if num_hits else 1), ""
        case "match", (word, name, into):
            hits = [line for line in files[name].splitlines() if word in line]
            files[into] = "".join(f"{line}\n" for line in hits)
            return (0 if hits else 1), ""
        case "sum", (column, name, into):
            files[into] = f"{sum(int(line.split()[int(column) - 1]) for line in files[name].splitlines())}\n"
    return 0, ""
