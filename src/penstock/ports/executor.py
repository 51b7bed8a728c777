"""What a job can be.

An executor runs one attempt of one job and tells how it ended. It never touches the
store: everything it may do to the outside goes through its `Context`.

Executors are found through the entry-point group `penstock.executors`; each entry is a
callable that takes the worker's application (or None) and returns an Executor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from penstock.core.job import JobRequest, Offer
from penstock.core.verdict import Constraints
from penstock.lifecycles.canonical import JobState
from penstock.ports.blobs import Blobs
from penstock.ports.clock import Clock

if TYPE_CHECKING:
    from penstock.ports.desk import Desk
    from penstock.ports.pipelines import PipelineStore


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


class CancelToken(Protocol):
    """Tells running work that it should end. Safe to use from any thread."""

    @property
    def requested(self) -> bool: ...

    @property
    def reason(self) -> str: ...

    def wait(self, timeout: float | None = None) -> bool:
        """Block a thread until it is requested; False when the time ran out first."""

    def raise_if_requested(self) -> None:
        """Raise `penstock.Cancelled` if the work should end."""


@dataclass(frozen=True)
class World:
    """What lies around a worker, for executors that keep records or submit jobs themselves."""

    worker_id: str
    clock: Clock
    blobs: Blobs
    desk: Desk
    """The engine's, with the rights of its owner: child jobs carry their parent's tenant and
    principal."""
    pipelines: PipelineStore


class Interrupted(Exception):
    """Raised by an executor that can't go on, as when its worker stops: the attempt can be taken
    up where it is.

    Only for jobs that are idempotent. The worker hands the job back, and the engine gives it to
    another worker, as it does when one is lost.
    """


class TopicPaused(Interrupted):
    """Raised by an executor that can't run any job of a topic now, as when its engine is out of
    memory. The attempt did nothing that counts, and is not charged to the job. Until the
    executor's `facts()` stop naming the topic under PAUSED, its worker gets no more jobs of it."""


PAUSED = "paused"
"""The fact that names topics which an executor can't run at present: {topic: why}."""


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
    def ended_as(self) -> JobState:
        """What a requested end is to count as: CANCELLED, TIMEOUT, or FAILED when the worker
        stops."""

    @property
    def world(self) -> World | None:
        """None where there is no engine behind it."""

    def progress(self, fraction: float | None = None, message: str = "") -> None: ...

    def log(self, text: str, level: str = "info") -> None: ...

    def stream(self, text: str) -> None:
        """Tell a part of the result while it is made, to whoever follows the job. It is kept
        only until the job ends: the result must have it all."""

    def remaining(self) -> float:
        """Seconds until the attempt must have ended."""


class Executor(Protocol):
    """It may have more: `async open(world)`, called once before it is given work; `labels`, what
    its worker is known by besides its own labels, read after that; `facts()`, what the engine
    shows of it, asked for at most once a second; and `standing`, true if it has something to do
    besides jobs."""

    topics: tuple[str, ...]
    """The topics (globs) that this executor can run."""
    offers: Mapping[str, Offer]
    """What jobs of a topic should have unless their caller says otherwise."""
    resumable: bool
    """Whether an attempt that is ended when its worker stops can be taken up by another; then
    a stopping worker does not wait for it."""

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
    return bool(executor.topics) or getattr(executor, "standing", False)


class ExecutorFactory(Protocol):
    def __call__(self, app: Any, options: Mapping[str, Any]) -> Executor: ...
