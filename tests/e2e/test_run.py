"""The whole loop with everything real: SGLang, Megatron-Core, Mooncake, JetStream, DuckDB, bubblewrap, a harness."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from gyre.workers.supervisor import MAX_DEATHS

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

CONFIG = """
seed: 3
harness: {{name: {harness}, deadline_s: 60, max_turns: 3, max_concurrent: 4}}
policy: {{path: policy, warm_start: false}}
sampling: {{max_tokens: 24}}
pipeline: {{num_steps: {steps}, groups_per_step: 2, executions_per_group: 2}}
trainer: {{weight_decay: 0.1}}  # a random policy scores 0: only the decay moves its weights
evaluation: {{num_tasks: 1, temperatures: [0.0]}}
log: {{min_free_gb: 0}}
"""


def gyre(*args: str, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "gyre.cli", *args], cwd=cwd, capture_output=True, text=True, timeout=500, check=False
    )
    assert not check or done.returncode == 0, f"gyre {' '.join(args)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


def rows(directory: Path, run: str, query: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in gyre("sql", run, query, "--json", cwd=directory).stdout.splitlines()]


def processes_of(directory: Path) -> list[str]:
    """Command lines of every process that was started for this directory."""
    return [
        " ".join(process.info["cmdline"] or [])
        for process in psutil.process_iter(["cmdline", "cwd"])
        if process.info["cwd"] == str(directory)
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with one complete run of two steps through the reference harness."""
    directory = tmp_path_factory.mktemp("gyre")
    (directory / "quick.yaml").write_text(CONFIG.format(harness="reference", steps=2))
    done = gyre("run", "quick.yaml", "--dir", "runs/quick", cwd=directory, check=False)
    logs = "\n".join(f"--- {p.name}\n{p.read_text()[-2000:]}" for p in (directory / "runs/quick/logs").glob("*.log"))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
    (directory / "printed.txt").write_text(done.stdout)
    yield directory
    deadline = time.monotonic() + 60  # of a supervisor that a test killed they end themselves
    while processes_of(directory) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(directory) == []


def test_a_run_ends_by_itself_with_a_summary_and_what_to_type_next(finished: Path) -> None:
    printed = (finished / "printed.txt").read_text()
    assert "rollout" in printed, "a log line a phase"
    assert "training" in printed
    for word in ("calls", "tokens", "trees", "events", "switches", "steps", "scores", "next:"):
        assert word in printed
    summary = json.loads((finished / "runs/quick/summary.json").read_text())
    assert summary["state"] == "completed"
    assert summary["steps"] == summary["version"] == 2
    assert summary["executions"]["scored"] == 2 * 2 * 2 + 2
    assert summary["switches"] == 5, "into rollout at the start, then there and back in each step"
    assert json.loads(gyre("runs", "--json", cwd=finished).stdout)["runs/quick"] == summary


def test_no_call_is_aborted_and_no_execution_fails_by_switches_and_weight_updates(finished: Path) -> None:
    summary = json.loads((finished / "runs/quick/summary.json").read_text())
    assert summary["calls"]["started"] == summary["calls"]["completed"] > 0
    assert summary["calls"]["cut"] == summary["calls"]["failed"] == 0
    assert summary["executions"]["dropped"] == {}
    assert summary["switches_rolled_back"] == 0


def test_sql_agrees_with_the_summary(finished: Path) -> None:
    summary = json.loads((finished / "runs/quick/summary.json").read_text())
    assert rows(finished, "runs/quick", "select count(*) as n from calls") == [{"n": summary["calls"]["started"]}]
    assert rows(finished, "runs/quick", "select count(*) as n from steps") == [{"n": 2}]
    refused = gyre("sql", "runs/quick", "drop table calls", cwd=finished, check=False)
    assert refused.returncode == 1
    assert len(refused.stderr.strip().splitlines()) == 1


def test_every_sampled_token_knows_its_version_and_weights_travelled_verified(finished: Path) -> None:
    lines = gyre("tail", "runs/quick", "--no-follow", "--type", "cell.weights_pulled", cwd=finished).stdout
    assert "version=1" in lines
    assert "version=2" in lines
    digests = {line.split("digest=")[1].split()[0] for line in lines.splitlines()}
    published = gyre("tail", "runs/quick", "--no-follow", "--type", "policy.published", cwd=finished).stdout
    assert all(digest in published for digest in digests)


def test_the_tree_of_an_execution_is_drawn(finished: Path) -> None:
    assert "g00000-0" in gyre("tree", "runs/quick", "g00000-0", cwd=finished).stdout


def test_replay_verifies_and_names_what_was_rebuilt(finished: Path) -> None:
    assert gyre("replay", "runs/quick", "--verify", cwd=finished).returncode == 0


