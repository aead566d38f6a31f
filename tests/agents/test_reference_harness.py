"""The reference harness as a process, against a small HTTP server that plays the gateway."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gyre.agents import reference_harness
from gyre.agents.reference_harness import (
    PURPOSE_HEADER,
    SUBMIT,
    SUMMARY_REQUEST,
    TOOLS,
    answer,
    first_messages,
    observation,
    read_stream,
)

HARNESS = Path(reference_harness.__file__)


def call(arguments: str, name: str = "bash", call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def command(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [call(json.dumps({"command": text}))]}


DONE = {"role": "assistant", "content": "Done."}


def as_stream(message: dict[str, Any]) -> bytes:
    """Server-sent events with the tool call's arguments cut in two."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": message.get("content")}]
    for index, tool_call in enumerate(message.get("tool_calls", [])):
        text = tool_call["function"]["arguments"]
        head = {**tool_call, "index": index, "function": {"name": "bash", "arguments": text[:5]}}
        deltas += [{"tool_calls": [head]}, {"tool_calls": [{"index": index, "function": {"arguments": text[5:]}}]}]
    events = [json.dumps({"choices": [{"index": 0, "delta": delta}]}) for delta in deltas]
    return "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode()


@contextmanager
def gateway(replies: list[Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Answers with each reply in turn: a message, or (status, body), or None to hang up."""
    requests: list[dict[str, Any]] = []
    remaining = iter(replies)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            requests.append({"path": self.path, "class": self.headers.get(PURPOSE_HEADER, ""), **body})
            reply = next(remaining)
            if reply is None:
                self.connection.close()
                return
            if isinstance(reply, dict):
                whole = {"choices": [{"index": 0, "message": reply, "finish_reason": "stop"}]}
                reply = (200, as_stream(reply) if body["stream"] else json.dumps(whole).encode())
            status, payload = reply
            self.send_response(status)
            self.send_header("content-length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/s/abc/v1", requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run_harness(url: str, workspace: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", "-S", str(HARNESS)],
        env={"PATH": "/usr/bin:/bin", "OPENAI_BASE_URL": url, "GYRE_TASK": "Do this:\n1. Write a to b", **environ},
        cwd=workspace,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("stream", ["0", "1"])
def test_runs_commands_until_a_reply_without_tool_call(tmp_path: Path, stream: str) -> None:
    with gateway([command("echo hello > b; echo said"), command("cat nothing"), DONE]) as (url, requests):
        done = run_harness(url, tmp_path, GYRE_STREAM=stream)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "b").read_text() == "hello\n"
    assert [request["path"] for request in requests] == ["/s/abc/v1/chat/completions"] * 3
    assert requests[0]["messages"] == first_messages("Do this:\n1. Write a to b")
    assert requests[0]["tools"] == TOOLS
    last = requests[-1]["messages"]
    assert last[: len(requests[1]["messages"])] == requests[1]["messages"], "the history only grows"
    assert last[1] == command("echo hello > b; echo said"), "a reply is sent back as it came"
    assert last[2] == {"role": "tool", "tool_call_id": "c1", "content": "rc=0\nsaid"}
    assert last[4]["content"].startswith("rc=1\ncat: ")


def test_a_team_hands_lines_to_sub_agents_and_goes_on_from_its_summary(tmp_path: Path) -> None:
    replies = [
        command("1. Write a to b"),
        command("echo a > b"),
        DONE,
        command("2. Delete c"),
        command("rm c"),
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": "3. Rename d to e"},
        command("mv d e"),
        {"role": "assistant", "content": "Nothing."},
    ]
    (tmp_path / "c").touch()
    (tmp_path / "d").touch()
    with gateway(replies) as (url, requests):
        done = run_harness(url, tmp_path, GYRE_TEAM="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "e"]
    messages = [request["messages"] for request in requests]
    assert messages[1] == first_messages("Do this:\n1. Write a to b"), "a sub-agent knows its line and nothing else"
    assert messages[3][1:] == [replies[0], {"role": "tool", "tool_call_id": "c1", "content": "Done."}]
    assert messages[6] == [
        *messages[3],
        replies[3],
        {"role": "tool", "tool_call_id": "c1", "content": ""},
        {"role": "user", "content": SUMMARY_REQUEST},
    ]
    assert messages[7] == first_messages("Do this:\n3. Rename d to e")
    classes = [request["class"] for request in requests]
    assert classes == ["", "subagent", "subagent", "", "subagent", "subagent", "compaction", "", ""]


def test_a_team_ends_with_a_summary_that_leaves_nothing(tmp_path: Path) -> None:
    with gateway([command("true"), command("true"), DONE]) as (url, requests):
        assert run_harness(url, tmp_path, GYRE_TEAM="1").returncode == 0
    assert requests[-1]["messages"][-1] == {"role": "user", "content": SUMMARY_REQUEST}


def test_without_a_team_a_line_is_a_command_like_any_other(tmp_path: Path) -> None:
    with gateway([command("1. Delete c"), DONE]) as (url, requests):
        assert run_harness(url, tmp_path).returncode == 0
    assert requests[-1]["messages"][-1]["content"].startswith("rc=127")


def test_submitting_ends_the_run(tmp_path: Path) -> None:
    with gateway([command(SUBMIT)]) as (url, requests):
        assert run_harness(url, tmp_path).returncode == 0
    assert len(requests) == 1


def test_stops_after_the_last_turn(tmp_path: Path) -> None:
    with gateway([command("true")] * 3) as (url, requests):
        assert run_harness(url, tmp_path, GYRE_MAX_TURNS="3").returncode == 0
    assert len(requests) == 3


def test_waits_out_a_gateway_that_fails_or_hangs_up(tmp_path: Path) -> None:
    cut = (200, b'data: {"choices": []}\n\n')
    with gateway([(503, b"switching"), None, (429, b""), cut, DONE]) as (url, requests):
        assert run_harness(url, tmp_path, GYRE_STREAM="1").returncode == 0
    assert len(requests) == 5
    assert all(request == requests[0] for request in requests), "a retry is the same request"


def test_gives_up_on_a_gateway_that_stays_away(tmp_path: Path) -> None:
    with gateway([DONE]) as (url, _):
        port = int(url.split(":")[2].split("/")[0])
    started = time.monotonic()
    done = run_harness(f"http://127.0.0.1:{port}/v1", tmp_path, GYRE_RETRY_S="1")
    assert done.returncode == 3
    assert "no answer" in done.stderr
    assert 0.3 < time.monotonic() - started < 40


def test_a_refused_call_is_not_repeated(tmp_path: Path) -> None:
    with gateway([(403, b"no such session")]) as (url, requests):
        done = run_harness(url, tmp_path)
    assert done.returncode == 2
    assert "403 no such session" in done.stderr
    assert len(requests) == 1


def test_an_incomplete_environment_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(HARNESS)], env={}, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 4
    assert "OPENAI_BASE_URL and GYRE_TASK must be set" in done.stderr


@pytest.mark.parametrize("arguments", ["{", "", "[]", "null", '"ls"', '{"cmd": "ls"}', '{"command": 3}'])
def test_malformed_arguments_are_answered(arguments: str) -> None:
    content, submitted = answer(call(arguments), 5)
    assert content.startswith("error: ")
    assert not submitted


def test_other_oddities_are_answered() -> None:
    assert answer(call("{}", name="python"), 5)[0] == "error: there is no tool 'python', only bash"
    assert answer({}, 5)[0].startswith("error: ")
    assert answer(call('{"command": "a\\u0000b"}'), 5)[0].startswith("rc=126\ncannot run")
    assert answer(call('{"command": "printf \'\\\\377\'"}'), 5)[0] == "rc=0\n\ufffd"


def test_a_command_that_hangs_is_stopped_with_its_children() -> None:
    started = time.monotonic()
    content, _ = answer(call('{"command": "echo begun; sleep 60 & sleep 60"}'), 0.3)
    assert content == "rc=124\nbegun\n\n[timed out]"
    assert time.monotonic() - started < 40


def test_long_output_is_cut_in_the_middle() -> None:
    text = observation(0, "a" * 5000 + "z" * 5000)
    assert len(text) < 2100
    assert text.startswith("rc=0\naaa")
    assert text.endswith("zzz")
    assert "8000 characters left out" in text


def test_a_stream_that_ends_early_is_no_reply() -> None:
    with pytest.raises(ValueError, match="before"):
        read_stream([b'data: {"choices": [{"delta": {"content": "half"}}]}\n'])


def test_starts_fast(tmp_path: Path) -> None:
    durations = []
    for _ in range(5):
        before = os.times()
        with gateway([DONE]) as (url, _):
            run_harness(url, tmp_path)
        after = os.times()
        durations.append(sum(after[2:4]) - sum(before[2:4]))
    assert 0 < min(durations) < 0.5, "CPU seconds of the child; 0.1 on a quiet core"
