"""Shell. A consumer that finds agents that repeat themselves: `gyre consume loops RUN_DIR`.

A call repeats when it continues a call whose reply was the same, to the token: the same tool call with the same
arguments, over and over. Counted along the branches of the tree, so sub-agents and retries that run side by side
do not hide a loop, nor make one. Printing is its only effect.
"""

import hashlib

import msgspec

from gyre.events.codec import Recorded
from gyre.events.consumer import consumer
from gyre.events.types import CallCompleted, CallStarted, ExecutionDropped, ExecutionScored

REPEATS = 3
"""Equal replies in a row that make a loop."""
SHOWN = 10


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Of one call: what it said, and how often in a row that has been said."""

    base: str
    """The call that it continues; empty otherwise."""
    digest: str = ""
    """Of its sampled tokens; empty until it is completed."""
    count: int = 0


class Loop(msgspec.Struct, frozen=True, kw_only=True):
    execution: str
    call: str
    """The last of the equal calls."""
    count: int
    seq: int


class Loops(msgspec.Struct, kw_only=True):
    """Changed in place, so that an event costs the same however many calls there are."""

    replies: dict[str, dict[str, Reply]] = {}
    """Execution -> call -> reply, of executions that go on."""
    loops: dict[str, Loop] = {}
    """The longest of each execution."""
    num_calls: int = 0


def found(state: Loops, execution: str, call: str, sampled: bytes, seq: int) -> Loop | None:
    """Count a completed call; the loop that it has just made or doubled."""
    replies = state.replies.setdefault(execution, {})
    here = replies.get(call, Reply(base=""))
    before = replies.get(here.base, Reply(base=""))
    digest = hashlib.sha256(sampled).hexdigest()[:16]
    count = before.count + 1 if before.digest == digest else 1
    replies[call] = Reply(base=here.base, digest=digest, count=count)
    state.num_calls += 1
    if count < REPEATS:
        return None
    loop = Loop(execution=execution, call=call, count=count, seq=seq)
    if execution not in state.loops or state.loops[execution].count < count:
        state.loops[execution] = loop
    times, rest = divmod(count, REPEATS)
    return loop if rest == 0 and times & (times - 1) == 0 else None  # k, 2k, 4k, ...: a long loop is not a flood


def loop_line(loop: Loop) -> str:
    return f"sequence {loop.seq}: {loop.execution} says the same {loop.count} times in a row; last in {loop.call}"


def report(state: Loops) -> str:
    longest = sorted(state.loops.values(), key=lambda loop: (-loop.count, loop.seq))
    lines = [f"{len(longest)} executions with a loop of {REPEATS} or more, in {state.num_calls} calls"]
    lines += [f"  {loop.count:>4} times  {loop.execution}  {loop.call}" for loop in longest[:SHOWN]]
    return "\n".join(lines)


@consumer(report=report)
async def loops(
    event: CallStarted | CallCompleted | ExecutionScored | ExecutionDropped, state: Loops, recorded: Recorded
) -> Loops:
    match event:
        case CallStarted():
            base = event.base if event.rule == "continue" else ""
            state.replies.setdefault(event.execution, {})[event.call] = Reply(base=base)
        case CallCompleted():
            if loop := found(state, event.execution, event.call, event.sampled, recorded.seq):
                print(loop_line(loop), flush=True)
        case _:
            state.replies.pop(event.execution, None)
    return state
