"""One attempt of one job, from dispatch to result, and the outbox for what it reports."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from base64 import b64encode
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec import Raw
from msgspec.json import decode, encode
from msgspec.structs import replace

from penstock.core.artifact import ROW, Artifact, check_count, check_rows
from penstock.core.errors import InvalidRequest, PenstockError, StoreFailed
from penstock.core.job import Job, JobRequest, JobResult
from penstock.core.ledger import Step, artifact_of, artifact_row
from penstock.core.pointer import (
    JSON,
    check_size,
    decode_data,
    encode_data,
    filled,
    media_type,
    references,
)
from penstock.core.trace import job_span
from penstock.lifecycles.canonical import JobState
from penstock.ports.blobs import Blobs, Source, keep_artifact
from penstock.ports.bus import (
    PROGRESS,
    RESULT,
    AnyMessage,
    Bus,
    Dispatch,
    Finished,
    JobLog,
    JobPiece,
    JobProgress,
)
from penstock.ports.clock import Clock, backoff
from penstock.ports.engine_api import MAX_WAITED, EngineApi
from penstock.ports.executor import (
    JOB_LOGGER,
    CancelToken,
    Environment,
    Executor,
    Interrupted,
    Outcome,
    Task,
)
from penstock.ports.steps import RunsSteps
from penstock.worker.checkpoints import Checkpoints
from penstock.worker.waiting import AttemptWaits, Waits

T = TypeVar("T")

log = logging.getLogger(__name__)
_job_logger = logging.getLogger(JOB_LOGGER)
_LEVELS = logging.getLevelNamesMapping()

_SUCCEEDED = JobState.SUCCEEDED  # looking up a member of an enumeration is slow
_LINE = 8192
"""Characters of one log line that are kept."""
_TRACEBACK = 8_000
"""Characters of a traceback that are kept with the result; the end says most."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0
"""Seconds before a payload that could not be read or stored is tried again."""
_START_DELAY = 0.005
_BATCH_DELAY = 0.01
_PROGRESS_DELAY = 0.1


@dataclass(frozen=True)
class Host:
    """What the attempts of one worker share."""

    worker_id: str
    clock: Clock
    blobs: Blobs
    outbox: Outbox
    checkpoints: Checkpoints
    waits: Waits
    environment: Environment | None = None
    max_log_lines: int = 10_000


