"""The file of a worker's container jobs. One process writes it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import apsw

from penstock.adapters.sqlite import database
from penstock.adapters.sqlite.database import (
    Schema,
    WriterLock,
    one_of,
    read_migrations,
    read_queries,
)
from penstock.lifecycles.container import CONTAINER, STORED, ContainerJobState
from penstock.ports.store import Durability
from penstock.workloads.container.job import Priority

_PACKAGE = "penstock.workloads.container.storage.sqlite"
APPLICATION_ID = 0x50454E43  # "PENC": no file of other records is taken for one of these
STARTED = STORED & {ContainerJobState.RUNNING, ContainerJobState.FINISHED}
"""Where nobody gets without having started; a failed job may have been cancelled before."""
FINAL = STORED & CONTAINER.final

JOB_COLUMNS = (
    "seq, job_id, state, rank, created_at, started_at, finished_at, exit_code, error_code,"
    " error_message, error_field, image, image_id, container, engine, memory_mb, cpus, key, size,"
    " labels, ending"
)
BODY_COLUMN = "CASE WHEN size <= ?1 THEN (SELECT body FROM body WHERE body.seq = job.seq) END"
"""The body of a job, unless it is larger than the first value of the query."""


def lock(path: Path) -> WriterLock:
    """Raises AlreadyRunning while another worker has it."""
    advice = "stop it first, or give this worker another folder with jobs_dir"
    return WriterLock(path.with_suffix(".lock"), "worker", advice)


def open_writer(path: Path, durability: Durability) -> apsw.Connection:
    return database.open_writer(path, durability, SCHEMA)


def open_reader(path: Path) -> apsw.Connection:
    return database.open_reader(path, SCHEMA)


def load_queries() -> dict[str, str]:
    return read_queries(_PACKAGE, {**rules(), "job": JOB_COLUMNS, "body": BODY_COLUMN})


@cache
def rules() -> dict[str, str]:
    return {
        "state": one_of("state", STORED),
        "final": one_of("state", FINAL),
        "initial": one_of("state", [CONTAINER.initial]),
        "new_initial": one_of("new.state", [CONTAINER.initial]),
        "started": one_of("state", STARTED),
        "running": one_of("state", [ContainerJobState.RUNNING]),
        "moves": " OR ".join(sorted(_moves())),
        "rank": " OR ".join(f"rank = {priority.rank}" for priority in Priority),
        "none": ", ".join(f"('{state}', 0)" for state in sorted(STORED)),
    }


def _moves() -> set[str]:
    return {f"(old.state = '{before}' AND new.state = '{after}')" for before, _, after in CONTAINER}


SCHEMA = Schema(APPLICATION_ID, lambda: read_migrations(_PACKAGE, rules()))
