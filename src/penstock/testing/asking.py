"""Short questions to a store, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.control.ledger import Ledger
from penstock.core.job import Job
from penstock.core.journal import Stride
from penstock.core.ledger import Answer, ChangeOutcome
from penstock.lifecycles.canonical import JobState
from penstock.ports.store import JobQuery, LogLine
from penstock.testing.samples import T0


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
