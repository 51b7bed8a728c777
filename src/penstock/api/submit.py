"""Submit one job, many in one call, or a stream of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING

from msgspec import UNSET, Raw, Struct, UnsetType
from msgspec.structs import asdict, astuple

from penstock.api.monitor import Gone
from penstock.api.operation import Pace, route
from penstock.api.problems import Problem, problem_of
from penstock.api.reply import NO_STORE, Reply, StreamReply, encode
from penstock.api.table import bound, job_json, list_json, located
from penstock.core.errors import Conflict, InvalidRequest, PenstockError
from penstock.core.job import (
    NO_RETRY,
    Job,
    JobRequest,
    ParentPolicy,
    Priority,
    RetryPolicy,
    Unique,
)
from penstock.core.pointer import encode_data
from penstock.core.trace import TraceParent
from penstock.ports.engine_api import EngineApi, KeyRole, Submitted

if TYPE_CHECKING:
    from penstock.api.call import Call

INLINE = 4096
"""Bytes of input that ride in the pointer; more become a blob."""


class RetryFields(RetryPolicy, frozen=True, forbid_unknown_fields=True):
    """Which failures are tried again, how often, and after how long."""


class UniqueFields(Unique, frozen=True, forbid_unknown_fields=True):
    """At most one job with this key at a time, within a tenant."""


class Submission(Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """A job to submit. Only `topic` is required."""

    topic: str
    """The kind of work: `job.` and words separated by dots."""
    input: Raw | UnsetType = UNSET
    """Input, a JSON object; or a pointer to it in `context_ptr`."""
    context_ptr: str = ""
    """A pointer to the input: what POST /v1/blobs answered, or a place that is allowed."""
    job_id: str = ""
    """An id of your own; else one is made."""
    priority: Priority = Priority.BATCH
    adapter_id: str | None = None
    env: dict[str, str] = {}
    labels: dict[str, str] = {}
    parent_job_id: str | None = None
    child_of: str | None = None
    """First try of its parent job. If the parent does not succeed, this job is cancelled."""
    detached: bool = False
    """Keep it running if its parent does not succeed."""
    workflow_id: str | None = None
    step_index: int | None = None
    tenant: str | None = None
    """Only for keys that are of no tenant; else it is the key's own."""
    idempotency_key: str | None = None
    """The same key within a tenant is the same job. May be the Idempotency-Key header."""
    timeout: float | None = None
    """Seconds one attempt may run."""
    dispatch_timeout: float | None = None
    """Seconds a worker may hold the job before it starts."""
    deadline: float | None = None
    """The time by which it must have ended, in seconds since the epoch."""
    run_at: float | None = None
    """The time before which it must not start."""
    delay: float | None = None
    """Seconds from now before which it must not start; instead of `run_at`."""
    retry: RetryFields | None = None
    idempotent: bool = False
    """Whether it may safely run again after its worker was lost mid-run."""
    capability: str | None = None
    """Declared capability, for safety rules."""
    risk_tags: tuple[str, ...] = ()
    estimated_cost: float | None = None
    after: tuple[str, ...] = ()
    """Jobs that must have ended before this one may start."""
    if_parent_fails: ParentPolicy = ParentPolicy.CANCEL
    takes_results: bool = False
    """Whether `{"$result_of": "<job id>"}` in `input` stands for the result of a job in `after`."""
    unique: UniqueFields | None = None
    complete: bool = False
    """Do not apply the topic's defaults."""
    traceparent: str | None = None
    """W3C trace context. May be the traceparent header."""


async def request_of(call: Call, given: Submission, where: str = "", key: str = "") -> JobRequest:
    """The request as the EngineApi wants it; `where` it stands in the body, for errors."""
    pointer = given.context_ptr
    if given.input is not UNSET:
        payload = _payload(given, where)
        if payload and len(payload) <= INLINE:
            pointer = encode_data(payload)  # most are small: without a coroutine for each
        elif payload:
            pointer = await call.api.put_blob(payload)
    run_at = given.run_at
    if given.delay is not None:
        if run_at is not None:
            raise InvalidRequest(f"{where}delay", "can't be given together with run_at")
        run_at = call.services.clock.now() + given.delay
    fields = asdict(given)
    del fields["input"], fields["delay"]
    fields.update(
        context_ptr=pointer,
        run_at=run_at,
        tenant=given.tenant or call.tenant(),
        idempotency_key=agreed_key(given.idempotency_key, key),
        traceparent=given.traceparent or header_trace(call),
        retry=NO_RETRY if given.retry is None else RetryPolicy(*astuple(given.retry)),
        unique=None if given.unique is None else Unique(*astuple(given.unique)),
    )
    return JobRequest(**fields)


def _payload(given: Submission, where: str) -> bytes:
    """The input as JSON; empty if there is none."""
    assert isinstance(given.input, Raw)
    payload = bytes(given.input)
    if payload[:1] != b"{":
        if payload == b"null":
            return b""
        raise InvalidRequest(f"{where}input", "is not a JSON object")
    if given.context_ptr:
        raise InvalidRequest(f"{where}input", "can't be given together with context_ptr")
    return payload


async def pointer_to(api: EngineApi, payload: bytes) -> str:
    """A pointer to JSON: with the JSON in it, if that is small."""
    return encode_data(payload) if len(payload) <= INLINE else await api.put_blob(payload)


def header_key(call: Call) -> str:
    """What the Idempotency-Key header says; empty without one."""
    value = call.headers.get(b"idempotency-key")
    if value is None:
        return ""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest("Idempotency-Key", "is not UTF-8") from None


