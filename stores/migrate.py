"""Upgrading a database to this program's schema, under a lock, and refusing a newer one.

An up-to-date database is not written to. Must not import the ledger's commands: migrations are
written against SQL, not against today's code.
"""

from importlib import resources
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, inspect

from perdure.contracts.errors import StoreSchemaNewer, StoreSchemaOld

VERSION_TABLE = "perdure_schema_version"


def migrate(engine: Engine, *, upgrading: bool = True) -> None:
    """Bring the schema up to date in one transaction.

    Raises StoreSchemaNewer for a revision this program does not know, StoreSchemaOld where an
    upgrade is needed and `upgrading` is false.
    """
    config = _config()
    script = ScriptDirectory.from_config(config)
    head = script.get_current_head()
    with engine.connect() as connection:
        reader = connection.execution_options(sqlite_begin="BEGIN")
        with reader.begin():
            if current_revision(reader) == head:
                return
    with engine.connect() as connection, connection.begin():
        # BEGIN IMMEDIATE is the lock: the revision is read again under it, one process upgrades.
        current = current_revision(connection)
        if current == head:
            return
        known = {revision.revision for revision in script.walk_revisions()}
        if current is not None and current not in known:
            raise StoreSchemaNewer(
                f"the database has schema {current}, this program knows up to {head}; "
                "install the newer version"
            )
        if not upgrading:
            raise StoreSchemaOld(
                f"the database has schema {current or 'none'}, this program needs {head}; "
                "run `perdure db upgrade`"
            )
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def current_revision(connection: Connection) -> str | None:
    """The database's revision, None if it is empty."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    options: dict[str, Any] = {"version_table": VERSION_TABLE}
    return MigrationContext.configure(connection, opts=options).get_current_revision()


def _config() -> Config:
    config = Config()
    folder = resources.files("perdure.stores").joinpath("migrations")
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    config.attributes["version_table"] = VERSION_TABLE
    return config
