"""How a job ends: what goes into its metadata, and its files. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from penstock.workloads.llm.values import (
    Embedding,
    EmbeddingResult,
    Generation,
    LlmCode,
    LlmFailure,
    LlmResult,
)
from penstock.workloads.spool.disk import Unfit
from penstock.workloads.spool.serving.artifacts import of_answer, of_embedding
from penstock.workloads.spool.serving.reading import PROMPT

CANCELLED, DEADLINE, TIMEOUT = "CANCELLED", "DEADLINE_EXCEEDED", "TIMEOUT"
INVALID, PARENT_FAILED, INTERNAL = "INVALID", "PARENT_FAILED", "INTERNAL"
SAME_ID = "SAME_ID"


class Outcome(Struct, frozen=True, kw_only=True):
    """DONE with files, or FAILED with an error."""

    facts: Mapping[str, Any] = {}
    """Fields of its metadata."""
    files: Mapping[str, bytes] = {}
    code: str = ""
    error: str = ""
    """Why it failed; empty if it is DONE."""
    tokens: int = 0

    @property
    def line(self) -> str:
        """What `error.txt` says."""
        return f"{self.code}: {self.error}"


def answered(
    ask: Generation | Embedding, result: LlmResult | EmbeddingResult, seconds: float
) -> Outcome:
    used = result.usage
    facts = {
        "model": result.model,
        "engine": result.engine,
        "prompt_tokens": used.prompt_tokens,
        "cached_tokens": used.cached_tokens,
    }
    if isinstance(result, EmbeddingResult) or isinstance(ask, Embedding):
        assert isinstance(result, EmbeddingResult)
        return Outcome(facts=facts, files=of_embedding(result))
    facts |= {
        "completion_tokens": used.completion_tokens,
        "finish_reason": result.choices[0].finish_reason,
        "tokens_per_second": _speed(result, seconds),
        "seed": ask.sampling.seed,
    }
    return Outcome(facts=facts, files=of_answer(result), tokens=used.completion_tokens)


def failed(code: str, error: str) -> Outcome:
    return Outcome(code=code, error=error)


def unfit(problem: Unfit) -> Outcome:
    return failed(LlmCode.INVALID_PROMPT if problem.field == PROMPT else INVALID, str(problem))


def refused(failure: LlmFailure) -> Outcome:
    facts = {
        name: failure.facts[name] for name in ("prompt_tokens", "model") if name in failure.facts
    }
    return Outcome(facts=facts, code=failure.code, error=_told(failure))


def _told(failure: LlmFailure) -> str:
    tokens, context = failure.facts.get("prompt_tokens"), failure.facts.get("context")
    if failure.code is not LlmCode.CONTEXT_EXCEEDED or tokens is None or context is None:
        return failure.message
    if str(tokens) in failure.message and str(context) in failure.message:
        return failure.message
    return f"the prompt has {tokens} tokens, and the context has room for {context}"


def _speed(result: LlmResult, seconds: float) -> float:
    took = result.timings.predicted_ms / 1000 or seconds
    return round(result.usage.completion_tokens / took, 2) if took > 0 else 0.0
