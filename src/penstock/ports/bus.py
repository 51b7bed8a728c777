"""How the roles talk to workers.

At least once, in order per sender and subject, in batches. Messages carry the attempt
they speak of, and the store checks it, so a repeated or late message is harmless.

Subjects are those of the CAP wire, so that another bus can carry the same traffic.

Start logs tell which attempts have begun, even of a worker that died before it could report.
A worker on the engine's machine logs each start before it begins, in memory that survives its
process, and the engine reads the log when the worker is gone. A worker elsewhere has no log; it
asks the engine first (`Started.confirm`). A worker that seems lost may only be suspended. So the
engine first revokes a start, then reads the log; the worker first logs a start, then looks whether
it was revoked. At least one of the two sees the other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from penstock.core.errors import PenstockError, revived
from penstock.core.job import JobRequest, JobResult, TopicDefaults
from penstock.core.ledger import Step
from penstock.core.verdict import Constraints
from penstock.ports.store import StepQuery

HANDSHAKE = "sys.handshake"
HEARTBEAT = "sys.heartbeat"
RESULT = "sys.job.result"
PROGRESS = "sys.job.progress"
CHECKPOINT = "sys.job.checkpoint"


def jobs_of(worker_id: str) -> str:
    """The subject on which one worker receives jobs and cancellations."""
    return f"worker.{worker_id}.jobs"


class Refusal(Struct, frozen=True, array_like=True):
    """An error as part of a message."""

    code: str
    message: str
    hint: str = ""
    facts: dict[str, Any] = {}

    @classmethod
    def of(cls, error: PenstockError) -> Refusal:
        return cls(error.code, error.message, error.hint, error.facts)

    def revive(self) -> PenstockError:
        """The error, to be raised."""
        return revived(self.code, self.message, self.hint, self.facts)


class Message(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Anything on the bus. Fields are only ever added, at the end."""


class Handshake(Message, frozen=True, gc=False):
    """A worker is here: what it serves, how much it takes, and what it still runs."""

    worker_id: str
    pool: str
    topics: tuple[str, ...]
    """Globs."""
    slots: int
    """How many jobs it runs at once."""
    labels: Mapping[str, str]
    held: tuple[tuple[str, int], ...] = ()
    """(job_id, attempt) of what it holds: a worker that comes back keeps its work."""
    host: str = ""
    pid: int = 0
    local: bool = False
    """It lives in the engine's own process, and dies with it."""
    session: str = ""
    """Tells two processes that use the same name apart."""
    link: int = 0
    """Which of its connections this came over."""
    topic_defaults: Mapping[str, TopicDefaults] = {}
    """What jobs of a topic should have unless their caller says otherwise."""
    reports_starts: bool = True
    """If not, a job that may run only once counts as started when it is dispatched."""


class Welcomed(Message, frozen=True, gc=False):
    """The engine knows the worker of this session: it may take work now."""

    session: str
    start_logs: str = ""
    """The folder of start logs, for workers on the engine's machine."""


class Dismissed(Message, frozen=True, gc=False):
    """The engine has no use for the worker of this session: it must go."""

    session: str
    reason: str


class Drain(Message, frozen=True, gc=False):
    """The worker of this session takes no more work, finishes what it runs, and leaves."""

    session: str


class Reintroduce(Message, frozen=True, gc=False):
    """The engine hears from a worker that it does not know (any more): say who you are."""


class Heartbeat(Message, frozen=True, gc=False):
    """One beat keeps every lease of the worker that sends it."""

    worker_id: str
    active: int = 0


class WorkerFacts(Message, frozen=True, gc=False):
    """What a worker's executors tell of themselves; all of it, whenever some of it is new."""

    worker_id: str
    session: str
    facts: Mapping[str, Any]


class Credit(Message, frozen=True, gc=False):
    """How many jobs the worker wants to hold: its slots, and more if they are short."""

    worker_id: str
    limit: int


