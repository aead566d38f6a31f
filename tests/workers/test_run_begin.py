"""How a run begins, and when it does not go on: what the log says against what is asked for now."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from gyre.cli.starting import check_before_start
from gyre.config import (
    CellsConfig,
    Config,
    EngineConfig,
    LogConfig,
    PipelineConfig,
    SchedulerConfig,
    decode_config,
    parse_tree,
)
from gyre.errors import ConfigError
from gyre.events.log import open_writer
from gyre.events.memory import MemoryLog
from gyre.events.types import ConfigChanged, Event, RunFinished, RunResumed, RunStarted, TablesRecorded, Versioned
from gyre.projections.progress import Progress
from gyre.workers.run import begin

SEAL = TablesRecorded(through_seq=1, tables=(), heads=())


def asked(text: str = "") -> Config:
    return parse_tree(text or "seed: 1", Config, "test")


def again(config: Config, *between: Event, version: str = "0.1.0") -> list[Event]:
    """A run that was started with the defaults by gyre 0.1.0, what happened, and then `config`: the log's events."""

    async def main() -> list[Event]:
        log, progress = MemoryLog("r"), Progress()
        writer = await open_writer(log, "supervisor", time.time_ns)
        await begin(log, writer, asked(), {"gyre": "0.1.0"}, progress)
        for event in between:
            await writer.append(event)
        async for recorded in log.read(1, until=await log.last_seq()):
            progress.evolve(recorded)
        await begin(log, writer, config, {"gyre": version}, progress)
        return [r.event async for r in log.read(1, until=await log.last_seq())]

    return asyncio.run(main())


def test_it_goes_on_from_wherever_it_was_killed() -> None:
    assert [type(event) for event in again(asked())] == [RunStarted, RunResumed]
    ends = [RunFinished(reason="interrupted"), RunFinished(reason="failed", detail="x")]
    assert [type(e) for e in again(asked(), ends[0], SEAL)][-1] is RunResumed
    assert [type(e) for e in again(asked(), ends[1])][-1] is RunResumed


def test_a_complete_run_does_not_go_on() -> None:
    with pytest.raises(ConfigError, match="complete; give another --dir"):
        again(asked(), RunFinished(reason="completed"), SEAL)


def test_a_run_that_was_killed_before_its_tables_were_recorded_only_does_that() -> None:
    events = again(asked(), RunFinished(reason="completed"))
    assert [type(event) for event in events] == [RunStarted, RunFinished]


@pytest.mark.parametrize(
    "text",
    [
        "trainer: {learning_rate: 1e-5}",
        "trainer: {keep_checkpoints: 0}",
        "harness: {deadline_s: 5, max_concurrent: 2}",
        "pipeline: {num_steps: 9}",
        "log: {min_free_gb: 0}",
        "gateway: {port: 8123}",
    ],
)
def test_what_may_change_is_an_event(text: str) -> None:
    changed, resumed = again(asked(text))[1:]
    assert isinstance(changed, ConfigChanged) and isinstance(resumed, RunResumed)
    assert decode_config(changed.config) == asked(text)
    assert all(path.partition(".")[0] == text.partition(":")[0] for path in changed.changed)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("seed: 2", "seed"),
        ("tasks: {num_goals: 3}", "tasks.num_goals"),
        ("pipeline: {executions_per_group: 4, num_steps: 9}", "pipeline.executions_per_group"),
        ("trainer: {advantage: zero}", "trainer.advantage"),
        ("policy: {path: other}", "policy.path"),
    ],
)
def test_what_would_make_the_past_untrue_is_refused_by_name(text: str, path: str) -> None:
    with pytest.raises(ConfigError, match=f"run r: {path}: changed since it started"):
        again(asked(text))


def test_a_change_counts_against_the_last_config_not_the_first() -> None:
    faster = asked("trainer: {learning_rate: 1e-5}")
    encoded = msgspec.json.encode(faster).decode()
    change = ConfigChanged(config=encoded, config_digest="", changed=("trainer.learning_rate",))
    assert [type(e) for e in again(faster, change)] == [RunStarted, ConfigChanged, RunResumed]


