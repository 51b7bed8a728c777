"""The health of a Runner's engines, and how an ill engine is told from a bad job.

An engine that is out of memory, can't load a model or keeps crashing is *ill*: the jobs of that
model wait, and none is charged. Meanwhile it is probed, less and less often, until it answers. A
crash that the engine recovers from makes suspects of the jobs that were under way; each is tried
again alone, whoever's it is, and only one that ran alone can be blamed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from enum import StrEnum

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


class ExclusiveGate:
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


class EngineState(StrEnum):
    """What has become of a model's engine."""

    LOADING = "loading"
    READY = "ready"
    ILL = "ill"
    """It can't compute anything: jobs wait, and it is probed until it answers."""
    GONE = "gone"
    """It is not in memory: not used yet, unloaded, or dead. The next job loads it."""


class EngineHealth(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of a model's engine; of one that is ill, why, and how often it is probed."""

    state: EngineState
    code: LlmCode | None = None
    cause: str = ""
    delay: float = 0.0
    """Seconds between two probes."""

    @property
    def is_ill(self) -> bool:
        return self.state is EngineState.ILL

    def __str__(self) -> str:
        """As people read it; of an illness, the reason for which jobs wait."""
        if not self.is_ill:
            return self.state.value
        return f"{self.code}: {self.cause} (tried again every {self.delay:g} s)"


_WELL = {state: EngineHealth(state=state) for state in EngineState}


class _Record:
    """What is known of the engine of one model."""

    def __init__(self) -> None:
        self.illness: EngineHealth | None = None
        self.failures = 0
        """In a row, since it last answered a job."""
        self.doubtful = False
        """Whether a job was blamed, and nothing was answered since."""
        self.probing: asyncio.Task[None] | None = None
        self.changed = asyncio.Event()
        """Set, and replaced, when the illness begins, changes or ends."""


def _always_ready(model: str) -> EngineState:
    return EngineState.READY


class RunnerHealth:
    """The health of a Runner's engines, by model. The Runner owns it, and closes it."""

    def __init__(
        self,
        runner: Runner,
        state: Callable[[str], EngineState] = _always_ready,
        clock: Clock | None = None,
    ) -> None:
        """`state` tells whether a model is in memory: loading, ready or gone."""
        self._runner, self._state, self._clock = runner, state, clock or SystemClock()
        self._records: dict[str, _Record] = {}
        self.gate = ExclusiveGate()
        self.listeners: list[Callable[[str, EngineHealth], None]] = []
        """Called with the model when it falls ill (or its illness changes), and when it is well
        again."""

    def of(self, model: str) -> EngineHealth:
        record = self._records.get(model)
        if record is not None and record.illness is not None:
            return record.illness
        return _WELL[self._state(model)]

    @property
    def ill(self) -> Mapping[str, EngineHealth]:
        """The models that are ill."""
        return {name: one.illness for name, one in self._records.items() if one.illness}

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
        """Raises EngineUnavailable while the model's engine is ill."""
        health = self.of(model)
        if health.code is not None:
            raise EngineUnavailable(health.code, health.cause)

    async def change(self, model: str) -> None:
        """Until its illness begins, changes or ends."""
        await self._record(model).changed.wait()

    def fail(self, model: str, failure: LlmFailure) -> None:
        """The engine can't do its work: it is ill from now on, and probed later and later. Fine
        if it is ill already."""
        record = self._record(model)
        if record.illness is None:
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
        illness = EngineHealth(
            state=EngineState.ILL, code=failure.code, cause=failure.message, delay=delay
        )
        self._set(model, illness)

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
        while (illness := record.illness) is not None:
            await self._clock.sleep(illness.delay)
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

    def _set(self, model: str, illness: EngineHealth | None) -> None:
        record = self._record(model)
        if illness == record.illness:
            return
        record.illness = illness
        record.changed.set()
        record.changed = asyncio.Event()
        for listener in self.listeners:
            listener(model, self.of(model))
