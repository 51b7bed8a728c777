"""Submitting a job: `POST /jobs`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct

from penstock.api.call import JSON_TYPE
from penstock.api.container.answers import answer, retry_after
from penstock.api.container.views import Accepted, JobRecord, Refusal
from penstock.api.container.waits import Wait, patience
from penstock.api.container.wording import Wording
from penstock.api.monitor import Closing
from penstock.api.operation import Operation
from penstock.api.problems import Refused
from penstock.api.reply import Headers, Reply
from penstock.api.submit import header_key
from penstock.core.errors import InvalidRequest, TooLarge, TooMany
from penstock.workloads.container.job import (
    Code,
    ContainerRecord,
    InputFile,
    JobError,
    Priority,
    Rejected,
)
from penstock.workloads.container.store import ContainerApi, Receipt

if TYPE_CHECKING:
    from penstock.api.call import Call

_FILES = (b'"inputs"', b'"build"')
"""What a body that brings files has somewhere in it."""
_LONGEST_KEY = 255

Amount = Annotated[float, Meta(gt=0)]
Number = Annotated[int, Meta(gt=0)]


class SubmitQuery(Struct, frozen=True):
    wait: Wait = 0.0
    """Seconds to wait for the job's end, at most 300; its record is answered then (200)."""


class LimitsBody(Struct, frozen=True, kw_only=True):
    """What the job may use. `GET /info` tells what it gets where it says nothing, and the most
    that it can ask for."""

    memory_mb: Amount | None = None
    """Memory, and no swap beyond it."""
    max_runtime_seconds: Amount | None = None
    cpus: Amount | None = None
    pids: Number | None = None
    max_output_bytes: Number | None = None
    """Bytes of each of the two streams that are kept, half from the start, half from the end."""
    tmp_mb: Amount | None = None
    """Size of /tmp, which is memory."""
    max_artifact_bytes: Number | None = None
    """Bytes that the output folder may hold in all."""
    pull_seconds: Amount | None = None
    """Seconds that fetching the image may take, and again its files; they don't count as run
    time."""


class TextBody(Struct, frozen=True):
    text: str


class BuildBody(Struct, frozen=True):
    """An image that is made for this job and removed after it."""

    dockerfile: str
    """Its text."""
    context: list[InputFile] = []


class RuntimeBody(Struct, frozen=True, kw_only=True):
    """How the job is run."""

    mode: Literal["image", "build"]
    """`build` where the worker allows it."""
    image: str | None = None
    """Needed for mode `image`."""
    cmd: list[str] | None = None
    """Put after the image's entrypoint; none means the image's own command."""
    env: dict[str, str] | None = None
    limits: LimitsBody | None = None
    stdin: Literal["job", "payload", "none"] | TextBody | None = None
    """What the container reads: the whole job as compact JSON (the default), `task.payload`,
    nothing, or a text."""
    network: bool | None = None
    """Where the worker's rules list the image."""
    user: int | str | None = None
    """A uid, or `uid:gid`; 0 only where the rules list the image."""
    workdir: str | None = None
    """Absolute; the image's own without it."""
    runtime: str | None = None
    """One that the worker offers, and no weaker than its own."""
    build: BuildBody | None = None
    """For mode `build`."""


class JobBody(Struct, frozen=True, kw_only=True):
    """A job as the protocol has it, and more; fields that nobody knows are kept and passed on."""

    protocol_version: Literal[1]
    job_id: str
    """Unique on this worker, chosen by the caller."""
    runtime: RuntimeBody
    task: dict[str, Any] | None = None
    """`type` and a free `payload`, for the container."""
    inputs: list[InputFile] | None = None
    """Files below `/input`, which can't be written to."""
    outputs: bool | None = None
    """Whether it has a folder `/output`, of which artifacts are collected."""
    priority: Priority | None = None
    labels: dict[str, str] | None = None


class Submissions:
    def __init__(self, api: ContainerApi, wording: Wording) -> None:
        self._api, self._wording = api, wording

    async def submit_job(self, call: Call) -> Reply:
        try:
            wait = call.query(SubmitQuery).wait
            key = _key(call)
            receipt = await self._api.submit(await _body(call), key)
        except Rejected as rejected:
            return self._rejected(rejected)
        except TooLarge as error:
            return self._refused(Code.INVALID_BODY, f"the body {error.problem}", 413)
        except InvalidRequest as error:
            return self._refused(Code.INVALID_FIELD, error.problem, 400, field=error.field)
        except Refused as error:
            headers = error.headers
            return self._refused(Code.INVALID_BODY, error.message, error.status, headers=headers)
        record = await self._ended(call, receipt, wait) if wait > 0 else None
        if record is not None:
            return answer(await self._wording.record(self._api, record))
        return answer(Accepted(True, receipt.job_id, receipt.state), 202)

    async def _ended(self, call: Call, receipt: Receipt, wait: float) -> ContainerRecord | None:
        """None where there is no place to wait: the job is stored, and that must be told."""
        try:
            with call.waiting():
                return await self._api.wait(receipt.job_id, patience(wait))
        except (Closing, TooMany):
            return None

    def _rejected(self, rejected: Rejected) -> Reply:
        headers = () if rejected.retry_after is None else (retry_after(rejected.retry_after),)
        return self._wording.refusal(rejected.error, rejected.job_id, rejected.status, headers)

    def _refused(
        self, code: Code, message: str, status: int, *, field: str = "", headers: Headers = ()
    ) -> Reply:
        return self._wording.refusal(JobError(code, message, field), None, status, headers)


def _key(call: Call) -> str:
    key = header_key(call)
    if len(key) > _LONGEST_KEY:
        raise InvalidRequest("Idempotency-Key", f"is longer than {_LONGEST_KEY} characters")
    return key


async def _body(call: Call) -> bytes:
    """The job. A body that is not said to be JSON counts as missing, as the protocol has it."""
    body = await call.body()
    most = call.services.options.max_body
    if len(body) > most and not any(name in body for name in _FILES):
        raise TooLarge("body", f"is longer than {most:,} bytes, and brings no files")
    given = call.header(b"content-type").partition(";")[0].strip().lower()
    return body if given == JSON_TYPE else b""


def operations(api: ContainerApi, wording: Wording) -> tuple[Operation, ...]:
    these = Submissions(api, wording)
    return (
        Operation(
            "POST",
            "/jobs",
            these.submit_job,
            query=SubmitQuery,
            body=JobBody,
            large=True,
            answer=Accepted,
            status=202,
            others={
                200: JobRecord,
                400: Refusal,
                408: Refusal,
                409: Refusal,
                413: Refusal,
                415: Refusal,
                429: Refusal,
                503: Refusal,
            },
            summary="Submit a job",
            description=(
                "Answered once it is stored. With `wait`, once it has ended or the time is over, "
                "with its record. The same `Idempotency-Key` header again is the same job. A "
                "refusal says why in `error.code`; 409 is an id that is taken, 429 a full queue, "
                "503 a worker that takes no jobs now (both with `Retry-After`). A body that is not "
                "`application/json` counts as missing."
            ),
        ),
    )
