"""Pure. The events of a run that goes on for ever, in the mix that runs of the quickstart have: to fill logs with.

A step is 8 groups of 8 executions of 3 calls each, and all that cell, scheduler and trainer say of it; every table gets
rows. Invariant: equal counts give equal events, and what the fold holds does not grow with them: each step consumes and
completes what it dispatched. Direction: number of events -> (writer, event).
"""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from gyre.config import Config, PipelineConfig, config_digest, encode_config
from gyre.events import types as e

NUM_GROUPS, NUM_SLOTS, NUM_CALLS = 8, 8, 3
DIGEST = "0123456789abcdef0123456789abcdef"
CONFIG = Config(pipeline=PipelineConfig(groups_per_step=NUM_GROUPS, executions_per_group=NUM_SLOTS))

Written = tuple[str, e.Event]


def run_events(num: int) -> Iterator[Written]:
    """The first `num - 1` events, and the end of the run."""
    yield from islice(_run(), num - 1)
    yield "supervisor", e.RunFinished(reason="completed")


def call_completed(call: str, num_tokens: int, execution: str = "g000001-3") -> e.CallCompleted:
    tokens = np.arange(num_tokens, dtype="<i4").tobytes()
    return e.CallCompleted(
        execution=execution,
        session=f"{execution}-s",
        call=call,
        sampled=tokens,
        logprobs=np.full(num_tokens, -0.5, dtype="<f4").tobytes(),
        spans=(e.VersionSpan(version=3, start=0, end=num_tokens),),
        finish="stop",
        reply=DIGEST,
        num_prompt_tokens=1234,
        num_cached_tokens=1000,
        num_retries=0,
        engine_s=0.125,
    )


def _run() -> Iterator[Written]:
    text = encode_config(CONFIG)
    yield (
        "supervisor",
        e.RunStarted(run="r", config=text, config_digest=config_digest(CONFIG), seed=1, versions=(), num_threads=2),
    )
    yield "cell", e.CellJoined(cell="c0", index=0, capacity=64, engine_url="http://127.0.0.1:1", model_digest=DIGEST)
    yield "cell", e.CellLeased(cell="c0", role="rollout", epoch=1)
    yield "cell", e.CellSwitched(cell="c0", role="rollout", epoch=1, version=0, phases=(_phase("load"),))
    yield "scheduler", e.TermStarted(term=1)
    step = 0
    while True:
        step += 1
        groups = tuple(f"g{step:06}-{index}" for index in range(NUM_GROUPS))
        for index, group in enumerate(groups):
            yield from _group(group, (step - 1) * NUM_GROUPS + index, step - 1)
        yield from _step(step, groups)


def _phase(name: str) -> e.Phase:
    return e.Phase(name=name, seconds=0.25)


def _group(group: str, index: int, version: int) -> Iterator[Written]:
    yield (
        "dispatcher",
        e.GroupDispatched(
            group=group,
            index=index,
            purpose="train",
            task=f"files-{index}",
            task_digest=DIGEST,
            task_index=index,
            num_slots=NUM_SLOTS,
            policy_version=version,
            temperature=1.0,
        ),
    )
    executions = [f"{group}-{slot}" for slot in range(NUM_SLOTS)]
    for slot, execution in enumerate(executions):
        yield (
            "dispatcher",
            e.ExecutionStarted(
                execution=execution,
                group=group,
                slot=slot,
                attempt=0,
                harness="reference",
                sandbox="bubblewrap",
                deadline_s=60.0,
            ),
        )
        yield (
            "dispatcher",
            e.SessionOpened(execution=execution, session=f"{execution}-s", temperature=1.0, top_p=1.0),
        )
    for number in range(NUM_CALLS):  # the executions go on side by side
        for slot, execution in enumerate(executions):
            yield from _call(execution, number, 20 + 5 * slot)
    for slot, execution in enumerate(executions):
        finished = e.ExecutionFinished(execution=execution, reason="completed", exit_code=0, wall_s=2.5, detail="")
        yield "dispatcher", finished
        parts = (e.Part(name="exists", passed=True), e.Part(name="equal", passed=slot % 2 == 0))
        yield "dispatcher", e.ExecutionScored(execution=execution, score=0.5 + slot % 2 / 2, parts=parts, wall_s=0.25)


