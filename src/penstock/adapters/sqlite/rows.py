"""Jobs and transitions as rows, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from penstock.adapters.sqlite.database import FIRST_FINAL, STATE_CODES
from penstock.adapters.sqlite.texts import read_queries
from penstock.core.job import Job, JobRequest, JobResult
from penstock.core.transition import Answer, Entry, Path, Transition
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
    fill = {"job": _COLUMNS, "first_final": str(FIRST_FINAL)}
    return read_queries("penstock.adapters.sqlite", fill)


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
    """All of a job that has no rule, unique key or schedule to it, as most have not."""
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
        request.principal or None,
    )


def insert_full_row(job: Job) -> Row:
    unique = job.request.unique
    key = None if unique is None else unique.key
    return (*insert_row(job), *_gate(job), key, job.request.schedule)


def _gate(job: Job) -> Row:
    """The verdict, the hold, and whether it is parked."""
    verdict, hold = job.verdict, job.hold
    return (
        None if verdict is None else _encode(verdict),
        None if hold is None else _encode(hold),
        1 if is_parked(job) else None,
    )


def is_parked(job: Job) -> bool:
    """Whether it waits for people's approval."""
    return job.hold is not None and job.state is JobState.SCHEDULED and not job.hold.approved


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


Effect = tuple[tuple[int, int], ...]
"""States, each with how many jobs more, or fewer, are in it."""


class JournalCodec:
    """Log entries as journal rows, by the numbers that this very file gives its paths."""

    def __init__(self, paths: Iterable[Row]) -> None:
        self._paths = {code: _path(before, events) for code, before, events, _ in paths}
        self._codes = {path.steps: code for code, path in self._paths.items()}
        self.effects = {code: _effect(path) for code, path in self._paths.items()}
        # Paths are worked out once for all jobs, so the object itself is the quickest key.
        self._known: dict[int, tuple[Path, int | None]] = {}

    def write(
        self, moved: Iterable[Answer], number: int
    ) -> tuple[list[Row], dict[tuple[str, int], int]]:
        """The rows of these entries, from this number on; how often each tenant's jobs took
        each path.

        A row an entry, or one a step where the steps have no number together.
        """
        written: list[Row] = []
        happened: dict[tuple[str, int], int] = {}
        known = self._known
        for answer in moved:
            job, entry = answer.job, answer.entry
            assert job is not None
            assert entry is not None
            found = known.get(id(entry.path)) or self._learn(entry.path)
            for code, part in ((found[1], entry),) if found[1] else self._apart(entry):
                written.append(
                    (
                        number,
                        job.seq,
                        part.n,
                        code,
                        part.attempt,
                        part.actor,
                        part.at,
                        part.reason,
                        part.worker_id,
                    )
                )
                number += 1
                key = (job.request.tenant, code)
                happened[key] = happened.get(key, 0) + 1
        return written, happened

    def _learn(self, path: Path) -> tuple[Path, int | None]:
        if len(self._known) > _MOST_PATHS:
            self._known.clear()
        # The path must live as long as its id is a key.
        known = self._known[id(path)] = (path, self._codes.get(path.steps))
        return known

    def _apart(self, entry: Entry) -> Iterator[tuple[int, Transition]]:
        for step in entry.transitions():
            yield self._codes[((step.before, step.event, step.after),)], step

    def read(self, job_id: str, row: Row) -> tuple[Transition, ...]:
        n, path, attempt, actor, at, reason, worker_id = row
        entry = Entry(job_id, n, self._paths[path], attempt, actor, at, reason, worker_id)
        return entry.transitions()

    def steps(self, code: int) -> int:
        return len(self._paths[code].steps)


_MOST_PATHS = 1000


def _effect(path: Path) -> Effect:
    if path.before is path.after:
        return ()
    one_more = (STATE_CODES[path.after], 1)
    return (one_more,) if path.before is None else (one_more, (STATE_CODES[path.before], -1))


def _path(before: str | None, events: str) -> Path:
    state = None if before is None else JobState(before)
    steps: list[tuple[JobState | None, JobEvent, JobState]] = []
    for word in events.split():
        event = JobEvent(word)
        after = CANONICAL.initial if state is None else CANONICAL.after(state, event)
        steps.append((state, event, after))
        state = after
    return Path(tuple(steps))
