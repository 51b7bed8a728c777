"""The job behind a request: submitted, waited for or followed, and ended when nobody waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from penstock.api.decoding import decoder
from penstock.api.openai.answers import JobOrigin
from penstock.api.openai.errors import Unanswered
from penstock.api.openai.models import find_model
from penstock.api.openai.requests import TIMEOUT, labels_of
from penstock.api.submit import header_key, pointer_to
from penstock.core.errors import Conflict, InvalidRequest, Unavailable, WaitTimedOut
from penstock.core.job import Job, JobRequest, Priority
from penstock.core.pointer import decode_data
from penstock.lifecycles.canonical import JobState
from penstock.ports.engine_api import EngineApi, Streamed
from penstock.workloads.llm.splice import Attempt
from penstock.workloads.llm.values import (
    ChatRequest,
    CompletionRequest,
    Delta,
    LlmRequest,
    Message,
    TextPart,
    TokenizeRequest,
)

if TYPE_CHECKING:
    from penstock.api.call import Call

R = TypeVar("R")
_GRACE = 5.0
"""Seconds beyond its deadline that the engine has to end a job."""
_encode = msgspec.json.Encoder().encode
_decode_piece = msgspec.json.Decoder(Delta).decode


class ModelJob:
    def __init__(self, api: EngineApi, job: Job, model: str, given: str, until: float) -> None:
        """`given` is the request's field with the model's input, for errors."""
        self._api, self._job, self._model, self._given = api, job, model, given
        self._until = until
        self._kept = job.request.idempotency_key is not None
        """Whether it goes on without a reader: whoever gave a key may come back for the answer."""

    @property
    def origin(self) -> JobOrigin:
        return JobOrigin(self._job.job_id, self._job.accepted_at, self._model)

    @property
    def attempt(self) -> Attempt:
        """The one that ended it."""
        return self._job.job_id, self._job.attempt

    async def answer(self, kind: type[R]) -> R:
        """What the model answered. Raises Unanswered."""
        job_id = self._job.job_id
        patience = self._until - asyncio.get_running_loop().time()
        self._job = job = await self._api.wait(job_id, max(0.0, patience))
        if job.state is not JobState.SUCCEEDED:
            raise Unanswered(job, self._given)
        return await result_of(self._api, job, kind)

    async def pieces(self) -> AsyncGenerator[tuple[Attempt, Delta], None]:
        """What the model says while it says it, until the job has ended."""
        job_id = self._job.job_id
        async with aclosing(self._api.follow(job_id, None)) as updates:  # type: ignore[type-var]
            async for update in updates:
                if isinstance(update, Streamed):
                    yield (job_id, update.attempt), self._piece(update.text)

    def check_deadline(self) -> None:
        """Raises WaitTimedOut."""
        if asyncio.get_running_loop().time() > self._until:
            raise WaitTimedOut(f"job {self._job.job_id} did not end in time")

    def _piece(self, text: str) -> Delta:
        try:
            return _decode_piece(text)
        except msgspec.DecodeError:
            raise _odd(self._job) from None

    async def leave(self) -> None:
        """Nobody waits any more: what has not ended, ends."""
        if not (self._job.is_final or self._kept):
            self._kept = True  # once is enough
            reason = "the client disconnected"
            await self._api.cancel(self._job.job_id, reason=reason, timeout=0.0)


async def result_of(api: EngineApi, job: Job, kind: type[R]) -> R:
    """What a job answered. Raises Unanswered, and Conflict for one that has not ended."""
    pointer = job.result.result_ptr if job.result is not None else None
    if not job.is_final:
        raise Conflict(f"job {job.job_id} has not ended", hint="wait for its end")
    if job.state is not JobState.SUCCEEDED:
        raise Unanswered(job, "previous_response_id")
    if not pointer:
        raise _odd(job)
    try:
        return decoder(kind).decode(await payload_of(api, pointer))
    except msgspec.DecodeError:
        raise _odd(job) from None


async def payload_of(api: EngineApi, pointer: str) -> bytes:
    return decode_data(pointer) if pointer.startswith("data:") else await api.get_blob(pointer)


def _odd(job: Job) -> Unavailable:
    return Unavailable(
        f"the result of job {job.job_id} is not the answer of a language model",
        hint=f"look at what serves {job.request.topic}",
    )


async def submit(
    call: Call, body: Any, request: LlmRequest, labels: Mapping[str, str] | None = None
) -> ModelJob:
    """Raises ModelNotFound, and what any submission raises."""
    model = await find_model(call, body.model)
    if model.paused:  # a client that waits for the answer should not wait for the engine
        raise Unavailable(f"the model {model.name} is paused: {model.paused}")
    _check_length(request, body.given, model.facts.get("context") or 0)
    timeout = getattr(body, "timeout", None) or TIMEOUT
    job_request = JobRequest(
        job_id="",
        topic=model.topic,
        priority=Priority.INTERACTIVE,
        context_ptr=await pointer_to(call.api, _encode(request)),
        tenant=call.tenant(),
        labels={**labels_of(body), **(labels or {})},
        idempotency_key=header_key(call) or None,
        timeout=timeout,
        deadline=call.services.clock.now() + timeout,
    )
    (job,) = await call.api.submit((job_request,))
    until = asyncio.get_running_loop().time() + timeout + _GRACE
    return ModelJob(call.api, job, model.name, body.given, until)


class ContextExceeded(InvalidRequest):
    """A prompt that can't fit, whatever its tokens are."""

    code = "CONTEXT_LENGTH_EXCEEDED"


_LONGEST_TOKEN = 256
"""Characters. A prompt with more than this for each token of the context needs no tokenizer, which
would take seconds for it, to be refused."""


def _check_length(request: LlmRequest, given: str, context: int) -> None:
    """Raises ContextExceeded."""
    texts: list[int] = []
    match request:
        case TokenizeRequest():
            texts.append(len(request.text or request.tokens))
            texts.append(sum(len(_text(message)) for message in request.messages))
        case ChatRequest():
            texts.append(sum(len(_text(message)) for message in request.messages))
        case CompletionRequest():
            texts += map(len, request.prompts)
        case _:
            texts += map(len, request.inputs)
    size = max(texts)
    if context and size > context * _LONGEST_TOKEN:
        raise ContextExceeded(
            given,
            f"This model's maximum context length is {context} tokens. However, your request has"
            f" {size} characters. Please reduce its length.",
        )


def _text(message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(part.text for part in message.content or () if isinstance(part, TextPart))
