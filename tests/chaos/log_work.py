"""The processes of `make chaos` for the log alone: what a publisher publishes, and a projector that may be killed.

Events -> log, acknowledgements -> a file that outlives the process; log -> tables. Invariants: what a seed publishes
is fixed, but for the order of what does not depend on each other; a publisher that starts again goes on where the log
is, as the processes of a run do.
"""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import msgspec

from gyre.errors import StreamError
from gyre.events import types as e
from gyre.events import window
from gyre.events.jetstream import connect
from gyre.events.log import Writer, open_writer
from gyre.events.tokens import pack_ids, pack_logprobs
from gyre.projections import projector, store
from tests.chaos.namespaces import join_host

NUM_PUBLISHERS = 2
GROUPS, SLOTS, TURNS = 3, 3, 3
LOG_AWAY = 3
"""Exit code of a process whose log stayed away: it is started again."""

Chain = tuple[e.Event, ...]
"""Each is published after the acknowledgement of the one before it."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is told."""

    seed: int
    number: int
    url: str
    run: str
    credential: str
    directory: Path
    patience_s: float = 90.0
    min_batch: int = window.MIN_BATCH
    """Of sends that go out as one."""
    clock_jump_s: float = 0.0
    """By how much the publisher's clock goes back and forth."""
    die_at: tuple[int, int, float] | None = None
    """Of a projector: transaction, table in it (or all: at the commit), and seconds after that."""
    weight: int = 1
    """See `chains`."""
    host: str = ""

    @property
    def acks(self) -> Path:
        return self.directory / f"acks-{self.number}"


def chains(seed: int, number: int, weight: int = 1) -> tuple[Chain, ...]:
    """First the groups, then each of their executions; contexts are so many times as long."""
    rng = Random(f"{seed} {number}")
    names = [f"p{number}g{index}" for index in range(GROUPS)]
    groups = [
        e.GroupDispatched(
            group=name,
            index=index,
            purpose="train",
            task=f"task-{index}",
            task_digest="t",
            task_index=index,
            num_slots=SLOTS,
            policy_version=0,
            temperature=1.0,
        )
        for index, name in enumerate(names)
    ]
    return tuple(groups), *(tuple(_execution(name, slot, rng, weight)) for name in names for slot in range(SLOTS))


def _execution(group: str, slot: int, rng: Random, weight: int) -> Iterator[e.Event]:
    execution, session = f"{group}-{slot}", f"{group}-{slot}-s"
    yield e.ExecutionStarted(
        execution=execution, group=group, slot=slot, attempt=0, harness="reference", sandbox="none", deadline_s=9.0
    )
    yield e.SessionOpened(execution=execution, session=session, temperature=1.0, top_p=1.0)
    base, end = "", 0
    where = {"execution": execution, "session": session}
    for turn in range(TURNS):
        call = f"{session}-c{turn}"
        # Now and then a body whose end goes to the blobs.
        num = 20_000 if rng.random() < 0.05 else rng.randint(2, 2000) * weight
        sampled = rng.randint(1, 40)
        yield e.CallStarted(
            call=call,
            base=base,
            shared=end,
            context=pack_ids(range(num)),
            role_class="main",
            rule="continue" if base else "root",
            marks=(),
            temperature=1.0,
            top_p=1.0,
            max_tokens=64,
            cell="c0",
            **where,
        )
        if rng.random() < 0.1:
            yield e.CallFailed(call=call, status=500, reason="engine", **where)
            break
        yield e.CallCompleted(
            call=call,
            sampled=pack_ids(range(sampled)),
            logprobs=pack_logprobs([-0.5] * sampled),
            spans=(e.VersionSpan(version=0, start=0, end=sampled),),
            finish="stop",
            reply="d",
            num_prompt_tokens=num,
            num_cached_tokens=0,
            num_retries=0,
            engine_s=0.25,
            **where,
        )
        yield e.CallDelivered(call=call, delivered=True, **where)
        base, end = call, end + num + sampled
    yield e.ExecutionFinished(execution=execution, reason="completed", exit_code=0, wall_s=2.0, detail="")
    yield e.ExecutionScored(execution=execution, score=slot / 4, parts=(e.Part(name="p", passed=slot > 0),), wall_s=0.5)


