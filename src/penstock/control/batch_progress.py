"""Where the lines of one batch stand, told by what happens to their jobs.

A line's job has the batch's id and the line's number in its own id, so that submitting it again
is harmless and asking for it needs no index. Retries follow it by `successor`.
"""

from __future__ import annotations

from penstock.core.errors import InvalidRequest, PenstockError
from penstock.core.job import Job
from penstock.lifecycles.canonical import JobState
from penstock.ports.batches import BatchError, RequestCounts

LATE = "DEADLINE_EXCEEDED"
"""The error code of a job that ended because its batch's time was over."""


def job_id_of(batch_id: str, number: int) -> str:
    return f"{batch_id}.{number:05}"


class Progress:
    """Knows the jobs that have not ended by their ids: no other job can pass for one."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.completed = self.failed = 0
        self.live: dict[str, int] = {}
        """The line of each job that was looked for or submitted, and is not known to have ended."""
        self.refused: list[BatchError] = []
        """Lines that could not be made jobs."""
        self.was_late = False

    @property
    def counts(self) -> RequestCounts:
        return RequestCounts(self.total, self.completed, self.failed)

    def expect(self, number: int, job_id: str) -> None:
        """Before the job is asked for or submitted, so that no news of it is missed."""
        self.live[job_id] = number

    def is_not_there(self, job_id: str) -> None:
        self.live.pop(job_id, None)

    def note(self, job: Job) -> bool:
        """Take notice of a job's end; False if it was known, or it has not ended."""
        if not job.is_final or (number := self.live.pop(job.job_id, None)) is None:
            return False
        if job.successor is not None:
            self.live[job.successor] = number
        elif job.state is JobState.SUCCEEDED:
            self.completed += 1
        else:
            self.failed += 1
            self.was_late |= job.result is not None and job.result.error_code == LATE
        return True

    def refuse(self, number: int, job_id: str, error: PenstockError) -> None:
        self.live.pop(job_id, None)
        self.failed += 1
        field = error.field if isinstance(error, InvalidRequest) else None
        self.refused.append(
            BatchError(code=error.code.lower(), message=str(error), line=number, param=field)
        )
