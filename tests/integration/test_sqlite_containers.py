"""What only the SQLite store of container jobs has: a file that lasts, with one writer."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import apsw
import pytest
from msgspec.structs import replace

from penstock.adapters.sqlite.schema import open_writer as open_jobs
from penstock.core.errors import (
    AlreadyRunning,
    PenstockError,
    StoreCorrupt,
    StoreFailed,
    StoreFull,
)
from penstock.lifecycles.container import (
    CONTAINER,
    STORED,
    ContainerJobEvent,
    ContainerJobState,
)
from penstock.ports.store import Durability
from penstock.testing.aio import run_async
from penstock.testing.container_samples import FULL_END, a_record, an_end, bring_to, happen
from penstock.testing.samples import T0
from penstock.workloads.container.job import Code, ContainerRecord, Priority
from penstock.workloads.container.storage.memory import MemoryContainerStore
from penstock.workloads.container.storage.sqlite import schema
from penstock.workloads.container.storage.sqlite.finding import search_for
from penstock.workloads.container.storage.sqlite.store import SqliteContainerStore
from penstock.workloads.container.store import Change, ContainerStore, RecordQuery

_S, _E = ContainerJobState, ContainerJobEvent


def opened(folder: Path, **options: Any) -> SqliteContainerStore:
    return SqliteContainerStore(
        folder / "containers.db", **{"durability": Durability.OS, **options}
    )


def raw(folder: Path) -> apsw.Connection:
    return apsw.Connection(str(folder / "containers.db"))


# -- it lasts ---------------------------------------------------------------------


@run_async
async def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    store = opened(tmp_path)
    marks: dict[str, Any] = {"labels": {"x": "y"}, "key": "k", "priority": Priority.HIGH}
    await bring_to(store, "a", _S.RUNNING, body=b"x" * 3_000_000, cpus=0.5, **marks)
    await store.change(Change(job_id="a", event=_E.FAIL, at=T0 + 5, end=FULL_END))
    for state in sorted(STORED):
        await bring_to(store, f"in {state}", state, body=state.encode())
    before = await everything(store)
    await store.close()

    store = opened(tmp_path)
    assert await everything(store) == before
    assert (await store.add(a_record("z"))).seq == 6
    await store.close()


async def everything(store: ContainerStore) -> list[Any]:
    found = await store.find(RecordQuery(limit=1000))
    whole = [await store.get(record.job_id) for record in found]
    return [found, whole, await store.unfinished(), await store.tally()]


@run_async
async def test_no_number_is_given_twice_though_the_newest_was_pruned_before_a_restart(
    tmp_path: Path,
) -> None:
    store = opened(tmp_path)
    last = await bring_to(store, "a", _S.FINISHED)
    assert await store.prune(T0 + 99) == ["a"]
    await store.close()
    store = opened(tmp_path)
    assert (await store.add(a_record("b"))).seq > last.seq
    await store.close()


_CHILD = """
import asyncio, sys
from pathlib import Path
from penstock.workloads.container.storage.sqlite.store import SqliteContainerStore
from penstock.lifecycles.container import ContainerJobEvent as E
from penstock.testing.container_samples import a_record, happen

