"""What only the SQLite store has: a file that lasts, that can be wrong, and that fills up."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import apsw
import msgspec
import pytest
from msgspec.structs import replace

from penstock.adapters.sqlite import schema as job_schema
from penstock.adapters.sqlite.database import migrate
from penstock.adapters.sqlite.finding import find, is_short
from penstock.adapters.sqlite.schema import APPLICATION_ID, JOBS, load_queries, migrations
from penstock.adapters.sqlite.store import SqliteBackend
from penstock.control.ledger import Ledger
from penstock.core.errors import (
    AlreadyRunning,
    StoreCorrupt,
    StoreFailed,
    StoreFull,
    Unavailable,
)
from penstock.core.job import Job, JobResult, Unique
from penstock.core.journal import Transition
from penstock.core.ledger import Accept
from penstock.lifecycles.canonical import JobEvent, JobState
from penstock.ports.query import is_awaiting_approval, matches
from penstock.ports.rows import FIRST_FINAL, STATE_CODES, Record, Result
from penstock.ports.store import AuditEntry, AuditQuery, Durability, JobQuery, LogLine
from penstock.testing.aio import run_async
from penstock.testing.gate import APPROVED, HOLD, VERDICT
from penstock.testing.samples import T0, accept, move, succeeded

_E = JobEvent


def ledger(path: Path, **options: Any) -> Ledger:
    return Ledger(SqliteBackend(path, **options))


@contextmanager
def opened(path: Path, **options: Any) -> Iterator[Ledger]:
    store = ledger(path, **options)
    asyncio.run(store.open())
    try:
        yield store
    finally:
        asyncio.run(store.close())


async def fill(store: Ledger, count: int = 5) -> None:
    for i in range(count):
        await store.apply([accept(f"j{i}"), move(f"j{i}", _E.SCHEDULE, _E.DISPATCH)])
    await store.apply([move("j0", _E.SUCCEED, result=succeeded("j0"))])


def writer(store: Ledger) -> apsw.Connection:
    assert isinstance(store.backend, SqliteBackend)
    assert store.backend._writer is not None
    return store.backend._writer


def raw(path: Path) -> apsw.Connection:
    return apsw.Connection(str(path))


# -- it lasts ---------------------------------------------------------------------


@run_async
async def test_what_was_stored_is_there_after_a_restart(tmp_path: Path) -> None:
    store = ledger(tmp_path / "a.db")
    await fill(store)
    await store.remember("fact", b"kept")
    before = await store.find(JobQuery())
    history = await store.history("j0")
    await store.close()

    store = ledger(tmp_path / "a.db")
    assert await store.find(JobQuery()) == before
    assert await store.history("j0") == history
    assert await store.recall("fact") == b"kept"
    assert [job.job_id for job in await store.unfinished()] == ["j1", "j2", "j3", "j4"]
    (answer,) = await store.apply([accept("new")])
    assert answer.job is not None
    assert answer.job.seq == 6
    assert (await store.verify()).mismatches == ()
    await store.close()


@run_async
async def test_flushes_are_waited_for_in_a_thread_while_the_disk_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    seconds = 0.02
    clock = SimpleNamespace(perf_counter=lambda: now)
    monkeypatch.setattr("penstock.adapters.sqlite.store.time", clock)
    store = ledger(tmp_path / "a.db")
    await store.open()
    backend = store.backend
    threads: list[bool] = []
    assert isinstance(backend, SqliteBackend)
    flush = backend._flush

    def flush_slowly(staged: Any) -> Any:
        nonlocal now
        now += seconds
        threads.append(threading.current_thread() is not threading.main_thread())
        return flush(staged)

    monkeypatch.setattr(backend, "_flush", flush_slowly)
    for n in range(10):
        await store.apply([accept(f"slow{n}")])
    assert threads == [False] * 8 + [True] * 2, "one slow flush says nothing"
    seconds = 0.0001
    await store.apply([accept("quick")])
    await store.apply([accept("after")])
    assert threads[10:] == [True, False]
    await store.close()


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.parametrize("slow_disk", [False, True])
def test_a_loop_that_ends_in_the_middle_of_a_commit_leaves_a_store_that_can_be_closed(
    tmp_path: Path, slow_disk: bool, steps: int
) -> None:
    store = ledger(tmp_path / "a.db", slow_disk=slow_disk)
    ends: list[object] = []

    async def submit() -> None:
        try:
            ends.append(await store.apply([accept("a")]))
        except Unavailable as error:
            ends.append(error)

    async def leave() -> None:
        left = asyncio.ensure_future(submit())
        for _ in range(steps):
            await asyncio.sleep(0)
        # As at the end of asyncio.run, but for the caller, who hears of what was committed.
        for task in asyncio.all_tasks() - {left, asyncio.current_task()}:
            task.cancel()
        async with asyncio.timeout(10):
            await left
            await store.close()

    asyncio.run(leave())
    (end,) = ends
    with opened(tmp_path / "a.db") as again:
        stored = asyncio.run(again.get("a")) is not None
    assert stored is isinstance(end, list), "what the caller heard is true"
    assert stored or steps == 1, "what had begun is committed"


@run_async
async def test_lines_go_on_where_they_stopped_after_a_restart(tmp_path: Path) -> None:
    for text in ("one", "two"):
        store = ledger(tmp_path / "a.db")
        await store.apply([accept("a")])
        store.write_log([LogLine("a", 1, T0, "info", text)])
        await store.apply([])
        await store.close()
    store = ledger(tmp_path / "a.db")
    assert [(line.n, line.text) for line in await store.read_log("a")] == [(1, "one"), (2, "two")]
    await store.close()


@run_async
async def test_a_job_that_writes_without_end_is_cut_off(tmp_path: Path) -> None:
    store = ledger(tmp_path / "a.db", max_log_lines=10)
    await store.apply([accept("a")])
    for _ in range(5):
        store.write_log([LogLine("a", 1, T0, "info", str(i)) for i in range(7)])
        await store.apply([])
    lines = await store.read_log("a")
    assert len(lines) == 10
    assert "cut off" in lines[-1].text
    await store.close()


@run_async
async def test_no_number_is_given_twice_though_the_newest_was_pruned_before_a_restart(
    tmp_path: Path,
) -> None:
    given: list[tuple[int, int]] = []
    for name in "abc":
        store = ledger(tmp_path / "a.db", durability=Durability.OS)
        (answer, _) = await store.apply([accept(name), move(name, _E.CANCEL)])
        assert answer.job is not None
        events = await store.events(given[-1][1] if given else 0)
        assert [event.transition.job_id for event in events] == [name, name]
        given.append((answer.job.seq, events[-1].cursor))
        assert (await store.prune(T0 + 1, limit=10)).jobs == 1
        await store.close()
    assert given == sorted(set(given))
    store = ledger(tmp_path / "a.db")
    assert await store.last_event() >= given[-1][1]
    assert await store.events(0) == []
    await store.close()


@run_async
async def test_counts_keys_and_audit_are_there_after_a_restart(tmp_path: Path) -> None:
    store = ledger(tmp_path / "a.db", durability=Durability.OS)
    await store.apply([accept("a", tenant="t1", unique=Unique("k")), accept("b")])
    await store.apply([move("b", _E.CANCEL)])
    store.write_audit([AuditEntry(T0, "alice", "job.cancel", "b")])
    await store.close()

    store = ledger(tmp_path / "a.db", durability=Durability.OS)
    assert await store.tally() == {JobState.PENDING: 1, JobState.CANCELLED: 1}
    assert await store.tally("t1") == {JobState.PENDING: 1}
    (answer,) = await store.apply([accept("c", tenant="t1", unique=Unique("k"))])
    assert answer.job is not None
    assert answer.job.job_id == "a"
    store.write_audit([AuditEntry(T0, "alice", "job.submit")])
    await store.apply([])
    assert [entry.n for entry in await store.read_audit(AuditQuery())] == [2, 1]
    await store.close()


@run_async
async def test_a_reader_beside_the_engine_sees_what_is_committed(tmp_path: Path) -> None:
    store = ledger(tmp_path / "a.db", durability=Durability.OS)
    await store.apply([accept(name, tenant="t1") for name in "abc"])
    await store.apply([move("b", _E.SCHEDULE, _E.DISPATCH), move("a", _E.CANCEL)])
    assert store.lagging
    reader = Ledger(SqliteBackend(tmp_path / "a.db"), own=False)
    query = JobQuery(tenant="t1")
    assert await reader.find(query) == await store.find(query)
    assert await reader.find(JobQuery(states=(JobState.DISPATCHED,))) == [await store.get("b")]
    assert await reader.history("b") == await store.history("b")
    assert await reader.tally("t1") == await store.tally("t1")
    assert await reader.events(0) == await store.events(0)
    assert await reader.last_event() == await store.last_event()
    assert (await reader.verify()).mismatches == ()
    with pytest.raises(StoreFailed):
        await reader.apply([accept("x")])
    await reader.close()
    await store.close()


# -- pages by index ----------------------------------------------------------------


class Traced:
    """A connection that tells how SQLite goes about what is read."""

    def __init__(self, path: Path) -> None:
        self._connection = raw(path)
        self.steps: set[str] = set()

    def execute(self, sql: str, values: tuple[object, ...] = ()) -> apsw.Cursor:
        plan = self._connection.execute(f"EXPLAIN QUERY PLAN {sql}", values)
        self.steps.update(str(row[3]) for row in plan)
        return self._connection.execute(sql, values)

    def executemany(self, sql: str, values: list[tuple[object, ...]]) -> apsw.Cursor:
        for each in values[:1]:
            self.execute(sql, each)
        return self._connection.executemany(sql, values)


OPEN = tuple(state for state in JobState if STATE_CODES[state] < FIRST_FINAL)


@pytest.mark.seed("001", "6.13")
@pytest.mark.parametrize(
    ("conditions", "index"),
    [
        ({}, "SCAN job"),
        ({"before": 50}, "INTEGER PRIMARY KEY (rowid<?)"),
        ({"since": 5, "oldest_first": True}, "INTEGER PRIMARY KEY (rowid>?)"),
        ({"job_id": "j5"}, "sqlite_autoindex_job_1 (job_id=?)"),
        ({"tenant": "t1"}, "job_by_tenant USING PRIMARY KEY (tenant=?)"),
        ({"tenant": "t1", "before": 50}, "job_by_tenant USING PRIMARY KEY (tenant=? AND seq<?)"),
        ({"topic": "job.test"}, "job_by_topic USING PRIMARY KEY (topic=?)"),
        ({"topic": "job.t*"}, "job_by_topic USING PRIMARY KEY (topic=?)"),
        ({"topic": "job.test", "tenant": "t1"}, "job_by_topic USING PRIMARY KEY (topic=? AND seq"),
        ({"states": (JobState.FAILED,)}, "job_trouble (state=? AND <expr>=?)"),
        (
            {"states": (JobState.FAILED,), "tenant": "t1", "before": 50},
            "job_trouble_tenant (tenant=? AND state=? AND <expr>=? AND rowid<?)",
        ),
        ({"states": (JobState.FAILED, JobState.PENDING)}, "job_trouble (state=? AND <expr>=?)"),
        ({"states": (JobState.PENDING,)}, "USING INDEX job_open"),
        ({"states": OPEN}, "USING INDEX job_open"),
        ({"dead": True}, "job_trouble (state=? AND <expr>=?)"),
        ({"dead": True, "tenant": "t1"}, "job_trouble_tenant (tenant=? AND state=? AND <expr>=?)"),
        ({"awaiting_approval": True}, "USING INDEX job_parked"),
        ({"schedule": "nightly"}, "job_schedule (schedule=?)"),
        ({"parent_job_id": "j1"}, "job_parent (parent_job_id=?)"),
        ({"child_of": "j1"}, "job_child (child_of=?)"),
        ({"first_try": "j1"}, "job_try (first_try=?)"),
        ({"workflow_id": "flow"}, "job_workflow (workflow_id=?)"),
        ({"idempotency_key": "k", "tenant": "t1"}, "job_key (idempotency_key=? AND tenant=?)"),
    ],
)
def test_a_page_is_read_from_its_index_in_order(
    tmp_path: Path, conditions: dict[str, Any], index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.adapters.sqlite.store._UNLISTED", 10)
    with opened(tmp_path / "a.db", durability=Durability.OS) as store:
        asyncio.run(_varied(store))
    traced: Any = Traced(tmp_path / "a.db")
    find(JobQuery(**conditions), (), traced)
    assert any(index in step for step in traced.steps), traced.steps
    assert not any("TEMP B-TREE" in step for step in traced.steps), "it would sort a range"
    # An index of nothing but open jobs, or of those that wait for approval, is read whole.
    scans = {step for step in traced.steps if step.startswith("SCAN") and "job_" not in step}
    assert scans == ({"SCAN job"} if not conditions else set())


async def _varied(store: Ledger) -> None:
    for i in range(20):
        request = accept(f"j{i}", tenant=f"t{i % 2}", schedule="nightly" if i == 3 else None)
        await store.apply([request, move(f"j{i}", _E.SCHEDULE, _E.DISPATCH)])
        if i % 3 == 0:
            await store.apply([move(f"j{i}", _E.FAIL, attempt=1)])
    for i in range(20, 24):
        parked = move(f"j{i}", _E.SCHEDULE, _E.PARK, verdict=VERDICT, hold=HOLD)
        await store.apply([accept(f"j{i}", tenant=f"t{i % 2}"), parked])
    await store.apply([accept("j24", tenant="t1")])


@pytest.mark.parametrize(
    ("conditions", "is_quick"),
    [
        ({}, False),  # it may have to pass over many tries that were retried
        ({"tries": True}, True),
        ({"tries": True, "limit": 1000}, False),
        ({"tries": True, "tenant": "t"}, True),
        ({"tries": True, "topic": "job.a"}, True),
        ({"tenant": "t", "topic": "job.a"}, False),
        ({"topic": "job.*"}, False),
        ({"states": (JobState.FAILED,), "tenant": "t"}, True),
        ({"states": OPEN}, True),
        ({"states": (JobState.SUCCEEDED,)}, False),
        ({"states": (JobState.PENDING,)}, False),
        ({"tries": True, "workflow_id": "w", "tenant": "t"}, True),
        ({"dead": True}, True),
        ({"dead": True, "topic": "job.a"}, False),
        ({"labels": {"k": "v"}}, False),
        ({"principal": "alice"}, False),
        ({"job_id": "*4cw6"}, False),
        ({"accepted_from": T0}, False),
    ],
)
def test_what_may_read_all_jobs_gets_a_thread(conditions: dict[str, Any], is_quick: bool) -> None:
    assert is_short(JobQuery(**conditions), ()) is is_quick


def test_keys_blobs_and_pages_are_looked_up_by_index(tmp_path: Path) -> None:
    with opened(tmp_path / "a.db"):
        pass
    connection = raw(tmp_path / "a.db")
    for name, count in {
        "job_by_unique": 2,
        "job_by_key": 2,
        "job_by_id": 1,
        "refers": 3,
        "pages_after": 1,
        "read_log": 3,
        "read_steps": 5,
        "read_steps_named": 5,
        "open_jobs": 0,
    }.items():
        plan_of = connection.execute(f"EXPLAIN QUERY PLAN {load_queries()[name]}", ("x",) * count)
        said = [str(row[3]) for row in plan_of]
        scans = [step for step in said if step.startswith(("SCAN", "USE TEMP"))]
        fine = ("job_open", "CONSTANT", "json_each")  # the last is a list in the query itself
        assert not [step for step in scans if not any(word in step for word in fine)]


# -- its schema -------------------------------------------------------------------


def schema(connection: apsw.Connection) -> list[tuple[object, ...]]:
    found = connection.execute(
        "SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY type, name"
    )
    return list(found)


@pytest.mark.parametrize("version", range(len(migrations()) + 1))
def test_a_schema_of_any_age_becomes_the_newest(
    tmp_path: Path, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = raw(tmp_path / "old.db")
    with monkeypatch.context() as patch:
        patch.setattr(job_schema, "migrations", lambda: migrations()[:version])
        migrate(old, tmp_path, JOBS)
    migrate(old, tmp_path, JOBS)
    fresh = raw(tmp_path / "fresh.db")
    migrate(fresh, tmp_path, JOBS)
    assert schema(old) == schema(fresh)
    assert old.pragma("user_version") == len(migrations())
    assert old.pragma("application_id") == APPLICATION_ID


def test_a_migration_that_fails_leaves_the_version_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [*migrations(), "CREATE TABLE extra (a); CREATE TABLE job (again);"]
    monkeypatch.setattr(job_schema, "migrations", lambda: steps)
    connection = raw(tmp_path / "a.db")
    with pytest.raises(apsw.SQLError):
        migrate(connection, tmp_path, JOBS)
    assert connection.pragma("user_version") == len(steps) - 1
    assert not [row for row in schema(connection) if row[1] == "extra"]


def as_first_published(path: Path) -> None:
    """A file with jobs, as Penstock wrote it before there was a gate."""
    old = raw(path)
    old.pragma("journal_mode", "wal")
    with old:
        old.execute(migrations()[0])
        old.execute("INSERT INTO path VALUES (7, NULL, 'accept', 'PENDING')")
        old.pragma("application_id", APPLICATION_ID)
        old.pragma("user_version", 1)
        request = msgspec.msgpack.encode(accept("j0", tenant="t1").request)
        for seq in (1, 2):
            old.execute(
                "INSERT INTO job (seq, job_id, topic, tenant, state, version, attempt, accepted_at,"
                " updated_at, cancel_requested, request) VALUES (?, ?, 'job.test', 't1', 1, 1, 0,"
                " ?, ?, 0, ?)",
                (seq, f"j{seq}", T0, T0, request.replace(b"j0", f"j{seq}".encode())),
            )
            old.execute(
                "INSERT INTO journal (job, n, path, attempt, actor, at, reason)"
                " SELECT ?, 1, code, 0, 'gateway', ?, '' FROM path WHERE before IS NULL",
                (seq, T0),
            )
    old.close()


def test_a_file_of_before_the_gate_can_be_used_on(tmp_path: Path) -> None:
    as_first_published(tmp_path / "a.db")
    with opened(tmp_path / "a.db") as store:
        asyncio.run(_use(store))


async def _use(store: Ledger) -> None:
    assert (await store.verify()).mismatches == ()
    assert await store.tally("t1") == {JobState.PENDING: 2}
    assert [job.job_id for job in await store.find(JobQuery(tenant="t1"))] == ["j2", "j1"]
    at = await store.last_event()
    await store.apply([move("j1", _E.SCHEDULE, _E.PARK, verdict=VERDICT, hold=HOLD)])
    await store.apply([move("j1", _E.APPROVE, hold=APPROVED), accept("new")])
    events = [event.transition.event for event in await store.events(at)]
    assert events == [_E.SCHEDULE, _E.PARK, _E.APPROVE, _E.ACCEPT]
    assert len(await store.events(0)) == 6
    (job,) = await store.fetch([1])
    assert (job.verdict, job.hold) == (VERDICT, APPROVED)
    assert (await store.verify()).mismatches == ()


def as_before_the_ledger(path: Path, jobs: list[Job], logs: list[list[Transition]]) -> None:
    """A file with jobs, as Penstock wrote it before there were journal pages: schema 2."""
    old = raw(path)
    old.pragma("journal_mode", "wal")
    encode = msgspec.msgpack.encode
    with old:
        for migration in migrations()[:2]:
            old.execute(migration)
        old.pragma("application_id", APPLICATION_ID)
        old.pragma("user_version", 2)
        for job, log in zip(jobs, logs, strict=True):
            request, result = job.request, job.result
            row = {
                "seq": job.seq,
                "job_id": job.job_id,
                "topic": request.topic,
                "tenant": request.tenant,
                "state": STATE_CODES[job.state],
                "version": job.version,
                "attempt": job.attempt,
                "accepted_at": job.accepted_at,
                "updated_at": job.updated_at,
                "worker_id": job.worker_id,
                "pool": job.pool,
                "dispatched_at": job.dispatched_at,
                "started_at": job.started_at,
                "finished_at": job.finished_at,
                "cancel_requested": job.cancel_requested,
                "successor": job.successor,
                "idempotency_key": request.idempotency_key,
                "unique_key": None if request.unique is None else request.unique.key,
                "request": encode(request),
                "result": None if result is None else encode(result),
                "verdict": None if job.verdict is None else encode(job.verdict),
                "hold": None if job.hold is None else encode(job.hold),
                "parked": 1 if is_awaiting_approval(job) else None,
            }
            places = ", ".join(f":{name}" for name in row)
            old.execute(f"INSERT INTO job ({', '.join(row)}) VALUES ({places})", row)
            for step in log:
                old.execute(
                    "INSERT OR IGNORE INTO path (before, events, after) VALUES (?, ?, ?)",
                    (step.before, step.event, step.after),
                )
                old.execute(
                    "INSERT INTO journal (job, n, path, attempt, actor, at, reason, worker_id)"
                    " SELECT ?, ?, max(code), ?, ?, ?, ?, ? FROM path"
                    " WHERE before IS ? AND events = ?",
                    (
                        *(job.seq, step.n, step.attempt, step.actor, step.at, step.reason),
                        *(step.worker_id, step.before, step.event),
                    ),
                )
        old.execute(
            "DELETE FROM tally; INSERT INTO tally"
            " SELECT state, tenant, count(*) FROM job GROUP BY 1, 2"
        )
    old.close()


@run_async
async def test_a_file_of_before_the_ledger_is_converted(tmp_path: Path) -> None:
    store = ledger(tmp_path / "new.db", durability=Durability.OS)
    for n in range(300):
        await store.apply([accept(f"j{n}", at=T0 + n, tenant=f"t{n % 3}")])
    parked = move("j1", _E.SCHEDULE, _E.PARK, at=T0 + 500, verdict=VERDICT, hold=HOLD)
    go = [move(f"j{n}", _E.SCHEDULE, _E.DISPATCH, at=T0 + 500) for n in range(2, 250)]
    await store.apply([accept("k", idempotency_key="key", unique=Unique("u")), parked, *go])
    error = JobResult(job_id="", status=JobState.FAILED, error_code="X", error_kinds=("A", "B"))
    for n in range(2, 200):
        at = T0 + 600 + n
        result = succeeded(f"j{n}", attempt=1, worker_id="w1", execution_ms=1.5)
        end = move(f"j{n}", _E.SUCCEED, at=at, result=result)
        if n % 5 == 0:
            failed = replace(error, job_id=f"j{n}")
            retry = (accept(f"r{n}", at=at, parent_job_id=f"j{n}"),) if n % 10 else ()
            end = move(f"j{n}", _E.FAIL, at=at, result=failed, then=retry)
        await store.apply([end])
    await store.apply([move("j3", _E.NOTE, at=T0 + 900), move("j200", _E.START, at=T0 + 900)])
    await store.apply(
        [move("j200", _E.REDISPATCH, at=T0 + 901), move("j0", _E.CANCEL, at=T0 + 901)]
    )
    jobs = await store.find(JobQuery(tries=True, limit=1000, oldest_first=True))
    logs = [await store.history(job.job_id) for job in jobs]
    tally, retried = await store.tally(), await store.retried()
    assert retried == 20
    await store.close()

    as_before_the_ledger(tmp_path / "old.db", jobs, logs)
    store = ledger(tmp_path / "old.db", durability=Durability.OS)
    found = await store.find(JobQuery(tries=True, limit=1000, oldest_first=True))
    assert [replace(job, pages=()) for job in found] == [replace(job, pages=()) for job in jobs]
    assert [await store.history(job.job_id) for job in found] == logs
    assert (await store.tally(), await store.retried()) == (tally, retried)
    assert (await store.verify()).mismatches == ()
    assert len(await store.events(0, 10_000)) == sum(map(len, logs))
    for query in (
        JobQuery(tenant="t1", limit=1000),
        JobQuery(topic="job.test", tenant="t1", limit=1000),
        JobQuery(dead=True, limit=1000),
        JobQuery(idempotency_key="key"),
        JobQuery(awaiting_approval=True),
    ):
        assert [job.seq for job in await store.find(query)] == [
            job.seq for job in reversed(jobs) if matches(query, job)
        ]
    (answer,) = await store.apply([accept("new", unique=Unique("u"))])
    assert answer.job is not None
    assert answer.job.job_id == "k"
    answers = await store.apply([accept("new"), move("j1", _E.APPROVE, hold=APPROVED)])
    assert all(answer.moved for answer in answers)
    assert (await store.verify()).mismatches == ()
    await store.close()


def test_a_reader_does_not_guess_at_a_file_of_before_the_gate(tmp_path: Path) -> None:
    as_first_published(tmp_path / "a.db")
    with pytest.raises(StoreFailed, match="older Penstock") as refused:
        asyncio.run(SqliteBackend(tmp_path / "a.db").open(own=False))
    assert "start an engine" in (refused.value.hint or "")


def test_a_row_has_every_field_of_a_job() -> None:
    of_job = {"seq", "request", "state", "accepted_at", "finished_at", "successor"}
    assert of_job | set(Record.__struct_fields__) == set(Job.__struct_fields__)
    assert {"job_id"} | set(Result.__struct_fields__) == set(JobResult.__struct_fields__)


def test_migrations_are_numbered_without_gaps() -> None:
    folder = Path(job_schema.__file__).parent / "migrations"
    numbers = sorted(int(path.name.split("_")[0]) for path in folder.glob("*.sql"))
    assert numbers == list(range(1, len(numbers) + 1))


def test_the_view_speaks_in_words(tmp_path: Path) -> None:
    with opened(tmp_path / "a.db") as store:
        asyncio.run(fill(store, 1))
    reader = raw(tmp_path / "a.db")
    assert reader.execute("SELECT job_id, state FROM jobs").fetchall() == [("j0", "SUCCEEDED")]


# -- what the database itself refuses ---------------------------------------------


@pytest.mark.seed("001", "3.2")
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE job SET state = 'FAILED'",
        "UPDATE job SET state = NULL",
        "UPDATE job SET job_id = 'b' WHERE job_id = 'a'",
        "UPDATE job SET idempotency_key = 'k', tenant = 'default'",
        "UPDATE job SET request = NULL",
        "UPDATE journal SET strides = x'90'",
        "INSERT INTO journal (page, strides) SELECT page, strides FROM journal",
        "UPDATE audit SET principal = 'nobody'",
        "DELETE FROM audit",
    ],
)
def test_an_illegal_row_is_refused_by_the_database(tmp_path: Path, statement: str) -> None:
    with opened(tmp_path / "a.db") as store:
        asyncio.run(_two(store))
    connection = raw(tmp_path / "a.db")
    connection.pragma("foreign_keys", True)
    with pytest.raises((apsw.ConstraintError, apsw.SQLError)):
        connection.execute(statement)


async def _two(store: Ledger) -> None:
    store.write_audit([AuditEntry(T0, "alice", "job.submit")])
    await store.apply([accept("a"), accept("b")])


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (f"UPDATE job SET state = {STATE_CODES[JobState.DENIED]} WHERE job_id = 'a'", "state is"),
        ("UPDATE job SET record = NULL WHERE job_id = 'b'", "state is"),
        ("UPDATE job SET accepted_at = accepted_at + 5", "accepted_at"),
        ("DELETE FROM journal WHERE page > 1", "log says"),
        ("DELETE FROM journal", "empty"),
        ("DELETE FROM job WHERE job_id = 'b'", "has 0 jobs that are CANCELLED, the count says 1"),
        ("UPDATE tally SET count = count + 1 WHERE count > 0", "the count says 2"),
        ("DELETE FROM tally", "has 1 jobs that are CANCELLED, the count says 0"),
        ("INSERT INTO tally VALUES (9, 'ghost', 3)", "ghost has 0 jobs that are TIMEOUT"),
    ],
)
def test_what_was_changed_behind_our_back_is_found(
    tmp_path: Path, statement: str, said: str
) -> None:
    with opened(tmp_path / "a.db") as store:
        asyncio.run(_one_scheduled(store))
    connection = raw(tmp_path / "a.db")
    connection.execute(statement)
    connection.close()
    with opened(tmp_path / "a.db") as store:
        mismatches = asyncio.run(store.verify()).mismatches
    assert any(said in mismatch.problem for mismatch in mismatches)


async def _one_scheduled(store: Ledger) -> None:
    await store.apply([accept("a"), accept("b")])
    await store.apply([move("a", _E.SCHEDULE), move("b", _E.CANCEL)])


# -- files that are wrong ---------------------------------------------------------


def refusal(path: Path) -> str:
    with pytest.raises(StoreFailed) as refused:
        asyncio.run(SqliteBackend(path).open())
    # It lets go of the folder, so that the next try says the same.
    with pytest.raises(type(refused.value)):
        asyncio.run(SqliteBackend(path).open())
    assert isinstance(refused.value, StoreCorrupt)
    assert refused.value.hint
    return str(refused.value)


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    path.write_bytes(b"This is a diary, and not a database at all. " * 100)
    before = path.read_bytes()
    assert "not a readable database" in refusal(path)
    assert path.read_bytes() == before


@run_async
async def test_a_file_that_was_never_filled_is_told_to_a_reader_and_taken_by_an_engine(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.db"
    raw(path).close()
    path.touch()
    reader = SqliteBackend(path)
    with pytest.raises(StoreFailed, match="holds nothing yet") as refused:
        await reader.open(own=False)
    assert refused.value.code == "STORE_FAILED"
    owner = SqliteBackend(path)
    await owner.open()
    await owner.close()


KILLED_AT_ITS_START = """
import os, sys, apsw
made = apsw.Connection(sys.argv[1])
made.pragma("cache_size", 1)
made.execute("BEGIN; CREATE TABLE job (data)")
made.executemany("INSERT INTO job VALUES (?)", ((b"x" * 4000,) for _ in range(200)))
os.kill(os.getpid(), 9)
"""


@run_async
async def test_a_file_whose_maker_was_killed_amid_its_tables_is_told_and_taken_by_an_engine(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.db"
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", KILLED_AT_ITS_START, path])
    assert (tmp_path / "a.db-journal").exists()
    with pytest.raises(StoreFailed, match="holds nothing yet"):
        await SqliteBackend(path).open(own=False)
    owner = SqliteBackend(path)
    await owner.open()
    await owner.close()


def test_somebody_elses_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    other = raw(path)
    other.execute("CREATE TABLE diary (entry); INSERT INTO diary VALUES ('dear diary')")
    other.close()
    before = path.read_bytes()
    assert "not one of Penstock's" in refusal(path)
    assert path.read_bytes() == before


def test_the_file_of_a_newer_penstock_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with opened(path):
        pass
    newer = raw(path)
    newer.pragma("user_version", 99)
    newer.close()
    assert "newer Penstock (schema 99" in refusal(path)


@pytest.mark.parametrize("damage", ["header", "schema", "truncated"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.db"
    with opened(path) as store:
        asyncio.run(fill(store))
    content = bytearray(path.read_bytes())
    match damage:
        case "header":
            content[:64] = os.urandom(64)
        case "schema":
            content[100:1200] = os.urandom(1100)
        case "truncated":
            del content[5000:]
    path.write_bytes(content)
    assert "not a readable database" in refusal(path)


def test_an_empty_file_becomes_a_store(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    path.touch()
    with opened(path) as store:
        asyncio.run(fill(store))


# -- who may use it ---------------------------------------------------------------


def test_a_second_engine_is_refused_and_told_who_is_first(tmp_path: Path) -> None:
    with (
        opened(tmp_path / "a.db"),
        pytest.raises(AlreadyRunning, match=f"process {os.getpid()}") as refused,
    ):
        asyncio.run(SqliteBackend(tmp_path / "a.db").open())
    assert refused.value.hint
    with opened(tmp_path / "a.db"):
        pass


@contextmanager
def without_privilege() -> Iterator[None]:
    """Root may do anything: be somebody else for a moment."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_may_not_be_written_is_refused_by_name(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    path = folder / "a.db"
    with opened(path):
        pass
    if what == "folder":
        path.with_suffix(".lock").unlink()
        folder.chmod(0o555)
    else:
        folder.chmod(0o777)
        path.with_suffix(".lock").chmod(0o666)
        path.chmod(0o444)
    with without_privilege(), pytest.raises(StoreFailed, match=str(folder)) as refused:
        asyncio.run(SqliteBackend(path).open())
    assert "permissions" in refused.value.hint


