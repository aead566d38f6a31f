"""Shell. Runs a consumer over a log: events -> state -> checkpoint.

Invariant: each event is in the state exactly once, wherever the process is killed: the checkpoint holds a
state and its sequence, and what is not in it yet is applied again to that state. Effects outside the
state happen at least once: those since the last save are repeated.
The log is only read, over a connection of its own: an error here is this process's alone.
"""

import asyncio
import contextlib
import inspect
import traceback
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from gyre.errors import ConfigError, ConsumerError
from gyre.events.checkpoint import Checkpoint, Saved
from gyre.events.codec import Recorded, UnknownEvent, body_digest, decode
from gyre.events.consumer import Consumer, Start, parse_start
from gyre.events.follow import QUIET_S, is_run_finished
from gyre.events.log import Log
from gyre.events.memory import recorded_from
from gyre.events.order import WriterOrder
from gyre.events.types import event_type
from gyre.events.user_code import load_object

TICK_S = 1.0
REPORT_S = 10.0
"""A consumer that follows a run prints its report so often, when there is something new."""


def find_consumer(name: str, known: Mapping[str, str]) -> Consumer[...]:
    """`module:function`, `file.py:function`, or a short name in `known`. Raises MissingError, ConfigError."""
    full = known.get(name, name)
    if ":" not in full:
        raise ConfigError(f"consumer {name!r}: give module:function or file.py:function, or one of {', '.join(known)}")
    found = load_object(full, "consumer")
    if isinstance(found, Consumer):
        return found
    raise ConfigError(f"consumer {name}: {full.rpartition(':')[2]} is no consumer: decorate it with @gyre.consumer()")


async def start_seq(log: Log, start: Start) -> int:
    """The first sequence to consume. A time is sought by bisection over the recorded times: the writers' clocks
    differ, and so may the place by as much."""
    at, last = parse_start(start), await log.last_seq()
    if at is None:
        return last + 1
    if not isinstance(at, datetime):
        return at
    time_ns = int(at.timestamp() * 1e9)
    low, high = 1, last + 1
    while low < high:
        middle = (low + high) // 2
        if decode(await log.body(middle)).time_ns < time_ns:
            low = middle + 1
        else:
            high = middle
    return low


