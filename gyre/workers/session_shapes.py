"""Shell. Recorded sessions, as lengths and places -> call events with tokens made up by position.

The record knows which whole blocks of an earlier *prompt* a request shares, and not its reply. So a request that shares
all whole blocks of its base's prompt continues it: the reply came back as it was sampled, and what else is new is
context. Any other forks where the record says. Invariant: no call shares more than its base has, so every call has
its place; lengths are the recorded ones but for the rounding of the record's own counts (a continued reply that came
back shorter than it was billed), which is below 0.5% of all tokens.

Direction: file -> `Shape`s of a session -> events.
"""

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from gyre.errors import ConfigError
from gyre.events.tokens import ITEM_BYTES
from gyre.events.types import CallCompleted, CallDelivered, CallStarted, RoleClass, VersionSpan

BLOCK = 64
"""Tokens: the record compares prompts by whole blocks."""
RECORDED = Path(__file__).parents[2] / "benchmarks/data/agent-sessions.jsonl.gz"


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """One call: its place, and how many tokens it adds."""

    base: int
    """An earlier one of the session; -1: none."""
    shared: int
    num_context: int
    num_sampled: int
    role_class: RoleClass

    @property
    def prompt_end(self) -> int:
        return self.shared + self.num_context

    @property
    def end(self) -> int:
        return self.prompt_end + self.num_sampled


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    num_in: int | None = msgspec.field(name="in")
    num_out: int | None = msgspec.field(name="out")
    base: int
    shared: int
    parent: int = -1


class _Session(msgspec.Struct, frozen=True, kw_only=True):
    requests: tuple[_Request, ...]


def read_sessions(path: Path) -> Iterator[tuple[Shape, ...]]:
    """One session a line. Raises ConfigError for a file that is not there or not of this form."""
    decoder = msgspec.json.Decoder(_Session)
    try:
        with gzip.open(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    yield _shapes(decoder.decode(line).requests)
                except (msgspec.DecodeError, ValueError) as error:
                    raise ConfigError(f"{path}: line {number}: {error}; see benchmarks/data/README.md") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; give --sessions a file of recorded sessions") from None


def _shapes(requests: Sequence[_Request]) -> tuple[Shape, ...]:
    shapes: list[Shape] = []
    place: dict[int, int] = {-1: -1}
    for number, request in enumerate(requests):
        if request.num_in is None or request.num_out is None:
            continue
        if not -1 <= request.base < number:
            raise ValueError(f"requests[{number}]: base {request.base} is no earlier request")
        base = place.get(request.base, -1)
        role_class: RoleClass = "main" if base == -1 else shapes[base].role_class
        if request.parent != -1:
            role_class = "sub-agent"
        shared, new = 0, request.num_in
        if base != -1:
            before = requests[request.base].num_in or 0
            if request.shared >= before // BLOCK * BLOCK and request.num_in > before:
                shared = shapes[base].end
                new = max(1, request.num_in - before - shapes[base].num_sampled)
            else:
                shared = min(request.shared, shapes[base].end)
                new = request.num_in - shared
        place[number] = len(shapes)
        shapes.append(
            Shape(base=base, shared=shared, num_context=new, num_sampled=request.num_out, role_class=role_class)
        )
    return tuple(shapes)


class MadeUp:
    """Tokens and log-probabilities of every position, as the events carry them."""

    def __init__(self, num_tokens: int, vocabulary: int = 32_000) -> None:
        at = np.arange(num_tokens)
        self._ids = (at % vocabulary).astype("<i4").tobytes()
        self._logprobs = (-0.01 * (at % 97)).astype("<f4").tobytes()

    def ids(self, start: int, end: int) -> bytes:
        return self._ids[ITEM_BYTES * start : ITEM_BYTES * end]

    def logprobs(self, start: int, end: int) -> bytes:
        return self._logprobs[ITEM_BYTES * start : ITEM_BYTES * end]


def shortened(shapes: Sequence[Shape], scale: int) -> tuple[Shape, ...]:
    """Lengths and places divided by `scale`; a call keeps at least one token of each kind, and its base."""
    out: list[Shape] = []
    for shape in shapes:
        shared = 0
        if shape.base >= 0:
            continues = shape.shared == shapes[shape.base].end
            shared = out[shape.base].end if continues else min(shape.shared // scale, out[shape.base].end)
        sizes = {k: max(1, getattr(shape, k) // scale) for k in ("num_context", "num_sampled")}
        out.append(msgspec.structs.replace(shape, shared=shared, **sizes))
    return tuple(out)


class Drawn(MadeUp):
    """Random tokens instead: branches share what the record says that they share, and nothing by chance."""

    def __init__(self, seed: int, vocabulary: int) -> None:
        self._rng, self._vocabulary = np.random.default_rng(seed), vocabulary

    def ids(self, start: int, end: int) -> bytes:
        return self._rng.integers(self._vocabulary, size=end - start).astype("<i4").tobytes()

    def logprobs(self, start: int, end: int) -> bytes:
        likely = -np.log(self._vocabulary)
        return self._rng.normal(likely, 0.3, end - start).astype("<f4").tobytes()


def call_events(
    shapes: Sequence[Shape], made_up: MadeUp, *, execution: str = "e", session: str = "s"
) -> Iterator[tuple[CallStarted, CallCompleted, CallDelivered]]:
    """Of each call, in order; one policy version sampled all."""
    for number, shape in enumerate(shapes):
        call, base = f"{session}-c{number}", "" if shape.base == -1 else f"{session}-c{shape.base}"
        rule = "root" if shape.base == -1 else "continue" if shape.shared == shapes[shape.base].end else "fork"
        yield (
            CallStarted(
                execution=execution,
                session=session,
                call=call,
                base=base,
                shared=shape.shared,
                context=made_up.ids(shape.shared, shape.prompt_end),
                role_class=shape.role_class,
                rule=rule,
                marks=(),
                temperature=1.0,
                top_p=1.0,
                max_tokens=shape.num_sampled,
                cell="c0",
            ),
            CallCompleted(
                execution=execution,
                session=session,
                call=call,
                sampled=made_up.ids(shape.prompt_end, shape.end),
                logprobs=made_up.logprobs(shape.prompt_end, shape.end),
                spans=(VersionSpan(version=0, start=0, end=shape.num_sampled),),
                finish="tool_calls",
                reply="",
                num_prompt_tokens=shape.prompt_end,
                num_cached_tokens=0,
                num_retries=0,
                engine_s=0.0,
            ),
            CallDelivered(execution=execution, session=session, call=call, delivered=True),
        )
