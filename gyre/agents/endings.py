"""Pure. How a started call ends: with a reply, cut short with what was sampled until then, or failed.

generation -> `call.completed` and the answer; what was sampled before an error -> `call.cut`; nothing -> `call.failed`.
Invariant: what was sampled is recorded whole, the stop token included, whatever part of it the harness is shown.
"""

from typing import Any

import msgspec

from gyre.agents.dialect import Answer, ReplyFinish
from gyre.agents.engine_client import Generation
from gyre.agents.messages import Message, ToolCall, digest_message, mint_tool_call_id
from gyre.agents.redaction import NOTHING, Redactor
from gyre.agents.renderer import Renderer
from gyre.agents.session import Session, Started
from gyre.events.tokens import pack_ids, pack_logprobs
from gyre.events.types import CallCompleted, CallCut, CallFailed, CallStarted


class Completed(msgspec.Struct, frozen=True, kw_only=True):
    event: CallCompleted
    answer: Answer


def decide_completed(
    started: Started,
    model: str,
    generation: Generation,
    renderer: Renderer,
    *,
    created: int,
    num_retries: int,
    redactor: Redactor = NOTHING,
) -> Completed:
    """What the log keeps and what the harness is shown of one generation."""
    call = started.call
    reply = renderer.parse_reply(generation.output_ids)
    cut, stop_text = min(
        ((reply.content.find(text), text) for text in started.stop if text in reply.content),
        default=(len(reply.content), ""),
    )
    message = Message(
        role="assistant",
        content=reply.content[:cut],
        reasoning=reply.reasoning,
        tool_calls=tuple(
            ToolCall(id=mint_tool_call_id(call.call, index), name=c.name, arguments=c.arguments)
            for index, c in enumerate(reply.tool_calls)
        ),
    )
    finish: ReplyFinish = "length" if generation.finish == "length" else "tool_calls" if message.tool_calls else "stop"
    event = CallCompleted(
        **_kept(call, generation),
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
        stop_text=stop_text,
    )
    return Completed(event=event, answer=answer)


def decide_no_reply(started: Started, partial: Generation | None, *, status: int, reason: str) -> CallCut | CallFailed:
    """The harness gets an error; tokens that were sampled until then are kept."""
    call = started.call
    if partial is None:
        return CallFailed(execution=call.execution, session=call.session, call=call.call, status=status, reason=reason)
    return CallCut(**_kept(call, partial), reason=reason)


def decide_orphans(state: Session) -> tuple[CallCut, ...]:
    """Calls that the log left open: the gateway that made them is gone, and so is their client's connection."""
    where = {"execution": state.execution, "session": state.session}
    reason = "the gateway ended during the call"
    return tuple(
        CallCut(**where, call=call, sampled=b"", logprobs=b"", spans=(), reason=reason) for call in state.open_calls
    )


def _kept(call: CallStarted, generation: Generation) -> dict[str, Any]:
    """What the log has of every generation."""
    return {
        "execution": call.execution,
        "session": call.session,
        "call": call.call,
        "sampled": pack_ids(generation.output_ids),
        "logprobs": pack_logprobs(generation.logprobs),
        "spans": generation.spans,
    }