async def main():
    store = SqliteContainerStore(Path(sys.argv[1]) / "containers.db")
    for n in range(20):
        name = str(n)
        await store.add(a_record(name, body=b"x" * 2000000 if n == 2 else b"small"))
        print(name, "queued", flush=True)
        for event, state in ((E.START, "running"), (E.FINISH, "finished")):
            await happen(store, name, event)
            print(name, state, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("strike", [1, 2, 3, 7, 23])
@pytest.mark.parametrize("point", ["before-container-commit", "after-container-commit"])
def test_what_was_answered_survives_a_kill_at_any_commit(
    tmp_path: Path, point: str, strike: int
) -> None:
    """The child says each move after it was answered; when it is killed one may be unsaid."""
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, str(tmp_path)],
        env={**os.environ, "PENSTOCK_FAILPOINT": f"{point}:{strike}"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    said = [line.split() for line in child.stdout.splitlines()]
    assert len(said) == strike - 1
    moves = strike if point.startswith("after") else strike - 1
    assert asyncio.run(_states(tmp_path)) == {
        str(n): ("queued", "running", "finished")[min(moves - 3 * n, 3) - 1]
        for n in range((moves + 2) // 3)
    }


async def _states(folder: Path) -> dict[str, str]:
    store = opened(folder)  # the lock went with its owner
    found = await store.find(RecordQuery())
    tally = await store.tally()
    assert sum(tally.values()) == len(found)
    for record in found:
        whole = await store.get(record.job_id)
        assert whole is not None
        assert len(whole.body) == (2_000_000 if record.job_id == "2" else 5)
        assert tally[record.state] > 0
    await store.close()
    assert raw(folder).pragma("integrity_check") == "ok"
    return {record.job_id: record.state.value for record in found}


# -- one harms no other -----------------------------------------------------------


@run_async
async def test_what_cannot_be_written_harms_only_its_own_caller(tmp_path: Path) -> None:
    store = opened(tmp_path)
    await store.add(a_record("a"))
    ends = await asyncio.gather(
        store.add(a_record("b")),
        store.add(a_record("\ud800")),
        store.add(a_record("c", labels={"\ud800": "x"})),
        store.add(a_record("d", memory_mb="much")),
        store.change(Change(job_id="a", event=_E.FINISH, at=T0)),
        store.change(Change(job_id="a", event=_E.START, at=T0)),
        return_exceptions=True,
    )
    unwritable = "UnicodeEncodeError"
    kinds = [type(end).__name__ for end in ends]
    kept = "ContainerRecord"
    assert kinds == [kept, unwritable, unwritable, "StoreFailed", "IllegalMove", kept]
    assert [record.job_id for record in await store.find(RecordQuery())] == ["b", "a"]
    assert (await store.tally())[_S.QUEUED] == 1
    await store.close()


@run_async
async def test_concurrent_writers_share_a_commit_and_refusals_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    points: list[str] = []
    monkeypatch.setattr("penstock.adapters.sqlite.group_commit.failpoint", points.append)
    await asyncio.gather(*(store.add(a_record(str(n))) for n in range(20)))
    assert points == ["before-container-commit", "after-container-commit"]
    points.clear()
    with pytest.raises(PenstockError):
        await store.add(a_record("0"))
    with pytest.raises(PenstockError):
        await store.change(Change(job_id="0", event=_E.FAIL, at=T0))
    await store.change(Change(job_id="0", at=T0))
    assert points == []
    await store.close()


@run_async
async def test_a_large_body_is_flushed_aside_and_others_read_meanwhile(tmp_path: Path) -> None:
    store = opened(tmp_path)
    await bring_to(store, "a", _S.RUNNING)
    adding = asyncio.ensure_future(store.add(a_record("b", body=bytes(4_000_000))))
    for _ in range(2):
        await asyncio.sleep(0)
    assert store._commits.is_in_thread
    assert await store.get("a") is not None
    changing = asyncio.ensure_future(store.change(Change(job_id="a", at=T0, engine="docker")))
    assert (await adding).seq == 2
    assert (await changing).engine == "docker"
    await store.close()


@run_async
async def test_a_caller_that_was_cancelled_before_the_commit_wrote_nothing(
    tmp_path: Path,
) -> None:
    store = opened(tmp_path)
    adding = asyncio.ensure_future(store.add(a_record("a")))
    await asyncio.sleep(0)
    adding.cancel()
    await store.add(a_record("b"))
    assert [record.job_id for record in await store.unfinished()] == ["b"]
    await store.close()


@run_async
async def test_large_bodies_are_forgotten_a_few_at_a_time(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for n in range(5):
        await bring_to(store, str(n), _S.FINISHED, at=T0 + n, body=bytes(9 << 20))
    assert await store.prune(T0 + 99) == ["0", "1"]
    assert await store.prune(T0 + 99) == ["2", "3"]
    assert await store.prune(T0 + 99) == ["4"]
    assert raw(tmp_path).execute("SELECT count(*) FROM body").get == 0
    await store.close()


# -- who may use it ---------------------------------------------------------------


def test_a_second_worker_is_refused_and_told_who_is_first(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with pytest.raises(AlreadyRunning, match=f"worker .process {os.getpid()}") as refused:
        opened(tmp_path)
    assert "jobs_dir" in refused.value.hint
    script = "import sys; from tests.integration.test_sqlite_containers import *\n"
    script += "try: opened(Path(sys.argv[1]))\nexcept AlreadyRunning as error: print(error)"
    child = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert f"process {os.getpid()}" in child.stdout
    asyncio.run(store.close())
    asyncio.run(opened(tmp_path).close())


def test_a_store_that_could_not_open_holds_no_lock(tmp_path: Path) -> None:
    (tmp_path / "containers.db").write_bytes(b"nonsense" * 1000)
    for _ in range(2):
        with pytest.raises(StoreCorrupt):
            opened(tmp_path)
    (tmp_path / "containers.db").unlink()
    asyncio.run(opened(tmp_path).close())


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
    asyncio.run(opened(folder).close())
    if what == "folder":
        (folder / "containers.lock").unlink()
        folder.chmod(0o555)
    else:
        folder.chmod(0o777)
        (folder / "containers.lock").chmod(0o666)
        (folder / "containers.db").chmod(0o444)
    with without_privilege(), pytest.raises(StoreFailed, match=str(folder)) as refused:
        opened(folder)
    assert "permissions" in refused.value.hint


# -- its file ---------------------------------------------------------------------


def test_a_file_of_other_records_is_not_taken_for_one_of_these(tmp_path: Path) -> None:
    open_jobs(tmp_path / "containers.db", Durability.OS).close()
    with pytest.raises(StoreCorrupt):
        opened(tmp_path)


@pytest.mark.parametrize("damage", ["nonsense", "head", "cut"])
def test_a_damaged_file_is_named_and_left_alone(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "containers.db"
    asyncio.run(opened(tmp_path).close())
    content = path.read_bytes()
    content = {
        "nonsense": b"nonsense" * 1000,
        "head": content[:40] + b"\xff" * 200 + content[240:],
        "cut": content[:5000],
    }[damage]
    path.write_bytes(content)
    with pytest.raises(StoreCorrupt, match=r"containers\.db") as refused:
        opened(tmp_path)
    assert "jobs_dir" in refused.value.hint
    assert path.read_bytes() == content


def test_an_empty_file_becomes_a_store(tmp_path: Path) -> None:
    (tmp_path / "containers.db").touch()
    asyncio.run(opened(tmp_path).close())


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


# -- the database states the rules too --------------------------------------------


@pytest.mark.parametrize(("before", "after"), list(product(sorted(STORED), repeat=2)))
def test_the_database_knows_the_moves_of_the_table(
    tmp_path: Path, before: ContainerJobState, after: ContainerJobState
) -> None:
    async def fill() -> None:
        store = opened(tmp_path)
        await bring_to(store, "a", before)
        await store.close()

    asyncio.run(fill())
    connection = raw(tmp_path)
    times = {
        _S.QUEUED: "started_at = NULL, finished_at = NULL",
        _S.RUNNING: "started_at = 1.0, finished_at = NULL",
        _S.FINISHED: "started_at = 1.0, finished_at = 2.0",
        _S.FAILED: "finished_at = 2.0",
    }[after]
    statement = f"UPDATE job SET state = '{after}', {times}"
    if before is after or any(move[::2] == (before, after) for move in CONTAINER):
        connection.execute(statement)
        counts = dict.fromkeys(map(str, STORED), 0) | {str(after): 1}
        assert dict(connection.execute("SELECT state, count FROM tally").fetchall()) == counts
    else:
        with pytest.raises(apsw.ConstraintError, match="no such move"):
            connection.execute(statement)
    connection.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE job SET state = 'rejected'",
        "UPDATE job SET state = 'not_found'",
        "UPDATE job SET state = 'RUNNING'",
        "UPDATE job SET state = 'failed'",
        "UPDATE job SET finished_at = 1.0",
        "UPDATE job SET started_at = NULL WHERE job_id = 'a'",
        "UPDATE job SET started_at = 1.0 WHERE job_id = 'b'",
        "UPDATE job SET rank = 3",
        "UPDATE job SET job_id = 'b'",
        "UPDATE job SET key = 'same'",
        "UPDATE job SET error_code = 'X'",
        "UPDATE job SET size = -1",
        "UPDATE tally SET count = -1",
        "INSERT INTO body (seq, body) VALUES (99, x'00')",
        "INSERT INTO label (seq, name, value) VALUES (99, 'x', 'y')",
        "INSERT INTO job SELECT 7, 'c', state, rank, created_at, started_at, finished_at,"
        " exit_code, error_code, error_message, error_field, image, image_id, container, engine,"
        " memory_mb, cpus, key, size, labels, ending FROM job WHERE job_id = 'a'",
    ],
)
def test_an_illegal_row_is_refused_by_the_database(tmp_path: Path, statement: str) -> None:
    async def fill() -> None:
        store = opened(tmp_path)
        await bring_to(store, "a", _S.RUNNING)
        await bring_to(store, "b", _S.QUEUED)
        await store.close()

    asyncio.run(fill())
    connection = raw(tmp_path)
    connection.pragma("foreign_keys", True)
    with pytest.raises(apsw.ConstraintError):
        connection.execute(statement)
    connection.close()


# -- how it reads -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("conditions", "index", "is_short"),
    [
        ({}, "SCAN job", True),
        ({"before": 9}, "job USING INTEGER PRIMARY KEY (rowid<?)", True),
        ({"states": tuple(STORED)}, "SCAN job", True),
        ({"states": (_S.FAILED,)}, "job_state (state=?)", True),
        ({"states": (_S.FAILED, _S.FINISHED), "before": 9}, "job_state (state=? AND", True),
        ({"states": (_S.QUEUED,), "image": "i"}, "job_state (state=?)", False),
        ({"states": (_S.RUNNING,), "image": "i"}, "job_state (state=?)", True),
        ({"states": (_S.FAILED,), "image": "i"}, "job_image (image=?)", False),
        ({"image": "i", "before": 9}, "job_image (image=? AND seq<?)", True),
        ({"code": Code.TIMEOUT}, "job_error (error_code=?)", True),
        ({"code": Code.TIMEOUT, "image": "i"}, "job_error (error_code=?)", False),
        ({"label": ("x", "y")}, "label_value (name=? AND value=?)", True),
        ({"label": ("x", "y"), "before": 9}, "label_value (name=? AND value=? AND seq<?)", True),
        ({"label": ("x", "y"), "states": (_S.RUNNING,)}, "label_value (name=?", False),
    ],
)
def test_a_page_is_read_from_its_index_in_order(
    tmp_path: Path, conditions: dict[str, Any], index: str, is_short: bool
) -> None:
    asyncio.run(opened(tmp_path).close())
    search = search_for(RecordQuery(**conditions))
    plan = raw(tmp_path).execute(f"EXPLAIN QUERY PLAN {search.sql}", search.values)
    steps = [str(row[3]) for row in plan]
    assert any(index in step for step in steps), steps
    many = len(set(conditions.get("states", ()))) in (2, 3)
    assert ("USE TEMP B-TREE FOR ORDER BY" in steps) <= many, "but for as many as were asked for"
    assert search.is_short is is_short


def test_nothing_that_is_read_often_goes_through_a_table(tmp_path: Path) -> None:
    asyncio.run(opened(tmp_path).close())
    connection = raw(tmp_path)
    for name, sql in schema.load_queries().items():
        if not re.search(r"SELECT|DELETE|UPDATE", sql):
            continue
        values = (None,) * (2 if "?2" in sql else sql.count("?"))
        plan = [str(row[3]) for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}", values)]
        scans = [step for step in plan if step.startswith("SCAN") and step != "SCAN tally"]
        allowed = {"waiting": "job_queue", "oldest": "job_finished"}
        scans = [step for step in scans if allowed.get(name, "-") not in step]
        assert scans == [], (name, plan)
        assert not any("TEMP B-TREE" in step for step in plan), (name, plan)
    connection.close()


@pytest.mark.parametrize("seed", range(8))
@run_async
async def test_two_kinds_of_store_live_the_same_lives(tmp_path: Path, seed: int) -> None:
    """The same random calls on memory and on a file have the same answers and leave the same."""
    memory, file = MemoryContainerStore(), opened(tmp_path, slow_disk=seed % 2 == 1)
    chance = random.Random(seed)
    refused = 0
    for n in range(300):
        call = _some_call(chance, n)
        ends = [await _end(call, store) for store in (memory, file)]
        assert ends[0] == ends[1], call
        refused += isinstance(ends[0], type)
    assert await everything(memory) == await everything(file)
    assert 10 < refused < 250
    for _ in range(60):
        query = _some_query(chance)
        assert await memory.find(query) == await file.find(query), query
    await file.close()


async def _end(call: tuple[str, tuple[Any, ...], dict[str, Any]], store: ContainerStore) -> Any:
    name, values, named = call
    try:
        return await getattr(store, name)(*values, **named)
    except (PenstockError, ValueError) as error:
        return type(error)


def _some_call(chance: random.Random, n: int) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    pick, job, now = chance.choice, f"j{chance.randrange(40)}", T0 + n
    record = a_record(
        job,
        created_at=now,
        image=pick(["i1", "i2"]),
        labels=pick([{}, {"x": "1"}, {"x": "2", "y": "1"}]),
        key=pick(["", "", f"k{chance.randrange(20)}"]),
        priority=pick(list(Priority)),
        body=pick([b"", b"body"]),
    )
    event = pick([None, _E.START, *_E])
    end = pick([None, an_end(event, pick([Code.TIMEOUT, Code.OOM_KILLED]))] if event else [None])
    change = Change(job_id=job, event=event, at=now, end=end)
    named = replace(change, engine=pick(["docker", "oci"]), container=pick(["", job]))
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("add", (record,), {"most_waiting": pick([0, 12])}),
        ("add", (record,), {"most_waiting": pick([0, 12])}),
        ("change", (change,), {}),
        ("change", (named,), {}),
        ("change", (named,), {}),
        ("get", (job,), {"body": pick([True, False])}),
        ("by_key", (f"k{chance.randrange(20)}",), {}),
        ("unfinished", (), {}),
        ("tally", (), {}),
        ("prune", (now - 100,), {"keep": pick([0, 0, 5]), "limit": 2}),
    ]
    return pick(calls)


def _some_query(chance: random.Random) -> RecordQuery:
    conditions: dict[str, list[Any]] = {
        "image": ["i1", "i2", "none"],
        "label": [("x", "1"), ("y", "1"), ("x", "y")],
        "code": [Code.TIMEOUT, Code.OOM_KILLED],
        "states": [(state,) for state in _S] + [(_S.FAILED, _S.RUNNING), tuple(_S)],
        "before": [20, 100],
        "limit": [1, 3, 100],
    }
    asked = chance.sample(sorted(conditions), chance.randrange(5))
    return RecordQuery(**{name: chance.choice(conditions[name]) for name in asked})


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
    store = SqliteContainerStore(small_disk / "containers.db", slow_disk=slow_disk)
    accepted: list[ContainerRecord] = []
    with pytest.raises(StoreFull, match="no space left"):
        for n in range(10_000):
            accepted.append(await store.add(a_record(str(n), body=b"x" * 2000)))
    assert accepted

    known = [replace(record, body=b"") for record in reversed(accepted)]
    assert await store.find(RecordQuery(limit=10_000)) == known
    for _ in range(3):  # however often one tries
        with pytest.raises(StoreFull):
            await store.add(a_record("big", body=bytes(2_000_000)))
    assert (await store.tally())[_S.QUEUED] == len(accepted)

    more_room = ["mount", "-o", "remount,size=16m", str(small_disk)]
    await asyncio.to_thread(subprocess.run, more_room, check=True)
    assert (await happen(store, "0", _E.START, _E.FINISH)).is_final
    await store.add(a_record("after"))
    await store.close()
    reader = raw(small_disk)
    assert reader.pragma("integrity_check") == "ok"
    reader.close()
