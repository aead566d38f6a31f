"""Shell. The reference harness: a small agent with one tool, `bash`, over chat/completions.

instruction -> call -> commands -> observations -> call, until a reply holds no tool call or a command is
`SUBMIT`. It uses the standard library alone and imports nothing of gyre, so that a sandbox can start it as
`python -I -S reference_harness.py` in a few hundredths of a second. Its history only ever grows: each request
is the one before it, plus the reply exactly as it came, plus tool messages.

With GYRE_TEAM=1 (harness `reference-team`) its history branches, as those of larger harnesses do. A command that is
a line of an instruction, `2. Delete memo.txt`, is handed to a sub-agent with a history of its own, whose last words
are the observation. After GYRE_COMPACT_AFTER (2) turns the main agent is asked for a summary, the lines that are left;
a new history begins with them, and without any the run ends.

Environment: OPENAI_BASE_URL (http://host:port/s/<session>/v1), GYRE_TASK (the instruction), and optionally
OPENAI_API_KEY, GYRE_MODEL, GYRE_MAX_TURNS (8), GYRE_MAX_TOKENS, GYRE_STREAM (1: server-sent events),
GYRE_COMMAND_TIMEOUT_S (10), GYRE_RETRY_S (600), GYRE_PAUSE_S (0; after each command), GYRE_TEAM, GYRE_COMPACT_AFTER.
The workspace is the current directory.
Exit: 0 finished or out of turns; 2 the gateway refused the request (4xx); 3 the gateway stayed away too long;
4 the environment is incomplete.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` costs a fifth of the start
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any, BinaryIO

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
HEADING = "Do this:"
SUMMARY_REQUEST = "Left:"
PURPOSE_HEADER = "x-claude-code-request-class"
MAX_OUTPUT_CHARS = 2000
MAX_LINE = 65536
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a shell command in the workspace.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
            },
        },
    }
]
# A reply that arrived broken, or that an overloaded or restarting gateway did not give, is asked for again.
RETRIED_STATUSES = (408, 409, 425, 429)


class Refused(Exception):
    """The gateway answered 4xx: asking again would not help."""


class Absent(Exception):
    """No usable answer for longer than the retry limit."""


def first_messages(instruction: str) -> list[dict[str, Any]]:
    """The history before the first call."""
    return [{"role": "user", "content": instruction}]


def line_messages(lines: str) -> list[dict[str, Any]]:
    """The history of a sub-agent, or of the main agent after a summary, before its first call."""
    return first_messages(f"{HEADING}\n{lines}")


def is_line(text: str) -> bool:
    """Whether it begins as a line of an instruction does: `1. ...`."""
    number, _, rest = text.partition(". ")
    return number.isdecimal() and bool(rest.strip())


def observation(rc: int, output: str) -> str:
    """The content of a tool message: exit status, then what the command printed, cut in the middle."""
    output = output.rstrip("\n")
    if len(output) > MAX_OUTPUT_CHARS:
        half = MAX_OUTPUT_CHARS // 2
        output = f"{output[:half]}\n[{len(output) - 2 * half} characters left out]\n{output[-half:]}"
    return f"rc={rc}\n{output}".rstrip("\n")


def run_command(command: str, timeout_s: float) -> str:
    """Run one command in its own process group, so that a timeout ends all that it started."""
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:  # a NUL byte or too long a command line
        return observation(126, f"cannot run: {error}")
    try:
        output, _ = process.communicate(timeout=timeout_s)
        rc = process.returncode
    except subprocess.TimeoutExpired:
        _kill_group(process)
        try:  # a process that left the group may still hold the pipe
            output, _ = process.communicate(timeout=1)
        except subprocess.TimeoutExpired:
            output = b""
        rc, output = 124, output + b"\n[timed out]"
    return observation(rc, output.decode("utf-8", "replace"))


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()


def answer(
    tool_call: Mapping[str, Any], timeout_s: float, hand_over: Callable[[str], str] | None = None
) -> tuple[str, bool]:
    """(content of the tool message, whether the agent submitted). A malformed tool call is told so.

    hand_over: what does a line of an instruction, and returns the last words of who did it.
    """
    function = tool_call.get("function") or {}
    if function.get("name") != "bash":
        return f"error: there is no tool {function.get('name')!r}, only bash", False
    try:
        command = json.loads(function.get("arguments") or "")["command"]
    except (ValueError, KeyError, TypeError):
        return 'error: arguments must be JSON like {"command": "ls"}', False
    if not isinstance(command, str):
        return "error: command must be a string", False
    if command.strip() == SUBMIT:
        return observation(0, "submitted"), True
    if hand_over is not None and is_line(command):
        return hand_over(command), False
    return run_command(command, timeout_s), False


class Client:
    """Posts chat/completions until a whole reply has arrived."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        scheme, _, rest = environ["OPENAI_BASE_URL"].partition("://")
        self.host, _, path = rest.partition("/")
        self.secure = scheme == "https"
        self.path = "/" + (path.rstrip("/") + "/chat/completions").lstrip("/")
        self.headers = {"content-type": "application/json"}
        if environ.get("OPENAI_API_KEY"):
            self.headers["authorization"] = "Bearer " + environ["OPENAI_API_KEY"]
        self.model = environ.get("GYRE_MODEL", "policy")
        self.max_tokens = int(environ.get("GYRE_MAX_TOKENS", "0"))
        self.stream = environ.get("GYRE_STREAM", "") not in ("", "0")
        self.retry_s = float(environ.get("GYRE_RETRY_S", "600"))

    def reply(self, messages: list[dict[str, Any]], purpose: str = "") -> dict[str, Any]:
        """The assistant message. Raises Refused or Absent.

        purpose: `subagent` or `compaction`, said in the header that Claude Code has for it; empty for the main agent.
        """
        body = {"model": self.model, "messages": messages, "tools": TOOLS, "stream": self.stream}
        if self.max_tokens:
            body["max_tokens"] = self.max_tokens
        payload = json.dumps(body).encode()
        deadline, pause = time.monotonic() + self.retry_s, 0.1
        while True:
            try:
                message, reason = self._post(payload, {PURPOSE_HEADER: purpose} if purpose else {})
            except (OSError, ValueError) as error:
                message, reason = None, repr(error)
            if message is not None:
                return message
            if time.monotonic() + pause > deadline:
                raise Absent(reason)
            time.sleep(pause)
            pause = min(2 * pause, 5.0)

    def _post(self, payload: bytes, extra: Mapping[str, str]) -> tuple[dict[str, Any] | None, str]:
        """(message, "") or (None, why it is worth asking again). Raises OSError, ValueError, which are worth it too.

        HTTP/1.0: the reply ends where the connection does. Python's own client takes longer to import than all else.
        """
        head = "".join(f"{name}: {value}\r\n" for name, value in {**self.headers, **extra}.items())
        head = f"POST {self.path} HTTP/1.0\r\nhost: {self.host}\r\n{head}content-length: {len(payload)}\r\n\r\n"
        # The gateway may hold a call for long (a cell switches role): the launcher's deadline is what ends it.
        with self._connect() as connection, connection.makefile("rb") as reply:
            connection.sendall(head.encode() + payload)
            status, length = read_head(reply)
            if status == 200 and self.stream:
                return read_stream(reply), ""
            body = reply.read() if length is None else reply.read(length)
            if length is not None and len(body) < length:
                raise ValueError(f"the reply ended after {len(body)} of {length} bytes")
            if status >= 500 or status in RETRIED_STATUSES:
                return None, f"{status} {body[:200]!r}"
            if status != 200:
                raise Refused(f"{status} {body[:500].decode('utf-8', 'replace')}")
            choices = json.loads(body).get("choices") or [{}]
            message = choices[0].get("message")
            return (message, "") if isinstance(message, dict) else (None, "a reply without a message")

    def _connect(self) -> socket.socket:
        name, _, port = self.host.rpartition(":") if ":" in self.host else (self.host, "", "")
        address = name.strip("[]"), int(port or (443 if self.secure else 80))
        connection = socket.create_connection(address, timeout=self.retry_s)
        if not self.secure:
            return connection
        import ssl

        return ssl.create_default_context().wrap_socket(connection, server_hostname=address[0])


