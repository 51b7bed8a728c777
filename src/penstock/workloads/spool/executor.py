"""Runs language models as canonical jobs: what happens inside RUNNING.

Each model that is served has a topic of its own, `job.llm.<model>`, so that rules, limits and
pools can tell models apart and a job goes to a worker that has its model.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.core.errors import InvalidRequest, Misconfigured
from penstock.core.job import Offer
from penstock.core.llm import (
    TOPICS,
    Embedding,
    LlmCode,
    LlmFailure,
    LlmRequest,
    Piece,
    read_request,
    topic_of,
)
from penstock.core.verdict import Constraints
from penstock.lifecycles.canonical import JobState
from penstock.ports.executor import Context, Interrupted, Outcome, Task, World
from penstock.ports.runner import Runner, answer

log = logging.getLogger(__name__)

_encode = msgspec.json.Encoder().encode
_OFFER = Offer(idempotent=True)
"""An answer changes nothing outside: a job whose worker was lost is simply computed again."""
_CRASHES = 3
"""How often the engine may die under a job before the job is to blame."""


class LlmExecutor:
    """Executes jobs of language models; without a runner it serves nothing."""

    resumable = False

    def __init__(self, runner: Runner | None, models: Sequence[str] = ()) -> None:
        self._runner = runner
        self._models = tuple(models)
        self.topics = tuple(topic_of(model) for model in models)
        self.offers: Mapping[str, Offer] = dict.fromkeys(self.topics, _OFFER)
        self._loading: asyncio.Task[None] | None = None
        self._last_tries = asyncio.Lock()
        """One at a time: if the engine dies again, it was this job's doing and not another's."""

    async def open(self, world: World) -> None:
        """Load the first model while nobody waits for it yet."""
        if self._runner is not None and self._models and self._loading is None:
            self._loading = asyncio.ensure_future(self._load(self._runner, self._models[0]))

    async def _load(self, runner: Runner, model: str) -> None:
        try:
            await runner.load(model)
        except LlmFailure as failure:
            log.warning("the model %s can't be loaded: %s", model, failure)

    def check(self, topic: str, payload: bytes) -> None:
        read_request(payload)

    async def run(self, task: Task, ctx: Context) -> Outcome:
        model = task.request.topic.removeprefix(TOPICS)
        if self._runner is None or model not in self._models:
            return _failure("UNKNOWN_TOPIC", f"no model {model!r} is served here")
        if (unmet := _unmet(task.constraints)) is not None:
            return unmet
        try:
            ask = read_request(task.payload)
        except InvalidRequest as wrong:
            return _failure("BAD_INPUT", str(wrong))
        try:
            return await self._tried(self._runner, model, ask, ctx)
        except asyncio.CancelledError:
            if ctx.ended_as is JobState.FAILED and ctx.request.idempotent:
                raise Interrupted(ctx.cancel.reason) from None
            raise

    async def _tried(self, runner: Runner, model: str, ask: LlmRequest, ctx: Context) -> Outcome:
        """Answered, if need be by the second or third engine; not after a part of the answer was
        told: another one must not follow it."""
        told = 0

        def tell(piece: Piece) -> None:
            nonlocal told
            told += 1
            ctx.stream(_encode(piece).decode())

        for crashes in range(1, _CRASHES + 1):
            try:
                if crashes < _CRASHES:
                    return await _answered(runner, model, ask, tell)
                async with self._last_tries:
                    return await _answered(runner, model, ask, tell)
            except LlmFailure as failure:
                if failure.code is not LlmCode.ENGINE_CRASHED or crashes == _CRASHES or told:
                    return _failure(failure.code, _blamed(failure, crashes))
                ctx.log(f"the engine died ({failure.message}); trying again", level="warning")
        raise AssertionError

    async def close(self) -> None:
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        if self._runner is not None:
            await self._runner.close()


def make(app: Any, options: Mapping[str, Any]) -> LlmExecutor:
    """The executor of language models (entry point `penstock.executors`)."""
    config = options.get("models")
    if config is None:
        return LlmExecutor(None)
    from penstock.workloads.spool.llama.runner import LlamaRunner
    from penstock.workloads.spool.models.served import served

    models = served(config)
    if not models:
        raise Misconfigured(
            "there is no model to serve", hint="get one with 'penstock models pull smollm2'"
        )
    return LlmExecutor(LlamaRunner(config), [model.name for model in models])


async def _answered(
    runner: Runner, model: str, ask: LlmRequest, tell: Callable[[Piece], None]
) -> Outcome:
    if isinstance(ask, Embedding):
        return Outcome(JobState.SUCCEEDED, _encode(await runner.embed(model, ask)))
    result = await answer(runner, model, ask, tell if ask.stream else None)
    return Outcome(JobState.SUCCEEDED, _encode(result))


def _blamed(failure: LlmFailure, crashes: int) -> str:
    if failure.code is LlmCode.ENGINE_CRASHED and crashes > 1:
        return f"{failure.message} ({crashes} times)"
    return failure.message


def _unmet(constraints: Constraints | None) -> Outcome | None:
    """A model reads no network and writes no file; its memory is shared by all jobs."""
    if constraints is None or constraints.max_memory is None:
        return None
    return _failure(
        "CONSTRAINT_NOT_ENFORCED",
        "the safety rules limit max_memory, and a model's memory is shared by all of its jobs:"
        " set model_memory instead",
    )


def _failure(code: str, message: str) -> Outcome:
    return Outcome(JobState.FAILED, error_code=str(code), error_message=message)
