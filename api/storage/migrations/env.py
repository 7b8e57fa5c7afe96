"""What alembic runs: migrations on the connection it is handed, in batch mode for SQLite."""

from alembic import context

from gnnplan.api.storage.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
    transactional_ddl=False,  # the caller's transaction holds all of them
)
context.run_migrations()
