"""Opening a file of pipeline runs. Several processes may write the same one, in turns."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Generator
from functools import cache
from pathlib import Path

import apsw

from penstock.adapters.sqlite import database
from penstock.adapters.sqlite.database import Schema, one_of, read_migrations, read_queries
from penstock.core.errors import StoreFailed
from penstock.lifecycles.pipeline import PIPELINE, PipelineJobStatus
from penstock.ports.store import Durability
from penstock.workloads.pipeline.records import ItemOutcome, PipelineEventKind, StageStatus
from penstock.workloads.pipeline.store_rules import Head

_PACKAGE = "penstock.workloads.pipeline.storage.sqlite"
APPLICATION_ID = 0x50454E50  # "PENP": no file of jobs is taken for one of runs
TROUBLE = PIPELINE.final - {PipelineJobStatus.COMPLETED}
"""Endings that are rarer, and more often asked for."""
TROUBLED_ITEMS = frozenset({ItemOutcome.FAILED, ItemOutcome.SKIPPED})

ITEM_COLUMNS = (
    "place & 4294967295, key, input, outcome, output, fan, attempts, error_class, error_code,"
    " error, duration_ms, finished_at, reused"
)
RUN_COLUMNS = (
    f"{', '.join(Head.__struct_fields__)}, id, created_at, pipeline, tenant, trace_id,"
    " fingerprint, retry_of, trigger, errors, alerts, abandoned_items, summary,"
    " coalesce(config, (SELECT config FROM config WHERE config.run = run.run)),"
    # One statement sees one state of the file, so the stages are read with their run.
    " (SELECT group_concat(record, ',' ORDER BY place, name) FROM stage WHERE stage.run = run.run)"
)


def open_writer(path: Path, durability: Durability) -> apsw.Connection:
    with _alone(path):
        return database.open_writer(path, durability, SCHEMA)


def open_reader(path: Path) -> apsw.Connection:
    return database.open_reader(path, SCHEMA)


def load_queries() -> dict[str, str]:
    fill = {
        **rules(),
        "run": RUN_COLUMNS,
        "head": ", ".join(Head.__struct_fields__),
        "item": ITEM_COLUMNS,
    }
    return read_queries(_PACKAGE, fill)


@cache
def rules() -> dict[str, str]:
    return {
        "status": one_of("status", PipelineJobStatus),
        "final": one_of("status", PIPELINE.final),
        "trouble": one_of("status", TROUBLE),
        "stage_status": one_of("status", StageStatus),
        "outcome": one_of("outcome", ItemOutcome),
        "troubled_item": one_of("outcome", TROUBLED_ITEMS),
        "event_kind": one_of("kind", PipelineEventKind),
    }


SCHEMA = Schema(APPLICATION_ID, lambda: read_migrations(_PACKAGE, rules()))


@contextlib.contextmanager
def _alone(path: Path) -> Generator[None]:
    """One process at a time makes the file or brings it up to date."""
    try:
        lock = open(path.with_suffix(".opening"), "a")  # noqa: SIM115 closed below
    except OSError as error:
        raise StoreFailed(
            f"can't write in {path.parent}: {error.strerror}",
            hint="choose another folder with --data, or change its permissions",
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
