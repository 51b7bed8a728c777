"""Data directories of older versions, whose pipeline runs are in `pipelines.db`; see
`old_runs/README.md`."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.support.old_runs import sample_pipelines as sample

import penstock
from penstock.adapters.sqlite.schema import open_writer
from penstock.app import migration
from penstock.app.application import make_executors
from penstock.app.engine import Engine
from penstock.cli.program import run as run_command
from penstock.config import Settings
from penstock.core.errors import StoreCorrupt, StoreFailed
from penstock.ports.clock import SystemClock
from penstock.ports.engine_api import EngineApi
from penstock.ports.store import Durability
from penstock.testing.aio import run_async
from penstock.workloads.pipeline.records import PipelineRecord

OLD = Path(__file__).parents[2] / "support" / "old_runs"
VERSIONS = ("962ce6d", "2ab6b18")
KILLED_AT = ("runs-facts", *(f"runs-page:{n}" for n in (1, 4, 9)), "runs-moved", "runs-renamed")


class Place:
    """A data directory that an older version made."""

    def __init__(self, data: Path, version: str) -> None:
        self.data, self.version, self.calls_file = data, version, data.with_name("calls")
        with zipfile.ZipFile(OLD / f"{version}.zip") as archive:
            archive.extractall(data)
        data.chmod(0o700)
        with closing(sqlite3.connect(data.with_name("copy.db"))) as copy:
            with closing(sqlite3.connect(data / "pipelines.db")) as old:
                old.backup(copy)
            rows = copy.execute("SELECT id, created_at FROM run ORDER BY run").fetchall()
        self.alone, self.completed, self.partial, self.acme, self.feeds = (r[0] for r in rows[:5])
        self.apart, self.cancelled, self.cut = (row[0] for row in rows[5:])
        self.made_at: float = rows[-1][1]
        with zipfile.ZipFile(OLD / f"{version}.zip") as archive:  # reading it merged its log
            archive.extractall(data)

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []

    @asynccontextmanager
    async def engine(self, **changes: Any) -> AsyncIterator[EngineApi]:
        """An engine that is started a minute after the files were made."""
        settings = Settings(data_dir=self.data, **changes)
        clock = _Clock(self.made_at + 60)
        executors = make_executors(sample.app, settings)
        async with Engine(settings, executors, clock=clock, listen=False) as engine:
            yield engine.api

    async def view(self, api: EngineApi) -> dict[str, Any]:
        """All that a user sees of the runs."""
        runs = await api.pipelines.runs(penstock.RunQuery(limit=100))
        items = {
            f"{run.id}/{stage.name}": await api.pipelines.items(run.id, stage.name)
            for run in runs
            for stage in run.stages
        }
        return {
            "runs": {run.id: run for run in runs},
            "items": items,
            "breakers": await api.pipelines.breakers(),
            "pipelines": await api.pipelines.list(),
        }

    def columns(self) -> list[tuple[Any, ...]]:
        """The checkpointed rows and the shared values."""
        with closing(apsw.Connection(str(self.data / "penstock.db"))) as jobs:
            rows = jobs.execute("SELECT * FROM step ORDER BY 1, 2, 3").fetchall()
            facts = "SELECT * FROM fact WHERE name LIKE 'shared:%' ORDER BY 1"
            return [*rows, *jobs.execute(facts).fetchall()]


class _Clock(SystemClock):
    def __init__(self, at: float) -> None:
        ahead = at - SystemClock.now()
        self.now = lambda: SystemClock.now() + ahead  # type: ignore[method-assign]


@pytest.fixture(params=VERSIONS)
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("OLD_RUNS_HOLD", str(tmp_path / "hold"))
    monkeypatch.setenv("OLD_RUNS_CALLS", str(tmp_path / "calls"))
    return Place(tmp_path / "data", request.param)


async def ended(api: EngineApi, job_id: str) -> PipelineRecord:
    await api.wait(job_id, timeout=30)
    return await api.pipelines.get(job_id)


def counts(record: PipelineRecord) -> dict[str, tuple[Any, ...]]:
    return {
        stage.name: (str(stage.status), stage.total, stage.ok, stage.failed, stage.metrics)
        for stage in record.stages
    }


@run_async
async def test_runs_that_had_ended_are_as_they_were(place: Place) -> None:
    async with place.engine() as api:
        seen = await place.view(api)
        runs, items = seen["runs"], seen["items"]
        assert place.alone not in runs
        done = runs[place.completed]
        assert done.status == "COMPLETED"
        assert done.attempt == 1
        assert done.trigger == "manual"
        assert done.config == {"orders": ["a", "bb", sample.LARGE]}
        assert counts(done)["fetch"] == ("completed", 3, 3, 0, {"letters": 8})
        assert [stage.output_count for stage in done.stages] == [1, 3, 1]
        assert done.summary is not None
        assert done.summary.stages["fetch"]["letters"] == 8
        assert done.summary.finished_at == done.finished_at
        large = items[f"{place.completed}/fetch"][2]
        assert large.output.startswith("blob:")
        assert len(await api.get_blob(large.output)) == sample.BLOB + 2
        partial = runs[place.partial]
        assert partial.status == "PARTIAL"
        assert [one.code for one in partial.alerts] == ["FAILURES"]
        assert [one.message for one in partial.errors] == [
            "bad-1: no such order: bad-1",
            "bad-2: no such order: bad-2",
        ]
        assert [(one.key, str(one.outcome), one.error) for one in items[f"{place.partial}/fetch"]][
            :2
        ] == [("c", "ok", ""), ("bad-1", "failed", "no such order: bad-1")]
        assert runs[place.acme].tenant == "acme"
        cancelled = runs[place.cancelled]
        assert cancelled.status == "CANCELLED"
        assert cancelled.cancel_effective
        assert [str(one.status) for one in cancelled.stages] == ["completed", "partial", "skipped"]
        assert [str(one.outcome) for one in items[f"{place.cancelled}/fetch"]] == [
            "ok",
            "failed",
            "pending",
        ]
        assert [str(one.outcome) for one in items[f"{place.feeds}/read"]] == [
            "failed",
            "failed",
            "skipped",
        ]
        (breaker,) = seen["breakers"]
        assert (breaker.name, breaker.state, breaker.failures) == ("feeds", "open", 2)
        assert (await api.verify()).mismatches == ()


@run_async
async def test_definitions_are_known_before_a_worker_declares_them(place: Place) -> None:
    settings = Settings(data_dir=place.data)
    async with Engine(settings, clock=_Clock(place.made_at + 60), listen=False) as engine:
        known = {info.name: info for info in await engine.api.pipelines.list()}
        assert sorted(known) == ["apart", "feeds", "orders"]
        assert known["apart"].stages[0].distributed
        assert [stage.name for stage in known["orders"].stages] == ["prepare", "fetch", "report"]


@run_async
async def test_a_run_that_was_cut_off_goes_on_after_its_last_item(place: Place) -> None:
    async with place.engine() as api:
        run = await ended(api, place.cut)
        assert run.status == "COMPLETED"
        assert run.attempt == 2
        assert place.calls == ["fetch hold", "fetch y", f"fetch {sample.LARGE}", "report"]
        assert counts(run)["fetch"] == ("completed", 8, 8, 0, {"letters": 45})
        items = await api.pipelines.items(place.cut, "fetch")
        assert [one.seq for one in items] == list(range(8))
        assert items[4].output.endswith('"ORDER-4"')


@run_async
async def test_pipelines_recall_what_they_remembered(place: Place) -> None:
    async with place.engine() as api:
        await ended(api, place.cut)
        again = await api.pipelines.start("orders", {"orders": ["zz"]}, tenant="acme")
        await ended(api, again.id)
    with closing(apsw.Connection(str(place.data / "penstock.db"))) as jobs:
        sql = "SELECT value FROM fact WHERE name = 'shared:pipeline-memory/' || ? || '/orders/last'"
        assert jobs.execute(sql, ("acme",)).get == b'{"total":2,"before":{"total":4,"before":null}}'
        assert jobs.execute(sql, ("default",)).get.startswith(b'{"total":20040,"before":{"total":3')


@run_async
async def test_a_retry_takes_over_what_an_older_version_finished(place: Place) -> None:
    async with place.engine() as api:
        await ended(api, place.cut)
        before = len(place.calls)
        retry = await api.pipelines.retry_failed(place.partial)
        run = await ended(api, retry.id)
        assert run.retry_of == place.partial
        assert run.trigger == "retry"
        assert place.calls[before:] == ["fetch bad-1", "fetch bad-2", "report"]
        assert run.stage_progress["fetch"].reused == 2


@run_async
async def test_an_open_breaker_stays_open(place: Place) -> None:
    async with place.engine() as api:
        started = await api.pipelines.start("feeds", {"urls": ["four"]})
        assert (await ended(api, started.id)).stages[0].skipped == 1


@run_async
async def test_the_old_file_is_kept_under_another_name(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "penstock.app.migration")
    async with place.engine():
        pass
    names = {path.name for path in place.data.iterdir()}
    assert {name for name in names if name.startswith("pipelines")} == {"pipelines.db.migrated"}
    assert "moved pipeline runs: 7, with 32 items" in caplog.text
    assert "have no job in penstock.db and can't be moved: 1;" in caplog.text
    with closing(sqlite3.connect(place.data / "pipelines.db.migrated")) as old:
        assert old.execute("SELECT count(*) FROM run WHERE id = ?", (place.alone,)).fetchone()[0]


KILL = """
import os, sys
from pathlib import Path
from penstock.adapters.sqlite.schema import open_writer
from penstock.app import migration
from penstock.ports import process
from penstock.ports.store import Durability

