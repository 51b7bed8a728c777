"""Tells an ill engine from a bad job, for all callers of one Runner.

An engine that is out of memory, can't load a model or keeps crashing *pauses* that model: its jobs
wait, and none is charged. Meanwhile the supervisor probes the engine, less and less often, until it
answers. A crash that the engine recovers from makes suspects of the jobs that were under way; each
is tried again alone, and only one that ran alone can be blamed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from msgspec import Struct

from penstock.ports.clock import Clock, SystemClock
from penstock.workloads.llm.runner import Runner, answer
from penstock.workloads.llm.values import (
    CompletionRequest,
    EmbeddingRequest,
    EngineCrashed,
    EngineUnavailable,
    LlmCode,
    LlmFailure,
)

log = logging.getLogger(__name__)

MEMORY = "memory"
"""The fact of a crash whose cause was a lack of memory."""
_FIRST_DELAY, _LONGEST_DELAY = 1.0, 60.0
_NEVER_A_JOB = frozenset({LlmCode.OUT_OF_MEMORY, LlmCode.ENGINE_MISSING})
"""Codes that say nothing about a job, wherever they are raised."""
_PROBE = CompletionRequest(prompts=("Hello",), max_tokens=1)
_EMBEDDING_PROBE = EmbeddingRequest(inputs=("Hello",))


class Stay:
    """One that is inside."""

    alone = True
    """Whether nobody else was inside for any part of its stay."""


class Gate:
    """Who wants to be alone waits until those inside have left; nobody else enters meanwhile."""

    def __init__(self) -> None:
        self._inside: set[Stay] = set()
        self._door = asyncio.Lock()
        self._left = asyncio.Event()

    async def opened(self) -> None:
        """Until nobody is alone inside, or waits to be."""
        async with self._door:
            pass

    @asynccontextmanager
    async def entered(self, *, alone: bool) -> AsyncIterator[Stay]:
        stay = Stay()
        async with self._door:
            if alone:
                await self._empty()
                yield stay
                return
            self._add(stay)
        try:
            yield stay
        finally:
            self._inside.discard(stay)
            self._left.set()

    def _add(self, stay: Stay) -> None:
        if self._inside:
            stay.alone = False
            for other in self._inside:
                other.alone = False
        self._inside.add(stay)

    async def _empty(self) -> None:
        while self._inside:
            self._left.clear()
            await self._left.wait()


class Pause(Struct, frozen=True, kw_only=True):
    """Why a model's jobs wait, and when the engine is tried again."""

    code: LlmCode
    why: str
    delay: float
    """Seconds between two tries."""

    def __str__(self) -> str:
        return f"{self.code}: {self.why} (tried again every {self.delay:g} s)"


class _Record:
    """What is known of the engine of one model."""

    def __init__(self) -> None:
        self.pause: Pause | None = None
        self.failures = 0
        """In a row, since it last answered a job."""
        self.doubtful = False
        """Whether a job was blamed, and nothing was answered since."""
        self.probing: asyncio.Task[None] | None = None


class EngineSupervisor:
    """The health of a Runner's engines. Call `close` in the end; the Runner is its owner's."""

    def __init__(self, runner: Runner, clock: Clock | None = None) -> None:
        self._runner, self._clock = runner, clock or SystemClock()
        self._records: dict[str, _Record] = {}
        self.gate = Gate()
        self.on_change: Callable[[str, Pause | None], None] | None = None
        """Called with the model when it is paused (again), and when it is not any more."""

    @property
    def pauses(self) -> Mapping[str, Pause]:
        return {name: one.pause for name, one in self._records.items() if one.pause is not None}

    def pause_of(self, model: str) -> Pause | None:
        record = self._records.get(model)
        return record.pause if record is not None else None

    @asynccontextmanager
    async def job(self, model: str, *, suspect: bool) -> AsyncIterator[Stay]:
        """Compute one job inside; a suspect is alone there.

        Raises EngineUnavailable if no job of the model can be computed now, and EngineCrashed if
        the engine died. Every other failure is the job's own.
        """
        self.check(model)
        async with self.gate.entered(alone=suspect) as stay:
            self.check(model)
            try:
                yield stay
            except LlmFailure as failure:
                raise self._judged(model, failure, stay) from failure
            self._answered(model)

    def check(self, model: str) -> None:
        """Raises EngineUnavailable while the model is paused."""
        if (pause := self.pause_of(model)) is not None:
            raise EngineUnavailable(pause.code, pause.why)

    def fail(self, model: str, failure: LlmFailure) -> None:
        """The engine can't do its work: pause the model, and try again later and later. Fine if
        it is paused already."""
        record = self._record(model)
        if record.pause is None:
            self._failed(model, record, failure)
            record.probing = asyncio.create_task(self._probe(model, record))

    def blame(self, model: str) -> None:
        """A job is given up, because the engine died whenever it ran alone."""
        self._record(model).doubtful = True

    def close(self) -> None:
        for record in self._records.values():
            if record.probing is not None:
                record.probing.cancel()

    # ----------------------------------------------------------------------------------

    def _record(self, model: str) -> _Record:
        return self._records.setdefault(model, _Record())

    def _failed(self, model: str, record: _Record, failure: LlmFailure) -> None:
        record.failures += 1
        delay = min(_LONGEST_DELAY, _FIRST_DELAY * 2.0 ** min(record.failures - 1, 10))
        self._set(model, Pause(code=failure.code, why=failure.message, delay=delay))

    def _judged(self, model: str, failure: LlmFailure, stay: Stay) -> LlmFailure:
        if isinstance(failure, EngineUnavailable) or failure.code in _NEVER_A_JOB:
            self.fail(model, failure)
            return EngineUnavailable(failure.code, failure.message, **failure.facts)
        if failure.code is not LlmCode.ENGINE_CRASHED:
            return failure
        if stay.alone and self._record(model).doubtful:
            # It dies whoever is alone with it: let it prove first that it can answer at all.
            self.fail(model, failure)
            return EngineUnavailable(failure.code, failure.message, **failure.facts)
        if failure.facts.get(MEMORY):
            self.fail(model, failure)
        return EngineCrashed(failure, alone=stay.alone)

    def _answered(self, model: str) -> None:
        if (record := self._records.get(model)) is not None:
            record.failures, record.doubtful = 0, False

    async def _probe(self, model: str, record: _Record) -> None:
        """Until the engine answers."""
        while (pause := record.pause) is not None:
            await self._clock.sleep(pause.delay)
            try:
                await self._try(model)
            except LlmFailure as failure:
                self._failed(model, record, failure)
            except Exception:
                log.exception("the engine of %s can't be probed", model)
            else:
                record.probing, record.doubtful = None, False
                self._set(model, None)

    async def _try(self, model: str) -> None:
        await self._runner.models()  # its file may be another one by now
        try:
            await answer(self._runner, (await self._runner.load(model)).name, _PROBE)
        except LlmFailure as failure:
            if failure.code is not LlmCode.NOT_SUPPORTED:
                raise
            await self._runner.embed(model, _EMBEDDING_PROBE)

    def _set(self, model: str, pause: Pause | None) -> None:
        record = self._record(model)
        if pause == record.pause:
            return
        record.pause = pause
        if self.on_change is not None:
            self.on_change(model, pause)
