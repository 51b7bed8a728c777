"""An engine for tests of applications: in memory, with a clock that can be stepped."""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from penstock.adapters.memory.blobs import MemoryBlobs
from penstock.app.application import App, make_executors
from penstock.app.client import Client
from penstock.app.engine import Engine
from penstock.app.portal import Begun, LoopThread
from penstock.config import load
from penstock.core.errors import InvalidRequest, WaitTimedOut
from penstock.testing.clock import LoopClock, SteppedLoop
from penstock.worker.attempt import Attempt
from penstock.workloads.function.context import running
from penstock.workloads.function.options import Mode

T = TypeVar("T")

_POLLING = frozenset(
    f"penstock {name}"
    for name in ("batches", "pipelines", "pruner", "reconciler", "review", "rulebook")
)
"""Tasks of an engine that look again and again. If one is missing here, steps are only slower."""
_LOOK = 0.5
"""Seconds after a deadline by which the reconciler has looked."""
_CLOSING = 10.0
"""Real seconds that a job gets to end when its engine is closed."""
_SOON = 0.1
"""Seconds in which an engine stops where nothing runs."""
_STOPPING = 600.0
"""Seconds, by its own clock, in which an engine has given up waiting for what runs."""
_SHOWN = 5
"""Jobs that an error names."""


