"""What one execution may ask for, in calls and tokens: more is refused in the provider's words, and said once."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import BASH, ScriptedEngine, Served, config, log_until, serving, tool_call

from gyre.agents import session
from gyre.agents.budgets import Use, find_spent
from gyre.config import Config, HarnessConfig, ToolBudget
from gyre.errors import EngineError
from gyre.events.tokens import num_tokens, pack_ids, pack_logprobs
from gyre.events.types import (
    BudgetSpent,
    CallCompleted,
    CallCut,
    CallFailed,
    CallStarted,
    Event,
    SessionOpened,
)

USER = {"role": "user", "content": "Do this."}
BODIES: dict[str, Any] = {
    "chat/completions": {"messages": [USER]},
    "messages": {"messages": [USER], "max_tokens": 99},
    "responses": {"input": [USER]},
}
KINDS = {"chat/completions": "insufficient_quota", "messages": "billing_error", "responses": "insufficient_quota"}


def run(case: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(case, 60))


def limited(**harness: int) -> Config:
    impatient = msgspec.structs.replace(config().engine, call_timeout_s=0.1)
    return msgspec.structs.replace(config(), harness=HarnessConfig(**harness), engine=impatient)  # type: ignore[arg-type]


async def post(served: Served, endpoint: str, name: str = "s1", **fields: Any) -> tuple[int, Any]:
    body = {"model": "m", **BODIES[endpoint], **fields}
    async with aiohttp.ClientSession() as http, http.post(f"{served.url(name)}/{endpoint}", json=body) as response:
        return response.status, await response.json(content_type=None) if response.status >= 400 else None


@pytest.mark.parametrize("endpoint", list(BODIES))
@pytest.mark.parametrize("stream", [False, True])
def test_calls_beyond_the_budget_are_refused_and_said_once(tmp_path: Path, endpoint: str, stream: bool) -> None:
    async def case() -> None:
        async with serving(tmp_path, settings=limited(max_calls=2), sessions=("s1", "s2")) as served:
            told = [await post(served, endpoint, stream=stream) for _ in range(4)]
            assert [status for status, _ in told] == [200, 200, 402, 402]
            assert told[2][1]["error"]["type"] == KINDS[endpoint]
            assert "its 2 calls are used up (harness.max_calls)" in told[2][1]["error"]["message"]
            (spent,) = await served.events(BudgetSpent)
            assert (spent.execution, spent.budget, spent.limit) == ("x-s1", "calls", 2)
            assert len(await served.events(CallStarted)) == len(served.engine.asked) == 2
            assert (await post(served, endpoint, "s2", stream=stream))[0] == 200, "each execution has its own"

    run(case())


def test_calls_that_failed_do_not_count(tmp_path: Path) -> None:
    async def case() -> None:
        script = [EngineError("engine: no", 422), "one", "two"]
        engine = ScriptedEngine(script=lambda n, _: script[min(n, 2)])
        async with serving(tmp_path, engine, settings=limited(max_calls=2)) as served:
            told = [(await post(served, "chat/completions"))[0] for _ in range(4)]
            assert told == [422, 200, 200, 402]

    run(case())


def test_the_last_call_gets_the_tokens_that_are_left(tmp_path: Path) -> None:
    async def case() -> None:
        engine = ScriptedEngine(script=lambda n, _: "more words than the budget has room for")
        async with serving(tmp_path, engine, settings=limited(max_output_tokens=60)) as served:
            told = [(await post(served, "messages"))[0] for _ in range(3)]
            first, last = await served.events(CallCompleted)
            assert (told, first.finish, last.finish) == ([200, 200, 402], "stop", "length")
            assert sum(num_tokens(call.sampled) for call in (first, last)) == 60
            (spent,) = await served.events(BudgetSpent)
            assert (spent.budget, spent.limit) == ("output_tokens", 60)

    run(case())


def test_official_clients_give_up_at_once(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path, settings=limited(max_calls=1)) as served:
            assert (await post(served, "responses"))[0] == 200
            api = openai.AsyncOpenAI(base_url=served.url(), api_key="none", max_retries=5)
            with pytest.raises(openai.APIStatusError) as refused:
                await api.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
            assert (refused.value.status_code, refused.value.code) == (402, "insufficient_quota")
            other = anthropic.AsyncAnthropic(base_url=served.url().removesuffix("/v1"), api_key="x", max_retries=5)
            with pytest.raises(anthropic.APIStatusError) as denied:
                await other.messages.create(model="m", max_tokens=9, messages=[USER])  # type: ignore[list-item]
            assert denied.value.body["error"]["type"] == "billing_error"  # type: ignore[index]

    run(case())


def test_a_gateway_that_starts_again_counts_on(tmp_path: Path) -> None:
    async def case() -> None:
        async with serving(tmp_path, settings=limited(max_calls=2)) as served:
            for _ in range(3):
                await post(served, "messages")
            whole, log = await served.events(), served.log
        one = next(n for n, event in enumerate(whole, 1) if isinstance(event, CallCompleted))
        async with serving(tmp_path, log=await log_until(log, one), settings=limited(max_calls=2)) as again:
            assert [(await post(again, "messages"))[0] for _ in range(2)] == [200, 402]
        async with serving(tmp_path, log=await log_until(log, len(whole)), settings=limited(max_calls=2)) as again:
            assert (await post(again, "messages"))[0] == 402
            assert len(await again.events(BudgetSpent)) == 1, "it is said already"

    run(case())


def test_there_is_no_budget_by_default() -> None:
    default = HarnessConfig()
    assert (default.max_calls, default.max_output_tokens, default.tool_budgets) == (0, 0, ())


def with_tools(*budgets: ToolBudget) -> Config:
    return msgspec.structs.replace(config(), harness=HarnessConfig(tool_budgets=budgets))


async def tool_turns(served: Served, num: int, used: Callable[[], None] = lambda: None) -> list[int]:
    """Statuses of requests that each go on from the reply before, which asks for `bash`; then it is `used`."""
    messages: list[Any] = [USER]
    statuses = []
    async with aiohttp.ClientSession() as http:
        for _ in range(num):
            body = {"model": "m", "messages": messages, "tools": [BASH]}
            async with http.post(f"{served.url('s1')}/chat/completions", json=body) as response:
                statuses.append(response.status)
                answer = await response.json(content_type=None)
            if response.status != 200:
                continue
            reply = answer["choices"][0]["message"]
            results = [{"role": "tool", "tool_call_id": c["id"], "content": "ok"} for c in reply["tool_calls"]]
            messages += [reply, *results]
            used()
    return statuses


def asks_for_bash(times: int = 1) -> ScriptedEngine:
    return ScriptedEngine(script=lambda n, _: "\n".join([tool_call(f"echo {n}")] * times))


def test_a_tool_is_asked_for_so_often_and_no_more(tmp_path: Path) -> None:
    async def case() -> None:
        settings = with_tools(ToolBudget(tool="edit", max_calls=1), ToolBudget(tool="bash", max_calls=4))
        async with serving(tmp_path, asks_for_bash(2), settings=settings) as served:
            assert await tool_turns(served, 4) == [200, 200, 402, 402]
            (spent,) = await served.events(BudgetSpent)
            assert (spent.budget, spent.tool, spent.limit) == ("tool_calls", "bash", 4)
            assert "its 4 calls of bash are used up (harness.tool_budgets)" in spent.reason
            assert [call.tools for call in await served.events(CallCompleted)] == [("bash", "bash")] * 2
            log = served.log
        async with serving(tmp_path, asks_for_bash(), log=log, settings=settings) as again:
            assert await tool_turns(again, 1) == [402], "a gateway that starts again counts on"

    run(case())


def test_the_seconds_of_a_tool_are_what_passes_between_its_reply_and_the_next_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that jumps: a busy machine makes them more."""

    async def case() -> None:
        loop, jumped_s = asyncio.get_running_loop(), 0.0
        time = loop.time

        def jump() -> None:
            nonlocal jumped_s
            jumped_s += 20.0

        monkeypatch.setattr(loop, "time", lambda: time() + jumped_s)
        settings = with_tools(ToolBudget(tool="bash", max_seconds=30))
        async with serving(tmp_path, asks_for_bash(), settings=settings) as served:
            assert await tool_turns(served, 4, jump) == [200, 200, 402, 402]
            started = await served.events(CallStarted)
            assert [20 <= call.tool_s < 30 for call in started] == [False, True]
            (spent,) = await served.events(BudgetSpent)
            assert (spent.budget, spent.tool, spent.limit) == ("tool_seconds", "bash", 30)

    run(case())


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(1, 3), st.floats(0, 9)), max_size=8))
def test_seconds_are_divided_and_nothing_is_counted_twice(turns: list[tuple[str, int, float]]) -> None:
    use, total = Use(), 0.0
    for number, (tool, times, seconds) in enumerate(turns):
        began, done = events_of(2 * number, "completed", 1)
        asked = msgspec.structs.replace(done, tools=(tool,) * times + ("c",))
        goes_on = msgspec.structs.replace(began, rule="continue", base=asked.call, tool_s=seconds)  # type: ignore[call-arg]
        for event in (asked, goes_on, goes_on):
            use.evolve(event)  # type: ignore[arg-type]
        total += seconds
    assert sum(use.num_tool_calls.values()) == sum(times + 1 for _, times, _ in turns)
    assert sum(use.tool_s.values()) == pytest.approx(total)
    assert use.asked == {}
    never = HarnessConfig(tool_budgets=(ToolBudget(tool="never", max_calls=1, max_seconds=1),))
    assert find_spent(use, never, execution="x", session="s", base="", tool_s=0.0) is None


