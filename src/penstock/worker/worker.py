"""Takes work, runs it under a lease, and reports.

Work is pushed: a worker says how many jobs it wants to hold (its credit) and is given that
many. The credit is its slots, and more while jobs are short, so that it never waits for the
next one; long jobs are never held in advance. Results are kept until the engine says that
they are durable, and told again if the connection was lost in between.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from asyncio import FIRST_COMPLETED
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from msgspec import Struct
from msgspec.structs import replace

from penstock.core.errors import Conflict
from penstock.core.job import JobResult
from penstock.lifecycles.canonical import JobState
from penstock.ports.blobs import Blobs
from penstock.ports.bus import (
    HANDSHAKE,
    AnyMessage,
    Bus,
    Confirmed,
    Credit,
    Dismissed,
    Dispatch,
    Farewell,
    Finished,
    Handshake,
    JobCancel,
    Reintroduce,
    Returned,
    Settled,
    Started,
    Welcomed,
    jobs_of,
)
from penstock.ports.clock import Clock
from penstock.ports.executor import Executor, Interrupted, TopicPaused, World
from penstock.ports.starts import StartBook
from penstock.worker.attempt import Attempt, storable
from penstock.worker.deadlines import Deadlines
from penstock.worker.outbox import Outbox
from penstock.worker.reporter import Reporter
from penstock.worker.runners import Runners

log = logging.getLogger(__name__)

_AHEAD = 0.1
"""Seconds of work that a worker likes to hold beyond its slots."""
_MOST_AHEAD = 4000
_REVIEW = 0.1
"""Seconds between looks at the credit and at jobs that can't be started."""
_RENAME = "give this one another name with --id"
_STOPPED = "the worker was stopped while it ran the job"
_PATIENCE = 1.0
"""Seconds a job may be held here unstarted before it is handed back."""
_REMEMBERED = 10_000
"""Attempts by which a dispatch that comes twice is known."""


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
        make_book: Callable[[str, str], StartBook] | None = None,
        world: World | None = None,
    ) -> None:
        self._world = world
        self._opened = False
        self.bus, self.blobs, self.clock, self.options = bus, blobs, clock, options
        self._make_book = make_book
        self._book: StartBook | None = None
        self.executors = list(executors)
        self.offers = {topic: o for e in self.executors for topic, o in e.offers.items()}
        self.topics = tuple(dict.fromkeys(t for e in self.executors for t in e.topics))
        self._by_topic: dict[str, Executor] = {}
        self._taken: set[tuple[str, int]] = set()
        self._taken_order: deque[tuple[str, int]] = deque()
        self._queue: deque[Attempt] = deque()
        self._starting: dict[tuple[str, int], Attempt] = {}
        """Waiting for the engine's word that their start is durable."""
        self._active: dict[tuple[str, int], Attempt] = {}
        self._unsettled: dict[tuple[str, int], JobResult] = {}
        self.left: set[str] = set()
        """Jobs that another worker is to take up where we stopped."""
        self._done = 0
        self._credit = options.slots
        self._draining = False
        self.session = secrets.token_hex(8)
        self._welcome = False
        self.welcomed = asyncio.Event()
        """The engine knows it, and what it serves."""
        self._link = 1
        self._reporter = Reporter(bus, options.worker_id, self.session, self.executors, clock)
        self._deadlines = Deadlines(clock, self._active.values, _time_out)
        self._idle = asyncio.Event()
        self._idle.set()

    # -- service ------------------------------------------------------------------

    async def run(self) -> None:
        self._outbox = Outbox(self.bus, lambda: len(self._queue) > self.options.slots)
        self._runners = Runners(self._work)
        self._dismissed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        subject = jobs_of(self.options.worker_id)
        subscription = self.bus.subscribe(subject, self._receive)
        reviewing = asyncio.ensure_future(self._review())
        try:
            await self.open_executors()
            self.announce(self._link)
            await asyncio.wait((reviewing, self._dismissed), return_when=FIRST_COMPLETED)
            if self._dismissed.done():
                self._dismissed.result()
            reviewing.result()
        finally:
            reviewing.cancel()
            await asyncio.shield(self._drain())
            await subscription.close()
            for executor in self.executors:
                await executor.close()
            if self._book is not None:
                self._book.close(keep=bool(self._unsettled))

    async def open_executors(self) -> None:
        """Let executors that keep records say what they serve, before they are given any."""
        if self._world is not None and not self._opened:
            self._opened = True
            for executor in self.executors:
                if (opening := getattr(executor, "open", None)) is not None:
                    await opening(self._world)

    def announce(self, link: int) -> None:
        """Say who we are and what we hold: at the start, and whenever the bus is back."""
        options = self.options
        self._link = link
        self._outbox.flush()
        self.bus.publish(
            HANDSHAKE,
            [
                Handshake(
                    options.worker_id,
                    options.pool,
                    self.topics,
                    options.slots,
                    {**self._reporter.labels(), **options.labels},
                    tuple(self._held()),
                    socket.gethostname(),
                    os.getpid(),
                    options.local,
                    self.session,
                    link,
                    self.offers,
                )
            ],
        )
        if self._draining:  # it is no offer to take work
            self.bus.publish(HANDSHAKE, [Farewell(options.worker_id)])
        for key in self._active:
            self._outbox.add(Started(*key, options.worker_id))
        for key in self._starting:
            self._outbox.add(Started(*key, options.worker_id, confirm=True))
        for result in self._unsettled.values():
            self._outbox.add(Finished(result))

    def _held(self) -> list[tuple[str, int]]:
        queued = [(attempt.job_id, attempt.attempt) for attempt in self._queue]
        return [*queued, *self._starting, *self._active, *self._unsettled]

    async def _review(self) -> None:
        """Now and then: adjust the credit, hand back what can't be started."""
        while True:
            before, counted = self.clock.monotonic(), self._done
            await self.clock.sleep(_REVIEW)
            elapsed = self.clock.monotonic() - before
            rate = (self._done - counted) / elapsed if elapsed > 0 else 0.0
            self._set_credit(self.options.slots + min(_MOST_AHEAD, int(rate * _AHEAD)))
            self._hand_back(self.clock.monotonic() - _PATIENCE, "the worker is busy")
            if self._welcome:
                self._reporter.tell()
            if self._book is not None:
                self._trim(self._book)

    def _trim(self, book: StartBook) -> None:
        try:
            book.trim([*self._active, *self._unsettled])
        except OSError as error:  # it is only long; a full disk must not end the worker
            log.warning("the start book can't be made shorter: %s", error)

    def _set_credit(self, credit: int) -> None:
        much = abs(credit - self._credit) * 4 > self._credit
        if credit != self._credit and (much or credit == self.options.slots):
            self._credit = credit
            self.bus.publish(HANDSHAKE, [Credit(self.options.worker_id, credit)])

    def _hand_back(self, received_before: float, reason: str) -> None:
        """Return what did not begin: the engine may give it to another, whatever it is."""
        kept: deque[Attempt] = deque()
        for attempt in self._queue:
            if attempt.received_at < received_before:
                self._return(attempt, reason)
            else:
                kept.append(attempt)
        self._queue = kept

    def _return(self, attempt: Attempt, reason: str, *, charged: bool = True) -> None:
        worker_id = self.options.worker_id
        said = storable(reason)
        self._outbox.add(Returned(attempt.job_id, attempt.attempt, worker_id, said, charged))

    async def _drain(self) -> None:
        """Take no more, hand back what did not start, and let what runs come to an end."""
        self._draining = True
        farewell = Farewell(self.options.worker_id, session=self.session)
        self.bus.publish(HANDSHAKE, [farewell])
        self._hand_back(float("inf"), "the worker is stopping")
        for attempt in self._starting.values():
            self._return(attempt, "the worker is stopping")
        self._starting.clear()
        for attempt in list(self._active.values()):
            if attempt.request.idempotent and self._is_resumable(attempt):
                attempt.end(_STOPPED, JobState.FAILED)
        try:
            async with asyncio.timeout(self.options.drain_timeout):
                await self._idle.wait()
        except TimeoutError:
            for attempt in list(self._active.values()):
                attempt.end(_STOPPED, JobState.FAILED)
            await self._idle.wait()
        self._deadlines.stop()
        await self._runners.close()
        self._outbox.flush()
        self.bus.publish(HANDSHAKE, [replace(farewell, gone=True)])

    # -- taking work --------------------------------------------------------------

    async def _receive(self, messages: list[AnyMessage]) -> None:
        for message in messages:
            match message:
                case Dispatch():
                    if self._welcome:
                        self._take(message)
                case Welcomed(session, books):
                    if session == self.session:
                        self._welcome = True
                        self.welcomed.set()
                        self._reporter.begin_again()
                        self._open_book(books)
                case Dismissed(session, reason):
                    if session == self.session and not self._dismissed.done():
                        self._dismissed.set_exception(Conflict(reason, hint=_RENAME))
                case Reintroduce():
                    self.announce(self._link)
                case JobCancel(job_id, number, reason, _):
                    self._end((job_id, number), reason)
                case Confirmed(jobs):
                    for key in jobs:
                        if (attempt := self._starting.pop(key, None)) is not None:
                            self._begin(key, attempt)
                case Settled(jobs):
                    for key in jobs:
                        self._unsettled.pop(key, None)
        self._start_more()

    def took(self, job_id: str, attempt: int) -> bool:
        """Whether this dispatch ever reached us."""
        return (job_id, attempt) in self._taken

    def _take(self, dispatch: Dispatch) -> None:
        key = (dispatch.request.job_id, dispatch.attempt)
        if key in self._taken:
            return  # a bus may deliver twice
        self._taken.add(key)
        self._taken_order.append(key)
        if len(self._taken_order) > _REMEMBERED:
            self._taken.discard(self._taken_order.popleft())
        attempt = Attempt(dispatch, self.clock, self._outbox.add, self._world)
        self._queue.append(attempt)
        if self._draining:
            self._hand_back(float("inf"), "the worker is stopping")

    def _end(self, key: tuple[str, int], reason: str) -> None:
        if (running := self._active.get(key)) is not None:
            running.end(reason, JobState.CANCELLED)
        elif (unstarted := self._unstarted(key)) is not None:
            unstarted.end(reason, JobState.CANCELLED)
            self._begin(key, unstarted)  # only to report its end

    def _unstarted(self, key: tuple[str, int]) -> Attempt | None:
        if (starting := self._starting.pop(key, None)) is not None:
            return starting
        for queued in self._queue:
            if (queued.job_id, queued.attempt) == key:
                self._queue.remove(queued)
                return queued
        return None

    def _start_more(self) -> None:
        """Fill the free slots.

        A job that may run again can begin at once. Any other begins only after its start is
        in the book, or in the engine's own log: should we die now, nobody will think that it
        had not begun.
        """
        slots = self.options.slots
        while self._queue and len(self._active) + len(self._starting) < slots:
            attempt = self._queue.popleft()
            key = (attempt.job_id, attempt.attempt)
            if attempt.request.idempotent or self._write_down(key, attempt):
                self._outbox.add(Started(*key, self.options.worker_id))
                self._begin(key, attempt)
            elif self._book is None:
                self._starting[key] = attempt
                self._outbox.add(Started(*key, self.options.worker_id, confirm=True))

    def _open_book(self, folder: str) -> None:
        """Start a book, if the engine is near enough to read it."""
        if self._book is None and self._make_book is not None and folder:
            try:
                self._book = self._make_book(folder, f"{self.options.worker_id}-{os.getpid()}")
            except OSError as error:
                log.warning("no start book in %s: %s", folder, error.strerror)

    def _write_down(self, key: tuple[str, int], attempt: Attempt) -> bool:
        if self._book is None:
            return False
        try:
            begun = self._book.begin(*key)
        except OSError as error:
            self._return(attempt, f"its start can't be written down: {error.strerror}")
            return False
        if not begun:
            self._return(attempt, "it was given up meanwhile")
        return begun

    def _begin(self, key: tuple[str, int], attempt: Attempt) -> None:
        self._active[key] = attempt
        self._idle.clear()
        attempt.begin()
        self._deadlines.watch(attempt)
        self._runners.give(attempt)

    async def _work(self, attempt: Attempt) -> None:
        key = (attempt.job_id, attempt.attempt)
        worker_id = self.options.worker_id
        executor = self._executor_for(attempt.request.topic)
        try:
            result = await attempt.run(executor, self.blobs, worker_id)
            if not self.options.local:
                self._unsettled[key] = result
            self._outbox.add(Finished(result))
        except TopicPaused as why:
            # On the same subject as the job, and before it: else it would come straight back.
            self._outbox.add(self._reporter.facts())
            self._return(attempt, str(why), charged=False)
        except Interrupted as why:
            self.left.add(attempt.job_id)
            self._return(attempt, str(why) or _STOPPED)
        finally:
            self._done += 1
            del self._active[key]
            self._start_more()
            if not self._active:
                self._idle.set()

    def _is_resumable(self, attempt: Attempt) -> bool:
        # A plug-in written before there was such a thing says nothing of it.
        return getattr(self._executor_for(attempt.request.topic), "resumable", False)

    def _executor_for(self, topic: str) -> Executor:
        executor = self._by_topic.get(topic)
        if executor is None:
            executor = self._by_topic[topic] = next(
                e for e in self.executors if any(fnmatchcase(topic, glob) for glob in e.topics)
            )
        return executor


def _time_out(attempt: Attempt) -> None:
    attempt.end(_too_long(attempt), JobState.TIMEOUT)


def _too_long(attempt: Attempt) -> str:
    if attempt.by_deadline:
        return "its deadline passed while it was running"
    return f"it ran for more than {attempt.dispatch.timeout:g} s"
