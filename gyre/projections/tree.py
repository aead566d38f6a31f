"""Pure. Call events of one session -> its tree: `full(c) = full(base)[:shared] + context + sampled`.

Invariant: the tree only grows. A call holds the tokens that it adds and the place where it branches
off its base; nothing is split or rewritten, and no event costs more than what it carries. A path is
put together only by who asks for it (`path`, `token_ids`).

Every token has a provenance: context, or sampled by a call. Sampled tokens are targets unless a reason
says otherwise, and the reason is decided here, before any selection:

    auxiliary             the call is of the auxiliary class (titles and the like)
    cut, undelivered      the reply did not reach the harness whole, and no later call builds on these tokens
    superseded            the same, as its harness showed: it asked the same again before it went on from the reply
    logprob_missing, logprob_not_finite, span_missing, torn_tokens      the record cannot be trained on
    no_context            nothing stands before its first token, so nothing predicts it
    unknown_base, shared_beyond_base, base_excluded                     the call has no place in the tree
    beyond_budget         a tree is trained within a budget, and the path to the call's last target is longer

A later request that continues a cut, undelivered or superseded reply proves that its tokens arrived, up to `shared`.
The fold is total: what cannot be placed is excluded with its reason. It takes over its argument: `evolve`
changes the tree in place and returns it, so keep only what it returns.
"""

from collections.abc import Callable, Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from gyre.events.tokens import ITEM_BYTES, num_tokens, unpack_ids, unpack_logprobs
from gyre.events.types import (
    CallCompleted,
    CallCut,
    CallDelivered,
    CallFailed,
    CallStarted,
    CallSuperseded,
    ContextCompacted,
    Event,
    RoleClass,
    VersionSpan,
)

TreeEvent = CallStarted | CallCompleted | CallCut | CallFailed | CallDelivered | CallSuperseded | ContextCompacted
"""What the tree of a session is made of."""
CONTEXT = "context"
"""Provenance of a token that the policy did not sample."""


class Call:
    """One call: the tokens that it adds, and where. Positions count from the root: `shared`, `prompt_end`, `end`."""

    __slots__ = (
        "base",
        "call",
        "context",
        "delivered",
        "fault",
        "finish",
        "index",
        "logprobs",
        "proven",
        "role_class",
        "rule",
        "sampled",
        "shared",
        "spans",
        "status",
        "superseded",
    )

    def __init__(self, event: CallStarted, index: int, base: int, shared: int, fault: str) -> None:
        self.call = event.call
        self.index = index
        self.base = base
        """Index of the base; -1 for a root."""
        self.shared = shared
        self.context = event.context
        self.role_class: RoleClass = event.role_class
        self.rule = event.rule
        self.sampled = b""
        self.logprobs = b""
        self.spans: tuple[VersionSpan, ...] = ()
        self.status = "open"
        self.finish = ""
        self.delivered = False
        self.superseded = False
        self.proven = 0
        """Tokens of the full sequence that later requests show to have arrived; never more than it had then."""
        self.fault = fault
        """Why none of its tokens can be a target; empty when they can."""

    @property
    def prompt_end(self) -> int:
        return self.shared + num_tokens(self.context)

    @property
    def end(self) -> int:
        return self.prompt_end + num_tokens(self.sampled)

    @property
    def target_end(self) -> int:
        """Its targets are the positions `[prompt_end, target_end)`."""
        if self.fault or self.status not in ("completed", "cut"):
            return self.prompt_end
        if self.status == "completed" and self.delivered and not self.superseded:
            return self.end
        return max(self.prompt_end, self.proven)

    @property
    def num_targets(self) -> int:
        return self.target_end - self.prompt_end

    @property
    def reason(self) -> str:
        """Of its sampled tokens that are not targets."""
        if self.fault or self.status == "cut":
            return self.fault or "cut"
        return "superseded" if self.superseded else "undelivered"


class Tree:
    """All calls of one session, in the order in which they started."""

    __slots__ = ("_by_id", "calls", "session")

    def __init__(self, session: str) -> None:
        self.session = session
        self.calls: list[Call] = []
        self._by_id: dict[str, Call] = {}

    def find(self, call: str) -> Call | None:
        return self._by_id.get(call)


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """Positions `[start, end)` of a path: tokens that the call of this index adds."""

    index: int
    start: int
    end: int


class TreeStats(msgspec.Struct, frozen=True, kw_only=True):
    num_calls: int
    num_leaves: int
    num_tokens: int
    num_sampled: int
    num_targets: int
    depth: int
    """Calls on the longest chain of bases."""


def evolve(tree: Tree, event: Event) -> Tree:
    """Fold one event of the session; others are passed over. The first start and the first end of a call win."""
    match event:
        case CallStarted():
            if event.call not in tree._by_id:
                _start(tree, event)
        case CallCompleted() | CallCut():
            call = tree.find(event.call)
            if call is not None and call.status == "open":
                call.status = "completed" if isinstance(event, CallCompleted) else "cut"
                call.finish = event.finish if isinstance(event, CallCompleted) else "cut"
                call.sampled, call.logprobs, call.spans = event.sampled, event.logprobs, event.spans
                call.fault = call.fault or _record_fault(call)
        case CallFailed():
            call = tree.find(event.call)
            if call is not None and call.status == "open":
                call.status = "failed"
        case CallDelivered():
            call = tree.find(event.call)
            if call is not None:
                call.delivered = call.delivered or event.delivered
        case CallSuperseded():
            call = tree.find(event.call)
            if call is not None:
                call.superseded = True
        case ContextCompacted():
            call = tree.find(event.summary_call)
            if call is not None and event.summary_class:
                call.role_class = event.summary_class
        case _:
            pass
    return tree


