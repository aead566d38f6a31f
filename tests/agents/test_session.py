"""What a gateway that starts again knows of its sessions, and what a request of one is refused for."""

from typing import Any

import msgspec
import pytest
from families import renderer as renderer_of
from playing import CONFIG, Play
from scripted import BASH, RENDERER, TEMPLATE, tool_call

from gyre.agents import endings, session
from gyre.agents.dialect import ContextOverflow, ProviderError, Request
from gyre.agents.messages import Message
from gyre.agents.renderer import Renderer
from gyre.config import Config, HarnessConfig, ToolBudget
from gyre.events.tokens import pack_ids, pack_logprobs, unpack_ids
from gyre.events.types import (
    BudgetSpent,
    CallCompleted,
    CallCut,
    CallFailed,
    CallStarted,
    CallSuperseded,
    ContextCompacted,
    Event,
    ExecutionDropped,
    ExecutionFinished,
    SessionOpened,
    SubAgentSpawned,
    TokensDrifted,
)

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


USER = Message(role="user", content="task")
RESULT = Message(role="tool", content="rc=0")
OTHER = {"execution": "g0-0", "session": "s2", "call": "c0"}


def test_what_is_another_sessions_changes_nothing() -> None:
    state = session.open_session(OPENED)
    for event in (started("c0"), completed("c0"), started("c1")):
        state = session.evolve(state, event)
    before = msgspec.json.encode(state)
    spent = BudgetSpent(execution="g0-1", session="s2", budget="calls", limit=1, reason="")
    others = (
        msgspec.structs.replace(started("c0"), session="s2", call="c2"),
        msgspec.structs.replace(completed("c1"), session="s2"),
        CallCut(**OTHER, sampled=pack_ids([1]), logprobs=pack_logprobs([-1.0]), spans=(), reason=""),
        CallFailed(**OTHER, status=500, reason=""),
        CallSuperseded(**OTHER, by="c1"),
        SubAgentSpawned(**OTHER, parent_call="c1"),
        ContextCompacted(**OTHER, summary_call="c1"),
        spent,
        msgspec.structs.replace(DROPPED, execution="g0-1"),
        ExecutionFinished(execution="g0-1", reason="completed", exit_code=0, wall_s=1.0, detail=""),
    )
    for event in others:
        state = session.evolve(state, event)
        assert msgspec.json.encode(state) == before, type(event).__name__


def test_a_finished_session_keeps_no_token_and_takes_no_request() -> None:
    state = session.open_session(OPENED)
    late = [started("c1"), completed("c1"), SubAgentSpawned(**OTHER | {"session": "s"}, parent_call="c0")]
    for event in (started("c0"), completed("c0"), DROPPED, *late):
        state = session.evolve(state, event)
    assert state.finished and not state.tree.calls and not state.tree.spawns
    request = Request(messages=(USER,))
    for refused in (
        lambda: session.find_prompt(state, request, RENDERER),
        lambda: session.decide_start(state, request, RENDERER, cell="c0", config=CONFIG),
    ):
        with pytest.raises(ProviderError) as told:
            refused()
        assert (told.value.status, told.value.code) == (410, "session_finished")


def test_a_request_that_the_template_refuses_is_the_harnesss_fault() -> None:
    refusal = "{%- if not messages[0].content %}{{ raise_exception('say it') }}{% endif %}"
    renderer = Renderer(RENDERER.tokenizer, refusal + TEMPLATE)
    with pytest.raises(ProviderError, match="say it") as told:
        session.find_prompt(session.open_session(OPENED), Request(messages=(Message(role="user"),)), renderer)
    assert (told.value.status, told.value.code) == (400, "invalid_request")


def limited(context_tokens: int = 10**6, max_tokens: int = 256, **harness: Any) -> Config:
    engine = msgspec.structs.replace(CONFIG.engine, context_tokens=context_tokens)
    sampling = msgspec.structs.replace(CONFIG.sampling, max_tokens=max_tokens)
    return msgspec.structs.replace(CONFIG, engine=engine, sampling=sampling, harness=HarnessConfig(**harness))


def start(play: Play, config: Config, *messages: Message, **fields: Any) -> session.Started:
    request = Request(messages=messages or (USER,), **fields)
    return session.decide_start(play.state, request, RENDERER, cell="c0", config=config)


