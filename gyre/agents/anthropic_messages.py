"""Pure. The dialect of Anthropic's Messages: body -> Request, Answer -> body or events.

Invariant: whatever the bytes, `parse_request` returns a Request or raises ProviderError. Canonical form: a
block is what a harness adds to a history or leaves out, so each text block of a user or system message is a
message of its own (the API holds messages of one role in a row to be one turn, so both mean the same), each
tool result too; the blocks of an assistant message are one message. `cache_control`, the billing block,
signatures and ids are no part of it. Unknown fields and betas are accepted, and so are the provider's own
tools, which the policy is not offered; content that is not text is refused.
"""

from collections.abc import Iterator
from typing import Any

import orjson

from gyre.agents import wire
from gyre.agents.dialect import Answer, ContextOverflow, ProviderError, Request
from gyre.agents.messages import Message, Tool, ToolCall

KEEP_ALIVE = b'event: ping\ndata: {"type": "ping"}\n\n'

_BILLING = "x-anthropic-billing-header:"
_UNPARSED = "__unparsedToolInput"
"""Under this name harnesses send back arguments that were no JSON object."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    410: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def parse_request(body: bytes) -> Request:
    tree = wire.parse_object(body)
    messages = tree.get("messages")
    if not isinstance(messages, list) or not messages:
        raise wire.invalid("messages: a list with at least one message is required")
    parsed = _parse_system(tree.get("system"))
    for index, message in enumerate(messages):
        parsed += _parse_message(message, f"messages.{index}")
    output = tree.get("output_config")
    format_ = tree.get("output_format") or (output.get("format") if isinstance(output, dict) else None)
    return Request(
        messages=parsed,
        tools=_parse_tools(tree.get("tools")),
        model=wire.get_text(tree, "model"),
        max_tokens=wire.parse_count(tree, "max_tokens"),
        temperature=wire.parse_number(tree, "temperature", 1.0),
        top_p=wire.parse_number(tree, "top_p", 1.0),
        stop=wire.parse_texts(tree, "stop_sequences"),
        stream=tree.get("stream") is True,
        structured=wire.get_text(format_, "type") == "json_schema",
    )


def render_response(request: Request, answer: Answer) -> bytes:
    blocks = [block for block, _ in _blocks(answer.message)]
    return orjson.dumps({**_head(answer), "content": blocks, **_stop(answer), "usage": _usage(answer)})


def render_chunks(request: Request, answer: Answer) -> Iterator[bytes]:
    usage = _usage(answer)
    start = {**_head(answer), "content": [], "stop_reason": None, "stop_sequence": None}
    yield _event("message_start", message={**start, "usage": {**usage, "output_tokens": 0}})
    for index, (block, deltas) in enumerate(_blocks(answer.message)):
        yield _event("content_block_start", index=index, content_block=_EMPTY[block["type"]] | _named(block))
        for delta in deltas:
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    yield _event("message_delta", delta=_stop(answer), usage=usage)
    yield _event("message_stop")


def render_error(error: ProviderError) -> bytes:
    kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    message = str(error)
    if isinstance(error, ContextOverflow):
        # Harnesses read both numbers, and compact.
        message = f"prompt is too long: {error.num_tokens} tokens > {error.max_tokens} maximum"
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": message}})


def render_stream_error(request: Request, error: ProviderError) -> bytes:
    return b""


def render_count(num_tokens: int) -> bytes:
    """The answer to `count_tokens`."""
    return orjson.dumps({"input_tokens": num_tokens})


def _parse_system(system: Any) -> tuple[Message, ...]:
    """Its blocks are one message: templates take the first as the system's."""
    texts = _parse_texts(system, "system")
    text = "\n\n".join(text for text in texts if text and not text.startswith(_BILLING))
    return (Message(role="system", content=text),) if text else ()


def _parse_message(tree: Any, where: str) -> tuple[Message, ...]:
    """At least one."""
    role, content = wire.get_text(tree, "role"), tree.get("content") if isinstance(tree, dict) else None
    match role:
        case "assistant":
            return (_parse_assistant(content, f"{where}.content"),)
        case "user" | "system":
            messages = []
            for index, block in enumerate(_parse_blocks(content, f"{where}.content")):
                at = f"{where}.content.{index}"
                if role == "user" and block["type"] == "tool_result":
                    result = "".join(_parse_texts(block.get("content"), f"{at}.content"))
                    id_ = wire.get_text(block, "tool_use_id")
                    messages.append(Message(role="tool", content=result, tool_call_id=id_))
                elif text := _parse_text(block, at):
                    messages.append(Message(role=role, content=text))
            return tuple(messages) or (Message(role=role),)
    raise wire.invalid(f"{where}.role: must be one of user, assistant, system")


