"""A job as JSON: its record, with its id first."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Raw, Struct

from penstock.api.reply import Headers, Reply, encode
from penstock.core.job import Job


def job_json(job: Job) -> bytes:
    # An id has no character that JSON would want escaped (penstock.core.check).
    return b'{"job_id":"%b",%b' % (job.request.job_id.encode(), encode(job)[1:])


def raw(job: Job) -> Raw:
    """For an answer that has a job within it."""
    return Raw(job_json(job))


def list_json(jobs: Iterable[Job]) -> bytes:
    return b"[%b]" % b",".join([job_json(job) for job in jobs])


def job_reply(job: Job, status: int = 200) -> Reply:
    return Reply(job_json(job), status)


class JobPage(Struct, frozen=True):
    jobs: tuple[Job, ...]
    next: str | None
    """The `cursor` of the next page; null on the last."""


class CancelView(Struct, frozen=True):
    job: Job
    ended: bool
    """False while a worker still holds work that was asked to end."""


def located(job: Job) -> Headers:
    return (
        (b"content-type", b"application/json"),
        (b"cache-control", b"no-store"),
        (b"location", b"/v1/jobs/" + job.request.job_id.encode()),
    )
