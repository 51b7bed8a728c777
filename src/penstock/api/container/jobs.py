"""Looking at jobs and ending them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from penstock.api.container.answers import answer
from penstock.api.container.views import Absent, Deleted, JobPage, JobRecord
from penstock.api.container.waits import Wait, patience
from penstock.api.container.wording import Wording
from penstock.api.operation import Operation
from penstock.api.reply import Reply
from penstock.api.selection import cursor, place_in
from penstock.core.errors import InvalidRequest
from penstock.lifecycles.container import ContainerJobState
from penstock.workloads.container.job import Code, ContainerRecord
from penstock.workloads.container.store import ContainerApi, RecordQuery

if TYPE_CHECKING:
    from penstock.api.call import Call

_ORDER = "c"
"""By which a cursor of this listing is known."""


class ListQuery(Struct, frozen=True, kw_only=True):
    """Which jobs, newest first; all conditions must hold."""

    state: tuple[ContainerJobState, ...] = ()
    """May come several times."""
    label: str | None = None
    """`key:value`"""
    image: str | None = None
    """As it was given in the job."""
    code: str | None = None
    """Of the error."""
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    cursor: str | None = None
    """`next` of the page before."""


class GetQuery(Struct, frozen=True):
    wait: Wait = 0.0
    """Seconds to wait for the job's end, at most 300."""


class DeleteQuery(Struct, frozen=True):
    wait: Wait = 0.0
    """Seconds to wait until its container is gone, at most 300."""


class Jobs:
    def __init__(self, api: ContainerApi, wording: Wording) -> None:
        self._api, self._wording = api, wording

    async def list_jobs(self, call: Call) -> Reply:
        given = call.query(ListQuery)
        query = RecordQuery(
            states=given.state,
            label=_label(given.label),
            image=given.image,
            code=given.code,
            before=place_in(_ORDER, given.cursor),
            limit=given.limit + 1,
        )
        found = await self._api.find(query)
        page = found[: given.limit]
        following = cursor(_ORDER, page[-1].seq) if len(found) > given.limit else None
        return answer({"jobs": [self._wording.summary(one) for one in page], "next": following})

    async def get_job(self, call: Call) -> Reply:
        job_id, wait = call.params["job_id"], call.query(GetQuery).wait
        if wait > 0:
            with call.waiting():
                record = await self._api.wait(job_id, patience(wait))
        else:
            record = await self._api.get(job_id)
        if record is None:
            return absent(job_id)
        return answer(await self._wording.record(self._api, record))

    async def delete_job(self, call: Call) -> Reply:
        job_id, wait = call.params["job_id"], call.query(DeleteQuery).wait
        before = await self._api.get(job_id)
        cancelled = None if before is None else await self._api.cancel(job_id)
        if before is None or cancelled is None:
            return absent(job_id)
        record, note = cancelled.record, cancelled.note
        ended = not before.is_final and _was_cancelled_waiting(record)
        if wait > 0 and not record.is_final:
            with call.waiting():
                record = await self._api.wait(job_id, patience(wait)) or record
            ended = record.is_final
            note = "cancelled: its container is gone" if ended else note
        return answer(Deleted(job_id, record.state, note), 200 if ended else 202)


def absent(job_id: str) -> Reply:
    return answer(Absent(job_id), 404)


def _was_cancelled_waiting(record: ContainerRecord) -> bool:
    cancelled = record.error is not None and record.error.code == Code.CANCELLED
    return cancelled and record.started_at is None


def _label(text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    key, colon, value = text.partition(":")
    if not (key and colon):
        raise InvalidRequest("label", "is not key:value", hint="as label=team:blue")
    return key, value


def operations(api: ContainerApi, wording: Wording) -> tuple[Operation, ...]:
    these = Jobs(api, wording)
    return (
        Operation(
            "GET",
            "/jobs",
            these.list_jobs,
            query=ListQuery,
            answer=JobPage,
            refusals=(400,),
            summary="List jobs",
            description="Newest first, in pages.",
        ),
        Operation(
            "GET",
            "/jobs/{job_id}",
            these.get_job,
            query=GetQuery,
            answer=JobRecord,
            others={404: Absent},
            refusals=(400, 429),
            summary="Get a job, or wait for its end",
            description=(
                "With `wait`, once it has ended or the time is over. Values of its environment "
                "are never shown."
            ),
        ),
        Operation(
            "DELETE",
            "/jobs/{job_id}",
            these.delete_job,
            query=DeleteQuery,
            answer=Deleted,
            others={202: Deleted, 404: Absent},
            refusals=(400, 429),
            summary="Cancel a job",
            description=(
                "200: a job that was queued has ended, `failed` with the code `CANCELLED`. 202: "
                "the container of a running job is being ended (`state` is still `running`), or "
                "the job had ended already and nothing was done. With `wait`, a running job is "
                "answered once its container is gone, with 200."
            ),
        ),
    )
