"""Pure. Logs for the tests of scheduler, roles and cells: events with sequences, and a cluster that plays along."""

from collections.abc import Callable, Iterable
from typing import Any

from gyre.config import Config, PipelineConfig
from gyre.events.codec import Envelope, Recorded
from gyre.events.subjects import event_subject
from gyre.events.types import (
    CellFenced,
    CellJoined,
    CellLeased,
    CellSwitched,
    CohortConsumed,
    EngineReleased,
    Event,
    ExecutionScored,
    ExecutionStarted,
    GroupDispatched,
    PolicyPublished,
    SessionsRerouted,
    StepCompleted,
    WeightsPulled,
)

Fold = Callable[[Any, Recorded], Any]


def record(seq: int, event: Event, cause: int = 0) -> Recorded:
    envelope = Envelope(writer="t", incarnation=1, writer_seq=seq, prev="", time_ns=0, cause=cause, event=event)
    return Recorded(seq=seq, subject=event_subject("r", event), digest="", envelope=envelope)


def records(events: Iterable[Event]) -> list[Recorded]:
    return [record(seq, event) for seq, event in enumerate(events, 1)]


def fold(evolve: Fold, state: Any, log: Iterable[Recorded]) -> Any:
    for recorded in log:
        state = evolve(state, recorded)
    return state


def small_config(**pipeline: int) -> Config:
    sizes = {"num_steps": 3, "groups_per_step": 1, "executions_per_group": 2} | pipeline
    return Config(pipeline=PipelineConfig(**sizes))


def joined(cell: str = "c0", index: int = 0, capacity: int = 4) -> CellJoined:
    return CellJoined(cell=cell, index=index, capacity=capacity, engine_url="http://127.0.0.1:1", model_digest="m")


def published(version: int) -> PolicyPublished:
    return PolicyPublished(version=version, digest=f"d{version}", num_bytes=4, checkpoint="")


def arrival(cell: str, epoch: int, version: int) -> tuple[Event, ...]:
    """A whole way into rollout."""
    return (
        CellLeased(cell=cell, role="rollout", epoch=epoch),
        WeightsPulled(cell=cell, epoch=epoch, version=version, digest=f"d{version}", num_bytes=4, phases=()),
        CellSwitched(cell=cell, role="rollout", epoch=epoch, version=version, phases=()),
    )


def departure(cell: str, epoch: int, version: int) -> tuple[Event, ...]:
    """A whole way into training."""
    return (
        CellLeased(cell=cell, role="train", epoch=epoch),
        CellFenced(cell=cell, epoch=epoch),
        SessionsRerouted(cell=cell, epoch=epoch, num_sessions=0, num_calls_moved=0),
        EngineReleased(cell=cell, epoch=epoch, seconds=0.1),
        CellSwitched(cell=cell, role="train", epoch=epoch, version=version, phases=()),
    )


def dispatched(index: int, num_slots: int, version: int) -> GroupDispatched:
    return GroupDispatched(
        group=f"g{index:04}", index=index, purpose="train", task="t", task_digest="", task_index=0,
        num_slots=num_slots, policy_version=version, temperature=1.0,
    )  # fmt: skip


def execution(group: int, slot: int) -> str:
    return f"g{group:04}-{slot}"


def started(group: int, slot: int) -> ExecutionStarted:
    return ExecutionStarted(
        execution=execution(group, slot), group=f"g{group:04}", slot=slot, attempt=0, harness="h", sandbox="none",
        deadline_s=1.0,
    )  # fmt: skip


def scored(group: int, slot: int) -> ExecutionScored:
    return ExecutionScored(execution=execution(group, slot), score=1.0, parts=(), wall_s=0.1)


def whole_group(index: int, num_slots: int, version: int) -> tuple[Event, ...]:
    slots = range(num_slots)
    return (
        dispatched(index, num_slots, version),
        *(started(index, slot) for slot in slots),
        *(scored(index, slot) for slot in slots),
    )


def consumed(step: int, groups: tuple[int, ...]) -> CohortConsumed:
    return CohortConsumed(step=step, groups=tuple(f"g{g:04}" for g in groups), executions=(), digest="", through_seq=0)


def completed(step: int) -> StepCompleted:
    return StepCompleted(
        step=step, weights_digest=f"d{step}", loss=0.0, grad_norm=0.0, entropy=0.0, clip_fraction=0.0,
        logprob_gap_mean=0.0, logprob_gap_max=0.0, kl=0.0, staleness_mean=0.0, staleness_max=0,
        learning_rate=0.0, score_mean=0.0, num_tokens=0, num_targets=0, phases=(),
    )  # fmt: skip
