"""Takes work, runs it under a lease, and reports.

Work is pushed: a worker says how many jobs it wants to hold (its credit) and is given that
many. The credit is its slots, and more while jobs are short, so that it never waits for the
next one; long jobs are never held in advance. Results are kept until the engine says that
they are durable, and told again if the connection was lost in between.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import os
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from msgspec import Struct

from penstock.core.job import JobResult
from penstock.lifecycles.canonical import JobState
from penstock.ports.blobs import Blobs
from penstock.ports.bus import (
    HANDSHAKE,
    AnyMessage,
    Bus,
    Credit,
    Dispatch,
    Farewell,
    Finished,
    Handshake,
    JobCancel,
    Returned,
    Settled,
    Started,
    jobs_of,
)
from penstock.ports.clock import Clock
from penstock.ports.executor import Executor
from penstock.worker.attempt import Attempt
from penstock.worker.outbox import Outbox

log = logging.getLogger(__name__)

_AHEAD = 0.05
"""Seconds of work that a worker likes to hold beyond its slots."""
_MOST_AHEAD = 2000
_REVIEW = 0.1
"""Seconds between looks at the credit and at jobs that can't be started."""
_PATIENCE = 1.0
"""Seconds a job may be held here unstarted before it is handed back."""


class WorkerOptions(Struct, frozen=True, kw_only=True):
    worker_id: str
    pool: str = "default"
    slots: int = 32
    labels: Mapping[str, str] = {}
    local: bool = False
    """It lives in the engine's own process."""
    drain_timeout: float = 30.0


