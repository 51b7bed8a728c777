"""The backends of this project, held to the contract."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.adapters.memory.store import MemoryBackend
from penstock.adapters.sqlite.store import SqliteBackend
from penstock.control.ledger import Ledger
from penstock.core.errors import Unstorable
from penstock.core.ledger import Accept, Change
from penstock.lifecycles.canonical import JobEvent, JobState
from penstock.ports.store import AuditEntry, AuditQuery, Backend, Durability, JobQuery, LogLine
from penstock.testing.aio import run_async
from penstock.testing.gate import APPROVED, HOLD, VERDICT
from penstock.testing.samples import T0, accept, failed, line, move, names, verdicts
from penstock.testing.store import BackendContract, FallibleContract

_E = JobEvent


class TestMemory(BackendContract):
    def backend(self, folder: Path) -> Backend:
        return MemoryBackend()

    def successor(self, store: Ledger, folder: Path) -> Backend:
        return store.backend


class SqliteContract(FallibleContract):
    slow_disk = False

    def backend(self, folder: Path) -> Backend:
        return SqliteBackend(
            folder / "penstock.db", durability=Durability.OS, slow_disk=self.slow_disk
        )

    def successor(self, store: Ledger, folder: Path) -> Backend:
        # The lock goes with the process; here the first owner lives on.
        (folder / "penstock.lock").unlink()
        return self.backend(folder)

    @contextmanager
    def failing(self, store: Ledger) -> Iterator[None]:
        """The file may not grow: what SQLite says then is what it says on a full disk."""
        assert isinstance(store.backend, SqliteBackend)
        writer = store.backend._writer
        assert writer is not None
        writer.pragma("max_page_count", writer.pragma("page_count"))
        try:
            yield
        finally:
            writer.pragma("max_page_count", 1 << 30)

    @run_async
    async def test_what_cannot_be_written_harms_only_its_own_caller(self, store: Ledger) -> None:
        await store.apply([accept("old"), accept("ended"), move("ended", JobEvent.CANCEL)])
        unwritable = accept("bad", labels={"k": "\ud800"})
        store.write_log([line("old", "kept")])
        ends = await asyncio.gather(
            store.apply([accept("a")]),
            store.apply([accept("x"), unwritable]),
            store.apply([accept("b"), move("old", JobEvent.SCHEDULE)]),
            store.apply([replace(accept("ended"), fresh=True)]),  # breaks a constraint
            return_exceptions=True,
        )
        assert [type(end) for end in ends] == [list, Unstorable, list, Unstorable]
        assert await names(store) == "baendedold"
        assert [kept.text for kept in await store.read_log("old")] == ["kept"]

    @pytest.mark.parametrize(
        "bad",
        [
            LogLine("a", 1, T0, "info", "\udcff"),
            LogLine("a", 1, float("nan"), "info", "x"),
            LogLine("b", 1, T0, None, "x"),  # type: ignore[arg-type]
        ],
    )
    @run_async
    async def test_a_line_that_cannot_be_written_costs_no_others(
        self, store: Ledger, bad: LogLine
    ) -> None:
        await store.apply([accept("a"), accept("b")])
        before = [line("a", "1"), line("b", "1"), line("a", "2")]
        after = [line("b", "2"), line("a", "3")]
        store.write_log([*before, bad, *after, bad])
        store.write_audit([AuditEntry(T0, "alice", "a")])
        assert verdicts(await store.apply([accept("c")])) == "M"
        store.write_log([line("a", "4")])
        for _ in range(20):
            await store.apply([])
        kept = {name: await store.read_log(name) for name in "ab"}
        assert [(one.n, one.text) for one in kept["a"]] == [(n, str(n)) for n in range(1, 5)]
        assert [(one.n, one.text) for one in kept["b"]] == [(n, str(n)) for n in range(1, 3)]
        assert len(await store.read_audit(AuditQuery())) == 1

    @run_async
    async def test_an_audit_entry_that_cannot_be_written_costs_no_others(
        self, store: Ledger
    ) -> None:
        store.write_log([line("b", "kept")])
        store.write_audit([AuditEntry(T0, who, "a") for who in ("good", "\ud800", "fine")])
        assert verdicts(await store.apply([accept("b")])) == "M"
        for _ in range(10):
            await store.apply([])
        entries = await store.read_audit(AuditQuery())
        assert [entry.principal for entry in entries] == ["fine", "good"]
        assert [kept.text for kept in await store.read_log("b")] == ["kept"]

    @run_async
    async def test_errors_of_the_newest_jobs_are_searched(
        self, store: Ledger, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("penstock.adapters.sqlite.finding.MAX_SEARCHED", 2)
        await searched(store)


async def searched(store: Ledger) -> None:
    """In a store that looks into two jobs."""
    for name, topic in (("a", "job.a"), ("b", "job.b"), ("c", "job.b"), ("d", "job.a")):
        end = failed(name, error_message="no disk")
        await store.apply([accept(name, topic=topic), move(name, _E.SCHEDULE, _E.DISPATCH)])
        await store.apply([move(name, _E.FAIL, attempt=1, result=end)])
    assert await names(store, error="disk") == "dc"
    assert await names(store, error="disk", topic="job.a") == "da", "other conditions come first"
    assert await names(store, error="disk", oldest_first=True) == "ab"


class TestSqlite(SqliteContract):
    pass


class TestSqliteOnASlowDisk(SqliteContract):
    slow_disk = True


# -- two stores, the same answers --------------------------------------------------


def some_changes(chance: random.Random, count: int) -> list[Change]:
    """Lives of jobs that differ in everything that can be asked for."""
    changes: list[Change] = []
    for i in range(count):
        name = f"j{i:03}"
        pick = chance.choice
        again: dict[str, Any] = {
            "tenant": pick(["t1", "t2", "t3"]),
            "topic": pick(["job.a", "job.a.b", "job.b"]),
            "labels": pick([{}, {"k": "1"}, {"k": "12"}, {"k": "1", "l": "k"}, {"kk": "1"}]),
            "principal": pick(["", "alice"]),
            "schedule": pick([None, None, "nightly"]),
            "parent_job_id": pick([None, None, f"j{chance.randrange(count):03}"]),
            "child_of": pick([None, None, f"j{chance.randrange(count):03}"]),
            "first_try": pick([None, None, f"j{chance.randrange(count):03}"]),
            "workflow_id": pick([None, None, "flow"]),
            "step_index": pick([None, 1, 2]),
        }
        at = T0 + chance.randrange(20)
        key = pick([None, f"key{i}"])
        changes.append(accept(name, at, idempotency_key=key, **again))
        end = failed(name, error_message=pick(["Oops", "too late", None]))
        lives: list[list[Change]] = [
            [],
            [move(name, _E.CANCEL)],
            [move(name, _E.SCHEDULE, _E.DISPATCH)],
            [move(name, _E.SCHEDULE, _E.DISPATCH), move(name, _E.FAIL, attempt=1, result=end)],
            [move(name, _E.SCHEDULE, _E.DISPATCH), move(name, _E.EXPIRE, attempt=1)],
            [move(name, _E.SCHEDULE, _E.PARK, verdict=VERDICT, hold=pick([HOLD, APPROVED]))],
        ]
        life = pick(lives)
        changes.extend(life)
        if life == lives[3]:
            retry: Accept = accept(f"r{i:03}", at, **again)
            changes.extend(pick([[], [move(name, _E.NOTE, then=(retry,))]]))
    return changes


def some_query(chance: random.Random, count: int) -> JobQuery:
    conditions: dict[str, list[Any]] = {
        "job_id": ["j*", "*7", "j007", "r???"],
        "states": [(state,) for state in JobState] + [(JobState.FAILED, JobState.PENDING)],
        "topic": ["job.a", "job.*", "job.a*", "job.[!a]", "nothing*"],
        "tenant": ["t1", "t2", "nobody"],
        "parent_job_id": ["j003"],
        "child_of": ["j003"],
        "first_try": ["j003"],
        "workflow_id": ["flow", "none"],
        "labels": [{"k": "1"}, {"k": "1", "l": "k"}],
        "idempotency_key": ["key5"],
        "principal": ["alice", "", "nobody"],
        "schedule": ["nightly"],
        "error": ["oo", "late", ""],
        "awaiting_approval": [True, False],
        "dead": [True],
        "tries": [True],
        "accepted_from": [T0 + 7],
        "accepted_to": [T0 + 13],
        "before": [count // 2],
        "since": [count // 3],
        "oldest_first": [True],
        "limit": [1, 7, 1000],
    }
    asked = chance.sample(sorted(conditions), chance.choice([0, 1, 1, 2, 2, 3, 4]))
    return JobQuery(**{name: chance.choice(conditions[name]) for name in asked})


async def same_answers(memory: Ledger, file: Ledger, chance: random.Random) -> int:
    """Ask both the same; answers how many jobs were found."""
    found = 0
    for _ in range(100):
        query = some_query(chance, 120)
        expected = await memory.find(query)
        assert await file.find(query) == expected, query
        found += len(expected)
        skip = set(chance.sample(range(200), 50))
        expected = await memory.backend.find(query, skip)
        assert await file.backend.find(query, skip) == expected, (query, skip)
    assert await memory.tally() == await file.tally()
    assert await memory.retried() == await file.retried()
    for tenant in ("t1", "t2", "t3"):
        assert await memory.tally(tenant) == await file.tally(tenant)
    return found


@pytest.mark.parametrize("unlisted", [1, 17, 4096], ids="listed after {}".format)
@pytest.mark.parametrize("seed", range(5))
@run_async
async def test_two_backends_find_the_same(
    tmp_path: Path, seed: int, unlisted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.adapters.sqlite.store._UNLISTED", unlisted)
    chance = random.Random(seed)
    changes = some_changes(chance, 120)
    memory = Ledger(MemoryBackend())
    file = Ledger(SqliteBackend(tmp_path / "a.db", durability=Durability.OS))
    for start in range(0, len(changes), 9):
        assert await memory.apply(changes[start : start + 9]) == await file.apply(
            changes[start : start + 9]
        )
    assert await same_answers(memory, file, chance) > 300
    assert await memory.events(0, 10_000) == await file.events(0, 10_000)

    await file.close()
    await memory.close()
    memory, file = Ledger(memory.backend), Ledger(SqliteBackend(tmp_path / "a.db"))
    assert await same_answers(memory, file, chance) > 300

    awaited = {"j003", "j004", "j005"}
    pruned = [await each.prune(T0 + 100, 30, awaited) for each in (memory, file)]
    assert pruned[0] == pruned[1]
    assert pruned[0].jobs == 30
    assert await same_answers(memory, file, chance) > 100
    assert await memory.events(0, 10_000) == await file.events(0, 10_000)
    assert (await file.verify()).mismatches == ()
    await file.close()
