"""Pure. What the dialects share: bytes -> JSON values that were checked, and values -> bytes.

Invariant: a reader returns a value of the type that it names or raises ProviderError, whatever it is given;
what it returns can be written as JSON again. `where` is the field as the client knows it.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from gyre.agents.dialect import ProviderError


def invalid(message: str) -> ProviderError:
    return ProviderError(400, "invalid_request", message)


def parse_object(body: bytes) -> dict[str, Any]:
    try:
        tree = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise invalid(f"the body is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise invalid("the body must be a JSON object")
    return tree


def parse_number(tree: Mapping[str, Any], key: str, most: float) -> float | None:
    value = tree.get(key)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value <= most:
        raise invalid(f"'{key}' must be a number from 0 to {most:g}")
    return float(value)


def parse_count(tree: Mapping[str, Any], key: str) -> int | None:
    value = tree.get(key)
    if value is not None and (type(value) is not int or value < 1):
        raise invalid(f"'{key}' must be a whole number of at least 1")
    return value


def parse_texts(tree: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A text or a list of texts; empty ones are left out."""
    value = tree.get(key)
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise invalid(f"'{key}' must be text or a list of texts")
    return tuple(text for text in texts if text)


def parse_list(value: Any, where: str) -> list[Any]:
    """Nothing is an empty list."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise invalid(f"{where} must be a list")
    return value


def get_text(tree: Any, key: str) -> str:
    """The text at `key`; empty when there is none."""
    value = tree.get(key) if isinstance(tree, dict) else None
    return value if isinstance(value, str) else ""


def to_json(value: Any, where: str) -> str:
    """JSON can be read deeper than it can be written."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        raise invalid(f"{where} is nested too deeply") from None


def check_depth(value: Any, where: str) -> None:
    """That `value` can be written as JSON, within a list of tools too."""
    to_json([[[[value]]]], where)


def is_object(text: str) -> bool:
    """Whether strict parsers, too, take `text` for a JSON object."""
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False


def function_tool(name: str, description: Any, parameters: Any, where: str) -> dict[str, Any]:
    """A tool as chat templates take it: only what the policy is shown."""
    function: dict[str, Any] = {"name": name}
    if isinstance(description, str):
        function["description"] = description
    if parameters is not None:
        check_depth(parameters, where)
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def sse(tree: Mapping[str, Any], name: str = "") -> bytes:
    """A server-sent event."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + orjson.dumps(tree) + b"\n\n"