class InMemoryEngine(Client):
    """A Client of an engine of its own, which it starts and closes.

    It is the real engine with a local worker. Jobs are kept in memory; nothing is on a network.
    Time passes as usual, until `step` or `drain` let more of it pass at once: delays, schedules,
    back-off, timeouts, deadlines and what jobs await with `asyncio.sleep` follow this clock.
    `time.time()`, `time.sleep()` and `datetime.now()` do not.
    """

    def __init__(
        self,
        app: App,
        *,
        start: dt.datetime | None = None,
        patience: float = 1.0,
        **settings: Any,
    ) -> None:
        """`start` is the time at which its clock begins. `patience` is for how many real seconds
        a step waits for a job that runs in a thread, in a process, or on a socket. `settings` are
        those of an engine; no file and no environment variable is read."""
        if start is not None and start.tzinfo is None:
            raise InvalidRequest("start", f"{start} has no time zone")
        self._app, self._start, self._patience = app, start, patience
        self._settings = settings
        self._loop: SteppedLoop | None = None

    # -- start and close ----------------------------------------------------------

    def start(self) -> Self:
        """Start the engine; the application's functions submit to it until it is closed."""
        if self._loop is not None:
            raise RuntimeError("the engine is started already")
        self._given_until: dict[tuple[tuple[str, int], bool], float] = {}
        """By attempt, and whether it was asked to end, the real time until which steps wait."""
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-test-")
        try:
            flags = {"durability": "memory", **self._settings, "data_dir": self._folder.name}
            self._engine_settings = load(Path(os.devnull), {}, flags)
            self._loop = SteppedLoop(_POLLING, self._outside, self._next_look)
            begin = time.time() if self._start is None else self._start.timestamp()
            self._clock = _Clock(self._loop, begin - self._loop.time())
            self._thread = _Thread("penstock", self._loop)
            try:
                self._thread.run(self._open())
            except BaseException:
                self._thread.close()
                raise
        except BaseException:
            self._loop = None
            self._folder.cleanup()
            raise
        super().__init__(self._running.api, self._thread, self._app.functions)
        self._now = self._clock.now
        self._before = self._app.bind(self)
        return self

    async def _open(self) -> None:
        settings = self._engine_settings
        executors = make_executors(self._app, settings)
        size = max(settings.limits.max_input, settings.limits.max_result)
        blobs = MemoryBlobs(
            inline_limit=settings.storage.inline_limit, max_size=size, clock=self._clock
        )
        self._running = Engine(settings, executors, clock=self._clock, listen=False, blobs=blobs)
        self._running.on_failure = self._thread.fail
        await self._running.start()

    def close(self) -> None:
        """End what runs, and forget everything. Raises what the engine failed of, if it did."""
        if self._loop is None:
            return
        loop, self._loop = self._loop, None
        self._app.bind(self._before)
        closing = asyncio.run_coroutine_threadsafe(self._close(loop), loop)
        try:
            closing.result(_CLOSING)
        except TimeoutError:
            jobs = ", ".join(attempt.job_id for attempt in self._active())
            raise RuntimeError(
                f"the engine can't be closed: {jobs} still runs in a thread, and ignores"
                " cancellation (look at ctx.cancel in it)"
            ) from None
        self._thread.close()
        self._folder.cleanup()
        if (failure := self._running.failure) is not None:
            raise failure

    async def _close(self, loop: SteppedLoop) -> None:
        stopping = asyncio.ensure_future(self._running.stop())
        await asyncio.wait((stopping,), timeout=_SOON)
        if not stopping.done():  # it waits for jobs that run
            await loop.step(_STOPPING, until=stopping.done)
        await stopping

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.start)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)

    # -- time ---------------------------------------------------------------------

    @property
    def now(self) -> dt.datetime:
        """The time that its clock shows."""
        return dt.datetime.fromtimestamp(self._clock.now(), dt.UTC)

    def step(
        self, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0
    ) -> None:
        """Let so much time pass, from one due time to the next, with all that happens then.

        Returns when nothing is left to do at that time: jobs that became due have run. A job that
        does not end within `patience` real seconds is left running.
        """
        self._thread.run(self._step(_seconds(days, hours, minutes, seconds)))

    async def astep(
        self, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0
    ) -> None:
        await self._thread.arun(self._step(_seconds(days, hours, minutes, seconds)))

    async def _step(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SteppedLoop)
        await loop.step(seconds, until)

    def drain(self, *, days: float = 1) -> None:
        """Let time pass until every job has ended, its retries too.

        Raises WaitTimedOut, naming what each waits for, if some have not after this many days.
        """
        self._thread.run(self._drain(days))

    async def adrain(self, *, days: float = 1) -> None:
        await self._thread.arun(self._drain(days))

    async def _drain(self, days: float) -> None:
        open_jobs = self._running.open_jobs

        def has_ended() -> bool:
            return open_jobs.waiting() == 0 and not open_jobs.held

        await self._step(_seconds(days, 0, 0, 0), until=has_ended)
        if has_ended():
            return
        left = await self._running.store.unfinished()
        shown = [f"{job.job_id}: {await self.api.why(job.job_id)}" for job in left[:_SHOWN]]
        more = f"; and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        raise WaitTimedOut(f"not ended after {days:g} days: {'; '.join(shown)}{more}")

    def _next_look(self) -> float:
        """When the reconciler next ends a job whose deadline has passed, by the loop's time."""
        loop, now = self._clock.monotonic(), self._clock.now()
        deadlines = self._running.open_jobs.deadlines.values()
        looks = (loop + deadline - now + _LOOK for deadline in deadlines)
        return min((at for at in looks if at > loop), default=float("inf"))

    def _outside(self) -> float:
        """Real seconds for which a step waits for work that is not done in the loop."""
        now, loop = time.monotonic(), self._thread.loop
        assert isinstance(loop, SteppedLoop)
        by_io = loop.has_io or loop.calls > 0
        awaited = {
            (attempt.key, attempt.cancel.requested)  # it gets as much again to end when asked to
            for attempt in self._active()
            if by_io or not self._is_in_loop(attempt)
        }
        self._given_until = {
            key: self._given_until.get(key, now + self._patience) for key in awaited
        }
        return max((until - now for until in self._given_until.values()), default=0.0)

    def _active(self) -> list[Attempt]:
        worker = self._running._local
        return [] if worker is None else list(worker._active.values())

    def _is_in_loop(self, attempt: Attempt) -> bool:
        """Whether it does nothing while the loop rests."""
        function = self._app.functions.get(attempt.request.topic)
        is_async = function is not None and function.mode is Mode.ASYNC
        return is_async or attempt.is_waiting or attempt.job_id in self._thread.waiting


def _seconds(days: float, hours: float, minutes: float, seconds: float) -> float:
    total = dt.timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()
    if total < 0:
        raise InvalidRequest("step", "time does not go back")
    return total


class _Clock(LoopClock):
    """Nobody sets this one, and it is the loop's."""

    recheck = float("inf")


class _Thread(LoopThread):
    """Knows which jobs block their thread for an answer of the engine, as for a child's result."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self.waiting: set[str] = set()
        super().__init__(name, loop)

    def call(self, begin: Callable[[], Begun[T]]) -> T:
        if (ctx := running.get()) is None:
            return super().call(begin)
        job_id, waiting = ctx.job_id, self.waiting

        def begin_waiting() -> Begun[T]:
            future, read = begin()
            waiting.add(job_id)
            # Before the thread is told, so that no step takes it for idle when it goes on.
            future.add_done_callback(lambda _: waiting.discard(job_id))
            return future, read

        return super().call(begin_waiting)
