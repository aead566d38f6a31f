"""streams.yaml: read, compared with a server's streams, applied."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gyre.errors import ConfigError, StreamError
from gyre.events.jetstream import connect
from gyre.events.server import Server
from gyre.events.streams import StreamSpec, apply, load_streams, plan
from tests.conftest import NewLog

TEXT = (Path(__file__).parents[2] / "streams.yaml").read_text()


def test_the_installed_file_is_the_one_at_the_top() -> None:
    assert load_streams() == load_streams(TEXT)
    log = load_streams().for_run("r1").log
    assert (log.name, log.subjects) == ("GYRE_r1", ("gyre.r1.>",))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_replicas: 1", "num_replica: 1", r"streams.yaml: log.num_replica: unknown key; did you mean num_replicas"),
        ("num_replicas: 1", "num_replicas: 2", r"streams.yaml: log.num_replicas: Invalid enum value 2"),
        ("blobs:", "blob:", r"streams.yaml: blob: unknown key; did you mean blobs"),
        ("max_age_s: 0", "max_age_s: 60", r"it is the record"),
        ("GYRE_{run}", "GYRE", r"must contain \{run\}"),
        ("log:", "log: 3 #", r"streams.yaml: .*"),
    ],
)
def test_what_cannot_be_meant_is_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_streams(TEXT.replace(old, new, 1))


def test_a_run_name_that_is_no_subject_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="run 'a b'"):
        load_streams().for_run("a b")


def spec(**changes: Any) -> StreamSpec:
    return msgspec.structs.replace(load_streams().for_run("r").log, **changes)


@pytest.mark.parametrize(
    ("live", "wanted", "setting", "allowed"),
    [
        (spec(max_bytes=10), spec(), "max_bytes", True),
        (spec(), spec(max_bytes=10), "max_bytes", False),
        (spec(max_age_s=5), spec(max_age_s=9), "max_age", True),
        (spec(max_age_s=9), spec(max_age_s=5), "max_age", False),
        (spec(discard="old"), spec(), "discard", True),
        (spec(), spec(discard="old"), "discard", False),
        (spec(), spec(num_replicas=3), "num_replicas", True),
        (spec(num_replicas=3), spec(), "num_replicas", False),
        (spec(), spec(storage="memory"), "storage", False),
        (spec(), spec(subjects=("gyre.r.run.>",)), "subjects", False),
        (spec(), spec(subjects=("gyre.r.>", "more.r.>")), "subjects", True),
        (spec(deny_purge=False), spec(), "deny_purge", True),
        (spec(), spec(deny_delete=False), "deny_delete", False),
        (spec(duplicate_window_s=60), spec(), "duplicate_window", True),
    ],
)
def test_a_plan_tells_widening_from_losing(live: StreamSpec, wanted: StreamSpec, setting: str, allowed: bool) -> None:
    (difference,) = plan(wanted, live.to_api())
    assert (difference.setting, difference.allowed) == (setting, allowed)


def test_the_server_holds_what_was_applied(jetstream_log: NewLog) -> None:
    async def main() -> None:
        async with jetstream_log() as log:
            for wanted in (load_streams().for_run(log.run).log, load_streams().for_run(log.run).blobs):
                info = await log.wire.api(f"STREAM.INFO.{wanted.name}", {})
                assert plan(wanted, info["config"]) == ()
                assert await apply(log.wire.api, wanted) == ()

    asyncio.run(main())


def test_a_stream_that_would_lose_events_is_refused_and_a_narrower_one_is_widened(
    nats_server: Server, jetstream_log: NewLog
) -> None:
    async def main() -> None:
        async with jetstream_log() as log:
            kept = load_streams().for_run(log.run).log
            with pytest.raises(StreamError, match=r"max_bytes is -1, streams\.yaml wants 4096; changing it could lose"):
                await apply(log.wire.api, msgspec.structs.replace(kept, max_bytes=4096))
            wider = msgspec.structs.replace(kept, duplicate_window_s=240)
            assert [d.setting for d in await apply(log.wire.api, wider)] == ["duplicate_window"]
            with pytest.raises(StreamError, match="duplicate_window"):
                await connect(nats_server.url, log.run, create=load_streams(), token=nats_server.token)

    asyncio.run(main())
