"""Submitting: one job, many in one call, and a stream of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING

from msgspec import Struct

from penstock.api.body import Gone
from penstock.api.operation import Operation, Pace
from penstock.api.problems import Problem, problem_of
from penstock.api.records import job_json, list_json, located
from penstock.api.reply import NO_STORE, Reply, StreamReply, encode
from penstock.api.submission import Submission, header_key, request_of
from penstock.core.caller import KeyRole
from penstock.core.errors import InvalidRequest, PenstockError
from penstock.core.job import Job, JobRequest
from penstock.ports.desk import Submitted

if TYPE_CHECKING:
    from penstock.api.call import Call

NDJSON = "application/x-ndjson"
_CHUNK = 500
_MOST = 10_000


async def submit_job(call: Call) -> Reply:
    given = await call.json(Submission, parsed_depth=1)
    request = await request_of(call, given, key=header_key(call))
    jobs = await call.desk.submit((request,))
    (job,) = jobs
    was_there = isinstance(jobs, Submitted) and job.job_id not in jobs.new
    return Reply(job_json(job), 200 if was_there else 201, located(job))


class Batch(Struct, frozen=True, forbid_unknown_fields=True):
    jobs: tuple[Submission, ...]
    """At most 10,000."""


class Accepted(Struct, frozen=True):
    jobs: tuple[Job, ...]
    """In the order of the request."""


async def submit_batch(call: Call) -> Reply:
    batch = await call.json(Batch, parsed_depth=3)
    if len(batch.jobs) > _MOST:
        raise InvalidRequest("jobs", f"{len(batch.jobs)} at once; at most {_MOST} are allowed")
    requests = [
        await request_of(call, given, f"jobs[{index}].") for index, given in enumerate(batch.jobs)
    ]
    jobs = await call.desk.submit(requests) if requests else []
    return Reply(b'{"jobs":%b}' % list_json(jobs), 201)


# -- a stream ---------------------------------------------------------------------


class LineAnswer(Struct, frozen=True, omit_defaults=True):
    """One for each line, in order: the job's id, or what is wrong."""

    job_id: str = ""
    problem: Problem | None = None


async def submit_stream(call: Call) -> StreamReply:
    call.check_type(NDJSON)
    headers = ((b"content-type", NDJSON.encode()), NO_STORE)
    return StreamReply(_answers(call), headers, 200, watched=False)


async def _answers(call: Call) -> AsyncGenerator[bytes, None]:
    """Takes in the next lines only when those before are answered."""
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
        jobs = await call.desk.submit([request for _, request in good])
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


OPERATIONS = (
    Operation(
        "POST",
        "/v1/jobs",
        submit_job,
        role=KeyRole.SUBMIT,
        body=Submission,
        answer=Job,
        status=201,
        others={200: Job},
        refusals=(409, 413, 415, 422, 429),
        summary="Submit a job",
        description=(
            "Answers when the job is durable. A request that was accepted before (same `job_id`, "
            "or same tenant and idempotency key) is answered with 200 and the job it became; a "
            "different request with the same id or key is a conflict."
        ),
    ),
    Operation(
        "POST",
        "/v1/jobs/batch",
        submit_batch,
        role=KeyRole.SUBMIT,
        body=Batch,
        large=True,
        answer=Accepted,
        status=201,
        refusals=(409, 413, 415, 422, 429),
        summary="Submit many jobs, all or none",
        description="One commit. If one of them is refused, nothing is stored.",
    ),
    Operation(
        "POST",
        "/v1/jobs/stream",
        submit_stream,
        role=KeyRole.SUBMIT,
        body=Submission,
        body_type=NDJSON,
        answer=LineAnswer,
        answer_type=NDJSON,
        refusals=(415, 429),
        pace=Pace.STREAMS,
        summary="Submit a stream of jobs",
        description=(
            "A line in is a job, a line out its id or what is wrong with it, in the same order. "
            "What has arrived is submitted together, up to 500 at once; a bad line ends nothing. "
            "The next lines are taken in when those before are answered, so read while you write."
        ),
    ),
)
