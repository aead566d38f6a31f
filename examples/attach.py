"""Sampled tokens a minute by role class, of a run that is going on, without gyre: only nats-py is needed.

    pip install nats-py
    python attach.py runs/quickstart

It is short so that it can be written again in another language; docs/log.md ("Without gyre") says what it reads.
"""

import asyncio
import json
import sys
from pathlib import Path

import nats
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy


async def events(connection, run):
    """(sequence, header, tail) of every event, in order, each once; for ever."""
    stream = connection.jetstream()
    config = ConsumerConfig(deliver_policy=DeliverPolicy.ALL, ack_policy=AckPolicy.NONE, inactive_threshold=300)
    pull = await stream.pull_subscribe(f"gyre.{run}.>", stream=f"GYRE_{run}", config=config)
    seen, due = set(), 1
    while True:
        try:
            messages = await pull.fetch(500, timeout=5)
        except TimeoutError:
            continue
        for message in messages:
            if (seq := message.metadata.sequence.stream) != due:
                raise SystemExit(f"sequence {seq} came where {due} was due: begin again at {due}")
            due += 1
            body = await whole(stream, run, message.data)
            end = 4 + int.from_bytes(body[:4], "big")
            header = json.loads(body[4:end])
            if header["id"] not in seen:  # a late retry may store an event twice; a long run wants less memory
                seen.add(header["id"])
                yield seq, header, body[end:]


async def whole(stream, run, stored):
    """The body of an event whose end lies in the blobs."""
    if stored[0] < 0x80:
        return stored
    kept = 4 + (int.from_bytes(stored[:4], "big") & 0x7FFFFFFF)
    root = await blob(stream, run, stored[kept:].decode())
    if root[0] == 0:
        return stored[4:kept] + root[1:]
    names = [root[at : at + 32].hex() for at in range(1, len(root), 32)]
    return stored[4:kept] + b"".join([(await blob(stream, run, name))[1:] for name in names])


async def blob(stream, run, name):
    return (await stream.get_last_msg(f"GYRE-BLOBS_{run}", f"gyre-blob.{run}.{name}")).data


async def main(run_dir):
    address = json.loads((run_dir / "run.json").read_text())
    user, _, password = address["reader"].partition(":")
    connection = await nats.connect(address["url"], user=user, password=password)
    classes, counts = {}, {}
    async for seq, header, _ in events(connection, address["run"]):
        kind, payload = header["type"], header["payload"]
        if kind == "call.started.v1":
            classes[payload["call"]] = payload["role_class"]
        elif kind in ("call.completed.v1", "call.cut.v1"):
            key = header["time_ns"] // 60_000_000_000, classes.pop(payload["call"])
            counts[key] = counts.get(key, 0) + payload["sampled"] // 4  # int32 ids: the header has the number of bytes
        elif kind == "execution.dropped.v1":
            print(f"{seq} {payload['execution']} was dropped: {payload['reason']}", file=sys.stderr)
        elif kind == "run.finished.v1":
            for (minute, role_class), count in sorted(counts.items()):
                print(minute, role_class, count)
            break
    await connection.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
