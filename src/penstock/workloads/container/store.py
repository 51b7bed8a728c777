"""A container worker that stands alone: where its records are, and what its callers can ask.

`ContainerStore` promises:

* A write returns only after it is durable. Concurrent writers are merged into one commit.
* Every move asks `lifecycles.container.CONTAINER`; a final state is never overwritten.
* Records come back in the order in which jobs are to start: by priority, then as they came.
* A record's `body` may be large: only `add`, `get` and `by_key` bring it, in all other records
  it is empty.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, BinaryIO, Protocol

from msgspec import UNSET, Struct, UnsetType

from penstock.lifecycles.container import ContainerJobEvent, ContainerJobState
from penstock.workloads.container.job import (
    Artifact,
    ContainerRecord,
    End,
    Stream,
)


class RecordQuery(Struct, frozen=True, kw_only=True):
    """Which records, newest first; all conditions must hold."""

    states: tuple[ContainerJobState, ...] = ()
    label: tuple[str, str] | None = None
    image: str | None = None
    code: str | None = None
    """Of the error."""
    before: int | None = None
    """Only those whose `seq` is less: for the next page."""
    limit: int = 100


class Change(Struct, frozen=True, kw_only=True):
    """What one write does to a record; what is not given stays as it is."""

    job_id: str
    event: ContainerJobEvent | None = None
    """Refused (`IllegalMove`) where the table has no such move. One that leads to where the job
    is already changes nothing at all: what a job ended with first, it ended with."""
    at: float
    """Becomes `started_at` or `finished_at` where the event means that."""
    end: End | None = None
    """With FINISH, FAIL and CANCEL: how it ended. `state` follows from the event."""
    container: str | UnsetType = UNSET
    engine: str | UnsetType = UNSET


class ContainerStore(Protocol):
    async def add(self, record: ContainerRecord, *, most_waiting: int = 0) -> ContainerRecord:
        """Store a new record, which is queued, with its `seq`. Raises Conflict if its job_id is
        stored already (whatever its state) or its key is another job's, then TooMany if so many
        are queued; 0 means any number."""

    async def change(self, change: Change) -> ContainerRecord:
        """The record after it. Raises NotFound, IllegalMove."""

    async def get(self, job_id: str, *, body: bool = True) -> ContainerRecord | None:
        """Without its body it costs little, however large that is."""

    async def by_key(self, key: str) -> ContainerRecord | None:
        """The record that was submitted under this idempotency key."""

    async def find(self, query: RecordQuery) -> list[ContainerRecord]: ...

    async def unfinished(self) -> list[ContainerRecord]:
        """Running ones first, then queued ones in the order in which they are to start."""

    async def tally(self) -> dict[ContainerJobState, int]:
        """How many records are in each state that a record can have; none is left out."""

    async def prune(self, finished_before: float, *, keep: int = 0, limit: int = 500) -> list[str]:
        """Delete final records that ended before then, and, if `keep` is given, those beyond so
        many that ended first. Returns their job_ids, at most `limit`; asked again until none
        comes."""

    async def close(self) -> None: ...


class Receipt(Struct, frozen=True):
    """What a submission that was accepted is answered."""

    job_id: str
    state: ContainerJobState
    repeated: bool = False
    """The same idempotency key had brought it before."""


class Cancelled(Struct, frozen=True):
    """What a DELETE came to."""

    record: ContainerRecord
    note: str


class LogPage(Struct, frozen=True):
    """Some of a stream, from an offset on."""

    stream: Stream
    offset: int
    """Of the first byte of `data`, counted from the first that the container wrote."""
    data: bytes
    next: int
    """The offset to ask for next."""
    skipped: int = 0
    """Bytes between the offset asked for and `offset` that are not kept."""
    end: bool = False
    """Nothing will come after `next`."""


class WorkerHealth(Struct, frozen=True, kw_only=True):
    """`GET /health`: the fields of versions 1 and 2, then the truth."""

    status: str
    """`ok`, or `degraded` when no engine answers, the disk is low, or it drains."""
    uptime_seconds: int
    load_average: tuple[float, float, float]
    running_jobs: int
    max_concurrent_jobs: int
    temperature_c: float | None
    health_protocol_version: int = 2
    timestamp_unix_ms: int
    cpu_threads: int
    dedicated_reserved_cpu_ids: tuple[int, ...] = ()
    dedicated_reserved_count: int = 0
    memory_total_mb: int
    memory_available_mb: int
    jobs_path: str
    jobs_disk_total_mb: int | None
    jobs_disk_available_mb: int | None
    docker_root_dir: str
    docker_disk_total_mb: int | None
    docker_disk_available_mb: int | None
    queued_jobs: int
    max_queued_jobs: int
    draining: bool
    accepting: bool
    """Whether a submission would be taken now."""
    engine: Mapping[str, Any]
    """name, reachable, version, runtimes, error."""
    problems: tuple[str, ...] = ()
    """Each in a sentence, why the status is not `ok`."""


class WorkerInfo(Struct, frozen=True, kw_only=True):
    """`GET /info`."""

    worker_id: str
    hostname: str
    os: str
    os_architecture: str
    protocol_version: int
    cpu_model: str | None
    cpu_cores: int | None
    cpu_threads: int
    memory_mb: int
    labels: tuple[str, ...]
    version: str
    engine: str
    modes: tuple[str, ...]
    limits: Mapping[str, Any]
    """What a job gets if it says nothing, and the most it can ask for."""


class ContainerApi(Protocol):
    """A worker, as its HTTP API sees it."""

    async def submit(self, body: bytes, key: str = "") -> Receipt:
        """Raises Rejected, with nothing stored."""

    async def get(self, job_id: str) -> ContainerRecord | None: ...

    async def text(self, record: ContainerRecord) -> tuple[str, str]:
        """What is kept of stdout and stderr, as text, with a line where some was left out."""

    def waits_for(self, record: ContainerRecord) -> str:
        """Why a queued job has not started, in a sentence; empty for any other."""

    def position(self, record: ContainerRecord) -> int | None:
        """How many queued jobs are to start before it."""

    async def find(self, query: RecordQuery) -> Sequence[ContainerRecord]: ...

    async def wait(self, job_id: str, timeout: float) -> ContainerRecord | None:
        """The record when it is final, or as it is when the time is over."""

    async def cancel(self, job_id: str) -> Cancelled | None:
        """Ask for its end. A queued job has ended when this returns; of a running one the
        container is being ended, and `wait` tells when it is gone."""

    async def logs(
        self, job_id: str, stream: Stream, offset: int, *, limit: int, wait: float = 0
    ) -> LogPage | None:
        """What is kept from `offset` on (negative: so many bytes before the end), waiting for
        up to `wait` seconds if there is nothing yet. None if there is no such job."""

    async def artifact(self, job_id: str, path: str) -> tuple[Artifact, BinaryIO] | None:
        """An open file; the caller closes it. Only a path that the record lists is found."""

    def drain(self, on: bool) -> None:
        """Take no new jobs until further notice; those that are there go on."""

    async def info(self) -> WorkerInfo: ...

    async def health(self) -> WorkerHealth: ...

    def metrics(self) -> bytes:
        """Prometheus text."""

    def changes(self) -> AsyncIterator[str]:
        """The ids of jobs whose record changed, from now on."""