def _start(tree: Tree, event: CallStarted) -> None:
    base, shared, fault = -1, event.shared, ""
    if event.base:
        found = tree.find(event.base)
        if found is None:
            fault = "unknown_base"
        elif is_excluded(found):
            fault = "base_excluded"
        elif not 0 <= shared <= found.end:
            fault = "shared_beyond_base"
        else:
            base = found.index
            found.proven = max(found.proven, shared)
    elif shared != 0:
        fault = "shared_beyond_base"
    if not fault and len(event.context) % ITEM_BYTES:
        base, fault = -1, "torn_tokens"
    if not fault and event.role_class == "auxiliary":
        fault = "auxiliary"
    if not fault and not event.context and shared == 0:
        fault = "no_context"
    call = Call(event, len(tree.calls), base, 0 if base == -1 else shared, fault)
    tree.calls.append(call)
    tree._by_id[event.call] = call


_UNPLACED = frozenset({"unknown_base", "base_excluded", "shared_beyond_base", "torn_tokens"})


def is_excluded(call: Call) -> bool:
    """Whether the call has no place in the tree, so that no other may build on it."""
    return call.fault in _UNPLACED


def _record_fault(call: Call) -> str:
    """What makes the end of a call unfit to train on. A call is trusted whole or not at all."""
    if len(call.sampled) % ITEM_BYTES or len(call.logprobs) % ITEM_BYTES:
        call.sampled = call.sampled[: len(call.sampled) // ITEM_BYTES * ITEM_BYTES]
        return "torn_tokens"
    if len(call.sampled) != len(call.logprobs):
        return "logprob_missing"
    if not np.isfinite(unpack_logprobs(call.logprobs)).all():
        return "logprob_not_finite"
    at = 0
    for span in call.spans:
        if span.start != at or span.end < span.start:
            return "span_missing"
        at = span.end
    return "" if at == num_tokens(call.sampled) else "span_missing"


def path(tree: Tree, index: int, end: int) -> tuple[Segment, ...]:
    """The first `end` tokens of `full(call)`, root first, as the calls that add them; empty ones are left out."""
    segments = []
    while end > 0:  # a root shares nothing
        call = tree.calls[index]
        if end > call.shared:
            segments.append(Segment(index=index, start=call.shared, end=end))
            end = call.shared
        index = call.base
    return tuple(reversed(segments))


def reached(tree: Tree, end_of: Callable[[Call], int]) -> list[int]:
    """For each call, how far into its full sequence the paths of later calls run, each taken up to `end_of` it.

    A call for which `end_of` gives its `shared` or less has no path of its own. One pass, from the last call back.
    """
    reach = [0] * len(tree.calls)
    for call in reversed(tree.calls):
        own = end_of(call)
        far = max(reach[call.index], own if own > call.shared else 0)
        if call.base >= 0:
            reach[call.base] = max(reach[call.base], min(far, call.shared))
    return reach


def leaves(tree: Tree) -> tuple[int, ...]:
    """Calls whose last token lies on no other call's path. A call that adds no token is none."""
    reach = reached(tree, lambda call: call.end)
    return tuple(c.index for c in tree.calls if c.end > c.shared and reach[c.index] < c.end and not is_excluded(c))


def is_beyond(call: Call, max_tokens: int) -> bool:
    """Whether a budget of so many tokens a path leaves it without a branch of its own; 0 is no limit. Calls before it
    stay, and of its own tokens those that lie on the path to a tip within the budget."""
    return bool(max_tokens and call.num_targets and call.target_end > max_tokens)


def tips(tree: Tree, max_tokens: int = 0) -> tuple[int, ...]:
    """Calls with targets whose last target lies on no other such call's path: the leaves that are left once
    everything that leads to no target (orphans of retries, failed calls, tool output at the end) is cut off, and what
    is beyond a budget. Every other target of the tree lies on the path to a tip."""
    ends = [0 if is_beyond(c, max_tokens) or not c.num_targets else c.target_end for c in tree.calls]
    reach = reached(tree, lambda call: ends[call.index])
    return tuple(c.index for c in tree.calls if ends[c.index] and reach[c.index] < c.target_end)


def token_ids(tree: Tree, index: int, end: int) -> NDArray[np.int32]:
    """ids int32[T] of the path's first `end` tokens."""
    ids = np.zeros(end, dtype=np.int32)
    for segment in path(tree, index, end):
        call = tree.calls[segment.index]
        prompt = min(segment.end, call.prompt_end)
        ids[segment.start : prompt] = unpack_ids(call.context)[: prompt - segment.start]
        ids[prompt : segment.end] = unpack_ids(call.sampled)[: segment.end - prompt]
    return ids


def left_out(tree: Tree) -> Iterator[tuple[str, str, int]]:
    """(call, reason, tokens) for every token that is no target: one entry a call and reason."""
    for call in tree.calls:
        if call.context:
            yield call.call, CONTEXT, num_tokens(call.context)
        if call.end > call.target_end:
            yield call.call, call.reason, call.end - call.target_end


def stats(tree: Tree) -> TreeStats:
    depth = [0] * len(tree.calls)
    for call in tree.calls:
        depth[call.index] = 1 + (depth[call.base] if call.base >= 0 else 0)
    return TreeStats(
        num_calls=len(tree.calls),
        num_leaves=len(leaves(tree)),
        num_tokens=sum(c.end - c.shared for c in tree.calls),
        num_sampled=sum(c.end - c.prompt_end for c in tree.calls),
        num_targets=sum(c.num_targets for c in tree.calls),
        depth=max(depth, default=0),
    )
