"""What a job can be.

An executor runs one attempt of one job and reports how it ended. It never touches the
store: everything it may do to the outside goes through its `Context`.

Executors are found through the entry-point group `penstock.executors`; each entry is a
callable that takes the worker's application (or None) and options, and returns an Executor.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, overload

from msgspec import Struct

from penstock.core.artifact import Artifact
from penstock.core.job import Cancelled, JobRequest, TopicDefaults
from penstock.core.ledger import Step
from penstock.core.verdict import Constraints
from penstock.lifecycles.canonical import JobState
from penstock.ports.blobs import Blobs, Source
from penstock.ports.clock import Clock

P = ParamSpec("P")
T = TypeVar("T")

if TYPE_CHECKING:
    from penstock.ports.engine_api import EngineApi
    from penstock.ports.shared_state import SharedState


class Task(Struct, frozen=True, gc=False):
    """One attempt of one job."""

    request: JobRequest
    attempt: int
    payload: bytes
    """What context_ptr points to; empty when there is none."""
    deadline: float
    """When it must have ended: the sooner of timeout and deadline. The context's `remaining`
    is more exact, where the clock may be set."""
    constraints: Constraints | None = None
    """Limits that the safety rules set. An executor sees to memory, network and file system;
    one that can't be enforced is a reason not to run: FAILED with CONSTRAINT_NOT_ENFORCED."""


class Outcome(Struct, frozen=True, gc=False):
    """How an attempt ended."""

    status: JobState
    payload: bytes | None = None
    """The result, when it succeeded."""
    media_type: str = "application/json"
    error_code: str | None = None
    error_message: str | None = None
    error_kinds: tuple[str, ...] = ()
    retry_after: float | None = None
    traceback: str | None = None
    artifacts: tuple[Artifact, ...] = ()
    """Files that it left, besides those that were left by `Context.artifact`; `keep_artifact` of
    `penstock.ports.blobs` makes one."""


class CancelToken:
    """Tells running work that it should end. Safe to use from any thread."""

    __slots__ = ("_event", "_listeners", "_lock", "reason")

    def __init__(self) -> None:
        self._event: threading.Event | None = None
        self._listeners: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self.reason = ""

    @property
    def requested(self) -> bool:
        return bool(self.reason)

    def request(self, reason: str = "cancelled") -> None:
        """Ask the work to end; the first reason counts."""
        with self._lock:
            if not self.reason:
                self.reason = reason or "cancelled"
            if self._event is not None:
                self._event.set()
            listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener()

    def when_requested(self, listener: Callable[[], object]) -> Callable[[], None]:
        """Call it once when the end is requested, in whichever thread does that, or now if it
        has been. Returns a function that takes the listener back."""
        with self._lock:
            if not self.reason:
                self._listeners.append(listener)
                return lambda: self._forget(listener)
        listener()
        return lambda: None

    def _forget(self, listener: Callable[[], object]) -> None:
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)

    def wait(self, timeout: float | None = None) -> bool:
        """Block a thread until it is requested; False when the time ran out first."""
        with self._lock:
            if self.reason:
                return True
            if self._event is None:  # most jobs never wait, so most never need an event
                self._event = threading.Event()
        return self._event.wait(timeout)

    def raise_if_requested(self) -> None:
        """Raise `penstock.Cancelled` if the work should end."""
        if self.reason:
            raise Cancelled(self.reason)


@dataclass(frozen=True)
class Environment:
    """What a worker runs in, for executors that keep records or submit jobs themselves."""

    worker_id: str
    clock: Clock
    blobs: Blobs
    api: EngineApi
    """The engine's, with the rights of its owner: child jobs carry their parent's tenant and
    principal."""
    state: SharedState
    """Small values that all workers share."""


class Interrupted(Exception):
    """Raised by an executor that can't go on, as when its worker stops: the attempt can be taken
    up where it is.

    Only for jobs that are idempotent, and for topics with a `reattach_timeout`. The worker hands
    the job back, and the engine does what it does when a worker is lost.
    """


class NotBegun(Interrupted):
    """Raised by an executor whose attempt did nothing that counts: any worker may run the job,
    idempotent or not, and the attempt is not charged to it."""


class TopicPaused(NotBegun):
    """Raised by an executor that can't run any job of a topic now, as when its engine is out of
    memory. Until the executor's `facts()` stop naming the topic under PAUSED, its worker gets no
    more jobs of it."""


JOB_LOGGER = "penstock.job"
"""The logger that tells each line of a job's log in the worker's process, with the attribute
`job_id`, if it has a handler."""

IN_JOB_LOG = "in_job_log"
"""The attribute of a record of any other logger that went to a job's log."""

MODELS = "models"
"""Under which `facts()` describe the language models of topics, as `{topic: {"context": 8192}}`."""
TOKENS = "tokens"
"""The fact that counts what language models have read and generated since the worker started:
{topic: {"prompt": 12, "completion": 34}}. Cached tokens of prompts are left out."""
RUNS = "runs"
"""The fact that counts pipeline runs that ended since the worker started, and their items:
{pipeline: {"runs": {"COMPLETED": 2}, "items": {"ok": 7, "failed": 1, "skipped": 0}}}."""
PAUSED = "paused"
"""The fact that names topics which an executor can't run at present: {topic: why}."""
USAGE = "usage"
"""The fact that says what running jobs have used so far: {job_id: {"peak_memory_bytes": 1048576,
"cpu_seconds": 0.25}}."""

SCHEMA = "schema:"
"""How the names of facts begin that describe the jobs of a topic: `schema:TOPIC` is a mapping with
`description`, `input` and `output` (JSON schemas), none of them required; or None for a topic whose
jobs only other jobs submit. Each executor names its own topics, so the facts of several add up."""

