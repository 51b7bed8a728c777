"""Stores of pipeline runs: SQLite, in memory, and read-only without an engine."""