class Farewell(Message, frozen=True, gc=False):
    """A worker takes no more work. `lost`: it vanished, said by the link in its stead."""

    worker_id: str
    lost: bool = False
    link: int = 0
    """Which connection was lost."""
    session: str = ""
    """Whose farewell it is, should two have the same name."""
    gone: bool = False
    """It was the last word: what it still holds by our account never reached it."""


class Dispatch(Message, frozen=True, gc=False):
    """Run this."""

    request: JobRequest
    attempt: int
    timeout: float
    deadline: float | None = None
    constraints: Constraints | None = None
    started: bool = False
    """Whether it is durable already that this attempt has started."""


class JobCancel(Message, frozen=True, gc=False):
    """End this attempt, and say when it has ended."""

    job_id: str
    attempt: int
    reason: str
    requested_by: str


class Started(Message, frozen=True, gc=False):
    job_id: str
    attempt: int
    worker_id: str
    confirm: bool = False
    """The worker holds its breath: it begins when it hears that this is durable."""


class Confirmed(Message, frozen=True, gc=False):
    """The start of these is durable: begin."""

    jobs: tuple[tuple[str, int], ...]
    """(job_id, attempt)"""


class Waiting(Message, frozen=True, gc=False):
    """A running attempt waits for other jobs, and holds no slot meanwhile; with a count of 0, it
    asks to go on."""

    job_id: str
    attempt: int
    worker_id: str
    jobs: tuple[str, ...] = ()
    """Some of those that it waits for."""
    count: int = 0


class Resumed(Message, frozen=True, gc=False):
    """An attempt that waited may go on: its limits have room for it."""

    job_id: str
    attempt: int


class Returned(Message, frozen=True, gc=False):
    """Handed back, before it started or where it can go on: give it to another."""

    job_id: str
    attempt: int
    worker_id: str
    reason: str
    charged: bool = True
    """Whether it counts among the attempts that a job may lose."""


class Finished(Message, frozen=True, gc=False):
    result: JobResult


class Settled(Message, frozen=True, gc=False):
    """These results are durable: the worker may forget them."""

    jobs: tuple[tuple[str, int], ...]
    """(job_id, attempt)"""


class JobProgress(Message, frozen=True, gc=False):
    job_id: str
    attempt: int
    fraction: float | None
    """0 to 1, where the job can say."""
    message: str = ""


class JobLog(Message, frozen=True, gc=False):
    job_id: str
    attempt: int
    at: float
    level: str
    text: str


class JobPiece(Message, frozen=True, gc=False):
    """A part of what a job makes, while it makes it; kept nowhere."""

    job_id: str
    attempt: int
    n: int
    """Its place among the attempt's pieces, from 1 on."""
    text: str


class Checkpointed(Message, frozen=True, gc=False):
    """Keep these rows of a running attempt.

    A worker sends the next ones of an attempt when it has the answer to these, and the same
    again after it lost the connection.
    """

    job_id: str
    attempt: int
    worker_id: str
    n: int
    """Grows from one message of a worker to the next."""
    rows: tuple[Step, ...]
    notes: tuple[str, ...] = ()
    """Entries of the job's history."""


class CheckpointKept(Message, frozen=True, gc=False):
    """The rows of this message are durable, or were refused."""

    job_id: str
    attempt: int
    n: int
    refusal: Refusal | None = None


class StepsWanted(Message, frozen=True, gc=False):
    """A worker asks for rows that earlier attempts, or this one, checkpointed."""

    job_id: str
    attempt: int
    worker_id: str
    n: int
    query: StepQuery


class StepsRead(Message, frozen=True, gc=False):
    """A page of them."""

    n: int
    rows: tuple[Step, ...]
    more: bool
    """Whether there are rows after these."""


