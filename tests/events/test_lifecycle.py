"""What becomes of runs, by the commands: exported, imported, verified, archived, removed; their streams changed."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from gyre.cli import app, main
from gyre.config import encode_config, load_config
from gyre.errors import CodecError, ConfigError, MissingError, SandboxError, StreamError
from gyre.events.access import open_log
from gyre.events.archive import read_header
from gyre.events.jetstream import connect
from gyre.events.lifecycle import held, imported
from gyre.events.log import Stored, Writer
from gyre.events.run_dir import Address, RunDir
from gyre.events.server import Server, start_server
from gyre.events.stream_changes import apply_changes, compare
from gyre.events.streams import load_streams
from gyre.events.types import ConfigChanged, RunFinished, RunStarted
from tests.conftest import NewLog
from tests.events.events import failed, started, ticking

STARTED = RunStarted(run="one", config="{}", config_digest="", seed=1, versions=(), num_threads=1)


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run that has ended, in runs/one below the current directory."""
    monkeypatch.chdir(tmp_path)
    run_dir = RunDir(Path("runs/one"))
    server = start_server(run_dir.nats, sync="default")

    async def fill() -> None:
        log = await connect(server.url, "one", token=server.token, create=load_streams())
        writer = Writer(log, "w", 1, ticking())
        for event in (STARTED, failed(1), started(bytes(300_000)), failed(2), RunFinished(reason="completed")):
            await writer.append(event)
        await log.close()

    asyncio.run(fill())
    server.stop()
    run_dir.save_address(Address(run="one", url=server.url, token=server.token))
    (run_dir.checkpoints / "step-1").mkdir(parents=True)
    return run_dir


def gyre(*args: str) -> str:
    """What a command prints; errors of gyre are raised."""
    done = CliRunner().invoke(app, args)
    if done.exception is not None:
        raise done.exception
    return done.output


def events_of(run_dir: RunDir) -> list[Stored]:
    async def main() -> list[Stored]:
        async with open_log(run_dir) as (log, _):
            return [stored async for stored in log.stored(1, until=await log.last_seq())]

    return asyncio.run(main())


def test_an_archive_takes_the_place_of_a_run_and_brings_it_back(ended: RunDir) -> None:
    before = events_of(ended)
    with pytest.raises(ConfigError, match="Not without --yes; nothing was removed"):
        gyre("runs", "archive", "runs/one", "kept.gyre")
    assert ended.path.exists() and not Path("kept.gyre").exists()
    assert "brings log and tables back" in gyre("runs", "archive", "runs/one", "kept.gyre", "--yes")
    assert not list(Path("runs").iterdir())
    assert "intact: 5 events" in gyre("log", "verify", "kept.gyre")
    assert "5 events" in gyre("log", "import", "kept.gyre", "runs/one")
    assert events_of(ended) == before
    assert "intact: 5 events" in gyre("log", "verify", "runs/one")
    gyre("log", "export", "runs/one", "again.gyre")
    assert read_header(Path("again.gyre")) == read_header(Path("kept.gyre"))
    assert '"num": 5' in gyre("sql", "runs/one", "select count(*) as num from events", "--json").replace(":", ": ")
    assert json.loads(gyre("runs", "--json"))["runs/one"]["state"] == "completed"


def test_brackets_in_an_answer_are_text(ended: RunDir) -> None:
    assert "kept" in gyre("runs", "archive", "runs/one", "kept.gyre", "--yes")
    gyre("log", "import", "kept.gyre", "runs/one")
    printed = gyre("sql", "runs/one", "select 'a [redacted] key' as said, '[/tmp/x]' as \"[b]\"")
    assert "a [redacted] key  [/tmp/x]" in printed and "[b]" in printed


def test_a_run_that_goes_on_is_listed_as_running(ended: RunDir) -> None:
    assert json.loads(gyre("runs", "--json"))["runs/one"]["state"] == "unfinished"
    with ended.lock():
        assert json.loads(gyre("runs", "--json"))["runs/one"]["state"] == "running"
    assert "unfinished" in gyre("runs")


