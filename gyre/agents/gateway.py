"""Shell. The gateway's HTTP side: what unmodified harnesses send, and what they see.

bytes -> dialect -> Request -> (calls) -> Answer -> bytes -> `call.delivered`.
Invariants: a harness sees a byte of a reply only when the log has its `call.completed`; whatever is wrong,
it sees an error in its provider's shape; a stream that cannot be finished is aborted, never ended cleanly.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from gyre.agents import anthropic_messages, chat, responses, roles
from gyre.agents.calls import Calls
from gyre.agents.dialect import Dialect, ProviderError, Request
from gyre.agents.engine_client import Engine
from gyre.agents.follower import Follower
from gyre.agents.harnesses import HELPER_MODEL, POLICY_MODEL
from gyre.agents.renderer import Renderer
from gyre.config import Config
from gyre.errors import ConfigError
from gyre.events.log import Log, Writer
from gyre.events.server import free_ports
from gyre.events.subjects import check_token

DIALECTS: dict[str, Dialect] = {
    "chat/completions": chat,
    "messages": anthropic_messages,
    "responses": responses,
}
"""By the end of the path."""
COUNT_TOKENS = "messages/count_tokens"
ADDRESSES = ("", "api/hello")
"""What harnesses ask for to see whether anybody is there."""
MODELS = (POLICY_MODEL, HELPER_MODEL)
MAX_BODY_BYTES = 64 * 2**20
KEEP_ALIVE_S = 10.0
"""A stream that waits longer is opened, and gets a comment as often."""
READ_S, WRITE_S = 60.0, 60.0
"""For a client to send its body, and to take a reply: one that is slower is left."""
GRACE_S = 5.0
"""For what is in flight when the gateway is told to end."""


async def run_gateway(
    log: Log,
    writer: Writer,
    config: Config,
    *,
    engine_for: Callable[[str], Engine],
    renderer: Renderer,
    socket_path: Path | str | None = None,
    host: str | None = None,
    port: int = 0,
    last_port: int = 0,
    ready: Callable[[int], None] = lambda port: None,
    clock_s: Callable[[], float] = time.time,
    seen: Callable[[str, Request], None] = lambda endpoint, request: None,
    open_sessions: bool = False,
) -> None:
    """Serve until cancelled or until `run.finished`; then finish briefly what is in flight.

    Listens on the socket file, and on `host` when one is given. `engine_for` turns a cell's engine URL into
    its engine. `ready` is called with the TCP port (0 for none) when requests are taken. `last_port`: of the gateway
    before this one, taken for port 0 if it can be, so that harnesses find it again. `seen` is told of every request
    that was understood. `open_sessions`: a session is opened by its first call, whoever makes it. Raises ConfigError
    for a port that is taken.
    """
    async with asyncio.TaskGroup() as tasks:
        known = Follower(log, writer)
        calls = Calls(known, config, engine_for=engine_for, renderer=renderer, clock_s=clock_s, tasks=tasks)
        endless = [tasks.create_task(known.follow())]
        await known.catch_up()
        await calls.close_orphans()
        endless += [tasks.create_task(calls.seats.answer_fences()), tasks.create_task(calls.seats.move_calls())]
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", Gateway(calls, seen, open_sessions=open_sessions).handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=GRACE_S)
        await runner.setup()
        try:
            if socket_path is not None:
                await web.UnixSite(runner, str(socket_path)).start()
            if host is not None and (port or not await _listens(runner, host, last_port or free_ports(1)[0])):
                await _listen(runner, host, port)
            ready(next((address[1] for address in runner.addresses if isinstance(address, tuple)), 0))
            await known.wait_for(lambda: known.run_finished)
        finally:
            for site in list(runner.sites):
                await site.stop()
            await calls.end(GRACE_S)
            await runner.cleanup()
            # What the last handlers left to write.
            await calls.end(GRACE_S)
            for task in endless:
                task.cancel()


async def _listen(runner: web.AppRunner, host: str, port: int) -> None:
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        raise ConfigError(
            f"gateway: {host}:{port}: {error.strerror}; set gateway.port (`gyre gateway`: --port) to a free "
            "one, or to 0 for any"
        ) from None


async def _listens(runner: web.AppRunner, host: str, port: int) -> bool:
    """Whether it could listen there."""
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError:
        await site.stop()
        return False
    return True


class Gateway:
    def __init__(self, calls: Calls, seen: Callable[[str, Request], None], *, open_sessions: bool) -> None:
        self._calls = calls
        self._seen = seen
        self._open_sessions = open_sessions

    async def handle(self, request: web.Request) -> web.StreamResponse:
        headers = request.headers
        name, endpoint = split_path(request.path, headers.get("authorization", "") or headers.get("x-api-key", ""))
        of_messages = endpoint == COUNT_TOKENS or "anthropic-version" in headers
        dialect = DIALECTS.get(endpoint) or (anthropic_messages if of_messages else chat)
        try:
            if request.method in ("GET", "HEAD"):
                return await self._look(request, name, endpoint)
            if request.method != "POST" or (endpoint not in DIALECTS and endpoint != COUNT_TOKENS):
                raise _not_found(request)
            if self._open_sessions:
                name = open_name(request.path, name)
                await self._calls.open_session(name)
            await self._calls.check_session(name)
            parsed = dialect.parse_request(await _read_body(request))
            parsed = roles.label(parsed, headers)
            self._seen(endpoint, parsed)
            if endpoint == COUNT_TOKENS:
                return _json(anthropic_messages.render_count(self._calls.count_tokens(name, parsed)))
        except ProviderError as error:
            return _error_response(dialect, error)
        return await self._answer(request, dialect, name, parsed)

    async def _look(self, request: web.Request, name: str, endpoint: str) -> web.Response:
        """What is read and never recorded: whether anybody is there, and the models."""
        if endpoint in ADDRESSES:
            return _json(b'{"service": "gyre"}')
        if not self._open_sessions:
            await self._calls.check_session(name)
        first, _, model = endpoint.partition("/")
        if first != "models" or model not in ("", *MODELS):
            raise _not_found(request)
        return _json(orjson.dumps(_model(model) if model else _models()))

    async def _answer(self, request: web.Request, dialect: Dialect, name: str, parsed: Request) -> web.StreamResponse:
        call = self._calls.start(name, parsed, _Client(request))
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "cache-control": "no-cache"})
        while not (await asyncio.wait((call,), timeout=KEEP_ALIVE_S if parsed.stream else None))[0]:
            await _send(request, response, dialect.KEEP_ALIVE)
        answer = call.result()
        if isinstance(answer, ProviderError):
            if parsed.stream and (body := dialect.render_stream_error(parsed, answer)):
                await _send(request, response, body, end=True)
                return response
            if not response.prepared:
                return _error_response(dialect, answer)
            _abort(request)
            return response
        if parsed.stream:
            body = b"".join(dialect.render_chunks(parsed, answer))
        else:
            body = dialect.render_response(parsed, answer)
            response.content_type = "application/json"
            response.content_length = len(body)
        delivered = await _send(request, response, body, end=True)
        self._calls.deliver(answer, name, delivered=delivered)
        return response


class _Client:
    def __init__(self, request: web.Request) -> None:
        self._request = request

    @property
    def gone(self) -> bool:
        transport = self._request.transport
        return transport is None or transport.is_closing()


def split_path(path: str, authorization: str) -> tuple[str, str]:
    """(session, endpoint): of `/s/<session>[/v1]/<endpoint>`, or with the API key as the session."""
    parts = path.strip("/").split("/")
    session = authorization.removeprefix("Bearer ").strip()
    if len(parts) > 1 and parts[0] == "s":
        session, parts = parts[1], parts[2:]
    if parts[:1] == ["v1"]:
        parts = parts[1:]
    return session, "/".join(parts)


def open_name(path: str, name: str) -> str:
    """The session that a request opens where anybody may: the name in its address, or the digest of its key, for
    that may be a secret. Raises ProviderError for a name that cannot be one."""
    if not path.strip("/").startswith("s/"):
        return f"key-{hashlib.sha256(name.encode()).hexdigest()[:16]}" if name else "default"
    try:
        return check_token(name, "session")
    except ConfigError as error:
        raise ProviderError(401, "invalid_session", str(error)) from None


async def _read_body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(READ_S):
            return await request.read()
    except TimeoutError:
        raise ProviderError(408, "request_timeout", f"the body did not come within {READ_S:g} s") from None
    except web.HTTPRequestEntityTooLarge:
        raise ProviderError(413, "request_too_large", f"the body is larger than {MAX_BODY_BYTES} bytes") from None
    except (web.HTTPException, web.RequestPayloadError, ConnectionError) as error:
        raise ProviderError(400, "invalid_request", f"the body cannot be read: {error}") from None


async def _send(request: web.Request, response: web.StreamResponse, body: bytes, *, end: bool = False) -> bool:
    """Whether the bytes went out to a client that is still there."""
    client = _Client(request)
    if client.gone:
        return False
    try:
        async with asyncio.timeout(WRITE_S):
            if not response.prepared:
                await response.prepare(request)
            await response.write(body)
            if end:
                await response.write_eof()
    except TimeoutError:
        _abort(request)
        return False
    except ConnectionError:
        return False
    return not client.gone


def _error_response(dialect: Dialect, error: ProviderError) -> web.Response:
    headers = {"retry-after": str(error.retry_after_s)} if error.retry_after_s else {}
    return web.Response(
        status=error.status, headers=headers, body=dialect.render_error(error), content_type="application/json"
    )


def _not_found(request: web.Request) -> ProviderError:
    return ProviderError(
        404,
        "not_found",
        f"{request.method} {request.path!r:.80} is not served: POST to one of "
        + ", ".join(f"/s/<session>/v1/{known}" for known in DIALECTS),
    )


def _model(name: str) -> dict[str, Any]:
    """In one body what the clients of both providers read."""
    return {
        "id": name,
        "type": "model",
        "object": "model",
        "display_name": name,
        "created": 0,
        "created_at": "1970-01-01T00:00:00Z",
        "owned_by": "gyre",
    }


def _models() -> dict[str, Any]:
    listed = [_model(name) for name in MODELS]
    return {"object": "list", "data": listed, "has_more": False, "first_id": MODELS[0], "last_id": MODELS[-1]}


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _abort(request: web.Request) -> None:
    """A clean end would pass for a whole reply."""
    if request.transport is not None:
        request.transport.abort()
