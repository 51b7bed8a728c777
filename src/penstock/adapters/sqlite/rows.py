"""Jobs and transitions as rows, and back."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files
from typing import Any

import msgspec

from penstock.adapters.sqlite.database import FIRST_FINAL, STATE_CODES
from penstock.core.job import Job, JobRequest, JobResult
from penstock.core.transition import Entry, Path, Transition
from penstock.core.verdict import Hold, SafetyVerdict
from penstock.lifecycles.canonical import CANONICAL, JobEvent, JobState
from penstock.ports.store import AuditEntry

Row = tuple[Any, ...]

_COLUMNS = (
    "seq, request, state, version, accepted_at, updated_at, attempt, worker_id, pool,"
    " dispatched_at, started_at, finished_at, cancel_requested, result, successor, verdict, hold"
)

_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(JobRequest).decode
_decode_result = msgspec.msgpack.Decoder(JobResult).decode
_decode_verdict = msgspec.msgpack.Decoder(SafetyVerdict).decode
_decode_hold = msgspec.msgpack.Decoder(Hold).decode
STATES = {code: state for state, code in STATE_CODES.items()}


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
        *_gate(job),
        None if request.unique is None else request.unique.key,
        request.principal or None,
        request.schedule,
    )


def _gate(job: Job) -> Row:
    """The verdict, the hold, and whether it is parked."""
    verdict, hold = job.verdict, job.hold
    if verdict is None and hold is None:
        return _UNGATED
    return (
        None if verdict is None else _encode(verdict),
        None if hold is None else _encode(hold),
        1 if is_parked(job) else None,
    )


_UNGATED: Row = (None, None, None)


def is_parked(job: Job) -> bool:
    """Whether it waits for people's approval."""
    return job.hold is not None and job.state is JobState.SCHEDULED and not job.hold.approved


def is_gated(job: Job) -> bool:
    return job.verdict is not None or job.hold is not None


def update_gated_row(job: Job) -> Row:
    *plain, seq = update_row(job)
    return (*plain, *_gate(job), seq)


def update_row(job: Job) -> Row:
    """What can change; a job that has passed no rule needs no more."""
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
        state=STATES[row[2]],
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
        verdict=None if row[15] is None else _decode_verdict(row[15]),
        hold=None if row[16] is None else _decode_hold(row[16]),
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


class JournalCodec:
    """Log entries as journal rows, by the numbers that this very file gives its paths."""

    def __init__(self, paths: Iterable[Row]) -> None:
        self._paths = {code: _path(before, events) for code, before, events, _ in paths}
        self._codes = {path.steps: code for code, path in self._paths.items()}
        self.effects = {code: _effect(path) for code, path in self._paths.items()}
        """What a path does to the tally: the state that has one less, if any, and one more."""
        # Paths are worked out once for all jobs, so the object itself is the quickest key.
        self._known: dict[int, tuple[Path, int | None]] = {}

    def rows(self, number: int, seq: int, entry: Entry) -> list[Row]:
        """One row, or one a step where the steps have no number together."""
        path = entry.path
        known = self._known.get(id(path))
        code = self._learn(path) if known is None else known[1]
        if code is not None:
            return [
                (
                    number,
                    seq,
                    entry.n,
                    code,
                    entry.attempt,
                    entry.actor,
                    entry.at,
                    entry.reason,
                    entry.worker_id,
                )
            ]
        return [
            (
                number + offset,
                seq,
                step.n,
                self._codes[((step.before, step.event, step.after),)],
                step.attempt,
                step.actor,
                step.at,
                step.reason,
                step.worker_id,
            )
            for offset, step in enumerate(entry.transitions())
        ]

    def _learn(self, path: Path) -> int | None:
        if len(self._known) > _MOST_PATHS:
            self._known.clear()
        code = self._codes.get(path.steps)
        self._known[id(path)] = (path, code)  # it must live as long as its id is a key
        return code

    def read(self, job_id: str, row: Row) -> tuple[Transition, ...]:
        n, path, attempt, actor, at, reason, worker_id = row
        entry = Entry(job_id, n, self._paths[path], attempt, actor, at, reason, worker_id)
        return entry.transitions()

    def steps(self, code: int) -> int:
        return len(self._paths[code].steps)


_MOST_PATHS = 1000


def _effect(path: Path) -> tuple[int | None, int] | None:
    if path.before is path.after:
        return None
    before = None if path.before is None else STATE_CODES[path.before]
    return before, STATE_CODES[path.after]


def _path(before: str | None, events: str) -> Path:
    state = None if before is None else JobState(before)
    steps: list[tuple[JobState | None, JobEvent, JobState]] = []
    for word in events.split():
        event = JobEvent(word)
        after = CANONICAL.initial if state is None else CANONICAL.after(state, event)
        steps.append((state, event, after))
        state = after
    return Path(tuple(steps))
