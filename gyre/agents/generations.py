"""Pure. Generations of one call: checked where they enter, joined when a call took several attempts.

Invariant: ids, logprobs and version spans of a generation cover the same tokens. An engine that breaks
this is refused: no logprob is invented.
"""

import math

import msgspec

from gyre.agents.engine_client import Generation
from gyre.errors import EngineError


def check_generation(generation: Generation, max_tokens: int) -> Generation:
    """Raises EngineError naming what does not fit."""
    num = len(generation.output_ids)
    if num > max_tokens:
        raise EngineError(f"engine: {num} tokens for a call of at most {max_tokens}: check its sampling parameters")
    if len(generation.logprobs) != num:
        raise EngineError(f"engine: {len(generation.logprobs)} logprobs for {num} tokens: ask for all of them")
    if not all(map(math.isfinite, generation.logprobs)):
        raise EngineError("engine: a logprob is not a finite number: check its weights")
    end = 0
    for span in generation.spans:
        if span.start != end or span.end <= end:
            raise EngineError(f"engine: version span [{span.start}, {span.end}) does not follow token {end}")
        end = span.end
    if end != num:
        raise EngineError(f"engine: version spans end at token {end} of {num}")
    return generation


def join_generations(first: Generation | None, second: Generation) -> Generation:
    """`second` continued from the tokens of `first`; the prompt's counts are those of the first."""
    if first is None:
        return second
    shift = len(first.output_ids)
    spans = list(first.spans)
    for span in second.spans:
        moved = msgspec.structs.replace(span, start=span.start + shift, end=span.end + shift)
        if spans and spans[-1].version == moved.version:
            moved = msgspec.structs.replace(moved, start=spans.pop().start)
        spans.append(moved)
    return Generation(
        output_ids=first.output_ids + second.output_ids,
        logprobs=first.logprobs + second.logprobs,
        spans=tuple(spans),
        finish=second.finish,
        num_prompt_tokens=first.num_prompt_tokens,
        num_cached_tokens=first.num_cached_tokens,
        engine_s=first.engine_s + second.engine_s,
    )
