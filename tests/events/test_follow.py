"""Folds in step with a log."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from gyre.events.codec import Recorded, encode
from gyre.events.follow import Follower, Waits
from gyre.events.log import Stored, Writer
from gyre.events.memory import MemoryLog
from gyre.events.subjects import event_subject, is_own_subject
from gyre.events.types import RunResumed
from tests.events.events import envelope, failed, ticking


class SlowLog(MemoryLog):
    async def stored(self, *args: Any, **options: Any) -> AsyncIterator[Stored]:
        async for stored in super().stored(*args, **options):
            await asyncio.sleep(0.001)
            yield stored


def test_a_follower_of_some_aggregates_folds_all_that_was_there_and_only_those_after() -> None:
    async def main() -> None:
        log, seen = SlowLog("r"), list[int]()
        writer = Writer(log, "w", 1, ticking())
        resumed = RunResumed(versions=())
        for event in (failed(1), resumed, failed(2), failed(3)):
            await writer.append(event)
        follower = Follower(log, lambda recorded: seen.append(recorded.seq), only=("run",))
        following = asyncio.create_task(follower.run())
        await follower.catch_up()
        assert seen == [1, 2, 3, 4], "the last one is not of its aggregates, and is there all the same"
        for event in (failed(4), resumed, failed(5)):
            await writer.append(event)
        await follower.catch_up()
        assert seen == [1, 2, 3, 4, 6]
        following.cancel()

    asyncio.run(main())


def test_a_repeat_at_the_end_is_caught_up_with_and_not_folded() -> None:
    async def main() -> None:
        log, seen = MemoryLog("r"), list[Recorded]()
        body = encode(envelope(failed(1)))
        for msg_id in ("a", "b"):
            await log.publish("gyre.r.execution.g0001-0", body, msg_id)
        follower = Follower(log, seen.append)
        following = asyncio.create_task(follower.run())
        async with asyncio.timeout(60):
            await follower.caught_up(await log.last_seq())
        assert [recorded.seq for recorded in seen] == [1]
        following.cancel()

    asyncio.run(main())


def test_a_call_of_an_older_log_stands_among_its_execution_s_other_events() -> None:
    call = failed(1)
    assert event_subject("r", call) == f"gyre.r.call.{call.execution}"
    assert is_own_subject("r", f"gyre.r.execution.{call.execution}", call)
    assert not is_own_subject("r", f"gyre.r.cell.{call.execution}", call)
    assert not is_own_subject("r", "gyre.r.execution.other", call)


def test_who_waits_is_woken_when_the_condition_holds_and_at_no_other_change() -> None:
    async def main() -> None:
        waits, looks, taken, free = Waits(), [0], list[str](), [0]

        def found() -> bool:
            looks[0] += 1
            return free[0] > 0

        async def take(name: str) -> None:
            await waits.wait_for(found)
            free[0] -= 1
            taken.append(name)

        first, second, third = (asyncio.create_task(take(name)) for name in "abc")
        await asyncio.sleep(0)
        waits.notify()
        await asyncio.sleep(0)
        assert (looks[0], taken) == (6, []), "three looks at the start, and one each"
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        free[0] = 1
        waits.notify()
        await second
        await asyncio.sleep(0)
        assert taken == ["b"], "the other was woken too, and found nothing left"
        free[0] = 1
        waits.notify()
        await third
        assert taken == ["b", "c"]

    asyncio.run(main())