class Worker:
    """A service: `run` until cancelled, then it drains."""

    def __init__(
        self,
        bus: Bus,
        blobs: Blobs,
        executors: Sequence[Executor],
        clock: Clock,
        options: WorkerOptions,
    ) -> None:
        self.bus, self.blobs, self.clock, self.options = bus, blobs, clock, options
        self.executors = list(executors)
        self.topics = tuple(dict.fromkeys(t for e in self.executors for t in e.topics))
        self._by_topic: dict[str, Executor] = {}
        self._queue: deque[Attempt] = deque()
        self._active: dict[tuple[str, int], Attempt] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._unsettled: dict[tuple[str, int], JobResult] = {}
        self._deadlines: list[tuple[float, tuple[str, int]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_for = 0.0
        self._done = 0
        self._credit = options.slots
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    # -- service ------------------------------------------------------------------

    async def run(self) -> None:
        self._outbox = Outbox(self.bus)
        subject = jobs_of(self.options.worker_id)
        subscription = self.bus.subscribe(subject, self._receive)
        try:
            self.announce()
            await self._review()
        finally:
            await asyncio.shield(self._drain())
            await subscription.close()
            for executor in self.executors:
                await executor.close()

    def announce(self) -> None:
        """Say who we are and what we hold: at the start, and whenever the bus is back."""
        options = self.options
        self._outbox.flush()
        self.bus.publish(
            HANDSHAKE,
            [
                Handshake(
                    options.worker_id,
                    options.pool,
                    self.topics,
                    options.slots,
                    options.labels,
                    tuple(self._held()),
                    socket.gethostname(),
                    os.getpid(),
                    options.local,
                )
            ],
        )
        for key in self._active:
            self._outbox.add(Started(*key, options.worker_id))
        for result in self._unsettled.values():
            self._outbox.add(Finished(result))

    def _held(self) -> list[tuple[str, int]]:
        queued = [(attempt.job_id, attempt.attempt) for attempt in self._queue]
        return [*queued, *self._active, *self._unsettled]

    async def _review(self) -> None:
        """Now and then: adjust the credit, hand back what can't be started."""
        while True:
            before, counted = self.clock.monotonic(), self._done
            await self.clock.sleep(_REVIEW)
            elapsed = self.clock.monotonic() - before
            rate = (self._done - counted) / elapsed if elapsed > 0 else 0.0
            self._set_credit(self.options.slots + min(_MOST_AHEAD, int(rate * _AHEAD)))
            self._hand_back(self.clock.monotonic() - _PATIENCE, "the worker is busy")

    def _set_credit(self, credit: int) -> None:
        if abs(credit - self._credit) * 4 > self._credit or credit == self.options.slots:
            if credit != self._credit:
                self._credit = credit
                self.bus.publish(HANDSHAKE, [Credit(self.options.worker_id, credit)])

    def _hand_back(self, received_before: float, reason: str) -> None:
        kept: deque[Attempt] = deque()
        for attempt in self._queue:
            if attempt.received_at < received_before:
                self._outbox.add(
                    Returned(attempt.job_id, attempt.attempt, self.options.worker_id, reason)
                )
            else:
                kept.append(attempt)
        self._queue = kept

    async def _drain(self) -> None:
        """Take no more, hand back what did not start, and let what runs come to an end."""
        self._draining = True
        farewell = Farewell(self.options.worker_id)
        self.bus.publish(HANDSHAKE, [farewell])
        self._hand_back(float("inf"), "the worker is stopping")
        try:
            async with asyncio.timeout(self.options.drain_timeout):
                await self._idle.wait()
        except TimeoutError:
            for attempt in list(self._active.values()):
                attempt.end("the worker was stopped while it ran the job", JobState.FAILED)
            await self._idle.wait()
        self._outbox.flush()
        self.bus.publish(HANDSHAKE, [farewell])

    # -- taking work --------------------------------------------------------------

    async def _receive(self, messages: list[AnyMessage]) -> None:
        for message in messages:
            match message:
                case Dispatch():
                    self._take(message)
                case JobCancel(job_id, attempt, reason, _):
                    self._end(job_id, attempt, reason)
                case Settled(jobs):
                    for key in jobs:
                        self._unsettled.pop(key, None)
        self._start_more()

    def _take(self, dispatch: Dispatch) -> None:
        key = (dispatch.request.job_id, dispatch.attempt)
        if key in self._active or key in self._unsettled:
            return
        attempt = Attempt(dispatch, self.clock, self._outbox.add)
        self._queue.append(attempt)
        if self._draining:
            self._hand_back(float("inf"), "the worker is stopping")

    def _end(self, job_id: str, attempt_number: int, reason: str) -> None:
        running = self._active.get((job_id, attempt_number))
        if running is not None:
            running.end(reason, JobState.CANCELLED)
            return
        for queued in self._queue:
            if queued.job_id == job_id and queued.attempt == attempt_number:
                queued.end(reason, JobState.CANCELLED)
                return

    def _start_more(self) -> None:
        while self._queue and len(self._active) < self.options.slots:
            attempt = self._queue.popleft()
            key = (attempt.job_id, attempt.attempt)
            self._active[key] = attempt
            attempt.begin()
            heapq.heappush(self._deadlines, (attempt.deadline, key))
            task = asyncio.get_running_loop().create_task(self._work(key, attempt))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if self._active:
            self._idle.clear()
            self._watch_deadlines()

    async def _work(self, key: tuple[str, int], attempt: Attempt) -> None:
        worker_id = self.options.worker_id
        executor = self._executor_for(attempt.request.topic)
        try:
            self._outbox.add(Started(*key, worker_id))
            result = await attempt.run(executor, self.blobs, worker_id)
            if not self.options.local:
                self._unsettled[key] = result
            self._outbox.add(Finished(result))
        finally:
            self._done += 1
            del self._active[key]
            self._start_more()
            if not self._active:
                self._idle.set()

    def _executor_for(self, topic: str) -> Executor:
        executor = self._by_topic.get(topic)
        if executor is None:
            executor = self._by_topic[topic] = next(
                e for e in self.executors if any(fnmatchcase(topic, glob) for glob in e.topics)
            )
        return executor

    # -- deadlines ----------------------------------------------------------------

    def _watch_deadlines(self) -> None:
        """Keep one timer for all: set for the soonest deadline of what still runs."""
        while self._deadlines and self._deadlines[0][1] not in self._active:
            heapq.heappop(self._deadlines)
        if not self._deadlines:
            return
        soonest = self._deadlines[0][0]
        if self._timer is not None:
            if soonest >= self._timer_for:
                return
            self._timer.cancel()
        self._timer_for = soonest
        wait = max(0.0, soonest - self.clock.now())
        # Never for long: it is the wall clock that counts, and it may be set.
        self._timer = asyncio.get_running_loop().call_later(min(wait, 1.0), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now = self.clock.now()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, key = heapq.heappop(self._deadlines)
            attempt = self._active.get(key)
            if attempt is not None:
                attempt.end(_too_long(attempt), JobState.TIMEOUT)
        self._watch_deadlines()


def _too_long(attempt: Attempt) -> str:
    if attempt.deadline == attempt.dispatch.deadline:
        return "its deadline passed while it was running"
    return f"it ran for more than {attempt.dispatch.timeout:g} s"