def _parse_assistant(content: Any, where: str) -> Message:
    texts, reasoning, calls = [], [], []
    for index, block in enumerate(_parse_blocks(content, where)):
        match block["type"]:
            case "thinking":
                reasoning.append(wire.get_text(block, "thinking"))
            case "redacted_thinking":
                pass
            case "tool_use":
                calls.append(_parse_tool_use(block, f"{where}.{index}"))
            case _:
                texts.append(_parse_text(block, f"{where}.{index}"))
    return Message(role="assistant", content="".join(texts), reasoning="".join(reasoning), tool_calls=tuple(calls))


def _parse_tool_use(block: dict[str, Any], where: str) -> ToolCall:
    name, arguments = wire.get_text(block, "name"), block.get("input")
    if not name or not isinstance(arguments, dict):
        raise wire.invalid(f"{where}: a tool_use block needs a name and an object as input")
    unparsed = arguments.get(_UNPARSED) if len(arguments) == 1 else None
    text = unparsed if isinstance(unparsed, str) else wire.to_json(arguments, f"{where}.input")
    return ToolCall(id=wire.get_text(block, "id"), name=name, arguments=text)


def _parse_blocks(content: Any, where: str) -> list[dict[str, Any]]:
    """Text is one block of it."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise wire.invalid(f"{where}: must be text or a list of blocks")
    for index, block in enumerate(content):
        if not wire.get_text(block, "type"):
            raise wire.invalid(f"{where}.{index}: a block needs a type")
    return content


def _parse_texts(content: Any, where: str) -> list[str]:
    if content is None:
        return []
    return [_parse_text(block, f"{where}.{index}") for index, block in enumerate(_parse_blocks(content, where))]


def _parse_text(block: dict[str, Any], where: str) -> str:
    kind = block["type"]
    # A reference names a tool that was loaded late; the policy is offered all of them from the start.
    text = block.get("tool_name" if kind == "tool_reference" else "text")
    if kind not in ("text", "tool_reference") or not isinstance(text, str):
        raise wire.invalid(f"{where}: the policy takes text only, got a block of type {kind!r:.40}")
    return text


def _parse_tools(tree: Any) -> tuple[Tool, ...]:
    tools = []
    for index, tool in enumerate(wire.parse_list(tree, "tools")):
        name, kind = wire.get_text(tool, "name"), wire.get_text(tool, "type")
        if not isinstance(tool, dict) or not (name or kind):
            raise wire.invalid(f"tools.{index}: a tool needs a name")
        schema = tool.get("input_schema")
        if isinstance(schema, dict) and name:
            tools.append(wire.function_tool(name, tool.get("description"), schema, f"tools.{index}.input_schema"))
        elif kind in ("", "custom"):
            raise wire.invalid(f"tools.{index}.input_schema: an object is required")
    return tuple(tools)


_EMPTY: dict[str, dict[str, Any]] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
    "tool_use": {"type": "tool_use", "input": {}},
}


def _named(block: dict[str, Any]) -> dict[str, Any]:
    return {key: block[key] for key in ("id", "name") if key in block}


def _blocks(message: Message) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """(block, deltas that add up to it)."""
    if message.reasoning:
        # The signature is the provider's seal on its own reasoning; harnesses want one and send it back.
        text, seal = message.reasoning, "gyre"
        yield (
            {"type": "thinking", "thinking": text, "signature": seal},
            [{"type": "thinking_delta", "thinking": text}, {"type": "signature_delta", "signature": seal}],
        )
    if message.content:
        yield {"type": "text", "text": message.content}, [{"type": "text_delta", "text": message.content}]
    for call in message.tool_calls:
        # The sampled text itself: a body that is parsed and written again would not be what was sampled.
        text = call.arguments if wire.is_object(call.arguments) else orjson.dumps({_UNPARSED: call.arguments}).decode()
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": orjson.Fragment(text)}
        yield block, [{"type": "input_json_delta", "partial_json": text}]


def _head(answer: Answer) -> dict[str, Any]:
    return {"id": f"msg_{answer.call}", "type": "message", "role": "assistant", "model": answer.model}


def _stop(answer: Answer) -> dict[str, Any]:
    if answer.stop_text and answer.finish == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_text}
    return {"stop_reason": _STOP_REASONS[answer.finish], "stop_sequence": None}


def _usage(answer: Answer) -> dict[str, Any]:
    """Here the cached tokens are no part of `input_tokens`: harnesses add them up."""
    return {
        "input_tokens": max(0, answer.num_prompt_tokens - answer.num_cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.num_cached_tokens,
        "output_tokens": answer.num_sampled_tokens,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return wire.sse({"type": kind, **fields}, kind)
