"""Attempts that wait for other jobs hold no slot meanwhile.

While the code of a job waits for children, another job runs in its slot: else parents that fill
all slots would wait for children that find none. A parent takes a slot again before it goes on,
and goes before what has not begun. The worker reports it to the engine, so that it gives the worker
more jobs and lets others have the limits of the parent; the parent goes on when the engine says
that its limits have room for it. A short wait is not reported, unless all slots are taken.

The slots may be taken by jobs that end only when the parent goes on: it waited for the first of its
children and wants to cancel the others. So that this is no deadlock, one parent goes on without a
slot when none has gone on for some seconds, and after as many seconds the next one.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from penstock.core.job import Cancelled
from penstock.ports.bus import AnyMessage, Waiting
from penstock.ports.executor import CancelToken

Key = tuple[str, int]
"""A job and its attempt."""

_SHORT = 0.05
"""Seconds of a wait that is not reported to the engine while there are free slots."""
_REFRESH = 1.0
"""Seconds after which a changed set of awaited jobs is reported again."""
_PATIENCE = 5.0
"""Seconds without a free slot after which one of those that have waited goes on nevertheless."""
_NAMED = 3
"""Awaited jobs that a report names by id, at most."""


class _Wait:
    """What one attempt waits for, in all its tasks together."""

    __slots__ = ("count", "going_on", "jobs", "reported", "timer")

    def __init__(self) -> None:
        self.count = 0
        """Places in its code that wait."""
        self.jobs: dict[str, None] = {}
        self.timer: asyncio.TimerHandle | None = None
        self.reported: tuple[str, ...] | None = None
        """The jobs that were reported to the engine; None if the wait was not reported."""
        self.going_on: asyncio.Future[None] | None = None
        """Done when the attempt has a slot again, once it wants one."""


class Waits:
    """The waiting attempts of one worker; used in its event loop, but for `of`."""

    def __init__(
        self,
        worker_id: str,
        send: Callable[[AnyMessage], None],
        has_free_slot: Callable[[], bool],
        freed: Callable[[], None],
        lend: Callable[[Key, int], None],
    ) -> None:
        """`freed` is called when a slot has become free, and `lend` when an attempt no longer
        counts for its executor (1), or does again (-1)."""
        self._worker_id, self._send = worker_id, send
        self._has_free_slot, self._freed, self._lend = has_free_slot, freed, lend
        self.loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self.attempts: dict[Key, _Wait] = {}
        """Those that hold no slot."""
        self.queue: deque[Key] = deque()
        """Attempts that may go on: the next free slot is theirs."""
        self._no_slot: asyncio.TimerHandle | None = None
        """Lets the first of them go on without one."""

    def of(self, key: Key, cancel: CancelToken) -> AttemptWaits:
        return AttemptWaits(self, key, cancel)

    def run(self, call: Callable[..., None], *args: object) -> None:
        """Call it in the worker's loop, from any thread."""
        if threading.get_ident() == self._thread:
            call(*args)
        else:
            self.loop.call_soon_threadsafe(call, *args)

    # -- waiting ------------------------------------------------------------------

    def begin(self, key: Key, jobs: Sequence[str]) -> None:
        """A place in the code of an attempt waits for these jobs."""
        wait = self.attempts.get(key)
        is_new = wait is None
        if wait is None:
            was_full = not self._has_free_slot()
            wait = self.attempts[key] = _Wait()
        wait.count += 1
        wait.jobs.update(dict.fromkeys(jobs))
        if wait.reported is not None and wait.timer is None:
            delay = _SHORT if len(wait.reported) < _NAMED else _REFRESH
            wait.timer = self.loop.call_later(delay, self._report, key, wait)
        if is_new:
            self._lend(key, 1)
            if was_full:
                self._report(key, wait)
            else:
                wait.timer = self.loop.call_later(_SHORT, self._report, key, wait)
            self.fill()
            self._freed()

    async def end(self, key: Key, jobs: Sequence[str]) -> None:
        """A place waits no more; returns when its code may go on."""
        wait = self._end_one(key, jobs)
        if wait is None:
            return
        if wait.going_on is None:
            wait.going_on = self.loop.create_future()
            self._cancel_timer(wait)
            if wait.reported is not None:
                self._send(Waiting(*key, self._worker_id))
            else:
                self.resume(key)
        try:
            await asyncio.shield(wait.going_on)
        except asyncio.CancelledError:  # its code goes on at once, as after `leave`
            if self.attempts.get(key) is wait and not wait.count:
                self._go_on(key, wait)
            raise

    def leave(self, key: Key, jobs: Sequence[str]) -> None:
        """A place was interrupted while it waited: its code goes on at once."""
        wait = self._end_one(key, jobs)
        if wait is not None and wait.going_on is None:
            if wait.reported is not None:
                self._send(Waiting(*key, self._worker_id))
            self._go_on(key, wait)

    def _end_one(self, key: Key, jobs: Sequence[str]) -> _Wait | None:
        """The wait, if this was the last place that waited."""
        wait = self.attempts.get(key)
        if wait is None:
            return None
        wait.count -= 1
        for job_id in jobs:
            wait.jobs.pop(job_id, None)
        if wait.count <= 0:
            return wait
        if wait.timer is None and not wait.jobs.keys() >= set(wait.reported or ()):
            wait.timer = self.loop.call_later(_REFRESH, self._report, key, wait)
        return None

    def drop(self, key: Key) -> None:
        """The attempt has ended."""
        if (wait := self.attempts.get(key)) is not None:
            self._go_on(key, wait)

    # -- with the engine ----------------------------------------------------------

    def _report(self, key: Key, wait: _Wait) -> None:
        self._cancel_timer(wait)
        wait.reported = tuple(islice(wait.jobs, _NAMED))
        self._send(Waiting(*key, self._worker_id, wait.reported, max(1, len(wait.jobs))))

    def _cancel_timer(self, wait: _Wait) -> None:
        if wait.timer is not None:
            wait.timer.cancel()
            wait.timer = None

    def send_again(self) -> None:
        """The engine, or the connection to it, is a new one."""
        for key, wait in self.attempts.items():
            if wait.reported is not None:
                self._report(key, wait)
                if wait.going_on is not None:
                    self._send(Waiting(*key, self._worker_id))

    def resume(self, key: Key) -> None:
        """The limits of an attempt have room for it."""
        wait = self.attempts.get(key)
        if wait is not None and wait.going_on is not None and key not in self.queue:
            wait.reported = None
            self.queue.append(key)
            self.fill()

    # -- going on -----------------------------------------------------------------

    def fill(self) -> None:
        """Let attempts go on that have waited, as far as there are slots."""
        some_went_on = False
        while self.queue and self._has_free_slot():
            self._resume_first()
            some_went_on = True
        if some_went_on:
            self._count_anew()
        elif self.queue and self._no_slot is None:
            self._no_slot = self.loop.call_later(_PATIENCE, self._resume_without_slot)

    def _resume_without_slot(self) -> None:
        """Let one go on without a slot: those that have the slots may need it to."""
        self._no_slot = None
        self._resume_first()
        self.fill()

    def _count_anew(self) -> None:
        """Another one is the first in the queue, or none."""
        if self._no_slot is not None:
            self._no_slot.cancel()
            self._no_slot = None
        if self.queue:
            self._no_slot = self.loop.call_later(_PATIENCE, self._resume_without_slot)

    def _resume_first(self) -> None:
        """Let the first in the queue go on."""
        key = self.queue.popleft()
        wait = self.attempts[key]
        if wait.count:  # it waits again, elsewhere in its code
            assert wait.going_on is not None
            wait.going_on.set_result(None)
            wait.going_on = None
            self._report(key, wait)
        else:
            self._go_on(key, wait)

    def _go_on(self, key: Key, wait: _Wait) -> None:
        del self.attempts[key]
        self._cancel_timer(wait)
        if key in self.queue:  # it is ended, and wants no slot any more
            self.queue.remove(key)
            self._count_anew()
        self._lend(key, -1)
        if wait.going_on is not None and not wait.going_on.done():
            wait.going_on.set_result(None)


class AttemptWaits:
    """See `penstock.ports.executor.WaitContext`."""

    __slots__ = ("_cancel", "_key", "_waits")

    def __init__(self, waits: Waits, key: Key, cancel: CancelToken) -> None:
        self._waits, self._key, self._cancel = waits, key, cancel

    def begin(self, jobs: Sequence[str]) -> None:
        self._waits.run(self._waits.begin, self._key, jobs)

    def leave(self, jobs: Sequence[str]) -> None:
        self._waits.run(self._waits.leave, self._key, jobs)

    async def end(self, jobs: Sequence[str]) -> None:
        work, loop = self._waits.end(self._key, jobs), self._waits.loop
        if asyncio.get_running_loop() is loop:
            await work
        else:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))

    def end_sync(self, jobs: Sequence[str]) -> None:
        waits = self._waits
        future = asyncio.run_coroutine_threadsafe(waits.end(self._key, jobs), waits.loop)
        forget = self._cancel.when_requested(future.cancel)
        try:
            future.result()
        except concurrent.futures.CancelledError:
            raise Cancelled(self._cancel.reason) from None
        finally:
            forget()
