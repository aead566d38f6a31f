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
    CallSuperseded,
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
    superseded: dict[str, str] = {}
    """Call whose reply was not taken -> the call that asked for it again."""


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


TreeEvent = CallStarted | CallCompleted | CallCut | CallFailed | CallSuperseded | SubAgentSpawned | ContextCompacted


def evolve(tree: Tree, event: TreeEvent) -> Tree:
    """Total: an event of a call that is not known changes nothing.

    It takes over its argument, so that an event costs what it adds: keep only what it returns.
    """
    if isinstance(event, SubAgentSpawned):
        tree.spawns[event.call] = event.parent_call
    elif isinstance(event, ContextCompacted):
        tree.compactions[event.call] = event.summary_call
    elif isinstance(event, CallSuperseded):
        tree.superseded[event.call] = event.by
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
    """`digests` are the prefix digests of `messages`. Cost: a look-up a message from the end.

    Digests leave ids out, so twins whose replies were the same have the same histories. Where the last tool calls have
    the ids that were minted for a reply, what follows them counts as known only in calls that go on from that reply.
    """
    last, said = _last_minted(tree, messages, digests)

    def counts(call: str, known: int) -> bool:
        return not said or known <= last + 1 or _goes_on_from(tree, call, said)

    def asked(known: int) -> list[str]:
        """Calls whose whole prompt is this many of the messages."""
        return [call for call in tree.prompts.get(digests[known - 1], ()) if counts(call, known)]

    for known in range(len(messages), 0, -1):
        if known > 1 and messages[known - 1].role == "assistant":
            base, evidence = _echoed(tree, asked(known - 1), messages[known - 1])
            if base:
                shared = tree.calls[base].num_tokens
                return Placement(rule="continue", base=base, shared=shared, num_known=known, evidence=evidence)
        digest = digests[known - 1]
        if known == len(messages) and (calls := asked(known)):
            shared = tree.calls[calls[0]].num_prompt_tokens
            retried: Literal["request"] = "request"
            return Placement(rule="fork", base=calls[0], shared=shared, num_known=known, kind="retry", evidence=retried)
        if digest in tree.marks and counts(tree.marks[digest][0], known):
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


def find_superseded(tree: Tree, digest: str, first: str) -> tuple[str, ...]:
    """Calls whose replies a request with this whole prompt shows not to have been taken. It is that of `first`, again.

    Those that ended with a reply before it came, and that nothing has gone on from: samples that were asked for side by
    side are none of them, nor is a summary that opened a chain. Where several sub-agents have the same prompt it cannot
    be told whose request came again, and none is.
    """
    asked = [call for call in tree.prompts.get(digest, ()) if first in (call, tree.calls[call].base)]
    if sum(call in tree.spawns for call in asked) > 1:
        return ()
    taken = {*tree.superseded, *tree.compactions.values()}
    taken |= {c.base for c in tree.calls.values() if c.base and c.shared > tree.calls[c.base].num_prompt_tokens}
    return tuple(call for call in asked if tree.calls[call].reply and call not in taken)


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


def holds_sampled(tree: Tree, call: str, num: int) -> bool:
    """Whether any of `full(call)[:num]` was sampled."""
    while num > 0:
        node = tree.calls[call]
        if num > node.num_prompt_tokens:
            return True
        call, num = node.base, min(num, node.shared)
    return False


def _last_minted(tree: Tree, messages: Sequence[Message], digests: Sequence[str]) -> tuple[int, str]:
    """(index of the last message with tool calls, the call whose reply it is by its minted ids; empty for none)."""
    last = next((i for i in range(len(messages) - 1, 0, -1) if messages[i].tool_calls), 0)
    said, evidence = _echoed(tree, tree.prompts.get(digests[last - 1], ()), messages[last]) if last else ("", "reply")
    return last, said if evidence == "tool-call-id" else ""


def _goes_on_from(tree: Tree, call: str, said: str) -> bool:
    """Whether the prompt of `call` holds the reply of `said`, rather than its prompt at most."""
    shared = tree.calls[call].num_prompt_tokens
    while call and call != said:
        shared = min(shared, tree.calls[call].shared)
        call = tree.calls[call].base
    return shared > tree.calls[said].num_prompt_tokens


def _echoed(tree: Tree, calls: Sequence[str], message: Message) -> tuple[str, Literal["tool-call-id", "reply"]]:
    """(the one of `calls` whose reply `message` is, by what); empty for none.

    Twins may have said the same: the minted id tells which of them is meant, else it is the latest.
    """
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
