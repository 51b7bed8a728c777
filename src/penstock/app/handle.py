"""A job, as its submitter holds it.

Every method has an async twin with an `a` before its name. `await job` is `await
job.aresult()`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any, TypeVar

import msgspec

from penstock.app.portal import Portal
from penstock.core.errors import JobCancelled, JobDenied, JobEnded, JobFailed, JobTimedOut
from penstock.core.job import Job
from penstock.core.transition import Transition
from penstock.lifecycles.canonical import JobState
from penstock.ports.desk import Cancellation, Desk, JobUpdate
from penstock.ports.store import LogLine

T = TypeVar("T")

_ERRORS: dict[JobState, type[JobEnded]] = {
    JobState.FAILED: JobFailed,
    JobState.CANCELLED: JobCancelled,
    JobState.DENIED: JobDenied,
    JobState.TIMEOUT: JobTimedOut,
}


async def result_of(desk: Desk, job: Job) -> Any:
    """What an ended job returned; raises the JobEnded of any other end."""
    if job.state is not JobState.SUCCEEDED:
        raise _ERRORS[job.state](job)
    pointer = job.result.result_ptr if job.result is not None else None
    return msgspec.json.decode(await desk.get_blob(pointer)) if pointer else None


class JobHandle:
    """One submitted job."""

    def __init__(self, desk: Desk, portal: Portal, job: Job) -> None:
        self._desk, self._portal = desk, portal
        self.record = job
        """The record as it was when it was last looked at."""

    @property
    def job_id(self) -> str:
        return self.record.request.job_id

    def __repr__(self) -> str:
        return f"<job {self.job_id} {self.record.state}>"

    # -- how it ended -------------------------------------------------------------

    def result(self, timeout: float | None = None) -> Any:
        """Wait, following retries, and return what the job returned.

        Raises JobFailed, JobCancelled, JobDenied, JobTimedOut; WaitTimedOut if `timeout`
        seconds were not enough.
        """
        return self._portal.run(self._result(timeout))

    async def aresult(self, timeout: float | None = None) -> Any:
        return await self._portal.arun(self._result(timeout))

    def __await__(self) -> Generator[Any, None, Any]:
        return self.aresult().__await__()

    async def _result(self, timeout: float | None) -> Any:
        return await result_of(self._desk, await self._wait(timeout))

    def wait(self, timeout: float | None = None) -> Job:
        """Wait, following retries, and return the final record, however it ended."""
        return self._portal.run(self._wait(timeout))

    async def await_end(self, timeout: float | None = None) -> Job:
        return await self._portal.arun(self._wait(timeout))

    async def _wait(self, timeout: float | None) -> Job:
        return await self._desk.wait(self.job_id, timeout)

    # -- where it is --------------------------------------------------------------

    def refresh(self) -> Job:
        """Look at the record again."""
        self.record = self._portal.run(self._desk.get(self.job_id))
        return self.record

    async def arefresh(self) -> Job:
        self.record = await self._portal.arun(self._desk.get(self.job_id))
        return self.record

    @property
    def state(self) -> JobState:
        """Looks again, as `refresh` does; in async code it is `(await job.arefresh()).state`."""
        return self.refresh().state

    def why(self) -> str:
        """What it waits for, or what is happening to it."""
        return self._portal.run(self._desk.why(self.job_id))

    async def awhy(self) -> str:
        return await self._portal.arun(self._desk.why(self.job_id))

    def history(self) -> list[Transition]:
        return self._portal.run(self._desk.history(self.job_id))

    async def ahistory(self) -> list[Transition]:
        return await self._portal.arun(self._desk.history(self.job_id))

    def logs(self, after: int = 0) -> list[LogLine]:
        return self._portal.run(self._desk.read_log(self.job_id, after))

    async def alogs(self, after: int = 0) -> list[LogLine]:
        return await self._portal.arun(self._desk.read_log(self.job_id, after))

    def follow(self) -> Iterator[JobUpdate]:
        """Log lines, progress and moves as they happen, until the job has ended."""
        return each(self._desk.follow(self.job_id), self._portal)

    def afollow(self) -> AsyncIterator[JobUpdate]:
        return aeach(self._desk.follow(self.job_id), self._portal)

    # -- ending it ----------------------------------------------------------------

    def cancel(
        self, reason: str = "", *, children: bool = False, timeout: float = 10.0
    ) -> Cancellation:
        """End it, and wait until it has ended or `timeout` seconds have passed."""
        return self._portal.run(self._cancel(reason, children, timeout))

    async def acancel(
        self, reason: str = "", *, children: bool = False, timeout: float = 10.0
    ) -> Cancellation:
        return await self._portal.arun(self._cancel(reason, children, timeout))

    async def _cancel(self, reason: str, children: bool, timeout: float) -> Cancellation:
        return await self._desk.cancel(
            self.job_id, reason=reason, children=children, timeout=timeout
        )

    # -- letting it pass ----------------------------------------------------------

    def approve(self, reason: str = "") -> Job:
        """Say yes to it, if the safety rules parked it."""
        return self._portal.run(self._desk.approvals.approve(self.job_id, reason=reason))

    async def aapprove(self, reason: str = "") -> Job:
        return await self._portal.arun(self._desk.approvals.approve(self.job_id, reason=reason))

    def reject(self, reason: str = "") -> Job:
        """Say no to it: it ends DENIED."""
        return self._portal.run(self._desk.approvals.reject(self.job_id, reason=reason))

    async def areject(self, reason: str = "") -> Job:
        return await self._portal.arun(self._desk.approvals.reject(self.job_id, reason=reason))

    # -- once more ----------------------------------------------------------------

    def retry(self) -> JobHandle:
        """Submit it again as a new job, after it ended badly."""
        return JobHandle(self._desk, self._portal, self._portal.run(self._desk.retry(self.job_id)))

    async def aretry(self) -> JobHandle:
        job = await self._portal.arun(self._desk.retry(self.job_id))
        return JobHandle(self._desk, self._portal, job)


def each(values: AsyncIterator[T], portal: Portal) -> Iterator[T]:
    """An engine's stream, read from any thread."""
    try:
        while (value := portal.run(_next(values))) is not None:
            yield value
    finally:
        portal.run(_close(values))


async def aeach(values: AsyncIterator[T], portal: Portal) -> AsyncIterator[T]:
    """An engine's stream, read from any event loop."""
    try:
        while (value := await portal.arun(_next(values))) is not None:
            yield value
    finally:
        await portal.arun(_close(values))


async def _next(values: AsyncIterator[T]) -> T | None:
    return await anext(values, None)


async def _close(values: AsyncIterator[T]) -> None:
    await values.aclose()  # type: ignore[attr-defined]
