"""Shell. The tables of a run in DuckDB: changes in, answers to SELECTs out. The home of duckdb.

Invariant: rows and the checkpoint `through_seq` change in one transaction, so a store that was killed anywhere goes
on at checkpoint + 1 and ends as if it had never stopped. Queries run in read-only transactions without access to
files, network or this process's variables.
"""

import hashlib
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import duckdb
import pyarrow as pa

from gyre.errors import ConfigError, HeldError, MissingError
from gyre.events.types import TableDigest
from gyre.projections.changes import Changes
from gyre.projections.schemas import GAPS, TABLES, Column, Table, canonical

_ARROW = {"int": pa.int64(), "float": pa.float64(), "text": pa.string(), "bool": pa.bool_()}
_IN_MEMORY = Path(":memory:")
_SETTINGS = {"enable_external_access": "false", "python_enable_replacements": "false"}
MEMORY_MB = 1024
"""What the database may take at first; its own default is 80% of the machine, which engine and trainer need."""
SETTLE_S = 10.0
"""How long others wait for one that has the file open for a moment, to read it, to begin or to end."""
KEYS_SHARE = 0.5
"""Of that, for the keys of the tables, which must stay in memory (about 30 bytes an event): then the limit doubles."""
_KEYS = "SELECT coalesce(sum(memory_usage_bytes), 0) FROM duckdb_memory() WHERE tag = 'ART_INDEX'"
_CHECKPOINT = "CREATE TABLE IF NOT EXISTS checkpoint (one INTEGER PRIMARY KEY, through_seq BIGINT)"


def arrow_schema(table: Table) -> Any:
    """pyarrow.Schema, with the meaning of each column as its metadata."""

    def field(column: Column) -> Any:
        return pa.field(column.name, _ARROW[column.type], metadata={"doc": column.doc})

    return pa.schema([field(column) for column in table.columns], metadata={"doc": table.doc})


def _connect(path: Path, *, read_only: bool, patience_s: float) -> Any:
    # Who writes takes turns with engine and trainer: a second thread costs its transactions more than it does.
    config = _SETTINGS | {"memory_limit": f"{MEMORY_MB}MiB"} | ({} if read_only else {"threads": "1"})
    give_up = time.monotonic() + patience_s
    while True:
        try:
            return duckdb.connect(str(path), read_only=read_only, config=config)
        except duckdb.IOException as error:
            if "Could not set lock" not in str(error):  # DuckDB has one class for all of these
                raise ConfigError(f"{path}: it is no database, or not of this version: {_line(error)}") from None
            if time.monotonic() >= give_up:
                what = "writing" if read_only else "using"
                raise HeldError(f"{path}: another process is {what} it: {_line(error)}") from None
        time.sleep(0.05)


def _make(path: Path) -> None:
    """Who is killed while it is made leaves no file that nobody can open."""
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    _connect(new, read_only=False, patience_s=0.0).close()
    new.replace(path)


def _is_of_another_gyre(con: Any) -> bool:
    """Whether tables of other columns are in it. They are made again: rows that are there lack what came later."""
    found = con.execute("SELECT table_name, list(column_name ORDER BY column_index) FROM duckdb_columns() GROUP BY ALL")
    columns = {name: tuple(names) for name, names in found.fetchall()}
    return "checkpoint" in columns and any(columns.get(table.name) != table.names for table in TABLES)


