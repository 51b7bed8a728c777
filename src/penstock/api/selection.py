"""Which jobs are meant: the filters of a listing, and of operations on many."""

from __future__ import annotations

import math
from base64 import urlsafe_b64decode, urlsafe_b64encode
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from penstock.core.errors import InvalidRequest
from penstock.core.job import Job
from penstock.lifecycles.canonical import JobState
from penstock.ports.store import JobQuery

if TYPE_CHECKING:
    from penstock.ports.engine_api import EngineApi

Limit = Annotated[int, Meta(ge=1, le=1000)]
Seq = Annotated[int, Meta(ge=0, lt=1 << 62)]
_FARTHEST = 100_000
"""How far into a workflow the pages go: each reads all that come before it."""


class Order(StrEnum):
    NEWEST = "newest"
    OLDEST = "oldest"


class JobFilter(Struct, frozen=True, kw_only=True):
    """All conditions must hold."""

    job_id: str | None = None
    """A glob, as in `*4cw6`."""
    state: tuple[JobState, ...] = ()
    """May come several times: any of them."""
    topic: str | None = None
    """A glob, as in `job.text.*`."""
    tenant: str | None = None
    parent_job_id: str | None = None
    """The job that made it, or that it retries."""
    child_of: str | None = None
    """The first try of the job that it is a child of."""
    first_try: str | None = None
    """The tries of one job: that with this id and its retries."""
    workflow_id: str | None = None
    """Jobs of a workflow come in the order of their step_index instead."""
    label: tuple[str, ...] = ()
    """`name=value`; may come several times: all of them."""
    idempotency_key: str | None = None
    principal: str | None = None
    """Who submitted it."""
    schedule: str | None = None
    awaiting_approval: bool | None = None
    """True: only jobs that are awaiting approval; false: only those that are not."""
    accepted_from: float | None = None
    """Accepted at this time or later, in seconds since the epoch."""
    accepted_to: float | None = None
    """Accepted before this time."""


class JobListing(JobFilter, frozen=True, kw_only=True):
    dead: bool = False
    """Only what ended FAILED or TIMEOUT and was not retried."""
    tries: bool = False
    """Every try. Without it, the newest try of a job stands for all of them, and the filters are
    applied to it, unless they ask by `job_id`, `parent_job_id`, `first_try` or
    `idempotency_key`."""
    before: Seq | None = None
    """Only jobs with a lower `seq`."""
    since: Seq | None = None
    """Only jobs with a higher `seq`."""
    order: Order = Order.NEWEST
    limit: Limit = 50
    cursor: str | None = None
    """`next` of the page before."""


class DeadListing(JobFilter, frozen=True, kw_only=True):
    order: Order = Order.NEWEST
    limit: Limit = 50
    cursor: str | None = None
    """`next` of the page before."""


def query_of(given: JobFilter, *, dead: bool = False) -> JobQuery:
    return JobQuery(
        job_id=given.job_id,
        states=given.state,
        topic=given.topic,
        tenant=given.tenant,
        parent_job_id=given.parent_job_id,
        child_of=given.child_of,
        first_try=given.first_try,
        workflow_id=given.workflow_id,
        labels=_labels(given.label),
        idempotency_key=given.idempotency_key,
        principal=given.principal,
        schedule=given.schedule,
        awaiting_approval=given.awaiting_approval,
        dead=dead,
        accepted_from=given.accepted_from,
        accepted_to=given.accepted_to,
    )


def _labels(pairs: tuple[str, ...]) -> dict[str, str]:
    labels: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise InvalidRequest("label", f"{pair[:60]!r} is not name=value")
        if labels.setdefault(name, value) != value:
            raise InvalidRequest("label", f"{name[:60]!r} can't have two values at once")
    return labels


async def page_of(
    api: EngineApi, query: JobQuery, order: Order, limit: int, at: str | None
) -> tuple[list[Job], str | None]:
    """A page of jobs, and where the next one begins. Stable while jobs come in."""
    if query.by_step:
        return await _steps(api, query, limit, at)
    kind = order.value[0]
    place = place_in(kind, at)
    query = replace(query, limit=limit + 1, oldest_first=order is Order.OLDEST)
    if place is not None:
        here = {"since": place} if order is Order.OLDEST else {"before": place}
        query = replace(query, **here)
    jobs = await api.find(query)
    if len(jobs) <= limit:
        return jobs, None
    return jobs[:limit], cursor(kind, jobs[limit - 1].seq)


async def _steps(
    api: EngineApi, query: JobQuery, limit: int, at: str | None
) -> tuple[list[Job], str | None]:
    """A workflow is ordered by its steps, so its pages are counted."""
    start = place_in("w", at) or 0
    if start > _FARTHEST:
        raise InvalidRequest(
            "cursor",
            f"pages in the order of steps end after {_FARTHEST:,} jobs",
            hint="pass since=0&order=oldest to list the workflow in the order of submission",
        )
    jobs = await api.find(replace(query, limit=start + limit + 1))
    more = len(jobs) > start + limit
    return jobs[start : start + limit], cursor("w", start + limit) if more else None


class Place(Struct, frozen=True, array_like=True):
    order: str
    """n: newest first, o: oldest first, w: in the order of a workflow, a: the audit log."""
    at: int


class RunPlace(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Among runs of pipelines, newest first."""

    order: str
    """r"""
    created_at: float
    job_id: str


T = TypeVar("T")
_place = msgspec.msgpack.Decoder(Place)
_run_place = msgspec.msgpack.Decoder(RunPlace)
_encode = msgspec.msgpack.Encoder().encode
_LONGEST = 1000


def cursor(order: str, at: int) -> str:
    return _written(Place(order, at))


def run_cursor(created_at: float, job_id: str) -> str:
    return _written(RunPlace("r", created_at, job_id))


def _written(place: Any) -> str:
    return urlsafe_b64encode(_encode(place)).rstrip(b"=").decode("ascii")


def place_in(order: str, text: str | None) -> int | None:
    """Where to go on. Raises InvalidRequest for a cursor of another listing."""
    if text is None:
        return None
    place = _read(text, _place)
    if place.order != order or not 0 <= place.at < 1 << 62:
        raise InvalidRequest("cursor", "belongs to another listing", hint=_HINT)
    return place.at


def run_place(text: str | None) -> tuple[float, str] | None:
    """The same for runs: (created_at, job_id)."""
    if text is None:
        return None
    place = _read(text, _run_place)
    if place.order != "r" or not math.isfinite(place.created_at):
        raise InvalidRequest("cursor", "belongs to another listing", hint=_HINT)
    return place.created_at, place.job_id


def _read(text: str, decoder: msgspec.msgpack.Decoder[T]) -> T:
    try:
        if len(text) > _LONGEST:
            raise ValueError(text)
        return decoder.decode(urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4)))
    except (ValueError, msgspec.DecodeError, RecursionError):
        raise InvalidRequest("cursor", "is not one that a page gave", hint=_HINT) from None


_HINT = "pass `next` of the page before, with the same filters and order"
