"""Each role on a real server: what it needs it can do, and what another does it cannot. And TLS."""

import asyncio
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from gyre.config import load_config
from gyre.errors import CodecError, ConfigError, StreamError
from gyre.events.codec import encode
from gyre.events.jetstream import JetStreamLog, connect
from gyre.events.log import Writer, open_writer
from gyre.events.memory import MemoryLog
from gyre.events.permissions import ROLES, ServerRole, may_publish
from gyre.events.server import Server, find_server, start_server
from gyre.events.streams import load_streams
from gyre.events.types import EVENT_TYPES, CallStarted, SwitchRequested
from gyre.events.wire import Outgoing
from tests.events.events import envelope, example, failed, started, ticking

WRITES: dict[ServerRole, tuple[str, ...]] = {
    "gateway": ("call.", "execution.branch_forked", "execution.context_compacted", "cell.sessions_rerouted"),
    "dispatcher": (
        "group.",
        "execution.started",
        "execution.finished",
        "execution.scored",
        "execution.dropped",
        "run.finished",
        "run.admission_",
    ),
    "projector": ("run.tables_recorded",),
    "scheduler": ("scheduler.", "cell.switch_requested", "cell.lost"),
    "cell": (
        "cell.joined",
        "cell.leased",
        "cell.switched",
        "cell.lost",
        "policy.",
        "run.finished",
        "run.process_exited",
    ),
}
"""Types that each process appends, by their beginnings."""
COMMAND = SwitchRequested(cell="c0", role="train", epoch=2, term=1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start_server(tmp_path_factory.mktemp("roles"), sync="default")

    async def make() -> None:
        log = await connect(server.url, "r", token=server.token, create=load_streams())
        await Writer(log, "owner", 1, ticking()).append(started(bytes(300_000)))
        await log.close()

    asyncio.run(make())
    yield server
    server.stop()


def as_role(server: Server, role: ServerRole, work: Callable[[JetStreamLog], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            log = await connect(server.url, "r", token=server.credential(role))
            try:
                await work(log)
            finally:
                await log.close()

    asyncio.run(main())


@pytest.mark.parametrize("role", WRITES)
def test_a_process_appends_its_own_events_and_reads_all(server: Server, role: ServerRole) -> None:
    events = [example(cls) for name, cls in EVENT_TYPES.items() if name.startswith(WRITES[role])]
    if role == "gateway":
        events.append(started(bytes(300_000)))  # the rest of a large one goes to the blobs

    async def work(log: JetStreamLog) -> None:
        writer = await open_writer(log, role, ticking())
        seqs = [await writer.append(event) for event in events]
        recorded = {r.seq: r.event async for r in log.read(until=await log.last_seq())}
        assert [recorded[seq] for seq in seqs] == events
        assert any(isinstance(event, CallStarted) and len(event.context) == 300_000 for event in recorded.values())

    as_role(server, role, work)


@pytest.mark.parametrize("role", [role for role in ROLES if role not in ("owner", "scheduler")])
def test_only_the_scheduler_commands(server: Server, role: ServerRole) -> None:
    async def work(log: JetStreamLog) -> None:
        last = await log.last_seq()
        with pytest.raises(StreamError, match=r"gyre\.r\.scheduler\.main: refused: the role of this credential"):
            await Writer(log, role, 99, ticking()).append(COMMAND)
        assert await log.last_seq() == last

    as_role(server, role, work)


def test_keys_are_of_who_leads_and_of_who_is_there(server: Server) -> None:
    """A cell gives signs of life, and cannot lead; a scheduler listens to them, and cannot give one."""

    async def play() -> None:
        cell, scheduler = [await connect(server.url, "r", token=server.credential(r)) for r in ("cell", "scheduler")]
        try:
            revision = await cell.put_key("alive.c1", b"", expect=0)
            assert await scheduler.get_key("alive.c1") == (b"", revision)
            await scheduler.put_key("scheduler", b"s/1", expect=0)
            for log, key in ((cell, "scheduler"), (scheduler, "alive.c1")):
                with pytest.raises(StreamError, match="may not write there"):
                    await log.put_key(key, b"", expect=(await log.get_key(key))[1])
        finally:
            await cell.close()
            await scheduler.close()

    asyncio.run(play())


def test_a_reader_reads_and_writes_nothing(server: Server) -> None:
    async def work(log: JetStreamLog) -> None:
        last = await log.last_seq()
        assert [r.seq async for r in log.read(until=last)] == list(range(1, last + 1))
        for cls in {cls.aggregate: cls for cls in EVENT_TYPES.values()}.values():
            with pytest.raises(StreamError, match="may not write there"):
                await Writer(log, "reader", 1, ticking()).append(example(cls))
        with pytest.raises(StreamError, match="may not write there"):
            await log.put_object("0" * 64, b"\x00")
        assert await log.last_seq() == last

    as_role(server, "reader", work)


@pytest.mark.parametrize("role", [role for role in ROLES if role != "owner"])
def test_only_the_owner_changes_streams_or_listens_to_others(server: Server, role: ServerRole) -> None:
    async def work(log: JetStreamLog) -> None:
        heard: list[Any] = []
        await log.wire.listen("gyre.>", heard.append)
        names = ("STREAM.CREATE", "STREAM.UPDATE", "STREAM.DELETE", "STREAM.PURGE", "STREAM.MSG.DELETE")
        log.wire.post([Outgoing(f"$JS.API.{name}.{log.stream}", b"{}") for name in names])
        refused = {f"$js.api.{name}.{log.stream}".lower() for name in names}
        while not log.wire.refused >= refused:  # noqa: ASYNC110 - the server tells it when it pleases
            await asyncio.sleep(0.01)
        assert not heard

    as_role(server, role, work)
    assert not any(subject.startswith("$JS.API.STREAM.C") for subject in may_publish(role))


def test_a_reader_cannot_have_an_answer_of_the_server_stored(server: Server) -> None:
    """Whatever it asks, and wherever it wants the answer."""

    async def work(log: JetStreamLog) -> None:
        last = await log.last_seq()
        config = {"deliver_policy": "all", "ack_policy": "none", "mem_storage": True}
        create = f"CONSUMER.CREATE.{log.stream}"
        consumer = (await log.wire.api(create, {"stream_name": log.stream, "config": config}))["name"]
        named, filtered = f"CONSUMER.CREATE.{log.stream}.mine", f"CONSUMER.CREATE.{log.stream}.mine.gyre.r.call.*"
        for subject in ("gyre.r.run.main", "gyre.r.cell.c0", "gyre.r.scheduler.main", "gyre-blob.r.x", "$KV.gyre-r.x"):
            for name, request in (
                (f"STREAM.INFO.{log.stream}", b"{}"),
                (f"STREAM.MSG.GET.{log.stream}", b'{"seq":1}'),
                (f"DIRECT.GET.{log.stream}", b'{"seq":1}'),
                (f"CONSUMER.MSG.NEXT.{log.stream}.{consumer}", b'{"batch":1,"expires":100000000}'),
                (f"DIRECT.GET.GYRE-BLOBS_r.gyre-blob.r.{'0' * 64}", b""),
                (f"CONSUMER.INFO.{log.stream}.{consumer}", b""),
                *((name, b"{}") for name in (create, named, filtered)),
            ):
                log.wire.post([Outgoing(f"$JS.API.{name}", request, subject)])
            pushed = config | {"deliver_subject": subject}
            answer = await log.wire.api(create, {"stream_name": log.stream, "config": pushed})
            assert "cycle" in answer.get("error", {}).get("description", "") or not subject.startswith("gyre.")
            request = {"stream_name": log.stream, "config": pushed | {"name": "pushed"}, "action": ""}
            answer = await log.wire.api(f"CONSUMER.CREATE.{log.stream}.pushed", request)
            assert "error" in answer or not subject.startswith("gyre.")
        assert await log.last_seq() == last
        for stream in ("GYRE-BLOBS_r", "KV_gyre-r"):
            found = await log.wire.api(f"STREAM.INFO.{stream}", {})
            assert all(name not in found["state"] for name in ("subjects", "x"))
            assert found["state"]["messages"] == num[stream]

    num: dict[str, int] = {}

    async def count(log: JetStreamLog) -> None:
        for stream in ("GYRE-BLOBS_r", "KV_gyre-r"):
            num[stream] = (await log.wire.api(f"STREAM.INFO.{stream}", {}))["state"]["messages"]

    as_role(server, "reader", count)
    as_role(server, "reader", work)


def test_streams_of_before_there_were_accounts_are_found(tmp_path: Path) -> None:
    """They are in the account without a name, in which everybody stays then."""
    server = start_server(tmp_path, sync="default")
    server.stop()
    (tmp_path / "store/jetstream/$G").mkdir(parents=True)
    server.start()

    async def work(log: JetStreamLog) -> None:
        assert [recorded.event async for recorded in log.read(until=1)] == [failed(1)]

    async def make() -> None:
        log = await connect(server.url, "r", token=server.token, create=load_streams())
        await Writer(log, "w", 1, ticking()).append(failed(1))
        await log.close()

    try:
        asyncio.run(make())
        assert (tmp_path / "store/jetstream/$G/streams/GYRE_r").is_dir()
        server.restart()
        as_role(server, "reader", work)
    finally:
        server.stop()


def test_a_request_that_is_not_allowed_is_named(server: Server) -> None:
    async def work(log: JetStreamLog) -> None:
        with pytest.raises(StreamError, match=r"STREAM\.PURGE\.GYRE_r: the role of this credential may not ask it"):
            await log.wire.api("STREAM.PURGE.GYRE_r", {})

    as_role(server, "reader", work)


def test_an_event_on_a_subject_that_is_not_its_own_is_refused_by_readers(server: Server) -> None:
    """A gateway may write on the subjects of cells, but no reader takes a command from there."""

    async def both(log: MemoryLog | JetStreamLog) -> None:
        item = envelope(COMMAND, writer="gateway", incarnation=7)
        ack = await log.publish("gyre.r2.cell.c0", encode(item), item.id)
        with pytest.raises(CodecError, match=r"sequence 1: cell\.switch_requested\.v1 stands on gyre\.r2\.cell\.c0"):
            async for _ in log.read(until=ack.seq):
                pass

    async def main() -> None:
        await both(MemoryLog("r2"))
        owner = await connect(server.url, "r2", token=server.token, create=load_streams())
        gateway = await connect(server.url, "r2", token=server.credential("gateway"))
        await both(gateway)
        await gateway.close()
        await owner.close()

    asyncio.run(main())


def test_what_is_of_a_server_of_one_s_own_wants_its_url(tmp_path: Path) -> None:
    for line in ("num_replicas: 3", "tls_ca: ca.pem", "credentials: me.creds"):
        with pytest.raises(ConfigError, match=rf"log: log\.{line.partition(':')[0]}: of a server of your own"):
            load_config(f"log: {{{line}}}")
        assert load_config(f"log: {{url: 'nats://h:4222', {line}}}").log.url

    async def main() -> None:
        with pytest.raises(ConfigError, match=r"log\.tls_ca: .*none: .*give a PEM file"):
            await connect("tls://127.0.0.1:1", "r", tls_ca=tmp_path / "none")
        with pytest.raises(ConfigError, match=r"log\.credentials: .*none: no such file"):
            await connect("nats://127.0.0.1:1", "r", credentials=tmp_path / "none")

    asyncio.run(main())


def test_over_tls_the_server_s_certificate_is_checked(tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=gyre"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(["openssl", "req", *made, *names], check=True, capture_output=True)
    ports = tmp_path / "ports"
    ports.mkdir()
    config = tmp_path / "server.conf"
    config.write_text(
        'listen: "127.0.0.1:-1"\n'
        f'ports_file_dir: "{ports}"\n'
        f'jetstream {{ store_dir: "{tmp_path / "store"}" }}\n'
        f'authorization {{ token: "secret" }}\ntls {{ cert_file: "{cert}", key_file: "{key}" }}\n'
    )

    async def main(url: str) -> None:
        log = await connect(url, "r", token="secret", tls_ca=cert, create=load_streams())
        assert await Writer(log, "w", 1, ticking()).append(failed(1)) == 1
        assert [r.event async for r in log.read(until=1)] == [failed(1)]
        await log.close()
        with pytest.raises(StreamError, match=r"cannot connect: .*certificate"):
            await connect(url, "r", token="secret", timeout_s=60)

    async def port() -> str:
        async with asyncio.timeout(60):
            while not (found := [*ports.glob("*.ports")]) or not found[0].read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return str(found[0].read_text())

    with subprocess.Popen([find_server(), "-c", config], stderr=subprocess.DEVNULL) as child:
        try:
            text = asyncio.run(port())
            asyncio.run(main(text.partition('"nats":["')[2].partition('"')[0].replace("nats://", "tls://")))
        finally:
            child.terminate()
