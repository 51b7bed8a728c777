"""Moving the jobs of a SQLite engine to PostgreSQL, row by row: both keep the same encodings.

Blobs, keys' tokens and the socket stay in the data directory; named facts (keys, schedules,
limits …) are copied with the jobs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import apsw

from penstock.adapters.postgres.admin import (
    database_status,
    fill_database,
    migrate_database,
    shard_count,
)
from penstock.adapters.postgres.store import audit_row
from penstock.adapters.sqlite.database import WriterLock, one_state, storage_errors
from penstock.adapters.sqlite.schema import open_reader, open_writer
from penstock.config import Settings
from penstock.core.errors import NotFound
from penstock.ports import rows
from penstock.ports.store import AuditEntry, Durability

__all__ = ["copy_to_postgres", "database_status", "migrate_database", "shard_count"]

_JOB = (
    *("seq", "job_id", "tenant", "topic", "state", "accepted_at", "page", "request"),
    *("finished_at", "record", "idempotency_key", "unique_key", "parent_job_id", "child_of"),
    *("first_try", "workflow_id", "step_index", "schedule", "input_blob", "parked", "successor"),
    "result_blob",
)
_TABLES = {
    "journal": ("page", "strides"),
    "step": ("job", "name", "n", "outcome", "input_blob", "output_blob", "body"),
    "tally": ("state", "tenant", "count"),
    "fact": ("name", "value"),
}
"""Those that are the same in both."""

Table = tuple[str, tuple[str, ...], Iterator[tuple[Any, ...]]]


async def copy_to_postgres(settings: Settings, url: str) -> dict[str, int]:
    """Copy all jobs of a data directory whose engine is stopped; answers the rows by table.

    Raises AlreadyRunning if its engine runs, NotFound if there is none, and Conflict if there are
    jobs in the database already. Nothing is changed in the data directory.
    """
    path = settings.database
    if not path.is_file():
        raise NotFound(f"no jobs in {settings.data_dir}", hint="name its folder with --data")
    lock = WriterLock(settings.lock_file)
    try:
        open_writer(path, Durability.DISK).close()  # brings an old file up to date
        db = open_reader(path)
        try:
            with storage_errors(path), one_state(db):
                last: int = db.execute("SELECT ifnull(max(seq), 0) FROM job").get
                return await fill_database(url, _tables(db), last)
        finally:
            db.close()
    finally:
        lock.close()


def _tables(db: apsw.Connection) -> Iterator[Table]:
    columns = ", ".join(_JOB)
    for table, condition in (("job", "<"), ("done", ">=")):
        sql = f"SELECT {columns} FROM job WHERE state {condition} {rows.FIRST_FINAL} ORDER BY seq"
        yield table, _JOB, iter(db.execute(sql))
    for table, columns_of in _TABLES.items():
        sql = f"SELECT {', '.join(columns_of)} FROM {table}"
        yield table, columns_of, iter(db.execute(sql))
    lines = db.execute("SELECT job, n, attempt, at, level, text FROM log_line")
    encoded = ((*line[:5], line[5].encode()) for line in lines)
    yield "log_line", ("job", "n", "attempt", "at", "level", "text"), encoded
    yield "audit", ("principal", "action", "subject", "tenant", "entry"), _audit(db)
    marks = db.execute("SELECT name, value FROM mark WHERE name IN ('seq', 'page', 'replayed')")
    yield "mark", ("name", "value"), iter(marks)


def _audit(db: apsw.Connection) -> Iterator[tuple[Any, ...]]:
    sql = "SELECT at, principal, action, subject, tenant, detail, outcome FROM audit ORDER BY n"
    for row in db.execute(sql):
        yield audit_row(AuditEntry(*row))
