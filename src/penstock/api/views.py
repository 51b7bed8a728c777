"""Records as JSON shows them, where that is not how they are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any

from msgspec import Meta, Raw

from penstock.api.reply import JSON_HEADERS, Headers, encode
from penstock.core.job import Job
from penstock.ports.engine_api import Cancellation, Ended
from penstock.workloads.pipeline.interface import ItemView, item_view
from penstock.workloads.pipeline.records import ItemRecord

Seconds = Annotated[float, Meta(ge=0, le=60.0)]
"""How long one request may wait."""
_PAGES = b',"pages":'


def job_json(job: Job) -> bytes:
    # An id has no character that JSON would want escaped (penstock.core.check). Its journal
    # pages, the last field, are the engine's own business.
    body = encode(job)
    return b'{"job_id":"%b",%b}' % (job.request.job_id.encode(), body[1 : body.rindex(_PAGES)])


def raw(job: Job) -> Raw:
    """For an answer that has a job within it."""
    return Raw(job_json(job))


def list_json(jobs: Iterable[Job]) -> bytes:
    return b"[%b]" % b",".join([job_json(job) for job in jobs])


def located(job: Job) -> Headers:
    return (*JSON_HEADERS, (b"location", b"/v1/jobs/" + job.request.job_id.encode()))


VIEWS: dict[type, tuple[type, Callable[[Any], Any]]] = {
    Job: (Job, raw),
    Cancellation: (Cancellation, lambda one: {"job": raw(one.job), "ended": one.ended}),
    Ended: (Ended, lambda one: {"job_id": one.job_id, "job": raw(one.job)}),
    ItemRecord: (ItemView, item_view),
}
"""By the type of a record: the type that the OpenAPI document shows, and what makes the JSON."""
