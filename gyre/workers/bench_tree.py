"""Shell. `gyre bench tree`: trees of recorded sessions, tokens attached, against the same sessions flattened.

Every figure is over all sessions of the file, each folded from its events as a consumer of the log folds it. Seconds
are of the CPU (one thread), so other programs do not count; memory is what Python allocated and still holds once the
events are let go. The flattened form has a row a call: all ids of its path, and the log-probabilities of its own
sampled tokens; rows are really put together, one at a time.

Direction: file -> shapes -> events -> trees -> figures.
"""

import gc
import time
import tracemalloc
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

from gyre.errors import ConfigError
from gyre.events.codec import Envelope, decode, encode
from gyre.events.tokens import ITEM_BYTES
from gyre.events.types import Event
from gyre.projections import tree
from gyre.projections.selection import select
from gyre.projections.tree import Tree
from gyre.workers.bench import Figure, figure
from gyre.workers.session_shapes import MadeUp, Shape, call_events, read_sessions

GOAL_CALLS_S = 20_000
LONG, ADDED = 20_000, 8
"""Calls of the session that shows what a late call costs, and tokens that each adds."""
PART = LONG // 10
MAX_GROWTH = 1.5
DEPTH, NUM_BRANCHES = 50, 1_000
J_MAX = 5


class CpuWatch:
    """Adds up the CPU seconds of what runs within it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._begun_s = time.process_time()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.seconds += time.process_time() - self._begun_s


class Totals:
    """Over all sessions."""

    def __init__(self) -> None:
        self.num_calls = self.num_leaves = 0
        self.tree_tokens = self.call_tokens = self.leaf_tokens = self.trained_tokens = 0
        self.tree_bytes = self.row_bytes = 0
        self.fold, self.log, self.selection, self.flattening = CpuWatch(), CpuWatch(), CpuWatch(), CpuWatch()

    def measure(self, session: Sequence[Shape], made_up: MadeUp) -> None:
        events = [event for triple in call_events(session, made_up) for event in triple]
        bodies = [encode(_enveloped(event, number)) for number, event in enumerate(events, 1)]
        with self.fold:
            grown = _grow(events)
        with self.log:
            _grow(decode(body).event for body in bodies)
        with self.selection:
            chosen = select(grown, seed=1, execution="e", max_trajectories=J_MAX)
        numbers = tree.stats(grown)
        self.num_calls += numbers.num_calls
        self.num_leaves += numbers.num_leaves
        self.tree_tokens += numbers.num_tokens
        self.call_tokens += sum(call.end for call in grown.calls)
        self.leaf_tokens += sum(grown.calls[index].end for index in tree.leaves(grown))
        self.trained_tokens += sum(trajectory.num_tokens for trajectory in chosen)
        for call in grown.calls:
            with self.flattening:
                row = tree.token_ids(grown, call.index, call.end)
            self.row_bytes += row.nbytes + len(call.logprobs)


def bench_tree(sessions: Path) -> dict[str, Figure]:
    """Raises ConfigError when the file is not there, not of the form, or holds no session."""
    shapes = [session for session in read_sessions(sessions) if session]
    if not shapes:
        raise ConfigError(f"{sessions}: it holds no session; see benchmarks/data/README.md")
    made_up = MadeUp(max(LONG * ADDED, max(shape.end for session in shapes for shape in session)))
    totals = Totals()
    for session in shapes:
        totals.measure(session, made_up)
    for session in shapes:
        totals.tree_bytes += _held_bytes(session, made_up)
    early, late = _long_session(made_up)
    times = "times the tree's tokens"
    return {
        "calls_a_second": figure(totals.num_calls / totals.fold.seconds, "calls/s a core", min_value=GOAL_CALLS_S),
        "calls_a_second_from_the_log": figure(totals.num_calls / totals.log.seconds, "calls/s a core"),
        "late_call": figure(1e6 * late, "CPU us", reference=1e6 * early, max_ratio=MAX_GROWTH),
        "memory": figure(totals.tree_bytes / 1e9, "GB", reference=totals.row_bytes / 1e9),
        "memory_a_token": figure(totals.tree_bytes / totals.tree_tokens, "bytes", reference=ITEM_BYTES),
        "tokens_of_a_row_a_call": figure(totals.call_tokens / totals.tree_tokens, times),
        "tokens_of_a_row_a_leaf": figure(totals.leaf_tokens / totals.tree_tokens, times),
        f"tokens_of_j_max_{J_MAX}": figure(totals.trained_tokens / totals.tree_tokens, times),
        "selection": figure(1e3 * totals.selection.seconds / len(shapes), "CPU ms a session"),
        "selection_of_a_bushy_tree": figure(1e3 * _bushy_selection(made_up), "CPU ms"),
        "flattening": figure(totals.flattening.seconds, "CPU s", reference=totals.fold.seconds),
        "sessions": figure(len(shapes), "sessions"),
        "calls": figure(totals.num_calls, "calls"),
        "leaves": figure(totals.num_leaves, "leaves"),
        "tokens": figure(totals.tree_tokens / 1e6, "million"),
    }


def _held_bytes(session: Sequence[Shape], made_up: MadeUp) -> int:
    """What the tree holds once its events are gone."""
    gc.collect()
    tracemalloc.start()
    grown = _grow(event for triple in call_events(session, made_up) for event in triple)
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held if grown.calls else 0


def _long_session(made_up: MadeUp) -> tuple[float, float]:
    """CPU seconds a call of the first and of the last tenth of one long chain; the best of three."""
    events = [event for triple in call_events(_chain(LONG), made_up) for event in triple]
    early, late = [], []
    for _ in range(3):
        grown, parts = Tree("s"), []
        for at in range(0, len(events), 3 * PART):
            watch = CpuWatch()
            with watch:
                _grow(events[at : at + 3 * PART], grown)
            parts.append(watch.seconds / PART)
        early.append(parts[0])
        late.append(parts[-1])
    return min(early), min(late)


def _bushy_selection(made_up: MadeUp) -> float:
    """CPU seconds to take every branch of a tree whose branches hang all along one stem."""
    stem = _chain(DEPTH)
    twigs = [
        Shape(base=n % DEPTH, shared=stem[n % DEPTH].end, num_context=2, num_sampled=6, role_class="main")
        for n in range(NUM_BRANCHES)
    ]
    grown = _grow(event for triple in call_events([*stem, *twigs], made_up) for event in triple)
    watch = CpuWatch()
    with watch:
        select(grown, seed=1, execution="e", max_trajectories=0)
    return watch.seconds


def _chain(num: int) -> list[Shape]:
    half = ADDED // 2
    return [
        Shape(base=n - 1, shared=ADDED * n, num_context=half, num_sampled=half, role_class="main") for n in range(num)
    ]


def _grow(events: Iterable[Event], grown: Tree | None = None) -> Tree:
    grown = Tree("s") if grown is None else grown
    for event in events:
        grown = tree.evolve(grown, event)
    return grown


def _enveloped(event: Event, number: int) -> Envelope:
    return Envelope(writer="w", incarnation=1, writer_seq=number, prev="", time_ns=number, cause=0, event=event)