def _call(execution: str, number: int, num_tokens: int) -> Iterator[Written]:
    session, call = f"{execution}-s", f"{execution}-s-c{number}"
    base = f"{execution}-s-c{number - 1}" if number else ""
    shared = number * 3 * num_tokens
    yield (
        "gateway",
        e.CallStarted(
            execution=execution,
            session=session,
            call=call,
            base=base,
            shared=shared,
            context=np.arange(2 * num_tokens, dtype="<i4").tobytes(),
            role_class="main",
            rule="continue" if number else "root",
            marks=(e.Mark(digest=DIGEST, end=shared + num_tokens), e.Mark(digest=DIGEST, end=shared + 2 * num_tokens)),
            temperature=1.0,
            top_p=1.0,
            max_tokens=64,
            cell="c0",
        ),
    )
    yield "gateway", call_completed(call, num_tokens, execution)
    yield "gateway", e.CallDelivered(execution=execution, session=session, call=call, delivered=True)


def _step(step: int, groups: tuple[str, ...]) -> Iterator[Written]:
    epoch, version = 2 * step, step - 1
    yield "scheduler", e.Ticked(term=1, now_s=float(step))
    yield (
        "scheduler",
        e.Decided(
            term=1,
            policy="waterlevel",
            cell="c0",
            role="train",
            epoch=epoch,
            waterlevel=0,
            capacity=64,
            cell_capacity=64,
            reason=f"{NUM_GROUPS} groups are ready",
            inputs_digest=DIGEST,
        ),
    )
    yield "scheduler", e.SwitchRequested(cell="c0", role="train", epoch=epoch, term=1)
    yield "cell", e.CellLeased(cell="c0", role="train", epoch=epoch)
    yield "cell", e.CellFenced(cell="c0", epoch=epoch)
    yield "gateway", e.SessionsRerouted(cell="c0", epoch=epoch, num_sessions=0, num_calls_moved=0)
    yield "cell", e.EngineReleased(cell="c0", epoch=epoch, seconds=0.25)
    yield "cell", e.CellSwitched(cell="c0", role="train", epoch=epoch, version=version, phases=(_phase("drain"),))
    executions = tuple(f"{group}-{slot}" for group in groups for slot in range(NUM_SLOTS))
    yield (
        "trainer",
        e.CohortConsumed(step=step, groups=groups, executions=executions, digest=DIGEST, through_seq=0),
    )
    yield (
        "trainer",
        e.BatchAssembled(
            step=step,
            digest=DIGEST,
            through_seq=0,
            seed=1,
            num_executions=64,
            num_trajectories=64,
            num_tokens=20000,
            num_targets=7000,
            num_microsteps=4,
        ),
    )
    for microstep in range(4):
        yield "trainer", e.MicrostepClaimed(step=step, microstep=microstep, cell="c0", epoch=epoch)
        yield "trainer", e.MicrostepAccepted(step=step, microstep=microstep, cell="c0", epoch=epoch, loss_sum=0.25)
    yield (
        "trainer",
        e.StepCompleted(
            step=step,
            weights_digest=DIGEST,
            loss=0.1,
            grad_norm=0.5,
            entropy=0.3,
            clip_fraction=0.0,
            logprob_gap_mean=0.01,
            logprob_gap_max=0.5,
            kl=0.001,
            staleness_mean=1.0,
            staleness_max=1,
            learning_rate=5e-4,
            score_mean=0.75,
            num_tokens=20000,
            num_targets=7000,
            phases=(_phase("forward"), _phase("update")),
        ),
    )
    yield "trainer", e.PolicyPublished(version=step, digest=DIGEST, num_bytes=1 << 20, checkpoint=f"step-{step}")
    yield "cell", e.CellLeased(cell="c0", role="rollout", epoch=epoch + 1)
    pulled = (_phase("pull"),)
    yield (
        "cell",
        e.WeightsPulled(cell="c0", epoch=epoch + 1, version=step, digest=DIGEST, num_bytes=1 << 20, phases=pulled),
    )
    yield "cell", e.CellSwitched(cell="c0", role="rollout", epoch=epoch + 1, version=step, phases=(_phase("load"),))