def test_an_evaluation_goes_on_with_its_checkpoint_and_no_other() -> None:
    async def main(*asked_for: tuple[str, int]) -> Progress:
        log, progress = MemoryLog("r"), Progress()
        writer = await open_writer(log, "supervisor", time.time_ns)
        for policy_of in asked_for:
            await begin(log, writer, asked(), {"gyre": "0.1.0"}, progress, policy_of)
            async for recorded in log.read(progress.num_events + 1, until=await log.last_seq()):
                progress.evolve(recorded)
        return progress

    progress = asyncio.run(main(("trained", 3), ("trained", 3)))
    assert (progress.policy_of, progress.num_events) == (("trained", 3), 2)
    with pytest.raises(ConfigError, match="run r: it evaluates step 3 of trained; ask for that"):
        asyncio.run(main(("trained", 3), ("trained", 4)))


@pytest.mark.parametrize("newer", ["0.1.1", "0.2.0", "0.10.0", "1.0.0rc1"])
def test_a_run_of_a_newer_gyre_is_refused(newer: str) -> None:
    with pytest.raises(ConfigError, match=f"gyre {newer} wrote it last, this is gyre 0.1.0"):
        again(asked(), RunResumed(versions=(Versioned(name="gyre", version=newer),)))


def test_an_older_gyre_is_not() -> None:
    assert isinstance(again(asked(), version="0.2.0")[-1], RunResumed)


def test_a_static_split_without_a_cell_that_serves_is_refused_before_the_start() -> None:
    for count in (1, 2):
        config = Config(cells=CellsConfig(count=count), scheduler=SchedulerConfig(policy="static", num_training=2))
        with pytest.raises(ConfigError, match=f"leaves none of {count} cells to serve"):
            check_before_start(config, True)


def test_a_store_beside_the_run_is_none_for_cells_of_other_hosts() -> None:
    config = Config(
        cells=CellsConfig(count=2, elsewhere=1),
        engine=EngineConfig(kv_store="embedded"),
        log=LogConfig(url="nats://h:1"),
    )
    with pytest.raises(ConfigError, match=r"embedded, but cells\.elsewhere is 1: start a store"):
        check_before_start(config, True)


def test_greedy_executions_are_evaluated_and_not_trained_on() -> None:
    greedy = asked("{sampling: {temperature: 0}, harness: {name: command, command: [x], pauses_s: [1]}}")
    with pytest.raises(ConfigError, match=r"^sampling\.temperature: 0 is greedy: .*; give one above 0"):
        check_before_start(greedy, True)
    evaluation = msgspec.structs.replace(greedy, pipeline=PipelineConfig(num_steps=0))
    with pytest.raises(ConfigError, match=r"^harness\.pauses_s"):  # what is looked at next
        check_before_start(evaluation, True)


def said(text: str, folder: Path) -> str:
    """What `gyre run` says of a config that it refuses; nothing else has come of it."""
    before = sorted(folder.rglob("*"))
    (folder / "run.yaml").write_text(text)
    argv = [sys.executable, "-m", "gyre.cli", "run", "run.yaml"]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, ""), done.stdout + done.stderr
    assert sorted(folder.rglob("*")) == sorted([*before, folder / "run.yaml"])
    return done.stderr


@pytest.mark.stack
def test_a_policy_that_is_torn_is_refused_before_the_start(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tiny_policies import write_tiny_policy

    weights = write_tiny_policy(tmp_path / "policy") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    words = said("policy: {path: policy}", tmp_path)
    assert words.startswith("gyre: policy/model.safetensors: torn") and words.count("\n") == 1


@pytest.mark.stack
def test_a_server_of_ones_own_that_does_not_answer_is_named_before_a_policy_is_made(tmp_path: Path) -> None:
    words = said("log: {url: nats://127.0.0.1:1}", tmp_path)
    assert words.startswith("gyre: nats://127.0.0.1:1: cannot connect: ") and words.count("\n") == 1
