"""Pure. What a request is for: the main agent, a sub-agent, a summary, or a helper.

request + its placement + earlier replies -> Origin. The evidence is what a harness cannot help sending: the text
that it was given by the policy. Headers only label what texts leave open. Invariant: nothing here moves
a token; an Origin that is wrong makes a wrong label and never a wrong prompt.

Rules, first match wins:
- a helper's model, or JSON of a schema and no tools: `auxiliary`.
- a request that keeps a reply, or comes again: the class of that history; a summary when the header says so.
- a new history without tools that holds words or tool-call ids of earlier replies: a summary of the chain of the
  latest of them.
- the opening holds the text of a summary that no chain has taken up yet: that chain, compacted. A reply that was asked
  for like any other, and called no tool, counts as one where nothing else explains the opening.
- the last user message before any reply is an argument of an earlier tool call: a sub-agent of that call. Of
  equal ones the earliest that is not taken up.
- otherwise the class of the history that was edited, `main` for a new one; the header may say sub-agent or summary.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import msgspec
import orjson

from gyre.agents import lineage
from gyre.agents.dialect import Hint, Request
from gyre.agents.harnesses import HELPER_MODEL
from gyre.agents.messages import Message, digest_message, mint_tool_call_id
from gyre.agents.renderer import Renderer
from gyre.agents.replies import Reply
from gyre.events.tokens import unpack_ids
from gyre.events.types import RoleClass

MIN_QUOTE_CHARS = 12
"""Shorter texts are found by chance."""
MIN_SUMMARY_CHARS = 60
"""Nothing but its text says of a reply that it was a summary."""

_ELEMENT = re.compile(r"<([\w-]+)>(.*?)</\1>", re.DOTALL)
_CLASSES: dict[str, Hint] = {"main": "main", "subagent": "sub-agent", "compaction": "summary", "auxiliary": "auxiliary"}
_SUMMARIES: dict[RoleClass, Literal["main-summary", "sub-agent-summary"]] = {
    "main": "main-summary",
    "sub-agent": "sub-agent-summary",
}
_SUMMARISED: dict[RoleClass, RoleClass] = {"main-summary": "main", "sub-agent-summary": "sub-agent"}


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    role_class: RoleClass
    kind: Literal["", "compaction", "sub-agent"] = ""
    source: str = ""
    """The summary's call, or the call that spawned the sub-agent."""
    evidence: str = "nothing"
    """What the class follows from, as in `call.started`."""


def label(request: Request, headers: Mapping[str, str]) -> Request:
    """With what the harness itself says of it, in any of the forms that are known. Values are not kept."""
    hint, name = _read_label(headers)
    return msgspec.structs.replace(request, hint=hint, header=name)


def _read_label(headers: Mapping[str, str]) -> tuple[Hint, str]:
    if said := _CLASSES.get(headers.get("x-claude-code-request-class", "")):
        return said, "x-claude-code-request-class"
    if kind := headers.get("x-openai-subagent"):
        return "summary" if kind == "compact" else "sub-agent", "x-openai-subagent"
    for name in ("x-parent-session-id", "x-claude-code-agent-id"):
        if name in headers:
            return "sub-agent", name
    return "", ""


def find_origin(
    tree: lineage.Tree,
    request: Request,
    digest: str,
    placement: lineage.Placement,
    renderer: Renderer,
    redact: Callable[[str], str] = str,
) -> Origin:
    """`digest` is that of the whole prompt, `redact` what was done to its texts.

    Reads earlier replies only where a history begins or was edited.
    """
    if request.model == HELPER_MODEL:
        return Origin(role_class="auxiliary", evidence="helper-model")
    if request.structured and not request.tools:
        return Origin(role_class="auxiliary", evidence="schema")
    if request.hint == "auxiliary":
        return Origin(role_class="auxiliary", evidence="header")
    inherited: RoleClass = tree.calls[placement.base].role_class if placement.base else "main"
    kept = {message.role for message in request.messages[: placement.num_known]}
    keeps_reply = "assistant" in kept and lineage.holds_sampled(tree, placement.base, placement.shared)
    if placement.rule == "continue" or (placement.kind != "retry" and keeps_reply):
        return _labelled(inherited, request.hint, "history")
    if placement.kind == "retry" and not _is_twin(tree, placement.base):
        return Origin(role_class=inherited, evidence="same-request")
    replies = list(_replies(tree, renderer, redact))
    if placement.kind == "retry":
        twin = _find_spawn(tree, request, digest, replies, taken_too=False)
        return twin or Origin(role_class=inherited, evidence="same-request")
    if placement.rule == "root" and not request.tools and (call := _find_quoted(request, replies)):
        role_class = tree.calls[call].role_class
        return Origin(role_class=_SUMMARIES.get(role_class, role_class), evidence="quote")
    found = (
        _find_summary(tree, request, replies)
        or _find_spawn(tree, request, digest, replies, taken_too=True)
        or _find_summary(tree, request, replies, labelled=False)
    )
    if found:
        return found
    if kept - {"system"}:
        return _labelled(inherited, request.hint, "history")
    return _labelled("main", request.hint, "nothing")


