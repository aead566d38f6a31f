"""Wall seconds by phase, from made-up logs whose answer is known."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.events import types as e
from gyre.events.codec import Envelope, Recorded
from gyre.workers.run_costs import RunCosts, subtract, union, window_length


def costs(*events: tuple[float, e.Event]) -> RunCosts:
    found = RunCosts()
    for seq, (at_s, event) in enumerate(events, 1):
        envelope = Envelope(
            writer="w", incarnation=1, writer_seq=seq, prev="", time_ns=round(at_s * 1e9), cause=0, event=event
        )
        found.evolve(Recorded(seq=seq, subject="gyre.r.x.y", digest="", envelope=envelope))
    return found


def switched(role: e.Role, *seconds: float) -> e.CellSwitched:
    phases = tuple(e.Phase(name="load", seconds=value) for value in seconds)
    return e.CellSwitched(cell="c0", role=role, epoch=1, version=0, phases=phases)


def call(kind: str, at_s: float, engine_s: float = 0.0) -> tuple[float, e.Event]:
    ids = {"execution": "g0-0", "session": "s", "call": "s-c1"}
    if kind == "started":
        event: e.Event = e.CallStarted(
            **ids, base="", shared=0, context=b"", role_class="main", rule="root", marks=(), temperature=1.0,
            top_p=1.0, max_tokens=8, cell="c0",
        )  # fmt: skip
    elif kind == "completed":
        event = e.CallCompleted(
            **ids, sampled=b"", logprobs=b"", spans=(), finish="stop", reply="", num_prompt_tokens=0,
            num_cached_tokens=0, num_retries=0, engine_s=engine_s,
        )  # fmt: skip
    else:
        event = e.CallDelivered(**ids, delivered=True)
    return at_s, event


LOG = (
    (10.0, switched("rollout")),
    (11.0, e.SessionOpened(execution="g0-0", session="s", temperature=1.0, top_p=1.0)),
    call("started", 13.0),
    call("completed", 17.0, engine_s=3.0),
    call("delivered", 17.5),
    (19.5, e.ExecutionFinished(execution="g0-0", reason="completed", exit_code=0, wall_s=8.5, detail="")),
    (21.0, e.ExecutionScored(execution="g0-0", score=1.0, parts=(), wall_s=1.0)),
    (21.0, e.SwitchRequested(cell="c0", role="train", epoch=2, term=1)),
    (22.0, switched("train", 0.25, 0.25)),
    (22.5, e.CohortConsumed(step=1, groups=(), executions=(), digest="", through_seq=1)),
    (24.5, e.StepCompleted(
        step=1, weights_digest="", loss=0.0, grad_norm=0.0, entropy=0.0, clip_fraction=0.0, logprob_gap_mean=0.0,
        logprob_gap_max=0.0, kl=0.0, staleness_mean=0.0, staleness_max=0,
        learning_rate=0.0, score_mean=0.0, num_tokens=0, num_targets=0,
        phases=(e.Phase(name="checkpoint", seconds=0.5),),
    )),
    (25.0, e.RunFinished(reason="completed")),
)  # fmt: skip


def test_every_second_belongs_to_one_phase() -> None:
    wall = costs(*LOG).wall()
    assert wall.total == pytest.approx(15.0)
    assert wall.phases == pytest.approx({"engine": 3.0, "harness": 4.0, "scoring": 1.0, "training": 2.0, "gyre": 5.0})
    assert sum(wall.phases.values()) == pytest.approx(wall.total)
    assert wall.switching == pytest.approx(1.0)


def test_calls_and_switches_are_told_apart() -> None:
    found = costs(*LOG)
    assert found.call_added == pytest.approx([1.5]), "4.5 s from start to delivery, 3 of them in the engine"
    assert found.switch_phases == {"load": 0.5}
    assert found.trainer_phases == {"checkpoint": 0.5}
    assert (found.num_calls, found.num_executions, found.num_events) == (1, 1, len(LOG))
    assert (found.milestones["CellSwitched"], found.begin_s, found.end_s) == (10.0, 10.0, 25.0)
    arrived = msgspec.structs.replace(switched("rollout"), cell="c9")
    assert costs(*LOG[:-1], (24.9, arrived), LOG[-1]).switches == [(21.0, 22.0)], "nobody had asked c9 to switch"


def test_a_run_without_an_end_has_no_wall_time() -> None:
    with pytest.raises(ValueError, match="no end"):
        costs(*LOG[:-1]).wall()


intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda t: (t[0], t[0] + t[1])), max_size=8)


@given(intervals)
def test_intervals_and_what_they_leave_make_the_whole(parts: list[tuple[float, float]]) -> None:
    whole = (5.0, 25.0)
    rest = subtract(whole, parts)
    inside = {t for t in range(5, 25) if any(a <= t < b for a, b in parts)}
    assert sum(b - a for a, b in rest) == 20 - len(inside)
    assert window_length(union(parts), [whole]) == len(inside)
