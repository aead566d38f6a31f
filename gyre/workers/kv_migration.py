"""Pure. Who has the KV of a session while its cell leaves rollout, and what its pages are called.

Invariants: a session's KV has one owner at any sequence; it changes hands by one event, which counts only while the
owner is fenced under the epoch that the event names; what was not moved by then is computed again from the logged
tokens, and the log says how many. The source frees its memory only when none of its sessions is unsettled.

Direction: token ids -> page keys -> checksums -> KvMigrated or KvMissed -> KvOwners -> whether the source may free.

    held by the source --copied, checksums taken--> prepared at the target --KvMigrated (compare-and-set)--> held by it
           \\------------- a page is missing or torn, the target is gone, the time is over --KvMissed--> nobody

The token log is the truth and KV is a cache: a wrong move costs time, never a token. Keys are SGLang's: a chain of
SHA-256 over pages of token ids, seeded with the policy version, so that the KV of two versions never meets.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from gyre.events.codec import Recorded
from gyre.events.types import (
    CallStarted,
    CellFenced,
    CellJoined,
    CellLost,
    EngineReleased,
    ExecutionDropped,
    ExecutionFinished,
    KvMigrated,
    KvMissed,
    SwitchRolledBack,
    Value,
)

NAMESPACE = b"sglang-cache-namespace-v1"
PARTS = ("k", "v")
T = TypeVar("T", str, int)


class KvPage(Value, frozen=True, kw_only=True):
    """One stored object: the keys or values of one page of tokens, all layers of one rank."""

    key: str
    checksum: str


class KvManifest(Value, frozen=True, kw_only=True):
    """The KV of one context as it lies in the store, taken after its writes have stopped."""

    session: str
    version: int
    """Policy version that computed it."""
    num_tokens: int
    """That its pages cover; the last, incomplete page is computed again."""
    num_bytes: int
    pages: tuple[KvPage, ...]

    @property
    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:32]


def page_digests(token_ids: Sequence[int], page_size: int, extra_key: str) -> tuple[str, ...]:
    """Of each whole page; each holds all tokens before it."""
    encoded = extra_key.encode()
    seed = hashlib.sha256(NAMESPACE + b"\x01" + len(encoded).to_bytes(8, "little") + encoded + b"\x00").digest()
    found = []
    for start in range(0, len(token_ids) - page_size + 1, page_size):
        ids = token_ids[start : start + page_size]
        seed = hashlib.sha256(seed + struct.pack(f"<{page_size}I", *ids)).digest()
        found.append(seed.hex())
    return tuple(found)


def page_keys(digests: Sequence[str], model: str, num_ranks: int = 1) -> tuple[str, ...]:
    """Of every stored object of these pages, page by page. `model` is the name that both engines serve it under."""
    name = model.replace("/", "-")
    return tuple(f"{name}_{digest}_{rank}_{part}" for digest in digests for rank in range(num_ranks) for part in PARTS)


def find_torn(manifest: KvManifest, found: Mapping[str, str]) -> tuple[str, ...]:
    """Keys that the target does not see, or sees with other bytes."""
    return tuple(page.key for page in manifest.pages if found.get(page.key) != page.checksum)


def decide_move(
    manifest: KvManifest | None, found: Mapping[str, str], *, cell: str, epoch: int, target: str, session: str,
    num_tokens: int,
) -> KvMigrated | KvMissed:  # fmt: skip
    """What becomes of a session's KV: `found` are the checksums that the target's side read. All of it, or none."""
    if not target:
        reason = "no cell is in rollout"
    elif manifest is None or not manifest.pages:
        reason = "not in the store"
    elif torn := find_torn(manifest, found):
        reason = f"{len(torn)} of {len(manifest.pages)} objects are missing or torn at the target"
    else:
        return KvMigrated(
            cell=cell,
            epoch=epoch,
            target=target,
            num_tokens=manifest.num_tokens,
            num_bytes=manifest.num_bytes,
            session=session,
            digest=manifest.digest,
        )
    return KvMissed(cell=cell, epoch=epoch, session=session, num_tokens=num_tokens, reason=reason)


class KvOwners(Value, frozen=True, kw_only=True):
    """A fold of the log. Sessions without an owner are not named: their next call computes all of it."""

    owners: tuple[tuple[str, str], ...] = ()
    """(session, cell), by session."""
    executions: tuple[tuple[str, str], ...] = ()
    """(session, execution)"""
    fences: tuple[tuple[str, int], ...] = ()
    """(cell, epoch) of the cells that are leaving."""

    def owner(self, session: str) -> str:
        return dict(self.owners).get(session, "")

    def unsettled(self, cell: str) -> tuple[str, ...]:
        """Sessions whose KV must be moved or given up before the cell frees its memory."""
        return tuple(session for session, owner in self.owners if owner == cell)

    def epoch(self, cell: str) -> int:
        """Of the fence under which the cell is leaving; 0: it is not."""
        return dict(self.fences).get(cell, 0)


def evolve(state: KvOwners, recorded: Recorded) -> KvOwners:
    """Total: a move by another than the fenced owner, or under another epoch, changes nothing."""
    event = recorded.event
    match event:
        case CallStarted():
            return _own(state, event)
        case KvMigrated(session=session, cell=cell, epoch=epoch) if _may_move(state, session, cell, epoch):
            return _with_owner(state, session, event.target)
        case KvMissed(session=session, cell=cell, epoch=epoch) if _may_move(state, session, cell, epoch):
            return _with_owner(state, session, "")
        case CellFenced(cell=cell, epoch=epoch):
            return msgspec.structs.replace(state, fences=_set(state.fences, cell, epoch))
        case SwitchRolledBack(cell=cell):
            return msgspec.structs.replace(state, fences=_set(state.fences, cell, None))
        case EngineReleased(cell=cell) | CellLost(cell=cell) | CellJoined(cell=cell):
            owners = tuple(item for item in state.owners if item[1] != cell)
            return msgspec.structs.replace(state, owners=owners, fences=_set(state.fences, cell, None))
        case ExecutionFinished(execution=execution) | ExecutionDropped(execution=execution):
            return _forget(state, execution)
    return state


def _may_move(state: KvOwners, session: str, cell: str, epoch: int) -> bool:
    return state.owner(session) == cell and state.epoch(cell) == epoch > 0


def _own(state: KvOwners, event: CallStarted) -> KvOwners:
    executions = _set(state.executions, event.session, event.execution)
    return _with_owner(msgspec.structs.replace(state, executions=executions), event.session, event.cell)


def _with_owner(state: KvOwners, session: str, cell: str) -> KvOwners:
    return msgspec.structs.replace(state, owners=_set(state.owners, session, cell or None))


def _forget(state: KvOwners, execution: str) -> KvOwners:
    gone = {session for session, name in state.executions if name == execution}
    return msgspec.structs.replace(
        state,
        owners=tuple(item for item in state.owners if item[0] not in gone),
        executions=tuple(item for item in state.executions if item[0] not in gone),
    )


def _set(items: tuple[tuple[str, T], ...], key: str, value: T | None) -> tuple[tuple[str, T], ...]:
    """With this pair, or without the key; by key."""
    kept = {name: item for name, item in items if name != key}
    if value is not None:
        kept[key] = value
    return tuple(sorted(kept.items()))


def is_settled(state: KvOwners, cell: str) -> bool:
    """Whether the cell may free its memory."""
    return not state.unsettled(cell)
