"""Pure. One session: its state is a fold of events, and each request or generation is decided into events.

request + state -> `call.started` and the prompt; generation + state -> `call.completed` and the answer.
Invariants: the prompt that an engine is asked with is exactly `full(base)[:shared] + context` of the event;
what was sampled is recorded whole, the stop token included, whatever part of it the harness is shown;
the same events give the same state, so a gateway that starts again goes on where the log ends.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from gyre.agents import lineage, roles
from gyre.agents.dialect import Answer, ContextOverflow, ProviderError, ReplyFinish, Request
from gyre.agents.engine_client import Generation
from gyre.agents.messages import Message, ToolCall, digest_message, mint_tool_call_id, prefix_digests, to_wire
from gyre.agents.redaction import Redactor
from gyre.agents.renderer import Renderer
from gyre.agents.tool_budgets import ToolUse
from gyre.config import Config, HarnessConfig
from gyre.errors import HarnessError
from gyre.events.tokens import num_tokens, pack_ids, pack_logprobs, unpack_ids
from gyre.events.types import (
    BranchForked,
    BudgetSpent,
    CallCompleted,
    CallCut,
    CallFailed,
    CallStarted,
    CallSuperseded,
    ContextCompacted,
    Event,
    ExecutionDropped,
    ExecutionFinished,
    Mark,
    SessionOpened,
    SubAgentSpawned,
    TokensDrifted,
    VersionSpan,
)

_NOTHING = Redactor()


class Session(msgspec.Struct, frozen=True, kw_only=True):
    execution: str
    session: str
    temperature: float
    top_p: float
    finished: bool = False
    tree: lineage.Tree = msgspec.field(default_factory=lineage.Tree)
    cell: str = ""
    """Where its last call went."""
    open_calls: tuple[str, ...] = ()
    """Started and not ended, in a finished session too."""
    num_calls: int = 0
    """Started, without those that failed."""
    num_sampled: int = 0
    """Tokens of all replies, those that were cut among them."""
    tools: ToolUse = msgspec.field(default_factory=ToolUse)
    spent: BudgetSpent | None = None
    """The first of its budgets that was used up: from then on nothing more is started."""


class OverBudget(ProviderError):
    """Told as providers tell of an account without credit, which no client tries again; `event` is recorded once."""

    def __init__(self, event: BudgetSpent) -> None:
        super().__init__(402, "insufficient_quota", event.reason)
        self.event = event


StartEvent = CallStarted | BranchForked | CallSuperseded | TokensDrifted | SubAgentSpawned | ContextCompacted


class Started(msgspec.Struct, frozen=True, kw_only=True):
    events: tuple[StartEvent, ...]
    """To be appended in this order; the first is `call.started`."""
    input_ids: NDArray[np.int32]
    """[T]: the whole prompt."""
    stop: tuple[str, ...]

    @property
    def call(self) -> CallStarted:
        event = self.events[0]
        assert isinstance(event, CallStarted)
        return event


class Completed(msgspec.Struct, frozen=True, kw_only=True):
    event: CallCompleted
    answer: Answer


def open_session(event: SessionOpened) -> Session:
    return Session(execution=event.execution, session=event.session, temperature=event.temperature, top_p=event.top_p)


def evolve(state: Session, event: Event) -> Session:
    """Total. The tokens of a finished session are let go: nothing can ask for them any more.

    It takes over its argument, as `lineage.evolve` does: keep only what it returns.
    """
    match event:
        case ExecutionFinished() | ExecutionDropped() if event.execution == state.execution:
            return msgspec.structs.replace(state, finished=True, tree=lineage.Tree())
        case CallStarted() if event.session == state.session:
            open_calls, num_calls = (*state.open_calls, event.call), state.num_calls + 1
            if state.finished:
                return msgspec.structs.replace(state, open_calls=open_calls)
            state.tools.evolve(event)
            tree = lineage.evolve(state.tree, event)
            return msgspec.structs.replace(
                state, tree=tree, cell=event.cell, open_calls=open_calls, num_calls=num_calls
            )
        case CallCompleted() | CallCut() | CallFailed() if event.session == state.session:
            sampled = 0 if isinstance(event, CallFailed) else num_tokens(event.sampled)
            if isinstance(event, CallCompleted):
                state.tools.evolve(event)
            return msgspec.structs.replace(
                state,
                tree=lineage.evolve(state.tree, event),
                open_calls=tuple(call for call in state.open_calls if call != event.call),
                num_calls=state.num_calls - isinstance(event, CallFailed),
                num_sampled=state.num_sampled + sampled,
            )
        case BudgetSpent() if event.session == state.session:
            return msgspec.structs.replace(state, spent=state.spent or event)
        case SubAgentSpawned() | ContextCompacted() | CallSuperseded() if (
            event.session == state.session and not state.finished
        ):
            return msgspec.structs.replace(state, tree=lineage.evolve(state.tree, event))
    return state


class _Prompt(msgspec.Struct, frozen=True, kw_only=True):
    placement: lineage.Placement
    context: Sequence[int]
    marks: tuple[Mark, ...]

    @property
    def num_tokens(self) -> int:
        return self.placement.shared + len(self.context)


def _find_prompt(state: Session, request: Request, renderer: Renderer) -> _Prompt:
    """Raises ProviderError."""
    if state.finished:
        raise ProviderError(410, "session_finished", f"session {state.session} is over: its execution finished")
    digests = prefix_digests(request.messages, request.tools)
    placement = lineage.place(state.tree, request.messages, digests)
    try:
        context, ends = _new_tokens(state.tree, request, placement, renderer)
    except HarnessError as error:
        raise ProviderError(400, "invalid_request", str(error)) from None
    last = zip(digests[len(digests) - len(ends) :], ends, strict=True)
    return _Prompt(
        placement=placement, context=context, marks=tuple(Mark(digest=digest, end=end) for digest, end in last)
    )


def count_prompt(state: Session, request: Request, renderer: Renderer) -> int:
    """Tokens of the prompt that `decide_start` would send now. Raises ProviderError."""
    return _find_prompt(state, request, renderer).num_tokens


def decide_start(
    state: Session,
    request: Request,
    renderer: Renderer,
    *,
    cell: str,
    config: Config,
    redactor: Redactor = _NOTHING,
    since: Callable[[str], float] = lambda call: 0.0,
) -> Started:
    """Raises ProviderError, and then nothing is recorded but the event of OverBudget. `request` is redacted already.

    since: seconds since the reply of a call was complete; 0 where that is not known.

    Temperature and top-p are those of the session, whatever its harness asks for: they are part of the
    policy that is trained, or of what an evaluation measures.
    """
    prompt = _find_prompt(state, request, renderer)
    placement, context = prompt.placement, prompt.context
    is_after_tools = placement.rule == "continue" and placement.base in state.tools.asked
    tool_s = since(placement.base) if is_after_tools else 0.0
    left = _tokens_left(state, config.harness, placement.base, tool_s)
    room = config.engine.context_tokens - prompt.num_tokens
    if room < 1:
        raise ContextOverflow(prompt.num_tokens, config.engine.context_tokens)
    digest = prompt.marks[-1].digest
    origin = roles.find_origin(state.tree, request, digest, placement, renderer, redactor.text)
    started = CallStarted(
        execution=state.execution,
        session=state.session,
        call=f"{state.session}-c{len(state.tree.calls)}",
        base=placement.base,
        shared=placement.shared,
        context=pack_ids(context),
        role_class=origin.role_class,
        rule=placement.rule,
        marks=prompt.marks,
        temperature=state.temperature,
        top_p=state.top_p,
        max_tokens=min(room, left or room, config.sampling.max_tokens, request.max_tokens or room),
        cell=cell,
        placed_by=placement.evidence,
        classed_by=origin.evidence,
        header=request.header,
        tool_s=tool_s,
    )
    where = {"execution": state.execution, "session": state.session, "call": started.call}
    events: list[StartEvent] = [started]
    if placement.rule == "fork":
        kind = origin.kind or placement.kind or "edit"
        events.append(BranchForked(**where, base=placement.base, shared=placement.shared, kind=kind))
        if kind == "retry":
            again = lineage.find_superseded(state.tree, digest, placement.base)
            events += [CallSuperseded(**where | {"call": call}, by=started.call) for call in again]
    if placement.drifted and (sampled := state.tree.calls[placement.drifted].sampled):
        shown = list(context[: prompt.marks[0].end - placement.shared])
        if shown[: len(renderer.opening)] == renderer.opening:
            shown = shown[len(renderer.opening) :]
        events.append(TokensDrifted(**where, source=placement.drifted, sampled=sampled, shown=pack_ids(shown)))
    if origin.kind == "sub-agent":
        events.append(SubAgentSpawned(**where, parent_call=origin.source))
    elif origin.kind == "compaction":
        summary = roles.unsaid_summary(state.tree.calls[origin.source].role_class)
        events.append(ContextCompacted(**where, summary_call=origin.source, summary_class=summary))
    return Started(
        events=tuple(events),
        input_ids=np.concatenate(
            [lineage.prefix_ids(state.tree, placement.base, placement.shared), unpack_ids(started.context)]
        ),
        stop=request.stop,
    )


def _tokens_left(state: Session, config: HarnessConfig, base: str, tool_s: float) -> int:
    """Of the execution's budget; 0: there is none. Raises OverBudget.

    base, tool_s: the call that is gone on from, and how long its tools took.
    """
    if state.spent is not None:
        raise OverBudget(state.spent)
    budgets: tuple[tuple[Literal["calls", "output_tokens"], int, int], ...] = (
        ("calls", config.max_calls, state.num_calls),
        ("output_tokens", config.max_output_tokens, state.num_sampled),
    )
    for budget, limit, used in budgets:
        if limit and used >= limit:
            name = budget.replace("_", " ")
            reason = f"execution {state.execution}: its {limit} {name} are used up (harness.max_{budget})"
            where = {"execution": state.execution, "session": state.session}
            raise OverBudget(BudgetSpent(**where, budget=budget, limit=limit, reason=reason))
    if found := state.tools.spent(config.tool_budgets, base, tool_s):
        kind, tool, limit = found
        what = kind.removeprefix("tool_")
        reason = f"execution {state.execution}: its {limit} {what} of {tool} are used up (harness.tool_budgets)"
        where = {"execution": state.execution, "session": state.session, "tool": tool}
        raise OverBudget(BudgetSpent(**where, budget=kind, limit=limit, reason=reason))
    return max(config.max_output_tokens - state.num_sampled, 0)


def decide_completed(
    started: Started,
    model: str,
    generation: Generation,
    renderer: Renderer,
    *,
    created: int,
    num_retries: int,
    redactor: Redactor = _NOTHING,
) -> Completed:
    """What the log keeps and what the harness is shown of one generation."""
    call = started.call
    reply = renderer.parse_reply(generation.output_ids)
    cuts = sorted((reply.content.find(text), text) for text in started.stop if text in reply.content)
    message = Message(
        role="assistant",
        content=reply.content[: cuts[0][0]] if cuts else reply.content,
        reasoning=reply.reasoning,
        tool_calls=tuple(
            ToolCall(id=mint_tool_call_id(call.call, index), name=c.name, arguments=c.arguments)
            for index, c in enumerate(reply.tool_calls)
        ),
    )
    finish: ReplyFinish = "length" if generation.finish == "length" else "tool_calls" if message.tool_calls else "stop"
    event = CallCompleted(
        execution=call.execution,
        session=call.session,
        call=call.call,
        sampled=pack_ids(generation.output_ids),
        logprobs=pack_logprobs(generation.logprobs),
        spans=_spans(generation),
        finish=finish,
        reply=digest_message(redactor.message(message)),
        num_prompt_tokens=len(started.input_ids),
        num_cached_tokens=generation.num_cached_tokens,
        num_retries=num_retries,
        engine_s=generation.engine_s,
        tools=tuple(tool_call.name for tool_call in message.tool_calls),
    )
    answer = Answer(
        call=call.call,
        model=model,
        created=created,
        message=message,
        finish=finish,
        num_prompt_tokens=len(started.input_ids),
        num_cached_tokens=generation.num_cached_tokens,
        num_sampled_tokens=len(generation.output_ids),
        num_reasoning_tokens=renderer.count_reasoning(generation.output_ids) if reply.reasoning else 0,
        stop_text=cuts[0][1] if cuts else "",
    )
    return Completed(event=event, answer=answer)


def decide_no_reply(started: Started, partial: Generation | None, *, status: int, reason: str) -> CallCut | CallFailed:
    """The harness gets an error; tokens that were sampled until then are kept."""
    call = started.call
    if partial is None:
        return CallFailed(execution=call.execution, session=call.session, call=call.call, status=status, reason=reason)
    return CallCut(
        execution=call.execution,
        session=call.session,
        call=call.call,
        sampled=pack_ids(partial.output_ids),
        logprobs=pack_logprobs(partial.logprobs),
        spans=_spans(partial),
        reason=reason,
    )


def _spans(generation: Generation) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(version=s.version, start=s.start, end=s.end) for s in generation.spans)


def decide_orphans(state: Session) -> tuple[CallCut, ...]:
    """Calls that the log left open: the gateway that made them is gone, and so is their client's connection."""
    return tuple(
        CallCut(
            execution=state.execution,
            session=state.session,
            call=call,
            sampled=b"",
            logprobs=b"",
            spans=(),
            reason="the gateway ended during the call",
        )
        for call in state.open_calls
    )


def _new_tokens(
    tree: lineage.Tree, request: Request, placement: lineage.Placement, renderer: Renderer
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
