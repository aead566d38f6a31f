"""What a gateway that starts again knows of its sessions."""

from gyre.agents import endings, session
from gyre.events.tokens import pack_ids, pack_logprobs
from gyre.events.types import CallCompleted, CallStarted, Event, ExecutionDropped, SessionOpened

OPENED = SessionOpened(execution="g0-0", session="s", temperature=1.0, top_p=1.0)
DROPPED = ExecutionDropped(execution="g0-0", reason="interrupted", final=False)


def started(call: str) -> CallStarted:
    return CallStarted(
        execution="g0-0", session="s", call=call, base="", shared=0, context=pack_ids([1, 2]), role_class="main",
        rule="root", marks=(), temperature=1.0, top_p=1.0, max_tokens=8, cell="c0",
    )  # fmt: skip


def completed(call: str) -> CallCompleted:
    return CallCompleted(
        execution="g0-0", session="s", call=call, sampled=pack_ids([3]), logprobs=pack_logprobs([-1.0]), spans=(),
        finish="stop", reply="", num_prompt_tokens=2, num_cached_tokens=0, num_retries=0, engine_s=0.1,
    )  # fmt: skip


def orphans(*events: Event) -> list[str]:
    state = session.open_session(OPENED)
    for event in events:
        state = session.evolve(state, event)
    return [cut.call for cut in endings.decide_orphans(state)]


def test_calls_that_the_log_left_open_are_orphans_until_they_are_cut() -> None:
    assert orphans(started("c0"), started("c1"), completed("c0")) == ["c1"]
    assert orphans(started("c0"), completed("c0")) == []


def test_a_dispatcher_may_have_dropped_the_execution_before_its_gateway_was_back() -> None:
    assert orphans(started("c0"), started("c1"), completed("c0"), DROPPED) == ["c1"]
    assert orphans(DROPPED, started("c0")) == ["c0"], "it was on its way when the execution was dropped"
    assert orphans(started("c0"), DROPPED, completed("c0")) == []
