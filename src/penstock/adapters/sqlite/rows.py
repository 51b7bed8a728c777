"""Jobs and transitions as rows, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.resources import files
from typing import Any

import msgspec

from penstock.adapters.sqlite.database import FIRST_FINAL, STATE_CODES
from penstock.core.job import Job, JobRequest, JobResult
from penstock.core.transition import Entry, Path, Transition
from penstock.lifecycles.canonical import CANONICAL, JobEvent, JobState

Row = tuple[Any, ...]

_COLUMNS = (
    "seq, request, state, version, accepted_at, updated_at, attempt, worker_id, pool,"
    " dispatched_at, started_at, finished_at, cancel_requested, result, successor"
)

_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(JobRequest).decode
_decode_result = msgspec.msgpack.Decoder(JobResult).decode
_STATES = {code: state for state, code in STATE_CODES.items()}


def load_queries() -> dict[str, str]:
    """Read queries.sql: each statement under its name."""
    text = files("penstock.adapters.sqlite").joinpath("queries.sql").read_text()
    queries = {}
    for part in text.split("-- name: ")[1:]:
        name, _, sql = part.partition("\n")
        queries[name.strip()] = (
            sql.replace("{job}", _COLUMNS).replace("{first_final}", str(FIRST_FINAL)).strip()
        )
    return queries


def job_columns() -> str:
    return _COLUMNS


def _blob(pointer: str | None) -> str | None:
    return pointer if pointer is not None and pointer.startswith("blob:") else None


def _result_pair(job: Job) -> tuple[str | None, bytes | None]:
    result = job.result
    if result is None:
        return None, None
    return _blob(result.result_ptr), _encode(result)


def insert_row(job: Job) -> Row:
    request = job.request
    blob, result = _result_pair(job)
    return (
        job.seq,
        request.job_id,
        request.topic,
        request.tenant,
        STATE_CODES[job.state],
        job.version,
        job.attempt,
        job.accepted_at,
        job.updated_at,
        job.worker_id,
        job.pool,
        job.dispatched_at,
        job.started_at,
        job.finished_at,
        job.cancel_requested,
        job.successor,
        blob,
        result,
        request.idempotency_key,
        request.parent_job_id,
        request.workflow_id,
        request.step_index,
        _blob(request.context_ptr),
        _encode(request),
    )


def update_row(job: Job) -> Row:
    blob, result = _result_pair(job)
    return (
        STATE_CODES[job.state],
        job.version,
        job.attempt,
        job.updated_at,
        job.worker_id,
        job.pool,
        job.dispatched_at,
        job.started_at,
        job.finished_at,
        job.cancel_requested,
        job.successor,
        blob,
        result,
        job.seq,
    )


def read_job(row: Row) -> Job:
    return Job(
        seq=row[0],
        request=_decode_request(row[1]),
        state=_STATES[row[2]],
        version=row[3],
        accepted_at=row[4],
        updated_at=row[5],
        attempt=row[6],
        worker_id=row[7],
        pool=row[8],
        dispatched_at=row[9],
        started_at=row[10],
        finished_at=row[11],
        cancel_requested=bool(row[12]),
        result=None if row[13] is None else _decode_result(row[13]),
        successor=row[14],
    )


class JournalCodec:
    """Log entries as journal rows, by the numbers that this very file gives its paths."""

    def __init__(self, paths: Iterable[Row]) -> None:
        self._paths = {code: _path(before, events) for code, before, events, _ in paths}
        self._codes = {path.steps: code for code, path in self._paths.items()}

    def rows(self, seq: int, entry: Entry) -> Iterator[Row]:
        """One row, or one a step where the steps have no number together."""
        code = self._codes.get(entry.path.steps)
        if code is not None:
            yield (
                seq,
                entry.n,
                code,
                entry.attempt,
                entry.actor,
                entry.at,
                entry.reason,
                entry.worker_id,
            )
            return
        for step in entry.transitions():
            path = Path(((step.before, step.event, step.after),))
            single = Entry(
                step.job_id,
                step.n,
                path,
                step.attempt,
                step.actor,
                step.at,
                step.reason,
                step.worker_id,
            )
            yield from self.rows(seq, single)

    def read(self, job_id: str, row: Row) -> tuple[Transition, ...]:
        n, path, attempt, actor, at, reason, worker_id = row
        entry = Entry(job_id, n, self._paths[path], attempt, actor, at, reason, worker_id)
        return entry.transitions()


def _path(before: str | None, events: str) -> Path:
    state = None if before is None else JobState(before)
    steps: list[tuple[JobState | None, JobEvent, JobState]] = []
    for word in events.split():
        event = JobEvent(word)
        after = CANONICAL.initial if state is None else CANONICAL.after(state, event)
        steps.append((state, event, after))
        state = after
    return Path(tuple(steps))