@pytest.mark.parametrize("command", [("replay", "--train"), ("export", "--format", "chat", "out.jsonl")])
def test_a_policy_that_is_not_seen_from_here_is_named(ended: RunDir, command: tuple[str, ...]) -> None:
    with pytest.raises(MissingError, match=r"policies/tiny: no such directory seen from here; .* with --policy"):
        gyre(command[0], "runs/one", *command[1:])


@pytest.mark.parametrize("place", ["kept.gyre/below", "x" * 300, "/proc/it"])
def test_a_place_that_cannot_be_used_is_one_line(
    ended: RunDir, place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("kept.gyre").touch()
    monkeypatch.setattr("sys.argv", ["gyre", "consume", "loops", "runs/one", "--checkpoint", place])
    with pytest.raises(SystemExit) as ended_with:
        main()
    said = capsys.readouterr().err
    assert ended_with.value.code == 1
    assert said.startswith(f"gyre: {place}") or said.startswith("gyre: kept.gyre: ")
    assert said.endswith("; give another path, or make this one usable\n") and said.count("\n") == 1


def test_a_run_that_somebody_holds_is_not_removed(ended: RunDir) -> None:
    with ended.lock(), pytest.raises(ConfigError, match="in use by another run"):
        gyre("runs", "rm", "runs/one", "--yes")
    server = start_server(ended.nats)
    try:
        with pytest.raises(ConfigError, match="its log is being read by another process"):
            gyre("runs", "rm", "runs/one", "--yes")
    finally:
        server.stop()
    with pytest.raises(ConfigError, match=r"remove it for good \(.*\)\? Not without --yes"):
        gyre("runs", "rm", "runs/one")
    assert gyre("runs", "rm", "runs/one", "--yes") == "runs/one: removed\n"
    assert not list(Path("runs").iterdir())
    with pytest.raises(MissingError, match="no run here"), held(ended):
        pass
    assert "no runs in runs/" in gyre("runs")


def test_an_archive_that_is_damaged_takes_no_run_s_place(ended: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    async def bad(log: Any, path: Path) -> Any:
        header = await good(log, path)
        content = bytearray(path.read_bytes())
        content[-20] ^= 4
        path.write_bytes(content)
        return header

    from gyre.events import archive

    good = archive.export_log
    monkeypatch.setattr(archive, "export_log", bad)
    with pytest.raises(ConfigError, match=r"damaged.*; the run directory stays as it is"):
        gyre("runs", "archive", "runs/one", "--yes")
    assert len(events_of(ended)) == 5


def test_an_import_that_fails_leaves_no_run(ended: RunDir) -> None:
    gyre("log", "export", "runs/one", "a.gyre")
    with pytest.raises(ConfigError, match="exists already"):
        gyre("log", "export", "runs/one", "a.gyre")
    with pytest.raises(ConfigError, match="runs/one: not empty"):
        gyre("log", "import", "a.gyre", "runs/one")
    content = bytearray(Path("a.gyre").read_bytes())
    content[-30] ^= 1
    Path("a.gyre").write_bytes(content)

    async def main() -> None:
        async with imported(Path("a.gyre"), RunDir(Path("runs/two"))):
            raise AssertionError("it must not get here")

    with pytest.raises(CodecError, match=r"damaged|altered|truncated"):
        asyncio.run(main())
    assert [path.name for path in Path("runs").iterdir()] == ["one"]


def test_a_damaged_log_is_archived_and_imported_as_it_is(ended: RunDir) -> None:
    async def damage() -> None:
        async with open_log(ended, access="owner") as (log, _):
            await log.publish("gyre.one.run.main", b"no event", "x")

    asyncio.run(damage())
    before = events_of(ended)
    gyre("log", "export", "runs/one", "a.gyre")
    assert "without tables: log one: sequence 6: event body: truncated" in gyre("log", "import", "a.gyre", "runs/two")
    assert events_of(RunDir(Path("runs/two"))) == before
    done = CliRunner().invoke(app, ["log", "verify", "runs/two"])
    assert done.exit_code == 1
    assert done.output.startswith("damaged, first at sequence 6: event body: truncated")
    with pytest.raises(ConfigError, match="the run directory stays as it is"):
        gyre("runs", "archive", "runs/one", "--yes")
    assert ended.path.exists()


def test_a_run_is_graded_again_in_a_sandbox_of_its_own_kind(ended: RunDir) -> None:
    async def change() -> None:
        config = load_config("harness: {sandbox: none}")
        changed = ConfigChanged(config=encode_config(config), config_digest="", changed=("harness.sandbox",))
        async with open_log(ended, access="owner") as (log, _):
            await Writer(log, "v", 1, ticking()).append(changed)

    with pytest.raises(MissingError, match="no snapshot of a workspace's end"):
        gyre("grade", "runs/one")
    asyncio.run(change())
    with pytest.raises(SandboxError, match=r"harness\.sandbox is none"):
        gyre("grade", "runs/one")


def test_consuming_a_run_by_its_command(ended: RunDir) -> None:
    assert "executions: 0 scored" in gyre("consume", "meter", "runs/one", "--no-follow")
    assert gyre("consume", "meter", "runs/one").startswith("meter: goes on after sequence 5")
    assert "goes on" not in gyre("consume", "meter", "runs/one", "--restart")
    assert json.loads(Path("runs/one/consumers/meter.json").read_text())["seq"] == 5


def test_an_import_goes_to_a_server_of_one_s_own_too(
    ended: RunDir, nats_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = events_of(ended)
    gyre("log", "export", "runs/one", "a.gyre")
    monkeypatch.setenv("GYRE_NATS_TOKEN", nats_server.token)
    gyre("log", "import", "a.gyre", "runs/two", "--url", nats_server.url)
    there = RunDir(Path("runs/two"))
    assert events_of(there) == before
    assert not there.nats.exists()
    with pytest.raises(StreamError, match="an import needs an empty stream"):
        gyre("log", "import", "a.gyre", "runs/three", "--url", nats_server.url)
    assert "its streams on" in gyre("runs", "rm", "runs/two", "--yes")


def test_streams_are_planned_and_applied_as_a_whole(jetstream_log: NewLog) -> None:
    async def main() -> None:
        async with jetstream_log() as log:
            streams = load_streams().for_run(log.run)
            assert (await compare(log.wire.api, streams)).lines() == ["streams: as streams.yaml says"]
            lossy = msgspec.structs.replace(
                streams,
                log=msgspec.structs.replace(streams.log, duplicate_window_s=240),
                blobs=msgspec.structs.replace(streams.blobs, max_bytes=4096),
            )
            changes = await compare(log.wire.api, lossy)
            assert [(d.setting, d.allowed) for d in changes.differences] == [
                ("duplicate_window", True),
                ("max_bytes", False),
            ]
            assert "refused: events beyond it would be dropped or refused" in changes.lines()[1]
            with pytest.raises(StreamError, match=r"nothing was changed: .*max_bytes is -1, streams.yaml wants 4096"):
                await apply_changes(log.wire.api, lossy)
            assert not (await compare(log.wire.api, streams)).differences, "the other stream was left alone too"
            wider = msgspec.structs.replace(streams, log=lossy.log)
            assert "changed" in (await apply_changes(log.wire.api, wider)).lines(is_done=True)[0]
            assert not (await compare(log.wire.api, wider)).differences
            gone = msgspec.structs.replace(wider, blobs=msgspec.structs.replace(wider.blobs, name="GYRE-NONE"))
            assert (await compare(log.wire.api, gone)).missing == ("GYRE-NONE",)

    asyncio.run(main())


def test_the_plan_of_a_run_says_how_its_server_syncs(ended: RunDir) -> None:
    assert gyre("streams", "plan", "runs/one").splitlines() == [
        "streams: as streams.yaml says",
        "sync: default, every two minutes: a power loss may take acknowledged events (runs/one/nats/server.conf)",
    ]
    wider = (Path(__file__).parents[2] / "streams.yaml").read_text().replace("window_s: 120", "window_s: 240")
    Path("wider.yaml").write_text(wider)
    assert gyre("streams", "plan", "runs/one", "--file", "wider.yaml").count("can be changed") == 3
    assert gyre("streams", "apply", "runs/one", "--file", "wider.yaml").count("changed") == 3
    with pytest.raises(StreamError, match="sent again late would be stored twice"):
        gyre("streams", "apply", "runs/one")