WHERE = {"execution": "g0-0", "session": "s"}


def events_of(number: int, ending: str, size: int) -> tuple[Event, ...]:
    where = {**WHERE, "call": f"s-c{number}"}
    ids, logprobs = pack_ids(range(size)), pack_logprobs([-1.0] * size)
    began = CallStarted(
        **where, base="", shared=0, context=pack_ids([1, 2]), role_class="main", rule="root", marks=(),
        temperature=1.0, top_p=1.0, max_tokens=8, cell="c0",
    )  # fmt: skip
    if ending == "failed":
        return began, CallFailed(**where, status=500, reason="")
    if ending == "cut":
        return began, CallCut(**where, sampled=ids, logprobs=logprobs, spans=(), reason="")
    done = CallCompleted(
        **where, sampled=ids, logprobs=logprobs, spans=(), finish="stop", reply="", num_prompt_tokens=2,
        num_cached_tokens=0, num_retries=0, engine_s=0.1,
    )  # fmt: skip
    return began, done


@given(st.lists(st.tuples(st.sampled_from(["completed", "cut", "failed"]), st.integers(0, 9)), max_size=12))
def test_what_is_counted_is_what_the_log_says(calls: list[tuple[str, int]]) -> None:
    state = session.open_session(SessionOpened(**WHERE, temperature=1.0, top_p=1.0))
    for number, (ending, size) in enumerate(calls):
        for event in events_of(number, ending, size):
            state = session.evolve(state, event)
    replies = [size for ending, size in calls if ending != "failed"]
    assert (state.used.num_calls, state.used.num_sampled) == (len(replies), sum(replies))
    assert not state.open_calls
