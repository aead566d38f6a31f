"""Pure. The dialect of OpenAI's Responses: body -> Request, Answer -> body or events.

Invariant: whatever the bytes, `parse_request` returns a Request or raises ProviderError. A reply goes out as
items (reasoning, message, calls) and comes back as items: those in a row that one reply can have had are
one canonical message. Ids, status and `content: null` are no part of it. Unknown fields are accepted, and so
are the provider's own tools, which the policy is not offered; refused is what would need a memory of earlier
responses, and content that is not text.
"""

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

import msgspec
import orjson

from gyre.agents import wire
from gyre.agents.dialect import Answer, ContextOverflow, ProviderError, Request
from gyre.agents.messages import Message, MessageRole, Tool, ToolCall

KEEP_ALIVE = b": waiting\n\n"

_ROLES: dict[str, MessageRole] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
_TEXT_PARTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}
_ERROR_TYPES = {
    401: "authentication_error",
    402: "insufficient_quota",
    404: "not_found_error",
    429: "rate_limit_error",
}
_STARTED: dict[str, Any] = {"status": "in_progress", "content": [], "summary": [], "arguments": "", "input": ""}
"""What an item holds when it begins."""
_CUSTOM_ARGUMENT = "input"


def parse_request(body: bytes) -> Request:
    tree = wire.parse_object(body)
    for key in ("previous_response_id", "conversation", "prompt"):
        if tree.get(key) is not None:
            raise wire.invalid(f"'{key}': nothing is stored here: send the whole history as 'input'")
    if tree.get("background") is True:
        raise wire.invalid("'background' is not served: wait for the response, or stream it")
    instructions = tree.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise wire.invalid("'instructions' must be text")
    messages = _parse_input(tree.get("input"))
    if instructions:
        messages = (Message(role="system", content=instructions), *messages)
    text = tree.get("text")
    format_ = text.get("format") if isinstance(text, dict) else None
    tools, custom_tools, namespaces = _parse_tools(tree.get("tools"))
    return Request(
        messages=messages,
        tools=tools,
        model=wire.get_text(tree, "model"),
        max_tokens=wire.parse_count(tree, "max_output_tokens"),
        temperature=wire.parse_number(tree, "temperature", 2.0),
        top_p=wire.parse_number(tree, "top_p", 1.0),
        stream=tree.get("stream") is True,
        structured=wire.get_text(format_, "type") in ("json_schema", "json_object"),
        custom_tools=custom_tools,
        namespaces=namespaces,
    )


def render_response(request: Request, answer: Answer) -> bytes:
    return orjson.dumps(_response(request, answer, [item for item, _ in _items(request, answer)]))


def render_chunks(request: Request, answer: Answer) -> Iterator[bytes]:
    opened = _opened(request, f"resp_{answer.call}", answer.model, answer.created)
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": opened},
        {"type": "response.in_progress", "response": opened},
    ]
    items = list(_items(request, answer))
    for index, (item, inner) in enumerate(items):
        at = {"output_index": index}
        started = {**item, **{key: value for key, value in _STARTED.items() if key in item}}
        events.append({"type": "response.output_item.added", **at, "item": started})
        events += [{**event, "item_id": item["id"], **at} for event in inner]
        events.append({"type": "response.output_item.done", **at, "item": item})
    response = _response(request, answer, [item for item, _ in items])
    events.append({"type": f"response.{response['status']}", "response": response})
    yield from _numbered(events)


def render_error(error: ProviderError) -> bytes:
    kind = _ERROR_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    param = "input" if isinstance(error, ContextOverflow) else None
    return orjson.dumps({"error": {"message": str(error), "type": kind, "param": param, "code": error.code}})


def render_stream_error(request: Request, error: ProviderError) -> bytes:
    """An overflow is told as a response that failed: harnesses know it only there."""
    if not isinstance(error, ContextOverflow):
        return b""
    opened = _opened(request, "resp_none", request.model, 0)
    failed = {**opened, "status": "failed", "error": {"code": error.code, "message": str(error)}}
    events = [{"type": "response.created", "response": opened}, {"type": "response.failed", "response": failed}]
    return b"".join(_numbered(events))


