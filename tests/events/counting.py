"""Consumers for tests, one of them for processes that are killed."""

import msgspec

from gyre import consumer
from gyre.events.codec import Recorded
from gyre.events.types import CallFailed, Event


class Count(msgspec.Struct, frozen=True, kw_only=True):
    """What every event adds to, once: a second time would show in either."""

    num: int = 0
    seqs: tuple[int, ...] = ()


@consumer(save_every_s=0.02)
async def counting(event: CallFailed, state: Count, recorded: Recorded) -> Count:
    return Count(num=state.num + 1, seqs=(*state.seqs, recorded.seq))


@consumer(report=lambda state: f"{sum(state.values())} events")
async def by_writer(event: Event, state: dict[str, int], recorded: Recorded) -> dict[str, int]:
    state[recorded.envelope.writer] = state.get(recorded.envelope.writer, 0) + 1
    return state


@consumer()
async def failing(event: CallFailed) -> None:
    if event.call == "s-c7":
        raise KeyError("c7")


async def plain(event: CallFailed) -> None:
    """Not decorated."""
