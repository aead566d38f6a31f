"""The window of sends against a wire that loses, refuses and delays."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

import msgspec
import orjson
import pytest

from gyre.errors import StreamError
from gyre.events import window as window_module
from gyre.events.feed import Feed, FeedLost, sequences
from gyre.events.log import Item
from gyre.events.window import Answer, ApiError, Window
from gyre.events.wire import Message, Outgoing


class Letter(msgspec.Struct, frozen=True):
    subject: str
    reply: str = ""
    data: bytes = b""
    headers: dict[str, str] | None = None


STORED = orjson.dumps({"stream": "S", "seq": 7})


class FakeWire:
    """Keeps what was posted; `answer` says what comes back for the n-th post, if anything."""

    def __init__(self, answer: Callable[[int], Letter | None]) -> None:
        self.posts: list[Outgoing] = []
        self._answer = answer

    def new_inbox(self) -> str:
        return "_INBOX.x"

    max_bytes = 1 << 20

    def post(self, messages: Iterable[Outgoing]) -> bool:
        for message in messages:
            self.posts.append(message)
            answer = self._answer(len(self.posts))
            if answer is not None and message.reply:
                asyncio.get_running_loop().call_soon(
                    self.hand_in, msgspec.structs.replace(answer, subject=message.reply)
                )
        return True

    async def listen(self, subject: str, callback: Callable[[Message], None]) -> Callable[[], Awaitable[None]]:
        async def stop() -> None:
            return None

        self.hand_in = callback
        return stop

    async def api(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_module, "ACK_TIMEOUT_S", 0.08)
    monkeypatch.setattr(window_module, "BACKOFF_S", 0.01)


def run(body: Coroutine[Any, Any, None]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            await body

    asyncio.run(main())


async def publish(window: Window) -> Answer:
    await window.room()
    return await window.send((Item("s", b"body", "a"),))


NO_RESPONDERS = Letter("", headers={"Status": "503"})
STARTING = Letter("", data=orjson.dumps({"error": {"code": 503, "err_code": 10008, "description": "unavailable"}}))
IN_PROCESS = Letter("", data=orjson.dumps({"error": {"code": 409, "err_code": 10158, "description": "in process"}}))


@pytest.mark.parametrize("first", [None, NO_RESPONDERS, STARTING, IN_PROCESS])
def test_a_send_without_a_lasting_answer_is_repeated_as_it_was(first: Letter | None) -> None:
    async def body() -> None:
        wire = FakeWire(lambda n: first if n < 3 else Letter("", data=STORED))
        window = Window(wire, patience_s=5)
        await window.open()
        assert (await publish(window)).seq == 7
        assert len(wire.posts) == 3
        assert len({(p.subject, p.payload, p.headers) for p in wire.posts}) == 1

    run(body())


@pytest.mark.parametrize("err_code", [10023, 10047, 10071, 10077])
def test_a_lasting_error_is_returned(err_code: int) -> None:
    async def body() -> None:
        error = {"error": {"code": 503, "err_code": err_code, "description": "x"}}
        wire = FakeWire(lambda n: Letter("", data=orjson.dumps(error)))
        window = Window(wire, patience_s=5)
        await window.open()
        if err_code == 10071:
            error["error"]["code"] = 400
        answer = await publish(window)
        assert answer.error is not None
        assert answer.error.err_code == err_code
        assert len(wire.posts) == 1

    run(body())


def test_a_send_is_given_up_before_the_server_forgets_it() -> None:
    async def body() -> None:
        window = Window(FakeWire(lambda n: None), patience_s=0.3)
        await window.open()
        with pytest.raises(StreamError, match=r"s: no acknowledgement for 0\.3 s"):
            await publish(window)

    run(body())


def test_a_full_window_holds_senders_back_and_a_reconnect_repeats_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_module, "MAX_OPEN", 3)
    monkeypatch.setattr(window_module, "ACK_TIMEOUT_S", 60)

    async def body() -> None:
        deaf = True
        wire = FakeWire(lambda n: None if deaf else Letter("", data=STORED))
        window = Window(wire, patience_s=5)
        await window.open()
        tasks = [asyncio.create_task(publish(window)) for _ in range(5)]
        await asyncio.sleep(0.05)
        assert [p.reply[-2:] for p in wire.posts] == [".1", ".2", ".3"]
        tasks[3].cancel()
        deaf = False
        window.resend()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [p.reply[-2:] for p in wire.posts[3:]] == [".1", ".2", ".3", ".4"]
        assert isinstance(results[3], asyncio.CancelledError)
        assert [r.seq for r in results if isinstance(r, Answer)] == [7] * 4

    run(body())


def _batch_answer(wire: "FakeWire", error: bool = False) -> Letter:
    """Of the batch that the last post commits: the server had 100 messages before."""
    if error:
        return Letter("", data=orjson.dumps({"error": {"code": 400, "err_code": 10201, "description": "duplicate"}}))
    place = int(wire.posts[-1].headers.split("Nats-Batch-Sequence: ")[1].split("\r\n")[0])
    return Letter("", data=orjson.dumps({"seq": 100 + place, "batch": "b", "count": place}))


def test_many_sends_of_one_turn_are_one_batch_with_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_module, "MIN_BATCH", 5)

    async def body() -> None:
        wire = FakeWire(lambda n: _batch_answer(wire))
        window = Window(wire, patience_s=5)
        await window.open()
        answers = await asyncio.gather(*(publish(window) for _ in range(5)))
        assert [a.seq for a in answers] == [101, 102, 103, 104, 105]
        assert len(wire.posts) == 5
        assert len({p.headers.split("Nats-Batch-Id: ")[1].split("\r\n")[0] for p in wire.posts}) == 1
        assert [bool(p.reply) for p in wire.posts] == [False] * 4 + [True]
        assert ["Nats-Batch-Commit: 1\r\n" in p.headers for p in wire.posts] == [False] * 4 + [True]

    run(body())


@pytest.mark.parametrize("how", ["refused", "lost", "reconnect", "unknown to the server", "nobody there"])
def test_sends_of_a_batch_in_doubt_are_repeated_one_by_one(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(window_module, "MIN_BATCH", 3)

    async def body() -> None:
        def answer(n: int) -> Letter | None:
            if n > 4:
                return Letter("", data=orjson.dumps({"seq": 100 + n, "duplicate": True}))
            if how == "unknown to the server":  # which stores each as if it were alone
                return Letter("", data=STORED)
            if how == "nobody there":
                return NO_RESPONDERS
            return _batch_answer(wire, error=True) if how == "refused" else None

        wire = FakeWire(answer)
        window = Window(wire, patience_s=5)
        await window.open()
        tasks = [asyncio.create_task(publish(window)) for _ in range(4)]
        await asyncio.sleep(0.01)
        if how == "reconnect":
            window.resend()
        answers = await asyncio.gather(*tasks)
        assert [a.seq for a in answers] == [105, 106, 107, 108]
        assert all(a.duplicate for a in answers)
        assert [p.headers for p in wire.posts[4:]] == ["Nats-Msg-Id: a\r\n"] * 4

    run(body())


def test_while_the_server_is_behind_sends_wait_and_go_out_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_module, "MIN_BATCH", 3)
    monkeypatch.setattr(window_module, "ACK_TIMEOUT_S", 60)

    async def body() -> None:
        wire = FakeWire(lambda n: _batch_answer(wire) if "Batch" in wire.posts[-1].headers else None)
        window = Window(wire, patience_s=5)
        await window.open()
        first = []
        for number in range(3):  # each in a turn of its own, so one by one
            first.append(asyncio.create_task(publish(window)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert len(wire.posts) == number + 1
        later = [asyncio.create_task(publish(window)) for _ in range(4)]
        await asyncio.sleep(0.01)
        assert len(wire.posts) == 3
        wire.hand_in(Letter(wire.posts[0].reply, data=STORED))
        assert [a.seq for a in await asyncio.gather(*later)] == [101, 102, 103, 104]
        for post in wire.posts[1:3]:
            wire.hand_in(Letter(post.reply, data=STORED))
        assert [a.seq for a in await asyncio.gather(*first)] == [7, 7, 7]
        assert len(wire.posts) == 7

    run(body())


def test_what_must_stand_alone_is_in_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_module, "MIN_BATCH", 3)

    async def body() -> None:
        wire = FakeWire(lambda n: Letter("", data=STORED))
        window = Window(wire, patience_s=5)
        await window.open()
        sends = [window.send((Item("s", b"body", "" if n == 2 else "a"),)) for n in range(4)]
        assert [(await send).seq for send in sends] == [7] * 4
        assert all(p.reply and "Batch" not in p.headers for p in wire.posts)

    run(body())


def test_what_is_one_fact_is_a_batch_of_its_own_and_is_repeated_as_one() -> None:
    """The server may have a part of it when a connection ends: it forgets that, and says so when it shall commit."""

    async def body() -> None:
        incomplete = orjson.dumps({"error": {"code": 400, "err_code": 10176, "description": "incomplete"}})
        wire = FakeWire(lambda n: Letter("", data=incomplete if 1 < n < 9 else STORED))
        window = Window(wire, patience_s=5)
        await window.open()
        items = [Item("s", b"%d" % number, f"{number}") for number in range(3)]
        sent = window.send((Item("s", b"before", "x"),)), window.send(items)
        assert (await sent[1]).seq == 7
        assert [post.payload for post in wire.posts] == [b"before"] + 3 * [b"0", b"1", b"2"]
        names = set()
        for batch in (wire.posts[at : at + 3] for at in (1, 4, 7)):
            assert [bool(post.reply) for post in batch] == [False, False, True]
            assert ["Commit: 1" in post.headers for post in batch] == [False, False, True]
            names |= {post.headers.partition("Batch-Id: ")[2].partition("\r\n")[0] for post in batch}
        assert len(names) == 3
        with pytest.raises(StreamError, match="s: 1002 events at once are more than 1000"):
            window.send(items * 334)

    run(body())


def test_open_bytes_are_bounded_and_a_body_that_no_server_takes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_module, "MAX_OPEN_BYTES", 8)

    async def body() -> None:
        wire = FakeWire(lambda n: Letter("", data=STORED))
        window = Window(wire, patience_s=5)
        await window.open()
        first, second = (window.send((Item("s", b"body"),)) for _ in range(2))
        assert window.is_full
        await first
        assert not window.is_full
        await second
        with pytest.raises(StreamError, match="more than the server's max_payload"):
            window.send((Item("s", bytes(1 << 20)),))
        wire.max_bytes = 2000
        await window.send((Item("s", bytes(1600)),))
        window.resend()  # over a new connection, to a server that takes less
        with pytest.raises(StreamError, match="1600 bytes are more than the server's max_payload"):
            window.send((Item("s", bytes(1600)),))

    run(body())


def test_a_send_that_nobody_waits_for_any_more_leaves_the_window_when_it_is_answered() -> None:
    async def body() -> None:
        wire = FakeWire(lambda n: None)
        window = Window(wire, patience_s=60)
        await window.open()
        given_up, waiting = (window.send((Item("s", b"body", "a"),)) for _ in range(2))
        await asyncio.sleep(0)
        given_up.cancel()
        for post in list(wire.posts):
            wire.hand_in(Letter(post.reply, data=STORED))
        assert (await waiting).seq == 7
        assert not window._open and window._open_bytes == 0

    run(body())


def test_a_reconnect_repeats_nothing_that_is_yet_to_go_out() -> None:
    async def body() -> None:
        wire = FakeWire(lambda n: Letter("", data=STORED))
        window = Window(wire, patience_s=5)
        await window.open()
        sends = [window.send((Item("s", b"body", f"{n}"),)) for n in range(2)]
        window.resend()
        assert [(await send).seq for send in sends] == [7, 7]
        assert [post.headers for post in wire.posts] == ["Nats-Msg-Id: 0\r\n", "Nats-Msg-Id: 1\r\n"]

    run(body())


def test_as_many_as_the_server_allows_are_stored_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_module, "MAX_BATCH", 3)

    async def body() -> None:
        window = Window(FakeWire(lambda n: Letter("", data=STORED)), patience_s=5)
        await window.open()
        items = [Item("s", b"body", f"{number}") for number in range(4)]
        assert (await window.send(items[:3])).seq == 7
        with pytest.raises(StreamError, match="4 events at once are more than 3"):
            window.send(items)

    run(body())


def test_errors_are_told_apart() -> None:
    assert ApiError(code=503, err_code=10077, description="maximum messages per subject exceeded").is_stored_before
    assert not ApiError(code=503, err_code=10077, description="no space left on device").is_stored_before
    assert ApiError(code=503, err_code=10077, description="no space left on device").is_full


def test_the_sequence_is_found_in_both_forms_of_an_ack_subject() -> None:
    assert sequences("$JS.ACK.S.C.1.42.5.1700000000.0") == (42, 5)
    assert sequences("$JS.ACK.domain.hash.S.C.1.42.5.1700000000.0.rand") == (42, 5)


@pytest.mark.parametrize("subjects", [(), ("cells",)])
def test_a_heartbeat_tells_of_messages_that_a_connection_took_with_it(subjects: tuple[str, ...]) -> None:
    async def body() -> None:
        feed = Feed(FakeWire(lambda n: None), "S", 5, subjects=subjects)
        beat = {"Status": "100", "Description": "Idle Heartbeat"}
        feed._on_message(Letter("", "$JS.ACK.S.C.1.5.1.0.0", b"five"))
        feed._on_message(
            Letter("", headers=beat | {"Nats-Last-Consumer": "1", "Nats-Last-Stream": "9" if subjects else "5"})
        )
        assert await feed.next() == (5, "", b"five")
        feed._on_message(
            Letter("", headers=beat | ({"Nats-Last-Consumer": "2"} if subjects else {"Nats-Last-Stream": "6"}))
        )
        with pytest.raises(FeedLost):
            await feed.next()

    run(body())


def test_a_feed_that_rests_begins_again_after_a_long_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that finds nothing does not tell of what a connection took with it."""
    monkeypatch.setattr("gyre.events.feed.EXPIRES_S", 0.05)

    async def body() -> None:
        nothing = Letter("", headers={"Status": "404", "Description": "No Messages"})
        wire = FakeWire(lambda n: nothing)
        feed = Feed(wire, "S", 5, rest_s=0.02)
        wire.hand_in = feed._on_message
        with pytest.raises(FeedLost, match="quiet"):
            await feed.next()
        assert len(wire.posts) == 3

    run(body())