REATTACHABLE = "reattachable"
"""The fact that lists lost jobs to whose work an executor can reattach: {job_id: attempt}. A job
of a topic with a `reattach_timeout` goes to that worker, with the next attempt."""


class WaitContext(Protocol):
    """Lets a running attempt give back its slot while its code waits for other jobs. Each `begin`
    is followed by one of the others, with the same ids. `begin` and `leave` never block."""

    def begin(self, jobs: Sequence[str]) -> None: ...

    async def end(self, jobs: Sequence[str]) -> None:
        """Returns when the attempt has a slot and its limits again."""

    def end_sync(self, jobs: Sequence[str]) -> None:
        """The same, for plain functions: blocks the thread."""

    def leave(self, jobs: Sequence[str]) -> None:
        """The wait was interrupted: the code goes on at once."""


class Context(Protocol):
    """What an executor may use while it runs. Safe to call from any thread."""

    @property
    def job_id(self) -> str: ...

    @property
    def attempt(self) -> int: ...

    @property
    def request(self) -> JobRequest: ...

    @property
    def cancel(self) -> CancelToken: ...

    @property
    def traceparent(self) -> str:
        """W3C trace context of this attempt: what calls to other systems send as `traceparent`."""

    @property
    def ended_as(self) -> JobState:
        """What a requested end is to count as: CANCELLED, TIMEOUT, or FAILED when the worker
        stops."""

    @property
    def environment(self) -> Environment | None:
        """None where there is no engine behind it."""

    @property
    def waits(self) -> WaitContext | None:
        """None where there is no slot to give back."""

    def progress(self, fraction: float | None = None, message: str = "") -> None: ...

    def log(self, text: str, level: str = "info") -> None: ...

    def stream(self, text: str) -> None:
        """Stream a part of the result to readers of the job. It is kept
        only until the job ends: the result must have it all."""

    def remaining(self) -> float:
        """Seconds until the attempt must have ended."""

    async def checkpoint(self, rows: Sequence[Step], notes: Sequence[str] = ()) -> None:
        """Make these rows durable; returns when they are. `notes` become entries of the job's
        history, in the same commit.

        A row replaces the one with the same name and `n`. All rows of a call that fits one
        message are kept, or none; more are kept from the first on. Raises Superseded if this
        attempt is not live any more, and InvalidRequest or TooLarge if a row can't be kept or
        the job has too many. While the engine is away, it waits.
        """

    def steps(
        self,
        name: str | None = None,
        *,
        after: tuple[str, int] | None = None,
        previous: bool = False,
    ) -> AsyncIterator[Step]:
        """The rows that earlier attempts and this one checkpointed, in the order of name and
        `n`; those of one name, or those after a (name, n). Read in pages. `previous`: those of
        the try before, in a retry."""

    def checkpoint_sync(self, rows: Sequence[Step], notes: Sequence[str] = ()) -> None:
        """The same as `checkpoint`, for plain functions: blocks the thread."""

    def steps_sync(
        self,
        name: str | None = None,
        *,
        after: tuple[str, int] | None = None,
        previous: bool = False,
    ) -> Iterator[Step]:
        """The same as `steps`, for plain functions."""

    async def artifact(self, name: str, source: Source, media_type: str | None = None) -> Artifact:
        """Leave a file as a part of the job's result, whatever the end that its worker reports;
        returns when it is durable.

        `source` is a path, bytes, or a file that is open for reading. Leaving the same name again
        replaces the artifact. Raises InvalidRequest for a bad name, TooLarge for a file that is
        too long or one too many, and Superseded if this attempt is not live any more.
        """

    def artifact_sync(self, name: str, source: Source, media_type: str | None = None) -> Artifact:
        """The same, for plain functions: blocks the thread."""

    @overload
    def step(
        self,
        name: str,
        fn: Callable[P, Coroutine[Any, Any, T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Coroutine[Any, Any, T]: ...
    @overload
    def step(self, name: str, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    def step(self, name: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call `fn`, or give back what it returned in an earlier attempt or try of this job.

        What it returns is kept when this returns. Steps with the same name are numbered. An async
        function is awaited: `await ctx.step("fetch", fetch, url)`. Raises StepFailed if it failed
        in an earlier attempt of the same try.
        """


class Executor(Protocol):
    """It may have more: `async open(environment)`, called once before it is given work; `labels`,
    what its worker is known by besides its own labels, read after that; `facts()`, what the
    engine shows of it, asked for at most once a second; `lend(topic, count)`, called when a job
    of it waits for others and takes no room meanwhile (1), and when it goes on (-1); `always_open`,
    true if it has something to do besides jobs; and `abandon()`, called when its engine stops
    without waiting any longer for jobs that can't be ended."""

    topics: tuple[str, ...]
    """The topics (globs) that this executor can run."""
    topic_defaults: Mapping[str, TopicDefaults]
    """What jobs of a topic should have unless their caller says otherwise."""
    resumable: bool
    """Whether an attempt that is ended when its worker stops can be taken up by another, or by the
    same worker after a restart (topics with a `reattach_timeout`); then a stopping worker does not
    wait for it."""

    def check(self, topic: str, payload: bytes) -> None:
        """Raise InvalidRequest for an input that `run` could only refuse."""

    async def run(self, task: Task, ctx: Context) -> Outcome:
        """Run to an end. On asyncio cancellation end the work, *then* let it pass.

        The caller sets `ctx.cancel` first; when `run` returns or raises, nothing of the
        attempt may still be running. What can't be ended is reported in the Outcome.
        """

    async def close(self) -> None: ...


def is_needed(executor: Executor) -> bool:
    """Whether a worker has a use for it: one that serves nothing need not be opened."""
    return bool(executor.topics) or getattr(executor, "always_open", False)
