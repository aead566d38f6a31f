"""What a call costs follows what it adds: in the log, in the tree, in the projector's fold. Not what came before it."""

import gc
import tracemalloc

from event_stream import Stream, call_events
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.events.codec import Envelope, encode
from gyre.projections import tree
from gyre.projections.tables import Tables
from gyre.projections.tree import Tree

TURN = st.tuples(st.integers(1, 400), st.integers(1, 400))
"""(context, sampled) tokens that one call adds."""
ID_BYTES, TARGET_BYTES = 4, 8
"""Of a context token: its id; of a sampled one: its logprob, too."""
OF_A_CALL = 3_000
"""Bytes that a call takes beside its tokens: objects, names, and those of three events."""


def bytes_of(turns: list[tuple[int, int]]) -> int:
    return sum(ID_BYTES * context + TARGET_BYTES * sampled for context, sampled in turns)


def chain(turns: list[tuple[int, int]], *, started_at: int = 0):  # type: ignore[no-untyped-def]
    """The events of one long session, one call after the other; `started_at`: tokens of its first prompt."""
    base, end = "", 0
    for number, (context, sampled) in enumerate(turns):
        context += started_at if number == 0 else 0
        call = f"c{number:06}"
        yield call_events("e", call, base, end, range(context), range(sampled))
        base, end = call, end + context + sampled


@settings(max_examples=30, deadline=None)
@given(st.lists(TURN, min_size=2, max_size=40), st.integers(0, 20_000))
def test_a_stored_call_is_as_long_as_what_it_adds(turns: list[tuple[int, int]], started_at: int) -> None:
    for number, events in enumerate(chain(turns, started_at=started_at)):
        context, sampled = turns[number]
        added = bytes_of([(context + (started_at if number == 0 else 0), sampled)])
        stored = sum(
            len(encode(Envelope(writer="w", incarnation=1, writer_seq=1, prev="", time_ns=1, cause=0, event=event)))
            for event in events
        )
        assert added < stored <= added + OF_A_CALL


@settings(max_examples=15, deadline=None)
@given(st.lists(TURN, min_size=20, max_size=60), st.integers(0, 20_000))
def test_a_tree_holds_what_its_calls_added(turns: list[tuple[int, int]], started_at: int) -> None:
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        grown = Tree("s")
        for events in chain(turns, started_at=started_at):
            for event in events:
                tree.evolve(grown, event)
        del events, event
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    added = bytes_of(turns) + ID_BYTES * started_at
    assert added <= held <= added + OF_A_CALL * len(turns)


@settings(max_examples=5, deadline=None)
@given(st.integers(1, 4), st.integers(1, 60))
def test_the_fold_lets_go_of_what_a_step_has_used(num_steps: int, num_tokens: int) -> None:
    """However many steps a run has: trees and groups are those of the step under way."""
    stream, tables = Stream(), Tables()
    for step in range(1, num_steps + 1):
        group = f"g{step}"
        stream.group(group, 2)
        for slot in range(2):
            execution = stream.start(group, slot)
            stream.calls(execution, (num_tokens, num_tokens), (num_tokens, num_tokens))
            stream.score(execution, 0.5)
        stream.consume(step, [group])
        stream.complete(step)
    for recorded in stream.recorded:
        tables.evolve(recorded)
        tables.take()
        assert len(tables.experience.trees) <= 2
        assert len(tables.experience.cohorts.groups) <= 1
    assert not tables.experience.trees
    assert not tables.experience.cohorts.groups
