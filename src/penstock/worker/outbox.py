"""What a worker has to say, gathered so that it says much at once.

Results leave at the loop's next turn, or, while more work is waiting than can be begun, some
milliseconds later in one batch. The news that a job started may wait a few
milliseconds: a short job's end then overtakes it, implies it, and costs one commit instead
of two. Progress waits longer and only the newest of a job is kept; pieces of a result that
somebody reads while it is made don't wait. Any thread may add.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from penstock.ports.bus import (
    PROGRESS,
    RESULT,
    AnyMessage,
    Bus,
    Finished,
    JobLog,
    JobPiece,
    JobProgress,
    Started,
)

_START_DELAY = 0.005
_BATCH_DELAY = 0.01
_PROGRESS_DELAY = 0.1


class Outbox:
    def __init__(self, bus: Bus, is_busy: Callable[[], bool] = lambda: False) -> None:
        self._bus, self._is_busy = bus, is_busy
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._results: list[AnyMessage] = []
        self._starts: dict[tuple[str, int], Started] = {}
        self._lines: list[AnyMessage] = []
        self._progress: dict[str, JobProgress] = {}
        self._due: asyncio.Handle | None = None
        self._due_in = 0.0

    def add(self, message: AnyMessage) -> None:
        if threading.get_ident() == self._thread:
            self._add(message)
        else:
            self._loop.call_soon_threadsafe(self._add, message)

    def _add(self, message: AnyMessage) -> None:
        match message:
            case JobProgress():
                self._progress[message.job_id] = message
                self._flush_in(_PROGRESS_DELAY)
            case JobLog():
                self._lines.append(message)
                self._flush_in(_START_DELAY)
            case JobPiece():
                self._lines.append(message)
                self._flush_in(0)
            case Started():
                self._starts[message.job_id, message.attempt] = message
                self._flush_in(0 if message.confirm else _START_DELAY)
            case Finished(result):
                self._starts.pop((result.job_id, result.attempt), None)
                self._results.append(message)
                self._flush_in(_BATCH_DELAY if self._is_busy() else 0)
            case _:
                self._results.append(message)
                self._flush_in(0)

    def _flush_in(self, delay: float) -> None:
        if self._due is not None:
            if delay >= self._due_in:
                return
            self._due.cancel()
        self._due_in = delay
        if delay:
            self._due = self._loop.call_later(delay, self.flush)
        else:
            self._due = self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send everything, progress and lines first: an end should find them all told."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if self._progress or self._lines:
            told, self._lines = self._lines, []
            told.extend(self._progress.values())
            self._progress.clear()
            self._bus.publish(PROGRESS, told)
        if self._results or self._starts:
            results, self._results = [*self._starts.values(), *self._results], []
            self._starts.clear()
            self._bus.publish(RESULT, results)