class Store:
    """One database file. One process may hold it while it is written; `read_only` for one that is finished."""

    def __init__(self, path: Path | str, *, read_only: bool = False, patience_s: float = 0.0) -> None:
        """`:memory:` is a path too. `patience_s`: for another process to let go of it. Raises MissingError, HeldError,
        ConfigError."""
        path = Path(path)
        if path != _IN_MEMORY and not (path.exists() and path.stat().st_size):
            if read_only:
                raise MissingError(f"{path}: no tables yet; they come with the first events of the run")
            _make(path)
        self._con = _connect(path, read_only=read_only, patience_s=patience_s)
        if not read_only and _is_of_another_gyre(self._con):
            self._con.close()
            _make(path)
            self._con = _connect(path, read_only=False, patience_s=patience_s)
        self._memory_mb = MEMORY_MB
        if not read_only:
            for statement in (_CHECKPOINT, *(table.ddl for table in TABLES), GAPS):
                self._con.execute(statement)

    @property
    def through_seq(self) -> int:
        """The last event that the tables hold; 0 for none."""
        row = self._con.cursor().execute("SELECT through_seq FROM checkpoint").fetchone()
        return int(row[0]) if row else 0

    def apply(self, changes: Changes, through_seq: int) -> None:
        """Apply the changes of all events after the checkpoint, through this one, in one transaction."""
        cursor = self._con.cursor()
        self._make_room(cursor)
        cursor.execute("BEGIN")
        try:
            for table in TABLES:
                rows = changes.get(table.name)
                if rows:
                    schema = arrow_schema(table)
                    cursor.register("changed", pa.Table.from_pylist(list(rows.values()), schema=schema))
                    cursor.execute(_upsert(table))
                    cursor.unregister("changed")
            cursor.execute("INSERT OR REPLACE INTO checkpoint VALUES (1, ?)", [through_seq])
            cursor.execute("COMMIT")
        except BaseException:
            cursor.execute("ROLLBACK")
            raise
        finally:
            cursor.close()

    def _make_room(self, cursor: Any) -> None:
        (keys,) = cursor.execute(_KEYS).fetchone()
        while keys > KEYS_SHARE * self._memory_mb * 2**20:
            self._memory_mb *= 2
            cursor.execute(f"SET memory_limit = '{self._memory_mb}MiB'")

    def query(self, sql: str) -> Any:
        """The answer to one SELECT, as a pyarrow.Table. Raises ConfigError with the reason in one line."""
        cursor = self._con.cursor()
        try:
            statements = cursor.extract_statements(sql)
            if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                found = ", ".join(str(s.type).rpartition(".")[2] for s in statements) or "nothing"
                raise ConfigError(f"sql: one SELECT is wanted, not {found}; SHOW TABLES lists what there is")
            cursor.execute("BEGIN TRANSACTION READ ONLY")
            try:
                return cursor.sql(sql).to_arrow_table()
            finally:
                cursor.execute("ROLLBACK")
        except duckdb.Error as error:
            raise ConfigError(f"sql: {_line(error)}") from None
        except RuntimeError as error:
            if "interrupted" in str(error):  # so DuckDB says that it was Ctrl-C
                raise KeyboardInterrupt from None
            raise
        finally:
            cursor.close()

    def table_digests(self) -> tuple[TableDigest, ...]:
        """Of every table: rows in the order of their keys, as `MemoryTables` has them."""
        return tuple(self._digest(table) for table in TABLES)

    def _digest(self, table: Table) -> TableDigest:
        names = ", ".join(f'"{name}"' for name in table.names)
        keys = ", ".join(f'"{name}"' for name in table.key)
        hasher, num_rows = hashlib.sha256(), 0
        cursor = self._con.cursor()
        cursor.execute(f'SELECT {names} FROM "{table.name}" ORDER BY {keys}')
        while rows := cursor.fetchmany(10_000):
            num_rows += len(rows)
            for row in rows:
                hasher.update(canonical(row))
        cursor.close()
        return TableDigest(table=table.name, num_rows=num_rows, digest=hasher.hexdigest()[:32])

    def close(self) -> None:
        self._con.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _upsert(table: Table) -> str:
    """A column that a change leaves out stays as it was."""
    rest = [f'"{name}"' for name in table.names if name not in table.key]
    changes = ", ".join(f"{name} = coalesce(excluded.{name}, {name})" for name in rest)
    keys = ", ".join(f'"{name}"' for name in table.key)
    return f'INSERT INTO "{table.name}" SELECT * FROM changed ON CONFLICT ({keys}) DO UPDATE SET {changes}'


def _line(error: Exception) -> str:
    """The database's message without its drawing of the query."""
    return " ".join(str(error).partition("\n\nLINE ")[0].split())
