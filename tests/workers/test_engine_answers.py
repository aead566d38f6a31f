"""An engine that has much to do, as its client sees it: late is not gone."""

import asyncio

import pytest
from aiohttp import web

from gyre.errors import EngineError
from gyre.workers import engine as engine_module
from gyre.workers.engine import SglangEngine

READY = {"ready": True, "version": 0, "digest": "", "model_path": "", "num_running": 0, "paused": False}


def test_one_that_is_late_with_an_answer_is_asked_again_until_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "CONTROL_TIMEOUT_S", 0.2)
    num_asked, is_over = 0, asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        nonlocal num_asked
        num_asked += 1
        if num_asked <= 2:
            await is_over.wait()
        return web.json_response(READY)

    async def play() -> None:
        app = web.Application()
        app.router.add_get("/gyre/engine", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with SglangEngine(f"http://127.0.0.1:{runner.addresses[0][1]}") as engine:
            with pytest.raises(EngineError, match=r"/gyre/engine: no answer in 0\.2 s"):
                await engine.idle()
            await engine.wait_ready(120, poll_s=0.01)
        is_over.set()
        await runner.cleanup()

    asyncio.run(play())
    assert num_asked == 3
