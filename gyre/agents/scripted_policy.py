"""Pure. A policy that needs no weights: prompt -> one shell command, then a last word. Bytes are its tokens.

It shows what a harness does, not what a model can. Invariant: the same prompt gets the same reply, and every token
that goes in or comes out can be read as text. Its tool call is made for the tools that the harness offers: the first
that runs shell commands, with whatever else its schema requires.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gyre.agents.engine_client import Generation, VersionSpan
from gyre.agents.renderer import Renderer

TEMPLATE = """
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user
{% endif %}<tool_response>{{ message.content }}</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}{% set function = call.function %}
<tool_call>{"name": "{{ function.name }}", "arguments": {# #}
{%- if function.arguments is string %}{{ function.arguments }}{% else %}{{ function.arguments | tojson }}{% endif -%}
}</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SHELL_TOOLS = ("bash", "exec_command", "shell_command", "run_shell_command", "shell", "local_shell", "execute_command")
COMMANDS = ("command", "cmd", "script")
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""For harnesses that go on until they hear it, whatever else is said."""
LAST_WORD = "The file is written."
_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)


def make_renderer() -> Renderer:
    """Of a tokenizer without merges: as many tokens as bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    return Renderer(tokenizer, TEMPLATE, source="the scripted policy")


def say(prompt: str, command: str) -> str:
    """What it replies: `command` as the first turn, a last word as the second, SUBMIT to whoever goes on."""
    turns = _TURN.findall(prompt)
    tools = json.loads(turns[0][1]) if turns and turns[0][1].startswith('[{"') else ()
    if not tools:
        return '{"title": "Write a file"}'  # a side call: a title, or the like
    replies = [content for role, content in turns if role == "assistant"]
    if len(replies) == 1:
        return LAST_WORD
    name, arguments = tool_call(tools, SUBMIT if replies else command)
    return (
        f'<tool_call>{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments)}}}</tool_call>' if name else ""
    )


def tool_call(tools: Any, command: str) -> tuple[str, Mapping[str, Any]]:
    """(name, arguments) that run `command` with one of `tools`; the name is empty when none runs commands."""
    offered = {str(tool["function"]["name"]): tool["function"].get("parameters") or {} for tool in tools}
    known = {name.lower(): name for name in reversed(offered)}
    name = next((known[tool] for tool in SHELL_TOOLS if tool in known), "")
    if not name:
        return "", {}
    properties: Mapping[str, Any] = offered[name].get("properties") or {}
    key = next((key for key in COMMANDS if key in properties), COMMANDS[0])
    is_list = properties.get(key, {}).get("type") == "array"
    arguments: dict[str, Any] = {key: ["/bin/sh", "-c", command] if is_list else command}
    for required in offered[name].get("required") or ():
        kind = properties.get(required, {}).get("type")
        arguments.setdefault(required, {"boolean": False, "number": 10, "integer": 10}.get(kind, "Write a file"))
    return name, arguments


class ScriptedPolicy:
    """An `Engine`."""

    def __init__(self, renderer: Renderer, command: str) -> None:
        self._tokenizer = renderer.tokenizer
        self._command = command

    async def generate(
        self,
        rid: str,
        input_ids: NDArray[np.int32],
        *,
        temperature: float,
        top_p: float,
        max_tokens: int,
        stop_token_ids: tuple[int, ...],
        extra_key: str,
        stop: tuple[str, ...] = (),
    ) -> Generation:
        said = say(self._tokenizer.decode(input_ids.tolist(), skip_special_tokens=False), self._command)
        ids = (*self._tokenizer.encode(said, add_special_tokens=False).ids, *stop_token_ids[:1])
        return Generation(
            output_ids=ids[:max_tokens],
            logprobs=(0.0,) * len(ids[:max_tokens]),  # certain of every token
            spans=(VersionSpan(version=0, start=0, end=len(ids[:max_tokens])),),
            finish="stop" if len(ids) <= max_tokens else "length",
            num_prompt_tokens=len(input_ids),
            num_cached_tokens=0,
            engine_s=0.0,
        )

    async def abort(self, rid: str) -> None:
        """Its calls take no time."""