migration._PAGE = 3
data = Path(sys.argv[1])
open_writer(data / "penstock.db", Durability.OS).close()
for point in sys.argv[2:]:
    child = os.fork()
    if not child:
        name, _, count = point.partition(":")
        process._ARMED, process._left = name, int(count or 1)
        migration.migrate_runs(data, Durability.OS)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == 9, point
    assert (data / "pipelines.db").exists() == (point != "runs-renamed"), point
"""
"""Migrates, and is killed at one point after the other."""


@pytest.mark.parametrize("place", VERSIONS[1:], indirect=True)
def test_a_migration_that_is_killed_is_completed_by_the_next_start(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run([sys.executable, "-c", KILL, place.data, *KILLED_AT], check=True)
    undisturbed = Place(tmp_path / "other" / "data", place.version)
    monkeypatch.setattr(migration, "_PAGE", 3)
    migration.migrate_runs(undisturbed.data, Durability.OS)
    assert place.columns() == undisturbed.columns()
    assert [path.name for path in place.data.glob("pipelines.*")] == ["pipelines.db.migrated"]

    async def go_on() -> None:
        async with place.engine() as api:
            assert (await ended(api, place.cut)).status == "COMPLETED"

    asyncio.run(go_on())
    assert place.calls == ["fetch hold", "fetch y", f"fetch {sample.LARGE}", "report"]


@run_async
async def test_an_old_file_that_comes_back_changes_no_run(place: Place) -> None:
    async with place.engine() as api:
        await ended(api, place.cut)
        before = await place.view(api)
    (place.data / "pipelines.db.migrated").rename(place.data / "pipelines.db")
    (place.data / "pipelines.db.migrated").touch()
    rows = place.columns()
    async with place.engine() as api:
        assert await place.view(api) == before
    assert place.columns() == rows
    assert (place.data / "pipelines.db.migrated-2").stat().st_size


@pytest.mark.parametrize("place", VERSIONS[1:], indirect=True)
def test_a_large_stage_is_moved_in_pages(place: Place) -> None:
    with closing(sqlite3.connect(place.data / "pipelines.db")) as old, old:
        lot = old.execute(
            "SELECT lot FROM lot JOIN run USING (run) WHERE id = ? AND stage = 'fetch'",
            (place.cut,),
        ).fetchone()[0]
        old.execute(
            "INSERT INTO item SELECT (lot << 32) + 10 + value, lot, outcome, fan, attempts, reused,"
            " duration_ms, finished_at, error_class, error_code, 'k' || value, error, input, output"
            " FROM item, (WITH RECURSIVE n(value) AS"
            " (SELECT 1 UNION ALL SELECT value + 1 FROM n WHERE value < 10000) SELECT value FROM n)"
            " WHERE place = ? << 32",
            (lot,),
        )
    tracemalloc.start()
    try:
        open_writer(place.data / "penstock.db", Durability.OS).close()
        moved = migration.migrate_runs(place.data, Durability.OS)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert moved is not None
    assert moved.items == 10_032
    assert peak < 6 << 20, peak

    async def check() -> None:
        async with place.engine() as api:
            run = await ended(api, place.cut)
            assert run.stage_progress["fetch"].ok == 10_008

    asyncio.run(check())
    assert len(place.calls) == 4, "items that had ended are not run again"


@run_async
async def test_a_file_that_is_not_an_old_one_stops_the_engine(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    async with Engine(settings, listen=False):
        pass
    old = settings.data_dir / "pipelines.db"
    old.write_bytes(b"nonsense" * 1000)
    with pytest.raises(StoreCorrupt, match="not a readable database"):
        await Engine(settings, listen=False).start()
    old.unlink()
    with closing(sqlite3.connect(old)) as other:
        other.execute("CREATE TABLE mine (a)")
    with pytest.raises(StoreCorrupt, match="not one of Penstock's"):
        await Engine(settings, listen=False).start()
    old.unlink()
    old.touch()
    async with Engine(settings, listen=False):
        assert not old.exists()


@run_async
async def test_a_file_that_another_process_reads_is_refused_and_migrated_later(
    place: Place,
) -> None:
    with closing(apsw.Connection(str(place.data / "pipelines.db"))) as reader:
        reader.execute("BEGIN; SELECT * FROM run").fetchone()
        with pytest.raises(StoreFailed, match="another process has"):
            async with place.engine():
                pass
    async with place.engine() as api:
        assert (await ended(api, place.cut)).status == "COMPLETED"
    assert len(place.calls) == 4


COMMANDS = (
    ("runs",),
    ("status", "{}"),
    ("items", "{}", "fetch"),
    ("watch", "{}"),
    ("breaker", "list"),
)


def test_commands_without_an_engine_say_that_one_must_be_started_once(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in COMMANDS:
        words = [word.format(place.partial) for word in command]
        assert run_command(["pipeline", *words, "--data", str(place.data)]) == 8
        said = capsys.readouterr()
        assert "older Penstock" in said.err
        assert "start an engine" in said.err
    run_command(["doctor", "--data", str(place.data)])
    assert "start moves" in capsys.readouterr().out.replace("\n", " ")

    async def start_once() -> None:
        async with place.engine() as api:
            await ended(api, place.cut)

    asyncio.run(start_once())
    for command in COMMANDS:
        words = [word.format(place.partial) for word in command]
        code = run_command(["pipeline", *words, "--data", str(place.data)])
        said = capsys.readouterr()
        assert code in (0, 1), said
        assert "older" not in said.err
        assert "unexpected" not in said.err


@run_async
async def test_an_engine_in_memory_leaves_the_file_alone(place: Place) -> None:
    async with place.engine(durability=Durability.MEMORY):
        assert (place.data / "pipelines.db").exists()


@run_async
async def test_rows_and_blobs_of_a_migrated_run_are_pruned_with_its_job(place: Place) -> None:
    async with place.engine() as api:
        await ended(api, place.cut)
        blobs = [path for path in (place.data / "blobs").rglob("*") if path.stat().st_size]
        for path in (one for one in blobs if one.is_file()):
            os.utime(path, (0, 0))
        assert (await api.prune(10_000_000.0)).blobs == 0
        pointer = (await api.pipelines.items(place.completed, "fetch"))[2].output
        assert len(await api.get_blob(pointer)) == sample.BLOB + 2
        cleaned = await api.prune(0.0)
        assert cleaned.blobs == 1
        assert await api.pipelines.runs(penstock.RunQuery(limit=10)) == []
    rows = [row for row in place.columns() if len(row) > 2]
    assert rows == []
