"""Shell. `gyre bench gateway`: what a call through the gateway costs beside the engine, and beside another gateway.

`gyre gateway` runs as anybody would start it (its log, its fsync and its tables with it), in front of a scripted engine
that answers at once; so does the peer, in an environment of its own. What a gateway adds is its latency less that of
the same engine asked directly, by the same client, with a prompt of the same length. The 99th percentile is compared
with the engine's median, so it leans to the high side. Histories grow by calls, as those of agents do.

Direction: processes, HTTP -> seconds of calls -> figures.
"""

import asyncio
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import orjson
import psutil
from tokenizers import Tokenizer

from gyre.errors import MissingError, ProcessError
from gyre.events.server import free_ports
from gyre.workers.bench import Figure, figure
from gyre.workers.bench_engine import WORDS

PEER = "rllm-model-gateway==0.1.0"
SIZES = {"1k": (1_000, 200), "100k": (100_000, 200), "700k": (700_000, 40)}
"""Tokens of history, and how many calls are measured."""
MAX_P50_MS, MAX_P99_MS = 5.0, 15.0
"""Goals, at 100K."""
ENGINE_S = 5.0
"""What a call takes where there are many sessions: as long as a short reply of a large policy."""
START_TIMEOUT_S = 60.0
_END_OF_TURN = "<|im_end|>"
_LINE = " Append notes.txt lines, then Count the column of table.md: 12 of maple is in x/report.txt\n"
"""About as many bytes a token as tools print."""
_PEER_WORDS = {"name": "bash", "arguments": '{"command": "cat ledger.txt"}'}


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where calls go, and whose sessions they are."""

    url: str
    """With `{session}` where its name belongs."""
    pid: int = 0
    """Of its process."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured; a test measures less."""

    histories: dict[str, tuple[int, int]] = msgspec.field(default_factory=lambda: dict(SIZES))
    num_sessions: int = 1000
    session_calls: int = 5
    engine_s: float = ENGINE_S


class Text:
    """Tokens of the policy as text: what histories are made of."""

    def __init__(self, policy: Path) -> None:
        tokenizer = Tokenizer.from_file(str(policy / "tokenizer.json"))
        self._line_tokens = len(tokenizer.encode(_LINE, add_special_tokens=False).ids)
        self.reply = [*tokenizer.encode(WORDS, add_special_tokens=False).ids, tokenizer.token_to_id(_END_OF_TURN)]
        self.bytes_per_token = len(_LINE) / self._line_tokens

    def make(self, num_tokens: int) -> str:
        return _LINE * max(1, round(num_tokens / self._line_tokens))


def bench_gateway(policy: Path, folder: Path, sizes: Sizes | None = None, *, peer: bool = True) -> dict[str, Figure]:
    """Raises MissingError when the peer cannot be installed, ProcessError when something does not start."""
    sizes = sizes or Sizes()
    text = Text(policy)
    python = _install_peer(folder / "peer") if peer else None
    figures: dict[str, Figure] = {}
    meter = _Meter()
    with ExitStack() as stack:
        engine = stack.enter_context(_engine(text, folder, 0.0))
        ours = stack.enter_context(_gyre(policy, folder / "latency", engine))
        theirs = stack.enter_context(_peer(python, folder, engine)) if python else None
        for name, (num_tokens, num_calls) in sizes.histories.items():
            figures |= asyncio.run(_latency(name, num_tokens, num_calls, text, engine, ours, theirs))
    with ExitStack() as stack:
        engine = stack.enter_context(_engine(text, folder, sizes.engine_s))
        direct = asyncio.run(_many(sizes, text, Place(url=f"{engine}/v1/chat/completions")))
        with _gyre(policy, folder / "sessions", engine) as place:
            found = asyncio.run(_many(sizes, text, place))
        other: dict[str, float] | None = None
        if python:
            with _peer(python, folder, engine) as place:
                other = asyncio.run(_many(sizes, text, place))
    busy = meter.read()
    return {**figures, **_of_many(sizes, direct, found, other), "other_programs_cpu": busy}