AnyMessage = (
    Handshake
    | Welcomed
    | Dismissed
    | Reintroduce
    | Heartbeat
    | WorkerFacts
    | Credit
    | Farewell
    | Dispatch
    | JobCancel
    | Started
    | Confirmed
    | Waiting
    | Resumed
    | Returned
    | Finished
    | Settled
    | JobProgress
    | JobLog
    | JobPiece
    | Checkpointed
    | CheckpointKept
    | StepsWanted
    | StepsRead
    | Drain
)

Handler = Callable[[list[AnyMessage]], Awaitable[None]]


class Subscription(Protocol):
    async def close(self) -> None:
        """Deliver no more; returns when the handler is not running."""


class Bus(Protocol):
    def publish(self, subject: str, messages: Sequence[AnyMessage]) -> None:
        """Hand the messages over; delivery happens later and never blocks the caller."""

    def subscribe(self, subject: str, handler: Handler) -> Subscription:
        """Deliver to `handler` whatever has gathered, in order, one call at a time.

        Each subscriber of a subject gets all of its messages.
        """

    async def close(self) -> None: ...


log = logging.getLogger(__name__)


class Reader:
    """A Subscription within this process: a task that hands over whatever has gathered.

    A handler that fails is given what comes next."""

    def __init__(self, subject: str, handler: Handler, forget: Callable[[Reader], None]) -> None:
        self.subject, self._handler, self._forget = subject, handler, forget
        self._gathered: list[AnyMessage] = []
        self._rest: asyncio.Future[None] | None = None
        """What it waits for while there is nothing to hand over."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"bus {subject}")

    def take(self, messages: Sequence[AnyMessage]) -> None:
        self._gathered.extend(messages)
        if self._rest is not None and not self._rest.done():
            self._rest.set_result(None)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not self._gathered:
                self._rest = loop.create_future()
                await self._rest
            batch, self._gathered = self._gathered, []
            try:
                await self._handler(batch)
            except Exception:
                log.exception("a reader of %s failed on %d messages", self.subject, len(batch))

    async def close(self) -> None:
        self._forget(self)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class MemoryBus:
    """The Bus within one process: what is published gathers until its reader's next turn."""

    def __init__(self) -> None:
        self._readers: dict[str, list[Reader]] = {}

    def publish(self, subject: str, messages: Sequence[AnyMessage]) -> None:
        for reader in self._readers.get(subject, ()):
            reader.take(messages)

    def subscribe(self, subject: str, handler: Handler) -> Reader:
        reader = Reader(subject, handler, self._forget)
        self._readers.setdefault(subject, []).append(reader)
        return reader

    def _forget(self, reader: Reader) -> None:
        if reader in (readers := self._readers.get(reader.subject, [])):
            readers.remove(reader)

    async def close(self) -> None:
        for readers in list(self._readers.values()):
            for reader in list(readers):
                await reader.close()


# -- start logs ----------------------------------------------------------------------


class StartLog(Protocol):
    """The worker's side: the log of one process."""

    def begin(self, job_id: str, attempt: int) -> bool:
        """Log a start; returns when a crash of the process can't undo it.

        False if the engine has revoked it: it must not begin. Raises OSError.
        """

    def close(self, *, keep: bool) -> None:
        """`keep` it for the engine to read, if there is something it may not know."""


MakeStartLog = Callable[[str, str, Callable[[], Iterable[tuple[str, int]]]], StartLog]
"""From a folder, a name, and what gives the attempts that count although they began long ago."""


class StartLogs(Protocol):
    """The engine's side: the logs of all workers on its machine."""

    folder: str
    """Where workers on this machine keep their logs; empty where they can't have one."""

    def revoke(self, job_id: str, attempt: int) -> bool:
        """Keep it from ever beginning; False if it has begun, or that is unknown."""


class NoStartLogs:
    """Where no worker has a log, what was not reported has not begun."""

    folder = ""

    def revoke(self, job_id: str, attempt: int) -> bool:
        return True
