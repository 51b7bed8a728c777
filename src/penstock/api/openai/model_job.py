"""The job behind a request: submitted, waited for or followed, and ended when nobody waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeVar

import msgspec

from penstock.api.decoding import decoder
from penstock.api.openai.asking import ask_of, labels_of
from penstock.api.openai.bodies import TIMEOUT, AnyBody
from penstock.api.openai.errors import ModelNotFound, Unanswered
from penstock.api.openai.retelling import Attempt
from penstock.api.openai.telling import Origin
from penstock.api.submit import header_key, pointer_to
from penstock.core.errors import Unavailable, WaitTimedOut
from penstock.core.job import Job, JobRequest, Priority
from penstock.core.pointer import decode_data
from penstock.lifecycles.canonical import JobState
from penstock.ports.engine_api import EngineApi, Streamed
from penstock.workloads.llm.values import Piece

if TYPE_CHECKING:
    from penstock.api.call import Call

R = TypeVar("R")
_GRACE = 5.0
"""Seconds beyond its deadline that the engine has to end a job."""
_encode = msgspec.json.Encoder().encode
_decode_piece = msgspec.json.Decoder(Piece).decode


class ModelJob:
    def __init__(self, api: EngineApi, job: Job, body: AnyBody, until: float) -> None:
        self._api, self._job, self._body = api, job, body
        self._until = until
        self._kept = job.request.idempotency_key is not None
        """Whether it goes on without a reader: whoever gave a key may come back for the answer."""

    @property
    def origin(self) -> Origin:
        return Origin(self._job.job_id, self._job.accepted_at, self._body.model)

    @property
    def attempt(self) -> Attempt:
        """The one that ended it."""
        return self._job.job_id, self._job.attempt

    async def answer(self, kind: type[R]) -> R:
        """What the model answered. Raises Unanswered."""
        job_id = self._job.job_id
        patience = self._until - asyncio.get_running_loop().time()
        self._job = job = await self._api.wait(job_id, max(0.0, patience))
        pointer = job.result.result_ptr if job.result is not None else None
        if job.state is not JobState.SUCCEEDED:
            raise Unanswered(job, self._body.given)
        if not pointer:
            raise self._odd()
        if pointer.startswith("data:"):
            payload = decode_data(pointer)
        else:
            payload = await self._api.get_blob(pointer)
        try:
            return decoder(kind).decode(payload)
        except msgspec.DecodeError:
            raise self._odd() from None

    async def pieces(self) -> AsyncGenerator[tuple[Attempt, Piece], None]:
        """What the model says while it says it, until the job has ended."""
        job_id = self._job.job_id
        async with aclosing(self._api.follow(job_id, None)) as updates:  # type: ignore[type-var]
            while True:
                try:
                    async with asyncio.timeout_at(self._until):
                        update = await anext(updates)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise WaitTimedOut(f"job {job_id} did not end in time") from None
                if isinstance(update, Streamed):
                    yield (job_id, update.attempt), self._piece(update.text)

    def _piece(self, text: str) -> Piece:
        try:
            return _decode_piece(text)
        except msgspec.DecodeError:
            raise self._odd() from None

    def _odd(self) -> Unavailable:
        job = self._job
        return Unavailable(
            f"job {job.job_id} says something else than an answer",
            hint=f"look at what serves {job.request.topic}",
        )

    async def leave(self) -> None:
        """Nobody waits any more: what has not ended, ends."""
        if not (self._job.is_final or self._kept):
            self._kept = True  # once is enough
            reason = "nobody waits for the answer any more"
            await self._api.cancel(self._job.job_id, reason=reason, timeout=0.0)


async def submit(call: Call, body: AnyBody) -> ModelJob:
    """Raises ModelNotFound, and what any submission raises."""
    ask = ask_of(body)
    model = await call.services.models.find(call.api, body.model)
    if model is None:
        raise await not_found(call, body.model)
    if model.paused:  # a client that waits for the answer should not wait for the engine
        raise Unavailable(f"the model {model.name} is paused: {model.paused}")
    key = header_key(call)
    timeout = body.timeout or TIMEOUT
    request = JobRequest(
        job_id="",
        topic=model.topic,
        priority=Priority.INTERACTIVE,
        context_ptr=await pointer_to(call, _encode(ask)),
        tenant=call.tenant(),
        labels=labels_of(body),
        idempotency_key=key or None,
        timeout=timeout,
        deadline=call.services.clock.now() + timeout,
    )
    (job,) = await call.api.submit((request,))
    until = asyncio.get_running_loop().time() + timeout + _GRACE
    return ModelJob(call.api, job, body, until)


async def not_found(call: Call, model: str) -> ModelNotFound:
    served = [one.name for one in await call.services.models.list(call.api)]
    hint = f"served are: {', '.join(served)}" if served else "no model is served here"
    return ModelNotFound(f"the model {model[:120]!r} does not exist", hint=hint)
