"""Each process of a run gets its own credential and no other; who only reads gets the reader's."""

import asyncio
import os
import stat
import sys
from pathlib import Path

import pytest

from gyre.config import Config
from gyre.errors import StreamError
from gyre.events.access import connect_run, open_log
from gyre.events.jetstream import connect
from gyre.events.log import Writer
from gyre.events.run_dir import RunDir
from gyre.events.types import RunFinished, SwitchRequested, Ticked
from gyre.workers.run import PROCESSES, open_run
from gyre.workers.supervisor import Supervisor

COMMAND = SwitchRequested(cell="c0", role="train", epoch=2, term=1)


def test_processes_have_their_own_role_and_readers_the_reader_s(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "one")

    async def main() -> None:
        async with open_run(run_dir, Config(), "one", lambda: 0) as opened:
            envs = {name: opened.env(name) for name in PROCESSES}
            assert len({env["GYRE_NATS_TOKEN"] for env in envs.values()}) == len(PROCESSES)
            for name, env in envs.items():
                log = await connect(env["GYRE_NATS_URL"], "one", token=env["GYRE_NATS_TOKEN"])
                writer = Writer(log, name, 1, lambda: 1)
                if name == "scheduler":
                    assert await writer.append(COMMAND)
                else:
                    with pytest.raises(StreamError, match="may not write there"):
                        await writer.append(COMMAND)
                await log.close()
            async with connect_run(run_dir) as owner:
                await Writer(owner, "owner", 1, lambda: 1).append(Ticked(term=1, now_s=1.0))
            async with open_log(run_dir) as (log, live):
                assert live and await log.last_seq() == 2
                with pytest.raises(StreamError, match="may not write there"):
                    await Writer(log, "reader", 1, lambda: 1).append(RunFinished(reason="completed"))
        async with open_log(run_dir) as (log, live):
            assert not live and await log.last_seq() == 2
            with pytest.raises(StreamError, match="may not write there"):
                await Writer(log, "reader", 1, lambda: 1).append(RunFinished(reason="completed"))

    asyncio.run(main())
    for path in (run_dir.address_file, run_dir.nats / "users", run_dir.nats / "server.conf"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_child_gets_what_it_alone_shall_know(tmp_path: Path) -> None:
    async def exited(name: str, code: int, restarted: bool) -> None:
        raise AssertionError(f"{name} ended with {code}")

    async def main() -> None:
        with (tmp_path / "lock").open("w") as lock:
            supervisor = Supervisor(tmp_path / "logs", lock=lock.fileno(), moved=lambda: 0, exited=exited)
            code = "import os; print(os.environ.get('GYRE_NATS_TOKEN', 'none'))"
            for name in ("gateway", "other"):
                supervisor.keep(
                    name, (sys.executable, "-c", code), {"GYRE_NATS_TOKEN": "g:1"} if name == "gateway" else {}
                )
            await supervisor.wait_all(120)
            await supervisor.stop()

    assert "GYRE_NATS_TOKEN" not in os.environ
    asyncio.run(main())
    assert (tmp_path / "logs/gateway.log").read_text() == "g:1\n"
    assert (tmp_path / "logs/other.log").read_text() == "none\n"
