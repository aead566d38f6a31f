"""KV of sessions whose cell leaves rollout: whose it is, what moves it, what it is called, and what is a miss."""

import asyncio
import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec
from cell_logs import arrival, departure, fold, joined, records
from hypothesis import given
from hypothesis import strategies as st
from scripted_cell import FINISHED, Stage, serving

from gyre.errors import TransferError
from gyre.events.tokens import pack_ids
from gyre.events.types import (
    CallCompleted,
    CallCut,
    CallStarted,
    CellFenced,
    CellLeased,
    CellLost,
    CellSwitched,
    EngineReleased,
    Event,
    ExecutionFinished,
    KvMigrated,
    KvMissed,
    SessionsRerouted,
    SwitchRolledBack,
    VersionSpan,
    WeightsPulled,
)
from gyre.workers.kv_migration import (
    KvManifest,
    KvOwners,
    KvPage,
    decide_move,
    evolve,
    find_torn,
    is_settled,
    page_digests,
    page_keys,
)
from gyre.workers.kv_mover import KvMover

PAGE = 4


def call(
    session: str, cell: str, *, name: str = "", base: str = "", shared: int = 0, context: Sequence[int] = ()
) -> CallStarted:
    return CallStarted(
        execution=session, session=session, call=name or f"{session}-1", base=base, shared=shared,
        context=pack_ids(list(context)), role_class="main", rule="root", marks=(), temperature=1.0, top_p=1.0,
        max_tokens=8, cell=cell,
    )  # fmt: skip


def cut(session: str, sampled: Sequence[int], name: str = "") -> CallCut:
    spans = (VersionSpan(version=0, start=0, end=len(sampled)),)
    return CallCut(
        execution=session, session=session, call=name or f"{session}-1", sampled=pack_ids(list(sampled)), logprobs=b"",
        spans=spans, reason="fence",
    )  # fmt: skip


def moved(session: str, epoch: int = 2, cell: str = "c0", target: str = "c1") -> KvMigrated:
    return KvMigrated(cell=cell, epoch=epoch, target=target, num_tokens=1, num_bytes=1, session=session)


def missed(session: str, epoch: int = 2) -> KvMissed:
    return KvMissed(cell="c0", epoch=epoch, session=session, num_tokens=1, reason="x")


def owners(*events: Event) -> KvOwners:
    found: KvOwners = fold(evolve, KvOwners(), records(events))
    return found


HELD = (call("a", "c0"), call("b", "c0"), call("c", "c1"))
FENCE = CellFenced(cell="c0", epoch=2)


# ---------------------------------------------------------------- whose it is


def test_the_source_owns_it_until_the_move_and_the_target_from_then_on() -> None:
    assert owners(*HELD, FENCE).unsettled("c0") == ("a", "b")
    after = owners(*HELD, FENCE, moved("a"))
    assert (after.owner("a"), after.owner("b"), after.unsettled("c0")) == ("c1", "c0", ("b",))
    assert not is_settled(after, "c0")
    settled = owners(*HELD, FENCE, moved("a"), missed("b"))
    assert is_settled(settled, "c0") and settled.owner("b") == ""


def test_a_move_counts_only_under_the_fence_of_its_owner() -> None:
    for late in (moved("a", epoch=1), moved("a", cell="c1"), moved("z")):
        assert owners(*HELD, FENCE, late).owner("a") == "c0"
    assert owners(*HELD, moved("a")).owner("a") == "c0", "nobody leaves"
    back = SwitchRolledBack(cell="c0", role="rollout", epoch=2, reason="")
    assert owners(*HELD, FENCE, back, moved("a")).owner("a") == "c0", "the switch was given up"
    assert owners(*HELD, FENCE, moved("a"), moved("a", target="c2")).owner("a") == "c1", "the first counts"


def test_what_is_not_moved_when_the_memory_is_freed_is_nobodys() -> None:
    for end in (EngineReleased(cell="c0", epoch=2, seconds=0.0), CellLost(cell="c0", reason=""), joined("c0")):
        after = owners(*HELD, FENCE, end)
        assert (after.owner("a"), after.owner("c")) == ("", "c1")
    done = ExecutionFinished(execution="a", reason="completed", exit_code=0, wall_s=0.0, detail="")
    assert owners(*HELD, done).unsettled("c0") == ("b",)


# ---------------------------------------------------------------- what it is called


def test_pages_are_chained_and_separated_by_version() -> None:
    ids = list(range(10))
    seed = hashlib.sha256(b"sglang-cache-namespace-v1" + b"\x01" + (1).to_bytes(8, "little") + b"7" + b"\x00").digest()
    first = hashlib.sha256(seed + struct.pack("<4I", *ids[:4])).digest()
    second = hashlib.sha256(first + struct.pack("<4I", *ids[4:8])).hexdigest()
    assert page_digests(ids, PAGE, "7") == (first.hex(), second), "the last page is not whole"
    assert not set(page_digests(ids, PAGE, "7")) & set(page_digests(ids, PAGE, "8"))
    assert page_keys(("d",), "p/q", 2) == ("p-q_d_0_k", "p-q_d_0_v", "p-q_d_1_k", "p-q_d_1_v")