def _parse_input(tree: Any) -> tuple[Message, ...]:
    if isinstance(tree, str):
        return (Message(role="user", content=tree),)
    if not isinstance(tree, list) or not tree:
        raise wire.invalid("'input' must be text or a list with at least one item")
    messages: list[Message] = []
    for index, item in enumerate(tree):
        for message in _parse_item(item, f"input[{index}]"):
            if messages and _goes_on(messages[-1], message):
                last = messages.pop()
                message = msgspec.structs.replace(
                    message,
                    content=last.content or message.content,
                    reasoning=last.reasoning or message.reasoning,
                    tool_calls=last.tool_calls + message.tool_calls,
                )
            messages.append(message)
    return tuple(messages)


def _goes_on(last: Message, message: Message) -> bool:
    """Whether one reply can have had both: reasoning, then text, then calls."""
    both = last.role == message.role == "assistant"
    return both and (_stage(last) < _stage(message) or (_stage(last) == _stage(message) == 2))


def _stage(message: Message) -> int:
    return 2 if message.tool_calls else 0 if message.reasoning and not message.content else 1


def _parse_item(item: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(item, dict):
        raise wire.invalid(f"{where} must be an object")
    kind = wire.get_text(item, "type") or "message"
    match kind:
        case "message":
            return _parse_message(item, where)
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            reasoning = "".join(_parse_parts(parts, where))
            return (Message(role="assistant", reasoning=reasoning),) if reasoning else ()
        case "function_call" | "custom_tool_call":
            name = wire.get_text(item, "name")
            arguments = item.get("arguments" if kind == "function_call" else "input")
            if not name or not isinstance(arguments, str):
                raise wire.invalid(f"{where} must be a call with a name and its arguments as text")
            if kind == "custom_tool_call":
                arguments = orjson.dumps({_CUSTOM_ARGUMENT: arguments}).decode()
            call = ToolCall(id=wire.get_text(item, "call_id"), name=name, arguments=arguments)
            return (Message(role="assistant", tool_calls=(call,)),)
        case "function_call_output" | "custom_tool_call_output":
            output = "".join(_parse_parts(item.get("output"), f"{where}.output"))
            return (Message(role="tool", content=output, tool_call_id=wire.get_text(item, "call_id")),)
    raise wire.invalid(f"{where}: the policy has no items of type {kind!r:.40}")


def _parse_message(item: dict[str, Any], where: str) -> tuple[Message, ...]:
    """At least one: a part of a user or system message is a message of its own."""
    name = wire.get_text(item, "role")
    if name not in _ROLES:
        raise wire.invalid(f"{where}.role must be one of {', '.join(_ROLES)}")
    role = _ROLES[name]
    texts = _parse_parts(item.get("content"), f"{where}.content")
    if role == "assistant":
        return (Message(role=role, content="".join(texts)),)
    return tuple(Message(role=role, content=text) for text in texts if text) or (Message(role=role),)


def _parse_parts(content: Any, where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    texts = []
    for index, part in enumerate(wire.parse_list(content, where)):
        kind = wire.get_text(part, "type")
        text = part.get(_TEXT_PARTS[kind]) if kind in _TEXT_PARTS else None
        if not isinstance(text, str):
            raise wire.invalid(f"{where}[{index}]: the policy takes text only, got a part of type {kind!r:.40}")
        texts.append(text)
    return texts


def _parse_tools(
    tree: Any, namespace: str = ""
) -> tuple[tuple[Tool, ...], tuple[str, ...], tuple[tuple[str, str], ...]]:
    """(functions that the policy is offered, those that take one text, those of a namespace)."""
    tools: list[Tool] = []
    custom_tools: list[str] = []
    namespaces: list[tuple[str, str]] = []
    for index, tool in enumerate(wire.parse_list(tree, "'tools'")):
        where, name = f"tools[{index}]", wire.get_text(tool, "name")
        if not isinstance(tool, dict) or not wire.get_text(tool, "type"):
            raise wire.invalid(f"{where} must be a tool with a type")
        if tool["type"] in ("function", "custom", "namespace") and not name:
            raise wire.invalid(f"{where} must have a name")
        match tool["type"]:
            case "function":
                tools.append(wire.function_tool(name, tool.get("description"), tool.get("parameters"), where))
            case "custom":
                tools.append(_custom_tool(name, tool))
                custom_tools.append(name)
            case "namespace" if not namespace:
                inner, inner_custom, _ = _parse_tools(tool.get("tools"), name)
                tools += inner
                custom_tools += inner_custom
                namespaces += [(function["function"]["name"], name) for function in inner]
    return tuple(tools), tuple(custom_tools), tuple(namespaces)


def _custom_tool(name: str, tool: dict[str, Any]) -> Tool:
    format_ = tool.get("format")
    about = [wire.get_text(tool, "description"), wire.get_text(format_, "definition")]
    argument = {_CUSTOM_ARGUMENT: {"type": "string"}}
    parameters = {"type": "object", "properties": argument, "required": [_CUSTOM_ARGUMENT]}
    return wire.function_tool(name, "\n\n".join(text for text in about if text), parameters, name)


def _items(request: Request, answer: Answer) -> Iterator[tuple[dict[str, Any], Iterable[dict[str, Any]]]]:
    """(item, events between its beginning and its end)."""
    message, call_id = answer.message, answer.call
    if message.reasoning:
        # As the summary: harnesses send that back, and leave other forms of reasoning out.
        summary = {"type": "summary_text", "text": message.reasoning}
        at = {"summary_index": 0}
        empty = {"type": "summary_text", "text": ""}
        kind = "response.reasoning_summary"
        yield (
            {"id": f"rs_{call_id}", "type": "reasoning", "summary": [summary], "encrypted_content": None},
            (
                {"type": f"{kind}_part.added", **at, "part": empty},
                {"type": f"{kind}_text.delta", **at, "delta": message.reasoning},
                {"type": f"{kind}_text.done", **at, "text": message.reasoning},
                {"type": f"{kind}_part.done", **at, "part": summary},
            ),
        )
    status = "incomplete" if answer.finish == "length" else "completed"
    if message.content or not (message.reasoning or message.tool_calls):
        part: dict[str, Any] = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}
        at = {"content_index": 0}
        yield (
            {"id": f"msg_{call_id}", "type": "message", "role": "assistant", "status": status, "content": [part]},
            (
                {"type": "response.content_part.added", **at, "part": {**part, "text": ""}},
                {"type": "response.output_text.delta", **at, "delta": message.content, "logprobs": []},
                {"type": "response.output_text.done", **at, "text": message.content, "logprobs": []},
                {"type": "response.content_part.done", **at, "part": part},
            ),
        )
    for call in message.tool_calls:
        yield _call_item(request, call)


def _call_item(request: Request, call: ToolCall) -> tuple[dict[str, Any], Iterable[dict[str, Any]]]:
    namespace = dict(request.namespaces).get(call.name)
    head = {"id": f"fc_{call.id}", "status": "completed", "call_id": call.id, "name": call.name}
    head |= {"namespace": namespace} if namespace else {}
    if call.name in request.custom_tools:
        text, kind, key = _custom_text(call.arguments), "custom_tool_call", "input"
        event = "response.custom_tool_call_input"
    else:
        text, kind, key = call.arguments, "function_call", "arguments"
        event = "response.function_call_arguments"
    done = {"type": f"{event}.done", key: text, "name": call.name}
    return {**head, "type": kind, key: text}, ({"type": f"{event}.delta", "delta": text}, done)


def _custom_text(arguments: str) -> str:
    """The one text; whatever else the policy wrote stays as it is, for the harness to refuse."""
    try:
        tree = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    text = tree.get(_CUSTOM_ARGUMENT) if isinstance(tree, dict) and len(tree) == 1 else None
    return text if isinstance(text, str) else arguments


def _opened(request: Request, id_: str, model: str, created: int) -> dict[str, Any]:
    return {
        "id": id_,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "model": model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": request.max_tokens,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": request.temperature,
        "tool_choice": "auto",
        "tools": [],
        "top_p": request.top_p,
        "usage": None,
    }


def _response(request: Request, answer: Answer, items: list[dict[str, Any]]) -> dict[str, Any]:
    opened = _opened(request, f"resp_{answer.call}", answer.model, answer.created)
    cut = answer.finish == "length"
    return {
        **opened,
        "status": "incomplete" if cut else "completed",
        "output": items,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "usage": {
            "input_tokens": answer.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.num_cached_tokens},
            "output_tokens": answer.num_sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": answer.num_reasoning_tokens},
            "total_tokens": answer.num_prompt_tokens + answer.num_sampled_tokens,
        },
    }


def _numbered(events: Iterable[dict[str, Any]]) -> Iterator[bytes]:
    for number, event in zip(count(), events, strict=False):
        yield wire.sse({**event, "sequence_number": number}, event["type"])
