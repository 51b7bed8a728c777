"""Requests, changes and jobs to test with, made in few words, and short questions to a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.control.ledger import Ledger
from penstock.core.artifact import Artifact
from penstock.core.job import Job, JobRequest, JobResult
from penstock.core.journal import Stride
from penstock.core.ledger import Accept, Answer, ChangeOutcome, Decider, Known, Move, advance
from penstock.lifecycles.canonical import TERMINAL, JobEvent, JobState
from penstock.ports.store import JobQuery, LogLine

T0 = 1_700_000_000.0
"""When tests take place."""

_S, _E = JobState, JobEvent
_ROLE = {
    _E.SCHEDULE: "scheduler",
    _E.DENY: "scheduler",
    _E.PARK: "scheduler",
    _E.APPROVE: "gateway:alice",
    _E.DISPATCH: "scheduler",
    _E.REDISPATCH: "scheduler",
    _E.START: "worker:w1",
    _E.SUCCEED: "worker:w1",
    _E.FAIL: "worker:w1",
    _E.EXPIRE: "reconciler",
    _E.REQUEST_CANCEL: "gateway",
    _E.CANCEL: "gateway",
    _E.NOTE: "gateway",
}
_WAY: dict[JobState, tuple[JobEvent, ...]] = {
    _S.PENDING: (),
    _S.SCHEDULED: (_E.SCHEDULE,),
    _S.DISPATCHED: (_E.SCHEDULE, _E.DISPATCH),
    _S.RUNNING: (_E.SCHEDULE, _E.DISPATCH, _E.START),
    _S.SUCCEEDED: (_E.SCHEDULE, _E.DISPATCH, _E.START, _E.SUCCEED),
    _S.FAILED: (_E.SCHEDULE, _E.DISPATCH, _E.START, _E.FAIL),
    _S.TIMEOUT: (_E.SCHEDULE, _E.DISPATCH, _E.START, _E.EXPIRE),
    _S.CANCELLED: (_E.CANCEL,),
    _S.DENIED: (_E.SCHEDULE, _E.DENY),
}


def a_request(job_id: str = "a", **fields: Any) -> JobRequest:
    return JobRequest(**{"job_id": job_id, "topic": "job.test", **fields})


def accept(job_id: str, at: float = T0, **fields: Any) -> Accept:
    return Accept(a_request(job_id, **fields), at)


def move(job_id: str, *events: JobEvent, at: float = T0, **fields: Any) -> Move:
    """A move by a role that may make its first event."""
    defaults: dict[str, Any] = {"actor": _ROLE[events[0]], "worker_id": "w1", "pool": "default"}
    return Move(job_id, events, at=at, **{**defaults, **fields})


def succeeded(job_id: str, **fields: Any) -> JobResult:
    return JobResult(job_id=job_id, status=_S.SUCCEEDED, **fields)


def failed(job_id: str, **fields: Any) -> JobResult:
    return JobResult(**{"job_id": job_id, "status": _S.FAILED, "error_code": "BOOM", **fields})


def an_artifact(name: str, digit: str = "0") -> Artifact:
    """A file; `digit` makes its content another."""
    digest = digit * 64
    return Artifact(name, 1, digest, "image/png", f"blob:sha256-{digest};type=image/png")


def a_job(
    job_id: str = "a",
    state: JobState = JobState.PENDING,
    *,
    seq: int = 1,
    at: float = T0,
    worker_id: str = "w1",
    **fields: Any,
) -> Job:
    """A job that came to a state by the shortest way, all of it at one moment."""
    (answer,) = Decider({}, Known(), seq, 1).decide([accept(job_id, at, **fields)])
    job = answer.job
    assert job is not None
    for event in _WAY[state]:
        result = JobResult(job_id=job_id, status=state) if state in TERMINAL else None
        step = move(job_id, event, at=at, worker_id=worker_id, result=result)
        job = advance(job, step).job
        assert job is not None
    return job


async def one(store: Ledger, job_id: str) -> Job:
    job = await store.get(job_id)
    assert job is not None
    return job


async def found(store: Ledger) -> list[Job]:
    return await store.find(JobQuery(tries=True, limit=1000))


async def names(store: Ledger, **conditions: Any) -> str:
    jobs = await store.find(JobQuery(**conditions))
    return "".join(job.job_id for job in jobs)


def verdicts(answers: Sequence[Answer]) -> str:
    """M for moved, R for repeated, X for refused."""
    letters = {ChangeOutcome.MOVED: "M", ChangeOutcome.REPEATED: "R", ChangeOutcome.REFUSED: "X"}
    return "".join(letters[answer.verdict] for answer in answers)


def state_of(answer: Answer) -> JobState | None:
    return None if answer.job is None else answer.job.state


def line(job_id: str, text: str) -> LogLine:
    return LogLine(job_id, 1, T0, "info", text)


def ids(strides: Sequence[Stride]) -> list[str]:
    """The jobs that moved, in order."""
    return [job.job_id for stride in strides for job in stride.jobs]
