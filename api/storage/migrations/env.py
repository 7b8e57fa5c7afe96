"""Run migrations on the connection that alembic's configuration holds."""

from alembic import context

from gnnplan.api.storage.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
    transactional_ddl=False,  # the caller's transaction holds all of them
)
context.run_migrations()
