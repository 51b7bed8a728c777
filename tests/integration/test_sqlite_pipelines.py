"""What only the SQLite store of pipelines has: a file that lasts, and that others write too."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import apsw
import pytest

from penstock.adapters.sqlite.schema import open_writer as open_jobs
from penstock.core.errors import PenstockError, StoreCorrupt, StoreFailed
from penstock.lifecycles.pipeline import PipelineJobEvent, PipelineJobStatus
from penstock.ports.store import Durability
from penstock.testing.aio import run_async
from penstock.testing.pipeline_samples import (
    a_run,
    a_stage,
    begun,
    bring_to,
    ended_items,
    listed_items,
    progress,
    save_of,
)
from penstock.testing.samples import T0
from penstock.workloads.pipeline.records import Breaker, ItemOutcome, PipelineInfo
from penstock.workloads.pipeline.storage.memory import MemoryPipelineStore
from penstock.workloads.pipeline.storage.sqlite import schema
from penstock.workloads.pipeline.storage.sqlite.finding import search_for
from penstock.workloads.pipeline.storage.sqlite.store import SqlitePipelineStore
from penstock.workloads.pipeline.store import Claim, PipelineStore, RunQuery

_S, _E = PipelineJobStatus, PipelineJobEvent


def opened(folder: Path, **options: Any) -> SqlitePipelineStore:
    return SqlitePipelineStore(folder / "pipelines.db", **{"durability": Durability.OS, **options})


def raw(folder: Path) -> apsw.Connection:
    return apsw.Connection(str(folder / "pipelines.db"))


# -- it lasts ---------------------------------------------------------------------


@run_async
async def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    store = opened(tmp_path)
    await begun(store, "a", config={"k": "x" * 5000}, lease_until=T0 + 5)
    groups = {"listed": listed_items("s", 5), "ended": ended_items("s", 2)}
    await store.save(save_of("a", stages=(a_stage("s", 0),), happened=(progress(1),), **groups))
    await bring_to(store, "b", _S.PARTIAL)
    await store.put_breaker(Breaker(name="feeds"))
    await store.declare([PipelineInfo(name="p", topic="t", stages=(), fingerprint="f")])
    await store.remember("p/fact", b"kept")
    before = await everything(store)
    await store.close()

    store = opened(tmp_path)
    assert await everything(store) == before
    assert await store.recall("p/fact") == b"kept"
    assert len(await store.declared()) == 1
    taken = await store.claim(Claim(job_id="a", owner="next", now=T0 + 9))
    assert taken is not None
    assert (taken.fence, taken.resumes) == (2, 1)
    await store.save(save_of("a", fence=2, happened=(progress(2),)))
    assert [event.data["n"] for event in await store.events("a")] == [1, 2]
    await store.close()


async def everything(store: PipelineStore) -> list[Any]:
    runs = await store.find(RunQuery(limit=1000))
    return [
        runs,
        [await store.items(run.id, stage) for run in runs for stage in "stu"],
        [await store.events(run.id) for run in runs],
        await store.unfinished(),
        await store.breakers(),
    ]


@pytest.mark.parametrize("point", ["before-pipeline-commit", "after-pipeline-commit"])
def test_what_was_answered_survives_a_kill_at_any_commit(tmp_path: Path, point: str) -> None:
    """The child says each item after it was saved; when it is killed one may be unsaid."""
    script = """
import asyncio, sys
from pathlib import Path
from penstock.workloads.pipeline.storage.sqlite.store import SqlitePipelineStore
from penstock.testing.pipeline_samples import begun, ended_items, listed_items, save_of

async def main():
    store = SqlitePipelineStore(Path(sys.argv[1]) / "pipelines.db")
    await begun(store, "a")
    await store.save(save_of("a", listed=listed_items("s", 50)))
    for n in range(50):
        await store.save(save_of("a", ended=ended_items("s", n)))
        print(n, flush=True)

