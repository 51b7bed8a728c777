"""Pipeline runs in a SQLite file of their own."""
