"""What is done to the log while it is written and read: one coroutine a fault, the rest of its choices by the seed.

A fault waits for its time (so many acknowledged events), strikes, and mends what it broke. It notes what it did.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from tests.chaos import proxy
from tests.chaos.log_work import LOG_AWAY
from tests.chaos.namespaces import plug, unplug

if TYPE_CHECKING:
    from tests.chaos.log_driver import Seed


class Fault(NamedTuple):
    strike: "Callable[[Seed], Awaitable[None]]"
    needs: str = "server"
    """server, proxy (before it), disk (a small one under it) or cluster."""


async def nothing(seed: "Seed") -> None:
    """An undisturbed run, for comparison."""


async def kill_server(seed: "Seed") -> None:
    for share in seed.shares(seed.rng.randint(1, 3)):
        await seed.acked(share)
        await seed.server_up()
        seed.server.kill()
        seed.note("killed")


async def kill_publisher(seed: "Seed") -> None:
    for share in seed.shares(seed.rng.randint(1, 4)):
        await seed.acked(share)
        seed.kill("publish")


async def kill_projector(seed: "Seed") -> None:
    for share in seed.shares(seed.rng.randint(1, 4)):
        await seed.acked(share)
        await asyncio.sleep(seed.rng.uniform(0, 0.1))
        seed.kill("project")


async def kill_projector_in_commit(seed: "Seed") -> None:
    """It kills itself at a place in a transaction, which nobody else could hit. See `log_work.project`."""


async def kill_leader(seed: "Seed") -> None:
    await seed.acked(seed.shares(1)[0])
    leader = await seed.leader()
    seed.cluster.servers[leader].kill()
    await asyncio.sleep(seed.rng.uniform(0, 3))
    seed.cluster.servers[leader].start()
    seed.note(f"killed {leader}")


async def kill_all_three(seed: "Seed") -> None:
    await seed.acked(seed.shares(1)[0])
    servers = list(seed.cluster.servers.values())
    seed.rng.shuffle(servers)
    for server in servers:
        server.kill()
        await asyncio.sleep(seed.rng.choice((0, 0, 0.05)))
    await asyncio.sleep(seed.rng.uniform(0, 0.5))
    for server in servers:
        server.start()
    seed.note("killed three")


async def partition(seed: "Seed") -> None:
    """One host is cut off: the leader's, or any."""
    await seed.acked(seed.shares(1)[0])
    name = await seed.leader() if seed.rng.random() < 0.6 else seed.rng.choice(list(seed.cluster.servers))
    unplug(name)
    try:
        if seed.rng.random() < 0.5:
            await asyncio.sleep(seed.rng.uniform(0.5, 8))
            seed.note(f"cut off {name}")
        else:
            await seed.is_published()
            seed.note(f"cut off {name} for good")
    finally:
        plug(name)


async def full_disk(seed: "Seed") -> None:
    assert seed.disk is not None
    await seed.acked(seed.shares(1)[0])
    seed.disk.fill()
    await seed.is_still()
    seed.disk.empty()
    seed.note("filled the disk")


async def clock_jump(seed: "Seed") -> None:
    """The publishers' clocks jump all the time. See `log_work.publish`."""
    seed.note("clocks jumped")


def bad_acks(what: Callable[..., None]) -> "Callable[[Seed], Awaitable[None]]":
    async def strike(seed: "Seed") -> None:
        seed.proxy.on_ack = what
        await seed.is_published()
        seed.note(f"{seed.proxy.num_touched} acks")

    return strike


async def late_sends(seed: "Seed") -> None:
    """Sends come again when the server has forgotten them (its window for that is short here), as they may when its
    clock jumps ahead: so the log holds events twice."""
    seed.proxy.repeat_after_s = 1.5
    await seed.is_published()
    await asyncio.sleep(2 * seed.proxy.repeat_after_s)
    seed.note(f"{seed.proxy.num_touched} sends")


async def torn_connections(seed: "Seed") -> None:
    for share in seed.shares(seed.rng.randint(1, 5)):
        await seed.acked(share)
        seed.proxy.tear()
        seed.note("torn")


async def slow_consumer(seed: "Seed") -> None:
    """The projector stops for a while, or what it is sent is not taken, until the server gives it up."""
    for share in seed.shares(seed.rng.randint(1, 2)):
        await seed.acked(share)
        if seed.rng.random() < 0.5:
            seed.send("project-0", signal.SIGSTOP)
            await asyncio.sleep(seed.rng.uniform(*proxy.STALL_S))
            seed.send("project-0", signal.SIGCONT)
        else:
            await seed.proxy.stall(seed.rng.uniform(*proxy.STALL_S))
        seed.note("stalled")


FAULTS: Mapping[str, Fault] = {
    "none": Fault(nothing),
    "kill server": Fault(kill_server),
    "kill publisher": Fault(kill_publisher),
    "kill projector": Fault(kill_projector),
    "kill projector in commit": Fault(kill_projector_in_commit),
    "kill leader": Fault(kill_leader, "cluster"),
    "kill all three": Fault(kill_all_three, "cluster"),
    "partition": Fault(partition, "cluster"),
    "full disk": Fault(full_disk, "disk"),
    "clock jump": Fault(clock_jump),
    "lost acks": Fault(bad_acks(proxy.lose), "proxy"),
    "double acks": Fault(bad_acks(proxy.double), "proxy"),
    "reordered acks": Fault(bad_acks(proxy.reorder), "proxy"),
    "late sends": Fault(late_sends, "proxy"),
    "torn connections": Fault(torn_connections, "proxy"),
    "slow consumer": Fault(slow_consumer, "proxy"),
}
RESTARTABLE = (-signal.SIGKILL, LOG_AWAY)