asyncio.run(main())
"""
    for strike in (4, 5, 9, 23):
        folder = tmp_path / str(strike)
        folder.mkdir()
        child = subprocess.run(
            [sys.executable, "-c", script, str(folder)],
            env={**os.environ, "PENSTOCK_FAILPOINT": f"{point}:{strike}"},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert child.returncode == -signal.SIGKILL, child.stderr
        said = [int(n) for n in child.stdout.split()]
        assert said == list(range(strike - 5)), "the first four commits are no item's"
        unsaid = point.startswith("after") and strike > 4
        assert asyncio.run(_finished(folder)) == list(range(len(said) + unsaid))


async def _finished(folder: Path) -> list[int]:
    store = opened(folder)
    items = await store.items("a", "s", outcomes=(ItemOutcome.OK,))
    await store.close()
    return [item.seq for item in items]


# -- others write it too ----------------------------------------------------------


@run_async
async def test_two_stores_of_one_file_lose_nothing_of_each_other(tmp_path: Path) -> None:
    stores = [opened(tmp_path), opened(tmp_path, slow_disk=True)]
    await begun(stores[0], "a")
    for n, store in enumerate(stores):
        await begun(store, f"own{n}", pipeline=f"q{n}")
    saves = [
        stores[n % 2].save(save_of("a", happened=(progress(n),), listed=_one(n)))
        for n in range(100)
    ]
    await asyncio.gather(*saves)
    for store in stores:
        assert len(await store.events("a")) == len(await store.items("a", "s")) == 100
        assert len({event.id for event in await store.events("a")}) == 100
        record = await store.get("a")
        assert record is not None
        assert record.version == 3 + 100
    claims = [stores[n % 2].create(a_run(f"n{n}"), single_flight=True) for n in range(10)]
    ends = await asyncio.gather(*claims, return_exceptions=True)
    assert all(isinstance(end, PenstockError) for end in ends), "a is running"
    puts = [stores[n % 2].put_breaker(Breaker(name="b", failures=n)) for n in range(10)]
    assert sum(await asyncio.gather(*puts)) == 1
    for store in stores:
        await store.close()


def _one(n: int) -> Any:
    return listed_items("s", 1, start=n)


@run_async
async def test_a_claim_of_one_store_supersedes_the_other(tmp_path: Path) -> None:
    mine, yours = opened(tmp_path), opened(tmp_path)
    await begun(mine, "a", lease_until=T0 + 5)
    assert await yours.claim(Claim(job_id="a", owner="you", now=T0 + 6)) is not None
    with pytest.raises(PenstockError, match="not the live one"):
        await mine.save(save_of("a", event=_E.COMPLETE))
    await mine.request_cancel("a", T0 + 7)
    assert (await yours.save(save_of("a", fence=2))).cancel_requested
    await mine.close()
    await yours.close()


def test_processes_that_open_and_write_one_file_at_once_lose_nothing(tmp_path: Path) -> None:
    script = """
import asyncio, sys
from pathlib import Path
from penstock.workloads.pipeline.storage.sqlite.store import SqlitePipelineStore
from penstock.ports.store import Durability
from penstock.testing.pipeline_samples import begun, progress, save_of

async def main(folder, name):
    store = SqlitePipelineStore(Path(folder) / "pipelines.db", durability=Durability.OS)
    await begun(store, name, pipeline=name)
    for n in range(0, 100, 5):
        await asyncio.gather(*(store.save(save_of(name, happened=(progress(n + i),)))
                               for i in range(5)))
    await store.close()

