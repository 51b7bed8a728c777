"""Copying a database file while others write it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import apsw

from penstock.adapters.sqlite.database import Schema, check_version, storage_errors


class Snapshot:
    """One committed state of a database file, from `begin` to `end` or `close`.

    Writers are not blocked: the file is in WAL mode. The schema may be older than ours.
    """

    def __init__(self, path: Path, schema: Schema) -> None:
        self.path = path
        with storage_errors(path):
            self._connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
            try:
                self._connection.set_busy_timeout(5000)
                check_version(self._connection, path, schema)
                version = self._connection.pragma("user_version")
            except BaseException:
                self._connection.close()
                raise
        self.is_current = version == len(schema.migrations())

    def begin(self) -> None:
        with storage_errors(self.path):
            # A transaction has a state of the file only from its first read on.
            self._connection.execute("BEGIN; SELECT count(*) FROM sqlite_schema").fetchall()

    def end(self) -> None:
        with storage_errors(self.path):
            self._connection.execute("ROLLBACK")

    @property
    def change(self) -> int:
        """Another number after each commit of others; of the state that is held, if one is."""
        with storage_errors(self.path):
            number: int = self._connection.pragma("data_version")
            return number

    def copy(self, to: Path) -> None:
        """Write this state to a new file that needs no write-ahead log."""
        os.close(os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        with storage_errors(to):
            copy = apsw.Connection(str(to))
            try:
                with copy.backup("main", self._connection, "main") as backup:
                    while not backup.done:
                        backup.step(1000)
                copy.pragma("journal_mode", "delete")
            finally:
                copy.close()

    def read(self, sql: str) -> Iterator[str]:
        """The first column of a query's rows."""
        with storage_errors(self.path):
            for row in self._connection.execute(sql):
                yield row[0]

    def close(self) -> None:
        self._connection.close()
