"""Jobs, steps and audit entries as rows of a database, and back.

A job's row has what is looked for in columns, the request as it was accepted, and the rest of
the record as one value, which is NULL until the first change.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from penstock.core.artifact import Artifact
from penstock.core.job import Job, JobRequest, JobResult
from penstock.core.ledger import Step
from penstock.core.verdict import Hold, SafetyVerdict
from penstock.lifecycles.canonical import TERMINAL, JobState
from penstock.ports.query import is_awaiting_approval
from penstock.ports.store import AuditEntry

Row = tuple[Any, ...]

COLUMNS = "seq, request, state, accepted_at, finished_at, page, successor, record"
STATE_CODES = {state: code for code, state in enumerate(JobState, start=1)}
"""How a state is stored: its number on the CAP wire. Final states come last."""
FIRST_FINAL = min(STATE_CODES[state] for state in TERMINAL)
DEAD = (STATE_CODES[JobState.FAILED], STATE_CODES[JobState.TIMEOUT])
"""What ended in these, and was not retried, is a dead letter."""
STATES = {code: state for state, code in STATE_CODES.items()}
RETRIED = 0
"""Under which number tries that were retried are counted."""
_SCHEDULED = STATE_CODES[JobState.SCHEDULED]


class Result(Struct, array_like=True, gc=False):
    """A JobResult without the names of its fields; the job_id is the row's."""

    status: JobState | None
    """None where it is the state of the job."""
    worker_id: str | None
    attempt: int
    result_ptr: str | None
    execution_ms: float | None
    error_code: str | None = None
    error_message: str | None = None
    error_kinds: tuple[str, ...] = ()
    retry_after: float | None = None
    traceback: str | None = None
    artifacts: tuple[Artifact, ...] = ()


class Record(Struct, array_like=True, gc=False):
    """What a job's row has in no column of its own."""

    version: int
    attempt: int
    updated_at: float
    worker_id: str | None
    pool: str | None
    dispatched_at: float | None
    started_at: float | None
    cancel_requested: bool
    result: Result | None
    verdict: SafetyVerdict | None
    hold: Hold | None
    pages: tuple[int, ...]
    uncharged: int = 0


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder().decode
_decode_request = msgspec.msgpack.Decoder(JobRequest).decode
decode_record = msgspec.msgpack.Decoder(Record).decode
decode_step = msgspec.msgpack.Decoder(Step).decode


def read_job(row: Row) -> Job:
    seq, request, state, accepted_at, finished_at, page, successor, record = row
    if record is None:  # nothing has happened since it was accepted, and maybe scheduled
        return Job(
            seq=seq,
            request=_decode_request(request),
            state=STATES[state],
            version=2 if state == _SCHEDULED else 1,
            accepted_at=accepted_at,
            updated_at=accepted_at,
            pages=(page,),
        )
    rest = decode_record(record)
    asked = _decode_request(request)
    now = STATES[state]
    return Job(
        seq=seq,
        request=asked,
        state=now,
        version=rest.version,
        accepted_at=accepted_at,
        updated_at=rest.updated_at,
        attempt=rest.attempt,
        worker_id=rest.worker_id,
        pool=rest.pool,
        dispatched_at=rest.dispatched_at,
        started_at=rest.started_at,
        finished_at=finished_at,
        cancel_requested=rest.cancel_requested,
        result=None if rest.result is None else _read_result(asked.job_id, now, rest.result),
        successor=successor,
        verdict=rest.verdict,
        hold=rest.hold,
        pages=rest.pages,
        uncharged=rest.uncharged,
    )


def _read_result(job_id: str, state: JobState, result: Result) -> JobResult:
    return JobResult(
        job_id=job_id,
        status=result.status or state,
        result_ptr=result.result_ptr,
        worker_id=result.worker_id,
        execution_ms=result.execution_ms,
        error_code=result.error_code,
        error_message=result.error_message,
        attempt=result.attempt,
        error_kinds=result.error_kinds,
        retry_after=result.retry_after,
        traceback=result.traceback,
        artifacts=result.artifacts,
    )