def test_a_reply_is_as_long_as_the_least_of_its_bounds() -> None:
    play = Play()
    num = session.find_prompt(play.state, Request(messages=(USER,)), RENDERER).num_tokens
    assert num == len(start(play, limited()).input_ids)
    assert start(play, limited(max_tokens=50)).call.max_tokens == 50
    assert start(play, limited(max_tokens=50), max_tokens=7).call.max_tokens == 7
    assert start(play, limited(num + 5)).call.max_tokens == 5
    assert start(play, limited(num + 1), max_tokens=7).call.max_tokens == 1
    with pytest.raises(ContextOverflow) as told:
        start(play, limited(num))
    assert (told.value.num_tokens, told.value.max_tokens) == (num, num)
    reply = play.turn((USER,), "abc")
    used = play.state.used.num_sampled
    going_on = (USER, reply, USER)
    assert start(play, limited(max_output_tokens=used + 1), *going_on).call.max_tokens == 1
    assert session.find_prompt(play.state, Request(messages=going_on), RENDERER).num_tokens == len(
        start(play, limited(), *going_on).input_ids
    )


def test_the_first_budget_that_is_used_up_is_told_now_and_ever_after() -> None:
    play = Play()
    reply = play.turn((USER,), tool_call("ls"))
    num = play.state.used.num_sampled
    cases: list[tuple[dict[str, Any], tuple[str, int, str], str]] = [
        ({"max_calls": 1, "max_output_tokens": 1}, ("calls", 1, ""), "1 calls are used up (harness.max_calls)"),
        (
            {"max_calls": 2, "max_output_tokens": num},
            ("output_tokens", num, ""),
            f"{num} output tokens are used up (harness.max_output_tokens)",
        ),
        (
            {"tool_budgets": (ToolBudget(tool="cat", max_calls=1), ToolBudget(tool="bash", max_calls=1))},
            ("tool_calls", 1, "bash"),
            "1 calls of bash are used up (harness.tool_budgets)",
        ),
        (
            {"tool_budgets": (ToolBudget(tool="bash", max_calls=2, max_seconds=3),)},
            ("tool_seconds", 3, "bash"),
            "3 seconds of bash are used up (harness.tool_budgets)",
        ),
    ]

    def ask(harness: dict[str, Any], tool_s: float = 3.0) -> session.Started:
        request = Request(messages=(USER, reply, RESULT))
        config = limited(**harness)
        return session.decide_start(play.state, request, RENDERER, cell="c0", config=config, since=lambda call: tool_s)

    for harness, told, reason in cases:
        with pytest.raises(session.OverBudget) as over:
            ask(harness)
        event = over.value.event
        assert (event.budget, event.limit, event.tool) == told
        assert event.reason == f"execution x: its {reason}"
        assert (over.value.status, str(over.value)) == (402, event.reason)
    assert ask(cases[-1][0], 2.9).call.tool_s == 2.9
    assert ask({"max_calls": 2, "max_output_tokens": 10**6}).call.call == "s-c1"
    play.fold(event, msgspec.structs.replace(event, reason="another"))
    with pytest.raises(session.OverBudget) as over:
        ask({})
    assert over.value.event == event


def test_only_a_request_that_goes_on_from_tools_has_waited_for_them() -> None:
    play = Play()
    asked: list[str] = []

    def since(call: str) -> float:
        asked.append(call)
        return 2.0

    def tool_s(*messages: Message) -> float:
        request = Request(messages=messages)
        made = session.decide_start(play.state, request, RENDERER, cell="c0", config=CONFIG, since=since)
        play.fold(*made.events)
        return made.call.tool_s

    tools, words = play.turn((USER,), tool_call("ls")), play.turn((Message(role="user", content="hi"),), "hello")
    assert tool_s(USER) == 0.0, "the same request again"
    assert tool_s(Message(role="user", content="hi"), words, USER) == 0.0, "no tool was asked for"
    assert tool_s(USER, tools, RESULT) == 2.0
    assert tool_s(USER, tools, RESULT, USER) == 0.0, "told already"
    assert tool_s(USER, tools, USER) == 0.0, "told already"
    assert asked == ["s-c0"]
    unknown = Play()
    tools = unknown.turn((USER,), tool_call("ls"))
    assert start(unknown, CONFIG, USER, tools, RESULT).call.tool_s == 0.0, "as in a gateway that started again"


def test_drift_is_told_without_the_opening_of_the_reply_and_only_without_that() -> None:
    """A policy whose prompt opens its reasoning: in a history its replies begin otherwise."""
    said = Message(role="assistant", content="what was heard")
    for renderer, shown in (
        (RENDERER, "what was heard<|im_end|>\n"),
        (renderer_of("qwen3-thinking"), "<|im_start|>assistant\nwhat was heard<|im_end|>\n"),
    ):
        play = Play(renderer)
        play.turn((USER,), "what was said")
        assert len(play.start((USER, said, USER), (BASH,)).events) == 1, "other tools, another history"
        (drifted,) = [e for e in play.start((USER, said, USER)).events if isinstance(e, TokensDrifted)]
        assert renderer.tokenizer.decode(unpack_ids(drifted.shown).tolist(), skip_special_tokens=False) == shown
