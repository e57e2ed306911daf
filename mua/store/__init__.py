"""Everything that happened in runs, in one SQL database: SQLite in a run's folder, or PostgreSQL by URL."""
