"""Container jobs of one worker in a SQLite file of their own.

Writes go through `GroupCommit`, many to a flush. Short reads are answered in the event loop, long
ones in a thread, each from one state of the file.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import apsw
from msgspec.structs import replace

from penstock.adapters.sqlite.database import ReaderPool, storage_errors
from penstock.adapters.sqlite.group_commit import GroupCommit
from penstock.lifecycles.container import ContainerJobState
from penstock.ports.store import Durability
from penstock.workloads.container import store_rules
from penstock.workloads.container.job import ContainerRecord
from penstock.workloads.container.storage.sqlite import rows, schema
from penstock.workloads.container.storage.sqlite.finding import search_for
from penstock.workloads.container.storage.sqlite.writing import Writing
from penstock.workloads.container.store import Change, RecordQuery

_LARGE = 1 << 20
"""Bytes of a body from which it is flushed, and read, in a thread."""


class SqliteContainerStore:
    """See the module and `penstock.workloads.container.store.ContainerStore`."""

    def __init__(
        self,
        path: Path,
        *,
        durability: Durability = Durability.DISK,
        slow_disk: bool = False,
    ) -> None:
        self.path = path
        self.durability = durability
        self._lock = schema.lock(path)
        try:
            self._writer = schema.open_writer(path, durability)
            try:
                self._reader = schema.open_reader(path)
            except BaseException:
                self._writer.close()
                raise
        except BaseException:
            self._lock.close()
            raise
        self._sql = schema.load_queries()
        self._writing = Writing(self._writer, self._sql)
        self._commits = GroupCommit(
            "container", self._writer, path, durability=durability, slow_disk=slow_disk
        )
        self._pool = ReaderPool(path, partial(schema.open_reader, path))
        self._closed = False

    # -- writing ------------------------------------------------------------------

    async def add(self, record: ContainerRecord, *, most_waiting: int = 0) -> ContainerRecord:
        store_rules.check_new(record)
        seq = await self._commits.run(
            lambda _: self._writing.add(record, most_waiting), is_large=len(record.body) > _LARGE
        )
        return replace(record, seq=seq)

    async def change(self, change: Change) -> ContainerRecord:
        return await self._commits.run(lambda _: self._writing.change(change))

    async def prune(self, finished_before: float, *, keep: int = 0, limit: int = 500) -> list[str]:
        """As in the port; fewer at a time where their bodies are large."""
        return await self._commits.run(lambda _: self._writing.prune(finished_before, keep, limit))

    # -- reading ------------------------------------------------------------------

    async def get(self, job_id: str, *, body: bool = True) -> ContainerRecord | None:
        if body:
            return await self._read_whole("by_id_with_body", job_id)
        found = self._read("by_id", job_id)
        return rows.read(found[0]) if found else None

    async def by_key(self, key: str) -> ContainerRecord | None:
        return await self._read_whole("by_key", key)

    async def find(self, query: RecordQuery) -> list[ContainerRecord]:
        if query.limit <= 0:
            return []
        search = search_for(query)
        if search.is_short:
            with storage_errors(self.path):
                found = self._connection.execute(search.sql, search.values).fetchall()
        else:
            found = await self._pool.run(lambda db: list(db.execute(search.sql, search.values)))
        return [rows.read(row) for row in found]

    async def unfinished(self) -> list[ContainerRecord]:
        def read_all(db: apsw.Connection) -> list[ContainerRecord]:
            found = (db.execute(sql[name]) for name in ("running", "waiting"))
            return [rows.read(row) for some in found for row in some]

        sql = self._sql
        return await self._pool.run(read_all)

    async def tally(self) -> dict[ContainerJobState, int]:
        return {ContainerJobState(state): count for state, count in self._read("tally")}

    async def _read_whole(self, query: str, value: str) -> ContainerRecord | None:
        """With its body."""
        found = self._read(query, _LARGE, value)
        if not found:
            return None
        row, body = found[0], found[0][-1]
        if body is None:
            # It can't have changed since; but its job may have been deleted.
            sql, seq = self._sql["body"], row[0]
            bodies = await self._pool.run(lambda db: [one[0] for one in db.execute(sql, (seq,))])
            if not bodies:
                return None
            body = bodies[0]
        return rows.read(row, body)

    @property
    def _connection(self) -> apsw.Connection:
        """The writer's, which has the newest pages at hand, unless a thread is using it."""
        return self._reader if self._commits.is_in_thread else self._writer

    def _read(self, query: str, *values: object) -> list[rows.Row]:
        with storage_errors(self.path):
            return self._connection.execute(self._sql[query], values).fetchall()

    async def close(self) -> None:
        """Finish what is under way, then let go of the file."""
        if self._closed:
            return
        self._closed = True
        await self._commits.close()
        self._pool.close()
        self._reader.close()
        self._writer.close()
        self._lock.close()
