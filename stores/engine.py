"""Opening a database and running commands on it, one short transaction each.

SQLite: WAL, FULL, foreign keys, IMMEDIATE transactions, because SQLAlchemy's defaults lose updates
silently. Driver errors are translated at the transaction's edge; none leaves this module. Commands
must be safe to run again: a lost acknowledgement is answered by the same command.
"""

import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, select
from sqlalchemy import exc as sa_exc
from sqlalchemy.engine import URL, make_url
from sqlalchemy.pool import StaticPool

from perdure.contracts.errors import (
    LedgerCorruption,
    PerdureError,
    StoreUnavailable,
    StoreUnreadable,
)
from perdure.contracts.failpoints import InjectedFault, failpoint
from perdure.stores.clock import now
from perdure.stores.migrate import migrate
from perdure.stores.tables import IDENTITY

BUSY_TIMEOUT_MS = 5000
_LOCK_POLL_S = 0.01
# The same command again would find the same: the file was replaced, or may not be written.
_NEVER_MENDED = ("no such table", "no such column", "already exists", "readonly database")

__all__ = ["Connection", "Store", "open_store"]

Args = ParamSpec("Args")
Result = TypeVar("Result")


class Store:
    """An open ledger. Thread-safe; SQLite writers of one process take turns."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sqlite = engine.dialect.name == "sqlite"
        self._shared = isinstance(engine.pool, StaticPool)
        self._writer = threading.RLock()
        self.store_id = self._read_identity()

    @property
    def url(self) -> str:
        """The database's address, without a password."""
        return self._engine.url.render_as_string(hide_password=True)

    def transact(
        self,
        command: Callable[Concatenate[Connection, Args], Result],
        *args: Args.args,
        **kwargs: Args.kwargs,
    ) -> Result:
        """Run a command in one transaction. What it raises rolls everything back.

        Raises StoreUnavailable where the same command may succeed later, LedgerCorruption where the
        file is damaged, and whatever the command itself raises of our errors.
        """
        name = command.__name__
        with _translated():
            failpoint(f"{name}.before")
        with self._writing() as tx:
            result = command(tx, *args, **kwargs)
            failpoint(f"{name}.inside")
        with _translated():
            failpoint(f"{name}.committed")
        return result

    def read(
        self,
        query: Callable[Concatenate[Connection, Args], Result],
        *args: Args.args,
        **kwargs: Args.kwargs,
    ) -> Result:
        """Run a query in one read transaction: it sees one state of the database."""
        with _translated():
            if self._shared:
                with self._writer, self._engine.begin() as tx:
                    return query(tx, *args, **kwargs)
            with self._engine.connect() as connection:
                reader = connection.execution_options(sqlite_begin="BEGIN")
                with reader.begin():
                    return query(reader, *args, **kwargs)

    def close(self) -> None:
        """Close all connections. The store must not be used any more."""
        self._engine.dispose()

    @contextmanager
    def _writing(self) -> Generator[Connection]:
        with _translated():
            if self._sqlite:
                with self._writer, self._engine.begin() as tx:
                    yield tx
            else:
                with self._engine.begin() as tx:
                    yield tx

    def _read_identity(self) -> str:
        stored = self.read(_find_identity)
        return stored if stored is not None else self.transact(_ensure_identity)


def open_store(url: str, *, migrating: bool = True) -> Store:
    """Open a ledger by its URL (`sqlite:///file`, `sqlite://` for memory) and upgrade its schema.

    Raises StoreSchemaNewer for a database of a newer program, StoreUnreadable for what is no
    database, StoreUnavailable where it cannot be reached.
    """
    parsed = _parse(url)
    with _translated():
        engine = _create(parsed)
        try:
            migrate(engine, upgrading=migrating)
            return Store(engine)
        except BaseException:
            engine.dispose()
            raise


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
    except sa_exc.ArgumentError:
        raise StoreUnreadable(
            "PERDURE_STORE_URL is no database URL; use sqlite:///file or sqlite://"
        ) from None
    if parsed.get_backend_name() != "sqlite":
        raise StoreUnreadable(
            f"the store speaks sqlite, not {parsed.get_backend_name()}; use sqlite:///file"
        )
    return parsed


def _create(url: URL) -> Engine:
    options: dict[str, Any] = {"connect_args": {"check_same_thread": False}}
    if url.database in (None, "", ":memory:"):
        options["poolclass"] = StaticPool
    else:
        path = Path(str(url.database))
        if path.is_dir():
            raise StoreUnreadable("the store's path is a folder; name a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        options |= {"pool_size": 8, "max_overflow": 8}
    engine = create_engine(url, **options)
    event.listen(engine, "connect", _on_connect)
    event.listen(engine, "begin", _on_begin)
    return engine


def _on_connect(connection: sqlite3.Connection, _record: Any) -> None:
    # The driver's own transaction handling begins too late and loses updates.
    connection.isolation_level = None
    for pragma in (
        f"busy_timeout={BUSY_TIMEOUT_MS}",
        "synchronous=FULL",
        "foreign_keys=ON",
    ):
        connection.execute(f"pragma {pragma}")
    _write_ahead(connection)


def _write_ahead(connection: sqlite3.Connection) -> None:
    # Two processes that open a new file at once: here SQLite does not wait for the other's lock,
    # whatever the busy timeout says.
    deadline = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            connection.execute("pragma journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(_LOCK_POLL_S)


def _on_begin(connection: Connection) -> None:
    begin = connection.get_execution_options().get("sqlite_begin", "BEGIN IMMEDIATE")
    connection.exec_driver_sql(begin)


def _find_identity(tx: Connection) -> str | None:
    return tx.execute(select(IDENTITY.c.store_id)).scalar_one_or_none()


def _ensure_identity(tx: Connection) -> str:
    stored = _find_identity(tx)
    if stored is not None:
        return stored
    # The one random id of the system: two ledgers must never share it.
    store_id = uuid.uuid4().hex[:16]
    tx.execute(IDENTITY.insert().values(singleton=1, store_id=store_id, created_at=now()))
    return store_id


@contextmanager
def _translated() -> Generator[None]:
    try:
        yield
    except PerdureError:
        raise
    except InjectedFault as fault:
        raise StoreUnavailable(f"the connection was lost ({fault})") from None
    except sa_exc.IntegrityError as error:
        raise LedgerCorruption("constraint", _reason(error)) from None
    except (sa_exc.OperationalError, sa_exc.InterfaceError, sa_exc.TimeoutError) as error:
        reason = _reason(error)
        if any(sign in reason for sign in _NEVER_MENDED):
            raise StoreUnreadable(f"this is not the ledger it was: {reason}") from None
        raise StoreUnavailable(reason) from None
    except sa_exc.DatabaseError as error:
        reason = _reason(error)
        if "not a database" in reason:
            raise StoreUnreadable("the store's file is not an SQLite database") from None
        raise LedgerCorruption("database", reason) from None
    except OSError as error:
        raise StoreUnavailable(f"the store's file cannot be used: {error.strerror}") from None


def _reason(error: sa_exc.SQLAlchemyError) -> str:
    # Only the driver's own words: SQLAlchemy's text carries the statement and its parameters.
    original = getattr(error, "orig", None)
    return f"the database reports: {original if original is not None else type(error).__name__}"
