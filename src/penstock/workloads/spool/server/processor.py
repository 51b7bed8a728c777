"""Runs one job, from its claim to its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

from penstock.core.errors import PenstockError
from penstock.models.values import resolve_name
from penstock.workloads.llm.runner import Runner, answer
from penstock.workloads.llm.values import (
    EmbeddingRequest,
    EmbeddingResult,
    EngineCrashed,
    EngineUnavailable,
    LlmCode,
    LlmFailure,
    LlmResult,
)
from penstock.workloads.spool.disk.files import OpenFolder, Unfit
from penstock.workloads.spool.server import outcomes
from penstock.workloads.spool.server.closing import JobCloser
from penstock.workloads.spool.server.outcomes import (
    DEADLINE,
    TIMEOUT,
    PartialWriter,
    SpoolOutcome,
    answered,
    failed,
    refused,
    unfit,
)
from penstock.workloads.spool.server.requests import (
    JobGone,
    NotYet,
    ParentFailed,
    Parents,
    Prepared,
    read_job,
    request_for,
)
from penstock.workloads.spool.server.running import Running, ServerParts, Why, read_attempts


def model_for(wanted: str, names: Sequence[str], default: str) -> str:
    """The model that a job means; the default if it names none. Raises MODEL_NOT_FOUND."""
    try:
        return resolve_name(wanted, names) if wanted else default
    except PenstockError as error:
        there = f"there is {' or '.join(names[:8]) or 'none'}"
        raise LlmFailure(LlmCode.MODEL_NOT_FOUND, f"{error.message}; {there}") from error


class TimeIsUp(Exception):
    """A job took too long, or came too late."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def within(seconds: float | None, code: str, message: str) -> AbstractAsyncContextManager[object]:
    """Raises TimeIsUp when it is over, before anything is begun if it is already."""
    return nullcontext() if seconds is None else _within(seconds, TimeIsUp(code, message))


@asynccontextmanager
async def _within(seconds: float, over: TimeIsUp) -> AsyncIterator[None]:
    if seconds <= 0:
        raise over
    try:
        async with asyncio.timeout(seconds) as scope:
            yield
    except TimeoutError:
        if not scope.expired():
            raise
        raise over from None


log = logging.getLogger(__name__)


class Processor:
    """Reads a job, asks the Runner, and has the job ended."""

    def __init__(self, parts: ServerParts, runner: Runner) -> None:
        self._runner, self._closing = runner, JobCloser(parts)
        self._threads, self._clock = parts.threads, parts.clock
        self._max_tokens = parts.config.max_tokens
        self._parents = Parents(parts.workspace)
        self.default_model = ""

    async def process(self, running: Running) -> None:
        """Whatever happens, the job is ended, given back or let go of."""
        try:
            try:
                await self._run(running)
            except asyncio.CancelledError:
                if not running.ended:
                    await self._cut(running)
        except JobGone:
            self._closing.let_go(running)

    async def _run(self, running: Running) -> None:
        try:
            outcome = await self._outcome(running)
        except NotYet as parent:
            await self._closing.requeue(running, f"its parent {parent} has not ended")
        except EngineUnavailable as ill:
            await self._closing.requeue(running, f"the engine is unavailable: {ill}")
        except EngineCrashed as crash:
            if not await self._closing.crashed(running, alone=crash.alone):
                self._runner.health.blame(running.model)
        else:
            await self._closing.end(running, outcome)

    async def _cut(self, running: Running) -> None:
        """It was ended from outside."""
        if running.why is Why.GONE:
            raise JobGone(running.job_id)
        if running.why is Why.CANCELLED:
            why = running.reason or "cancelled"
            await self._closing.end(running, failed(outcomes.CANCELLED, why))
        else:
            await self._closing.requeue(running, Why.STOP.value)

    async def _outcome(self, running: Running) -> SpoolOutcome:
        try:
            prepared = await self._threads.do(self._prepared, running)
            return await self._computed(running, prepared)
        except Unfit as problem:
            return unfit(problem)
        except ParentFailed as problem:
            return failed(outcomes.PARENT_FAILED, str(problem))
        except TimeIsUp as late:
            return failed(late.code, str(late))
        except (JobGone, NotYet, EngineUnavailable, EngineCrashed):
            raise
        except LlmFailure as failure:
            return refused(failure)
        except Exception as error:
            log.exception("job %s: an error of ours", running.job_id)
            return failed(outcomes.INTERNAL, f"an error of the server's own: {error!r}")

    def _prepared(self, running: Running) -> Prepared:
        """Blocking."""
        try:
            with OpenFolder(running.folder) as opened:
                running.attempts = read_attempts(opened)
                job = read_job(opened)
        except FileNotFoundError:
            raise JobGone(running.job_id) from None
        running.meta = job.meta
        running.model = job.options.model or self.default_model
        return Prepared(job=job, ask=request_for(job, self._parents, self._max_tokens))

    async def _computed(self, running: Running, prepared: Prepared) -> SpoolOutcome:
        deadline, timeout = prepared.job.options.deadline, prepared.job.options.timeout
        left = None if deadline is None else deadline - self._clock.now()
        async with (
            within(left, DEADLINE, "its deadline passed before it had ended"),
            self._runner.health.job(running.model, suspect=running.attempts.is_suspect),
            within(timeout, TIMEOUT, f"it ran for longer than {timeout or 0:g} s"),
        ):
            began = self._clock.monotonic()
            result = await self._asked(running, prepared)
            return answered(prepared.ask, result, self._clock.monotonic() - began)

    async def _asked(self, running: Running, prepared: Prepared) -> LlmResult | EmbeddingResult:
        job, ask = prepared.job, prepared.ask
        model = await self._model(job.options.model)
        running.facts = {"model": model, "engine": self._runner.engine}
        if isinstance(ask, EmbeddingRequest):
            return await self._runner.embed(model, ask)
        if job.images and not (await self._runner.load(model)).vision:
            raise LlmFailure(LlmCode.NOT_SUPPORTED, f"the model {model} can't look at images")
        most = ask.max_tokens or self._max_tokens
        partial = PartialWriter(running.folder, most, self._clock, self._threads)
        try:
            return await answer(self._runner, model, ask, partial.tell)
        finally:
            await partial.close()

    async def _model(self, wanted: str) -> str:
        if not wanted:
            return self.default_model
        names = [facts.name for facts in await self._runner.models()]
        try:
            return model_for(wanted, names, self.default_model)
        except LlmFailure as unknown:
            # Its file may be no good at present, which is not the job's fault.
            try:
                return (await self._runner.load(wanted)).name
            except EngineUnavailable:
                raise
            except LlmFailure:
                raise unknown from None
