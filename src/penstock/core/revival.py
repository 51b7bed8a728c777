"""Errors that crossed a wire, as the exceptions they were."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.core.errors import (
    IllegalMove,
    InvalidRequest,
    JobEnded,
    PenstockError,
    PipelineBusy,
    TooMany,
)


def _kinds(kind: type[PenstockError]) -> dict[str, type[PenstockError]]:
    found = {kind.code: kind}
    for special in kind.__subclasses__():
        found.update(_kinds(special))
    return found


_BY_CODE = _kinds(PenstockError)
_AGAIN = 1.0
"""Seconds, where it was not said when to try again."""


def revived(
    code: str, message: str, hint: str = "", facts: Mapping[str, object] | None = None
) -> PenstockError:
    """The error that an engine elsewhere raised, as far as it can cross a wire."""
    kind = _BY_CODE.get(code, PenstockError)
    facts = facts or {}
    if issubclass(kind, InvalidRequest):
        field, problem = str(facts.get("field", "request")), str(facts.get("problem", message))
        return kind(field, problem, hint=hint)
    if issubclass(kind, TooMany):
        again = facts.get("retry_after")
        wait = float(again) if isinstance(again, int | float) else _AGAIN
        return kind(message, retry_after=wait, hint=hint)
    if issubclass(kind, PipelineBusy):
        return kind(message, running=str(facts.get("running", "")), hint=hint)
    if issubclass(kind, IllegalMove | JobEnded):
        kind = PenstockError
    return kind(message, hint=hint)
