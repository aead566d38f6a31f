"""Pure. A chat template: messages -> the text of a history, and what kind of template it is.

Invariant: `render` returns text or raises HarnessError; no template reads a clock. Every message ends in
`end_of_turn`, but for tool messages that share a turn with the next (`shares_turns`).

Families differ in who writes a tool call, and how:
- `tagged` (Qwen, Hermes, the quickstart): the template, as `<tool_call>{"name", "arguments"}</tool_call>`;
- `bare` (Llama 3): the template, as `{"name", "parameters"}` and nothing else in the turn;
- `written` (SmolLM2, any other whose template knows no tools): this module. The tools stand in the system turn,
  calls as `<tool_call>[...]</tool_call>`, results in user turns.
"""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jinja2
import jinja2.ext
import jinja2.sandbox

from gyre.agents.replies import Syntax, ToolCall, parse_text
from gyre.errors import HarnessError, PolicyError

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

BASE = "gyre-base"
"""A short reply, after which appended messages are rendered."""
BASE_TURNS: tuple[Message, ...] = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": BASE})
_OFFER = (
    "You can call these functions:\n%s\nTo call some of them, answer with "
    '<tool_call>[{"name": "the function", "arguments": {"its argument": "a value"}}]</tool_call>'
)
_PROBE = ToolCall(name="probe-name", arguments='{"command": "probe-argument"}')


class Template:
    """Raises PolicyError for a template that cannot be continued, or whose tool calls gyre cannot read."""

    def __init__(self, text: str, *, end_of_turn: str, special_tokens: Mapping[str, str], source: str) -> None:
        self.end_of_turn = end_of_turn
        self._special_tokens = special_tokens
        # Qwen3 takes arguments as JSON text or as an object, others only as an object. Text keeps a reply
        # whose JSON is spaced otherwise equal to itself when it is rendered again.
        self._arguments_as_text = bool(re.search(r"arguments\s+is\s+(string|mapping)", text))
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateError as error:
            raise PolicyError(f"{source}: chat template: {error}: it must be a Jinja template") from None
        self.style: Literal["tagged", "bare", "written"] = "tagged"
        self.separator = self._find_separator(source)
        """Between the end of a turn and the next one."""
        self.style = self._find_style(source)
        results = [{"role": "tool", "content": "probe-result"}] * 2
        self.shares_turns = self.render_after(results, True, False).count(end_of_turn) == 1

    @property
    def syntax(self) -> Syntax:
        return "bare" if self.style == "bare" else "tagged"

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], add_generation_prompt: bool) -> str:
        """Raises HarnessError when the template refuses the messages (roles out of order, say)."""
        shaped = [self._shape(message) for message in messages]
        if tools and self.style == "written":
            shaped = _offer(shaped, tools)
        try:
            text: str = self._template.render(
                messages=shaped,
                tools=(list(tools) or None) if self.style != "written" else None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise HarnessError(
                f"chat template: cannot render the messages: {error!r}: check roles and content"
            ) from None
        # JSON can carry half of a surrogate pair, which no tokenizer takes.
        return text.encode("utf-8", "replace").decode()

    def render_after(self, messages: Sequence[Message], closed: bool, add_generation_prompt: bool) -> str:
        """What follows a reply: the end of its turn unless it is `closed`, then `messages`."""
        text = self.render([*BASE_TURNS, *messages], (), add_generation_prompt)
        mark = BASE + self.end_of_turn
        return text[text.index(mark) + len(mark if closed else BASE) :]

    def count_ends(self, message: Message) -> int:
        """How many ends of turns a message that shares no turn is rendered with: its own, and those in its text."""
        shaped = self._shape(message)
        texts: list[str] = [shaped["content"]]
        for call in shaped.get("tool_calls") or ():
            arguments = call["function"].get("arguments")
            texts += [call["function"]["name"], arguments if isinstance(arguments, str) else _to_json(arguments)]
        return 1 + sum(text.count(self.end_of_turn) for text in texts)

    def _shape(self, message: Message) -> dict[str, Any]:
        """As templates take it: content is text, reasoning is there or empty, and no list of calls is empty."""
        shaped = dict(message)
        content = message.get("content") or ""
        shaped["content"] = content if isinstance(content, str) else "".join(p.get("text", "") for p in content)
        calls = shaped.pop("tool_calls", None) or ()
        if message.get("role") == "assistant":
            # Reasoning is the one text that a template may leave out; an end of turn in it would go uncounted.
            shaped["reasoning_content"] = (message.get("reasoning_content") or "").replace(self.end_of_turn, "")
        if self.style == "written":
            if calls:
                shaped["content"] += _write_calls(calls)
            if message.get("role") == "tool":
                content = f"<tool_response>\n{shaped['content']}\n</tool_response>"
                shaped = {"role": "user", "content": content}
        elif calls:
            shaped["tool_calls"] = [self._shape_call(call) for call in calls]
            if self.style == "bare":
                shaped["content"] = ""
        return shaped

    def _shape_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        arguments = function.get("arguments")
        if isinstance(arguments, str) and not self._arguments_as_text:
            # A harness may echo arguments that were never JSON: they are shown as the text they are.
            with contextlib.suppress(ValueError, RecursionError):
                function["arguments"] = json.loads(arguments)
        return {**call, "function": function}

    def _find_separator(self, source: str) -> str:
        try:
            text = self.render([*BASE_TURNS, BASE_TURNS[0]], (), False)
            whole = self.render(BASE_TURNS, (), False)
        except HarnessError as error:
            raise PolicyError(f"{source}: {error}; gyre needs a template that reads no clock") from None
        mark = BASE + self.end_of_turn
        if mark not in text or mark not in whole:
            raise PolicyError(f"{source}: chat template: a turn does not end in {self.end_of_turn}: gyre needs that")
        return whole[whole.rindex(mark) + len(mark) :]

    def _find_style(self, source: str) -> Literal["tagged", "bare", "written"]:
        """Renders a call and its result, and looks what became of them."""
        function = {"name": _PROBE.name, "arguments": _PROBE.arguments}
        call = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        }
        try:
            text = self.render([BASE_TURNS[0], call, {"role": "tool", "content": "probe-result"}], (), False)
        except HarnessError:
            return "written"
        said = next((turn for turn in text.split(self.end_of_turn) if _PROBE.name in turn), None)
        if said is None:
            return "written"
        if "probe-result" in text and parse_text(said).tool_calls == (_PROBE,):
            return "tagged"
        if "probe-result" in text and parse_text(said[said.find("{") :], "bare").tool_calls == (_PROBE,):
            return "bare"
        raise PolicyError(f"{source}: chat template: gyre cannot read the tool calls that it writes: {said!r:.120}")


def _write_calls(calls: Sequence[Mapping[str, Any]]) -> str:
    functions = (call["function"] for call in calls)
    written = (f'{{"name": {_to_json(f["name"])}, "arguments": {f.get("arguments") or "{}"}}}' for f in functions)
    return "<tool_call>[" + ", ".join(written) + "]</tool_call>"


def _offer(messages: list[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """`tools` in the system turn, at its end."""
    text = _OFFER % "\n".join(_to_json(tool.get("function", tool)) for tool in tools)
    if messages and messages[0]["role"] == "system":
        first = messages[0]["content"] + "\n\n" + text if messages[0]["content"] else text
        return [{**messages[0], "content": first}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in transformers: Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
