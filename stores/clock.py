"""The only place where the stores read a clock.

`now` stamps rows. Whether a holder is alive is decided by the *database's* clock, so that two
machines whose clocks differ agree (DESIGN 5).
"""

from datetime import UTC, datetime

from sqlalchemy import Connection, text

_NOW_MS = {
    "sqlite": text("SELECT CAST((julianday('now') - 2440587.5) * 86400000.0 AS INTEGER)"),
    "postgresql": text("SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000 AS BIGINT)"),
}


def now() -> datetime:
    """The current instant, aware, UTC."""
    return datetime.now(UTC)


def database_now_ms(tx: Connection) -> int:
    """Milliseconds since 1970 by the database's clock."""
    return int(tx.execute(_NOW_MS[tx.dialect.name]).scalar_one())
