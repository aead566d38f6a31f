"""Shell. Moves the KV of sessions whose cell leaves rollout, or says that it stays behind.

Invariants: what is moved was computed by the weights that the target serves; nothing is moved before every page lies in
the store with a checksum, and was read again with that checksum from where the target reads it; the log hears of a move
by compare-and-set, once; whatever fails is a miss with its reason and costs a prefill.
Direction: tokens of a session, store -> KvMigrated or KvMissed.

SGLang writes a page to the store when it is computed (prompt) or when its call ends or is cut (decoded), so there is
nothing to copy here: to move is to see that all of it has arrived, and to say whose it is.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from gyre.agents import routes
from gyre.errors import TransferError
from gyre.events.codec import Recorded
from gyre.events.tokens import unpack_ids
from gyre.events.types import (
    CallCompleted,
    CallCut,
    CallStarted,
    ExecutionDropped,
    ExecutionFinished,
    KvMigrated,
    KvMissed,
)
from gyre.workers.kv_migration import (
    KvManifest,
    KvOwners,
    KvPage,
    decide_move,
    evolve,
    page_digests,
    page_keys,
)

PATIENCE_S = 5.0
"""For pages that are still being written: milliseconds after a call has ended, as measured."""


class Store(Protocol):
    """`KvStore`; its calls block."""

    def exists(self, keys: Sequence[str]) -> list[bool]: ...
    def wait_for(self, keys: Sequence[str], timeout_s: float) -> bool: ...
    def checksums(self, keys: Sequence[str]) -> tuple[dict[str, str], int]: ...


class KvMover:
    """Follows the log with `evolve`; `decide` says what becomes of one session's KV."""

    def __init__(
        self,
        store: Store,
        *,
        model: str,
        page_tokens: int,
        num_ranks: int = 1,
        patience_s: float = PATIENCE_S,
        target_store: Store | None = None,
    ) -> None:
        """`model`: the path that the engines serve. `target_store`: a client on the target's side."""
        self.store, self.target_store = store, target_store or store
        self.model, self.page_tokens, self.num_ranks, self.patience_s = model, page_tokens, num_ranks, patience_s
        self.owners = KvOwners()
        self.routes: routes.Routes = {}
        self._tokens = _Tokens()

    def evolve(self, recorded: Recorded) -> None:
        self.owners = evolve(self.owners, recorded)
        self.routes = routes.evolve(self.routes, recorded.event, recorded.seq)
        self._tokens.evolve(recorded, self.routes)

    def target(self, cell: str) -> routes.Route | None:
        """Where the gateway sends the sessions of a cell that leaves; None: no other cell is in rollout."""
        route = routes.choose(self.routes, {}, cell)
        return route if route is not None and route.cell != cell else None

    async def decide(self, session: str, *, cell: str, epoch: int) -> KvMigrated | KvMissed:
        """Of a session of the fenced cell, whose calls have ended."""
        token_ids, target, version = self._tokens.of(session), self.target(cell), self._tokens.version(session)
        name = target.cell if target is not None else ""
        where = {"cell": cell, "epoch": epoch, "target": name, "session": session, "num_tokens": len(token_ids)}
        if target is None or not token_ids:
            return decide_move(None, {}, **where)  # type: ignore[arg-type]
        if version != target.version:
            of = f"of version {version}" if version >= 0 else "of several versions"
            reason = f"it is {of}, the target serves version {target.version}"
            return KvMissed(cell=cell, epoch=epoch, session=session, num_tokens=len(token_ids), reason=reason)
        try:
            manifest = await asyncio.to_thread(self.take_manifest, session, token_ids, version)
            found = await asyncio.to_thread(self.read_at_target, manifest) if manifest else {}
        except TransferError as error:
            return KvMissed(cell=cell, epoch=epoch, session=session, num_tokens=len(token_ids), reason=str(error))
        return decide_move(manifest, found, **where)  # type: ignore[arg-type]

    def take_manifest(self, session: str, token_ids: Sequence[int], version: int) -> KvManifest | None:
        """None when the pages do not come. The last token is never in the KV: nothing was computed from it yet."""
        digests = page_digests(token_ids[:-1], self.page_tokens, str(version))
        keys = page_keys(digests, self.model, self.num_ranks)
        if not keys or not self.store.wait_for(keys, self.patience_s):
            return None
        sums, num_bytes = self.store.checksums(keys)
        return KvManifest(
            session=session,
            version=version,
            num_tokens=len(digests) * self.page_tokens,
            num_bytes=num_bytes,
            pages=tuple(KvPage(key=key, checksum=sums.get(key, "")) for key in keys),
        )

    def read_at_target(self, manifest: KvManifest) -> Mapping[str, str]:
        """Checksums of the pages as the target's side reads them."""
        return self.target_store.checksums([page.key for page in manifest.pages])[0]


class _Tokens:
    """The newest token history of each live session, and the version whose weights computed its KV: a fold of its
    calls, which only ever add. A call names its KV after the version that its cell served when it began."""

    def __init__(self) -> None:
        self._full: dict[str, dict[str, list[int]]] = {}
        self._last: dict[str, str] = {}
        self._versions: dict[str, int] = {}
        self._sessions: dict[str, set[str]] = {}

    def of(self, session: str) -> list[int]:
        return self._full.get(session, {}).get(self._last.get(session, ""), [])

    def version(self, session: str) -> int:
        """-1: its last call went on while the weights changed."""
        return self._versions.get(session, -1)

    def evolve(self, recorded: Recorded, known: routes.Routes) -> None:
        match recorded.event:
            case CallStarted() as call:
                self._versions[call.session] = known[call.cell].version if call.cell in known else -1
                calls = self._full.setdefault(call.session, {})
                base = calls.get(call.base, [])[: call.shared]
                calls[call.call] = [*base, *unpack_ids(call.context).tolist()]
                self._last[call.session] = call.call
                self._sessions.setdefault(call.execution, set()).add(call.session)
            case (CallCompleted() | CallCut()) as ended:
                if (full := self._full.get(ended.session, {}).get(ended.call)) is not None:
                    full += unpack_ids(ended.sampled).tolist()
                    self._last[ended.session] = ended.call
                if versions := {span.version for span in ended.spans}:
                    self._versions[ended.session] = versions.pop() if len(versions) == 1 else -1
            case ExecutionFinished(execution=execution) | ExecutionDropped(execution=execution):
                for session in self._sessions.pop(execution, ()):
                    self._full.pop(session, None)
                    self._last.pop(session, None)
                    self._versions.pop(session, None)
