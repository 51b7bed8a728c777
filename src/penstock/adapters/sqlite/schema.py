"""The file of jobs: its mark, its migrations, its named statements."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import apsw
import msgspec

from penstock.adapters.sqlite import database
from penstock.adapters.sqlite.database import Schema, read_migrations, read_queries
from penstock.core.job import JobResult
from penstock.core.journal import LoggedStride
from penstock.lifecycles.canonical import HELD, JobEvent, JobState
from penstock.ports import rows
from penstock.ports.rows import STATES, encode, result_values
from penstock.ports.store import Durability

APPLICATION_ID = 0x50454E53  # "PENS": how we know a file to be ours


def migrations() -> list[str]:
    """The numbered migration files, in order, with the lifecycle's rules filled in."""
    return read_migrations("penstock.adapters.sqlite", _rules())


def open_writer(path: Path, durability: Durability) -> apsw.Connection:
    return database.open_writer(path, durability, JOBS)


def open_reader(path: Path) -> apsw.Connection:
    return database.open_reader(path, JOBS)


@cache
def load_queries() -> dict[str, str]:
    fill = {"job": rows.COLUMNS, "first_final": str(rows.FIRST_FINAL)}
    return read_queries("penstock.adapters.sqlite", fill)


def _rules() -> dict[str, str]:
    codes = rows.STATE_CODES
    return {
        "states": ", ".join(f"({code}, '{state}')" for state, code in codes.items()),
        "last_state": str(max(codes.values())),
        "first_final": str(rows.FIRST_FINAL),
        "scheduled": str(codes[JobState.SCHEDULED]),
        "succeeded": str(codes[JobState.SUCCEEDED]),
        "dead": ", ".join(map(str, rows.DEAD)),
        "held": ", ".join(sorted(str(codes[state]) for state in HELD)),
    }


# -- before schema 3: jobs and journal rows become slim rows and journal pages -------

_PAGE_EVENTS = 500
_decode_result = msgspec.msgpack.Decoder(JobResult).decode


def convert(connection: apsw.Connection) -> None:
    """Runs in the transaction of the migration, after its SQL."""
    execute = connection.execute
    execute(
        "CREATE TEMP TABLE job_page (job INTEGER, page INTEGER, PRIMARY KEY (job, page))"
        " WITHOUT ROWID"
    )
    page = 0
    for page, strides in enumerate(_pages(connection), start=1):
        execute("INSERT INTO journal VALUES (?, ?)", (page, encode(strides)))
        connection.executemany(
            "INSERT OR IGNORE INTO job_page VALUES (?, ?)",
            [(seq, page) for stride in strides for seq in stride.seqs],
        )
    connection.executemany(_INSERT, map(_new_row, execute(_SELECT)))
    execute(
        "INSERT INTO job_by_tenant SELECT tenant, seq FROM job ORDER BY 1, 2;"
        "INSERT INTO job_by_topic SELECT topic, seq FROM job ORDER BY 1, 2;"
    )
    last = execute(
        "SELECT max(ifnull((SELECT max(seq) FROM job), 0),"
        " ifnull((SELECT max(job) FROM old_journal), 0),"
        " ifnull((SELECT value FROM mark WHERE name = 'seq'), 0))"
    ).get
    marks = {"seq": last, "listed": last, "page": page, "replayed": page, "epoch": 0}
    execute("DELETE FROM mark")
    connection.executemany("INSERT INTO mark VALUES (?, ?)", marks.items())
    execute("DROP TABLE job_page; DROP TABLE old_journal; DROP TABLE old_job; DROP TABLE path;")


def _pages(connection: apsw.Connection) -> Iterator[list[LoggedStride]]:
    """The journal in its order; rows in sequence that differ only in the job share a stride."""
    paths = {
        code: (
            None if before is None else JobState(before),
            tuple(JobEvent(event) for event in events.split()),
        )
        for code, before, events in connection.execute("SELECT code, before, events FROM path")
    }
    strides: list[LoggedStride] = []
    count = 0
    last: object = None
    for row in connection.execute(
        "SELECT job, n, attempt, path, actor, at, reason, worker_id FROM old_journal ORDER BY id"
    ):
        job, n, attempt, *key = row
        path, actor, at, reason, worker_id = key
        before, events = paths[path]
        if count >= _PAGE_EVENTS:
            yield strides
            strides, count, last = [], 0, None
        if key != last:
            strides.append(
                LoggedStride(before, events, actor, at, reason, worker_id, None, [], [], [])
            )
            last = key
        strides[-1].seqs.append(job)
        strides[-1].versions.append(n)
        strides[-1].attempts.append(attempt)
        count += len(events)
    if strides:
        yield strides


_KEPT = (
    "seq, job_id, tenant, topic, state, accepted_at, finished_at, idempotency_key, unique_key,"
    " parent_job_id, workflow_id, step_index, schedule, parked, successor, input_blob,"
    " result_blob, request"
)
_KEPT_COUNT = _KEPT.count(",") + 1
_SELECT = f"""
SELECT {_KEPT}, version, attempt, updated_at, worker_id, pool, dispatched_at, started_at,
    cancel_requested, result, verdict, hold,
    (SELECT json_group_array(page) FROM job_page WHERE job = seq)
FROM old_job ORDER BY seq
"""
_INSERT = f"INSERT INTO job ({_KEPT}, page, record) VALUES ({', '.join('?' * (_KEPT_COUNT + 2))})"


def _new_row(row: tuple[Any, ...]) -> tuple[Any, ...]:
    kept = row[:_KEPT_COUNT]
    *plain, cancel_requested, result, verdict, hold, listed = row[_KEPT_COUNT:]
    pages = sorted(json.loads(listed))
    state = STATES[kept[4]]
    record = (
        *plain,
        bool(cancel_requested),
        None if result is None else result_values(_decode_result(result), state),
        None if verdict is None else msgspec.Raw(verdict),
        None if hold is None else msgspec.Raw(hold),
        pages,
    )
    return *kept, pages[0] if pages else 0, encode(record)


JOBS = Schema(
    APPLICATION_ID,
    lambda: migrations(),  # looked up late: tests replace it
    {3: convert},
)
