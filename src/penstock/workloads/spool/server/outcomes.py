"""What comes of a job: its result files and metadata, and its text while it runs."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from penstock.core.errors import PenstockError
from penstock.ports.clock import Clock
from penstock.workloads.llm.values import (
    Delta,
    EmbeddingRequest,
    EmbeddingResult,
    GenerationRequest,
    LlmCode,
    LlmFailure,
    LlmResult,
)
from penstock.workloads.spool.client.work import PROMPT
from penstock.workloads.spool.config import Sync
from penstock.workloads.spool.disk.closing import ANSWER, EMBEDDING, PARTIAL, PROGRESS, RESULT
from penstock.workloads.spool.disk.files import Unfit, replace_file
from penstock.workloads.spool.server.running import Threads

_A_LINE = 10


def of_answer(result: LlmResult) -> dict[str, bytes]:
    """The text, and all of the answer if there is more to it than text."""
    choice = result.choices[0]
    files = {RESULT: choice.text.encode(errors="replace")}
    if choice.logprobs is not None or choice.tool_calls or choice.reasoning:
        files[ANSWER] = msgspec.json.encode(result)
    return files


def of_embedding(result: EmbeddingResult) -> dict[str, bytes]:
    return {EMBEDDING: embedding_json(result.vectors[0])}


def embedding_json(vector: Sequence[float]) -> bytes:
    """As the original writes it: six digits that count, ten numbers a line."""
    numbers = [f"{number:.6g}" for number in vector]
    lines = [", ".join(numbers[at : at + _A_LINE]) for at in range(0, len(numbers), _A_LINE)]
    inner = ",\n    ".join(lines)
    return f'{{\n  "dim": {len(vector)},\n  "vector": [\n    {inner}\n  ]\n}}\n'.encode()


CANCELLED, DEADLINE, TIMEOUT = "CANCELLED", "DEADLINE_EXCEEDED", "TIMEOUT"
INVALID, PARENT_FAILED, INTERNAL = "INVALID", "PARENT_FAILED", "INTERNAL"
SAME_ID = "SAME_ID"


class SpoolOutcome(Struct, frozen=True, kw_only=True):
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
    ask: GenerationRequest | EmbeddingRequest, result: LlmResult | EmbeddingResult, seconds: float
) -> SpoolOutcome:
    used = result.usage
    facts = {
        "model": result.model,
        "engine": result.engine,
        "prompt_tokens": used.prompt_tokens,
        "cached_tokens": used.cached_tokens,
    }
    if isinstance(result, EmbeddingResult) or isinstance(ask, EmbeddingRequest):
        assert isinstance(result, EmbeddingResult)
        return SpoolOutcome(facts=facts, files=of_embedding(result))
    facts |= {
        "completion_tokens": used.completion_tokens,
        "finish_reason": result.choices[0].finish_reason,
        "tokens_per_second": _speed(result, seconds),
        "seed": ask.sampling.seed,
    }
    return SpoolOutcome(facts=facts, files=of_answer(result), tokens=used.completion_tokens)


def failed(code: str, error: str) -> SpoolOutcome:
    return SpoolOutcome(code=code, error=error)


def unfit(problem: Unfit) -> SpoolOutcome:
    return failed(LlmCode.INVALID_PROMPT if problem.field == PROMPT else INVALID, str(problem))


def refused(failure: LlmFailure) -> SpoolOutcome:
    facts = {
        name: failure.facts[name] for name in ("prompt_tokens", "model") if name in failure.facts
    }
    return SpoolOutcome(facts=facts, code=failure.code, error=_told(failure))


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


EVERY = 0.25
"""Seconds between two looks that a reader can have."""
_FIRST = 0.1
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class PartialWriter:
    """Of one job; `tell` takes each piece as it comes, `close` before the job ends."""

    def __init__(self, folder: str, max_tokens: int, clock: Clock, threads: Threads) -> None:
        self._folder, self._max_tokens = folder, max_tokens
        self._clock, self._threads = clock, threads
        self._began = clock.monotonic()
        self._due = self._began + _FIRST
        self._first: float | None = None
        self._tokens = 0
        self._unsaid: list[str] = []
        self._writing: asyncio.Task[None] | None = None

    def tell(self, piece: Delta) -> None:
        now = self._clock.monotonic()
        self._first = now if self._first is None else self._first
        self._tokens += 1
        if piece.text:
            self._unsaid.append(piece.text)
        if now >= self._due and (self._writing is None or self._writing.done()):
            self._due = now + EVERY
            text, self._unsaid = "".join(self._unsaid), []
            first = self._writing is None
            self._writing = asyncio.ensure_future(
                self._threads.do(_write, self._folder, text, self._progress(now), first=first)
            )

    async def close(self) -> None:
        """Nothing is written any more."""
        if self._writing is not None:
            await asyncio.wait((self._writing,))

    def _progress(self, now: float) -> bytes:
        since = now if self._first is None else self._first
        speed = (self._tokens - 1) / max(now - since, 1e-3)
        left = max(0, self._max_tokens - self._tokens)
        return msgspec.json.encode(
            {
                "tokens": self._tokens,
                "tokens_per_second": round(speed, 2),
                "max_tokens": self._max_tokens,
                "eta_s": round(left / speed, 2) if speed else None,
            }
        )


def _write(folder: str, text: str, progress: bytes, *, first: bool) -> None:
    """Whatever a client has put in the way is replaced: nothing is written through it."""
    said = text.encode(errors="replace")
    try:
        if first:
            replace_file(folder, PARTIAL, said, Sync.NONE)
        else:
            _append(f"{folder}/{PARTIAL}", said)
        replace_file(folder, PROGRESS, progress, Sync.NONE)
    except (OSError, PenstockError):
        pass


def _append(path: str, data: bytes) -> None:
    file = os.open(path, _APPEND)
    try:
        if stat.S_ISREG(os.fstat(file).st_mode):
            os.write(file, data)
    finally:
        os.close(file)
