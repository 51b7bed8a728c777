"""Problem documents (RFC 9457), as the exceptions that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
from msgspec import Struct

from penstock.core.errors import (
    Conflict,
    InvalidRequest,
    NotAuthenticated,
    NotFound,
    NotPermitted,
    PenstockError,
    TooLarge,
    TooMany,
    Unavailable,
)
from penstock.core.revival import revived


class NoSuchPart(PenstockError):
    """A part of a blob was asked for that lies beyond its end."""


class ProblemDocument(Struct, frozen=True):
    """What we read of a problem document."""

    code: str = ""
    detail: str = ""
    hint: str = ""
    field: str = ""
    problem: str = ""
    retry_after: float | None = None
    running: str = ""


def error_of(status: int, body: bytes, headers: Mapping[str, str], url: str) -> PenstockError:
    """The exception that an answer stands for."""
    try:
        told = msgspec.json.decode(body, type=ProblemDocument)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        told = ProblemDocument()
    if not told.code:
        return Unavailable(
            f"{url} answered {status}, and not as an engine does",
            hint="check the URL, and whatever stands between here and there",
        )
    facts: dict[str, object] = {"retry_after": told.retry_after, "running": told.running}
    if told.field:
        facts |= {"field": told.field, "problem": told.problem}
    if status == 401:
        hint = told.hint if told.hint and not told.hint.startswith("send ") else _KEY_HINT
        return NotAuthenticated(told.detail, hint=hint)
    if status == 416:
        return NoSuchPart(told.detail)
    error = revived(told.code, told.detail, told.hint, facts)
    if type(error) is PenstockError and status in _BY_STATUS:
        return _BY_STATUS[status](told.detail, told.hint)
    return error


_KEY_HINT = "give a key: connect(url, token=...), or 'penstock keys create' makes one"


def _plainly(kind: type[PenstockError]) -> Callable[[str, str], PenstockError]:
    return lambda detail, hint: kind(detail, hint=hint)


_BY_STATUS: dict[int, Callable[[str, str], PenstockError]] = {
    400: lambda detail, hint: InvalidRequest("request", detail, hint=hint),
    403: _plainly(NotPermitted),
    404: _plainly(NotFound),
    409: _plainly(Conflict),
    413: lambda detail, hint: TooLarge("request", detail, hint=hint),
    422: lambda detail, hint: InvalidRequest("request", detail, hint=hint),
    429: lambda detail, hint: TooMany(detail, retry_after=1.0, hint=hint),
    503: _plainly(Unavailable),
}
"""For codes that only HTTP knows."""
