"""Stores of container records: SQLite and in memory."""
