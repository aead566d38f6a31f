"""Pure. The prompt of a request: what it shares with the tree, and the tokens that are new.

request + Tree -> Placement -> Prompt. Invariant: only messages that the shared tokens do not stand for are rendered,
and what a sampled reply is followed by is appended to it as it was sampled.
"""

from collections.abc import Sequence

import msgspec

from gyre.agents import lineage
from gyre.agents.dialect import ProviderError, Request
from gyre.agents.lineage import Placement, Tree
from gyre.agents.messages import prefix_digests, to_wire
from gyre.agents.renderer import Renderer
from gyre.errors import HarnessError
from gyre.events.types import Mark


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    placement: Placement
    context: Sequence[int]
    """The new tokens, behind those that are shared."""
    marks: tuple[Mark, ...]
    """Of the messages that are new; of the last one always."""

    @property
    def num_tokens(self) -> int:
        return self.placement.shared + len(self.context)

    @property
    def digest(self) -> str:
        """Of all its messages."""
        return self.marks[-1].digest


def find_prompt(tree: Tree, request: Request, renderer: Renderer) -> Prompt:
    """Raises ProviderError."""
    digests = prefix_digests(request.messages, request.tools)
    placement = lineage.place(tree, request.messages, digests)
    try:
        context, ends = _new_tokens(tree, request, placement, renderer)
    except HarnessError as error:
        raise ProviderError(400, "invalid_request", str(error)) from None
    last = zip(digests[len(digests) - len(ends) :], ends, strict=True)
    return Prompt(
        placement=placement, context=context, marks=tuple(Mark(digest=digest, end=end) for digest, end in last)
    )


def _new_tokens(
    tree: Tree, request: Request, placement: Placement, renderer: Renderer
) -> tuple[Sequence[int], tuple[int, ...]]:
    """(context ids, where the last messages of the request end in the prompt; the very last one always)."""
    if placement.kind == "retry":
        return (), (tree.calls[placement.base].prompt_end,)
    if placement.rule == "continue":
        closed = renderer.is_closed(lineage.last_sampled(tree, placement.base))
        wire = [to_wire(message) for message in request.messages[placement.num_known :]]
        context, ends = renderer.render_delta_marked(wire, closed=closed)
    else:
        wire = [to_wire(message) for message in request.messages]
        ids, all_ends = renderer.render_marked(wire, request.tools)
        start = all_ends[placement.num_known - 1] if placement.num_known else 0
        context, ends = ids[start:], tuple(end - start for end in all_ends[placement.num_known :])
    return context, tuple(placement.shared + end for end in ends) or (placement.shared,)
