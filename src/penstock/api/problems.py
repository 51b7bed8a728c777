"""Errors as problem documents (RFC 9457): the one place that gives them a status."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from penstock.api.reply import NO_STORE, Headers, Reply, encode
from penstock.core.errors import (
    Conflict,
    IllegalMove,
    InvalidRequest,
    JobEnded,
    MapInterrupted,
    Misconfigured,
    NotAuthenticated,
    NotFound,
    NotPermitted,
    PenstockError,
    PipelineBusy,
    StepFailed,
    TooLarge,
    TooMany,
    Unavailable,
    WaitTimedOut,
    WrongShard,
)

log = logging.getLogger(__name__)

STATUS: dict[type[PenstockError], int] = {
    InvalidRequest: 422,
    TooLarge: 413,
    WrongShard: 421,
    Conflict: 409,
    NotFound: 404,
    IllegalMove: 409,
    MapInterrupted: 409,
    Misconfigured: 422,
    NotPermitted: 403,
    NotAuthenticated: 401,
    TooMany: 429,
    Unavailable: 503,
    WaitTimedOut: 408,
    JobEnded: 410,
    StepFailed: 410,
}
"""By class; a class that is not here has the status of the nearest one above it."""

TITLES = {
    400: "Malformed request",
    401: "Authentication required",
    403: "Not permitted",
    404: "Not found",
    405: "Method not allowed",
    408: "Timed out",
    409: "Conflict",
    410: "No result",
    413: "Too large",
    415: "Unsupported media type",
    416: "Range not satisfiable",
    421: "Wrong host",
    422: "Invalid value",
    429: "Too many requests",
    431: "Request header too large",
    500: "Internal error",
    501: "Not installed",
    503: "Unavailable",
}
HEADERS: Headers = ((b"content-type", b"application/problem+json"), NO_STORE)
CHALLENGE = (b"www-authenticate", b'Bearer realm="penstock"')


class Problem(Struct, frozen=True, omit_defaults=True):
    """What went wrong, for people (title, detail, hint) and for programs (code)."""

    type: str
    """`urn:penstock:problem:` and the code in lower case."""
    title: str
    status: int
    detail: str
    code: str
    """Stable; see the page of error codes."""
    hint: str = ""
    """What to do next."""
    field: str = ""
    """The field that is wrong, as `jobs[3].labels`."""
    problem: str = ""
    """What is wrong with the field."""
    retry_after: float | None = None
    """Seconds after which it may be tried again."""
    job_id: str = ""
    state: str = ""
    """Of a job that ended without a result."""
    running: str = ""
    """The job that runs already, of a pipeline that runs once at a time."""
    error_code: str | None = None
    error_message: str | None = None
    incident: str = ""
    """Id of the entry in the server's log."""


class Refused(PenstockError):
    """An error of HTTP alone: method, header or body."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        hint: str = "",
        headers: Headers = (),
    ) -> None:
        super().__init__(message, hint=hint)
        self.status, self.name, self.headers = status, code, headers


def malformed(message: str, *, hint: str = "") -> Refused:
    return Refused(400, "MALFORMED", message, hint=hint)


def status_of(error: PenstockError) -> int:
    """The status for an error; 500 for an unexpected one."""
    if isinstance(error, Refused):
        return error.status
    return next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)


def problem_of(error: BaseException) -> Problem:
    """The problem document of an error. Details of unexpected errors are only logged."""
    if isinstance(error, PenstockError) and (status := status_of(error)) != 500:
        code = error.name if isinstance(error, Refused) else error.code
        return Problem(
            type=type_of(code),
            title=TITLES[status],
            status=status,
            detail=error.message,
            code=code,
            hint=error.hint,
            **_facts(error),
        )
    incident = secrets.token_hex(6)
    log.error("incident %s", incident, exc_info=error)
    return Problem(
        type=type_of("INTERNAL"),
        title=TITLES[500],
        status=500,
        detail="internal error; details are in the server's log",
        code="INTERNAL",
        hint=f"the server's log has it as incident {incident}",
        incident=incident,
    )


def type_of(code: str) -> str:
    return "urn:penstock:problem:" + code.lower().replace("_", "-")


def _facts(error: PenstockError) -> dict[str, Any]:
    match error:
        case InvalidRequest():
            return {"field": error.field, "problem": error.problem}
        case PipelineBusy():
            return {"running": error.running}
        case TooMany():
            return {"retry_after": error.retry_after}
        case Unavailable():
            return {"retry_after": 1.0}
        case JobEnded():
            result = error.job.result
            return {
                "job_id": error.job.job_id,
                "state": error.job.state.value,
                "error_code": result.error_code if result else None,
                "error_message": result.error_message if result else None,
            }
        case _:
            return {}


ProblemReply = Callable[[BaseException], Reply]
"""Turns an exception into a reply."""


def problem_reply(error: BaseException) -> Reply:
    problem = problem_of(error)
    return Reply(encode(problem), problem.status, [*HEADERS, *further_headers(problem, error)])


def further_headers(problem: Problem, error: BaseException) -> Headers:
    """Headers of an error reply, whatever its format."""
    headers: list[tuple[bytes, bytes]] = []
    if problem.retry_after is not None:
        headers.append(retry_after(problem.retry_after))
    if problem.status == 401:
        headers.append(CHALLENGE)
    if isinstance(error, Refused):
        headers.extend(error.headers)
    return headers


def retry_after(seconds: float) -> tuple[bytes, bytes]:
    return (b"retry-after", b"%d" % min(86_400, max(1, math.ceil(seconds))))
