"""Starts jobs as soon as there is room. It is woken, and never looks at a clock.

One task decides; each job that was started has a task of its own, which the Scheduler owns. At
first it settles what an earlier worker left running; no job starts before that is done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from penstock.lifecycles.container import ContainerJobState
from penstock.workloads.container.engine import OWNER_LABEL, EngineError, Found
from penstock.workloads.container.job import ContainerRecord
from penstock.workloads.container.running.patience import Late, done_within, drop, within
from penstock.workloads.container.standing.attempt import Attempt, Parts
from penstock.workloads.container.standing.queue import Need, Queue, Waiting
from penstock.workloads.container.standing.recovery import (
    Adopt,
    Again,
    Decision,
    GiveUp,
    Remove,
    decide,
    unsettled,
)

log = logging.getLogger(__name__)

_RECOVERING = "the worker has yet to settle the jobs that ran when it was restarted"

_SETTLES = 2.0
"""Seconds in which an engine has started what it was asked to start."""

_PATIENCE = 30.0
"""Seconds that an engine may take to list containers, or to remove one."""


class Scheduler:
    def __init__(self, parts: Parts, owner: str, queue: Queue, obstacle: Callable[[], str]) -> None:
        """`obstacle`: why nothing at all can start now, in a sentence."""
        self._parts, self._owner, self._queue, self._obstacle = parts, owner, queue, obstacle
        self._wake = asyncio.Event()
        self._tasks: dict[asyncio.Task[None], str] = {}
        self._left: list[ContainerRecord] = []
        """Jobs that ran when this worker started, until it is settled what becomes of them."""
        self._recovered = False
        self._closed = False
        self.looked = asyncio.Event()
        """The first try to settle them is over."""
        self.attempts: dict[str, Attempt] = {}
        """By job, of those that run."""

    def load(self, records: Iterable[ContainerRecord]) -> None:
        """What the store says is unfinished."""
        for record in records:
            if record.state is ContainerJobState.RUNNING:
                self._left.append(record)
                attempt = self.attempts[record.job_id] = Attempt(self._parts, record.job_id)
                attempt.begun.set()
                self._queue.hold(record.job_id, Need(record.memory_mb, record.cpus))
            else:
                self._queue.add(Waiting.of(record))

    def images(self) -> set[str]:
        """Those of jobs that run."""
        return {attempt.image for attempt in self.attempts.values()}

    def wake(self) -> None:
        self._wake.set()

    def obstacle(self) -> str:
        """Why nothing can start; empty if it is for the queue to say."""
        return self._obstacle() or ("" if self._recovered else _RECOVERING)

    async def run(self) -> None:
        while True:
            self._wake.clear()
            if not self._recovered:
                await self._recover()
                self.looked.set()
            self._start()
            await self._wake.wait()

    # -- starting ---------------------------------------------------------------------------

    def _start(self) -> None:
        while not self._closed and not self.obstacle():
            waiting = self._queue.next()
            if waiting is None:
                return
            self._queue.begin(waiting)
            attempt = self.attempts[waiting.job_id] = Attempt(self._parts, waiting.job_id)
            self._own(attempt, attempt.run())

    def _own(self, attempt: Attempt, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks[task] = attempt.job_id
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        job_id = self._tasks.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("job %s: the worker itself went wrong", job_id, exc_info=error)
        del self.attempts[job_id]
        self._queue.release(job_id)
        self.wake()

    # -- after a restart --------------------------------------------------------------------

    async def _recover(self) -> None:
        """Settle everything, or nothing if the engine does not answer."""
        if not self._parts.watch.reachable:
            return
        try:
            found = await self._found()
        except EngineError as error:
            self._parts.watch.failed(str(error))
            return
        except Late:
            self._parts.watch.failed(f"it did not list its containers within {_PATIENCE:g} s")
            return
        decisions = decide(self._left, found, self._parts.config.on_restart)
        for decision in decisions:
            self._take_up(decision)
        strays = [decision.found.name for decision in decisions if isinstance(decision, Remove)]
        await asyncio.gather(*map(self._remove, strays))
        for decision in decisions:
            if isinstance(decision, Again):  # a container of its name may have been a stray
                attempt = self.attempts[decision.record.job_id]
                self._own(attempt, attempt.begin_anew(decision.record))
        self._left, self._recovered = [], True

    async def _found(self) -> list[Found]:
        engine, clock, mine = self._parts.engine, self._parts.clock, {OWNER_LABEL: self._owner}
        found = await within(clock, _PATIENCE, engine.find(mine))
        if unsettled(self._left, found):
            await clock.sleep(_SETTLES)
            found = await within(clock, _PATIENCE, engine.find(mine))
        return found

    def _take_up(self, decision: Decision) -> None:
        match decision:
            case Adopt(record, found, stop):
                attempt = self.attempts[record.job_id]
                self._own(attempt, attempt.adopt(record, found, stop))
            case GiveUp(record, message):
                attempt = self.attempts[record.job_id]
                self._own(attempt, attempt.give_up(message))
            case Again() | Remove():
                pass

    async def _remove(self, name: str) -> None:
        """One try; the Sweeper makes more."""
        try:
            await within(self._parts.clock, _PATIENCE, self._parts.engine.remove(name))
        except (EngineError, Late) as error:
            log.warning("container %s is nobody's, and is still there: %r", name, error)
            self._parts.left()

    # -- stopping ---------------------------------------------------------------------------

    def close(self) -> None:
        """Start nothing more."""
        self._closed = True

    async def idle(self, seconds: float) -> bool:
        """Whether every job that was started has ended, at most so many seconds from now."""
        clock = self._parts.clock
        until = clock.monotonic() + seconds
        while self._tasks:
            left = until - clock.monotonic()
            if left <= 0:
                return False
            await done_within(clock, left, *self._tasks)
            await asyncio.sleep(0)
        return True

    async def abandon(self) -> None:
        """Let go of whatever still goes on."""
        await drop(*self._tasks)
        await asyncio.sleep(0)
