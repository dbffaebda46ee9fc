"""Opening a database and its transactions: settings, typed errors, one state for each reader."""

import os
import resource
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.ledger_driver import TurnDriver, contents, rows, unchanged
from harness.store_children import Child
from sqlalchemy import Connection, text

from perdure.contracts.errors import (
    LedgerCorruption,
    PerdureError,
    StoreUnavailable,
    StoreUnreadable,
)
from perdure.stores import Store, engine, open_store


@pytest.mark.parametrize(
    ("pragma", "value"),
    [("synchronous", 2), ("foreign_keys", 1), ("busy_timeout", engine.BUSY_TIMEOUT_MS)],
)
def test_every_connection_has_the_settings_that_durability_needs(
    store: Store, pragma: str, value: int
) -> None:
    assert rows(store, f"pragma {pragma}") == [(value,)]
    assert store.transact(lambda tx: tx.exec_driver_sql(f"pragma {pragma}").scalar()) == value


def test_a_file_is_in_write_ahead_mode(file_store: Store) -> None:
    assert rows(file_store, "pragma journal_mode") == [("wal",)]


def test_missing_folders_are_made(tmp_path: Path) -> None:
    opened = open_store(f"sqlite:///{tmp_path}/one/two/ledger.db")
    opened.close()

    assert (tmp_path / "one/two/ledger.db").is_file()


def test_two_stores_in_memory_are_two_ledgers() -> None:
    one, two = open_store("sqlite://"), open_store("sqlite:///:memory:")

    assert one.store_id != two.store_id
    TurnDriver(one).prepare()
    assert rows(two, "select count(*) from events") == [(0,)]
    one.close()
    two.close()


def test_a_ledger_keeps_its_identity(file_store: Store) -> None:
    again = open_store(file_store.url)

    assert again.store_id == file_store.store_id
    again.close()


@pytest.mark.parametrize(
    "url", ["no url at all", "mysql://localhost/x", "postgresql://u:geheim@h/x"]
)
def test_a_url_of_something_else_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(StoreUnreadable) as caught:
        open_store(url)

    assert "geheim" not in str(caught.value)


def test_a_folder_is_no_database(tmp_path: Path) -> None:
    with pytest.raises(StoreUnreadable, match="folder"):
        open_store(f"sqlite:///{tmp_path}")


def test_another_file_is_no_database_and_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary, " * 1000)

    with pytest.raises(StoreUnreadable, match="not an SQLite database"):
        open_store(f"sqlite:///{path}")

    assert path.read_text() == "dear diary, " * 1000


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="needs /proc")
def test_a_place_where_nothing_can_be_written_is_a_typed_error() -> None:
    with pytest.raises(PerdureError) as caught:
        open_store("sqlite:////proc/none/ledger.db")

    assert caught.value.code in ("store_unavailable", "store_unreadable")


def _everybody_may_read(path: Path) -> bool:
    return all(folder.stat().st_mode & 0o005 == 0o005 for folder in (path, *path.parents))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may enter; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() == 0 and not _everybody_may_read(Path(engine.__file__).parent / "migrations"),
    reason="root may write everything, and nobody else may read the program",
)
def test_a_file_that_may_only_be_read_is_a_typed_error(open_folder: Path) -> None:
    path = open_folder / "ledger.db"
    opened = open_store(f"sqlite:///{path}")
    opened.close()
    path.chmod(0o444)
    open_folder.chmod(0o555)
    before = path.read_bytes()
    child = Child("open_without_rights", f"sqlite:///{path}")
    try:
        assert child.hear() == "ready"

        answer = child.hear()
    finally:
        child.close()
        open_folder.chmod(0o755)

    assert answer in ("store_unavailable", "store_unreadable")
    assert path.read_bytes() == before


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Store]:
    """A store in a file that waits only a moment for a lock."""
    monkeypatch.setattr(engine, "BUSY_TIMEOUT_MS", 50)
    opened = open_store(f"sqlite:///{tmp_path}/ledger.db")
    yield opened
    opened.close()


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """Somebody else's connection to the same file."""
    connection = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)
    yield connection
    connection.close()


def test_a_locked_database_is_unavailable_until_the_lock_is_gone(
    impatient: Store, lock: sqlite3.Connection
) -> None:
    turn = TurnDriver(impatient)
    lock.execute("begin immediate")

    with pytest.raises(StoreUnavailable, match="locked") as caught:
        turn.prepare()

    assert caught.value.retryable
    assert rows(impatient, "select count(*) from events") == [(0,)]
    lock.execute("rollback")
    turn.prepare()
    assert turn.kinds() == ["user_message", "model_prepared"]


def test_a_new_file_that_is_locked_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lock: sqlite3.Connection
) -> None:
    monkeypatch.setattr(engine, "BUSY_TIMEOUT_MS", 50)
    lock.execute("begin exclusive")

    with pytest.raises(StoreUnavailable):
        open_store(f"sqlite:///{tmp_path}/ledger.db")

    lock.execute("rollback")
    open_store(f"sqlite:///{tmp_path}/ledger.db").close()


def test_a_full_disk_is_unavailable_and_keeps_what_was_there(file_store: Store) -> None:
    first = TurnDriver(file_store)
    first.prepare()
    before = contents(file_store)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(StoreUnavailable):
            first.answer()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert contents(file_store) == before
    assert first.answer().result is not None


def test_a_new_file_that_another_process_is_about_to_make_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    # The lock a first writer takes: at this one SQLite itself would not wait.
    other.execute("begin immediate")
    release = threading.Timer(0.2, other.execute, ["rollback"])
    release.start()

    opened = open_store(f"sqlite:///{path}")

    release.join()
    other.close()
    opened.close()


def test_a_reader_sees_one_state_while_others_write(file_store: Store) -> None:
    other = open_store(file_store.url)

    def count_twice(tx: Connection) -> tuple[Any, Any]:
        query = text("select count(*) from events")
        before = tx.execute(query).scalar()
        TurnDriver(other).prepare()
        return before, tx.execute(query).scalar()

    assert file_store.read(count_twice) == (0, 0)
    assert rows(file_store, "select count(*) from events") == [(2,)]
    other.close()


def test_a_file_with_broken_pages_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    opened = open_store(f"sqlite:///{path}")
    for number in range(20):
        TurnDriver(opened, f"request-{number}", message="x" * 1000).end()
    opened.close()
    whole = path.read_bytes()
    page = 4096
    path.write_bytes(whole[: 2 * page] + b"\xff" * (len(whole) - 2 * page))

    with pytest.raises((LedgerCorruption, StoreUnreadable)):
        contents(open_store(f"sqlite:///{path}"))


def test_an_error_of_the_database_never_shows_values(store: Store) -> None:
    def break_it(tx: Connection) -> None:
        tx.execute(text("insert into no_such_table values (:secret)"), {"secret": "canary"})

    def collide(tx: Connection) -> None:
        for _ in range(2):
            tx.execute(
                text("insert into blobs (digest, content) values (:secret, :secret)"),
                {"secret": "canary"},
            )

    for command in (break_it, collide):
        with unchanged(store), pytest.raises(PerdureError) as caught:
            store.transact(command)

        assert "canary" not in str(caught.value)
        assert caught.value.__cause__ is None


def test_a_store_that_was_closed_leaves_one_file(tmp_path: Path) -> None:
    opened = open_store(f"sqlite:///{tmp_path}/ledger.db")
    TurnDriver(opened).prepare()
    opened.close()

    assert [path.name for path in tmp_path.iterdir()] == ["ledger.db"]
