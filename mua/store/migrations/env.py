"""What alembic runs: the migrations on the connection that :class:`mua.store.database.Store` gives it."""

from alembic import context

from mua.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
    render_as_batch=True,
)
context.run_migrations()