@given(st.lists(st.integers(0, 100), max_size=40), st.lists(st.integers(0, 100), max_size=40))
def test_equal_prefixes_and_nothing_else_have_equal_pages(one: list[int], other: list[int]) -> None:
    for at, (x, y) in enumerate(zip(page_digests(one, PAGE, "0"), page_digests(other, PAGE, "0"), strict=False), 1):
        assert (x == y) == (one[: at * PAGE] == other[: at * PAGE])


def test_all_of_it_moves_or_none() -> None:
    pages = tuple(KvPage(key=f"k{i}", checksum=f"s{i}") for i in range(3))
    manifest = KvManifest(session="a", version=0, num_tokens=12, num_bytes=3, pages=pages)
    whole = {page.key: page.checksum for page in pages}
    where = {"cell": "c0", "epoch": 2, "session": "a", "num_tokens": 13}
    found = decide_move(manifest, whole, target="c1", **where)  # type: ignore[arg-type]
    assert isinstance(found, KvMigrated) and (found.target, found.num_tokens, found.digest) == (
        "c1",
        12,
        manifest.digest,
    )
    for torn in ({**whole, "k1": "other"}, {"k0": "s0", "k2": "s2"}):
        assert find_torn(manifest, torn) == ("k1",)
        found = decide_move(manifest, torn, target="c1", **where)  # type: ignore[arg-type]
        assert isinstance(found, KvMissed) and "1 of 3" in found.reason and found.num_tokens == 13
    for reason, nothing in (
        ("no cell", decide_move(manifest, whole, target="", **where)),  # type: ignore[arg-type]
        ("not in the store", decide_move(None, {}, target="c1", **where)),
    ):  # type: ignore[arg-type]
        assert isinstance(nothing, KvMissed) and reason in nothing.reason


# ---------------------------------------------------------------- the mover


