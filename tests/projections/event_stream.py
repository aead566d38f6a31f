"""Builders of events for the tests of projections: short to write, real in every field."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gyre.events.codec import Envelope, Recorded, body_digest, encode
from gyre.events.subjects import event_subject
from gyre.events.tokens import pack_ids
from gyre.events.types import (
    CallCompleted,
    CallCut,
    CallDelivered,
    CallFailed,
    CallStarted,
    CallSuperseded,
    CohortConsumed,
    Event,
    ExecutionDropped,
    ExecutionFinished,
    ExecutionScored,
    ExecutionStarted,
    GroupDispatched,
    Part,
    SessionOpened,
    StepCompleted,
    VersionSpan,
)
from gyre.projections import tree
from gyre.projections.tree import Tree


class Stream:
    """Events in order, as a log would give them back."""

    def __init__(self) -> None:
        self.recorded: list[Recorded] = []

    def add(self, event: Event, cause: int = 0) -> int:
        seq = len(self.recorded) + 1
        prev = self.recorded[-1].digest if self.recorded else ""
        envelope = Envelope(
            writer="w", incarnation=1, writer_seq=seq, prev=prev, time_ns=1_000 * seq, cause=cause, event=event
        )
        body = encode(envelope)
        subject = event_subject("r", event)
        self.recorded.append(Recorded(seq=seq, subject=subject, digest=body_digest(body), envelope=envelope))
        return seq

    def group(self, group: str, num_slots: int, *, purpose: str = "train", version: int = 0) -> None:
        self.add(
            GroupDispatched(
                group=group,
                index=len(self.recorded),
                purpose=purpose,  # type: ignore[arg-type]
                task=f"task-{group}",
                task_digest="d",
                task_index=0,
                num_slots=num_slots,
                policy_version=version,
                temperature=1.0,
            )
        )

    def start(self, group: str, slot: int, attempt: int = 0) -> str:
        execution = f"{group}-{slot}" + (f"-r{attempt}" if attempt else "")
        self.add(
            ExecutionStarted(
                execution=execution,
                group=group,
                slot=slot,
                attempt=attempt,
                harness="reference",
                sandbox="bubblewrap",
                deadline_s=60.0,
            )
        )
        self.add(SessionOpened(execution=execution, session=f"{execution}-s", temperature=1.0, top_p=1.0))
        return execution

    def calls(self, execution: str, *turns: tuple[int, int]) -> None:
        """A plain conversation: (context, sampled) tokens a turn."""
        base, end = "", 0
        for number, (context, sampled) in enumerate(turns):
            call = f"{execution}-s-c{number}"
            ids, replies = range(end, end + context), range(end + context, end + context + sampled)
            for event in call_events(execution, call, base, end, ids, replies):
                self.add(event)
            base, end = call, end + context + sampled

    def score(self, execution: str, score: float, finished: str = "completed") -> None:
        self.finish(execution, finished)
        self.add(ExecutionScored(execution=execution, score=score, parts=(Part(name="p", passed=True),), wall_s=0.5))

    def finish(self, execution: str, reason: str = "completed") -> None:
        self.add(
            ExecutionFinished(execution=execution, reason=reason, exit_code=0, wall_s=1.0, detail="")  # type: ignore[arg-type]
        )

    def drop(self, execution: str, reason: str, *, final: bool = True) -> None:
        self.add(ExecutionDropped(execution=execution, reason=reason, final=final))

    def whole_group(self, group: str, scores: Sequence[float], **options: Any) -> list[str]:
        """A group whose executions all make the same two calls and get these scores."""
        self.group(group, len(scores), **options)
        executions = [self.start(group, slot) for slot in range(len(scores))]
        for execution, score in zip(executions, scores, strict=True):
            self.calls(execution, (5, 3), (2, 4))
            self.score(execution, score)
        return executions

    def consume(self, step: int, groups: Sequence[str]) -> None:
        self.add(
            CohortConsumed(step=step, groups=tuple(groups), executions=(), digest="d", through_seq=len(self.recorded))
        )

    def complete(self, step: int) -> None:
        self.add(
            StepCompleted(
                step=step,
                weights_digest="d",
                loss=0.0,
                grad_norm=1.0,
                entropy=1.0,
                clip_fraction=0.0,
                logprob_gap_mean=0.0,
                logprob_gap_max=0.0,
                kl=0.0,
                staleness_mean=1.0,
                staleness_max=1,
                learning_rate=1e-3,
                score_mean=0.5,
                num_tokens=1,
                num_targets=1,
                phases=(),
            )
        )


def started(call: str, base: str = "", shared: int = 0, context: Sequence[int] = (), **other: Any) -> CallStarted:
    fields: dict[str, Any] = {
        "execution": "e",
        "session": "s",
        "role_class": "main",
        "rule": "continue" if base else "root",
        "marks": (),
        "temperature": 1.0,
        "top_p": 1.0,
        "max_tokens": 64,
        "cell": "c0",
    }
    return CallStarted(call=call, base=base, shared=shared, context=pack_ids(context), **(fields | other))


def completed(call: str, sampled: Sequence[int], **other: Any) -> CallCompleted:
    fields: dict[str, Any] = {
        "execution": "e",
        "session": "s",
        "sampled": pack_ids(sampled),
        "logprobs": np.full(len(sampled), -0.5, dtype="<f4").tobytes(),
        "spans": (VersionSpan(version=0, start=0, end=len(sampled)),),
        "finish": "stop",
        "reply": "d",
        "num_prompt_tokens": 1,
        "num_cached_tokens": 0,
        "num_retries": 0,
        "engine_s": 0.25,
    }
    return CallCompleted(call=call, **(fields | other))


def cut(call: str, sampled: Sequence[int]) -> CallCut:
    return CallCut(
        execution="e",
        session="s",
        call=call,
        sampled=pack_ids(sampled),
        logprobs=np.full(len(sampled), -0.5, dtype="<f4").tobytes(),
        spans=(VersionSpan(version=0, start=0, end=len(sampled)),),
        reason="deadline",
    )


def failed(call: str) -> CallFailed:
    return CallFailed(execution="e", session="s", call=call, status=500, reason="engine")


def delivered(call: str, yes: bool = True, execution: str = "e", session: str = "s") -> CallDelivered:
    return CallDelivered(execution=execution, session=session, call=call, delivered=yes)


def superseded(call: str, by: str = "later") -> CallSuperseded:
    return CallSuperseded(execution="e", session="s", call=call, by=by)


def call_events(
    execution: str, call: str, base: str, shared: int, context: Sequence[int], sampled: Sequence[int], **other: Any
) -> tuple[Event, ...]:
    session = f"{execution}-s"
    return (
        started(call, base, shared, context, execution=execution, session=session, **other),
        completed(call, sampled, execution=execution, session=session),
        delivered(call, execution=execution, session=session),
    )


def grow(*events: Event) -> Tree:
    grown = Tree("s")
    for event in events:
        grown = tree.evolve(grown, event)
    return grown


def done(
    call: str, base: str, shared: int, context: Sequence[int], sampled: Sequence[int], **other: Any
) -> list[Event]:
    """A call that was started, completed and delivered."""
    return [started(call, base, shared, context, **other), completed(call, sampled), delivered(call)]
