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
from penstock.core.job import TopicDefaults
from penstock.core.verdict import Constraints
from penstock.lifecycles.canonical import JobState
from penstock.ports.executor import (
    PAUSED,
    Context,
    Environment,
    Outcome,
    Task,
    TopicPaused,
)
from penstock.workloads.llm.runner import Runner, TenantRunner, answer
from penstock.workloads.llm.values import (
    TOPICS,
    Embedding,
    EngineCrashed,
    EngineUnavailable,
    LlmFailure,
    LlmRequest,
    Piece,
    read_request,
    topic_of,
)
from penstock.workloads.spool.supervisor import EngineSupervisor, Pause

log = logging.getLogger(__name__)

_encode = msgspec.json.Encoder().encode
_DEFAULTS = TopicDefaults(idempotent=True)
"""An answer changes nothing outside: a job whose worker was lost is simply computed again."""
_CRASHES = 3
"""How often the engine may die under a job, the last time alone, before the job is to blame."""
_REMEMBERED = 1000
"""Suspects that are known when they come back."""
_LOOK = 0.25
"""Seconds between two looks at an engine that a job waits for."""


class LlmExecutor:
    """Executes jobs of language models; without a runner it serves nothing."""

    resumable = False

    def __init__(self, runner: Runner | None, models: Sequence[str] = ()) -> None:
        self._runner = runner
        self._models = tuple(models)
        self.topics = tuple(topic_of(model) for model in models)
        self.topic_defaults: Mapping[str, TopicDefaults] = dict.fromkeys(self.topics, _DEFAULTS)
        self._loading: asyncio.Task[None] | None = None
        self._supervisor = EngineSupervisor(runner) if runner is not None else None
        if self._supervisor is not None:
            self._supervisor.on_change = _log_change
        self._crashes: dict[str, int] = {}
        """How often the engine died under a job, by its id."""

    def facts(self) -> Mapping[str, Any]:
        """Topics whose jobs have to wait, and why."""
        pauses = self._supervisor.pauses if self._supervisor is not None else {}
        paused = {topic_of(model): str(pause) for model, pause in pauses.items()}
        return {PAUSED: paused} if paused else {}

    async def open(self, environment: Environment) -> None:
        """Load the first model while nobody waits for it yet."""
        if self._runner is not None and self._models and self._loading is None:
            self._loading = asyncio.ensure_future(self._load(self._runner, self._models[0]))

    async def _load(self, runner: Runner, model: str) -> None:
        try:
            await runner.load(model)
        except LlmFailure as failure:
            assert self._supervisor is not None
            self._supervisor.fail(model, failure)

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
        return await self._tried(self._runner_for(task.request.tenant), model, ask, ctx)

    def _runner_for(self, tenant: str) -> Runner:
        assert self._runner is not None
        if isinstance(self._runner, TenantRunner):
            return self._runner.for_tenant(tenant)
        return self._runner

    async def _tried(self, runner: Runner, model: str, ask: LlmRequest, ctx: Context) -> Outcome:
        """Answered, if need be by the second or third engine. Raises TopicPaused while there is
        none, and when the engine died after a part of the answer was told: another one must not
        follow it in the same attempt."""
        assert self._supervisor is not None
        told = 0

        def tell(piece: Piece) -> None:
            nonlocal told
            told += 1
            ctx.stream(_encode(piece).decode())

        while True:
            suspect = ctx.job_id in self._crashes
            try:
                async with self._supervisor.job(model, suspect=suspect):
                    outcome = await _answered(runner, model, ask, tell)
                break
            except EngineUnavailable as ill:
                if told or ctx.request.idempotent:
                    raise TopicPaused(f"the engine is unavailable: {ill}") from ill
                await self._until_resumed(self._supervisor, model, ctx)
            except EngineCrashed as crash:
                crashes = self._count_crash(ctx.job_id)
                if crash.alone and crashes >= _CRASHES:
                    self._supervisor.blame(model)
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

    def _count_crash(self, job_id: str) -> int:
        crashes = self._crashes[job_id] = self._crashes.pop(job_id, 0) + 1
        if len(self._crashes) > _REMEMBERED:
            del self._crashes[next(iter(self._crashes))]
        return crashes

    async def _until_resumed(self, supervisor: EngineSupervisor, model: str, ctx: Context) -> None:
        """A job that may begin only once can't be handed back: it waits here."""
        while (pause := supervisor.pause_of(model)) is not None:
            ctx.progress(None, f"waits for the engine: {pause}")
            await asyncio.sleep(_LOOK)

    async def close(self) -> None:
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        if self._supervisor is not None:
            self._supervisor.close()
        if self._runner is not None:
            await self._runner.close()


def make(app: Any, options: Mapping[str, Any]) -> LlmExecutor:
    """The executor of language models (entry point `penstock.executors`)."""
    config = options.get("models")
    if config is None:
        return LlmExecutor(None)
    from penstock.workloads.llm.models.served import served
    from penstock.workloads.spool.llama.runner import LlamaRunner

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


def _log_change(model: str, pause: Pause | None) -> None:
    if pause is not None:
        log.warning("jobs of the model %s are paused: %s", model, pause)
    else:
        log.warning("the model %s answers again", model)


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
