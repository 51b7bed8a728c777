"""What is answered about jobs: the protocol's keys first, in its order, then more."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Any

from msgspec import Meta, Struct

from penstock.api.container.facade import ContainerFacade, ContainerRecord
from penstock.api.problems import further_headers, problem_of
from penstock.api.reply import NO_STORE, Headers, Reply, encode
from penstock.core.artifact import Artifact
from penstock.core.errors import EngineUnavailable, Unavailable
from penstock.lifecycles.container import ContainerJobState
from penstock.workloads.container.job import ErrorCode, JobError, Priority, Stream, Usage

HEADERS: Headers = ((b"content-type", b"application/json; charset=utf-8"), NO_STORE)
MAX_WAIT = 300.0
"""Seconds that a request waits at most; to wait longer, ask again."""
Wait = Annotated[float, Meta(ge=0, le=86_400)]


class Accepted(Struct, frozen=True):
    """A submission that was accepted: it is stored."""

    accepted: bool
    job_id: str
    state: ContainerJobState


class Refusal(Struct, frozen=True):
    """A submission that was refused: nothing of it is stored."""

    accepted: bool
    job_id: Any
    """As it was given, whatever it was; null without one."""
    state: ContainerJobState
    error: JobError


class Absent(Struct, frozen=True):
    """There is no such job on this worker."""

    job_id: str
    state: ContainerJobState = ContainerJobState.NOT_FOUND


class Deleted(Struct, frozen=True):
    job_id: str
    state: ContainerJobState
    note: str
    """What came of it, in a sentence."""


class ProtocolSummary(Struct, frozen=True, kw_only=True):
    """What every answer about a job begins with. Times are ISO 8601, UTC."""

    job_id: str
    state: ContainerJobState
    created_at: str
    started_at: str | None
    finished_at: str | None
    exit_code: int | None
    """Of the container; 125 for a missing image and other errors of the engine, 126 and 127 for
    a command that can't be run or found, 137 for a memory kill; null after a timeout or cancel."""


class ArtifactView(Struct, frozen=True):
    """A file that a job left."""

    path: str
    size: int
    sha256: str


class JobRecord(ProtocolSummary, frozen=True, kw_only=True):
    """A job. Everything after `error` is more than the protocol has. Times are ISO 8601, UTC."""

    stdout: str
    """The start and the end of it, once the job has ended; before, see `/jobs/{job_id}/logs`."""
    stderr: str
    error: JobError | None
    priority: Priority
    labels: dict[str, str]
    image: str
    image_id: str
    """What the image's name meant when the job started."""
    waiting_for: str
    """Why it has not started or what happens to it, in a sentence; empty once it has ended."""
    usage: Usage
    stdout_bytes: int
    """How many the container wrote, kept or not."""
    stdout_truncated: bool
    """Whether `stdout` has only the start and the end; the artifact `stdout.log` has more."""
    stdout_gap: bool
    """Whether some are missing because no worker was there to read them."""
    stderr_bytes: int
    stderr_truncated: bool
    stderr_gap: bool
    artifacts: tuple[ArtifactView, ...]
    skipped: tuple[str, ...]
    """What lay in the output folder and was not collected, each with its reason."""


class JobSummary(ProtocolSummary, frozen=True, kw_only=True):
    """A job without its output. Times are ISO 8601, UTC."""

    error: JobError | None
    priority: Priority
    labels: dict[str, str]
    image: str
    usage: Usage


class JobPage(Struct, frozen=True):
    jobs: list[JobSummary]
    next: str | None
    """The cursor of the next page; null on the last."""


class Problem(Struct, frozen=True, omit_defaults=True):
    code: str
    message: str
    field: str = ""
    """The parameter that is wrong."""
    hint: str = ""
    """What to do next."""


class Failure(Struct, frozen=True):
    """The answer to any request that fails."""

    error: Problem


async def record_view(facade: ContainerFacade, record: ContainerRecord) -> JobRecord:
    result, (stdout, stderr) = record.result, map(record.count, Stream)
    return JobRecord(
        **_facts(record),
        stdout=result.stdout if result is not None else "",
        stderr=(result.stderr if result is not None else "") + _marker(record),
        image_id=result.image_id if result is not None else "",
        waiting_for=await facade.waits_for(record),
        stdout_bytes=stdout.bytes,
        stdout_truncated=stdout.truncated,
        stdout_gap=stdout.gap,
        stderr_bytes=stderr.bytes,
        stderr_truncated=stderr.truncated,
        stderr_gap=stderr.gap,
        artifacts=views_of(record.artifacts),
        skipped=result.skipped if result is not None else (),
    )


def summary_view(record: ContainerRecord) -> JobSummary:
    return JobSummary(**_facts(record))


def _facts(record: ContainerRecord) -> dict[str, Any]:
    job = record.job
    return {
        "job_id": record.job_id,
        "state": record.state,
        "created_at": moment(job.accepted_at),
        "started_at": moment(job.started_at),
        "finished_at": moment(job.finished_at),
        "exit_code": record.exit_code,
        "error": record.error,
        "priority": record.priority,
        "labels": record.labels,
        "image": record.image,
        "usage": record.result.usage if record.result is not None else Usage(),
    }


def refusal(error: JobError, job_id: Any, status: int = 400, headers: Headers = ()) -> Reply:
    """The answer to a submission that is refused."""
    try:
        return answer(Refusal(False, job_id, ContainerJobState.REJECTED, error), status, headers)
    except (TypeError, ValueError, OverflowError):  # an id that JSON can't even repeat
        return answer(Refusal(False, None, ContainerJobState.REJECTED, error), status, headers)


def problem_reply(error: BaseException) -> Reply:
    """An error as JSON: never a page, never a trace."""
    found = problem_of(error)
    # A value that is wrong has one status in the protocol.
    status = 400 if found.status == 422 else found.status
    code = ErrorCode.INVALID_FIELD if found.status == 422 else found.code
    if isinstance(error, EngineUnavailable):  # here an engine is one that runs containers
        code = Unavailable.code
    hint = found.hint.replace("http.allowed_hosts", "hosts")
    failure = Failure(Problem(code, found.detail, found.field, hint))
    return answer(failure, status, further_headers(found, error))


def answer(value: Any, status: int = 200, headers: Headers = ()) -> Reply:
    return Reply(encode(value), status, (*HEADERS, *headers))


def absent(job_id: str) -> Reply:
    return answer(Absent(job_id), 404)


def views_of(artifacts: Iterable[Artifact]) -> tuple[ArtifactView, ...]:
    return tuple(ArtifactView(one.name, one.size, one.sha256) for one in artifacts)


def patience(asked: float) -> float:
    return min(asked, MAX_WAIT)


def _marker(record: ContainerRecord) -> str:
    """A line at the end of stderr, where clients of the protocol's own worker look for the reason:
    of a timeout, a missing image or command, an engine that does not answer."""
    error = record.error
    if error is None or error.code in (ErrorCode.NON_ZERO_EXIT, ErrorCode.CANCELLED):
        return ""
    return f"\n[worker] {error.message}"


def moment(seconds: float | None) -> str | None:
    """Milliseconds and Z, as the protocol writes times."""
    if seconds is None:
        return None
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    return f"{datetime.fromtimestamp(whole, UTC):%Y-%m-%dT%H:%M:%S}.{milliseconds:03}Z"