def read_head(reply: BinaryIO) -> tuple[int, int | None]:
    """(status, content-length, if it is given) of a response. Raises ValueError when it is none."""
    first = reply.readline(MAX_LINE).split(None, 2)
    if len(first) < 2 or not first[0].startswith(b"HTTP/"):
        raise ValueError(f"no HTTP response: {b' '.join(first)[:80]!r}")
    length = None
    while (line := reply.readline(MAX_LINE)).strip():
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            length = int(value)
    if not line:
        raise ValueError("the reply ended in its head")
    return int(first[1]), length


def read_stream(lines: Iterable[bytes]) -> dict[str, Any]:
    """Join the deltas of server-sent events. Raises ValueError when the stream ends before [DONE]."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    calls: dict[int, dict[str, Any]] = {}
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        event = line[5:].strip()
        if event == b"[DONE]":
            if calls:
                message["tool_calls"] = [calls[index] for index in sorted(calls)]
            return message
        chunk = json.loads(event)
        if "error" in chunk:
            raise ValueError(f"error in the stream: {chunk['error']}")
        for choice in chunk.get("choices") or []:
            delta = choice.get("delta") or {}
            for key in ("content", "reasoning_content"):
                if delta.get(key):
                    message[key] = (message.get(key) or "") + delta[key]
            for part in delta.get("tool_calls") or []:
                call = calls.setdefault(
                    part.get("index", 0), {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                )
                call["id"] = part.get("id") or call["id"]
                function = part.get("function") or {}
                call["function"]["name"] += function.get("name") or ""
                call["function"]["arguments"] += function.get("arguments") or ""
    raise ValueError("the stream ended before [DONE]")


class Agent:
    """One history after the other, and the sub-agents that it hands lines to."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.client = Client(environ)
        self.timeout_s = float(environ.get("GYRE_COMMAND_TIMEOUT_S", "10"))
        self.pause_s = float(environ.get("GYRE_PAUSE_S", "0"))
        self.max_turns = int(environ.get("GYRE_MAX_TURNS", "8"))
        self.team = environ.get("GYRE_TEAM", "") not in ("", "0")
        self.compact_after = int(environ.get("GYRE_COMPACT_AFTER", "2"))

    def work(self, messages: list[dict[str, Any]], purpose: str = "") -> str:
        """Go on until a reply holds no tool call, a submission, or the last turn; returns the last words."""
        leads = self.team and not purpose
        since_summary = 0
        for _ in range(self.max_turns):
            if leads and since_summary == self.compact_after:
                request = {"role": "user", "content": SUMMARY_REQUEST}
                lines = str(self.client.reply([*messages, request], "compaction").get("content") or "").strip()
                if not is_line(lines):
                    return lines
                messages, since_summary = line_messages(lines), 0
            message = self.client.reply(messages, purpose)
            messages.append(message)
            calls = message.get("tool_calls") or []
            if not calls:
                return str(message.get("content") or "")
            submitted = False
            for call in calls:
                content, submits = answer(call, self.timeout_s, self.hand_over if leads else None)
                time.sleep(self.pause_s)
                submitted = submitted or submits
                messages.append({"role": "tool", "tool_call_id": call.get("id", ""), "content": content})
            if submitted:
                return ""
            since_summary += 1
        return ""

    def hand_over(self, line: str) -> str:
        return self.work(line_messages(line), "subagent")


def run(environ: Mapping[str, str]) -> None:
    Agent(environ).work(first_messages(environ["GYRE_TASK"]))


def main() -> int:
    missing = [name for name in ("OPENAI_BASE_URL", "GYRE_TASK") if name not in os.environ]
    if missing:
        print(f"reference harness: {' and '.join(missing)} must be set", file=sys.stderr)
        return 4
    try:
        run(os.environ)
    except Refused as error:
        print(f"reference harness: the gateway refused the call: {error}", file=sys.stderr)
        return 2
    except Absent as error:
        print(f"reference harness: no answer from the gateway: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
