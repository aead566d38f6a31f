"""Shell. SQL over a running run: SELECTs served from the projector's process, and the client of it.

While a run is going on, its projector holds the database file, so it also answers: Arrow Flight on a free port of
127.0.0.1, which `sql.json` in the run directory names together with a token (mode 0600). It holds a lock on that file,
which the kernel takes back from a projector that was killed. After the run the database is read directly. A bad query
is one ConfigError either way.
"""

import asyncio
import fcntl
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import pyarrow as pa
from pyarrow import flight

from gyre.errors import ConfigError, GyreError, HeldError
from gyre.events.run_dir import is_locked
from gyre.projections.store import SETTLE_S, Store

_ERROR = b"gyre.error"
TIMEOUT_S = 120.0
SILENCE_S = 5.0
"""Then who asks is told what it waits for."""


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """What `sql.json` holds."""

    port: int
    token: str


class Question(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    sql: str


class _Server(flight.FlightServerBase):  # type: ignore[misc]
    def __init__(self, store: Store, token: str, refresh: Callable[[], None]) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._store = store
        self._refresh = refresh
        self._token = token

    def do_get(self, context: Any, ticket: Any) -> Any:
        """An answer, or an empty table whose metadata holds the error: Flight would wrap it in its own."""
        try:
            question = msgspec.json.decode(ticket.ticket, type=Question)
            if not secrets.compare_digest(question.token, self._token):
                raise ConfigError("sql: this is the SQL service of another run")
            self._refresh()
            answer = self._store.query(question.sql)
        except (GyreError, msgspec.DecodeError) as error:
            answer = pa.table({}).replace_schema_metadata({_ERROR: str(error).encode()})
        return flight.RecordBatchStream(answer)


class SqlService:
    """Serves a store while the block runs."""

    def __init__(self, store: Store, run_dir: Path, refresh: Callable[[], None]) -> None:
        """`refresh` is called, in a thread of the server, before each answer: it may wait for the event loop."""
        self._file = run_dir / "sql.json"
        token = secrets.token_hex(16)
        self._server = _Server(store, token, refresh)
        self._address = Port(port=self._server.port, token=token)
        self._thread = threading.Thread(target=self._server.serve, name="sql", daemon=True)

    async def __aenter__(self) -> Self:
        self._thread.start()
        new = self._file.with_suffix(".new")
        self._lock = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.write(self._lock, msgspec.json.encode(self._address))
        new.replace(self._file)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._file.unlink(missing_ok=True)
        await asyncio.to_thread(self._server.shutdown)  # it waits for answers under way
        self._thread.join()
        os.close(self._lock)


def sql(run_dir: Path, query: str, say: Callable[[str], None]) -> Any:
    """The answer to one SELECT over a run's tables, as a pyarrow.Table. Raises ConfigError, MissingError.

    `say` is told what the answer may lack, and what is waited for.
    """
    # A projector that starts holds the file before it answers, one that ends after it: then it is asked again.
    until = time.monotonic() + SETTLE_S
    while True:
        address = _address(run_dir)
        if address is not None:
            answer = _ask(address, query, say)
            if answer is not None:
                return answer
        try:
            store = Store(run_dir / "tables.duckdb", read_only=True)
            break
        except HeldError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
    if (run_dir / "sql.json").exists():  # looked for now: one that ended meanwhile took it away
        say(
            f"sql: {run_dir.name} was killed, so rows of its last half minute may be missing: "
            "`gyre run` goes on with it and adds them"
        )
    with store:
        return store.query(query)


def _address(run_dir: Path) -> Port | None:
    """Of a projector that lives."""
    path = run_dir / "sql.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Port) if is_locked(path) else None
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _ask(address: Port, query: str, say: Callable[[str], None]) -> Any:
    """None where nobody answers any more."""
    question = msgspec.json.encode(Question(token=address.token, sql=query))
    waiting = f"sql: no answer of the run's projector for {SILENCE_S:g} s; it has {TIMEOUT_S:g} s in all"
    told = threading.Timer(SILENCE_S, say, (waiting,))
    told.start()
    with flight.FlightClient(f"grpc://127.0.0.1:{address.port}") as client:
        try:
            reader = client.do_get(flight.Ticket(question), flight.FlightCallOptions(timeout=TIMEOUT_S))
            answer = reader.read_all()
        except flight.FlightUnavailableError:
            return None
        except flight.FlightTimedOutError:
            raise ConfigError(f"sql: no answer within {TIMEOUT_S:g} s; ask for less") from None
        finally:
            told.cancel()
    failed = (answer.schema.metadata or {}).get(_ERROR)
    if failed is not None:
        raise ConfigError(failed.decode())
    return answer
