"""Reading a file of pipeline runs, whether an engine is writing it or not.

Short reads are answered in the event loop, long ones in a thread, each from one state of the
file. Nothing is written: a file of an older schema is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import apsw

from penstock.adapters.sqlite.database import ReaderPool, storage_errors
from penstock.workloads.pipeline.records import (
    Breaker,
    ItemOutcome,
    ItemRecord,
    PipelineEvent,
    PipelineInfo,
    PipelineRecord,
)
from penstock.workloads.pipeline.storage.sqlite import rows
from penstock.workloads.pipeline.storage.sqlite.finding import search_for
from penstock.workloads.pipeline.storage.sqlite.schema import (
    TROUBLED_ITEMS,
    load_queries,
    open_reader,
)
from penstock.workloads.pipeline.store import RunQuery, Saved

MANY = 2000
"""Rows from which a reading gets a thread."""


class SqlitePipelineReader:
    """The reading half of `penstock.workloads.pipeline.store.PipelineStore`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = open_reader(path)
        self._sql = load_queries()
        self._pool = ReaderPool(path, partial(open_reader, path))

    async def get(self, job_id: str) -> PipelineRecord | None:
        found = self._read("run_by_id", job_id)
        return rows.read_run(found[0]) if found else None

    async def glance(self, job_id: str) -> Saved | None:
        found = self._read("glance", job_id)
        return rows.read_glance(found[0]) if found else None

    async def find(self, query: RunQuery) -> list[PipelineRecord]:
        if query.limit <= 0:
            return []
        search = search_for(query)
        if search.is_short:
            with storage_errors(self.path):
                found = self._connection.execute(search.sql, search.values).fetchall()
        else:
            found = await self._pool.run(lambda db: list(db.execute(search.sql, search.values)))
        return [rows.read_run(row) for row in found]

    async def unfinished(self) -> list[PipelineRecord]:
        return [rows.read_run(row) for row in self._read("unfinished")]

    async def items(
        self,
        job_id: str,
        stage: str,
        *,
        after: int = -1,
        limit: int = 1000,
        outcomes: tuple[ItemOutcome, ...] = (),
    ) -> list[ItemRecord]:
        lot = self._lot(job_id, stage)
        if lot is None or limit <= 0:
            return []
        span = rows.span(lot, after)
        if not outcomes:
            found = self._read("items", *span, limit)
        elif TROUBLED_ITEMS.issuperset(outcomes):
            found = self._read("troubled_items", *span, json.dumps(outcomes), limit)
        else:
            found = await self._read_span("some_items", *span, json.dumps(outcomes), limit)
        return [rows.read_item(row) for row in found]

    async def items_by_key(self, job_id: str, stage: str, keys: Sequence[str]) -> list[ItemRecord]:
        found = self._read("items_by_key", self._lot(job_id, stage), json.dumps(list(keys)))
        return [rows.read_item(row) for row in found]

    async def fan(self, job_id: str, stage: str) -> int:
        lot = self._lot(job_id, stage)
        if lot is None:
            return 0
        count: int = (await self._read_span("fan", *rows.span(lot)))[0][0]
        return count

    async def events(self, job_id: str, after: int = 0, limit: int = 1000) -> list[PipelineEvent]:
        found = self._read("events", job_id, after, max(limit, 0))
        return [rows.read_event(job_id, row) for row in found]

    async def breaker(self, name: str) -> Breaker | None:
        found = self._read("breaker", name)
        return rows.read_breaker(found[0][0]) if found else None

    async def breakers(self) -> list[Breaker]:
        return [rows.read_breaker(record) for (record,) in self._read("breakers")]

    async def declared(self) -> list[PipelineInfo]:
        return [rows.read_info(info) for (info,) in self._read("declared")]

    async def recall(self, name: str) -> bytes | None:
        found = self._read("recall", name)
        return found[0][0] if found else None

    async def refers(self, tenant: str, pointer: str) -> bool:
        return bool(self._read("refers", pointer, tenant)[0][0])

    async def pointers(self) -> list[str]:
        return await self._pool.run(
            lambda db: [row[0] for row in db.execute(self._sql["pointers"])]
        )

    @property
    def _connection(self) -> apsw.Connection:
        return self._reader

    def _read(self, query: str, *values: object) -> list[rows.Row]:
        with storage_errors(self.path):
            return self._connection.execute(self._sql[query], values).fetchall()

    def _lot(self, job_id: str, stage: str) -> int | None:
        found = self._read("lot_of_job", job_id, stage)
        return found[0][0] if found else None

    async def _read_span(self, query: str, start: int, end: int, *values: object) -> list[rows.Row]:
        """Go through items from one place to another: in a thread, if there may be many."""
        last = self._read("last_place", start, end)[0][0]
        if last is None or last - start < MANY:
            return self._read(query, start, end, *values)
        sql = self._sql[query]
        return await self._pool.run(lambda db: list(db.execute(sql, (start, end, *values))))

    async def close(self) -> None:
        self._pool.close()
        self._reader.close()
