"""Shell. The client of one rollout engine, and the command that starts it. No SGLang, no torch.

Invariant: a call is sent at most once. Every request has a connection of its own, because a server
drops idle ones and a request on a dropped connection may or may not have been taken; on loopback a
new one costs a fraction of a millisecond, against tens of milliseconds for the shortest call.

Direction: token ids -> HTTP -> Generation; manifest -> HTTP -> PullReport. What goes wrong is an
EngineError, with the status where the engine answered.
"""

import asyncio
import math
import sys
import time
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Self

import aiohttp
import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from gyre.agents.engine_client import Finish, Generation
from gyre.config import EngineConfig
from gyre.errors import EngineError
from gyre.events.types import VersionSpan
from gyre.workers.kv_store import engine_env
from gyre.workers.manifest import WeightManifest

CONTROL_TIMEOUT_S = 30.0
KEPT_S = 2.0
"""An unused connection is closed well before the server closes it (5 s): a request must not meet its end."""
PULL_TIMEOUT_S = 600.0


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    ready: bool
    version: int
    digest: str
    """Of the weights pulled last; empty while the engine serves the checkpoint it started from."""
    model_path: str
    num_running: int
    paused: bool


class PullReport(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    digest: str
    num_bytes: int
    seconds: dict[str, float]
    """`fetch`, `verify`, `pause`, `load`; sampling stands still during the last two."""


def engine_command(
    model: Path | str, port: int, config: EngineConfig, *, version: int = 0, host: str = "127.0.0.1"
) -> tuple[tuple[str, ...], dict[str, str]]:
    """argv and environment additions that start an engine; `config.start_timeout_s` is the caller's."""
    argv = (
        sys.executable, "-m", "gyre.workers.engine_host", "--model", str(model), "--host", host, "--port", str(port),
        "--version", str(version), "--context-tokens", str(config.context_tokens),
        "--max-total-tokens", str(config.max_total_tokens),
        "--max-running-requests", str(config.max_running_requests),
        *(("--kv-page-tokens", str(config.kv_page_tokens)) if config.kv_store else ()),
    )  # fmt: skip
    env = {
        # More threads, or threads that spin while they wait, slow everything else on a small machine.
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore::UserWarning",
        "PYTHONUNBUFFERED": "1",
    }
    if config.kv_store:
        env |= engine_env(config.kv_store, host)
    return argv, env


class SglangEngine:
    """An `Engine` (gyre.agents.engine_client) that speaks to `gyre.workers.engine_host`."""

    def __init__(self, base_url: str, *, call_timeout_s: float = 120.0, plain: bool = False) -> None:
        """`plain`: any SGLang server, whose weights do not change while it serves: all of it is version 0."""
        self.plain = plain
        self.base_url = base_url.rstrip("/")
        self.call_timeout_s = call_timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(
        self,
        rid: str,
        input_ids: NDArray[np.int32],
        *,
        temperature: float,
        top_p: float,
        max_tokens: int,
        stop_token_ids: tuple[int, ...],
        extra_key: str,
        stop: tuple[str, ...] = (),
    ) -> Generation:
        """See `Engine.generate`. A call that is cancelled or late is aborted on the engine as well."""
        body = {
            "rid": rid,
            "input_ids": input_ids,
            "extra_key": extra_key,
            "return_logprob": True,
            "logprob_start_len": -1,
            "sampling_params": {
                "temperature": temperature,
                "top_p": top_p,
                "max_new_tokens": max_tokens,
                "stop_token_ids": list(stop_token_ids),
                "stop": list(stop),
                "skip_special_tokens": False,
                "no_stop_trim": True,
            },
        }
        try:
            answer = await self._post("/generate", body, self.call_timeout_s)
        except (asyncio.CancelledError, TimeoutError) as error:
            await self._abort_quietly(rid)
            if isinstance(error, asyncio.CancelledError):
                raise
            raise EngineError(f"engine {self.base_url}: no answer to {rid} in {self.call_timeout_s} s") from None
        return parse_generation(answer, self.base_url, plain=self.plain)

    async def check_health(self) -> None:
        """Of any SGLang server. Raises EngineError."""
        await self._control("GET", "/health")

    async def abort(self, rid: str) -> None:
        await self._control("POST", "/abort_request", {"rid": rid})

    async def info(self) -> EngineInfo:
        return msgspec.convert(await self._control("GET", "/gyre/engine"), EngineInfo)

    async def model_info(self) -> dict[str, Any]:
        """SGLang's own description of the model."""
        answer: dict[str, Any] = await self._control("GET", "/model_info")
        return answer

    async def ready(self) -> bool:
        """False while the engine is starting or gone. Works while it is paused."""
        try:
            return (await self.info()).ready
        except EngineError:
            return False

    async def wait_ready(self, timeout_s: float, poll_s: float = 0.2) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.ready():  # noqa: ASYNC110 - the server cannot call back
                    await asyncio.sleep(poll_s)
        except TimeoutError:
            raise EngineError(f"engine {self.base_url}: not ready after {timeout_s} s; see its log") from None

    async def idle(self) -> bool:
        return (await self.info()).num_running == 0

    async def flush_cache(self) -> None:
        """Forget all KV that the engine itself holds. Raises EngineError while a call is in flight."""
        await self._control("POST", "/flush_cache", {}, is_text=True)

    async def pause(self) -> None:
        """Stop sampling; calls in flight wait and keep their KV."""
        await self._control("POST", "/pause_generation", {"mode": "in_place"})

    async def resume(self) -> None:
        await self._control("POST", "/continue_generation", {"torch_empty_cache": False})

    async def release(self) -> None:
        """Give weights and KV memory back. Raises EngineError (409) while a call is in flight."""
        await self._control("POST", "/gyre/release", {})

    async def restore(self) -> None:
        """Take the memory again, if it was given back. On a GPU the weights are void until the next `pull_weights`."""
        await self._control("POST", "/gyre/restore", {})

    async def pull_weights(self, manifest: WeightManifest) -> PullReport:
        """Have the engine fetch, verify and flip a version; EngineError (409) when it is not whole."""
        try:
            answer = await self._post("/gyre/pull_weights", msgspec.to_builtins(manifest), PULL_TIMEOUT_S)
        except TimeoutError:
            raise EngineError(f"engine {self.base_url}: version {manifest.version} not pulled in time") from None
        return msgspec.convert(answer, PullReport)

    async def _abort_quietly(self, rid: str) -> None:
        try:
            await self.abort(rid)
        except EngineError:
            return  # gone or busy: the call it was about has failed already

    async def _control(self, method: str, path: str, body: Any = None, *, is_text: bool = False) -> Any:
        """Raises EngineError for one that does not answer, too."""
        try:
            return await self._request(method, path, body, CONTROL_TIMEOUT_S, is_text=is_text)
        except TimeoutError:
            raise EngineError(f"engine {self.base_url}{path}: no answer in {CONTROL_TIMEOUT_S:g} s") from None

    async def _post(self, path: str, body: Any, timeout_s: float) -> Any:
        return await self._request("POST", path, body, timeout_s)

    async def _request(self, method: str, path: str, body: Any, timeout_s: float, *, is_text: bool = False) -> Any:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S)
            self._session = aiohttp.ClientSession(connector=connector)
        content = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        headers = {"Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        url = self.base_url + path
        try:
            async with self._session.request(method, url, data=content, headers=headers, timeout=timeout) as response:
                answer = await response.read()
                if response.status != 200:
                    raise EngineError(
                        f"engine {url}: {response.status}: {_reason(answer)}",
                        response.status,
                        retry_after_s(response.headers.get("retry-after", ""), time.time()),
                    )
        except aiohttp.ClientError as error:
            raise EngineError(f"engine {url}: {type(error).__name__}: {error}; is its process alive?") from None
        try:
            return msgspec.json.decode(answer) if answer and not is_text else None
        except msgspec.DecodeError:
            raise EngineError(f"engine {url}: answered {answer[:80]!r}, which is not JSON") from None


def retry_after_s(value: str, now_s: float) -> int:
    """Of the header's two forms: seconds, or until its date, as proxies send it; 0 for none and for what is neither."""
    if value.isascii() and value.isdigit():
        return int(value)
    try:
        return max(0, math.ceil(parsedate_to_datetime(value).timestamp() - now_s))
    except ValueError:
        return 0


def _reason(answer: bytes) -> str:
    """The message in an error body, whichever of the server's shapes it has."""
    try:
        body = msgspec.json.decode(answer)
    except msgspec.DecodeError:
        return answer[:200].decode(errors="replace")
    for key in ("reason", "message", "error"):
        if isinstance(body, dict) and key in body:
            found = body[key]
            return str(found.get("message", found)) if isinstance(found, dict) else str(found)
    return str(body)[:200]


def parse_generation(answer: Any, source: str = "engine", *, plain: bool = False) -> Generation:
    """SGLang's `/generate` answer as a Generation. Raises EngineError when its parts do not fit together."""
    try:
        meta = answer["meta_info"]
        output_ids = tuple(answer["output_ids"])
        logprobs = tuple(item[0] for item in meta["output_token_logprobs"])
        named = tuple(item[1] for item in meta["output_token_logprobs"])
        spans = tuple(
            VersionSpan(version=int(span["version"]), start=span["start"], end=span["end"])
            for span in ([_all(output_ids)] if plain else meta["weight_versions"])
            if span["end"] > span["start"]
        )
        finish: Finish = meta["finish_reason"]["type"]
        generation = Generation(
            output_ids=output_ids,
            logprobs=logprobs,
            spans=spans,
            finish=finish,
            num_prompt_tokens=meta["prompt_tokens"],
            num_cached_tokens=meta["cached_tokens"],
            engine_s=meta["e2e_latency"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"{source}: a /generate answer without what is needed: {error!r}") from None
    starts = [span.start for span in spans] + [len(output_ids)]
    ends = [0] + [span.end for span in spans]
    if named != output_ids or starts != ends or finish not in ("stop", "length", "abort"):
        raise EngineError(f"{source}: a /generate answer whose logprobs, spans or finish do not fit its tokens")
    return generation


def _all(output_ids: tuple[int, ...]) -> dict[str, int]:
    return {"version": 0, "start": 0, "end": len(output_ids)}
