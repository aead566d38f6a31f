"""Chat templates of the families that gyre knows, written after what their models' templates do, and a tokenizer.

GYRE_TEST_POLICIES (directories with `:` between them) adds those of real models to whatever is tested with these.
"""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from gyre.agents.checkpoint import load_renderer
from gyre.agents.renderer import Renderer
from gyre.workers.tiny_policy import CHAT_TEMPLATE

# The system turn takes the tools; reasoning is shown after the last question only, and an empty one in a last turn.
QWEN3 = """
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}
{{- '<|im_start|>system\\n' + (system + '\\n\\n' if system else '') + 'Functions:' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}
{%- endif %}
{%- set asked = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set asked.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set reasoning = message.reasoning_content or '' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > asked.last and (loop.last or reasoning) %}
{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + message.content.lstrip('\\n') }}
{%- else %}{{- message.content }}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
{%- set arguments = call.function.arguments %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{%- if arguments is string %}{{- arguments }}{%- else %}{{- arguments | tojson }}{%- endif %}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# As Qwen3's thinking models: the prompt opens the reasoning.
QWEN3_THINKING = QWEN3.replace(
    "'<|im_start|>assistant\\n' }}{%- endif", "'<|im_start|>assistant\\n<think>\\n' }}{%- endif"
)

# The system turn is always there, the first question takes the tools, text is trimmed, a result is a JSON string, and
# a turn has one call and no text beside it.
LLAMA3 = """
{{- bos_token }}
{%- set first = messages[0].content | trim if messages[0].role == 'system' else '' %}
{%- if messages[0].role == 'system' %}{%- set messages = messages[1:] %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: 26 Jul 2024\\n\\n' + first + '<|eot_id|>' }}
{%- if tools %}
{%- if not messages %}{{- raise_exception('no first user message') }}{%- endif %}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\nFunctions:\\n\\n' }}
{%- for tool in tools %}{{- (tool | tojson(indent=4)) + '\\n\\n' }}{%- endfor %}
{{- messages[0].content | trim + '<|eot_id|>' }}
{%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call a turn') }}{%- endif %}
{%- set function = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + function.name + '", "parameters": ' }}
{{- (function.arguments | tojson) + '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

# A system turn of its own where there is none, and nothing about tools.
SMOLLM2 = """
{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nYou are SmolLM.<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

TEMPLATES = {
    "quickstart": CHAT_TEMPLATE,
    "qwen3": QWEN3,
    "qwen3-thinking": QWEN3_THINKING,
    "llama3": LLAMA3,
    "smollm2": SMOLLM2,
}
SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<|python_tag|>",
)  # fmt: skip
PIECES = r"\s*[\r\n]+| ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"
"""Line ends hold together, as in the tokenizers of Qwen and Llama 3."""
TEXT = [
    'Do this: {"name": "bash", "arguments": {"command": "ls -l a.txt"}}\n\nuser assistant system tool ipython',
    "<tool_call>\n</tool_call>\n<tool_response>\n</tool_response>\n<think>\n</think>\n\n  parameters 1234567890 \n\n\n",
] * 8


LOST = (*range(0xF1, 0xF3), 0x04, 0x06, 0x13, 0x14, 0x16, 0x1D)
"""Bytes of UTF-8 that SmolLM2's tokenizer has no token for."""


@cache
def tokenizer(lost: tuple[int, ...] = ()) -> Tokenizer:
    """Byte-level BPE with merges over white space and punctuation, as those of the families have them."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PIECES), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = [c for c in pre_tokenizers.ByteLevel.alphabet() if c not in map(_byte_name, lost)]
    made.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False))
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    made.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>")])
    return made


def renderer(name: str) -> Renderer:
    if name not in TEMPLATES:
        return load_renderer(name)
    end = "<|eot_id|>" if name == "llama3" else "<|im_end|>"
    special = {"bos_token": "<|begin_of_text|>", "eos_token": end}
    found = tokenizer(LOST if name == "smollm2" else ())
    return Renderer(found, TEMPLATES[name], end_of_turn=end, special_tokens=special)


def _byte_name(byte: int) -> str:
    """Of a byte that none of its family prints: control characters are numbered in order, the rest are themselves."""
    return chr(256 + byte) if byte < 0x20 else chr(byte)


def names() -> Iterator[str]:
    yield from TEMPLATES
    yield from (str(Path(path)) for path in os.environ.get("GYRE_TEST_POLICIES", "").split(":") if path)
