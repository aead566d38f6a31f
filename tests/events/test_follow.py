"""Folds in step with a log."""

import asyncio

from gyre.events.codec import Recorded, encode
from gyre.events.follow import Follower
from gyre.events.memory import MemoryLog
from tests.events.events import envelope, failed


def test_a_repeat_at_the_end_is_caught_up_with_and_not_folded() -> None:
    async def main() -> None:
        log, seen = MemoryLog("r"), list[Recorded]()
        body = encode(envelope(failed(1)))
        for msg_id in ("a", "b"):
            await log.publish("gyre.r.execution.g0001-0", body, msg_id)
        follower = Follower(log, seen.append)
        following = asyncio.create_task(follower.run())
        async with asyncio.timeout(10):
            await follower.caught_up(await log.last_seq())
        assert [recorded.seq for recorded in seen] == [1]
        following.cancel()

    asyncio.run(main())