def header_trace(call: Call) -> str | None:
    """What the traceparent header says; one that is not valid is ignored, as W3C asks."""
    value = call.headers.get(b"traceparent")
    if value is None:
        return None
    found = TraceParent.parse(value.decode("latin-1").strip())
    return None if found is None else str(found)


def agreed_key(in_body: str | None, in_header: str) -> str | None:
    """The idempotency key, wherever it was given. Raises Conflict for two different ones."""
    if not in_header:
        return in_body
    if in_body not in (None, in_header):
        raise Conflict(
            "the Idempotency-Key header and idempotency_key in the body differ",
            hint="give one of them, or the same",
        )
    return in_header


NDJSON = "application/x-ndjson"
_CHUNK = 500
_MOST = 10_000


@bound("submit_job", body=Submission, answer=Job, others={200: Job})
async def submit_job(call: Call) -> Reply:
    given = await call.json(Submission, parsed_depth=1)
    request = await request_of(call, given, key=header_key(call))
    jobs = await call.api.submit((request,))
    (job,) = jobs
    was_there = isinstance(jobs, Submitted) and job.job_id not in jobs.new
    return Reply(job_json(job), 200 if was_there else 201, located(job))


class Batch(Struct, frozen=True, forbid_unknown_fields=True):
    jobs: tuple[Submission, ...]
    """At most 10,000."""


class Accepted(Struct, frozen=True):
    jobs: tuple[Job, ...]
    """In the order of the request."""


@bound("submit_batch", body=Batch, large=True, answer=Accepted)
async def submit_batch(call: Call) -> Reply:
    batch = await call.json(Batch, parsed_depth=3)
    if len(batch.jobs) > _MOST:
        raise InvalidRequest("jobs", f"{len(batch.jobs)} at once; at most {_MOST} are allowed")
    requests = [
        await request_of(call, given, f"jobs[{index}].") for index, given in enumerate(batch.jobs)
    ]
    jobs = await call.api.submit(requests) if requests else []
    return Reply(b'{"jobs":%b}' % list_json(jobs), 201)


# -- a stream ---------------------------------------------------------------------


class LineAnswer(Struct, frozen=True, omit_defaults=True):
    """One for each line, in order: the job's id, or what is wrong."""

    job_id: str = ""
    problem: Problem | None = None


@route(
    "POST /v1/jobs/stream",
    role=KeyRole.SUBMIT,
    body=Submission,
    body_type=NDJSON,
    answer=LineAnswer,
    answer_type=NDJSON,
    refusals=(415, 429),
    pace=Pace.STREAMS,
)
async def submit_stream(call: Call) -> StreamReply:
    """Submit a stream of jobs.

    A line in is a job, a line out its id or what is wrong with it, in the same order. What has
    arrived is submitted together, up to 500 at once; a bad line ends nothing. The next lines
    are taken in when those before are answered, so read while you write.
    """
    call.check_type(NDJSON)
    headers = ((b"content-type", NDJSON.encode()), NO_STORE)
    return StreamReply(_answers(call), headers, 200, watched=False)


async def _answers(call: Call) -> AsyncGenerator[bytes, None]:
    """Reads further lines only when the earlier ones are answered."""
    try:
        async for lines in _lines(call.parts(), call.services.options.max_body):
            for start in range(0, len(lines), _CHUNK):
                answers = await _take_in(call, lines[start : start + _CHUNK])
                yield b"".join([encode(answer) + b"\n" for answer in answers])
    except Gone:
        return
    except PenstockError as error:  # the body itself: too slow, or a line without an end
        yield encode(LineAnswer(problem=problem_of(error))) + b"\n"


async def _lines(parts: AsyncIterator[bytes], most: int) -> AsyncIterator[list[bytes]]:
    """What has arrived, in whole lines; empty ones are passed over."""
    rest: list[bytes] = []
    size = 0
    async for part in parts:
        head, newline, tail = part.rpartition(b"\n")
        if newline:
            whole = b"".join([*rest, head]).split(b"\n")
            rest, size = ([tail] if tail else []), len(tail)
            yield [line for line in whole if line and not line.isspace()]
        else:
            rest.append(part)
            size += len(part)
        if size > most:
            raise InvalidRequest("line", f"is longer than {most:,} bytes")
    if last := b"".join(rest).strip():
        yield [last]


async def _take_in(call: Call, lines: list[bytes]) -> list[LineAnswer]:
    answers: list[LineAnswer] = [_NONE] * len(lines)
    good: list[tuple[int, JobRequest]] = []
    for index, line in enumerate(lines):
        try:
            given = await call.read(line, Submission, parsed_depth=1)
            good.append((index, await request_of(call, given)))
        except PenstockError as error:
            answers[index] = LineAnswer(problem=problem_of(error))
    await _submit(call, good, answers)
    return answers


_NONE = LineAnswer()


async def _submit(
    call: Call, good: list[tuple[int, JobRequest]], answers: list[LineAnswer]
) -> None:
    """All of them or, where one is refused, half by half until it is found."""
    if not good:
        return
    try:
        jobs = await call.api.submit([request for _, request in good])
    except PenstockError as error:
        if len(good) == 1:
            answers[good[0][0]] = LineAnswer(problem=problem_of(error))
            return
        half = len(good) // 2
        await _submit(call, good[:half], answers)
        await _submit(call, good[half:], answers)
        return
    for (index, _), job in zip(good, jobs, strict=True):
        answers[index] = LineAnswer(job.request.job_id)
