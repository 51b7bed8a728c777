"""Runs requests to language models as canonical jobs, over any Runner.

Each model that is served has a topic of its own, so that rules, limits and pools can tell models
apart and a job goes to a worker that has its model: `job.llm.<model>`, or `job.chat.<model>` where
the model is split over nodes.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from penstock import values
from penstock.core.errors import InvalidRequest
from penstock.core.job import TopicDefaults
from penstock.core.verdict import Constraints
from penstock.lifecycles.canonical import JobState
from penstock.models.values import public_facts
from penstock.ports.executor import (
    MODELS,
    PAUSED,
    SCHEMA,
    TOKENS,
    Context,
    Environment,
    Outcome,
    Task,
    TopicPaused,
)
from penstock.workloads.llm.health import EngineHealth, RunnerHealth
from penstock.workloads.llm.runner import ProgressListener, Runner, answer, choices_of
from penstock.workloads.llm.schemas import not_enforced
from penstock.workloads.llm.values import (
    TOPICS,
    ChatRequest,
    Delta,
    EmbeddingRequest,
    EmbeddingResult,
    EngineCrashed,
    EngineUnavailable,
    LlmFailure,
    LlmRequest,
    LlmResult,
    TokenizeRequest,
    TokenizeResult,
    Usage,
    read_request,
)

log = logging.getLogger(__name__)

_encode = msgspec.json.Encoder().encode
DEFAULTS = TopicDefaults(idempotent=True)
"""An answer changes nothing outside: a job whose worker was lost is simply computed again."""
CHAT = {
    "description": "Answers a conversation with a language model.",
    "input": values.json_schema(ChatRequest),
}
"""What a model's topic takes, for those who only chat; `read_request` reads other kinds, too."""
_CRASHES = 3
"""How often the engine may die under a job, the last time alone, before the job is to blame."""
_ANSWERS = 20
"""Answers of which the median time to the first token is told."""
_REMEMBERED = 1000
"""Suspects that are known when they come back."""


