"""What one execution may ask for, in calls and tokens: more is refused in the provider's words, and said once."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import ScriptedEngine, Served, config, log_until, serving

from gyre.agents import session
from gyre.config import Config, HarnessConfig
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
    assert (HarnessConfig().max_calls, HarnessConfig().max_output_tokens) == (0, 0)


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
    assert (state.num_calls, state.num_sampled) == (len(replies), sum(replies))
    assert not state.open_calls
