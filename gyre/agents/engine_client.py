"""Pure. What the gateway needs of an engine: tokens in, tokens out.

Invariant: `output_ids`, `logprobs` and the spans cover the same tokens, every token that was sampled
and no other; the stop token is one of them.

Direction: prompt token ids -> Generation. Who implements `Engine` is injected by `gyre/cli`.
"""

from typing import Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from gyre.events.types import VersionSpan

Finish = Literal["stop", "length", "abort"]


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of an engine."""

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of the distribution that was sampled: after temperature, before the top-p cut."""
    spans: tuple[VersionSpan, ...]
    """Of `output_ids`, in order, without gaps; two or more when the weights changed during the call."""
    finish: Finish
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens whose KV was there already."""
    engine_s: float


class Engine(Protocol):
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
        """Sample a continuation of `input_ids` [T]. Raises EngineError when the engine refuses, fails or is gone.

        `extra_key` separates KV that must not be shared: give the policy version that the engine
        reported last, so that a new version never continues KV of an older one.
        """
        ...

    async def abort(self, rid: str) -> None:
        """Cut a call short: its `generate` returns what it has, with finish `abort`."""
        ...