# -- a full disk ------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        missing = f"can't mount a small disk: {done.stderr.strip()}"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("slow_disk", [False, True])
@run_async
async def test_a_full_disk_stores_nothing_by_half_and_goes_on_when_there_is_room(
    small_disk: Path, slow_disk: bool
) -> None:
    store = ledger(small_disk / "a.db", slow_disk=slow_disk)
    accepted: list[str] = []
    with pytest.raises(StoreFull, match="no space left"):
        for i in range(10_000):
            batch = [accept(f"{i}-{k}", env={"pad": "x" * 500}) for k in range(5)]
            await store.apply(batch)
            accepted.extend(change.request.job_id for change in batch)
    assert accepted

    found = {job.job_id for job in await store.find(JobQuery(limit=100_000))}
    assert found == set(accepted)
    for _ in range(3):  # however often one tries
        with pytest.raises(StoreFull):
            await store.apply([accept(f"n{n}", env={"pad": "x" * 4000}) for n in range(500)])
    assert (await store.verify()).mismatches == ()

    more_room = ["mount", "-o", "remount,size=16m", str(small_disk)]
    await asyncio.to_thread(subprocess.run, more_room, check=True)
    (answer,) = await store.apply([accept("after")])
    assert answer.moved
    assert (await store.verify()).mismatches == ()
    await store.close()
    reader = raw(small_disk / "a.db")
    assert reader.pragma("integrity_check") == "ok"
    reader.close()