def facts(chain: Chain) -> Iterator[Chain]:
    """What is published at once: an execution's end with its score, and else each event by itself."""
    for event in chain:
        if not isinstance(event, e.ExecutionScored):
            yield (event,) if not isinstance(event, e.ExecutionFinished) else chain[chain.index(event) :]


def name_of(event: e.Event) -> str:
    """Two events that a publisher publishes have different ones."""
    fields = msgspec.structs.asdict(event)
    own = [str(fields[name]) for name in ("group", "execution", "call") if name in fields]
    return " ".join([e.event_type(event), *own])


async def publish(work: Work) -> None:
    window.ACK_TIMEOUT_S = 0.4
    window.BACKOFF_S = 0.02
    window.MIN_BATCH = work.min_batch
    log = await connect(work.url, work.run, token=work.credential, timeout_s=work.patience_s)
    log.window._patience_s = work.patience_s
    clock_s = asyncio.get_running_loop().time
    rng, clock = Random(f"pace {work.seed} {work.number} {os.getpid()}"), _clock(work)
    done = {
        name_of(recorded.event)
        async for recorded in log.read(until=await log.last_seq())
        if recorded.envelope.writer == _name(work)
    }
    writer = await open_writer(log, _name(work), clock)
    acks = os.open(work.acks, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    async def follow(chain: Chain) -> None:
        for fact in facts(chain):
            if rest := [event for event in fact if name_of(event) not in done]:
                first = await writer.append_all(rest) - len(rest) + 1
                lines = [f"{seq} {name_of(event)}\n" for seq, event in enumerate(rest, first)]
                os.write(acks, "".join(lines).encode())
                # Those that wake together send together.
                await asyncio.sleep(0.04 - clock_s() % 0.04 + rng.choice((0, 0, 0.04)))

    groups, *executions = chains(work.seed, work.number, work.weight)
    await follow(groups)
    async with asyncio.TaskGroup() as tasks:
        for chain in executions:
            tasks.create_task(follow(chain))
    await log.close()


def _name(work: Work) -> str:
    return f"publisher{work.number}"


def _clock(work: Work) -> Callable[[], int]:
    rng = Random(f"clock {work.seed}")

    def now() -> int:
        jump = rng.uniform(-work.clock_jump_s, work.clock_jump_s) if rng.random() < 0.2 else 0.0
        return time.time_ns() + int(jump * 1e9)

    return now


async def project(work: Work) -> None:
    projector.QUIET_S, projector.MIN_WAIT_S, projector.MAX_SHARE = 0.2, 0.03, 0.5
    if work.die_at is not None:
        _arm(*work.die_at)
    log = await connect(work.url, work.run, token=work.credential, timeout_s=work.patience_s)
    log.window._patience_s = work.patience_s
    writer: Writer = await open_writer(log, "projector", time.time_ns)
    await projector.run_projector(log, writer, run_dir=work.directory)
    await log.close()


def _arm(transaction: int, table: int, delay_s: float) -> None:
    """This process is killed in its n-th transaction: before a table's rows, or so long after the last ones that it is
    at the commit."""
    apply, upsert, seen = store.Store.apply, store._upsert, [0, 0]

    def counted(self: store.Store, changes: dict, through_seq: int) -> None:
        seen[0] += 1
        seen[1] = 0
        apply(self, changes, through_seq)

    def armed(schema: object) -> str:
        seen[1] += 1
        if seen[0] >= transaction and seen[1] >= table:
            if not delay_s:
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return upsert(schema)  # type: ignore[arg-type]

    store.Store.apply, store._upsert = counted, armed  # type: ignore[method-assign, assignment]


def main(what: str, work: Work) -> None:
    """The process; forked, so that it starts at once."""
    log = os.open(work.directory / f"{what}-{work.number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if work.host:
        join_host(work.host)
    try:
        asyncio.run({"publish": publish, "project": project}[what](work))
    except BaseExceptionGroup as group:
        if group.split(StreamError)[1] is not None:
            raise
        print(group.exceptions[0], flush=True)
        sys.exit(LOG_AWAY)
    except StreamError as error:
        print(error, flush=True)
        sys.exit(LOG_AWAY)
