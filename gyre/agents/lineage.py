"""Pure. Where a request stands in the tree of its session.

request's prefix digests + Tree -> Placement; call events -> Tree. Invariants: the tree only grows; any
started call may be a base, open ones too; a token that was sampled is shared by position and never
tokenised again; a message that differs from what was emitted is context where it appears, whatever it
once was. Nothing here compares rendered text.

Rules, first match wins, longest prefix first:
- `continue`: base's prompt, base's reply come back, then new messages. Shares all of base.
- `fork`: the longest run of messages that some call has in its prompt. The same request again shares the
  whole prompt, the opening of the reply included.
- `root`: nothing is known.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from gyre.agents.messages import Message, digest_message, is_echo, mint_tool_call_id
from gyre.events.tokens import num_tokens, unpack_ids
from gyre.events.types import (
    CallCompleted,
    CallCut,
    CallFailed,
    CallStarted,
    ContextCompacted,
    RoleClass,
    SubAgentSpawned,
)

Rule = Literal["root", "continue", "fork"]
ForkKind = Literal["retry", "edit", "drift"]


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A node: only the tokens that it adds."""

    base: str
    shared: int
    context: bytes
    prompt_end: int
    """Tokens up to the end of the last message: without the opening of the reply."""
    role_class: RoleClass
    open: bool = True
    sampled: bytes = b""
    reply: str = ""

    @property
    def num_prompt_tokens(self) -> int:
        return self.shared + num_tokens(self.context)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + num_tokens(self.sampled)


class Tree(msgspec.Struct, frozen=True, kw_only=True):
    """All calls of a session."""

    calls: dict[str, Call] = {}
    marks: dict[str, tuple[str, int]] = {}
    """Prefix digest -> the first call that had it, and where it ends there."""
    prompts: dict[str, tuple[str, ...]] = {}
    """Prefix digest -> the calls whose whole prompt it is."""
    spawns: dict[str, str] = {}
    """First call of a sub-agent -> the call that spawned it."""
    compactions: dict[str, str] = {}
    """First call of a compacted chain -> the call that made its summary."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    rule: Rule
    base: str = ""
    shared: int = 0
    num_known: int = 0
    """Messages that the shared tokens stand for; the others are new."""
    kind: ForkKind | None = None
    evidence: Literal["tool-call-id", "reply", "request", "prefix", "nothing"] = "nothing"
    """What was found."""
    drifted: str = ""
    """The call whose reply came back as something else: the first new message."""


TreeEvent = CallStarted | CallCompleted | CallCut | CallFailed | SubAgentSpawned | ContextCompacted


def evolve(tree: Tree, event: TreeEvent) -> Tree:
    """Total: an event of a call that is not known changes nothing.

    It takes over its argument, so that an event costs what it adds: keep only what it returns.
    """
    if isinstance(event, SubAgentSpawned):
        tree.spawns[event.call] = event.parent_call
    elif isinstance(event, ContextCompacted):
        tree.compactions[event.call] = event.summary_call
    elif isinstance(event, CallStarted):
        tree.calls[event.call] = Call(
            base=event.base,
            shared=event.shared,
            context=event.context,
            prompt_end=event.marks[-1].end if event.marks else event.shared,
            role_class=event.role_class,
        )
        for mark in event.marks:
            tree.marks.setdefault(mark.digest, (event.call, mark.end))
        if event.marks:
            whole = event.marks[-1].digest
            tree.prompts[whole] = (*tree.prompts.get(whole, ()), event.call)
    elif (known := tree.calls.get(event.call)) is not None:
        sampled = b"" if isinstance(event, CallFailed) else event.sampled
        reply = event.reply if isinstance(event, CallCompleted) else ""
        tree.calls[event.call] = msgspec.structs.replace(known, open=False, sampled=sampled, reply=reply)
    return tree


def place(tree: Tree, messages: Sequence[Message], digests: Sequence[str]) -> Placement:
    """`digests` are the prefix digests of `messages`. Cost: a look-up a message from the end."""
    for known in range(len(messages), 0, -1):
        if known > 1 and messages[known - 1].role == "assistant":
            base, evidence = _echoed(tree, digests[known - 2], messages[known - 1])
            if base:
                shared = tree.calls[base].num_tokens
                return Placement(rule="continue", base=base, shared=shared, num_known=known, evidence=evidence)
        digest = digests[known - 1]
        if known == len(messages) and digest in tree.prompts:
            base = tree.prompts[digest][0]
            shared = tree.calls[base].num_prompt_tokens
            retried: Literal["request"] = "request"
            return Placement(rule="fork", base=base, shared=shared, num_known=known, kind="retry", evidence=retried)
        if digest in tree.marks:
            base, shared = tree.marks[digest]
            drifted = ""
            if known < len(messages) and messages[known].role == "assistant":
                drifted = _drifted(tree, digest, messages[known])
            return Placement(
                rule="fork",
                base=base,
                shared=shared,
                num_known=known,
                kind="drift" if drifted else "edit",
                evidence="prefix",
                drifted=drifted,
            )
    return Placement(rule="root")


def prefix_ids(tree: Tree, call: str, num: int) -> NDArray[np.int32]:
    """int32[num]: `full(call)[:num]`, put together along its bases."""
    parts = []
    while num > 0:
        node = tree.calls[call]
        if num > node.shared:
            parts.append(unpack_ids(node.context + node.sampled)[: num - node.shared])
            num = node.shared
        call = node.base
    return np.concatenate([np.empty(0, dtype=np.int32), *reversed(parts)])


def _echoed(tree: Tree, prompt: str, message: Message) -> tuple[str, Literal["tool-call-id", "reply"]]:
    """(the call with this prompt whose reply `message` is, by what); empty for none.

    Twins may have said the same: the minted id tells which of them is meant, else it is the latest.
    """
    calls = tree.prompts.get(prompt, ())
    echo = digest_message(message) if calls else ""
    twins = [call for call in calls if is_echo(echo, tree.calls[call].reply)]
    named = _named(twins, message)
    return (named, "tool-call-id") if named else (twins[-1] if twins else "", "reply")


def _drifted(tree: Tree, prompt: str, message: Message) -> str:
    """The call with this prompt that `message`, which is no echo, stands for: named by a minted id, or the latest."""
    calls = tree.prompts.get(prompt, ())
    return _named(calls, message) or (calls[-1] if calls else "")


def _named(calls: Sequence[str], message: Message) -> str:
    ids = {call.id for call in message.tool_calls}
    return next((call for call in calls for n in range(len(ids)) if mint_tool_call_id(call, n) in ids), "")


def last_sampled(tree: Tree, call: str) -> list[int]:
    """The last sampled id of a call, if it has any: it shows whether the reply ended its turn."""
    return [int(i) for i in unpack_ids(tree.calls[call].sampled[-4:])]
