"""The log into DuckDB as one would write it first: fetch messages, insert their rows as a batch, acknowledge each.

What `gyre bench log` compares its own way to. Decoding, fold and tables are gyre's, and rows go in as Arrow batches, so
what differs is how messages come in, and that nothing goes on while rows are written. Prints the seconds.

    python benchmarks/fetch_rows.py URL USER:PASSWORD RUN NUM_EVENTS FILE
"""

import asyncio
import sys
import time
from typing import Any

import nats

from gyre.events.memory import recorded_from
from gyre.events.streams import load_streams
from gyre.projections.store import Store
from gyre.projections.tables import Tables

FETCH = 500


async def main(url: str, token: str, run: str, num: int, path: str) -> float:
    user, password = token.split(":", 1)
    client = await nats.connect(url, user=user, password=password)
    stream = load_streams().for_run(run).log
    subscription = await client.jetstream().pull_subscribe(stream.subjects[0], durable="rows", stream=stream.name)
    tables, done = Tables(), 0
    begun = time.perf_counter()
    with Store(path) as store:
        while done < num:
            messages: list[Any] = await subscription.fetch(min(FETCH, num - done), timeout=10)
            for message in messages:
                seq = message.metadata.sequence.stream
                tables.evolve(recorded_from(run, seq, message.subject, message.data))
            store.apply(tables.take(), tables.seq)
            for message in messages:
                await message.ack()
            done += len(messages)
        seconds = time.perf_counter() - begun
    await client.close()
    return seconds


if __name__ == "__main__":
    print(asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])))