def _of_many(
    sizes: Sizes, direct: dict[str, float], found: dict[str, float], other: dict[str, float] | None
) -> dict[str, Figure]:
    def added(of: dict[str, float] | None, name: str) -> float | None:
        return None if of is None else max(0.0, 1e3 * (of[name] - direct["p50"]))

    def of_one(of: dict[str, float] | None) -> float | None:
        return None if of is None else of["memory"] / sizes.num_sessions / 1024

    return {
        "sessions": figure(found["sessions"], "sessions", reference=float(sizes.num_sessions)),
        **(
            {"sessions_peer": figure(other["sessions"], "sessions", reference=float(sizes.num_sessions))}
            if other
            else {}
        ),
        "sessions_calls_a_second": figure(found["rate"], "calls/s", reference=direct["rate"]),
        "sessions_added_p50": figure(added(found, "p50") or 0.0, "ms", reference=added(other, "p50")),
        "sessions_added_p99": figure(added(found, "p99") or 0.0, "ms", reference=added(other, "p99")),
        "sessions_cpu_of_a_call": figure(1e3 * found["cpu"], "CPU ms", reference=1e3 * other["cpu"] if other else None),
        "memory_of_a_session": figure(of_one(found) or 0.0, "KiB", reference=of_one(other)),
        "tokens_of_a_session": figure(found["tokens"], "tokens"),
    }


# ---------------------------------------------------------------- one session, long histories


async def _latency(
    name: str, num_tokens: int, num_calls: int, text: Text, engine: str, ours: Place, theirs: Place | None
) -> dict[str, Figure]:
    ids = [100 + n % 500 for n in range(num_tokens)]
    raw = orjson.dumps({"rid": "direct", "input_ids": ids, "sampling_params": {}})
    async with aiohttp.ClientSession() as http:
        alone = sorted([await _ask(http, f"{engine}/generate", raw) for _ in range(num_calls)])
        mine, cpu_s = await _grow(http, ours, name, num_tokens, num_calls, text)
        half = _at(alone, 0.5)
        found = {"added_p50": _at(mine, 0.5) - half, "added_p99": _at(mine, 0.99) - half, "cpu_of_a_call": cpu_s}
        other: dict[str, float] = {}
        if theirs:
            body = _body(_history(num_tokens, text))
            alone_chat = sorted([await _ask(http, f"{engine}/v1/chat/completions", body) for _ in range(num_calls)])
            peer, cpu_s = await _grow(http, theirs, name, num_tokens, num_calls, text)
            half = _at(alone_chat, 0.5)
            other = {"added_p50": _at(peer, 0.5) - half, "added_p99": _at(peer, 0.99) - half, "cpu_of_a_call": cpu_s}
    goals = {"added_p50": MAX_P50_MS, "added_p99": MAX_P99_MS} if name == "100k" else {}
    return {
        f"{key}_{name}": figure(
            1e3 * value,
            "CPU ms" if key == "cpu_of_a_call" else "ms",
            reference=1e3 * other[key] if key in other else None,
            max_value=goals.get(key),
        )
        for key, value in found.items()
    } | {f"engine_alone_p50_{name}": figure(1e3 * _at(alone, 0.5), "ms")}


