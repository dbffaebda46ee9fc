"""The order desk's outside world: a SQLite database of orders and an outbox file.

It stands for the payment, shipping and mail services of a real desk, so it knows nothing of agents
or of Temporal. What it gives its callers is what such services give: idempotency keys for refunds,
a way to ask about a shipment and to fence it, and nothing of the kind for mail.
"""

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS orders (
    id INTEGER PRIMARY KEY, item TEXT NOT NULL, cents INTEGER NOT NULL,
    customer TEXT NOT NULL, status TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS refunds (
    idempotency_key TEXT PRIMARY KEY, order_id INTEGER NOT NULL UNIQUE REFERENCES orders (id),
    cents INTEGER NOT NULL, at REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS shipments (
    operation_id TEXT PRIMARY KEY, generation INTEGER NOT NULL,
    order_id INTEGER NOT NULL UNIQUE REFERENCES orders (id),
    tracking TEXT NOT NULL, at REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS shipment_fences (
    operation_id TEXT NOT NULL, generation INTEGER NOT NULL, at REAL NOT NULL,
    PRIMARY KEY (operation_id, generation)
);
CREATE TABLE IF NOT EXISTS effects (
    id INTEGER PRIMARY KEY, tool TEXT NOT NULL, operation_id TEXT NOT NULL,
    generation INTEGER NOT NULL, pid INTEGER NOT NULL, at REAL NOT NULL
);
"""

_ORDERS: Final = (
    (1, "espresso machine", 24900, "ada@example.com", "paid"),
    (2, "reading lamp", 5900, "grace@example.com", "delivered"),
    (3, "walking boots", 12900, "alan@example.com", "paid"),
    (4, "field notebook", 1900, "edsger@example.com", "paid"),
    (5, "wool blanket", 7900, "barbara@example.com", "paid"),
    (6, "bread oven", 18900, "donald@example.com", "delivered"),
    (7, "garden chair", 8900, "margaret@example.com", "paid"),
    (8, "telescope", 39900, "katherine@example.com", "paid"),
    (9, "chess set", 4900, "claude@example.com", "delivered"),
)


class OrderProblem(Exception):
    """The desk's own no: there is no such order, or it was done before."""


class Fenced(Exception):
    """A shipment was declared not executed before it was booked; it must not happen any more."""


class OrderDesk:
    """The desk's services. Every method is one short transaction and may be used by any thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.database = folder / "orders.db"
        self.outbox = folder / "outbox.jsonl"

    def open(self) -> None:
        """Create the database with its nine orders, unless it is there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._transaction() as database:
            for statement in filter(str.strip, _SCHEMA.split(";")):
                database.execute(statement)
            database.executemany("INSERT OR IGNORE INTO orders VALUES (?, ?, ?, ?, ?)", _ORDERS)

    def begin_effect(self, tool: str, operation_id: str, generation: int) -> None:
        """Note that an effect starts: the audit that a demo, or an auditor, counts."""
        with self._transaction() as database:
            database.execute(
                "INSERT INTO effects (tool, operation_id, generation, pid, at)"
                " VALUES (?, ?, ?, ?, ?)",
                (tool, operation_id, generation, os.getpid(), time.time()),
            )

    def order(self, number: int) -> dict[str, Any]:
        """One order's row. Raises OrderProblem."""
        with self._transaction() as database:
            return _order(database, number)

    def refund(self, number: int, idempotency_key: str) -> dict[str, Any]:
        """Pay an order back, once per key: the same key again returns the first refund."""
        with self._transaction() as database:
            row = _order(database, number)
            done = database.execute(
                "SELECT * FROM refunds WHERE idempotency_key = ? OR order_id = ?",
                (idempotency_key, number),
            ).fetchone()
            if done is not None and done["idempotency_key"] != idempotency_key:
                raise OrderProblem(f"order {number} has been refunded before")
            if done is None:
                database.execute(
                    "INSERT INTO refunds VALUES (?, ?, ?, ?)",
                    (idempotency_key, number, row["cents"], time.time()),
                )
                database.execute("UPDATE orders SET status = 'refunded' WHERE id = ?", (number,))
            return {"order": number, "cents": row["cents"]}

    def ship(self, number: int, operation_id: str, generation: int) -> dict[str, Any]:
        """Book a shipment. Raises Fenced if this generation was declared not executed."""
        with self._transaction() as database:
            _order(database, number)
            fence = database.execute(
                "SELECT 1 FROM shipment_fences WHERE operation_id = ? AND generation = ?",
                (operation_id, generation),
            ).fetchone()
            if fence is not None:
                raise Fenced(f"generation {generation} may not ship any more")
            if database.execute("SELECT 1 FROM shipments WHERE order_id = ?", (number,)).fetchone():
                raise OrderProblem(f"order {number} has been shipped before")
            tracking = f"PD{number:03}{operation_id[-6:].upper()}"
            database.execute(
                "INSERT INTO shipments VALUES (?, ?, ?, ?, ?)",
                (operation_id, generation, number, tracking, time.time()),
            )
            database.execute("UPDATE orders SET status = 'shipped' WHERE id = ?", (number,))
            return {"order": number, "tracking": tracking}

    def find_or_fence_shipment(self, operation_id: str, generation: int) -> dict[str, Any] | None:
        """The shipment of an operation; if there is none, this generation can never book one.

        Looking and fencing are one transaction: a shipment booked in between would make "there is
        none" a lie.
        """
        with self._transaction() as database:
            row = database.execute(
                "SELECT * FROM shipments WHERE operation_id = ?", (operation_id,)
            ).fetchone()
            if row is not None:
                return {"order": row["order_id"], "tracking": row["tracking"]}
            database.execute(
                "INSERT OR IGNORE INTO shipment_fences VALUES (?, ?, ?)",
                (operation_id, generation, time.time()),
            )
            return None

    def send(self, number: int, channel: str, text: str) -> str:
        """Send a notice to an order's customer, for good: there is no key and nobody to ask."""
        customer = str(self.order(number)["customer"])
        line = {"order": number, "to": customer, "channel": channel, "text": text}
        with self.outbox.open("a", encoding="utf-8") as outbox:
            outbox.write(json.dumps(line) + "\n")
            outbox.flush()
            os.fsync(outbox.fileno())
        return customer

    @contextlib.contextmanager
    def _transaction(self) -> Generator[sqlite3.Connection, None, None]:
        database = sqlite3.connect(self.database, timeout=30, isolation_level=None)
        database.row_factory = sqlite3.Row
        try:
            database.execute("PRAGMA foreign_keys = ON")
            database.execute("BEGIN IMMEDIATE")
            try:
                yield database
            except BaseException:
                database.execute("ROLLBACK")
                raise
            database.execute("COMMIT")
        finally:
            database.close()


def _order(database: sqlite3.Connection, number: int) -> dict[str, Any]:
    row = database.execute("SELECT * FROM orders WHERE id = ?", (number,)).fetchone()
    if row is None:
        raise OrderProblem(f"there is no order {number}")
    return dict(row)