# -- power loss -------------------------------------------------------------------


class LossyDisk(apsw.VFS):
    """A disk that keeps only what was synced, and of the rest whatever it likes.

    It passes everything through to the real disk, and remembers beside it what each file
    held when it was last synced, and what was written since.
    """

    base = "unix"

    def __init__(self) -> None:
        super().__init__("lossy", self.base, makedefault=True)
        self.synced: dict[str, bytearray] = {}
        self.unsynced: dict[str, list[tuple[int, bytes | None]]] = {}
        self.before_call = lambda: None

    def xOpen(self, name: object, flags: list[int]) -> LossyFile:
        return LossyFile(self, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        self.before_call()
        self.synced.pop(filename, None)
        self.unsynced.pop(filename, None)
        super().xDelete(filename, syncdir)

    def lose_power(self, folder: Path, chance: random.Random) -> None:
        """Write to `folder` what the disk could hold after a power loss right now."""
        folder.mkdir()
        for name, synced in self.synced.items():
            content = bytearray(synced)
            for offset, data in self.unsynced[name]:
                fate = chance.random()
                if data is None:
                    if fate < 0.5:
                        del content[offset:]
                elif fate < 0.4:
                    _write(content, offset, data)
                elif fate < 0.6:  # torn in the middle of a sector's worth
                    _write(content, offset, data[: chance.randrange(len(data) + 1) // 512 * 512])
            (folder / Path(name).name).write_bytes(content)


class LossyFile(apsw.VFSFile):
    def __init__(self, disk: LossyDisk, name: object, flags: list[int]) -> None:
        super().__init__(disk.base, name, flags)
        filename = name.filename() if isinstance(name, apsw.URIFilename) else str(name)
        self._disk, self._name = disk, filename
        if filename not in disk.synced:
            disk.synced[filename] = bytearray(Path(filename).read_bytes())
            disk.unsynced[filename] = []

    def xWrite(self, data: bytes, offset: int) -> None:
        self._disk.before_call()
        self._disk.unsynced[self._name].append((offset, bytes(data)))
        super().xWrite(data, offset)

    def xTruncate(self, size: int) -> None:
        self._disk.before_call()
        self._disk.unsynced[self._name].append((size, None))
        super().xTruncate(size)

    def xSync(self, flags: int) -> None:
        self._disk.before_call()
        super().xSync(flags)
        content = self._disk.synced[self._name]
        for offset, data in self._disk.unsynced[self._name]:
            if data is None:
                del content[offset:]
            else:
                _write(content, offset, data)
        self._disk.unsynced[self._name].clear()


def _write(content: bytearray, offset: int, data: bytes) -> None:
    content.extend(bytes(max(0, offset - len(content))))
    content[offset : offset + len(data)] = data


@pytest.fixture
def lossy() -> Iterator[LossyDisk]:
    disk = LossyDisk()
    yield disk
    disk.unregister()


class Blackouts:
    """Takes a picture of the disk at random moments, each with what was promised by then."""

    def __init__(self, disk: LossyDisk, folder: Path, chance: random.Random) -> None:
        self._disk, self._folder, self._chance = disk, folder, chance
        self.accepted: dict[str, JobState] = {}
        self.pictures: list[tuple[Path, dict[str, JobState]]] = []
        disk.before_call = self._maybe

    def _maybe(self) -> None:
        if self._chance.random() < 0.15 and len(self.pictures) < (40 if self.accepted else 10):
            picture = self._folder / f"picture{len(self.pictures)}"
            self._disk.lose_power(picture, self._chance)
            self.pictures.append((picture, dict(self.accepted)))


async def busy(store: Ledger, blackouts: Blackouts, chance: random.Random) -> None:
    """A life full of commits; each is promised when it returns."""
    await store.open()
    writer(store).pragma("wal_autocheckpoint", 10)

    async def live(name: str) -> None:
        steps = [
            [Accept(accept(name, env={"pad": "x" * chance.randrange(3000)}).request, T0)],
            [move(name, _E.SCHEDULE, _E.DISPATCH)],
            [move(name, _E.SUCCEED, result=succeeded(name))],
        ]
        for changes in steps[: chance.randint(1, 3)]:
            (answer,) = await store.apply(changes)
            assert answer.job is not None
            blackouts.accepted[name] = answer.job.state

    for round_ in range(15):
        await asyncio.gather(*(live(f"{round_}-{n}") for n in range(chance.randint(1, 4))))


@pytest.mark.parametrize("seed", range(5))
@run_async
async def test_what_was_promised_survives_a_power_loss_at_any_moment(
    tmp_path: Path, lossy: LossyDisk, seed: int
) -> None:
    chance = random.Random(seed)
    (tmp_path / "data").mkdir()
    store = ledger(tmp_path / "data" / "a.db", durability=Durability.DISK)
    blackouts = Blackouts(lossy, tmp_path, chance)
    await busy(store, blackouts, chance)
    lossy.before_call = lambda: None
    await store.close()
    assert len(blackouts.pictures) >= 10
    for picture, promised in blackouts.pictures:
        store = ledger(picture / "a.db")
        assert (await store.verify()).mismatches == ()
        held = {job.job_id: job.state for job in await store.find(JobQuery(limit=1000))}
        for job_id, state in promised.items():
            assert list(JobState).index(held[job_id]) >= list(JobState).index(state)
        assert writer(store).pragma("integrity_check") == "ok"
        await store.close()
        shutil.rmtree(picture)


@run_async
async def test_without_flushes_a_power_loss_costs_jobs_but_tears_nothing(
    tmp_path: Path, lossy: LossyDisk
) -> None:
    chance = random.Random(1)
    (tmp_path / "data").mkdir()
    store = ledger(tmp_path / "data" / "a.db", durability=Durability.OS)
    blackouts = Blackouts(lossy, tmp_path, chance)
    await busy(store, blackouts, chance)
    lossy.before_call = lambda: None
    await store.close()
    lost = 0
    for picture, promised in blackouts.pictures:
        store = ledger(picture / "a.db")
        assert (await store.verify()).mismatches == ()
        held = {job.job_id for job in await store.find(JobQuery(limit=1000))}
        lost += len(promised.keys() - held)
        await store.close()
    assert lost > 0, "the lossy disk loses nothing: these tests prove nothing"
