"""Container jobs as rows, and back."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from penstock.lifecycles.container import ContainerJobState
from penstock.workloads.container.job import (
    Artifact,
    ContainerRecord,
    JobError,
    Priority,
    StreamCount,
    Usage,
)

Row = tuple[Any, ...]


class Ending(Struct, frozen=True, omit_defaults=True):
    """What is written, as JSON, when a job has ended."""

    usage: Usage = Usage()
    stdout: StreamCount = StreamCount()
    stderr: StreamCount = StreamCount()
    artifacts: tuple[Artifact, ...] = ()
    skipped: tuple[str, ...] = ()


SIZE = 18
"""The column that tells how large the body is."""
_NOTHING = Ending()
_encode = msgspec.json.Encoder().encode
_read_labels = msgspec.json.Decoder(dict[str, str]).decode
_read_ending = msgspec.json.Decoder(Ending).decode
_STATES: dict[str, ContainerJobState] = {state.value: state for state in ContainerJobState}
_PRIORITIES: dict[int, Priority] = {priority.rank: priority for priority in Priority}


def read(row: Row, body: bytes = b"") -> ContainerRecord:
    """From the columns of a job; what follows them is not looked at."""
    error = None if row[8] is None else JobError(row[8], row[9], row[10])
    ending = _NOTHING if row[20] is None else _read_ending(row[20])
    return ContainerRecord(
        seq=row[0],
        job_id=row[1],
        state=_STATES[row[2]],
        priority=_PRIORITIES[row[3]],
        created_at=row[4],
        started_at=row[5],
        finished_at=row[6],
        exit_code=row[7],
        error=error,
        image=row[11],
        image_id=row[12],
        container=row[13],
        engine=row[14],
        memory_mb=row[15],
        cpus=row[16],
        key=row[17],
        labels={} if row[19] is None else _read_labels(row[19]),
        body=body,
        usage=ending.usage,
        stdout=ending.stdout,
        stderr=ending.stderr,
        artifacts=ending.artifacts,
        skipped=ending.skipped,
    )


def new_row(record: ContainerRecord) -> Row:
    return (
        record.job_id,
        record.state,
        record.priority.rank,
        record.created_at,
        record.exit_code,
        *_error_columns(record.error),
        record.image,
        record.image_id,
        record.container,
        record.engine,
        record.memory_mb,
        record.cpus,
        record.key,
        len(record.body),
        _encode(record.labels).decode() if record.labels else None,
        _ending_text(record),
    )


def moved_row(record: ContainerRecord) -> Row:
    return (
        record.state,
        record.started_at,
        record.finished_at,
        record.exit_code,
        *_error_columns(record.error),
        record.image_id,
        record.container,
        record.engine,
        _ending_text(record),
        record.seq,
    )


def _error_columns(error: JobError | None) -> Row:
    return (None, None, None) if error is None else (error.code, error.message, error.field)


def _ending_text(record: ContainerRecord) -> str | None:
    ending = Ending(record.usage, record.stdout, record.stderr, record.artifacts, record.skipped)
    return None if ending == _NOTHING else _encode(ending).decode()