async def _grow(
    http: aiohttp.ClientSession, place: Place, name: str, num_tokens: int, num_calls: int, text: Text
) -> tuple[list[float], float]:
    """Of the calls with a history of at least `num_tokens`, which has grown by calls: seconds, sorted, and CPU seconds
    of the place's process for one of them."""
    url = place.url.format(session=f"long-{name}")
    messages: list[Any] = [{"role": "user", "content": "Put the files in order."}]
    num_before = min(num_calls, 100, max(1, num_tokens // 500))
    seconds = []
    cpu_s = 0.0
    for number in range(num_before + num_calls):
        if number == num_before:
            cpu_s = _cpu_s(place.pid)
        reply: list[Any] = []
        seconds.append(await _ask(http, url, _body(messages), reply))
        size = num_tokens // num_before if number < num_before else 40
        messages += [*reply, _result(reply[0], text.make(size))]
    return sorted(seconds[num_before:]), (_cpu_s(place.pid) - cpu_s) / num_calls


def _history(num_tokens: int, text: Text) -> list[Any]:
    call = {"id": "call_0", "type": "function", "function": _PEER_WORDS}
    said = {"role": "assistant", "content": " I look.", "tool_calls": [call]}
    turns = min(100, max(1, num_tokens // 500))
    return [{"role": "user", "content": "Put the files in order."}] + [
        message for _ in range(turns) for message in (said, _result(said, text.make(num_tokens // turns)))
    ]


def _result(said: dict[str, Any], content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": content}


def _body(messages: Sequence[Any]) -> bytes:
    parameters = {"type": "object", "properties": {"command": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "bash", "description": "Runs it.", "parameters": parameters}}
    return orjson.dumps({"model": "gyre-policy", "messages": messages, "tools": [tool]})


async def _ask(http: aiohttp.ClientSession, url: str, body: bytes, reply: list[Any] | None = None) -> float:
    """Seconds until the whole answer is there. The message that came is put into `reply`."""
    begun_s = time.perf_counter()
    async with http.post(url, data=body, headers={"content-type": "application/json"}) as response:
        content = await response.read()
        taken_s = time.perf_counter() - begun_s
        if response.status != 200:
            raise ProcessError(f"gyre bench gateway: {url}: {response.status}: {content[:200]!r}")
    if reply is not None:
        reply.append(orjson.loads(content)["choices"][0]["message"])
    return taken_s


def _at(ordered: Sequence[float], quantile: float) -> float:
    return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]


# ---------------------------------------------------------------- many sessions


async def _many(sizes: Sizes, text: Text, place: Place) -> dict[str, float]:
    """All sessions at once, each one call after the other; they begin within one call's time.

    A gateway that does not get through in eight times the engine's own time is left with what it has done, and a
    session that gets an error counts as not done.
    """
    connector = aiohttp.TCPConnector(limit=0)
    result = text.make(400)
    seconds: list[float] = []
    resident, cpu_s, begun_s = _resident(place.pid), _cpu_s(place.pid), time.perf_counter()
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as http:

        async def session(number: int) -> int:
            await asyncio.sleep(sizes.engine_s * number / sizes.num_sessions)
            url = place.url.format(session=f"s{number}")
            messages: list[Any] = [{"role": "user", "content": f"Put the files of case {number} in order."}]
            for _ in range(sizes.session_calls):
                reply: list[Any] = []
                seconds.append(await _ask(http, url, _body(messages), reply))
                messages += [*reply, _result(reply[0], result)]
            return sum(len(message["content"] or "") for message in messages)

        tasks = [asyncio.create_task(session(number)) for number in range(sizes.num_sessions)]
        limit_s = 30 + 8 * sizes.engine_s * (sizes.session_calls + 1)
        done, late = await asyncio.wait(tasks, timeout=limit_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        num_bytes = [task.result() for task in done if task.exception() is None]
    taken_s = time.perf_counter() - begun_s
    seconds = sorted(seconds) or [limit_s]
    return {
        "sessions": float(len(num_bytes)),
        "rate": len(seconds) / taken_s,
        "p50": _at(seconds, 0.5),
        "p99": _at(seconds, 0.99),
        "tokens": sum(num_bytes) / max(1, len(num_bytes)) / text.bytes_per_token,
        "memory": _resident(place.pid) - resident,
        "cpu": (_cpu_s(place.pid) - cpu_s) / len(seconds),
    }


# ---------------------------------------------------------------- processes


@contextmanager
def _process(argv: Sequence[str], folder: Path, name: str) -> Iterator[subprocess.Popen[str]]:
    """A child that has ended when the block has, and its own children with it."""
    log = (folder / f"{name}.log").open("w")
    child = subprocess.Popen(argv, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        yield child
    finally:
        child.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            child.wait(30)
        child.kill()
        child.wait()
        log.close()


@contextmanager
def _engine(text: Text, folder: Path, delay_s: float) -> Iterator[str]:
    reply = ",".join(map(str, text.reply))
    options = ("--reply", reply, "--delay-s", str(delay_s), "--bytes-per-token", str(text.bytes_per_token))
    with _process(
        (sys.executable, "-m", "gyre.workers.bench_engine", *options), folder, f"engine-{delay_s:g}"
    ) as child:
        yield _first_line(child)


@contextmanager
def _gyre(policy: Path, folder: Path, engine: str) -> Iterator[Place]:
    folder.mkdir()
    options = ("--engine", engine, "--policy", str(policy.resolve()), "--dir", "run", "--context", "2000000")
    with _process((sys.executable, "-m", "gyre.cli", "gateway", *options), folder, "gateway") as child:
        yield Place(url=_first_line(child).split()[1] + "/s/{session}/v1/chat/completions", pid=child.pid)


@contextmanager
def _peer(python: Path, folder: Path, engine: str) -> Iterator[Place]:
    """Its defaults: traces in SQLite, written behind the reply."""
    (port,) = free_ports(1)
    options = ("--host", "127.0.0.1", "--port", str(port), "--worker", f"{engine}/v1", "--log-level", "ERROR")
    argv = (str(python), "-m", "rllm_model_gateway", *options, "--db-path", str(folder / f"traces-{port}.db"))
    with _process(argv, folder, f"peer-{port}") as child:
        _wait_until_open(port, child)
        yield Place(url=f"http://127.0.0.1:{port}/sessions/{{session}}/v1/chat/completions", pid=child.pid)


def _first_line(child: "subprocess.Popen[str]") -> str:
    assert child.stdout is not None
    line = child.stdout.readline()
    if "http" not in line:
        raise ProcessError(f"gyre bench gateway: {child.args!r:.200} did not start: {line!r}; see its log")
    return line.strip()


def _wait_until_open(port: int, child: "subprocess.Popen[str]") -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s and child.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    raise ProcessError(f"gyre bench gateway: {PEER} did not start: see its log")


def _install_peer(folder: Path) -> Path:
    """Its interpreter: an environment of its own, from the Python package index."""
    python = folder / "bin" / "python"
    for argv in ((sys.executable, "-m", "venv", str(folder)), (str(python), "-m", "pip", "install", "-q", PEER)):
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            said = done.stderr.strip().splitlines()
            raise MissingError(f"gyre bench gateway: {PEER} cannot be installed: {said[-1] if said else argv}")
    return python


def _resident(pid: int) -> float:
    """Bytes of the process itself: the log's server and the projector are others."""
    return float(psutil.Process(pid).memory_info().rss) if pid else 0.0


def _cpu_s(pid: int) -> float:
    """Seconds of the process itself."""
    if not pid:
        return 0.0
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


class _Meter:
    """What other programs took of the machine's CPUs meanwhile: latencies are worth as much as it was quiet."""

    def __init__(self) -> None:
        self._begun = self._busy_s(), self._own_s(), time.monotonic()

    def read(self) -> Figure:
        busy_s, own_s, begun_s = self._begun
        others_s = self._busy_s() - busy_s - (self._own_s() - own_s)
        wall_s = (time.monotonic() - begun_s) * psutil.cpu_count()
        return figure(max(0.0, others_s), "CPU s", reference=wall_s)

    @staticmethod
    def _busy_s() -> float:
        times = psutil.cpu_times()
        return float(times.user + times.nice + times.system)

    @staticmethod
    def _own_s() -> float:
        """Of this process and all that have ended within it."""
        usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)
