"""Shell. `gyre bench gateway`: what a call through the gateway costs beside the engine, and beside another gateway.

`gyre gateway` runs as anybody would start it (its log, its fsync and its tables with it), in front of a scripted engine
that answers at once; so does the peer, in an environment of its own. What a gateway adds is its latency less that of
the same engine asked directly, by the same client, with a prompt of the same length. The 99th percentile is compared
with the engine's median, so it leans to the high side. Histories grow by calls, as those of agents do. Each part has a
deadline: who is not through by then is told with what it has done.

Direction: processes, HTTP -> seconds of calls -> figures. Invariant: whatever ends this process, none that it started
outlives it.
"""

import asyncio
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import orjson
import psutil
from tokenizers import Tokenizer

from gyre.errors import ProcessError
from gyre.workers.bench import Figure, figure
from gyre.workers.bench_engine import WORDS
from gyre.workers.bench_places import Place, engine_process, gyre_process, install_peer, peer_process

SIZES = {"1k": (1_000, 200), "100k": (100_000, 200), "700k": (700_000, 40)}
"""Tokens of history, and how many calls are measured."""
MAX_P50_MS, MAX_P99_MS = 5.0, 15.0
"""Goals, at 100K."""
ENGINE_S = 5.0
"""What a call takes where there are many sessions: as long as a short reply of a large policy."""
_END_OF_TURN = "<|im_end|>"
_LINE = " Append notes.txt lines, then Count the column of table.md: 12 of maple is in x/report.txt\n"
"""About as many bytes a token as tools print."""
_PEER_WORDS = {"name": "bash", "arguments": '{"command": "cat ledger.txt"}'}


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured; a test measures less."""

    histories: dict[str, tuple[int, int]] = msgspec.field(default_factory=lambda: dict(SIZES))
    num_sessions: int = 1000
    session_calls: int = 3
    engine_s: float = ENGINE_S
    limit_s: float = 25.0
    """For one history of one gateway."""
    sessions_limit_s: float = 45.0
    """For all sessions of one gateway."""


class Text:
    """Tokens of the policy as text: what histories are made of."""

    def __init__(self, policy: Path) -> None:
        tokenizer = Tokenizer.from_file(str(policy / "tokenizer.json"))
        self._line_tokens = len(tokenizer.encode(_LINE, add_special_tokens=False).ids)
        self.reply = [*tokenizer.encode(WORDS, add_special_tokens=False).ids, tokenizer.token_to_id(_END_OF_TURN)]
        self.bytes_per_token = len(_LINE) / self._line_tokens

    def make(self, num_tokens: int) -> str:
        return _LINE * max(1, round(num_tokens / self._line_tokens))


def bench_gateway(
    policy: Path,
    folder: Path,
    sizes: Sizes | None = None,
    *,
    peer: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Figure]:
    """Raises MissingError when the peer cannot be installed, ProcessError when something does not start."""
    sizes = sizes or Sizes()
    text = Text(policy)
    python = install_peer(folder / "peer") if peer else None
    figures: dict[str, Figure] = {}
    meter = _Meter()
    with ExitStack() as stack:
        engine = stack.enter_context(engine_process(text.reply, text.bytes_per_token, folder, 0.0))
        ours = stack.enter_context(gyre_process(policy, folder / "latency", engine))
        theirs = stack.enter_context(peer_process(python, folder, engine)) if python else None
        for name in sizes.histories:
            say(f"one session, {name} tokens")
            figures |= asyncio.run(_latency(name, sizes, text, engine, ours, theirs))
    with ExitStack() as stack:
        engine = stack.enter_context(engine_process(text.reply, text.bytes_per_token, folder, sizes.engine_s))
        say(f"{sizes.num_sessions} sessions, the engine alone")
        direct = asyncio.run(_many(sizes, text, Place(url=f"{engine}/v1/chat/completions")))
        say(f"{sizes.num_sessions} sessions through gyre")
        with gyre_process(policy, folder / "sessions", engine) as place:
            found = asyncio.run(_many(sizes, text, place))
        other: dict[str, float] | None = None
        if python:
            say(f"{sizes.num_sessions} sessions through the other gateway")
            with peer_process(python, folder, engine) as place:
                other = asyncio.run(_many(sizes, text, place))
    busy = meter.read()
    return {**figures, **_of_many(sizes, direct, found, other), "other_programs_cpu": busy}


def _of_many(
    sizes: Sizes, direct: dict[str, float], found: dict[str, float], other: dict[str, float] | None
) -> dict[str, Figure]:
    """The other gateway is a reference only if it got through; what it did in the time is told in any case."""
    limit = f"in {sizes.sessions_limit_s:g} s"
    num = float(sizes.num_sessions)
    figures = {"sessions": figure(found["sessions"], f"sessions {limit}", min_value=num)}
    if other:
        figures["sessions_peer"] = figure(other["sessions"], f"sessions {limit}", reference=num)
        figures["sessions_peer_calls"] = figure(other["calls"], f"calls {limit}", reference=num * sizes.session_calls)
    whole = other if other and other["sessions"] == num else None

    def beside(key: str, unit: str, scale: float, less: float = 0.0) -> Figure:
        reference = scale * (whole[key] - less) if whole else None
        return figure(scale * (found[key] - less), unit, reference=reference)

    return figures | {
        "sessions_calls_a_second": figure(found["rate"], "calls/s", reference=direct["rate"]),
        "sessions_added_p50": beside("p50", "ms", 1e3, direct["p50"]),
        "sessions_added_p99": beside("p99", "ms", 1e3, direct["p50"]),
        "sessions_cpu_of_a_call": beside("cpu", "CPU ms", 1e3),
        "memory_of_a_session": beside("memory", "KiB", 1 / num / 1024),
        "tokens_of_a_session": figure(found["tokens"], "tokens"),
    }


# ---------------------------------------------------------------- one session, long histories


async def _latency(
    name: str, sizes: Sizes, text: Text, engine: str, ours: Place, theirs: Place | None
) -> dict[str, Figure]:
    num_tokens, num_calls = sizes.histories[name]
    ids = [100 + n % 500 for n in range(num_tokens)]
    raw = orjson.dumps({"rid": "direct", "input_ids": ids, "sampling_params": {}})
    async with aiohttp.ClientSession() as http:
        alone = sorted([await _ask(http, f"{engine}/generate", raw) for _ in range(num_calls)])
        mine, cpu_s = await _grow(http, ours, name, sizes, text)
        found = _added(mine, alone, cpu_s, num_calls)
        other: dict[str, float] = {}
        limit = f"calls in {sizes.limit_s:g} s"
        done = {} if found else {f"calls_{name}": figure(len(mine), limit, min_value=num_calls)}
        if theirs:
            body = _body(_history(num_tokens, text))
            alone_chat = sorted([await _ask(http, f"{engine}/v1/chat/completions", body) for _ in range(num_calls)])
            peer, cpu_s = await _grow(http, theirs, name, sizes, text)
            other = _added(peer, alone_chat, cpu_s, num_calls)
            if not other:
                done[f"peer_calls_{name}"] = figure(len(peer), limit, reference=num_calls)
    goals = {"added_p50": MAX_P50_MS, "added_p99": MAX_P99_MS} if name == "100k" else {}
    return {
        f"{key}_{name}": figure(
            1e3 * value,
            "CPU ms" if key == "cpu_of_a_call" else "ms",
            reference=1e3 * other[key] if key in other else None,
            max_value=goals.get(key),
        )
        for key, value in found.items()
    } | {f"engine_alone_p50_{name}": figure(1e3 * _at(alone, 0.5), "ms"), **done}


def _added(seconds: Sequence[float], alone: Sequence[float], cpu_s: float, num_calls: int) -> dict[str, float]:
    """Empty when not all calls came back in time."""
    if len(seconds) < num_calls:
        return {}
    half = _at(alone, 0.5)
    return {"added_p50": _at(seconds, 0.5) - half, "added_p99": _at(seconds, 0.99) - half, "cpu_of_a_call": cpu_s}


async def _grow(
    http: aiohttp.ClientSession, place: Place, name: str, sizes: Sizes, text: Text
) -> tuple[list[float], float]:
    """Of the calls with a history of at least `num_tokens`, which has grown by calls: seconds, sorted, and CPU seconds
    of the place's process for one of them. Fewer calls when the limit of time was over."""
    num_tokens, num_calls = sizes.histories[name]
    url = place.url.format(session=f"long-{name}")
    messages: list[Any] = [{"role": "user", "content": "Put the files in order."}]
    num_before = min(num_calls, 100, max(1, num_tokens // 500))
    seconds: list[float] = []
    cpu_s = 0.0
    with suppress(TimeoutError):
        async with asyncio.timeout(sizes.limit_s):
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

    A gateway that does not get through in the limit of time is left with what it has done, and a session that gets an
    error counts as not done.
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
        done, late = await asyncio.wait(tasks, timeout=sizes.sessions_limit_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        num_bytes = [task.result() for task in done if task.exception() is None]
    taken_s = time.perf_counter() - begun_s
    seconds.sort()
    return {
        "sessions": float(len(num_bytes)),
        "calls": float(len(seconds)),
        "rate": len(seconds) / taken_s,
        "p50": _at(seconds, 0.5) if seconds else 0.0,
        "p99": _at(seconds, 0.99) if seconds else 0.0,
        "tokens": sum(num_bytes) / max(1, len(num_bytes)) / text.bytes_per_token,
        "memory": _resident(place.pid) - resident,
        "cpu": (_cpu_s(place.pid) - cpu_s) / max(1, len(seconds)),
    }


# ---------------------------------------------------------------- of processes


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
