"""Runs one job, from its claim to its end: done, failed, queued again, or let go."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, structs

from penstock.core.errors import Conflict, PenstockError, StoreFailed
from penstock.lifecycles.spool import Status
from penstock.models.values import resolve_name
from penstock.ports.clock import Clock
from penstock.workloads.llm.runner import Runner, answer
from penstock.workloads.llm.values import (
    Delta,
    EmbeddingRequest,
    EmbeddingResult,
    EngineCrashed,
    EngineUnavailable,
    GenerationRequest,
    LlmCode,
    LlmFailure,
    LlmResult,
)
from penstock.workloads.spool.client.work import PROMPT
from penstock.workloads.spool.config import Sync
from penstock.workloads.spool.disk.files import NotAFolder, OpenFolder, Unfit, replace_file
from penstock.workloads.spool.disk.job import (
    ANSWER,
    EMBEDDING,
    PARTIAL,
    PROGRESS,
    RESULT,
    Attempts,
    JobGone,
    Loss,
    count_attempt,
    fail,
    finish,
    give_up,
    read_attempts,
    requeue,
    seen_meta,
    stamp,
)
from penstock.workloads.spool.disk.peers import returning
from penstock.workloads.spool.server.pool import (
    EventKind,
    JobEvent,
    Running,
    ServerParts,
    Threads,
    Why,
)
from penstock.workloads.spool.server.requests import (
    NotYet,
    ParentFailed,
    Parents,
    Spooled,
    read_job,
    request_for,
)
from penstock.workloads.spool.server.scanner import INVALID

log = logging.getLogger(__name__)

T = TypeVar("T")
CANCELLED, DEADLINE, TIMEOUT = "CANCELLED", "DEADLINE_EXCEEDED", "TIMEOUT"
PARENT_FAILED, INTERNAL, SAME_ID = "PARENT_FAILED", "INTERNAL", "SAME_ID"
_PAUSE, _LONGEST_PAUSE = 0.25, 15.0
"""Seconds between two tries to write an end that the disk refused."""
_A_LINE = 10
"""Numbers of a vector."""
EVERY = 0.25
"""Seconds between two looks that a reader can have."""
_FIRST = 0.1
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Processor:
    """Reads a job, asks the Runner, and ends the job."""

    def __init__(self, parts: ServerParts, runner: Runner) -> None:
        self._runner, self._parts = runner, parts
        self._workspace, self._claims, self._threads = parts.workspace, parts.claims, parts.threads
        self._clock, self._config = parts.clock, parts.config
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
            log.warning("job %s was moved or deleted while it ran; it is let go", running.job_id)
            self._left(running)
            self._tell(running, EventKind.LET_GO)

    async def _run(self, running: Running) -> None:
        try:
            outcome = await self._outcome(running)
        except NotYet as parent:
            await self._requeue(running, f"its parent {parent} has not ended")
        except EngineUnavailable as ill:
            await self._requeue(running, f"the engine is unavailable: {ill}")
        except EngineCrashed as crash:
            await self._crashed(running, alone=crash.alone)
        else:
            await self._end(running, outcome)

    async def _cut(self, running: Running) -> None:
        """It was ended from outside."""
        if running.why is Why.GONE:
            raise JobGone(running.job_id)
        if running.why is Why.CANCELLED:
            await self._end(running, failed(CANCELLED, running.reason or "cancelled"))
        else:
            await self._requeue(running, Why.STOP.value)

    # -- computing ---------------------------------------------------------------------

    async def _outcome(self, running: Running) -> SpoolOutcome:
        try:
            return await self._computed(running, *await self._threads.do(self._read, running))
        except Unfit as problem:
            code = LlmCode.INVALID_PROMPT if problem.field == PROMPT else INVALID
            return failed(code, str(problem))
        except ParentFailed as problem:
            return failed(PARENT_FAILED, str(problem))
        except TimeIsUp as late:
            return failed(late.code, str(late))
        except (JobGone, NotYet, EngineUnavailable, EngineCrashed):
            raise
        except LlmFailure as failure:
            return refused(failure)
        except Exception as error:
            log.exception("job %s: an error of ours", running.job_id)
            return failed(INTERNAL, f"an error of the server's own: {error!r}")

    def _read(self, running: Running) -> tuple[Spooled, GenerationRequest | EmbeddingRequest]:
        """Blocking."""
        try:
            with OpenFolder(running.folder) as opened:
                running.attempts = read_attempts(opened)
                job = read_job(opened)
        except (FileNotFoundError, NotAFolder):
            raise JobGone(running.job_id) from None
        running.meta = job.meta
        running.model = job.options.model or self.default_model
        return job, request_for(job, self._parents, self._config.max_tokens)

    async def _computed(
        self, running: Running, job: Spooled, ask: GenerationRequest | EmbeddingRequest
    ) -> SpoolOutcome:
        deadline, timeout = job.options.deadline, job.options.timeout
        left = None if deadline is None else deadline - self._clock.now()
        async with (
            within(left, DEADLINE, "its deadline passed before it had ended"),
            self._runner.health.job(running.model, suspect=running.attempts.is_suspect),
            within(timeout, TIMEOUT, f"it ran for longer than {timeout or 0:g} s"),
        ):
            began = self._clock.monotonic()
            model = await self._model(job.options.model)
            running.facts = {"model": model, "engine": self._runner.engine}
            if isinstance(ask, EmbeddingRequest):
                return embedded(await self._runner.embed(model, ask))
            if job.images and not (await self._runner.load(model)).vision:
                raise LlmFailure(LlmCode.NOT_SUPPORTED, f"the model {model} can't look at images")
            most = ask.max_tokens or self._config.max_tokens
            text = PartialWriter(running.folder, most, self._clock, self._threads)
            try:
                result = await answer(self._runner, model, ask, text.tell)
            finally:
                await text.close()
            return answered(ask, result, self._clock.monotonic() - began)

    async def _model(self, wanted: str) -> str:
        if not wanted:
            return self.default_model
        names = [facts.name for facts in await self._runner.models()]
        try:
            return model_for(wanted, names)
        except LlmFailure as unknown:
            # Its file may be no good at present, which is not the job's fault.
            try:
                return (await self._runner.load(wanted)).name
            except EngineUnavailable:
                raise
            except LlmFailure:
                raise unknown from None

    # -- ending; all raise JobGone if another process took the folder away ---------------

    async def _end(self, running: Running, outcome: SpoolOutcome) -> None:
        """DONE or FAILED, when the disk lets it."""
        try:
            await self._insist(running, lambda: self._write(running, outcome))
        except Conflict as clash:
            outcome = failed(SAME_ID, clash.message)
            await self._insist(running, lambda: self._write_elsewhere(running, outcome))
        what = EventKind.FAILED if outcome.error else EventKind.DONE
        self._tell(running, what, outcome.tokens, outcome.code, outcome.error)

    async def _requeue(self, running: Running, reason: str) -> None:
        """QUEUED again; that is not counted."""
        back = partial(requeue, self._workspace, running.job_id)
        await self._insist(running, lambda: self._return(running, back))
        self._tell(running, EventKind.REQUEUED, reason=reason)

    async def _crashed(self, running: Running, *, alone: bool) -> None:
        """QUEUED again, and counted; FAILED if it was alone when it happened too often. One that
        was not alone may be innocent, however often."""

        def lose() -> tuple[Attempts, bool]:
            if running.lost is None:
                running.lost = count_attempt(self._workspace, running.job_id, Loss.CRASHED)
            attempts = running.lost
            blamed = alone and attempts.count >= self._config.attempts
            code, now = LlmCode.ENGINE_CRASHED, self._clock.now()
            if blamed:
                give_up(self._workspace, running.job_id, attempts, code, now)
            else:
                requeue(self._workspace, running.job_id)
            return attempts, blamed

        attempts, blamed = await self._insist(running, lambda: self._return(running, lose))
        what = EventKind.FAILED if blamed else EventKind.REQUEUED
        why = f"the job {attempts.reason}"
        self._tell(running, what, code=LlmCode.ENGINE_CRASHED, reason=why)
        if blamed:
            self._runner.health.blame(running.model)

    async def _insist(self, running: Running, work: Callable[[], T]) -> T:
        pause, health = _PAUSE, self._parts.health
        while True:
            try:
                done = await self._threads.see_through(work)
            except StoreFailed as error:
                health.trouble(f"job {running.job_id}", str(error))
                await self._clock.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
            else:
                health.over(f"job {running.job_id}")
                return done

    def _tell(
        self, running: Running, what: EventKind, tokens: int = 0, code: str = "", reason: str = ""
    ) -> None:
        self._parts.tell(
            JobEvent(
                at=self._clock.now(),
                what=what,
                job_id=running.job_id,
                seconds=self._clock.monotonic() - running.since,
                tokens=tokens,
                code=code,
                reason=reason,
            )
        )

    # -- blocking, in a thread ---------------------------------------------------------

    def _write(self, running: Running, outcome: SpoolOutcome) -> None:
        self._check(running)
        meta = self._meta(running, outcome)
        try:
            if outcome.error:
                fail(self._workspace, running.job_id, meta, f"{outcome.code}: {outcome.error}")
            else:
                finish(self._workspace, running.job_id, meta, outcome.files)
        except Conflict:
            self._check(running)
            raise
        self._left(running)

    def _write_elsewhere(self, running: Running, outcome: SpoolOutcome) -> None:
        """Under the next id that is free: two jobs have the same, and neither is overwritten."""
        self._check(running)
        meta = self._meta(running, outcome)
        for number in range(1, 1_000_000):
            other = f"{running.job_id}_{number}"
            if self._workspace.holds(Status.FAILED, other) or not self._claims.take(other):
                continue
            os.rename(running.folder, self._workspace.name(Status.RUNNING, other))
            fail(self._workspace, other, meta, f"{outcome.code}: {outcome.error}")
            self._claims.drop(other)
            break
        self._left(running)

    def _return(self, running: Running, how: Callable[[], T]) -> T:
        """Under the lock that makes it sure that nobody else moves it."""
        with returning(self._workspace.private):
            self._check(running)
            done = how()
            self._left(running)
        return done

    def _check(self, running: Running) -> None:
        """JobGone unless the folder is still the one that we claimed, and ours."""
        try:
            found = os.lstat(running.folder).st_ino
        except FileNotFoundError:
            raise JobGone(running.job_id) from None
        if found != running.folder_id or not self._claims.holds(running.job_id):
            raise JobGone(running.job_id)

    def _left(self, running: Running) -> None:
        running.ended = True
        self._claims.drop(running.job_id)

    def _meta(self, running: Running, outcome: SpoolOutcome) -> Any:
        return structs.replace(
            running.meta or seen_meta(running.folder),
            **{**running.facts, **outcome.facts},
            code=outcome.code,
            completed_at=stamp(self._clock.now()),
            duration_s=round(self._clock.monotonic() - running.since, 2),
            attempts=running.attempts.count + 1,
        )


def model_for(wanted: str, names: Sequence[str]) -> str:
    """The model that a job means. Raises MODEL_NOT_FOUND."""
    try:
        return resolve_name(wanted, names)
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


# -- what comes of a job -------------------------------------------------------------


class SpoolOutcome(Struct, frozen=True, kw_only=True):
    """DONE with files, or FAILED with an error."""

    facts: Mapping[str, Any] = {}
    """Fields of its metadata."""
    files: Mapping[str, bytes] = {}
    code: str = ""
    error: str = ""
    """Why it failed; empty if it is DONE."""
    tokens: int = 0


def answered(ask: GenerationRequest, result: LlmResult, seconds: float) -> SpoolOutcome:
    """The text, and all of the answer if there is more to it than text."""
    used, choice = result.usage, result.choices[0]
    files = {RESULT: choice.text.encode(errors="replace")}
    if choice.logprobs is not None or choice.tool_calls or choice.reasoning:
        files[ANSWER] = msgspec.json.encode(result)
    took = result.timings.predicted_ms / 1000 or seconds
    facts = {
        **_facts(result),
        "completion_tokens": used.completion_tokens,
        "finish_reason": choice.finish_reason,
        "tokens_per_second": round(used.completion_tokens / took, 2) if took > 0 else 0.0,
        "seed": ask.sampling.seed,
    }
    return SpoolOutcome(facts=facts, files=files, tokens=used.completion_tokens)


def embedded(result: EmbeddingResult) -> SpoolOutcome:
    """As the original writes it: six digits that count, ten numbers a line."""
    numbers = [f"{number:.6g}" for number in result.vectors[0]]
    lines = [", ".join(numbers[at : at + _A_LINE]) for at in range(0, len(numbers), _A_LINE)]
    inner = ",\n    ".join(lines)
    text = f'{{\n  "dim": {len(numbers)},\n  "vector": [\n    {inner}\n  ]\n}}\n'
    return SpoolOutcome(facts=_facts(result), files={EMBEDDING: text.encode()})


def _facts(result: LlmResult | EmbeddingResult) -> dict[str, Any]:
    return {
        "model": result.model,
        "engine": result.engine,
        "prompt_tokens": result.usage.prompt_tokens,
        "cached_tokens": result.usage.cached_tokens,
    }


def failed(code: str, error: str) -> SpoolOutcome:
    return SpoolOutcome(code=code, error=error)


def refused(failure: LlmFailure) -> SpoolOutcome:
    """A context that is exceeded is told with both counts, whatever the runner said."""
    facts = {
        name: failure.facts[name] for name in ("prompt_tokens", "model") if name in failure.facts
    }
    error = failure.message
    tokens, context = failure.facts.get("prompt_tokens"), failure.facts.get("context")
    named = str(tokens) in error and str(context) in error
    if failure.code is LlmCode.CONTEXT_EXCEEDED and tokens and context and not named:
        error = f"the prompt has {tokens} tokens, and the context has room for {context}"
    return SpoolOutcome(facts=facts, code=failure.code, error=error)


class PartialWriter:
    """The text of one job so far: `tell` takes each piece as it comes, `close` before its end."""

    def __init__(self, folder: str, max_tokens: int, clock: Clock, threads: Threads) -> None:
        self._folder, self._max_tokens = folder, max_tokens
        self._clock, self._threads = clock, threads
        self._due = clock.monotonic() + _FIRST
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
            progress = self._progress(now - self._first)
            self._writing = asyncio.ensure_future(
                self._threads.do(_write, self._folder, text, progress, first=first)
            )

    async def close(self) -> None:
        """Nothing is written any more."""
        if self._writing is not None:
            await asyncio.wait((self._writing,))

    def _progress(self, seconds: float) -> bytes:
        speed = (self._tokens - 1) / max(seconds, 1e-3)
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
    with suppress(OSError, PenstockError):
        if first:
            replace_file(folder, PARTIAL, said, Sync.NONE)
        else:
            _append(f"{folder}/{PARTIAL}", said)
        replace_file(folder, PROGRESS, progress, Sync.NONE)


def _append(path: str, data: bytes) -> None:
    file = os.open(path, _APPEND)
    try:
        if stat.S_ISREG(os.fstat(file).st_mode):
            os.write(file, data)
    finally:
        os.close(file)