class LlmExecutor:
    """Executes jobs of language models; without a runner it serves nothing."""

    resumable = False

    def __init__(
        self,
        runner: Runner | None,
        models: Sequence[str] = (),
        *,
        prefix: str = TOPICS,
        memory_setting: str = "model_memory",
    ) -> None:
        self._runner = runner
        self._models = tuple(models)
        self._prefix, self._memory_setting = prefix, memory_setting
        self.topics = tuple(prefix + model for model in models)
        self.topic_defaults: Mapping[str, TopicDefaults] = dict.fromkeys(self.topics, DEFAULTS)
        self._schemas = {SCHEMA + topic: CHAT for topic in self.topics}
        self._loading: asyncio.Task[None] | None = None
        self._health = runner.health if runner is not None else None
        if self._health is not None:
            self._health.listeners.append(_log_change)
        self._known: dict[str, dict[str, Any]] = {}
        """What callers can see of each model, by its topic."""
        self._used: dict[str, Usage] = {}
        """Tokens that were read and generated here, by topic."""
        self._first_token: dict[str, deque[float]] = {}
        """Milliseconds until the first token of the last answers, by topic."""
        self._crashes: dict[str, int] = {}
        """How often the engine died under a job, by its id."""

    def facts(self) -> Mapping[str, Any]:
        """What the models are and the state of their engines; topics whose jobs wait, and why."""
        if self._health is None:
            return self._schemas
        ill = {self._prefix + model: str(why) for model, why in self._health.ill.items()}
        models = {topic: self._known.get(topic, {}) | self._state(topic) for topic in self.topics}
        tokens = {
            topic: {
                "prompt": used.prompt_tokens - used.cached_tokens,
                "completion": used.completion_tokens,
            }
            for topic, used in self._used.items()
        }
        return {MODELS: models, TOKENS: tokens, **self._schemas, **({PAUSED: ill} if ill else {})}

    def _state(self, topic: str) -> dict[str, Any]:
        assert self._health is not None
        health = self._health.of(topic.removeprefix(self._prefix))
        state: dict[str, Any] = {"state": health.state.value}
        if health.is_ill:
            state["cause"] = str(health)
        if times := self._first_token.get(topic):
            state["first_token_ms"] = round(statistics.median(times), 1)
        return state

    async def open(self, environment: Environment) -> None:
        """Load the first model while nobody waits for it yet."""
        if self._runner is not None and self._models and self._loading is None:
            self._loading = asyncio.ensure_future(self._load(self._runner, self._models[0]))

    async def _load(self, runner: Runner, model: str) -> None:
        try:
            await runner.load(model)
        except LlmFailure as failure:
            if self._health is not None:
                self._health.fail(model, failure)
        await self._learn(runner)

    async def _learn(self, runner: Runner) -> None:
        with suppress(LlmFailure):
            served = [one for one in await runner.models() if one.name in self._models]
            self._known = {self._prefix + one.name: public_facts(one) for one in served}

    def check(self, topic: str, payload: bytes) -> None:
        read_request(payload)

    async def run(self, task: Task, ctx: Context) -> Outcome:
        model = task.request.topic.removeprefix(self._prefix)
        if self._runner is None or self._health is None or model not in self._models:
            return _failure("UNKNOWN_TOPIC", f"no model {model!r} is served here")
        if (unmet := _unmet(task.constraints, self._memory_setting)) is not None:
            return unmet
        try:
            ask = read_request(task.payload)
        except InvalidRequest as wrong:
            return _failure("BAD_INPUT", str(wrong))
        if loose := not_enforced(ask):
            ctx.log(loose, level="warning")
        runner = self._runner.for_tenant(task.request.tenant)
        outcome = await self._supervised(self._health, runner, model, ask, ctx)
        if not self._known.get(task.request.topic, {}).get("context"):
            await self._learn(self._runner)  # it is loaded now
        return outcome

    async def _supervised(
        self,
        health: RunnerHealth,
        runner: Runner,
        model: str,
        ask: LlmRequest,
        ctx: Context,
    ) -> Outcome:
        """Answered, if need be by the second or third engine. Raises TopicPaused while there is
        none, and when the engine died after a part of the answer was streamed: another one must
        not follow it in the same attempt."""
        told = False

        def tell(piece: Delta) -> None:
            nonlocal told
            told = True
            ctx.stream(_encode(piece).decode())

        result: LlmResult | EmbeddingResult | TokenizeResult
        while True:
            try:
                async with health.job(model, suspect=ctx.job_id in self._crashes):
                    if isinstance(ask, EmbeddingRequest):
                        result = await runner.embed(model, ask)
                    elif isinstance(ask, TokenizeRequest):
                        result = await runner.tokenize(model, ask)
                    else:
                        watch: ProgressListener = (
                            ctx if choices_of(ask) == 1 else _SeveralAnswers(ctx)
                        )
                        result = await answer(
                            runner, model, ask, tell if ask.stream else None, watch
                        )
                self._count_tokens(ctx.request.topic, result)
                outcome = Outcome(JobState.SUCCEEDED, _encode(result))
                break
            except EngineUnavailable as ill:
                if told or ctx.request.idempotent:
                    raise TopicPaused(f"the engine is unavailable: {ill}") from ill
                await self._until_resumed(health, model, ctx)
            except EngineCrashed as crash:
                crashes = self._count_crash(ctx.job_id)
                if crash.alone and crashes >= _CRASHES:
                    health.blame(model)
                    outcome = _failure(crash.code, f"{crash.message} ({crashes} times)")
                    break
                if told:
                    if not ctx.request.idempotent:
                        outcome = _failure(crash.code, crash.message)
                        break
                    raise TopicPaused(f"the engine died ({crash.message})") from crash
                ctx.log(f"the engine died ({crash.message}); trying again", level="warning")
            except LlmFailure as failure:
                outcome = _failure(failure.code, failure.message)
                break
        self._crashes.pop(ctx.job_id, None)
        return outcome

    def _count_tokens(
        self, topic: str, result: LlmResult | EmbeddingResult | TokenizeResult
    ) -> None:
        if not isinstance(result, TokenizeResult):
            used = self._used.get(topic)
            self._used[topic] = result.usage if used is None else used + result.usage
        if isinstance(result, LlmResult) and result.timings.prompt_ms:
            times = self._first_token.setdefault(topic, deque(maxlen=_ANSWERS))
            times.append(result.timings.prompt_ms / len(result.choices))

    def _count_crash(self, job_id: str) -> int:
        crashes = self._crashes[job_id] = self._crashes.pop(job_id, 0) + 1
        if len(self._crashes) > _REMEMBERED:
            del self._crashes[next(iter(self._crashes))]
        return crashes

    async def _until_resumed(self, health: RunnerHealth, model: str, ctx: Context) -> None:
        """A job that may begin only once can't be handed back: it waits here."""
        while (now := health.of(model)).is_ill:
            ctx.progress(None, f"waits for the engine: {now}")
            await health.change(model)

    async def close(self) -> None:
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        if self._runner is not None:
            await self._runner.close()


class _SeveralAnswers:
    """Watches many answers at once: the progress of one says nothing of the job's."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx

    def progress(self, fraction: float | None = None, message: str = "") -> None:
        self._ctx.progress(None, message)

    def log(self, text: str, level: str = "info") -> None:
        self._ctx.log(text, level)


def _log_change(model: str, health: EngineHealth) -> None:
    if health.is_ill:
        log.warning("jobs of the model %s are paused: %s", model, health)
    else:
        log.warning("the model %s answers again", model)


def _unmet(constraints: Constraints | None, setting: str) -> Outcome | None:
    """A model reads no network and writes no file; its memory is shared by all jobs."""
    if constraints is None or constraints.max_memory is None:
        return None
    return _failure(
        "CONSTRAINT_NOT_ENFORCED",
        "the safety rules limit max_memory, and a model's memory is shared by all of its jobs:"
        f" set {setting} instead",
    )


def _failure(code: str, message: str) -> Outcome:
    return Outcome(JobState.FAILED, error_code=str(code), error_message=message)