def inserts(jobs: Iterable[Job]) -> tuple[list[Row], list[Row]]:
    """Rows for new jobs: of those that leave most columns empty, and of the others."""
    plain: list[Row] = []
    full: list[Row] = []
    for job in jobs:
        request = job.request
        row = _plain(job)
        if (
            _is_new(job)
            and request.idempotency_key is None
            and request.parent_job_id is None
            and request.child_of is None
            and request.first_try is None
            and request.workflow_id is None
            and request.unique is None
            and request.schedule is None
            and not request.context_ptr.startswith("blob:")
        ):
            plain.append(row)
        else:
            full.append(_full(job, row))
    return plain, full


def _is_new(job: Job) -> bool:
    """Whether its record follows from the columns: it was just accepted, and scheduled at most."""
    return job.version == 1 or (
        job.version == 2
        and job.state is JobState.SCHEDULED
        and job.updated_at == job.accepted_at
        and len(job.pages) == 1
        and job.verdict is None
        and job.hold is None
    )


def full_row(job: Job) -> Row:
    """A row with every column, in the order of an insert."""
    return _full(job, _plain(job))


def _plain(job: Job) -> Row:
    """The columns that every new job fills."""
    request = job.request
    return (
        job.seq,
        request.job_id,
        request.tenant,
        request.topic,
        STATE_CODES[job.state],
        job.accepted_at,
        job.pages[0],
        encode(request),
    )


def _full(job: Job, row: Row) -> Row:
    request = job.request
    return (
        *row,
        job.finished_at,
        None if _is_new(job) else _record(job),
        request.idempotency_key,
        None if request.unique is None else request.unique.key,
        request.parent_job_id,
        request.child_of,
        request.first_try,
        request.workflow_id,
        request.step_index,
        request.schedule,
        _blob(request.context_ptr),
        *_rare(job),
    )


def updates(jobs: Iterable[Job]) -> tuple[list[Row], list[Row]]:
    """The same for changed jobs."""
    plain: list[Row] = []
    full: list[Row] = []
    codes = STATE_CODES
    for job in jobs:
        result = job.result
        if (
            job.hold is None
            and job.successor is None
            and (result is None or result.result_ptr is None or result.result_ptr[:5] != "blob:")
        ):
            plain.append((codes[job.state], job.finished_at, _record(job), job.seq))
        else:
            full.append(change_row(job))
    return plain, full


def change_row(job: Job) -> Row:
    """Every column that a move may change, and the `seq`."""
    return STATE_CODES[job.state], job.finished_at, _record(job), *_rare(job), job.seq


def result_values(result: JobResult, state: JobState) -> Row:
    """The fields of `Result`; those at the end only if there is something in them."""
    values: Row = (
        None if result.status is state else result.status,
        result.worker_id,
        result.attempt,
        result.result_ptr,
        result.execution_ms,
    )
    if (
        result.error_code is None
        and result.error_message is None
        and not result.error_kinds
        and result.retry_after is None
        and not result.artifacts
    ):
        return values
    values = (
        *values,
        result.error_code,
        result.error_message,
        result.error_kinds,
        result.retry_after,
        result.traceback,
    )
    return (*values, result.artifacts) if result.artifacts else values


def _record(job: Job) -> bytes:
    """The fields of `Record`."""
    result = job.result
    values = (
        job.version,
        job.attempt,
        job.updated_at,
        job.worker_id,
        job.pool,
        job.dispatched_at,
        job.started_at,
        job.cancel_requested,
        None if result is None else result_values(result, job.state),
        job.verdict,
        job.hold,
        job.pages,
    )
    return encode(values if not job.uncharged else (*values, job.uncharged))


def _rare(job: Job) -> Row:
    """Whether it waits for an approval, its successor, and the blob with its result."""
    result = None if job.result is None else job.result.result_ptr
    return 1 if is_awaiting_approval(job) else None, job.successor, _blob(result)


def _blob(pointer: str | None) -> str | None:
    return pointer if pointer is not None and pointer.startswith("blob:") else None


def step_row(seq: int, step: Step) -> Row:
    given, gave = step.input, step.output
    return (
        seq,
        step.name,
        step.n,
        step.outcome,
        given if given.startswith("blob:") else None,
        gave if gave.startswith("blob:") else None,
        encode(step),
    )


def audit_row(entry: AuditEntry) -> Row:
    return (
        entry.at,
        entry.principal,
        entry.action,
        entry.subject,
        entry.tenant,
        entry.detail,
        entry.outcome,
    )
