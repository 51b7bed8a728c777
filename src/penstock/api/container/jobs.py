"""Submitting jobs, looking at them, and ending them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from penstock.api.call import JSON_TYPE
from penstock.api.container.facade import ContainerFacade, ContainerRecord
from penstock.api.container.views import (
    Absent,
    Accepted,
    Deleted,
    JobPage,
    JobRecord,
    Refusal,
    Wait,
    absent,
    answer,
    patience,
    record_view,
    refusal,
    summary_view,
)
from penstock.api.monitor import Closing
from penstock.api.operation import route
from penstock.api.problems import Refused, retry_after
from penstock.api.reply import Headers, Reply
from penstock.api.submit import header_key
from penstock.core.errors import InvalidRequest, TooLarge, TooMany
from penstock.lifecycles.container import ContainerJobState
from penstock.ports.operations import cursor, position
from penstock.workloads.container.job import ErrorCode, JobError, Rejected
from penstock.workloads.container.protocol.schema import JobBody

if TYPE_CHECKING:
    from penstock.api.call import Call

_ORDER = "c"
"""By which a cursor of this listing is known."""
_FILES = (b'"inputs"', b'"build"')
"""What a body that brings files has somewhere in it."""
_MAX_KEY = 255
_ENDED = "it has ended already"


class SubmitQuery(Struct, frozen=True):
    wait: Wait = 0.0
    """Seconds to wait for the job's end, at most 300; its record is answered then (200)."""


