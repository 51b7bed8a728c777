"""Answers as JSON, also those to what went wrong: never a page, never a trace."""

from __future__ import annotations

import math
from typing import Any

from msgspec import Struct

from penstock.api.problems import CHALLENGE, ProblemReply, Refused, problem_of
from penstock.api.reply import NO_STORE, Headers, Reply, encode
from penstock.core.errors import EngineUnavailable, Unavailable
from penstock.workloads.container.job import Code

HEADERS: Headers = ((b"content-type", b"application/json; charset=utf-8"), NO_STORE)


def answer(value: Any, status: int = 200, headers: Headers = ()) -> Reply:
    return Reply(encode(value), status, (*HEADERS, *headers))


class Problem(Struct, frozen=True, omit_defaults=True):
    code: str
    message: str
    field: str = ""
    """The parameter that is wrong."""
    hint: str = ""
    """What to do next."""


class Failure(Struct, frozen=True):
    """What any request that can't be answered is answered."""

    error: Problem


def retry_after(seconds: float) -> tuple[bytes, bytes]:
    return (b"retry-after", b"%d" % min(86_400, max(1, math.ceil(seconds))))


def problems(*, strict: bool) -> ProblemReply:
    """Errors as the worker tells them."""

    def reply(error: BaseException) -> Reply:
        found = problem_of(error)
        # A value that is wrong has one status in the protocol.
        status = 400 if found.status == 422 else found.status
        code = Code.INVALID_FIELD if found.status == 422 else found.code
        if isinstance(error, EngineUnavailable):  # here an engine is one that runs containers
            code = Unavailable.code
        told = Problem(code, found.detail, found.field, found.hint)
        if strict:
            told = Problem(code, found.detail)
        headers = [*error.headers] if isinstance(error, Refused) else []
        if found.retry_after is not None:
            headers.append(retry_after(found.retry_after))
        if status == 401:
            headers.append(CHALLENGE)
        return answer(Failure(told), status, headers)

    return reply
