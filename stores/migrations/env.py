"""Runs migrations on the connection it is handed; it opens none and has no offline mode."""

from alembic import context

from perdure.stores.tables import METADATA

config = context.config
context.configure(
    connection=config.attributes["connection"],
    target_metadata=METADATA,
    version_table=config.attributes["version_table"],
    render_as_batch=True,
    transactional_ddl=False,
)
context.run_migrations()
