"""The schema and its versions: one way up, under a lock, and never over a newer program's file."""

import shutil
import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from harness.ledger_driver import TurnDriver, contents, rows
from sqlalchemy import Connection, create_engine

from perdure.contracts.errors import StoreError, StoreSchemaNewer, StoreSchemaOld
from perdure.stores import Store, migrate, open_store
from perdure.stores.queries import Reader
from perdure.stores.tables import METADATA


def _state(path: Path) -> tuple[bytes, int]:
    return path.read_bytes(), path.stat().st_mtime_ns


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A ledger with a turn in it, closed."""
    path = tmp_path / "ledger.db"
    opened = open_store(f"sqlite:///{path}")
    TurnDriver(opened).prepare()
    opened.close()
    return path


def _set_version(path: Path, version: str) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute(f"update {migrate.VERSION_TABLE} set version_num = ?", (version,))
    connection.close()


def test_a_fresh_database_is_what_the_models_say(file_store: Store) -> None:
    def differences(tx: Connection) -> list[object]:
        options = {
            "version_table": migrate.VERSION_TABLE,
            "compare_type": True,
            "compare_server_default": True,
        }
        return compare_metadata(MigrationContext.configure(tx, opts=options), METADATA)

    assert file_store.read(differences) == []


def test_a_fresh_database_has_every_constraint_of_the_models(
    file_store: Store, tmp_path: Path
) -> None:
    modelled = create_engine(f"sqlite:///{tmp_path}/modelled.db")
    METADATA.create_all(modelled)
    statement = "select name, sql from sqlite_master where type = 'table' order by name"
    with modelled.connect() as connection:
        expected = {name: _words(sql) for name, sql in connection.exec_driver_sql(statement)}
    modelled.dispose()

    # A migrated table carries quotes about its name.
    rows_found = rows(file_store, statement)
    found = {name: _words(sql.replace(chr(34), "")) for name, sql in rows_found}

    found.pop(migrate.VERSION_TABLE)
    assert found == expected


def _words(sql: str) -> list[str]:
    return sorted(line.strip().strip(",") for line in sql.replace("\t", "").splitlines())


def test_reopening_an_up_to_date_file_writes_nothing(path: Path) -> None:
    before = _state(path)

    opened = open_store(f"sqlite:///{path}")
    contents(opened)
    opened.close()

    assert _state(path) == before


def test_a_file_of_a_newer_program_is_refused_and_untouched(path: Path) -> None:
    _set_version(path, "9999")
    before = _state(path)

    with pytest.raises(StoreSchemaNewer, match="9999"):
        open_store(f"sqlite:///{path}")

    assert _state(path) == before
    assert [item.name for item in path.parent.iterdir()] == ["ledger.db"]


def test_a_file_without_a_schema_is_refused_where_upgrading_is_not_wanted(tmp_path: Path) -> None:
    with pytest.raises(StoreSchemaOld, match="perdure db upgrade"):
        open_store(f"sqlite:///{tmp_path}/ledger.db", migrating=False)


def test_an_up_to_date_file_opens_where_upgrading_is_not_wanted(path: Path) -> None:
    opened = open_store(f"sqlite:///{path}", migrating=False)

    assert rows(opened, "select count(*) from turns") == [(1,)]
    opened.close()


def test_an_upgrade_that_fails_half_way_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    connection = sqlite3.connect(path)
    connection.execute("create table usage (mine text)")
    connection.commit()
    connection.close()

    with pytest.raises(StoreError, match="already exists") as caught:
        open_store(f"sqlite:///{path}")

    assert not caught.value.retryable
    connection = sqlite3.connect(path)
    tables = [row[0] for row in connection.execute("select name from sqlite_master")]
    connection.close()
    assert tables == ["usage"]


def test_a_copy_of_a_file_is_the_same_ledger(path: Path) -> None:
    shutil.copy(path, path.with_name("copy.db"))

    one = open_store(f"sqlite:///{path}")
    two = open_store(f"sqlite:///{path.with_name('copy.db')}")

    assert contents(one) == contents(two)
    assert one.store_id == two.store_id
    one.close()
    two.close()


def test_instants_are_aware_and_utc(store: Store) -> None:
    turn = TurnDriver(store)
    turn.prepare()

    view = Reader(store).turn(turn.turn_id)

    assert view is not None
    assert view.opened_at.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - view.opened_at) < timedelta(minutes=1)