class Attempt(RunsSteps):
    """Runs one dispatch, and is the Context of what runs.

    There is one for every job, so what most jobs never need is made when it is asked for; until
    then the class has its value.
    """

    task: asyncio.Task[None] | None = None
    """The task that runs it, while it does."""
    ended_as = JobState.CANCELLED
    """What a requested end counts as: CANCELLED, TIMEOUT or FAILED."""
    by_deadline = False
    """Whether it is the job's deadline that ends it, and not its timeout."""
    reattaches = False
    """Whether the work of an earlier attempt may still run, which only the executor can end."""
    is_reported = False
    """Whether the start was reported to the engine."""
    started_at = ended_at = ends_at = 0.0
    """Monotonic: setting the wall clock must not end what runs, nor let it run longer."""
    _token: CancelToken | None = None
    _lines = 0
    """How many it has written to the job's log."""
    _artifacts: Mapping[str, Artifact] = {}
    """The files that it left, by name."""
    _continued: frozenset[bool] = frozenset()
    """Whose rows it has read: the try before this one (True), earlier attempts (False)."""

    def __init__(
        self, host: Host, dispatch: Dispatch, key: tuple[str, int], received_at: float
    ) -> None:
        self._host = host
        self.dispatch = dispatch
        self.key = key
        self.received_at = received_at

    # -- as a Context -------------------------------------------------------------

    @property
    def job_id(self) -> str:
        return self.key[0]

    @property
    def attempt(self) -> int:
        return self.key[1]

    @property
    def request(self) -> JobRequest:
        return self.dispatch.request

    @property
    def cancel(self) -> CancelToken:
        if self._token is None:  # two threads that ask at once get the same one
            self.__dict__.setdefault("_token", CancelToken())
        token = self._token
        assert token is not None
        return token

    @property
    def environment(self) -> Environment | None:
        return self._host.environment

    @property
    def is_waiting(self) -> bool:
        """Whether its code waits for other jobs, and holds no slot."""
        return self.key in self._host.waits.attempts

    @property
    def waits(self) -> AttemptWaits:
        return self._host.waits.of(self.key, self.cancel)

    def progress(self, fraction: float | None = None, message: str = "") -> None:
        if fraction is not None:
            fraction = min(1.0, max(0.0, fraction))
        self._host.outbox.report(JobProgress(*self.key, fraction, storable(message)))

    def log(self, text: str, level: str = "info") -> None:
        level, now = storable(str(level)), self._host.clock.now()
        most = self._host.max_log_lines
        for line in text.splitlines() or [""]:
            if self._lines >= most:
                return  # nobody shall be kept busy by the rest
            self._lines += 1
            if self._lines == most:
                level, line = "warning", f"cut off: a job may write {most} lines"
            line = storable(line[:_LINE])
            self._host.outbox.report(JobLog(*self.key, now, level, line))
            if _job_logger.handlers:
                number = _LEVELS.get(level.upper(), logging.INFO)
                trace_id = job_span(self.request).trace_id
                about = {"job_id": self.job_id, "trace_id": trace_id}
                _job_logger.log(number, "%s", line, extra=about)

    def stream(self, text: str) -> None:
        count = self.__dict__.setdefault("_count", itertools.count(1))
        self._host.outbox.report(JobPiece(*self.key, next(count), storable(text)))

    def remaining(self) -> float:
        return max(0.0, self.ends_at - self._host.clock.monotonic())

    def checkpoint(
        self, rows: Sequence[Step], notes: Sequence[str] = ()
    ) -> Coroutine[Any, Any, None]:
        check_rows(rows)
        return self._host.checkpoints.checkpoint(self.key, rows, notes)

    def checkpoint_sync(self, rows: Sequence[Step], notes: Sequence[str] = ()) -> None:
        check_rows(rows)
        self._host.checkpoints.checkpoint_sync(self.key, rows, notes, self.cancel)

    async def artifact(self, name: str, source: Source, media_type: str | None = None) -> Artifact:
        return await self._host.checkpoints.call(self._leave(name, source, media_type))

    def artifact_sync(self, name: str, source: Source, media_type: str | None = None) -> Artifact:
        leaving = self._leave(name, source, media_type)
        return self._host.checkpoints.call_sync(leaving, self.cancel)

    async def _leave(self, name: str, source: Source, media_type: str | None) -> Artifact:
        """Keep the file, and a row that refers to it: the job may run for hours yet."""
        check_count(len({*self._artifacts, name}))
        left = await keep_artifact(self._host.blobs, name, source, media_type)
        await self._host.checkpoints.write(*self.key, [artifact_row(left)])
        artifacts = {**self._artifacts, name: left}
        check_count(len(artifacts))  # others may have been left meanwhile
        self._artifacts = artifacts
        return left

    def steps(
        self,
        name: str | None = None,
        *,
        after: tuple[str, int] | None = None,
        previous: bool = False,
    ) -> AsyncIterator[Step]:
        self._continues(previous)
        return self._host.checkpoints.steps(self._steps_of(previous), name, after)

    def steps_sync(
        self,
        name: str | None = None,
        *,
        after: tuple[str, int] | None = None,
        previous: bool = False,
    ) -> Iterator[Step]:
        self._continues(previous)
        of = self._steps_of(previous)
        return self._host.checkpoints.steps_sync(of, name, after, self.cancel)

    def _steps_of(self, previous: bool) -> tuple[str, int]:
        """This attempt, or in a retry that of the try before."""
        before = self.request.parent_job_id if self.request.first_try is not None else None
        return (before, 0) if previous and before is not None else self.key

    def _continues(self, previous: bool) -> None:
        """Note that it looks at what was done before it: the files left then are its files, too."""
        if previous or self.attempt > 1:
            self._continued |= {previous}

    async def _patiently(self, work: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Try again while payloads can't be read or stored: that is no fault of the job, whose
        time limit still counts."""
        pauses = backoff(_FIRST_PAUSE, _LONGEST_PAUSE, jitter=0.5)
        while True:
            try:
                return await work(*args)
            except StoreFailed as error:
                log.warning("job %s waits for its payloads: %s", self.job_id, error)
                await self._host.clock.sleep(next(pauses))

    async def _earlier_artifacts(self) -> dict[str, Artifact]:
        """The files of attempts, and of the try, that this attempt continues; newer ones win."""
        found: dict[str, Artifact] = {}
        for previous in sorted(self._continued, reverse=True):
            of = self._steps_of(previous)
            async for row in self._host.checkpoints.steps(of, None, (ROW, -1)):
                if not row.name.startswith(ROW):
                    break
                found[row.key] = artifact_of(row)
        return found

    # -- running ------------------------------------------------------------------

    def begin(self) -> None:
        """Set the clock running."""
        seconds, deadline = self.dispatch.timeout, self.dispatch.deadline
        if deadline is not None:
            left = deadline - self._host.clock.now()
            self.by_deadline = left <= seconds
            seconds = min(left, seconds)
        self.started_at = now = self._host.clock.monotonic()
        self.ends_at = now + seconds

    def end(self, reason: str, as_state: JobState) -> None:
        """Ask the work to end; the first reason counts."""
        if not self.cancel.requested:
            self.ended_as = as_state
            self.cancel.request(reason)
            if self.task is not None:
                self.task.cancel()

    async def run(self, executor: Executor) -> JobResult:
        """Run to an end of any kind, and say which. Only returns when nothing runs any more.

        Raises Interrupted if it is to go on elsewhere. Nothing is awaited that has no need to
        wait: small payloads are in their pointers.
        """
        host, dispatch, pointer = self._host, self.dispatch, None
        try:
            if self._token is not None and self._token.requested and not self.reattaches:
                raise asyncio.CancelledError
            uri = dispatch.request.context_ptr
            if uri.startswith("data:"):
                payload = decode_data(uri)
            else:
                payload = await self._patiently(host.blobs.get, uri) if uri else b""
            if dispatch.request.takes_results and host.environment is not None:
                api = host.environment.api
                payload = await _with_results(api, host.blobs, dispatch.request, payload)
            deadline = host.clock.now() + self.ends_at - self.started_at
            task = Task(dispatch.request, dispatch.attempt, payload, deadline, dispatch.constraints)
            outcome = await executor.run(task, self)
            if self._continued or outcome.artifacts:
                earlier = await self._earlier_artifacts() if self._continued else {}
                more = {left.name: left for left in outcome.artifacts}
                artifacts = {**earlier, **self._artifacts, **more}
                check_count(len(artifacts))
                self._artifacts = artifacts
            if outcome.status is not _SUCCEEDED or dispatch.constraints is not None:
                outcome = self._settled(outcome)
            if (data := outcome.payload) is not None:
                if len(data) <= host.blobs.inline_limit:
                    pointer = encode_data(data, outcome.media_type)
                else:
                    pointer = await self._patiently(host.blobs.put, data, outcome.media_type)
        except asyncio.CancelledError:
            if not self.cancel.requested:
                raise
            outcome, pointer = self._was_ended(), None
            if self._excess(outcome):
                self._artifacts = {}
        except Interrupted:
            raise
        except PenstockError as error:
            outcome = _failure(error.code, str(error))
        except Exception as error:
            log.exception("the executor failed on job %s", self.job_id)
            outcome = _failure("EXECUTOR_ERROR", repr(error))
        finally:
            self.task = None
            self.ended_at = host.clock.monotonic()
        return JobResult(
            job_id=self.key[0],
            status=outcome.status,
            result_ptr=pointer,
            worker_id=host.worker_id,
            execution_ms=int((self.ended_at - self.started_at) * 1e6) / 1000,
            error_code=outcome.error_code and storable(outcome.error_code),
            error_message=outcome.error_message and storable(outcome.error_message),
            attempt=self.key[1],
            error_kinds=outcome.error_kinds and tuple(map(storable, outcome.error_kinds)),
            retry_after=outcome.retry_after,
            traceback=outcome.traceback and storable(outcome.traceback[-_TRACEBACK:]),
            artifacts=tuple(self._artifacts.values()) if self._artifacts else (),
        )

    def _settled(self, outcome: Outcome) -> Outcome:
        """The outcome, unless the attempt was ended or its result is larger than is allowed."""
        if outcome.status is JobState.CANCELLED and self.cancel.requested:
            left = {"payload": outcome.payload, "media_type": outcome.media_type}
            return replace(self._was_ended(), **left, artifacts=outcome.artifacts)
        if not (what := self._excess(outcome)):
            return outcome
        self._artifacts = {}
        return _failure("OUTPUT_LIMIT", what)

    def _excess(self, outcome: Outcome) -> str:
        """In what the result is larger than the safety rules allow; empty if it is not."""
        constraints = self.dispatch.constraints
        most = None if constraints is None else constraints.max_output
        size = len(outcome.payload or b"") + sum(left.size for left in self._artifacts.values())
        if most is None or size <= most:
            return ""
        return f"the result has {size} bytes with its artifacts; its rule allows {most}"

    def _was_ended(self) -> Outcome:
        """What it counts as. Raises Interrupted if its worker stops and another can run it."""
        if self.ended_as is JobState.FAILED and self.request.idempotent:
            raise Interrupted(self.cancel.reason) from None
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


class Outbox:
    """Gathers messages, so that many leave at once.

    Results leave at the loop's next turn, or, while more work waits than can be begun, some
    milliseconds later in one batch. The news that a job started may wait a few milliseconds: most
    jobs end meanwhile, which implies their start and costs one commit instead of two. Progress
    waits longer and only the newest of a job is kept; pieces of a result that somebody reads
    while it is made don't wait.
    """

    def __init__(self, bus: Bus, started: Callable[[], Iterable[AnyMessage]]) -> None:
        """`started` gives the starts that have not been reported."""
        self._bus, self._started = bus, started
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._results: list[AnyMessage] = []
        self._lines: list[AnyMessage] = []
        self._progress: dict[str, JobProgress] = {}
        self._due: asyncio.Handle | None = None
        self._due_in = 0.0

    def report(self, message: AnyMessage) -> None:
        """Add progress, a log line or a piece of a result. Any thread may call it."""
        if threading.get_ident() == self._thread:
            self._report(message)
        else:
            self._loop.call_soon_threadsafe(self._report, message)

    def _report(self, message: AnyMessage) -> None:
        match message:
            case JobProgress():
                self._progress[message.job_id] = message
                self.flush_in(_PROGRESS_DELAY)
            case JobLog():
                self._lines.append(message)
                self.flush_in(_START_DELAY)
            case JobPiece():
                self._lines.append(message)
                self.flush_in(0)

    def add(self, message: AnyMessage) -> None:
        """Add what the engine should hear at once."""
        self._results.append(message)
        self.flush_in(0)

    def finish(self, result: JobResult, *, is_busy: bool = False) -> None:
        self._results.append(Finished(result))
        self.flush_in(_BATCH_DELAY if is_busy else 0)

    def start(self) -> None:
        """Something started: `started` will give it, unless it has ended by then."""
        if self._due is None:
            self.flush_in(_START_DELAY)

    def flush_in(self, delay: float) -> None:
        """Send everything after this many seconds at the latest."""
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
        """Send everything, progress and lines first: they should be known before a job's end."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if self._progress or self._lines:
            told, self._lines = self._lines, []
            told.extend(self._progress.values())
            self._progress.clear()
            self._bus.publish(PROGRESS, told)
        results, self._results = [*self._started(), *self._results], []
        if results:
            self._bus.publish(RESULT, results)


# -- inputs with results of other jobs -------------------------------------------

_NOTHING = Raw(b"null")


async def _with_results(api: EngineApi, blobs: Blobs, request: JobRequest, payload: bytes) -> bytes:
    """The payload with the results of the jobs that it names; null for one that has none.

    Only of jobs that it waited for: of these the engine has seen that they are its tenant's.
    Raises NotFound if one is in the store no more, TooLarge if all together are too large.
    """
    known = set(request.after)
    wanted = list(dict.fromkeys(references(decode(payload))))
    for job_id in wanted:
        if job_id not in known:
            raise InvalidRequest("input", f"it has the result of {job_id!r}, which is not in after")
    results: dict[str, Raw] = {}
    size = len(payload)
    while wanted:
        group = wanted[:MAX_WAITED]
        for ended in await api.wait_many(group, len(group)):
            results[ended.job_id] = result = await _result(blobs, ended.job)
            size += len(bytes(result))
            check_size("input", size, blobs.max_size)
        wanted = [job_id for job_id in wanted if job_id not in results]
    return filled(payload, results)


async def _result(blobs: Blobs, job: Job) -> Raw:
    """As JSON; bytes of another media type are base64 text, as they are inside a value."""
    pointer = job.result.result_ptr if job.result is not None else None
    if not pointer:
        return _NOTHING
    data = await blobs.get(pointer)
    return Raw(data if media_type(pointer) == JSON else encode(b64encode(data).decode()))
