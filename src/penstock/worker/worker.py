"""Takes work, runs it under a lease, and reports.

Work is pushed: a worker says how many jobs it wants to hold (its credit) and is given that
many. The credit is its slots, and more while jobs are short, so that it never waits for the
next one; long jobs are never held in advance. Results are kept until the engine says that
they are durable, and sent again if the connection was lost in between.

Jobs run in *runners*: tasks that take one attempt after another from the queue, because a task
for each would cost as much as a short job. While a job waits for something, another runner goes
on with the queue.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import secrets
import socket
from asyncio import FIRST_COMPLETED
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from penstock.core.errors import Conflict
from penstock.core.job import JobResult
from penstock.lifecycles.canonical import JobState
from penstock.ports.blobs import Blobs
from penstock.ports.bus import (
    HANDSHAKE,
    HEARTBEAT,
    AnyMessage,
    Bus,
    CheckpointKept,
    Confirmed,
    Credit,
    Dismissed,
    Dispatch,
    Drain,
    Farewell,
    Handshake,
    JobCancel,
    MakeStartLog,
    Reintroduce,
    Resumed,
    Returned,
    Settled,
    Started,
    StartLog,
    StepsRead,
    Welcomed,
    WorkerFacts,
    jobs_of,
)
from penstock.ports.clock import Clock, wait_at_most
from penstock.ports.executor import REATTACHABLE, Environment, Executor, Interrupted, NotBegun
from penstock.worker.attempt import Attempt, Host, Outbox, storable
from penstock.worker.checkpoints import Checkpoints
from penstock.worker.waiting import Waits

log = logging.getLogger(__name__)

_PREFETCH = 0.1
"""Seconds of work that a worker holds beyond its slots."""
_MAX_PREFETCH = 4000
_REVIEW = 0.1
"""Seconds between looks at the credit and at jobs that can't be started."""
_RENAME = "give this one another name with --id"
_STOPPED = "the worker was stopped while it ran the job"
_PATIENCE = 1.0
"""Seconds a job may be held here unstarted before it is handed back."""
_REMEMBERED = 10_000
"""Attempts, at least, by which a dispatch that comes twice is known."""
_TURN = 0.002
"""Seconds of short jobs after which a runner lets others have the event loop."""
_FACTS_INTERVAL = 1.0
_SAY_AFTER = 0.5
"""Seconds of waiting for running jobs after which a stop says so."""


class WorkerOptions(Struct, frozen=True, kw_only=True):
    worker_id: str
    pool: str = "default"
    slots: int = 32
    labels: Mapping[str, str] = {}
    local: bool = False
    """It lives in the engine's own process."""
    drain_timeout: float = 30.0
    max_log_lines: int = 10_000
    """Lines that one attempt may write to its job's log."""


