"""Moves what an older data directory has beside its jobs: pipeline runs, and files for batches.

Earlier versions kept runs in a database of their own, `pipelines.db`. An engine that finds one
copies every run whose job is in `penstock.db` to rows of that job, and breakers, definitions and
what pipelines remember to shared values. Then it renames the file.

It can be killed at any point: the next start goes on. A run's own row is written after its
stages and items, so a run that has one is complete, and is not touched again. Shared values that
are there already are newer, and are kept.

Files of the OpenAI API were in a folder of their own, `openai/`. They become blobs with a shared
value each, and the folder is deleted. Its records of batches are not moved: a batch is a job now.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import apsw
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from penstock.adapters.files.blobs import sync_folder
from penstock.adapters.sqlite import schema as job_schema
from penstock.adapters.sqlite.database import Schema, check_version, storage_errors
from penstock.control.shared_state import PREFIX
from penstock.core.errors import PenstockError, StoreFailed
from penstock.core.ledger import Step
from penstock.core.pointer import decode_data, encode_data
from penstock.lifecycles.pipeline import PIPELINE, PipelineJobStatus
from penstock.ports.blobs import Blobs, keep_artifact
from penstock.ports.process import failpoint
from penstock.ports.rows import Row, step_row
from penstock.ports.shared_state import SharedState
from penstock.ports.store import Durability
from penstock.workloads.llm.batches import FileRecords, StoredFile, read_batch
from penstock.workloads.pipeline.breakers import PREFIX as BREAKER
from penstock.workloads.pipeline.context import memory_name
from penstock.workloads.pipeline.records import (
    Breaker,
    ItemOutcome,
    ItemRecord,
    PipelineInfo,
    StageKind,
    StageRecord,
    StageStatus,
)
from penstock.workloads.pipeline.rows import (
    RUN,
    ItemReport,
    RunState,
    item_row,
    item_rows_name,
    list_rows,
    list_rows_name,
    run_row,
    stage_row,
)
from penstock.workloads.pipeline.service import DECLARED

log = logging.getLogger(__name__)

OLD_FILES = "openai"
OLD_RUNS = "pipelines.db"
OLD_SCHEMA = Schema(0x50454E50, lambda: [""])
"""Its mark, and that it has one version only."""
_PAGE = 1000
"""Rows that are read, and written in one transaction, at a time."""
_REPORT_EVERY = 10.0
"""Seconds."""

_RUNS = """
SELECT run, id, status, fence, current_stage, progress_at, fingerprint, errors, alerts,
    abandoned_items, summary
FROM run WHERE run > ? ORDER BY run LIMIT 100
"""
_STAGES = """
SELECT record, lot FROM stage LEFT JOIN lot ON lot.run = stage.run AND lot.stage = stage.name
WHERE stage.run = ? ORDER BY place, name
"""
_ITEMS = """
SELECT place, key, input, outcome, output, fan, attempts, error_class, error_code, error,
    duration_ms, finished_at, reused
