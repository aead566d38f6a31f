"""Pure. Messages <-> tokens of one policy, through its chat template and tokenizer (both are arguments).

messages -> ids (`render`), messages after a sampled reply -> the ids that follow it (`render_delta`), ids ->
messages (`parse_reply`). Invariant: for a well-formed reply to a rendered prompt,
`render(all) == render(prompt) + reply + render_delta(rest)`, so a token history is continued by appending and
never by rendering it again. It rests on ChatML's shape, checked when a renderer is made: every turn ends in a
special token, at which the tokenizer always splits.

Messages are those of chat/completions, as mappings. Tool calls are Hermes style, as in Qwen:
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Text that looks like a special token is encoded as
one, as `apply_chat_template` does; what a tool prints can therefore forge the look of a turn, but not its
place in the history.
"""

import contextlib
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import msgspec
from tokenizers import Tokenizer

from gyre.errors import HarnessError, PolicyError

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

_BASE = "gyre-base"
_TOOL_CALL = re.compile(r"\s*<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_REASONING = re.compile(r"\s*<think>\n?(.*?)\n?</think>\s*", re.DOTALL)
_TAG = re.compile(r"</?tool_call>")
_ARGUMENTS = re.compile(r'"arguments"\s*:\s*')


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: str
    """JSON text of an object, exactly as sampled where that is possible."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    ok: bool
    """False when something that began as a tool call is not one; it is then part of the content."""


class Renderer:
    """Raises PolicyError when the template is not ChatML, or knows no tool calls and `needs_tools`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: str,
        *,
        end_of_turn: str = "<|im_end|>",
        special_tokens: Mapping[str, str] | None = None,
        needs_tools: bool = True,
        source: str = "policy",
    ) -> None:
        self.tokenizer = tokenizer
        self.end_of_turn = end_of_turn
        self._special_tokens = dict(special_tokens or {})
        # Qwen3 takes arguments as JSON text or as an object, Qwen2.5 only as an object. Text keeps a reply
        # whose JSON is spaced otherwise equal to itself when it is rendered again.
        self._arguments_as_text = bool(re.search(r"arguments\s+is\s+(string|mapping)", chat_template))
        end_id = tokenizer.token_to_id(end_of_turn)
        if end_id is None:
            raise PolicyError(f"{source}: the tokenizer has no token {end_of_turn}: set eos_token to the end of a turn")
        self.end_of_turn_id: int = end_id
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(chat_template)
        except jinja2.TemplateError as error:
            raise PolicyError(f"{source}: chat template: {error}: it must be a Jinja template") from None
        self._check(source, needs_tools)
        user = [{"role": "user", "content": _BASE}]
        self.opening: list[int] = self.render(user)[len(self.render(user, add_generation_prompt=False)) :]
        """Ids that open the assistant's turn."""

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a whole history; with `add_generation_prompt` the opening of the assistant's turn is added."""
        return self._encode(self.render_text(messages, tools, add_generation_prompt=add_generation_prompt))

    def render_text(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), add_generation_prompt: bool = True
    ) -> str:
        """Raises HarnessError when the template refuses the messages (roles out of order, say)."""
        try:
            text: str = self._template.render(
                messages=[self._for_template(message) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise HarnessError(
                f"chat template: cannot render the messages: {error!r}: check roles and content"
            ) from None
        # JSON can carry half of a surrogate pair, which no tokenizer takes.
        return text.encode("utf-8", "replace").decode()

    def render_marked(
        self, messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> tuple[list[int], tuple[int, ...]]:
        """(ids, ends): the prompt with the opening of the reply, and how many of its ids each message ends at.

        `ids[:ends[i]]` is the same for every history that begins with these i + 1 messages and goes on alike
        (a tool message ends before the end of its turn when another tool message shares that turn).
        """
        text = self.render_text(messages, tools)
        counts = range(1, len(messages) + 1)
        return self._mark(text, (self.render_text(messages[:count], tools, False) for count in counts))

    def _mark(self, text: str, prefixes: Iterable[str]) -> tuple[list[int], tuple[int, ...]]:
        """(ids of `text`, number of ids that each prefix shares with it)."""
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        token_ends = [end for _, end in encoding.offsets]
        ends = [0]
        for prefix in prefixes:
            ends.append(max(ends[-1], bisect_right(token_ends, _num_common(prefix, text))))
        return encoding.ids, tuple(ends[1:])

    def render_delta(self, messages: Sequence[Message], *, closed: bool) -> list[int]:
        """Ids that follow a sampled reply: what ends its turn, `messages`, and the opening of the next reply.

        `closed` says that the reply's last id is the end of its turn; a reply that was cut lacks it. The cost
        is that of `messages` alone: they are rendered after a fixed base of two short turns.
        """
        return self._encode(self._delta_text(messages, closed, True))

    def render_delta_marked(self, messages: Sequence[Message], *, closed: bool) -> tuple[list[int], tuple[int, ...]]:
        """`render_delta`, and how many of its ids each message ends at, as in `render_marked`."""
        text = self._delta_text(messages, closed, True)
        prefixes = (self._delta_text(messages[:count], closed, False) for count in range(1, len(messages) + 1))
        return self._mark(text, prefixes)

    def _delta_text(self, messages: Sequence[Message], closed: bool, add_generation_prompt: bool) -> str:
        base = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": _BASE}]
        text = self.render_text([*base, *messages], (), add_generation_prompt)
        mark = _BASE + self.end_of_turn
        return text[text.index(mark) + len(mark if closed else _BASE) :]

    def is_closed(self, reply: Sequence[int]) -> bool:
        return bool(reply) and reply[-1] == self.end_of_turn_id

    def parse_reply(self, ids: Sequence[int]) -> Reply:
        """Never raises: what is not a well-formed tool call is content."""
        closed = self.is_closed(ids)
        text: str = self.tokenizer.decode(list(ids[:-1] if closed else ids), skip_special_tokens=False)
        reasoning = ""
        if match := _REASONING.match(text):
            reasoning, text = match[1], text[match.end() :]
        calls: list[ToolCall] = []
        content, start = "", 0
        for match in _TOOL_CALL.finditer(text):
            call = _parse_tool_call(match[1])
            if call is not None:
                calls.append(call)
                content, start = content + text[start : match.start()], match.end()
        content += text[start:]
        return Reply(content=content, reasoning=reasoning, tool_calls=tuple(calls), ok=not _TAG.search(content))

    def count_reasoning(self, ids: Sequence[int]) -> int:
        """How many of a reply's ids its reasoning takes, tags included."""

        def ended(num: int) -> bool:
            return _REASONING.match(self.tokenizer.decode(list(ids[:num]), skip_special_tokens=False)) is not None

        num = bisect_left(range(len(ids) + 1), True, key=ended)
        return num if num <= len(ids) else 0

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _for_template(self, message: Message) -> dict[str, Any]:
        """Content as text, tool calls as the template takes them; other fields as they are."""
        shaped = dict(message)
        content = message.get("content")
        if content is None:
            shaped["content"] = ""
        elif not isinstance(content, str):
            shaped["content"] = "".join(part.get("text", "") for part in content)
        if message.get("tool_calls"):
            shaped["tool_calls"] = [self._shape_call(call) for call in message["tool_calls"]]
        return shaped

    def _shape_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        arguments = function.get("arguments")
        if isinstance(arguments, str) and not self._arguments_as_text:
            # A harness may echo arguments that were never JSON: they are shown as the text they are.
            with contextlib.suppress(ValueError, RecursionError):
                function["arguments"] = json.loads(arguments)
        return {**call, "function": function}

    def _check(self, source: str, needs_tools: bool) -> None:
        """Render a probe: the shape that every other method relies on."""
        user = {"role": "user", "content": "probe-user"}
        function = {"name": "probe-name", "arguments": '{"command": "probe-argument"}'}
        call = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        }
        result = {"role": "tool", "tool_call_id": "1", "content": "probe-result"}
        try:
            text = self.render_text([user, {"role": "assistant", "content": _BASE}, user])
        except HarnessError as error:
            raise PolicyError(f"{source}: {error}; gyre needs a ChatML template that reads no clock") from None
        if _BASE + self.end_of_turn not in text:
            raise PolicyError(f"{source}: chat template: a turn does not end in {self.end_of_turn}: gyre needs ChatML")
        if not needs_tools:
            return
        try:
            text = self.render_text([user, call, result])
        except HarnessError:
            text = ""
        if not re.search(r"<tool_call>.*probe-name.*probe-argument.*</tool_call>.*probe-result", text, re.DOTALL):
            raise PolicyError(
                f"{source}: chat template: no <tool_call> turns: this harness needs a policy that calls tools"
            )


def _parse_tool_call(body: str) -> ToolCall | None:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments")
    if not isinstance(arguments, dict):
        return None
    # The sampled text itself when the arguments come last, as they should: no drift when it comes back.
    match = _ARGUMENTS.search(body)
    raw = body[match.end() : body.rstrip().rfind("}")].strip() if match else ""
    try:
        same = bool(json.loads(raw) == arguments)
    except (ValueError, RecursionError):
        same = False
    return ToolCall(name=call["name"], arguments=raw if same else json.dumps(arguments))


def _num_common(prefix: str, text: str) -> int:
    """Length of the longest common prefix; one comparison when `prefix` is a prefix, as it nearly always is."""
    if text.startswith(prefix):
        return len(prefix)
    low, high = 0, min(len(prefix), len(text))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if text.startswith(prefix[:middle]) else (low, middle - 1)
    return low


def _to_json(value: Any, indent: int | None = None) -> str:
    """As in transformers: Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
