"""Small SQL shared by the commands: single rows by key, and the lock every command begins with.

SQLite and PostgreSQL differ only here and in the engine. Statements are built once and run with
parameters: building one anew for every use costs more than the database does.
"""

from functools import cache
from typing import Any

from sqlalchemy import (
    Connection,
    Delete,
    Insert,
    Row,
    Select,
    Table,
    Update,
    bindparam,
    delete,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from perdure.contracts.errors import NamespaceMismatch
from perdure.contracts.ids import TurnKey
from perdure.stores.clock import now
from perdure.stores.tables import CONVERSATIONS, TURNS

_INSERT = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


_LOCK = (
    select(CONVERSATIONS)
    .where(CONVERSATIONS.c.conversation_id == bindparam("conversation_id"))
    .with_for_update()
)


def find_row(tx: Connection, table: Table, **key: Any) -> Row[Any] | None:
    """The one row whose columns have these values (not null)."""
    return tx.execute(_select(table, *key), _bound(key)).one_or_none()


def insert_row(tx: Connection, table: Table, values: dict[str, Any]) -> None:
    """Insert a row; a unique key that is taken is an error."""
    tx.execute(_insert(table), values)


def insert_new(tx: Connection, table: Table, values: dict[str, Any]) -> bool:
    """Insert the row unless a unique key is taken; says whether it was inserted."""
    return tx.execute(_insert_or_keep(tx.dialect.name, table), values).rowcount == 1


def update_rows(tx: Connection, table: Table, key: dict[str, Any], **values: Any) -> int:
    """Change the rows whose columns have the key's values (not null); returns how many."""
    return tx.execute(_update(table, *key), {**_bound(key), **values}).rowcount


def delete_rows(tx: Connection, table: Table, **key: Any) -> None:
    """Delete the rows whose columns have these values (not null)."""
    tx.execute(_delete(table, *key), _bound(key))


def lock_conversation(tx: Connection, key: TurnKey, *, create: bool = False) -> Row[Any] | None:
    """The conversation's row, locked until the transaction ends: the order of commits is decided
    here. With `create`, a missing one is inserted first.

    Raises NamespaceMismatch if it belongs to another namespace (seed 1.2 #21).
    """
    parameters = {"conversation_id": key.conversation_id}
    row = tx.execute(_LOCK, parameters).one_or_none()
    if row is None and create:
        create_conversation(tx, key.namespace, key.conversation_id)
        row = tx.execute(_LOCK, parameters).one()
    if row is not None and row.namespace != key.namespace:
        raise NamespaceMismatch(f"conversation {key.conversation_id} is in another namespace")
    return row


def create_conversation(tx: Connection, namespace: str, conversation_id: str) -> bool:
    """Insert an empty conversation; says whether it is new."""
    moment = now()
    return insert_new(
        tx,
        CONVERSATIONS,
        {
            "namespace": namespace,
            "conversation_id": conversation_id,
            "version": 0,
            "last_sequence": 0,
            "last_ordinal": 0,
            "active_turn_id": None,
            "created_at": moment,
            "updated_at": moment,
        },
    )


def update_conversation(tx: Connection, row: Row[Any], **values: Any) -> None:
    """Change a locked conversation."""
    key = {"conversation_id": row.conversation_id}
    update_rows(tx, CONVERSATIONS, key, updated_at=now(), **values)


def find_turn(tx: Connection, turn_id: str) -> Row[Any] | None:
    """The turn's row."""
    return find_row(tx, TURNS, turn_id=turn_id)


def _bound(key: dict[str, Any]) -> dict[str, Any]:
    # An update may set a column that it also looks for.
    return {f"key_{name}": value for name, value in key.items()}


def _where(table: Table, names: tuple[str, ...]) -> list[Any]:
    return [table.c[name] == bindparam(f"key_{name}") for name in names]


@cache
def _select(table: Table, *names: str) -> Select[Any]:
    return select(table).where(*_where(table, names))


@cache
def _insert(table: Table) -> Insert:
    return table.insert()


@cache
def _insert_or_keep(dialect: str, table: Table) -> Insert:
    return _INSERT[dialect](table).on_conflict_do_nothing()


@cache
def _update(table: Table, *names: str) -> Update:
    return update(table).where(*_where(table, names))


@cache
def _delete(table: Table, *names: str) -> Delete:
    return delete(table).where(*_where(table, names))