class ListQuery(Struct, frozen=True, kw_only=True):
    """Which jobs, newest first; all conditions must hold."""

    state: tuple[ContainerJobState, ...] = ()
    """May come several times."""
    label: str | None = None
    """`key:value`"""
    image: str | None = None
    """As it was given in the job."""
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
    def __init__(self, facade: ContainerFacade) -> None:
        self._facade = facade

    # -- submitting ---------------------------------------------------------------

    @route(
        "POST /jobs",
        query=SubmitQuery,
        body=JobBody,
        large=True,
        answer=Accepted,
        status=202,
        others={200: JobRecord, **dict.fromkeys((400, 408, 409, 413, 415, 429, 503), Refusal)},
    )
    async def submit_job(self, call: Call) -> Reply:
        """Submit a job.

        Answered once it is stored. With `wait`, once it has ended or the time is over, with its
        record. The same `Idempotency-Key` header again is the same job. A refusal says why in
        `error.code`; 409 is an id that is taken, 429 a full queue, 503 a worker that takes no jobs
        now (both with `Retry-After`). A body that is not `application/json` counts as missing.
        """
        try:
            wait = call.query(SubmitQuery).wait
            key = _key(call)
            stored = await self._facade.submit(await _body(call), key)
        except Rejected as rejected:
            seconds = rejected.retry_after
            headers: Headers = () if seconds is None else (retry_after(seconds),)
            error, job_id = rejected.error, rejected.job_id
            return refusal(error, job_id, rejected.status, headers)
        except TooLarge as error:
            return self._refused(ErrorCode.INVALID_BODY, f"the body {error.problem}", 413)
        except InvalidRequest as error:
            return self._refused(ErrorCode.INVALID_FIELD, error.problem, 400, field=error.field)
        except Refused as error:
            headers = error.headers
            return self._refused(
                ErrorCode.INVALID_BODY, error.message, error.status, headers=headers
            )
        record = await self._ended(call, stored.job_id, wait) if wait > 0 else None
        if record is not None:
            return answer(await record_view(self._facade, record))
        return answer(Accepted(True, stored.job_id, stored.state), 202)

    async def _ended(self, call: Call, job_id: str, wait: float) -> ContainerRecord | None:
        """None where there is no room to wait: the job is stored, and that must be answered."""
        try:
            with call.waiting():
                return await self._facade.wait(job_id, patience(wait))
        except (Closing, TooMany):
            return None

    def _refused(
        self, code: ErrorCode, message: str, status: int, *, field: str = "", headers: Headers = ()
    ) -> Reply:
        return refusal(JobError(code, message, field), None, status, headers)

    # -- looking ------------------------------------------------------------------

    @route("GET /jobs", query=ListQuery, answer=JobPage, refusals=(400,))
    async def list_jobs(self, call: Call) -> Reply:
        """List jobs.

        Newest first, in pages.
        """
        given = call.query(ListQuery)
        before = position(_ORDER, int, given.cursor)
        labels = _labels(given.label)
        found = await self._facade.find(given.state, labels, given.image, before, given.limit + 1)
        page = found[: given.limit]
        following = cursor(_ORDER, page[-1].job.seq) if len(found) > given.limit else None
        return answer({"jobs": [summary_view(one) for one in page], "next": following})

    @route(
        "GET /jobs/{job_id}",
        query=GetQuery,
        answer=JobRecord,
        others={404: Absent},
        refusals=(400, 429),
    )
    async def get_job(self, call: Call) -> Reply:
        """Get a job, or wait for its end.

        With `wait`, once it has ended or the time is over. Values of its environment are never
        shown.
        """
        job_id, wait = call.params["job_id"], call.query(GetQuery).wait
        if wait > 0:
            with call.waiting():
                record = await self._facade.wait(job_id, patience(wait))
        else:
            record = await self._facade.get(job_id)
        if record is None:
            return absent(job_id)
        return answer(await record_view(self._facade, record))

    @route(
        "DELETE /jobs/{job_id}",
        query=DeleteQuery,
        answer=Deleted,
        others={202: Deleted, 404: Absent},
        refusals=(400, 429),
    )
    async def delete_job(self, call: Call) -> Reply:
        """Cancel a job.

        200: a job that was queued has ended, `failed` with the code `CANCELLED`. 202: the container
        of a running job is being ended (`state` is still `running`), or the job had ended already
        and nothing was done. With `wait`, a running job is answered once its container is gone,
        with 200.
        """
        job_id, wait = call.params["job_id"], call.query(DeleteQuery).wait
        before = await self._facade.get(job_id)
        if before is None:
            return absent(job_id)
        if before.is_final:
            return answer(Deleted(job_id, before.state, _ENDED), 202)
        record = await self._facade.cancel(job_id)
        if record is not None and wait > 0 and not record.is_final:
            with call.waiting():
                record = await self._facade.wait(job_id, patience(wait), removed=True)
        if record is None:
            return absent(job_id)
        if not record.is_final:
            return answer(Deleted(job_id, record.state, "cancellation requested"), 202)
        if record.error is None or record.error.code != ErrorCode.CANCELLED:  # its end came first
            return answer(Deleted(job_id, record.state, _ENDED), 202)
        was_queued = before.state is ContainerJobState.QUEUED
        note = "cancelled while it was queued" if was_queued else "cancelled: its container is gone"
        return answer(Deleted(job_id, record.state, note))


def _key(call: Call) -> str:
    key = header_key(call)
    if len(key) > _MAX_KEY:
        raise InvalidRequest("Idempotency-Key", f"is longer than {_MAX_KEY} characters")
    return key


async def _body(call: Call) -> bytes:
    """The job. A body that is not said to be JSON counts as missing, as the protocol has it."""
    body = await call.body()
    most = call.services.options.max_body
    if len(body) > most and not any(name in body for name in _FILES):
        raise TooLarge("body", f"is longer than {most:,} bytes, and brings no files")
    given = call.header(b"content-type").partition(";")[0].strip().lower()
    return body if given == JSON_TYPE else b""


def _labels(text: str | None) -> dict[str, str]:
    if text is None:
        return {}
    key, colon, value = text.partition(":")
    if not (key and colon):
        raise InvalidRequest("label", "is not key:value", hint="as label=team:blue")
    return {key: value}
