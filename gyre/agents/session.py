"""Pure. One session: its state is a fold of events, and each request is decided into events.

request + state -> `call.started` and the prompt. Invariants: the prompt that an engine is asked with is exactly
`full(base)[:shared] + context` of the event; the same events give the same state, so a gateway that starts again goes
on where the log ends.
"""

from collections.abc import Callable, Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from gyre.agents import lineage, prompts, roles
from gyre.agents.budgets import Use, find_spent
from gyre.agents.dialect import ContextOverflow, ProviderError, Request
from gyre.agents.prompts import Prompt
from gyre.agents.redaction import NOTHING, Redactor
from gyre.agents.renderer import Renderer
from gyre.config import Config
from gyre.events.tokens import pack_ids, unpack_ids
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
    SessionOpened,
    SubAgentSpawned,
    TokensDrifted,
)


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
    used: Use = msgspec.field(default_factory=Use)
    spent: BudgetSpent | None = None
    """The first of its budgets that was used up: from then on nothing more is started."""


class OverBudget(ProviderError):
    """Told as providers tell of an account without credit, which no client tries again; `event` is recorded once."""

    def __init__(self, event: BudgetSpent) -> None:
        super().__init__(402, "insufficient_quota", event.reason)
        self.event = event


BranchEvent = BranchForked | CallSuperseded | TokensDrifted | SubAgentSpawned | ContextCompacted


class Started(msgspec.Struct, frozen=True, kw_only=True):
    call: CallStarted
    branch: tuple[BranchEvent, ...]
    """How its branch began, if one did."""
    input_ids: NDArray[np.int32]
    """[T]: the whole prompt."""
    stop: tuple[str, ...]

    @property
    def events(self) -> tuple[CallStarted | BranchEvent, ...]:
        """To be appended in this order."""
        return self.call, *self.branch


def open_session(event: SessionOpened) -> Session:
    return Session(execution=event.execution, session=event.session, temperature=event.temperature, top_p=event.top_p)


def evolve(state: Session, event: Event) -> Session:
    """Total. The tokens of a finished session are let go: nothing can ask for them any more.

    It takes over its argument, as `lineage.evolve` does: keep only what it returns.
    """
    replace = msgspec.structs.replace
    match event:
        case ExecutionFinished() | ExecutionDropped() if event.execution == state.execution:
            return replace(state, finished=True, tree=lineage.Tree())
        case CallStarted() if event.session == state.session:
            open_calls = (*state.open_calls, event.call)
            if state.finished:
                return replace(state, open_calls=open_calls)
            state.used.evolve(event)
            tree = lineage.evolve(state.tree, event)
            return replace(state, tree=tree, cell=event.cell, open_calls=open_calls)
        case CallCompleted() | CallCut() | CallFailed() if event.session == state.session:
            state.used.evolve(event)
            open_calls = tuple(call for call in state.open_calls if call != event.call)
            return replace(state, tree=lineage.evolve(state.tree, event), open_calls=open_calls)
        case SubAgentSpawned() | ContextCompacted() | CallSuperseded() if event.session == state.session:
            return state if state.finished else replace(state, tree=lineage.evolve(state.tree, event))
        case BudgetSpent() if event.session == state.session:
            return replace(state, spent=state.spent or event)
    return state


def refusal(state: Session) -> ProviderError | None:
    """What every request of a finished session is told."""
    if not state.finished:
        return None
    return ProviderError(410, "session_finished", f"session {state.session} is over: its execution finished")


def find_prompt(state: Session, request: Request, renderer: Renderer) -> Prompt:
    """That of `decide_start`. Raises ProviderError."""
    if refused := refusal(state):
        raise refused
    return prompts.find_prompt(state.tree, request, renderer)


def decide_start(
    state: Session,
    request: Request,
    renderer: Renderer,
    *,
    cell: str,
    config: Config,
    redactor: Redactor = NOTHING,
    since: Callable[[str], float] = lambda call: 0.0,
) -> Started:
    """Raises ProviderError, and then nothing is recorded but the event of OverBudget. `request` is redacted already.

    since: seconds since the reply of a call was complete; 0 where that is not known.

    Temperature and top-p are those of the session, whatever its harness asks for: they are part of the
    policy that is trained, or of what an evaluation measures.
    """
    prompt = find_prompt(state, request, renderer)
    placement = prompt.placement
    is_after_tools = placement.rule == "continue" and placement.base in state.used.asked
    tool_s = since(placement.base) if is_after_tools else 0.0
    where = {"execution": state.execution, "session": state.session}
    if spent := state.spent or find_spent(state.used, config.harness, **where, base=placement.base, tool_s=tool_s):
        raise OverBudget(spent)
    room = config.engine.context_tokens - prompt.num_tokens
    if room < 1:
        raise ContextOverflow(prompt.num_tokens, config.engine.context_tokens)
    budget = config.harness.max_output_tokens
    left = budget - state.used.num_sampled if budget else room
    origin = roles.find_origin(state.tree, request, prompt.digest, placement, renderer, redactor.text)
    call = CallStarted(
        **where,
        call=f"{state.session}-c{len(state.tree.calls)}",
        base=placement.base,
        shared=placement.shared,
        context=pack_ids(prompt.context),
        role_class=origin.role_class,
        rule=placement.rule,
        marks=prompt.marks,
        temperature=state.temperature,
        top_p=state.top_p,
        max_tokens=min(room, left, config.sampling.max_tokens, request.max_tokens or room),
        cell=cell,
        placed_by=placement.evidence,
        classed_by=origin.evidence,
        header=request.header,
        tool_s=tool_s,
    )
    shared_ids = lineage.prefix_ids(state.tree, placement.base, placement.shared)
    return Started(
        call=call,
        branch=tuple(_branch(state.tree, prompt, origin, call, renderer)),
        input_ids=np.concatenate([shared_ids, unpack_ids(call.context)]),
        stop=request.stop,
    )


def _branch(
    tree: lineage.Tree, prompt: Prompt, origin: roles.Origin, call: CallStarted, renderer: Renderer
) -> Iterator[BranchEvent]:
    placement = prompt.placement
    where = {"execution": call.execution, "session": call.session, "call": call.call}
    if placement.kind:
        kind = origin.kind or placement.kind
        yield BranchForked(**where, base=placement.base, shared=placement.shared, kind=kind)
        if kind == "retry":
            for again in lineage.find_superseded(tree, prompt.digest, placement.base):
                yield CallSuperseded(**where | {"call": again}, by=call.call)
    if placement.drifted and (sampled := tree.calls[placement.drifted].sampled):
        shown = list(prompt.context[: prompt.marks[0].end - placement.shared])
        if shown[: len(renderer.opening)] == renderer.opening:
            shown = shown[len(renderer.opening) :]
        yield TokensDrifted(**where, source=placement.drifted, sampled=sampled, shown=pack_ids(shown))
    if origin.kind == "sub-agent":
        yield SubAgentSpawned(**where, parent_call=origin.source)
    elif origin.kind == "compaction":
        summary = roles.unsaid_summary(tree.calls[origin.source].role_class)
        yield ContextCompacted(**where, summary_call=origin.source, summary_class=summary)