class Worker:
    """A service: `run` until cancelled or told to drain, then it drains."""

    def __init__(
        self,
        bus: Bus,
        blobs: Blobs,
        executors: Sequence[Executor],
        clock: Clock,
        options: WorkerOptions,
        make_log: MakeStartLog | None = None,
        environment: Environment | None = None,
    ) -> None:
        self._environment = environment
        self._opened = False
        self.bus, self.blobs, self.clock, self.options = bus, blobs, clock, options
        self._make_log = make_log
        self._start_log: StartLog | None = None
        self.executors = list(executors)
        self.topic_defaults = {
            topic: o for e in self.executors for topic, o in e.topic_defaults.items()
        }
        self.topics = tuple(dict.fromkeys(t for e in self.executors for t in e.topics))
        self._by_topic: dict[str, Executor] = {}
        self._received: set[tuple[str, int]] = set()
        self._received_before: set[tuple[str, int]] = set()
        self._queue: deque[Attempt] = deque()
        self._ready: deque[Attempt] = deque()
        """May begin at once: their start is durable, or only their end is to be reported."""
        self._starting: dict[tuple[str, int], Attempt] = {}
        """Waiting for the engine's word that their start is durable."""
        self._active: dict[tuple[str, int], Attempt] = {}
        self._unsettled: dict[tuple[str, int], JobResult] = {}
        self.interrupted: set[str] = set()
        """Jobs that another worker resumes."""
        self._done = 0
        self._credit = options.slots
        self._draining = False
        self.session = secrets.token_hex(8)
        self._welcome = False
        self.welcomed = asyncio.Event()
        """The engine knows it, and what it serves."""
        self._link = 1
        self._facts: Mapping[str, Any] = {}
        """What the engine was told of the executors."""
        self._facts_due = 0.0
        self._received_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._runners: set[asyncio.Task[None]] = set()
        self._idle_runners: list[asyncio.Future[None]] = []
        self._woken = 0
        """Runners that were woken and have not looked for work yet."""
        self._clean = contextvars.copy_context()
        self._idle = asyncio.Event()
        """Set when nothing runs any more, once the worker drains."""
        self._hurried = asyncio.Event()
        self._came = asyncio.Event()
        """Set when the engine sends anything."""

    # -- service ------------------------------------------------------------------

    async def run(self) -> None:
        self._outbox = Outbox(self.bus, self._unreported)
        self._checkpoints = Checkpoints(self.bus, self.options.worker_id)
        self._waits = Waits(
            self.options.worker_id, self._outbox.add, self._has_free_slot, self._wake, self._lend
        )
        self._host = Host(
            self.options.worker_id,
            self.clock,
            self.blobs,
            self._outbox,
            self._checkpoints,
            self._waits,
            self._environment,
            self.options.max_log_lines,
        )
        self._dismissed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        subject = jobs_of(self.options.worker_id)
        subscription = self.bus.subscribe(subject, self._receive)
        reviewing = asyncio.create_task(self._review(), name="penstock review")
        try:
            await self.open_executors()
            self.announce(self._link)
            await asyncio.wait((reviewing, self._dismissed), return_when=FIRST_COMPLETED)
            if not self._dismissed.done():
                reviewing.result()
            self._dismissed.result()
        finally:
            reviewing.cancel()
            await asyncio.shield(self._drain())
            await subscription.close()
            for executor in self.executors:
                await executor.close()
            if self._start_log is not None:
                self._start_log.close(keep=bool(self._unsettled))

    async def open_executors(self) -> None:
        """Let executors that keep records say what they serve, before they are given any."""
        if self._environment is not None and not self._opened:
            self._opened = True
            for executor in self.executors:
                if (opening := getattr(executor, "open", None)) is not None:
                    await opening(self._environment)

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
                    {**self._labels(), **options.labels},
                    tuple(self._held()),
                    socket.gethostname(),
                    os.getpid(),
                    options.local,
                    self.session,
                    link,
                    self.topic_defaults,
                )
            ],
        )
        if self._draining:  # it is no offer to take work
            self.bus.publish(HANDSHAKE, [Farewell(options.worker_id)])
        for attempt in self._active.values():
            attempt.is_reported = False
        self._outbox.start()
        for key in self._starting:
            self._outbox.add(Started(*key, options.worker_id, confirm=True))
        self._waits.send_again()
        for result in self._unsettled.values():
            self._outbox.finish(result)

    def _labels(self) -> dict[str, str]:
        """The labels that the worker has because of its executors."""
        return {
            name: value
            for executor in self.executors
            for name, value in getattr(executor, "labels", {}).items()
        }

    def _held(self) -> list[tuple[str, int]]:
        waiting = [attempt.key for attempt in (*self._ready, *self._queue)]
        return [*waiting, *self._starting, *self._active, *self._unsettled]

    def _unreported(self) -> Iterator[Started]:
        """The starts that the engine does not know of, when the outbox is sent."""
        for attempt in self._active.values():
            if not attempt.is_reported:
                attempt.is_reported = True
                yield Started(*attempt.key, self.options.worker_id)

    async def _review(self) -> None:
        """Now and then: adjust the credit, hand back what can't be started."""
        while True:
            before, counted = self.clock.monotonic(), self._done
            self._came.clear()
            await self.clock.sleep(_REVIEW)
            if not (self._came.is_set() or self._queue or self._done > counted):  # it is idle
                pause = max(0.0, self._facts_due - self.clock.monotonic())
                await wait_at_most(self.clock, pause, self._came)
            elapsed = self.clock.monotonic() - before
            rate = (self._done - counted) / elapsed if elapsed > 0 else 0.0
            self._set_credit(self.options.slots + min(_MAX_PREFETCH, int(rate * _PREFETCH)))
            self._hand_back(self.clock.monotonic() - _PATIENCE, "the worker is busy")
            if self._welcome and self.clock.monotonic() >= self._facts_due:
                self._facts_due = self.clock.monotonic() + _FACTS_INTERVAL
                told = self._facts
                if (message := self._gather_facts()).facts != told:
                    self.bus.publish(HEARTBEAT, [message])

    def _gather_facts(self) -> WorkerFacts:
        """What the executors have to say of themselves; sent when it changes."""
        facts: dict[str, Any] = {}
        for executor in self.executors:
            if (ask := getattr(executor, "facts", None)) is not None:
                try:
                    for name, fact in ask().items():
                        # Two may tell of the same, as of language models whole and split.
                        if isinstance(fact, Mapping) and isinstance(facts.get(name), Mapping):
                            fact = {**facts[name], **fact}
                        facts[name] = fact
                except Exception:
                    log.exception("the facts of %s can't be read", type(executor).__name__)
        self._facts = facts
        return WorkerFacts(self.options.worker_id, self.session, facts)

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
        self._outbox.add(Returned(*attempt.key, worker_id, said, charged))

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
            if self._is_resumable(attempt):
                attempt.end(_STOPPED, JobState.FAILED)
        self._check_idle()
        if not self._idle.is_set():
            await self._let_finish()
        if self._timer is not None:
            self._timer.cancel()
        for runner in list(self._runners):
            runner.cancel()
        await asyncio.gather(*self._runners, return_exceptions=True)
        self._outbox.flush()
        self.bus.publish(HANDSHAKE, [replace(farewell, gone=True)])

    def hurry(self) -> None:
        """Do not wait for the drain timeout: ask what runs to end as soon as the worker drains."""
        self._hurried.set()

    async def _let_finish(self) -> None:
        """Give running jobs the drain timeout, then ask them to end. Say what is waited for."""
        seconds = self.options.drain_timeout
        say = "stopping: waiting up to %g s for running jobs to end: %s"
        loop = asyncio.get_running_loop()
        saying = loop.call_later(_SAY_AFTER, lambda: log.warning(say, seconds, self._running()))
        idle, hurried = (asyncio.ensure_future(e.wait()) for e in (self._idle, self._hurried))
        await asyncio.wait((idle, hurried), timeout=seconds, return_when=FIRST_COMPLETED)
        hurried.cancel()
        saying.cancel()
        for attempt in list(self._active.values()):
            attempt.end(_STOPPED, JobState.FAILED)
        if not idle.done():
            asked = "stopping: running jobs were asked to end, and have not yet: %s"
            saying = loop.call_later(_SAY_AFTER, lambda: log.warning(asked, self._running()))
            await idle
            saying.cancel()

    def _running(self) -> str:
        """The topics of running jobs, and how many of each."""
        topics = Counter(attempt.request.topic for attempt in self._active.values())
        some = [f"{count} of {topic}" for topic, count in topics.most_common(5)]
        return ", ".join(some) + (f" and {len(topics) - 5} more topics" if len(topics) > 5 else "")

    def _check_idle(self) -> None:
        if not self._active and not self._ready:
            self._idle.set()

    # -- taking work --------------------------------------------------------------

    async def _receive(self, messages: list[AnyMessage]) -> None:
        self._received_at = self.clock.monotonic()
        self._came.set()
        for message in messages:
            match message:
                case Dispatch():
                    if self._welcome:
                        self._take(message)
                case Welcomed(session, start_logs):
                    if session == self.session:
                        self._welcome = True
                        self.welcomed.set()
                        # A new engine knows nothing yet.
                        self._facts, self._facts_due = {}, 0.0
                        if (message := self._gather_facts()).facts:
                            self.bus.publish(HEARTBEAT, [message])
                        self._checkpoints.send_again()
                        self._open_start_log(start_logs)
                case Dismissed(session, reason):
                    if session == self.session and not self._dismissed.done():
                        self._dismissed.set_exception(Conflict(reason, hint=_RENAME))
                case Drain(session):
                    if session == self.session and not self._dismissed.done():
                        log.info("the engine asked this worker to drain")
                        self._dismissed.set_result(None)
                case Reintroduce():
                    self.announce(self._link)
                case JobCancel(job_id, number, reason, _):
                    self._end((job_id, number), reason)
                case Confirmed(jobs):
                    for key in jobs:
                        if (attempt := self._starting.pop(key, None)) is not None:
                            self._ready.append(attempt)
                case Settled(jobs):
                    for key in jobs:
                        self._unsettled.pop(key, None)
                case Resumed(job_id, number):
                    self._waits.resume((job_id, number))
                case CheckpointKept():
                    self._checkpoints.kept(message)
                case StepsRead():
                    self._checkpoints.read_back(message)
        self._wake()

    def has_received(self, job_id: str, attempt: int) -> bool:
        """Whether this dispatch ever came here."""
        key = (job_id, attempt)
        return key in self._received or key in self._received_before

    def _take(self, dispatch: Dispatch) -> None:
        key = (dispatch.request.job_id, dispatch.attempt)
        if key in self._received or key in self._received_before:
            return  # a bus may deliver twice
        self._received.add(key)
        if len(self._received) >= _REMEMBERED:
            self._received_before, self._received = self._received, set()
        attempt = Attempt(self._host, dispatch, key, self._received_at)
        if not self._draining and self._facts and self._reattachable().get(key[0]) == key[1] - 1:
            # Its work runs here already: it does not wait for a slot.
            if dispatch.request.idempotent or self._may_begin(attempt):
                self._ready.append(attempt)
        elif self._waits.attempts and dispatch.request.child_of is not None:
            self._queue.insert(self._after_children(), attempt)
        else:
            self._queue.append(attempt)
        if self._draining:
            self._hand_back(float("inf"), "the worker is stopping")

    def _after_children(self) -> int:
        """The position in the queue before jobs that no local parent waits for."""
        queue = self._queue
        if not queue or queue[-1].request.child_of is not None:
            return len(queue)
        return next(n for n, one in enumerate(queue) if one.request.child_of is None)

    def _end(self, key: tuple[str, int], reason: str) -> None:
        if (running := self._active.get(key)) is not None:
            running.end(reason, JobState.CANCELLED)
        elif (unstarted := self._unstarted(key)) is not None:
            unstarted.reattaches = key[1] > 1 and self._is_reattachable(unstarted.request.topic)
            unstarted.end(reason, JobState.CANCELLED)
            self._ready.append(unstarted)  # only to report its end

    def _unstarted(self, key: tuple[str, int]) -> Attempt | None:
        if (starting := self._starting.pop(key, None)) is not None:
            return starting
        for waiting in (self._queue, self._ready):
            for attempt in waiting:
                if attempt.key == key:
                    waiting.remove(attempt)
                    return attempt
        return None

    def _open_start_log(self, folder: str) -> None:
        """Open a start log, if the engine can read it."""
        if self._start_log is None and self._make_log is not None and folder:
            name = f"{self.options.worker_id}-{os.getpid()}"
            try:
                self._start_log = self._make_log(
                    folder, name, lambda: [*self._active, *self._unsettled]
                )
            except OSError as error:
                log.warning("no start log in %s: %s", folder, error.strerror)

    # -- running ------------------------------------------------------------------

    def _next(self) -> Attempt | None:
        """The next attempt that begins now, if one may.

        A job that is idempotent can begin at once. Any other begins only after its start is in
        the start log, or in the engine's own: should we die now, no one assumes that it had
        not begun.
        """
        if self._ready:
            attempt = self._ready.popleft()
        else:
            while True:
                if not self._queue or self._waits.queue or not self._has_free_slot():
                    return None
                attempt = self._queue.popleft()
                if attempt.dispatch.request.idempotent or self._may_begin(attempt):
                    break
        self._active[attempt.key] = attempt
        attempt.begin()
        if attempt.ends_at < self._timer_at:
            self._set_timer(attempt.ends_at)
        return attempt

    def _has_free_slot(self) -> bool:
        return self._busy() < self.options.slots

    def _busy(self) -> int:
        """Slots that are taken, or kept for what begins at once."""
        kept = len(self._starting) + len(self._ready)
        if self._facts:
            # Work of lost jobs goes on here; they come back in a moment.
            found = self._reattachable().items()
            kept += sum(not self.has_received(job_id, number + 1) for job_id, number in found)
        return len(self._active) + kept - len(self._waits.attempts)

    def _reattachable(self) -> Mapping[str, int]:
        """Lost jobs to whose work the executors can reattach, as the engine was told."""
        found: Mapping[str, int] = self._facts.get(REATTACHABLE, {})
        return found

    def _lend(self, key: tuple[str, int], count: int) -> None:
        """A job that waits takes no room of its executor either."""
        if (attempt := self._active.get(key)) is not None:
            topic = attempt.request.topic
            if (lend := getattr(self._find(topic), "lend", None)) is not None:
                lend(topic, count)

    def _may_begin(self, attempt: Attempt) -> bool:
        """Log its start, or ask the engine to."""
        if self._start_log is None:
            self._starting[attempt.key] = attempt
            self._outbox.add(Started(*attempt.key, self.options.worker_id, confirm=True))
            return False
        try:
            begun = self._start_log.begin(*attempt.key)
        except OSError as error:
            self._return(attempt, f"its start can't be logged: {error.strerror}")
            return False
        if not begun:
            self._return(attempt, "it was given up meanwhile")
        return begun

    def _wake(self) -> None:
        """See to it that somebody looks for work, if there is some that can begin.

        One runner is enough while jobs are short. As many as there are jobs that wait for
        something are woken, so that the slots fill within a few turns of the loop.
        """
        if self._woken or not (self._ready or (self._queue and self._has_free_slot())):
            return
        waiting = len(self._ready) + len(self._queue)
        free = max(1, self.options.slots - self._busy() + len(self._ready))
        for _ in range(min(waiting, free, max(1, len(self._active)))):
            self._woken += 1
            if self._idle_runners:
                self._idle_runners.pop().set_result(None)
            else:
                runner = asyncio.get_running_loop().create_task(
                    self._run_attempts(), context=self._clean.copy()
                )
                self._runners.add(runner)
                runner.add_done_callback(self._runners.discard)

    async def _run_attempts(self) -> None:
        """Run one attempt after another, until one leaves something in the context variables."""
        me = asyncio.current_task()
        assert me is not None
        while True:
            self._woken -= 1
            turn_ends = 0.0
            while (attempt := self._next()) is not None:
                self._wake()  # somebody goes on with the queue if this one has to wait
                self._outbox.start()
                attempt.task = me
                topic = attempt.dispatch.request.topic
                try:
                    result = await attempt.run(self._by_topic.get(topic) or self._find(topic))
                except Interrupted as why:
                    self._interrupt(attempt, why)
                else:
                    if not self.options.local:
                        self._unsettled[attempt.key] = result
                    self._outbox.finish(result, is_busy=len(self._queue) > self.options.slots)
                finally:
                    self._done += 1
                    if self._waits.attempts:
                        self._waits.drop(attempt.key)
                    del self._active[attempt.key]
                    if self._waits.queue:
                        self._waits.fill()
                    if self._draining:
                        self._check_idle()
                while me.cancelling():  # the job was told to end, and has
                    me.uncancel()
                if contextvars.copy_context() != self._clean:
                    self._wake()
                    return
                if attempt.ended_at > turn_ends:
                    if turn_ends and self._woken:
                        break  # another goes on, after all else that is due in the loop
                    if turn_ends:
                        await asyncio.sleep(0)
                    turn_ends = self.clock.monotonic() + _TURN
            if self._draining:
                return
            rest: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle_runners.append(rest)
            await rest

    def _interrupt(self, attempt: Attempt, why: Interrupted) -> None:
        """Hand back what can't go on here."""
        if isinstance(why, NotBegun):
            # On the same subject as the job, and before it: else a job of a paused topic would
            # come straight back.
            self._outbox.add(self._gather_facts())
            self._return(attempt, str(why), charged=False)
        else:
            self.interrupted.add(attempt.job_id)
            self._return(attempt, str(why) or _STOPPED)

    def _set_timer(self, ends_at: float) -> None:
        """Look at time limits then, or sooner."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = ends_at
        wait = max(0.0, ends_at - self.clock.monotonic())
        self._timer = asyncio.get_running_loop().call_later(
            min(wait, self.clock.recheck), self._time_out
        )

    def _time_out(self) -> None:
        """End what ran out of time. There are never more attempts than slots, so looking at all
        is cheaper than keeping an order that nearly every job leaves again before its time."""
        self._timer, self._timer_at = None, float("inf")
        now = self.clock.monotonic()
        for attempt in list(self._active.values()):
            if attempt.ends_at <= now:
                attempt.end(_too_long(attempt), JobState.TIMEOUT)
            elif attempt.ends_at < self._timer_at:
                self._set_timer(attempt.ends_at)

    def _is_resumable(self, attempt: Attempt) -> bool:
        request = attempt.request
        # A plug-in written before there was such a thing says nothing of it.
        resumable = getattr(self._find(request.topic), "resumable", False)
        return resumable and (request.idempotent or self._is_reattachable(request.topic))

    def _is_reattachable(self, topic: str) -> bool:
        defaults = self.topic_defaults.get(topic)
        return defaults is not None and defaults.reattach_timeout is not None

    def _find(self, topic: str) -> Executor:
        """The executor of a topic."""
        executor = next(
            e for e in self.executors if any(fnmatchcase(topic, glob) for glob in e.topics)
        )
        self._by_topic[topic] = executor
        return executor


def _too_long(attempt: Attempt) -> str:
    if attempt.by_deadline:
        return "its deadline passed while it was running"
    return f"it ran for more than {attempt.dispatch.timeout:g} s"
