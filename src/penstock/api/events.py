"""What happens, as server-sent events; the streams themselves are in `stream`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from penstock.api.frames import EventFilter
from penstock.api.operation import Operation, Pace
from penstock.api.reply import StreamReply
from penstock.api.stream import cursor_of, place_of
from penstock.lifecycles.canonical import JobEvent, JobState

if TYPE_CHECKING:
    from penstock.api.call import Call

_TYPE = "text/event-stream"


class EventQuery(Struct, frozen=True, kw_only=True):
    """Which events; all conditions must hold."""

    after: str | None = None
    """The id of an event: what came after it is told first. Last-Event-ID wins."""
    topic: str | None = None
    """A glob, as in `job.text.*`."""
    state: tuple[JobState, ...] = ()
    """Only moves into one of these; may come several times."""
    event: tuple[JobEvent, ...] = ()
    """May come several times."""
    job_id: str | None = None
    tenant: str | None = None


async def stream_events(call: Call) -> StreamReply:
    query = call.query(EventQuery)
    wanted = EventFilter(
        topic=query.topic,
        state=query.state,
        event=query.event,
        job_id=query.job_id,
        tenant=query.tenant,
    )
    place = resumed(call, query.after)
    after = None if place is None else cursor_of(place, _FIELD)
    return await call.services.events.journal(call.api, wanted, after)


class JobEventQuery(Struct, frozen=True):
    after: str | None = None
    """The number of an entry of its history: those after it are told. Last-Event-ID wins."""


async def stream_job_events(call: Call) -> StreamReply:
    place = resumed(call, call.query(JobEventQuery).after)
    after = 0 if place is None else cursor_of(place, _FIELD)
    return await call.services.events.job(call.api, call.params["job_id"], after)


class UpdateQuery(Struct, frozen=True):
    after: str | None = None
    """The id of an update: what came after it is told first. Last-Event-ID wins."""
    after_log: int = 0
    """The `n` of the last log line that is known, for a first call."""


async def stream_updates(call: Call) -> StreamReply:
    query = call.query(UpdateQuery)
    place = resumed(call, query.after)
    after = None if place is None else place_of(place, _FIELD)
    return await call.services.events.updates(
        call.api, call.params["job_id"], after, max(0, query.after_log)
    )


_FIELD = "after"


def resumed(call: Call, after: str | None) -> str | None:
    """Where the reader was: a browser that comes back says it in a header."""
    return call.header(b"last-event-id") or after


OPERATIONS = (
    Operation(
        "GET",
        "/v1/events",
        stream_events,
        query=EventQuery,
        answer=bytes,
        answer_type=_TYPE,
        refusals=(422, 429),
        pace=Pace.STREAMS,
        summary="Follow everything that happens",
        description=(
            "One event a transition, with its place in the journal as `id`. A reader that comes "
            "back with the last id it saw gets what came since: no gap, no repeat."
        ),
    ),
    Operation(
        "GET",
        "/v1/jobs/{job_id}/events",
        stream_job_events,
        query=JobEventQuery,
        answer=bytes,
        answer_type=_TYPE,
        refusals=(404, 422, 429),
        pace=Pace.STREAMS,
        summary="Follow a job's history",
        description="From its first entry on, or after one; ends with the job.",
    ),
    Operation(
        "GET",
        "/v1/jobs/{job_id}/updates",
        stream_updates,
        query=UpdateQuery,
        answer=bytes,
        answer_type=_TYPE,
        refusals=(404, 422, 429),
        pace=Pace.STREAMS,
        summary="Follow what a job says",
        description=(
            "Its log lines so far, then `log`, `progress`, `piece` and `moved` until its `end`."
        ),
    ),
)