async def consume(
    consumer: Consumer[...],
    log: Log,
    checkpoint: Checkpoint,
    *,
    start: Start | None = None,
    follow: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Any:
    """Apply what the log holds after the checkpoint; with `follow`, until the run is over. Returns the state.

    Consumes the log; produces the checkpoint; waits for events. Raises ConsumerError for an event on which the
    function fails: the state of before it is saved, and the next start begins with it.
    """
    progress = await _resume(consumer, log, checkpoint, consumer.start if start is None else start, say)
    last = await log.last_seq()
    try:
        if follow:
            await _follow(progress, log, say)
        elif progress.seq < last:
            await _read(progress, log, last)
    except asyncio.CancelledError:
        say(progress.report())
        raise
    finally:
        progress.save()
    for gap in progress.order.gaps():
        say(f"log {log.run}: not there: {gap}")
    return progress.state


async def _read(progress: "_Progress", log: Log, until: int | None) -> None:
    async for stored in log.stored(progress.seq + 1, until=until):
        await progress.apply(recorded_from(log.run, stored.seq, stored.subject, stored.body))


async def _follow(progress: "_Progress", log: Log, say: Callable[[str], None]) -> None:
    """Until the run has finished and says no more. What is consumed is saved and reported also when no more comes."""
    clock = asyncio.get_running_loop().time
    reading = asyncio.create_task(_read(progress, log, None))
    seq = reported_seq = progress.seq
    grown_at = reported_at = clock()
    try:
        while not reading.done():
            await asyncio.wait({reading}, timeout=TICK_S)
            if progress.is_busy or reading.done():
                continue
            progress.save()
            if progress.seq != seq:
                seq, grown_at = progress.seq, clock()
            elif progress.finished and clock() - grown_at > QUIET_S:
                break
            if clock() - reported_at > REPORT_S and seq != reported_seq:
                reported_seq, reported_at = seq, clock()
                say(progress.report())
    finally:
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading


class _Progress:
    """State and sequence, which change together; saved between events only."""

    def __init__(self, consumer: Consumer[...], checkpoint: Checkpoint, saved: Saved, state: Any) -> None:
        self.consumer, self.checkpoint = consumer, checkpoint
        self.state = state
        self.seq = saved.seq
        self.finished = False
        self.is_busy = False
        """The function is at work on an event."""
        self._is_whole = True
        """The state is that of `seq`: not half changed by a function that failed."""
        self._saved = saved
        self._digest = saved.digest
        self.order = WriterOrder.resumed(saved.seen, from_start=saved.from_start)
        self._clock = asyncio.get_running_loop().time
        self._saved_at = self._clock()

    async def apply(self, recorded: Recorded) -> None:
        event = recorded.event
        self.finished = is_run_finished(self.finished, event)
        if self.consumer.wants(event) and not self.order.has(recorded.envelope):
            self.is_busy, self._is_whole = True, self.consumer.keeps_old_state
            try:
                self.state = await self.consumer.apply(self.state, recorded)
            except Exception as error:
                raise self._failed(recorded, error) from error
            self.is_busy, self._is_whole = False, True
        self.order.place(recorded.envelope, recorded.seq)
        self.seq, self._digest = recorded.seq, recorded.digest
        if self._clock() - self._saved_at >= self.consumer.save_every_s:
            self.save()

    def save(self) -> None:
        """Nothing while the state may be half changed: then the last save holds."""
        self._saved_at = self._clock()
        if not self._is_whole or self.seq == self._saved.seq:
            return
        try:
            state = msgspec.Raw(msgspec.json.encode(self.state))
        except (TypeError, ValueError) as error:
            raise ConsumerError(f"consumer {self.consumer.name}: its state cannot be written: {error}") from None
        self._saved = msgspec.structs.replace(
            self._saved, seq=self.seq, digest=self._digest, seen=self.order.seen, state=state
        )
        self.checkpoint.save(self._saved)

    def report(self) -> str:
        return self.consumer.report(self.state) if self.consumer.report else ""

    def _failed(self, recorded: Recorded, error: Exception) -> ConsumerError:
        event, function = recorded.event, self.consumer.function
        name = event.name if isinstance(event, UnknownEvent) else event_type(event)
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if frame.filename == inspect.getfile(function)] or frames
        next_seq = (self.seq if self._is_whole else self._saved.seq) + 1
        return ConsumerError(
            f"consumer {self.consumer.name}: sequence {recorded.seq} ({name}): {type(error).__name__}: {error} "
            f"({Path(own[-1].filename).name}, line {own[-1].lineno}); the next start begins at sequence {next_seq}"
        )


async def _resume(
    consumer: Consumer[...], log: Log, checkpoint: Checkpoint, start: Start, say: Callable[[str], None]
) -> _Progress:
    saved = checkpoint.load()
    if saved is None:
        seq, last = await start_seq(log, start) - 1, await log.last_seq()
        digest = body_digest(await log.body(seq)) if 1 <= seq <= last else ""
        raw = msgspec.Raw(b"null")
        saved = Saved(
            consumer=consumer.name, run=log.run, seq=seq, digest=digest, from_start=seq == 0, seen=(), state=raw
        )
        progress = _Progress(consumer, checkpoint, saved, consumer.initial())
        if digest:  # where `now` was is known from now on, whatever happens to this process
            checkpoint.save(msgspec.structs.replace(saved, state=msgspec.Raw(msgspec.json.encode(progress.state))))
        return progress
    await _check(saved, consumer, log, checkpoint)
    say(f"{consumer.name}: goes on after sequence {saved.seq}")
    try:
        state = msgspec.json.decode(saved.state, type=consumer.state_type)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{checkpoint.path}: its state is not one of {consumer.name} as it is now: {error}; --restart begins again"
        ) from None
    return _Progress(consumer, checkpoint, saved, state)


async def _check(saved: Saved, consumer: Consumer[...], log: Log, checkpoint: Checkpoint) -> None:
    """Another log may have taken the place of the one that the checkpoint is of."""
    if (saved.consumer, saved.run) != (consumer.name, log.run):
        raise ConfigError(
            f"{checkpoint.path}: it is of consumer {saved.consumer} over run {saved.run}; give another --checkpoint"
        )
    if await log.last_seq() < saved.seq or body_digest(await log.body(saved.seq)) != saved.digest:
        raise ConfigError(
            f"{checkpoint.path}: the log of run {log.run} holds another event at sequence {saved.seq} than the one "
            "that was consumed: it is another log; --restart begins again"
        )
