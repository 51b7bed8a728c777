"""How the failures of a model are told on the command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from penstock.core.errors import (
    Misconfigured,
    NotFound,
    PenstockError,
    Unavailable,
)
from penstock.workloads.llm.values import LlmCode, LlmFailure

PULL = "get one with 'penstock models pull smollm2'"

_KINDS: Mapping[LlmCode, tuple[type[PenstockError], str]] = {
    LlmCode.MODEL_NOT_FOUND: (NotFound, "'penstock models list' shows those there are"),
    LlmCode.MODEL_INVALID: (Misconfigured, "fetch it again, or name another file"),
    LlmCode.NOT_SUPPORTED: (Misconfigured, ""),
    LlmCode.ENGINE_MISSING: (Unavailable, ""),
    LlmCode.OUT_OF_MEMORY: (Unavailable, "a smaller model, --context or --workers takes less"),
    LlmCode.ENGINE_CRASHED: (Unavailable, ""),
}


@contextmanager
def told() -> Iterator[None]:
    """Turn the failure of a model into an error that says what to do."""
    try:
        yield
    except LlmFailure as failure:
        raise explained(failure) from failure


def explained(failure: LlmFailure) -> PenstockError:
    kind, hint = _KINDS.get(failure.code, (PenstockError, ""))
    return kind(failure.message, hint=hint)