class DictStore:
    """Objects by key; `torn` ones differ the next time that they are read."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects, self.torn, self.is_gone = objects, set[str](), False

    def exists(self, keys: Sequence[str]) -> list[bool]:
        if self.is_gone:
            raise TransferError("kv store: gone")
        return [key in self.objects for key in keys]

    def wait_for(self, keys: Sequence[str], timeout_s: float) -> bool:
        return all(self.exists(keys))

    def checksums(self, keys: Sequence[str]) -> tuple[dict[str, str], int]:
        found = {key: hashlib.sha256(self.objects[key]).hexdigest() for key in keys if key in self.objects}
        for key in self.torn & set(keys):
            self.objects[key] += b"!"
        return found, sum(len(self.objects[key]) for key in found)


def stored(ids: Sequence[int], version: int = 0) -> DictStore:
    keys = page_keys(page_digests(list(ids)[:-1], PAGE, str(version)), "policy")
    return DictStore({key: key.encode() for key in keys})


def mover(store: DictStore, *events: Event) -> KvMover:
    found = KvMover(store, model="policy", page_tokens=PAGE, patience_s=0.01)
    for recorded in records(events):
        found.evolve(recorded)
    return found


def decide(store: DictStore, *events: Event) -> KvMigrated | KvMissed:
    return asyncio.run(mover(store, *events).decide("a", cell="c0", epoch=2))


TWO = tuple(e for i in range(2) for e in (joined(f"c{i}", i), *arrival(f"c{i}", 1, 0)))
PROMPT, SAMPLED = list(range(20, 30)), [7, 8, 9]
LEAVING = (
    *TWO,
    call("a", "c0", context=PROMPT),
    cut("a", SAMPLED),
    CellLeased(cell="c0", role="train", epoch=2),
    FENCE,
)


def test_prompt_and_decoded_tokens_are_moved() -> None:
    found = decide(stored([*PROMPT, *SAMPLED]), *LEAVING)
    assert isinstance(found, KvMigrated) and (found.target, found.num_tokens) == ("c1", 12)
    assert found.num_bytes > 0 and found.session == "a"


def test_a_history_that_branched_is_put_together_from_the_log() -> None:
    second = call("a", "c0", name="a-2", base="a-1", shared=11, context=[50, 51])
    full = [*PROMPT, SAMPLED[0], 50, 51]
    ids = mover(stored([]), *TWO, call("a", "c0", context=PROMPT), cut("a", SAMPLED), second)
    assert ids._tokens.of("a") == full
    completed = msgspec.convert(
        {**msgspec.to_builtins(cut("a", [1], "a-2")), "type": "call.completed.v1", "finish": "stop", "reply": "",
         "num_prompt_tokens": 0, "num_cached_tokens": 0, "num_retries": 0, "engine_s": 0.0},
        CallCompleted,
    )  # fmt: skip
    ids.evolve(records([completed])[0])
    assert ids._tokens.of("a") == [*full, 1]


def test_a_page_that_is_missing_or_changes_or_a_store_that_is_gone_is_a_miss() -> None:
    partial, torn, gone = (stored([*PROMPT, *SAMPLED]) for _ in range(3))
    partial.objects.popitem()
    torn.torn.add(next(iter(torn.objects)))
    gone.is_gone = True
    other_version = stored([*PROMPT, *SAMPLED], version=1)
    for store, reason in (
        (partial, "not in the store"),
        (torn, "1 of 6"),
        (gone, "gone"),
        (other_version, "not in the"),
    ):
        found = decide(store, *LEAVING)
        assert isinstance(found, KvMissed) and reason in found.reason and found.num_tokens == 13, found


def test_what_other_weights_computed_is_not_moved() -> None:
    newer = WeightsPulled(cell="c1", epoch=1, version=1, digest="d1", num_bytes=4, phases=())
    found = decide(stored([*PROMPT, *SAMPLED]), *LEAVING, newer)
    assert isinstance(found, KvMissed) and found.reason == "it is of version 0, the target serves version 1"
    spans = (VersionSpan(version=0, start=0, end=1), VersionSpan(version=1, start=1, end=3))
    over = msgspec.structs.replace(cut("a", SAMPLED), spans=spans)
    found = decide(stored([*PROMPT, *SAMPLED]), *LEAVING[: len(TWO) + 1], over, *LEAVING[len(TWO) + 2 :])
    assert isinstance(found, KvMissed) and "of several versions" in found.reason


def test_without_another_cell_in_rollout_nothing_is_moved() -> None:
    alone = (*LEAVING[:1], *arrival("c0", 1, 0), *LEAVING[len(TWO) :])
    assert isinstance(decide(stored([*PROMPT, *SAMPLED]), *alone), KvMissed)
    found = decide(stored([*PROMPT, *SAMPLED]), *LEAVING, *departure("c1", 2, 0))
    assert isinstance(found, KvMissed) and "no cell" in found.reason


# ---------------------------------------------------------------- the cell


async def leave(stage: Stage, store: DictStore) -> list[str]:
    """The events of the cell's way to training, with two sessions at it."""
    stage.mover = KvMover(store, model="policy", page_tokens=PAGE, patience_s=0.01)
    await stage.write(*(joined("c1", 1), *arrival("c1", 1, 0)))
    async with stage.cell():
        await stage.until(CellSwitched, role="rollout", epoch=1, cell="c0")
        for session, context in (("a", PROMPT), ("b", [1, 2, 3, 4, 5, 6])):
            await stage.write(call(session, "c0", context=context), cut(session, SAMPLED))
        await stage.command("train", 2)
        await stage.until(CellSwitched, role="train", epoch=2)
        await stage.write(FINISHED)
    return await stage.names()


def test_a_cell_moves_its_kv_or_gives_it_up_before_it_frees_the_memory(tmp_path: Path) -> None:
    async def play() -> None:
        stage = await serving(tmp_path)
        names = await leave(stage, stored([*PROMPT, *SAMPLED]))
        way = names[names.index("fenced") :]
        assert way == ["fenced", "sessions_rerouted", "kv_migrated", "kv_missed", "engine_released", "switched"]
        move = (await stage.until(KvMigrated)).event
        assert isinstance(move, KvMigrated) and (move.session, move.target, move.epoch) == ("a", "c1", 2)
        miss = (await stage.until(KvMissed)).event
        assert isinstance(miss, KvMissed) and (miss.session, miss.num_tokens) == ("b", 9)
        switched = (await stage.until(CellSwitched, role="train")).event
        assert isinstance(switched, CellSwitched)
        assert [phase.name for phase in switched.phases] == ["fence", "kv", "drain", "release"]

    asyncio.run(play())


def test_somebody_elses_event_on_the_subject_costs_another_try_and_no_double_move(tmp_path: Path) -> None:
    async def play() -> None:
        stage = await serving(tmp_path)

        class Meddling(DictStore):
            """While pages are read, something lands on the cell's subject: the compare-and-set loses."""

            num = 0

            def checksums(self, keys: Sequence[str]) -> tuple[dict[str, str], int]:
                if not self.num:
                    Meddling.num += 1
                    answer = SessionsRerouted(cell="c0", epoch=1, num_sessions=0, num_calls_moved=0)
                    asyncio.run_coroutine_threadsafe(stage.write(answer), loop).result(5)
                return super().checksums(keys)

        loop = asyncio.get_running_loop()
        names = await leave(stage, Meddling(stored([*PROMPT, *SAMPLED]).objects))
        assert names.count("kv_migrated") == 1 and names.count("kv_missed") == 1
        assert names.index("kv_migrated") < names.index("engine_released")

    asyncio.run(play())