def unsaid_summary(role_class: RoleClass) -> Literal["", "main-summary", "sub-agent-summary"]:
    """What a call of this class was in truth, if its reply has turned out to be a summary; empty if that was known."""
    return _SUMMARIES.get(role_class, "")


def _labelled(inherited: RoleClass, hint: Hint, evidence: str) -> Origin:
    """The class that texts leave, unless the header says another."""
    role_class = inherited
    if hint == "summary":
        role_class = _SUMMARIES.get(inherited, inherited)
    elif hint and inherited in _SUMMARISED:
        # A request that goes on from a summary without being one is the agent again.
        role_class = _SUMMARISED[inherited]
    elif hint == "sub-agent" and inherited == "main":
        role_class = "sub-agent"
    return Origin(role_class=role_class, evidence=evidence if role_class == inherited else "header")


def _is_twin(tree: lineage.Tree, base: str) -> bool:
    """Whether the same request, come again, may be another sub-agent's: the first was one, and did not fail."""
    return base in tree.spawns and (tree.calls[base].open or bool(tree.calls[base].reply))


def _replies(tree: lineage.Tree, renderer: Renderer, redact: Callable[[str], str]) -> Iterator[tuple[str, Reply]]:
    for name, call in tree.calls.items():
        if call.sampled:
            reply = renderer.parse_reply(unpack_ids(call.sampled).tolist())
            calls = tuple(msgspec.structs.replace(c, arguments=redact(c.arguments)) for c in reply.tool_calls)
            yield name, msgspec.structs.replace(reply, content=redact(reply.content), tool_calls=calls)


def _find_quoted(request: Request, replies: list[tuple[str, Reply]]) -> str:
    """The latest call whose tool-call ids or words come back."""
    ids = {call.id for message in request.messages for call in message.tool_calls}
    text = "\n".join(message.content for message in request.messages)
    for name, reply in reversed(replies):
        if any(mint_tool_call_id(name, index) in ids for index in range(len(reply.tool_calls))):
            return name
        if _is_quote(reply.content) and reply.content in text:
            return name
    return ""


def _find_summary(
    tree: lineage.Tree, request: Request, replies: list[tuple[str, Reply]], *, labelled: bool = True
) -> Origin | None:
    """The latest summary that the opening holds and no chain has taken up. Not `labelled`: one that was asked for like
    anything else, so that only this shows what it was."""
    taken = set(tree.compactions.values())
    opening = "\n".join(message.content for message in _opening(tree, request, through_reply=True))
    for name, reply in reversed(replies):
        role_class = tree.calls[name].role_class
        if name in taken or (role_class in _SUMMARISED) != labelled or (reply.tool_calls and not labelled):
            continue
        if any(
            quote in opening for quote in _quotes(reply.content, MIN_QUOTE_CHARS if labelled else MIN_SUMMARY_CHARS)
        ):
            role_class = _SUMMARISED.get(role_class, role_class)
            return Origin(role_class=role_class, kind="compaction", source=name, evidence="summary")
    return None


def _find_spawn(
    tree: lineage.Tree, request: Request, digest: str, replies: list[tuple[str, Reply]], *, taken_too: bool
) -> Origin | None:
    asked = next((m.content for m in reversed(_opening(tree, request)) if m.role == "user"), "")
    twins = [tree.spawns.get(call) for call in tree.prompts.get(digest, ())]
    children = Counter(tree.spawns.values())
    found = ""
    for name, reply in replies:
        num = sum(any(_is_prompt(text, asked) for text in _texts(call.arguments)) for call in reply.tool_calls)
        # Taken up by a child with this very prompt, or by one more than the other calls can account for.
        num_taken = max(twins.count(name), children[name] - (len(reply.tool_calls) - num))
        if num > num_taken:
            found, taken_too = name, True
            break
        found = name if num else found
    if not found or not taken_too:
        return None
    return Origin(role_class="sub-agent", kind="sub-agent", source=found, evidence="spawn")


def _opening(tree: lineage.Tree, request: Request, *, through_reply: bool = False) -> list[Message]:
    """The messages before any reply; with the first of the replies if asked for.

    An assistant message that the policy never said is none: some harnesses begin with one of their own.
    """
    said = {call.reply for call in tree.calls.values()}
    said |= {reply.partition("+")[0] for reply in said}
    first = next(
        (i for i, m in enumerate(request.messages) if m.role == "assistant" and digest_message(m) in said), None
    )
    return list(request.messages if first is None else request.messages[: first + through_reply])


def _quotes(summary: str, min_chars: int) -> list[str]:
    """What may come back of it: all, or what stands in one of its elements (Claude Code leaves out `<analysis>` and the
    tags of `<summary>`)."""
    parts = [summary.strip(), *(part.strip() for _, part in _ELEMENT.findall(summary))]
    return [part for part in parts if len(part) >= min_chars]


def _is_quote(text: str) -> bool:
    return len(text.strip()) >= MIN_QUOTE_CHARS


def _is_prompt(text: str, asked: str) -> bool:
    """Some harnesses put reminders before it."""
    return bool(text) and (text == asked or (_is_quote(text) and asked.endswith(text)))


def _texts(arguments: str) -> list[str]:
    try:
        tree = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return []
    return [value for value in tree.values() if isinstance(value, str)] if isinstance(tree, dict) else []
