"""Small SQL shared by the commands: insert-or-keep, and the lock every command begins with.

SQLite and PostgreSQL differ only here and in the engine.
"""

from typing import Any

from sqlalchemy import Connection, Row, Table, select, update
from sqlalchemy.dialects import postgresql, sqlite

from perdure.contracts.errors import NamespaceMismatch
from perdure.contracts.ids import TurnKey
from perdure.stores.clock import now
from perdure.stores.tables import CONVERSATIONS, TURNS

_INSERT = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


def insert_new(tx: Connection, table: Table, values: dict[str, Any]) -> bool:
    """Insert the row unless a unique key is taken; says whether it was inserted."""
    statement = _INSERT[tx.dialect.name](table).values(**values).on_conflict_do_nothing()
    return tx.execute(statement).rowcount == 1


def lock_conversation(tx: Connection, key: TurnKey, *, create: bool = False) -> Row[Any] | None:
    """The conversation's row, locked until the transaction ends: the order of commits is decided
    here. With `create`, a missing one is inserted first.

    Raises NamespaceMismatch if it belongs to another namespace (seed 1.2 #21).
    """
    query = (
        select(CONVERSATIONS)
        .where(CONVERSATIONS.c.conversation_id == key.conversation_id)
        .with_for_update()
    )
    row = tx.execute(query).one_or_none()
    if row is None and create:
        create_conversation(tx, key.namespace, key.conversation_id)
        row = tx.execute(query).one()
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
    tx.execute(
        update(CONVERSATIONS)
        .where(CONVERSATIONS.c.conversation_id == row.conversation_id)
        .values(updated_at=now(), **values)
    )


def find_turn(tx: Connection, turn_id: str) -> Row[Any] | None:
    """The turn's row."""
    return tx.execute(select(TURNS).where(TURNS.c.turn_id == turn_id)).one_or_none()
