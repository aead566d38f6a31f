"""A gateway on real sockets, over a log in memory, with a scripted engine and a ChatML renderer."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from gyre.agents.engine_client import Generation
from gyre.agents.gateway import run_gateway
from gyre.agents.scripted_policy import TEMPLATE, make_renderer
from gyre.config import Config, EngineConfig, SamplingConfig
from gyre.events.log import Writer, open_writer
from gyre.events.memory import MemoryLog
from gyre.events.tokens import unpack_ids
from gyre.events.types import (
    CallCompleted,
    CallCut,
    CallStarted,
    CellFenced,
    CellJoined,
    CellSwitched,
    Event,
    ExecutionFinished,
    SessionOpened,
    VersionSpan,
)

__all__ = ["TEMPLATE", "make_renderer"]

BASH = {
    "type": "function",
    "function": {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
}


RENDERER = make_renderer()


def encode(text: str) -> list[int]:
    return list(RENDERER.tokenizer.encode(text, add_special_tokens=False).ids)


def decode(ids: Any) -> str:
    return str(RENDERER.tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))


def tool_call(command: str) -> str:
    return f'<tool_call>{{"name": "bash", "arguments": {{"command": "{command}"}}}}</tool_call>'


@dataclass(kw_only=True)
class Asked:
    rid: str
    input_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    extra_key: str


@dataclass(kw_only=True)
class ScriptedEngine:
    """Says what `script` makes of (number of the request, text of the prompt), or raises what it returns."""

    script: Callable[[int, str], str | Exception | Generation] = lambda n, prompt: f"reply {n}"
    delay_s: float = 0.0
    version: int = 0
    asked: list[Asked] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    hold: asyncio.Event | None = None
    """When set, requests wait for it."""

    async def generate(
        self,
        rid: str,
        input_ids: Any,
        *,
        temperature: float,
        top_p: float,
        max_tokens: int,
        stop_token_ids: tuple[int, ...],
        extra_key: str,
        stop: tuple[str, ...] = (),
    ) -> Generation:
        number = len(self.asked)
        self.asked.append(
            Asked(
                rid=rid,
                input_ids=tuple(map(int, input_ids)),
                max_tokens=max_tokens,
                temperature=temperature,
                extra_key=extra_key,
            )
        )
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            if self.hold:
                await self.hold.wait()
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
        finally:
            self.running -= 1
        said = self.script(number, decode(input_ids))
        if isinstance(said, Exception):
            raise said
        if isinstance(said, Generation):
            return said
        ids = [*encode(said), *stop_token_ids]
        finish = "length" if len(ids) > max_tokens else "stop"
        if rid in self.aborted:
            ids, finish = ids[:2], "abort"
        return generation(ids[:max_tokens], finish, version=self.version, num_prompt_tokens=len(input_ids))

    async def abort(self, rid: str) -> None:
        self.aborted.append(rid)
        if self.hold:
            self.hold.set()


def generation(ids: list[int], finish: Any, *, version: int = 0, num_prompt_tokens: int = 0) -> Generation:
    spans = (VersionSpan(version=version, start=0, end=len(ids)),) if ids else ()
    return Generation(
        output_ids=tuple(ids),
        logprobs=tuple(-(1 + i % 7) / 8 for i in range(len(ids))),
        spans=spans,
        finish=finish,
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=min(8, num_prompt_tokens),
        engine_s=0.001,
    )


@dataclass(kw_only=True)
class Served:
    log: MemoryLog
    world: Writer
    """Speaks for dispatcher and cells."""
    engine: ScriptedEngine
    port: int
    socket_path: str
    gateway: "asyncio.Task[None]"

    def url(self, session: str = "s1") -> str:
        return f"http://127.0.0.1:{self.port}/s/{session}/v1"

    async def post(self, body: Any, session: str = "s1", path: str = "/chat/completions") -> tuple[int, Any]:
        async with aiohttp.ClientSession() as http, http.post(self.url(session) + path, json=body) as response:
            return response.status, await response.json()

    async def say(self, *messages: Any, session: str = "s1", **fields: Any) -> Any:
        """The assistant message of one call."""
        status, reply = await self.post({"model": "policy", "messages": list(messages), **fields}, session)
        assert status == 200, reply
        return reply["choices"][0]["message"]

    async def open_session(self, session: str, temperature: float = 1.0) -> None:
        opened = SessionOpened(execution=f"x-{session}", session=session, temperature=temperature, top_p=1.0)
        await self.world.append(opened)

    async def finish(self, execution: str) -> None:
        await self.world.append(
            ExecutionFinished(execution=execution, reason="completed", exit_code=0, wall_s=1.0, detail="")
        )

    async def fence(self, cell: str = "c0", epoch: int = 2) -> int:
        return await self.world.append(CellFenced(cell=cell, epoch=epoch))

    async def resume(self, cell: str = "c0", epoch: int = 3, version: int = 1) -> None:
        await self.world.append(CellSwitched(cell=cell, role="rollout", epoch=epoch, version=version, phases=()))

    async def events(self, kind: type[Event] | tuple[type[Event], ...] = Event) -> list[Any]:
        return await events_of(self.log, kind)

    async def until(self, kind: type[Event], count: int = 1) -> list[Any]:
        async with asyncio.timeout(60):
            while len(found := await self.events(kind)) < count:  # noqa: ASYNC110 - the log is the only sign
                await asyncio.sleep(0.002)
        return found


async def events_of(log: MemoryLog, kind: type[Event] | tuple[type[Event], ...] = Event) -> list[Any]:
    last = await log.last_seq()
    return [r.event async for r in log.read(1, until=last) if isinstance(r.event, kind)] if last else []


def full_ids(events: list[Any], call: str) -> list[int]:
    """`full(c)`, worked out from the events alone."""
    started = next(e for e in events if isinstance(e, CallStarted) and e.call == call)
    ended = [e for e in events if isinstance(e, (CallCompleted, CallCut)) and e.call == call]
    base = full_ids(events, started.base)[: started.shared] if started.base else []
    return [*base, *unpack_ids(started.context), *(unpack_ids(ended[0].sampled) if ended else ())]


def config(**sampling: Any) -> Config:
    return Config(
        sampling=SamplingConfig(**{"max_tokens": 256, **sampling}),
        engine=EngineConfig(context_tokens=4096, call_timeout_s=20.0),
    )


@asynccontextmanager
async def serving(
    tmp_path: Any,
    engine: ScriptedEngine | None = None,
    *,
    log: MemoryLog | None = None,
    settings: Config | None = None,
    cells: tuple[str, ...] = ("c0",),
    sessions: tuple[str, ...] = ("s1",),
    **options: Any,
) -> AsyncIterator[Served]:
    engine = engine or ScriptedEngine()
    fresh = log is None
    log = log or MemoryLog("test")
    clock = iter(range(1, 10**9))
    world = await open_writer(log, "world", lambda: next(clock))
    if fresh:
        for index, cell in enumerate(cells):
            await world.append(
                CellJoined(cell=cell, index=index, capacity=8, engine_url=f"http://{cell}", model_digest="")
            )
            await world.append(CellSwitched(cell=cell, role="rollout", epoch=1, version=0, phases=()))
    writer = await open_writer(log, "gateway", lambda: next(clock))
    ports: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    socket_path = str(tmp_path / "gateway.sock")
    gateway = asyncio.create_task(
        run_gateway(
            log,
            writer,
            settings or config(),
            engine_for=lambda url: engine,
            renderer=options.pop("renderer", RENDERER),
            socket_path=socket_path,
            host="127.0.0.1",
            ready=ports.set_result,
            **options,
        )
    )
    await asyncio.wait((gateway, ports), return_when=asyncio.FIRST_COMPLETED)
    if gateway.done():
        gateway.result()
    served = Served(log=log, world=world, engine=engine, port=ports.result(), socket_path=socket_path, gateway=gateway)
    if fresh:
        for session in sessions:
            await served.open_session(session)
    try:
        yield served
    finally:
        gateway.cancel()
        with suppress(asyncio.CancelledError):
            await gateway


async def log_until(log: MemoryLog, last: int) -> MemoryLog:
    """What a gateway that was killed then finds when it starts again."""
    prefix = MemoryLog(log.run)
    async for recorded in log.read(1, until=last):
        await prefix.publish(recorded.subject, await log.body(recorded.seq), recorded.envelope.id)
    return prefix
