"""Pure. The dialect of OpenAI's chat completions: body -> Request, Answer -> body or events.

Invariant: whatever the bytes, `parse_request` returns a Request or raises ProviderError. Unknown fields
are accepted, since harnesses send many; what would change the meaning of the reply is refused: more than
one choice, and content that is not text.
"""

from collections.abc import Iterator
from typing import Any

import orjson

from gyre.agents import wire
from gyre.agents.dialect import Answer, ProviderError, Request
from gyre.agents.messages import Message, MessageRole, Tool, ToolCall, to_wire

KEEP_ALIVE = b": waiting\n\n"

_ROLES: dict[str, MessageRole] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_ERROR_TYPES = {
    401: "authentication_error",
    402: "insufficient_quota",
    404: "not_found_error",
    429: "rate_limit_error",
}


def parse_request(body: bytes) -> Request:
    tree = wire.parse_object(body)
    messages = tree.get("messages")
    if not isinstance(messages, list) or not messages:
        raise wire.invalid("'messages' must be a list with at least one message")
    if tree.get("n") not in (None, 1):
        raise wire.invalid("'n' must be 1: ask again for another reply")
    bound = "max_completion_tokens" if tree.get("max_completion_tokens") is not None else "max_tokens"
    options = tree.get("stream_options")
    response_format = tree.get("response_format")
    return Request(
        messages=tuple(_parse_message(m, f"messages[{i}]") for i, m in enumerate(messages)),
        tools=_parse_tools(tree.get("tools")),
        model=wire.get_text(tree, "model"),
        max_tokens=wire.parse_count(tree, bound),
        temperature=wire.parse_number(tree, "temperature", 2.0),
        top_p=wire.parse_number(tree, "top_p", 1.0),
        stop=wire.parse_texts(tree, "stop"),
        stream=tree.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        structured=isinstance(response_format, dict) and response_format.get("type") in ("json_schema", "json_object"),
    )


def render_response(request: Request, answer: Answer) -> bytes:
    message = {**to_wire(answer.message), "refusal": None}
    if answer.message.tool_calls and not answer.message.content:
        message["content"] = None
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish}
    return orjson.dumps({**_head(answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)})


def render_chunks(request: Request, answer: Answer) -> Iterator[bytes]:
    head = _head(answer, "chat.completion.chunk")
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if answer.message.reasoning:
        deltas.append({"reasoning_content": answer.message.reasoning})
    if answer.message.content:
        deltas.append({"content": answer.message.content})
    deltas += [
        {"tool_calls": [{"index": index, **call}]}
        for index, call in enumerate(to_wire(answer.message).get("tool_calls", ()))
    ]
    usage = {"usage": None} if request.include_usage else {}
    for delta in deltas:
        yield wire.sse({**head, "choices": [_chunk_choice(delta, None)], **usage})
    yield wire.sse({**head, "choices": [_chunk_choice({}, answer.finish)], **usage})
    if request.include_usage:
        yield wire.sse({**head, "choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def render_error(error: ProviderError) -> bytes:
    kind = _ERROR_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return orjson.dumps({"error": {"message": str(error), "type": kind, "param": None, "code": error.code}})


def render_stream_error(request: Request, error: ProviderError) -> bytes:
    return b""


def _parse_message(tree: Any, where: str) -> Message:
    if not isinstance(tree, dict):
        raise wire.invalid(f"{where} must be an object")
    role = tree.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise wire.invalid(f"{where}.role must be one of {', '.join(_ROLES)}")
    # Reasoning models' servers use both names.
    reasoning = tree.get("reasoning_content") or tree.get("reasoning")
    tool_call_id = tree.get("tool_call_id")
    return Message(
        role=_ROLES[role],
        content=_parse_content(tree.get("content"), f"{where}.content"),
        reasoning=reasoning if role == "assistant" and isinstance(reasoning, str) else "",
        tool_calls=_parse_tool_calls(tree.get("tool_calls"), f"{where}.tool_calls") if role == "assistant" else (),
        tool_call_id=tool_call_id if role == "tool" and isinstance(tool_call_id, str) else "",
    )


def _parse_content(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wire.invalid(f"{where} must be text or a list of parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text" if kind == "text" else "refusal") if kind in ("text", "refusal") else None
        if not isinstance(text, str):
            raise wire.invalid(f"{where}[{index}]: the policy takes text only, got a part of type {kind!r:.40}")
        texts.append(text)
    return "".join(texts)


def _parse_tool_calls(tree: Any, where: str) -> tuple[ToolCall, ...]:
    calls = []
    for index, item in enumerate(wire.parse_list(tree, where)):
        function = item.get("function") if isinstance(item, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise wire.invalid(f"{where}[{index}] must be a function call with a name")
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            arguments = "" if arguments is None else wire.to_json(arguments, f"{where}[{index}].function.arguments")
        id_ = item.get("id")
        calls.append(ToolCall(id=id_ if isinstance(id_, str) else "", name=function["name"], arguments=arguments))
    return tuple(calls)


def _parse_tools(tree: Any) -> tuple[Tool, ...]:
    tools = []
    for index, tool in enumerate(wire.parse_list(tree, "'tools'")):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise wire.invalid(f"tools[{index}] must be a function with a name")
        wire.check_depth(tool, f"tools[{index}]")
        tools.append({key: value for key, value in tool.items() if key != "cache_control"})
    return tuple(tools)


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.call}", "object": kind, "created": answer.created, "model": answer.model}


def _chunk_choice(delta: dict[str, Any], finish: str | None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}


def _usage(answer: Answer) -> dict[str, Any]:
    """Harnesses decide by it when to compact: it is what the engine counted."""
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": answer.num_sampled_tokens,
        "total_tokens": answer.num_prompt_tokens + answer.num_sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": answer.num_reasoning_tokens},
    }
