"""The line between a harness and the gateway that breaks where a reply holds a text."""

import asyncio
from pathlib import Path

import pytest

from gyre.agents.broken_line import BrokenLine

REPLY = b"a reply that goes on, and on, to the end"


async def ask(line: BrokenLine, gateway: Path, tmp_path: Path, chunk: int, times: int) -> list[bytes]:
    """What the harness sees of each reply, when the gateway sends it in chunks of this size."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.read() == b"a request"
        for start in range(0, len(REPLY), chunk):
            writer.write(REPLY[start : start + chunk])
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.close()

    seen = []
    server = await asyncio.start_unix_server(answer, str(gateway))
    async with line.listen(tmp_path / "line.sock") as url:
        for number in range(times):
            address = url.removeprefix("http://").rpartition(":")
            by_file = asyncio.open_unix_connection(str(tmp_path / "line.sock"))
            by_tcp = asyncio.open_connection(address[0], int(address[2]))
            reader, writer = await (by_tcp if number % 2 else by_file)
            (by_file if number % 2 else by_tcp).close()
            writer.write(b"a request")
            writer.write_eof()
            seen.append(await reader.read())
            writer.close()
    server.close()
    return seen


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_it_breaks_once_and_passes_all_that_stands_before(
    tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gyre.agents.broken_line.UNREAD_S", 0.01)
    line = BrokenLine(tmp_path / "gateway.sock", "on, to")
    first, second = asyncio.run(ask(line, tmp_path / "gateway.sock", tmp_path, chunk, 2))
    assert (first, second) == (REPLY[: REPLY.index(b"on, to")], REPLY)
    assert line.broken


def test_it_passes_everything_where_nothing_is_to_break(tmp_path: Path) -> None:
    for text in ("", "not in there"):
        line = BrokenLine(tmp_path / "gateway.sock", text)
        assert asyncio.run(ask(line, tmp_path / "gateway.sock", tmp_path, 7, 1)) == [REPLY]
        assert not line.broken
        (tmp_path / "gateway.sock").unlink(missing_ok=True)


def test_a_gateway_that_is_not_there_ends_the_connection(tmp_path: Path) -> None:
    async def case() -> None:
        async with BrokenLine(tmp_path / "none.sock", "").listen(tmp_path / "line.sock"):
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "line.sock"))
            with pytest.raises(ConnectionError):
                writer.write(b"a request")
                if not await reader.read():
                    raise ConnectionResetError
            writer.close()

    asyncio.run(case())
