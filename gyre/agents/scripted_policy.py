"""Pure. An engine that needs no weights: prompt ids -> ids of what a scenario says, sampled as no tokenizer would.

It shows what a harness does, not what a model can. Invariant: the same prompt gets the same reply, and every token
that goes in or comes out can be read as text. A policy with merges says byte by byte what its tokenizer would join,
so a reply that is tokenised again has other ids.
"""

import asyncio
import contextlib
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gyre.agents.engine_client import Generation
from gyre.agents.renderer import Renderer
from gyre.agents.scenarios import FULL, LAST_WORD, Scenario, is_sub_agent, say
from gyre.errors import EngineError
from gyre.events.types import VersionSpan

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
MERGES = (("i", "n"), ("t", "h"), ("th", "e"), ("e", "r"), ("r", "e"), ("o", "n"), ("a", "t"), ("i", "t"), ("l", "l"))


HELD_S = 20.0
"""For an agent that does wait for its sub-agent."""


def make_tokenizer(merges: Sequence[tuple[str, str]] = ()) -> Tokenizer:
    """Of bytes, which keep their ids whatever is merged."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *dict.fromkeys(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def make_renderer(merges: Sequence[tuple[str, str]] = ()) -> Renderer:
    """Without merges, as many tokens as bytes."""
    tokenizer = make_tokenizer(merges)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    return Renderer(tokenizer, TEMPLATE, source="the scripted policy")


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the engine had it."""

    rid: str
    input_ids: tuple[int, ...]
    output_ids: tuple[int, ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        return self.input_ids + self.output_ids


class ScriptedPolicy:
    """An `Engine`."""

    def __init__(self, renderer: Renderer, scenario: Scenario, context_tokens: int) -> None:
        self.asked: list[Asked] = []
        self._tokenizer = renderer.tokenizer
        self._sampler = make_tokenizer()
        self._scenario = scenario
        self._full = int(FULL * context_tokens)
        self._failed = False
        self._last_word = asyncio.Event()

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
        prompt = self._tokenizer.decode(input_ids.tolist(), skip_special_tokens=False)
        if self._scenario.holds_sub_agents and is_sub_agent(prompt):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HELD_S):
                    await self._last_word.wait()
        # What a tool call and the end of the turn take besides.
        room = min(max_tokens, self._full - len(input_ids)) - 256
        said = say(prompt, self._scenario.name, room=room)
        if self._scenario.fails_at and self._scenario.fails_at in said and not self._failed:
            self._failed = True
            self.asked.append(Asked(rid=rid, input_ids=tuple(input_ids.tolist())))
            raise EngineError("engine: it fails, as the scenario wants it")
        if said == LAST_WORD:
            self._last_word.set()
        ids = (*self._sampler.encode(said, add_special_tokens=False).ids, *stop_token_ids[:1])[:max_tokens]
        self.asked.append(Asked(rid=rid, input_ids=tuple(input_ids.tolist()), output_ids=ids))
        return Generation(
            output_ids=ids,
            logprobs=(0.0,) * len(ids),  # certain of every token
            spans=(VersionSpan(version=0, start=0, end=len(ids)),),
            finish="stop" if ids[-1:] == stop_token_ids[:1] else "length",
            num_prompt_tokens=len(input_ids),
            num_cached_tokens=0,
            engine_s=0.0,
        )

    async def abort(self, rid: str) -> None:
        """Its calls take no time."""