FROM item WHERE place > ? AND place < ? ORDER BY place LIMIT ?
"""

_RUN_TEXTS = ("errors", "alerts", "abandoned_items", "summary")
"""Fields of a RunState that are JSON in the last columns of a run."""
_ITEM_FIELDS = (
    *("key", "input", "outcome", "output", "output_count", "attempts", "error_class"),
    *("error_code", "error", "duration_ms", "finished_at", "reused"),
)
"""Fields of an ItemRecord, as the columns of an item after the first."""
_stage = msgspec.json.Decoder(StageRecord).decode
_breaker = msgspec.json.Decoder(Breaker).decode


class Moved(Struct):
    """What a migration did."""

    runs: int = 0
    items: int = 0
    without_job: int = 0
    """Runs that stay in the old file, since `penstock.db` has no job for them."""


def is_unmigrated(data: Path) -> bool:
    """Whether runs are still in the file of an older version."""
    return (data / OLD_RUNS).is_file()


def migrate_runs(data: Path, durability: Durability) -> Moved | None:
    """Move the runs of `pipelines.db`, if there is one. The caller holds the engine's lock, and
    nothing runs yet."""
    path, jobs_path = data / OLD_RUNS, data / "penstock.db"
    if not is_unmigrated(data):
        return None
    with storage_errors(path), closing(_open(path)) as old:
        moved = Moved()
        if old.execute("SELECT count(*) FROM sqlite_schema").get:
            check_version(old, path, OLD_SCHEMA)
            log.info("moving the pipeline runs of %s to %s", path, jobs_path.name)
            jobs = job_schema.open_writer(jobs_path, durability)
            with storage_errors(jobs_path), closing(jobs):
                _Migration(old, jobs, moved).run()
        try:
            old.pragma("journal_mode", "delete")
        except apsw.BusyError as error:
            raise StoreFailed(
                f"another process has {path} open",
                hint="end it and start the engine again: what was moved is kept",
            ) from error
    failpoint("runs-moved")
    kept = _set_aside(path)
    failpoint("runs-renamed")
    log.info("moved pipeline runs: %d, with %d items", moved.runs, moved.items)
    if moved.without_job:
        log.warning(
            "pipeline runs that have no job in %s and can't be moved: %d; they stay in %s, which no"
            " command reads",
            jobs_path.name,
            moved.without_job,
            kept,
        )
    else:
        log.info("%s is not needed any more and can be deleted", kept)
    return moved


def _open(path: Path) -> apsw.Connection:
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    connection.set_busy_timeout(5000)
    return connection


def _set_aside(path: Path) -> Path:
    """Rename the old file, whose write-ahead log is merged into it; an earlier one is kept."""
    kept, number = path.with_name(f"{path.name}.migrated"), 1
    while kept.exists():
        number += 1
        kept = path.with_name(f"{path.name}.migrated-{number}")
    path.rename(kept)
    path.with_suffix(".opening").unlink(missing_ok=True)
    sync_folder(path.parent)
    return kept


class _Migration:
    def __init__(self, old: apsw.Connection, jobs: apsw.Connection, moved: Moved) -> None:
        self._old, self._jobs, self._moved = old, jobs, moved
        self._sql = job_schema.load_queries()
        self._rows: list[Row] = []
        """Not written yet; in the order in which they are."""

    def run(self) -> None:
        with self._jobs:
            self._jobs.executemany(
                "INSERT INTO fact (name, value) VALUES (?, ?) ON CONFLICT (name) DO NOTHING",
                ((PREFIX + name, value) for name, value in self._shared_values()),
            )
        failpoint("runs-facts")
        count = self._old.execute("SELECT count(*) FROM run").get
        told = time.monotonic()
        for seen, row in enumerate(self._runs(), start=1):
            self._move(row)
            if time.monotonic() - told > _REPORT_EVERY:
                told = time.monotonic()
                log.info("moved %d of %d pipeline runs", seen, count)
        self._write()

    def _shared_values(self) -> Iterator[tuple[str, bytes]]:
        for name, version, record in self._old.execute("SELECT name, version, record FROM breaker"):
            breaker = replace(_breaker(record), version=version)
            yield BREAKER + name, msgspec.json.encode(breaker)
        for name, info in self._old.execute("SELECT name, info FROM declared"):
            yield DECLARED + name, msgspec.json.encode(_info(info))
        for name, value in self._old.execute("SELECT name, value FROM fact"):
            yield _remembered_as(name), value

    def _runs(self) -> Iterator[Row]:
        last = -1
        while page := self._read(_RUNS, last):
            yield from page
            last = page[-1][0]

    def _read(self, sql: str, *values: int) -> list[Row]:
        return self._old.execute(sql, values).fetchall()

    def _move(self, row: Row) -> None:
        run, job_id, status, attempt, current_stage, progress_at, fingerprint, *texts = row
        seq = self._jobs.execute("SELECT seq FROM job WHERE job_id = ?", (job_id,)).get
        if seq is None:
            self._moved.without_job += 1
            return
        known = "SELECT EXISTS (SELECT 1 FROM step WHERE job = ? AND name = ?)"
        if self._jobs.execute(known, (seq, RUN)).get:
            return
        output = ""
        written = {"attempt": attempt, "at": progress_at or 0.0}
        for record, lot in self._read(_STAGES, run):
            stage, last_output = self._move_items(seq, attempt, _stage(record), lot)
            self._add(seq, [replace(stage_row(stage), **written)])
            if stage.kind is StageKind.STEP and last_output:
                output = last_output
        state = _state(PipelineJobStatus(status), current_stage, fingerprint, texts, output)
        self._add(seq, [replace(run_row(state), **written)])
        self._moved.runs += 1

    def _move_items(
        self, seq: int, attempt: int, stage: StageRecord, lot: int | None
    ) -> tuple[StageRecord, str]:
        """Copy the items of a stage; returns the stage with what it counts now, and the output
        of its last item."""
        count = outputs = 0
        output = ""
        # A stage that goes on is counted again from its items; what they had added up to so far
        # goes with the first that has ended.
        is_open = stage.status is StageStatus.RUNNING
        report = _report(stage) if is_open and stage.metrics else None
        for page in self._items(lot):
            items = [_item(count + index, row) for index, row in enumerate(page)]
            count += len(items)
            if stage.kind is StageKind.MAP:
                self._add(seq, list_rows(list_rows_name(stage), items))
            ended: list[Step] = []
            for item in items:
                if item.outcome is ItemOutcome.PENDING:
                    continue
                if item.outcome is ItemOutcome.OK:
                    outputs += item.output_count
                    output = item.output
                ended.append(
                    replace(item_row(item_rows_name(stage), item, report), attempt=attempt)
                )
                report = None
            self._add(seq, ended)
        self._moved.items += count
        return replace(stage, total=count or stage.total, output_count=outputs), output

    def _items(self, lot: int | None) -> Iterator[list[Row]]:
        """The items of a stage, in pages: `place` is the number of their lot and their `seq`."""
        if lot is None:
            return
        after, end = (lot << 32) - 1, (lot + 1) << 32
        while page := self._read(_ITEMS, after, end, _PAGE):
            yield page
            after = page[-1][0]

    def _add(self, seq: int, steps: Sequence[Step]) -> None:
        self._rows.extend(step_row(seq, step) for step in steps)
        if len(self._rows) >= _PAGE:
            self._write()

    def _write(self) -> None:
        with self._jobs:
            self._jobs.executemany(self._sql["write_step"], self._rows)
        self._rows.clear()
        failpoint("runs-page")


def _info(text: str) -> PipelineInfo:
    """A definition; what is `distributed` was called `spread`."""
    info = msgspec.json.decode(text)
    for stage in info["stages"]:
        if "spread" in stage:
            stage["distributed"] = stage.pop("spread")
    return msgspec.convert(info, PipelineInfo)


def _remembered_as(name: str) -> str:
    """Where a value of `ctx.remember` is now: it was `PIPELINE/NAME` of the default tenant, and
    `TENANT:PIPELINE/NAME` of others."""
    owner, _, name = name.partition("/")
    tenant, _, pipeline = owner.rpartition(":")
    return memory_name(tenant or "default", pipeline, name)


def _state(
    status: PipelineJobStatus,
    current_stage: str | None,
    fingerprint: str,
    texts: Sequence[str | None],
    output: str,
) -> RunState:
    ended = PIPELINE.is_final(status)
    decoded = {
        name: msgspec.json.decode(text)
        for name, text in zip(_RUN_TEXTS, texts, strict=True)
        if text
    }
    state = msgspec.convert(decoded, RunState)
    return replace(
        state,
        fingerprint=fingerprint,
        status=status if ended else None,
        current_stage=current_stage,
        output=output,
        hooks_called=ended,  # right after the end was written
    )


def _item(seq: int, row: Row) -> ItemRecord:
    fields = dict(zip(_ITEM_FIELDS, row[1:], strict=True))
    pointers = {name: _pointer(fields[name]) for name in ("input", "output")}
    return msgspec.convert({**fields, **pointers, "seq": seq}, ItemRecord, strict=False)


def _pointer(text: str) -> str:
    """A pointer as it is made today: a retry compares those of equal inputs."""
    return encode_data(decode_data(text)) if text.startswith("data:") else text


def _report(stage: StageRecord) -> ItemReport:
    report = ItemReport({}, {}, [])
    for name, value in stage.metrics.items():
        if isinstance(value, bool | str):
            report.fixed[name] = value
        else:
            report.added[name] = value
    return report


# -- files for batches ------------------------------------------------------------------------


class _OldFile(Struct, frozen=True):
    file: StoredFile
    content: str


async def migrate_files(data_dir: Path, blobs: Blobs, state: SharedState) -> None:
    """Make the files of `openai/` blobs; killed at any point, the next start does it again."""
    folder, files = data_dir / OLD_FILES, FileRecords(state)
    if not folder.is_dir():
        return
    for path in sorted((folder / "files").glob("[!.]*.json")):
        try:
            old = msgspec.json.decode(path.read_bytes(), type=_OldFile)
            source = folder / "content" / Path(old.content).name
            left = await keep_artifact(blobs, "file", source, "application/jsonl")
        except (msgspec.DecodeError, PenstockError) as error:
            raise StoreFailed(
                f"the record {path} is damaged: {error}",
                hint="restore it from a backup, or move it away to do without it",
            ) from error
        await files.put(replace(old.file, bytes=left.size, pointer=left.pointer))
    for path in sorted((folder / "batches").glob("[!.]*.json")):
        if not read_batch(path.read_bytes()).has_ended:
            log.warning(
                "%s was begun by an earlier version and does not go on: its lines are the jobs of"
                " the workflow of that name; create it again from its input file",
                path.stem,
            )
    await asyncio.to_thread(shutil.rmtree, folder)
