import asyncio

import pytest
from event_stream import Stream, cut, done, grow, started
from synthetic_run import written

from gyre.errors import ConfigError
from gyre.events.types import Event, MilestoneScored, SnapshotTaken
from gyre.projections.draw import Sketch, draw


def test_a_tree() -> None:
    events: list[Event] = [
        *done("s-c0", "", 0, [1, 2], [3]),
        *done("s-c1", "s-c0", 3, [4], [5, 6]),
        started("s-c2", "s-c1", 6, [7]),
        cut("s-c2", [8]),
        *done("s-c3", "s-c1", 6, [7, 9], [8]),
        *done("s-c4", "s-c1", 2, [1], [8], role_class="auxiliary"),
    ]
    assert draw(grow(*events)) == [
        "session s: 5 calls, 3 leaves, 13 tokens, 6 sampled, 4 targets",
        "  c0 main: 2 context + 1 sampled, stop, v0",
        "    c4 auxiliary: 2 shared + 1 context + 1 sampled, stop, v0, 1 not trained: auxiliary, leaf",
        "  c1 main: 3 shared + 1 context + 2 sampled, stop, v0",
        "    c2 main: 6 shared + 1 context + 1 sampled, cut, v0, 1 not trained: cut, leaf",
        "  c3 main: 6 shared + 2 context + 1 sampled, stop, v0, leaf",
    ]


def test_what_a_call_read_and_said_stands_below_it() -> None:
    grown = grow(*done("s-c0", "", 0, [65, 10, 66], [67, 27]), *done("s-c1", "s-c0", 2, [9], [68]))
    assert draw(grown, decode=lambda ids: bytes(ids).decode())[1:] == [
        "  c0 main: 3 context + 2 sampled, stop, v0, leaf",
        "    < A",
        "    < B",
        "    > C\ufffd",
        "    c1 main: 2 shared + 1 context + 1 sampled, stop, v0, leaf",
        "      <         ",
        "      > D",
    ]


def test_an_execution_of_a_log() -> None:
    async def main() -> tuple[str, str]:
        log = await written()
        one, most, none = Sketch("g0000-1"), Sketch(), Sketch("g9999-0")
        async for recorded in log.read(1, until=await log.last_seq()):
            for sketch in (one, most, none):
                sketch.evolve(recorded)
        with pytest.raises(ConfigError, match="no execution g9999-0: "):
            none.text()
        return one.text(), most.text()

    one, most = asyncio.run(main())
    assert one.splitlines()[0] == "g0000-1, timed_out after 2.0 s, score 0.5 (1 of 2 tests)"
    assert len(one.splitlines()) == 6
    assert one.count("score 0.25 at 1 s") == 1
    assert most.splitlines()[0].startswith("g0000-0, completed")


def test_a_milestone_stands_at_the_last_call_that_had_ended_when_the_workspace_was_kept() -> None:
    """Not where its grade came: the agent went on meanwhile."""

    def kept(after_s: float) -> SnapshotTaken:
        return SnapshotTaken(
            execution="e", snapshot="d", kind="milestone", after_s=after_s, num_files=1, num_bytes=1, new_bytes=0
        )

    def scored(after_s: float, score: float) -> MilestoneScored:
        return MilestoneScored(execution="e", snapshot="d", after_s=after_s, score=score, parts=(), wall_s=0.1)

    stream, sketch = Stream(), Sketch("e")
    for event in (
        kept(1.0),
        *done("s-c0", "", 0, [1, 2], [3]),
        scored(1.0, 0.0),
        kept(60.0),
        kept(90.5),
        *done("s-c1", "s-c0", 3, [4], [5, 6]),
        scored(90.5, 0.5),
        scored(60.0, 0.25),
    ):
        stream.add(event)
    for recorded in stream.recorded:
        sketch.evolve(recorded)
    assert sketch.text().splitlines() == [
        "e, score 0 at 1 s, before its first call",
        "session s: 2 calls, 1 leaf, 6 tokens, 3 sampled, 3 targets",
        "  c0 main: 2 context + 1 sampled, stop, v0, score 0.5 at 90.5 s, score 0.25 at 60 s",
        "  c1 main: 3 shared + 1 context + 2 sampled, stop, v0, leaf",
    ]


def test_a_chain_of_ten_thousand_calls_is_drawn_without_recursion() -> None:
    events: list[Event] = []
    for number in range(10_000):
        events += done(f"s-c{number}", f"s-c{number - 1}" if number else "", 2 * number, [1], [2])
    lines = draw(grow(*events))
    assert len(lines) == 10_001
    assert lines[-1].startswith("  c9999 ")