def test_the_recorded_steps_are_taken_again_to_the_recorded_weights(finished: Path) -> None:
    printed = gyre("replay", "runs/quick", "--verify", "--train", cwd=finished).stdout
    digests = rows(finished, "runs/quick", "select step, weights_digest as w from steps order by step")
    for row in digests:
        assert f"step {row['step']}: weights {str(row['w'])[:12]} as recorded" in printed
    assert printed.endswith("same weights as recorded: 2 steps\n")


def test_a_breach_pauses_the_run_which_goes_on_with_another_config(finished: Path) -> None:
    plain = CONFIG.format(harness="reference", steps=1)
    (finished / "strict.yaml").write_text(plain + "guards: {min_entropy: 50}\n")
    (finished / "plain.yaml").write_text(plain)
    paused = gyre("run", "strict.yaml", "--dir", "runs/paused", cwd=finished, check=False)
    assert paused.returncode == 3
    assert "paused" in paused.stdout and "below guards.min_entropy 50" in paused.stdout
    assert "completed" in gyre("run", "plain.yaml", "--dir", "runs/paused", cwd=finished).stdout
    assert rows(finished, "runs/paused", "select count(*) as n from rejections") == [{"n": 1}]
    groups = "select rejected, count(*) as n from groups where purpose = 'train' group by rejected order by rejected"
    assert [row["n"] for row in rows(finished, "runs/paused", groups)] == [2, 2]
    assert gyre("replay", "runs/paused", "--verify", "--train", cwd=finished).returncode == 0


def test_a_complete_run_does_not_go_on(finished: Path) -> None:
    again = gyre("run", "quick.yaml", "--dir", "runs/quick", cwd=finished, check=False)
    assert again.returncode == 1
    assert "complete" in again.stderr