asyncio.run(main(*sys.argv[1:]))
"""
    children = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path), name]) for name in "abcd"
    ]
    assert [child.wait(60) for child in children] == [0] * 4

    async def look() -> None:
        store = opened(tmp_path)
        for name in "abcd":
            events = await store.events(name)
            assert [event.data["n"] for event in events] == list(range(100))
        await store.close()

    asyncio.run(look())


@run_async
async def test_a_writer_waits_for_its_turn_without_stopping_the_loop(tmp_path: Path) -> None:
    store = opened(tmp_path)
    await begun(store, "a")
    other = raw(tmp_path)
    other.execute("BEGIN IMMEDIATE")
    saving = asyncio.ensure_future(store.save(save_of("a", happened=(progress(1),))))
    for _ in range(20):
        await asyncio.sleep(0.001)
        assert await store.get("a") is not None, "reading goes on"
    assert not saving.done()
    other.execute("ROLLBACK")
    assert (await saving).status is _S.RUNNING
    other.close()
    await store.close()


@run_async
async def test_a_turn_that_never_comes_is_an_error_and_the_store_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.adapters.sqlite.group_commit._TURN", 20)
    store = opened(tmp_path)
    await begun(store, "a")
    other = raw(tmp_path)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreFailed, match="locked"):
        await store.save(save_of("a"))
    other.execute("ROLLBACK")
    assert (await store.save(save_of("a"))).status is _S.RUNNING
    other.close()
    await store.close()


# -- one harms no other -----------------------------------------------------------


@run_async
async def test_what_cannot_be_written_harms_only_its_own_caller(tmp_path: Path) -> None:
    store = opened(tmp_path)
    await begun(store, "a")
    await begun(store, "b")
    ends = await asyncio.gather(
        store.save(save_of("a", happened=(progress(1),))),
        store.save(save_of("b", listed=listed_items("s", 2), current_stage="\ud800")),
        store.save(save_of("b", listed=listed_items("s", 2, start=-1))),
        store.create(a_run("\ud800")),
        store.save(save_of("a", happened=(progress(2),))),
        return_exceptions=True,
    )
    kinds = [type(end).__name__ for end in ends]
    unwritable = "UnicodeEncodeError"
    assert kinds == ["Saved", unwritable, "StoreFailed", unwritable, "Saved"]
    assert len(await store.events("a")) == 2
    assert await store.items("b", "s") == []
    await store.close()


@run_async
async def test_a_listener_that_fails_harms_no_caller(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(tmp_path)
    store.listen(lambda changed: 1 / 0)  # type: ignore[arg-type,return-value]
    heard: list[str] = []
    store.listen(heard.extend)
    await store.create(a_run("a"))
    assert heard == ["a"]
    assert "ZeroDivisionError" in caplog.text
    await store.close()


@run_async
async def test_a_caller_that_was_cancelled_before_the_commit_wrote_nothing(
    tmp_path: Path,
) -> None:
    store = opened(tmp_path)
    await begun(store, "a")
    saving = asyncio.ensure_future(store.save(save_of("a", event=_E.COMPLETE)))
    await asyncio.sleep(0)
    saving.cancel()
    assert (await store.save(save_of("a"))).status is _S.RUNNING
    await store.close()


@pytest.mark.parametrize("slow_disk", [False, True])
def test_a_loop_that_ends_in_the_middle_of_a_commit_leaves_a_store_that_can_be_closed(
    tmp_path: Path, slow_disk: bool
) -> None:
    store = opened(tmp_path, slow_disk=slow_disk)

    async def leave() -> None:
        await begun(store, "a")
        left = [asyncio.ensure_future(store.save(save_of("a"))) for _ in range(3)]
        for _ in range(2):
            await asyncio.sleep(0)
        assert not slow_disk or store._commits.is_in_thread
        assert len(left) == 3

    asyncio.run(leave())
    asyncio.run(store.close())
    again = opened(tmp_path)
    assert asyncio.run(again.get("a")) is not None
    asyncio.run(again.close())


@run_async
async def test_concurrent_savers_share_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    await begun(store, "a")
    points: list[str] = []
    monkeypatch.setattr("penstock.adapters.sqlite.group_commit.failpoint", points.append)
    saves = [store.save(save_of("a", fence=n % 10)) for n in range(50)]
    ends = await asyncio.gather(*saves, return_exceptions=True)
    assert sum(not isinstance(end, BaseException) for end in ends) == 5
    assert points == ["before-pipeline-commit", "after-pipeline-commit"]
    points.clear()
    with pytest.raises(PenstockError):
        await store.save(save_of("a", fence=9))
    assert points == [], "what is refused alone is no commit"
    await store.close()


# -- its file ---------------------------------------------------------------------


def test_a_file_of_jobs_is_not_taken_for_one_of_pipelines(tmp_path: Path) -> None:
    open_jobs(tmp_path / "pipelines.db", Durability.OS).close()
    with pytest.raises(StoreCorrupt):
        opened(tmp_path)


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "pipelines.db").write_bytes(b"nonsense" * 1000)
    with pytest.raises(StoreCorrupt, match=r"pipelines\.db"):
        opened(tmp_path)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreFailed, match="nowhere"):
        opened(tmp_path / "nowhere")


def test_a_file_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    asyncio.run(opened(tmp_path).close())
    connection = raw(tmp_path)
    connection.pragma("user_version", 99)
    connection.close()
    with pytest.raises(StoreCorrupt, match="newer Penstock"):
        opened(tmp_path)


@pytest.mark.parametrize(("durability", "synchronous"), [(Durability.DISK, 2), (Durability.OS, 1)])
def test_durability_is_what_sqlite_is_told(
    tmp_path: Path, durability: Durability, synchronous: int
) -> None:
    store = opened(tmp_path, durability=durability)
    assert store._writer.pragma("synchronous") == synchronous
    assert store._writer.pragma("journal_mode") == "wal"
    asyncio.run(store.close())


def test_migrations_are_numbered_without_gaps() -> None:
    folder = Path(schema.__file__).parent / "migrations"
    numbers = sorted(int(path.name.split("_")[0]) for path in folder.glob("*.sql"))
    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE run SET status = 'FAILED'",
        "UPDATE run SET finished_at = 1.0",
        "UPDATE run SET status = 'running'",
        "UPDATE run SET version = 0",
        "UPDATE run SET fence = -1",
        "UPDATE run SET cancel_requested = 2",
        "UPDATE run SET id = 'b'",
        "UPDATE stage SET status = 'RUNNING'",
        "UPDATE item SET outcome = 'done'",
        "UPDATE item SET attempts = -1",
        "UPDATE item SET fan = -1",
        "UPDATE item SET lot = 7",
        "UPDATE item SET key = 'k0'",
        "UPDATE event SET kind = 'ended'",
        "UPDATE breaker SET version = -1",
    ],
)
def test_an_illegal_row_is_refused_by_the_database(tmp_path: Path, statement: str) -> None:
    async def fill() -> None:
        store = opened(tmp_path)
        for job in "ab":
            await begun(store, job)
            groups = listed_items("s", 2)
            stages = (a_stage("s", 0),)
            await store.save(save_of(job, listed=groups, stages=stages, happened=(progress(1),)))
        await store.put_breaker(Breaker(name="feeds"))
        await store.close()

    asyncio.run(fill())
    with pytest.raises(apsw.ConstraintError):
        raw(tmp_path).execute(statement)


# -- how it reads -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("conditions", "index", "is_short"),
    [
        ({}, "run_created", True),
        ({"before": (T0, "x")}, "run_created ((created_at,id)<(?,?))", True),
        ({"pipeline": "p"}, "run_pipeline (pipeline=?)", True),
        ({"tenant": "t"}, "run_tenant (tenant=?)", True),
        ({"pipeline": "p", "tenant": "t"}, "run_pipeline (pipeline=?)", False),
        ({"pipeline": "p", "before": (T0, "x")}, "run_pipeline (pipeline=? AND (cr", True),
        ({"statuses": (_S.FAILED,)}, "run_trouble", True),
        ({"statuses": (_S.FAILED, _S.PARTIAL), "tenant": "t"}, "run_trouble", False),
        ({"statuses": (_S.COMPLETED,)}, "run_created", False),
        ({"retry_of": "a"}, "run_retry (retry_of=?)", True),
    ],
)
def test_a_page_is_read_from_its_index_in_order(
    tmp_path: Path, conditions: dict[str, Any], index: str, is_short: bool
) -> None:
    asyncio.run(opened(tmp_path).close())
    search = search_for(RunQuery(**conditions))
    plan = raw(tmp_path).execute(f"EXPLAIN QUERY PLAN {search.sql}", search.values)
    steps = [str(row[3]) for row in plan]
    assert any(index in step for step in steps), steps
    assert "USE TEMP B-TREE FOR ORDER BY" not in steps
    assert search.is_short is is_short


def test_nothing_that_is_read_often_goes_through_a_table(tmp_path: Path) -> None:
    asyncio.run(opened(tmp_path).close())
    connection = raw(tmp_path)
    whole = {"breakers", "declared", "any_doomed", "pointers"}
    for name, sql in schema.load_queries().items():
        if name in whole or name.startswith("forget_") or "SELECT" not in sql.upper():
            continue
        numbered = {int(number) for number in re.findall(r"\?(\d+)", sql)}
        values = (None,) * (len(numbered) or sql.count("?"))
        plan = [str(row[3]) for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}", values)]
        tables = ("SCAN run", "SCAN stage", "SCAN item", "SCAN event", "SCAN lot")
        scans = [step for step in plan if step.startswith(tables) and "INDEX run_open" not in step]
        assert scans == [], (name, plan)


@pytest.mark.parametrize("seed", range(8))
@run_async
async def test_two_kinds_of_store_live_the_same_lives(tmp_path: Path, seed: int) -> None:
    """The same random calls on memory and on a file have the same answers and leave the same."""
    memory, file = MemoryPipelineStore(), opened(tmp_path, slow_disk=seed % 2 == 1)
    chance = random.Random(seed)
    refused = 0
    for n in range(250):
        call = _some_call(chance, n)
        ends = [await _end(call, store) for store in (memory, file)]
        assert ends[0] == ends[1], call
        refused += isinstance(ends[0], type)
    assert await everything(memory) == await everything(file)
    assert 10 < refused < 200
    for _ in range(60):
        query = _some_query(chance)
        assert await memory.find(query) == await file.find(query), query
    await file.close()


async def _end(call: tuple[str, tuple[Any, ...], dict[str, Any]], store: PipelineStore) -> Any:
    name, values, named = call
    try:
        return await getattr(store, name)(*values, **named)
    except PenstockError as error:
        return type(error)


def _some_call(chance: random.Random, n: int) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    pick, job, now = chance.choice, f"j{chance.randrange(8)}", T0 + n
    seq, stage = chance.randrange(12), chance.choice("st")
    outcome = pick([ItemOutcome.OK, ItemOutcome.FAILED, ItemOutcome.SKIPPED])
    record = a_run(job, pipeline=pick("pq"), tenant=pick("tu"), created_at=now)
    save = save_of(
        job,
        fence=pick([1, 1, 1, 2, 3]),
        at=now,
        event=pick([None, None, None, _E.EXECUTE, _E.EXECUTE, *_E]),
        listed=pick([(), listed_items(stage, 3, start=seq)]),
        ended=pick([(), ended_items(stage, seq, outcome=outcome, fan=chance.randrange(3))]),
        stages=pick([(), (a_stage(stage, ord(stage)),)]),
        happened=pick([(), (progress(n),)]),
        lease_until=pick([None, now + 5, now + 50]),
    )
    lease = pick([None, now + 3])
    claim = Claim(job_id=job, owner=pick("xy"), now=now, lease_until=lease)
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("create", (record,), {"single_flight": pick([True, False])}),
        ("claim", (claim,), {}),
        ("save", (save,), {}),
        ("save", (save,), {}),
        ("save", (save,), {}),
        ("request_cancel", (job, now), {}),
        ("fail_stale", (job, now, "stale", chance.randrange(12)), {}),
        ("forget_stages", (job, pick([1, 2]), [stage]), {}),
        ("items", (job, stage), {"after": seq - 1, "limit": 4, "outcomes": (outcome,)}),
        ("fan", (job, stage), {}),
        ("put_breaker", (Breaker(name=stage, version=chance.randrange(4)),), {}),
        ("prune", (now - 200, 1), {}),
    ]
    return pick(calls)


def _some_query(chance: random.Random) -> RunQuery:
    conditions: dict[str, list[Any]] = {
        "pipeline": ["p", "q", "none"],
        "tenant": ["t", "u"],
        "statuses": [(status,) for status in _S] + [(_S.FAILED, _S.RUNNING), tuple(_S)],
        "before": [(T0 + 40, "j4"), (T0 + 120, "")],
        "limit": [1, 3, 100],
    }
    asked = chance.sample(sorted(conditions), chance.randrange(5))
    return RunQuery(**{name: chance.choice(conditions[name]) for name in asked})
