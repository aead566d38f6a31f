"""Pure. Changes of rows: what a fold sets, and the rows that they make in memory, with their digests.

Invariant: a change names a key and the columns that it sets, and a column that is set is never unset. So changes that
are applied in stream order give the same rows, whether at once, in parts, or from any checkpoint on.
Direction: folds -> `put` -> `take` -> the store on disk, or `MemoryTables`.
"""

import hashlib
from collections.abc import Callable, Iterable

from gyre.errors import FoldError
from gyre.events import types as e
from gyre.projections.schemas import BY_NAME, TABLES, Key, Row, Table, canonical

Changes = dict[str, dict[Key, Row]]
"""Table -> key -> columns that are set."""

Put = Callable[..., None]
"""`ChangedRows.put`, for the parts of a fold, which only add to it."""


class ChangedRows:
    """What was set since the last `take`."""

    def __init__(self) -> None:
        self._changes: Changes = {}

    def take(self) -> Changes:
        changes, self._changes = self._changes, {}
        return changes

    def add(self, table: str, key: Key, row: Row) -> None:
        """A whole row, of which there is no other change."""
        self._changes.setdefault(table, {})[key] = row

    def put(self, table: str, *key: object, **columns: object) -> None:
        """None sets nothing. Raises FoldError for a column that the table has not: a bug."""
        schema = BY_NAME[table]
        if not columns.keys() <= schema.name_set:
            raise FoldError(f"table {table}: no column {', '.join(sorted(columns.keys() - schema.name_set))}")
        rows = self._changes.setdefault(table, {})
        row = rows.get(key)
        if row is None:
            row = rows[key] = dict(zip(schema.key, key, strict=True))
        for name, value in columns.items():
            if value is not None:
                row[name] = value


def put_phases(put: Put, seq: int, phases: Iterable[e.Phase]) -> None:
    """Of what ended at `seq`."""
    for number, phase in enumerate(phases):
        put("phases", seq, number, name=phase.name, seconds=phase.seconds)


def columns_of(event: e.Event, *left: str) -> dict[str, object]:
    """The event's fields, as they are, but for those that are left out."""
    return {f: getattr(event, f) for f in event.__struct_fields__ if f not in left}


class MemoryTables:
    """The tables in memory: what the store keeps on disk, for a replay to compare with."""

    def __init__(self) -> None:
        self._rows: Changes = {}

    def apply(self, changes: Changes) -> None:
        for table, rows in changes.items():
            kept = self._rows.setdefault(table, {})
            for key, row in rows.items():
                kept.setdefault(key, {}).update(row)

    def digests(self) -> tuple[e.TableDigest, ...]:
        """Of every table: rows in the order of their keys."""
        return tuple(self._digest(table, table.names) for table in TABLES)

    def holds(self, sealed: e.TableDigest) -> bool:
        """Whether this is a table as it is here, or would be without columns that came later."""
        table = BY_NAME.get(sealed.table)
        if table is None:
            return False
        num = len(table.names)
        return any(sealed == self._digest(table, table.names[: num - left]) for left in range(table.num_later + 1))

    def _digest(self, table: Table, names: tuple[str, ...]) -> e.TableDigest:
        rows = self._rows.get(table.name, {})
        hasher = hashlib.sha256()
        for key in sorted(rows):
            hasher.update(canonical(rows[key].get(name) for name in names))
        return e.TableDigest(table=table.name, num_rows=len(rows), digest=hasher.hexdigest()[:32])