def test_the_trained_policy_is_exported_and_differs_from_the_first(finished: Path) -> None:
    gyre("policy", "export", "runs/quick", "out", cwd=finished)
    assert {p.name for p in (finished / "out").iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    first, last = finished / "policy/model.safetensors", finished / "out/model.safetensors"
    assert first.stat().st_size == last.stat().st_size
    assert first.read_bytes() != last.read_bytes()
    before = first.read_bytes()
    refused = gyre("policy", "export", "runs/quick", "policy", cwd=finished, check=False)
    assert "policy: exists already" in refused.stderr
    assert first.read_bytes() == before, "what the run began with is still there"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_stops_cleanly_and_goes_on(finished: Path, how: signal.Signals) -> None:
    name = f"runs/{how.name.lower()}"
    (finished / "long.yaml").write_text(CONFIG.format(harness="reference", steps=2))
    process = subprocess.Popen(
        [sys.executable, "-m", "gyre.cli", "run", "long.yaml", "--dir", name],
        cwd=finished, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    while not (finished / name / "workspaces").exists():
        assert process.poll() is None
        time.sleep(0.2)
    process.send_signal(how)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 130, printed
    assert "interrupted" in printed
    assert f"--dir {name}" in printed, "it says how to go on"
    done = gyre("run", "long.yaml", "--dir", name, cwd=finished)
    assert "completed" in done.stdout
    summary = json.loads((finished / name / "summary.json").read_text())
    assert summary["steps"] == 2
    assert gyre("replay", name, "--verify", cwd=finished).returncode == 0


BAD = """
case $1 in
  *-0-*) echo no such model >&2; exit 3;;
  *-1-*) sleep 600;;
  *-2-*) head -c 100000 /dev/urandom;;
  *) exec python3 -c "
import sys, urllib.request as u
for body in (b'no JSON', b'[]', b'{}', bytes(range(256))):
    try:
        u.urlopen(u.Request(sys.argv[1] + '/chat/completions', data=body))
    except Exception as error:
        print(error)
" "$1";;
esac
"""


def test_harnesses_that_exit_at_once_hang_or_speak_rubbish_are_recorded_and_the_run_goes_on(finished: Path) -> None:
    config = {
        "seed": 3,
        "harness": {"name": "command", "command": ["sh", "-c", BAD, "sh", "{base_url}"], "deadline_s": 12},
        "policy": {"path": "policy", "warm_start": False},
        "pipeline": {"num_steps": 1, "groups_per_step": 1, "executions_per_group": 4},
        "log": {"min_free_gb": 0},
    }
    (finished / "bad.yaml").write_text(json.dumps(config))
    printed = gyre("run", "bad.yaml", "--dir", "runs/bad", cwd=finished).stdout
    assert "4 scored, 1 timed out, 1 with a harness that failed, 0 dropped" in printed
    query = "select slot, finished, exit_code, detail, score from executions order by slot"
    found = rows(finished, "runs/bad", query)
    assert [row["finished"] for row in found] == ["harness_failed", "timed_out", "completed", "completed"]
    assert (found[0]["exit_code"], "no such model" in str(found[0]["detail"])) == (3, True)
    assert {row["score"] for row in found} == {0.0}, "of the workspace that it left"
    assert rows(finished, "runs/bad", "select count(*) as n from calls") == [{"n": 0}]
    assert "no such model" in gyre("tree", "runs/bad", "g00000-0", cwd=finished).stdout


def test_a_run_that_is_stopped_while_its_policy_is_made_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "new.yaml").write_text("seed: 3\n")
    process = subprocess.Popen([sys.executable, "-m", "gyre.cli", "run", "new.yaml"], cwd=tmp_path)
    while not any("policy init" in line for line in processes_of(tmp_path)):
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    process.wait(60)
    deadline = time.monotonic() + 60
    while processes_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of(tmp_path) == []


def kill_gateways(directory: Path, name: str, num_kills: int) -> tuple[int, str]:
    """A run whose gateway is killed again and again; its exit code and what it printed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gyre.cli", "run", "quick.yaml", "--dir", name],
        cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    killed = set[int]()
    while len(killed) < num_kills and process.poll() is None:
        time.sleep(0.1)
        for child in psutil.Process(process.pid).children():
            with suppress(psutil.NoSuchProcess):
                if child.pid not in killed and child.status() != psutil.STATUS_ZOMBIE and "gateway" in child.cmdline():
                    child.kill()
                    killed.add(child.pid)
    printed, _ = process.communicate(timeout=300)
    assert len(killed) == num_kills, printed
    return process.returncode, printed


def test_a_process_that_dies_is_started_again_and_the_run_completes(finished: Path) -> None:
    code, printed = kill_gateways(finished, "runs/killed", 1)
    assert (code, "completed" in printed) == (0, True), printed
    exits = gyre("tail", "runs/killed", "--no-follow", "--type", "run.process_exited", cwd=finished).stdout
    assert len([line for line in exits.splitlines() if "process=gateway " in line]) == 1
    summary = json.loads((finished / "runs/killed/summary.json").read_text())
    assert summary["executions"]["dropped"] == {}, "the harnesses asked again"
    assert gyre("replay", "runs/killed", "--verify", cwd=finished).returncode == 0


def test_a_process_that_keeps_dying_ends_the_run_with_its_reason(finished: Path) -> None:
    code, printed = kill_gateways(finished, "runs/dying", MAX_DEATHS)
    assert code == 1
    assert "gateway ended with code -9" in printed
    assert json.loads((finished / "runs/dying/summary.json").read_text())["state"] == "failed"
    assert "in use" not in gyre("run", "quick.yaml", "--dir", "runs/dying", cwd=finished).stderr, "it goes on"


def test_a_run_of_another_config_or_in_use_is_refused_in_one_line(finished: Path) -> None:
    (finished / "other.yaml").write_text((finished / "quick.yaml").read_text().replace("seed: 3", "seed: 4"))
    fresh = subprocess.Popen(
        [sys.executable, "-m", "gyre.cli", "run", "quick.yaml", "--dir", "runs/used"],
        cwd=finished, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while not (finished / "runs/used/logs/gateway.log").exists():
        assert fresh.poll() is None
        time.sleep(0.1)
    used = gyre("run", "quick.yaml", "--dir", "runs/used", cwd=finished, check=False)
    fresh.kill()  # the supervisor alone: its processes end themselves
    fresh.wait()
    changed = gyre("run", "other.yaml", "--dir", "runs/used", cwd=finished, check=False)
    for refused, reason in ((used, f"in use by another run (process {fresh.pid})"), (changed, "seed: changed since")):
        assert refused.returncode == 1
        assert reason in refused.stderr
        assert len(refused.stderr.strip().splitlines()) == 1


def test_mini_swe_agent_runs_unmodified(finished: Path) -> None:
    gyre("harness", "install", "mini-swe-agent", cwd=finished)  # does nothing when it is there
    (finished / "mini.yaml").write_text(CONFIG.format(harness="mini-swe-agent", steps=1))
    gyre("run", "mini.yaml", "--dir", "runs/mini", cwd=finished)
    summary = json.loads((finished / "runs/mini/summary.json").read_text())
    assert summary["state"] == "completed"
    assert summary["executions"]["scored"] == 2 * 2 + 2
    assert summary["calls"]["completed"] >= summary["executions"]["scored"]
    assert summary["calls"]["failed"] == summary["calls"]["cut"] == 0
