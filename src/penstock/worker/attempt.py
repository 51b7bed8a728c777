"""One attempt of one job, from dispatch to result."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable

from penstock.core.errors import PenstockError
from penstock.core.job import JobRequest, JobResult
from penstock.lifecycles.canonical import JobState
from penstock.ports.blobs import Blobs
from penstock.ports.bus import AnyMessage, Dispatch, JobLog, JobPiece, JobProgress
from penstock.ports.clock import Clock
from penstock.ports.executor import Executor, Interrupted, Outcome, Task, World
from penstock.ports.token import Token

log = logging.getLogger(__name__)

_LINE = 8192
"""Characters of one log line that are kept."""


class Attempt:
    """Runs one dispatch, and is the Context of what runs."""

    __slots__ = (
        "_clock",
        "_pieces",
        "_say",
        "by_deadline",
        "cancel",
        "dispatch",
        "ended_as",
        "ends_at",
        "received_at",
        "started_at",
        "task",
        "world",
    )

    def __init__(
        self,
        dispatch: Dispatch,
        clock: Clock,
        say: Callable[[AnyMessage], None],
        world: World | None = None,
    ) -> None:
        self.dispatch = dispatch
        self.world = world
        self.cancel = Token()
        self.task: asyncio.Task[None] | None = None
        """The task that runs it, while it does."""
        self.ended_as = JobState.CANCELLED
        """What a requested end counts as: CANCELLED or TIMEOUT."""
        self.received_at = clock.monotonic()
        self.started_at = 0.0
        self.ends_at = 0.0
        """Monotonic: setting the wall clock must not end what runs, nor let it run longer."""
        self.by_deadline = False
        """Whether it is the job's deadline that ends it, and not its timeout."""
        self._clock = clock
        self._say = say
        self._pieces = itertools.count(1)

    # -- as a Context -------------------------------------------------------------

    @property
    def job_id(self) -> str:
        return self.dispatch.request.job_id

    @property
    def attempt(self) -> int:
        return self.dispatch.attempt

    @property
    def request(self) -> JobRequest:
        return self.dispatch.request

    def progress(self, fraction: float | None = None, message: str = "") -> None:
        if fraction is not None:
            fraction = min(1.0, max(0.0, fraction))
        self._say(JobProgress(self.job_id, self.attempt, fraction, storable(message)))

    def log(self, text: str, level: str = "info") -> None:
        level = storable(str(level))
        for line in text.splitlines() or [""]:
            said = storable(line[:_LINE])
            self._say(JobLog(self.job_id, self.attempt, self._clock.now(), level, said))

    def stream(self, text: str) -> None:
        self._say(JobPiece(self.job_id, self.attempt, next(self._pieces), storable(text)))

    def remaining(self) -> float:
        return max(0.0, self.ends_at - self._clock.monotonic())

    # -- running ------------------------------------------------------------------

    def begin(self) -> None:
        """Set the clock running."""
        seconds = self.dispatch.timeout
        if self.dispatch.deadline is not None:
            left = self.dispatch.deadline - self._clock.now()
            self.by_deadline = left <= seconds
            seconds = min(left, seconds)
        self.started_at = self._clock.monotonic()
        self.ends_at = self.started_at + seconds

    def end(self, reason: str, as_state: JobState) -> None:
        """Ask the work to end; the first reason counts."""
        if not self.cancel.requested:
            self.ended_as = as_state
            self.cancel.request(reason)
            if self.task is not None:
                self.task.cancel()

    async def run(self, executor: Executor, blobs: Blobs, worker_id: str) -> JobResult:
        """Run to an end of any kind, and say which. Only returns when nothing runs any more.

        Raises Interrupted if it is to go on elsewhere.
        """
        try:
            if self.cancel.requested:
                raise asyncio.CancelledError
            outcome = self._within(await self._outcome(executor, blobs))
            pointer = None
            if outcome.payload is not None:
                pointer = await blobs.put(outcome.payload, outcome.media_type)
        except asyncio.CancelledError:
            if not self.cancel.requested:
                raise
            outcome, pointer = self._was_ended(), None
        except Interrupted:
            raise
        except PenstockError as error:
            outcome, pointer = _failure(error.code, str(error)), None
        except Exception as error:
            log.exception("the executor failed on job %s", self.job_id)
            outcome, pointer = _failure("EXECUTOR_ERROR", repr(error)), None
        finally:
            self.task = None
        return JobResult(
            job_id=self.job_id,
            status=outcome.status,
            result_ptr=pointer,
            worker_id=worker_id,
            execution_ms=round((self._clock.monotonic() - self.started_at) * 1000, 3),
            error_code=outcome.error_code and storable(outcome.error_code),
            error_message=outcome.error_message and storable(outcome.error_message),
            attempt=self.attempt,
            error_kinds=tuple(map(storable, outcome.error_kinds)),
            retry_after=outcome.retry_after,
        )

    async def _outcome(self, executor: Executor, blobs: Blobs) -> Outcome:
        pointer = self.request.context_ptr
        payload = await blobs.get(pointer) if pointer else b""
        deadline = self._clock.now() + self.remaining()
        constraints = self.dispatch.constraints
        task = Task(self.request, self.attempt, payload, deadline, constraints)
        outcome = await executor.run(task, self)
        if outcome.status is JobState.CANCELLED and self.cancel.requested:
            return self._was_ended()
        return outcome

    def _within(self, outcome: Outcome) -> Outcome:
        """The outcome, unless its result is larger than the safety rules allow."""
        constraints = self.dispatch.constraints
        most = None if constraints is None else constraints.max_output
        if most is None or outcome.payload is None or len(outcome.payload) <= most:
            return outcome
        size = len(outcome.payload)
        return _failure("OUTPUT_LIMIT", f"the result has {size} bytes; its rule allows {most}")

    def _was_ended(self) -> Outcome:
        if self.ended_as is JobState.TIMEOUT:
            code = "DEADLINE_EXCEEDED" if self.by_deadline else "TIMEOUT"
            return Outcome(JobState.TIMEOUT, error_code=code, error_message=self.cancel.reason)
        if self.ended_as is JobState.FAILED:
            return _failure("WORKER_STOPPED", self.cancel.reason)
        return Outcome(JobState.CANCELLED, error_code="CANCELLED", error_message=self.cancel.reason)


def storable(text: str) -> str:
    """The text with a question mark for each half of a character, which nothing can store."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _failure(code: str, message: str) -> Outcome:
    return Outcome(JobState.FAILED, error_code=code, error_message=message)
