"""Shell. A scripted engine as a process: `python -m gyre.workers.bench_engine --delay-s 0` prints its address.

It speaks what gyre asks of an SGLang server (`/generate`: ids in, ids out) and what other gateways ask of a vLLM
server (`/v1/chat/completions`, with the ids of prompt and reply). Invariant: a reply is the same few tokens each time
and takes the same time, so that whatever else a client waits for was added on the way.
"""

import argparse
import asyncio
import sys
import time
from typing import Any

import orjson
from aiohttp import web

WORDS = ' I look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "cat ledger.txt"}}\n</tool_call>'
MAX_BODY_BYTES = 256 * 2**20


class ScriptedEngine:
    """`reply` are the ids of WORDS, the end of the turn included."""

    def __init__(self, reply: list[int], delay_s: float, bytes_per_token: float) -> None:
        self.reply = reply
        self.delay_s = delay_s
        self.bytes_per_token = bytes_per_token

    async def generate(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        await asyncio.sleep(self.delay_s)
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": "stop", "matched": self.reply[-1]},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(self.reply),
            "cached_tokens": 0,
            "e2e_latency": self.delay_s,
            "output_token_logprobs": [[-0.5, token, None] for token in self.reply],
            "weight_versions": [{"version": 0, "start": 0, "end": len(self.reply)}],
        }
        return _json({"text": "", "output_ids": self.reply, "meta_info": meta})

    async def chat(self, request: web.Request) -> web.Response:
        content = await request.read()
        orjson.loads(content)
        await asyncio.sleep(self.delay_s)
        call = {"name": "bash", "arguments": '{"command": "cat ledger.txt"}'}
        message = {
            "role": "assistant",
            "content": " I look.",
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        }
        # As many as there would be: this engine has no tokenizer.
        num = int(len(content) / self.bytes_per_token)
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "tool_calls",
            "token_ids": self.reply,
            "logprobs": {"content": [{"token": "x", "logprob": -0.5, "top_logprobs": []} for _ in self.reply]},
        }
        usage = {"prompt_tokens": num, "completion_tokens": len(self.reply), "total_tokens": num + len(self.reply)}
        head = {"id": "chatcmpl-1", "object": "chat.completion", "created": int(time.time()), "model": "m"}
        return _json(
            {**head, "choices": [choice], "usage": usage, "prompt_token_ids": [100 + n % 500 for n in range(num)]}
        )

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()


def _json(tree: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(tree), content_type="application/json")


async def serve(engine: ScriptedEngine) -> None:
    """Until it is killed."""
    application = web.Application(client_max_size=MAX_BODY_BYTES)
    application.router.add_post("/generate", engine.generate)
    application.router.add_post("/v1/chat/completions", engine.chat)
    application.router.add_get("/health", engine.health)
    application.router.add_get("/v1/models", engine.health)
    runner = web.AppRunner(application, access_log=None, keepalive_timeout=3600)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--reply", required=True)
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--bytes-per-token", type=float, default=4.0)
    options = parser.parse_args(argv)
    reply = [int(token) for token in options.reply.split(",")]
    asyncio.run(serve(ScriptedEngine(reply, options.delay_s, options.bytes_per_token)))


if __name__ == "__main__":
    main(sys.argv[1:])
