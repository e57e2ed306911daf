"""Changes of the schema, one file a version; alembic applies them when a store is opened for writing."""
