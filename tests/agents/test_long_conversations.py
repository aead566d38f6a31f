"""Long conversations in every dialect: what was sampled is not tokenised again, and histories are only appended to."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import families
import orjson
import pytest
from scripted import ScriptedEngine, config, decode, full_ids, generation, serving

from gyre.agents.gateway import DIALECTS
from gyre.agents.renderer import Renderer
from gyre.config import EngineConfig
from gyre.events.tokens import unpack_ids
from gyre.events.types import BranchForked, CallCompleted, CallStarted

NUM_TURNS = 60
TOOL = {"type": "object", "properties": {"command": {"type": "string"}}}


class Spy:
    """Notes every text that a renderer makes tokens of, on its way to the tokenizer."""

    def __init__(self, renderer: Renderer) -> None:
        self.texts: list[str] = []
        self._tokenizer = renderer.tokenizer

    def encode(self, text: str, **options: Any) -> Any:
        self.texts.append(text)
        return self._tokenizer.encode(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def spied(family: str) -> tuple[Renderer, Spy]:
    renderer = families.renderer(family)
    spy = Spy(renderer)
    renderer.tokenizer = spy  # type: ignore[assignment]
    return renderer, spy


def said(family: str, turn: int) -> str:
    """Words that no other text holds, in JSON that no serialiser writes so, between white space that templates trim."""
    arguments = f'{{"command":   "run word{turn}x", "number": {turn}.0}}'
    if family == "llama3":
        return f'{{"name":  "bash", "parameters": {arguments}}}' if turn % 4 else f"  word{turn}x done. "
    think = f"<think>\nI think word{turn}y\n</think>\n\n"
    call = f'<tool_call>\n{{"name":  "bash", "arguments":{arguments}}}\n</tool_call>'
    return think + (f"  I run word{turn}z.\n" if turn % 3 else "") + (call if turn % 4 else f" word{turn}w done. ")


def first(endpoint: str) -> dict[str, Any]:
    match endpoint:
        case "chat/completions":
            tools: Any = [{"type": "function", "function": {"name": "bash", "parameters": TOOL}}]
            system = {"role": "system", "content": "Be brief."}
            return {"messages": [system, {"role": "user", "content": "Go."}], "tools": tools}
        case "messages":
            tools = [{"name": "bash", "input_schema": TOOL}]
            asked = {"role": "user", "content": "Go."}
            return {"system": "Be brief.", "messages": [asked], "tools": tools, "max_tokens": 999}
    tools = [{"type": "function", "name": "bash", "parameters": TOOL}]
    return {"instructions": "Be brief.", "input": [{"role": "user", "content": "Go."}], "tools": tools}


def go_on(endpoint: str, body: dict[str, Any], reply: dict[str, Any], turn: int) -> None:
    """The reply comes back, its arguments written anew where the dialect lets a harness do so, and what followed it."""
    match endpoint:
        case "chat/completions":
            message = reply["choices"][0]["message"]
            for call in message.get("tool_calls") or ():
                call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), sort_keys=True)
            body["messages"].append(message)
            ids = [call["id"] for call in message.get("tool_calls") or ()]
            results: list[Any] = [{"role": "tool", "tool_call_id": id_, "content": f"result {turn}"} for id_ in ids]
            body["messages"] += results or [{"role": "user", "content": f"More {turn}."}]
        case "messages":
            body["messages"].append({"role": "assistant", "content": reply["content"]})
            ids = [block["id"] for block in reply["content"] if block["type"] == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": id_, "content": f"result {turn}"} for id_ in ids]
            body["messages"].append({"role": "user", "content": results or f"More {turn}."})
        case _:
            body["input"] += reply["output"]
            ids = [item["call_id"] for item in reply["output"] if item["type"] == "function_call"]
            results = [{"type": "function_call_output", "call_id": id_, "output": f"result {turn}"} for id_ in ids]
            body["input"] += results or [{"role": "user", "content": f"More {turn}."}]


@pytest.mark.parametrize("family", ["quickstart", "qwen3", "llama3", "smollm2"])
@pytest.mark.parametrize("endpoint", list(DIALECTS))
def test_no_sampled_token_is_tokenised_again(tmp_path: Path, endpoint: str, family: str) -> None:
    renderer, spy = spied(family)

    def script(turn: int, prompt: str) -> Any:
        ids = families.tokenizer().encode(said(family, turn), add_special_tokens=False).ids
        return generation([*ids, renderer.end_of_turn_id], "stop")

    async def case() -> None:
        settings = config(max_tokens=2000)
        settings = type(settings)(sampling=settings.sampling, engine=EngineConfig(context_tokens=10**6))
        engine = ScriptedEngine(script=script)
        async with serving(tmp_path, engine, settings=settings, renderer=renderer) as served:
            body = first(endpoint)
            async with aiohttp.ClientSession() as http:
                for turn in range(NUM_TURNS):
                    async with http.post(f"{served.url()}/{endpoint}", data=orjson.dumps(body)) as response:
                        reply = await response.json()
                        assert response.status == 200, reply
                    go_on(endpoint, body, reply, turn)
            events = await served.events()
        started = [event for event in events if isinstance(event, CallStarted)]
        assert [event.rule for event in started] == ["root"] + ["continue"] * (NUM_TURNS - 1)
        assert not [event for event in events if isinstance(event, BranchForked)]
        asked = [list(call.input_ids) for call in engine.asked]
        for turn in range(1, NUM_TURNS):
            before = full_ids(events, started[turn - 1].call)
            assert asked[turn][: len(before)] == before
            assert asked[turn - 1] == before[: len(asked[turn - 1])]

    asyncio.run(asyncio.wait_for(case(), 120))
    again = [text for text in spy.texts if "word" in text]
    assert spy.texts and not again, "texts of the policy on their way to the tokenizer"


MALFORMED = [
    '<tool_call>{"name": "bash", "arguments": {"command": "ls"}',
    '<tool_call>\n{"name": "bash", "arguments": "ls"}\n</tool_call>',
    "I run <tool_call>ls</tool_call> now",
    "</tool_call></think>",
    "<think>\nI never came to an end",
    "",
    "half a character \ufffd",
]


@pytest.mark.parametrize("said", MALFORMED)
@pytest.mark.parametrize("endpoint", list(DIALECTS))
def test_malformed_output_is_shown_as_text_and_recorded_as_it_was(tmp_path: Path, endpoint: str, said: str) -> None:
    """And what is shown comes back as the reply that it was."""

    async def case() -> None:
        engine = ScriptedEngine(script=lambda n, _: said if n == 0 else "fine")
        async with serving(tmp_path, engine) as served:
            body = first(endpoint)
            async with aiohttp.ClientSession() as http:
                for turn in range(2):
                    async with http.post(f"{served.url()}/{endpoint}", data=orjson.dumps(body)) as response:
                        reply = await response.json()
                        assert response.status == 200, reply
                    if turn == 0:
                        content = next(reply[key] for key in ("content", "output", "choices") if key in reply)
                        kinds = {item.get("type", "message") for item in content}
                        assert not kinds & {"tool_use", "function_call"}
                    go_on(endpoint, body, reply, turn)
            (done, _) = await served.events(CallCompleted)
            assert decode(unpack_ids(done.sampled)) == said + "<|im_end|>"
            assert done.finish == "stop"
            assert [event.rule for event in await served.events(CallStarted)] == ["root", "continue"]

    asyncio.run(asyncio.wait_for(case(), 60))
