"""The container protocol over the engine's API: what `penstock container serve` answers.

A protocol job is a canonical job of the topic `job.container.run`; its record is read from that job
and its result, and nothing else is stored. The engine runs in the same process, so the output of a
running job is read from the executor.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import msgspec
from msgspec import Struct

from penstock import __version__
from penstock.api.metrics import Figures, Traffic
from penstock.core.artifact import Artifact
from penstock.core.errors import Conflict, NotFound, TooMany, WaitTimedOut
from penstock.core.job import Job, JobRequest
from penstock.core.job import Priority as JobPriority
from penstock.lifecycles.canonical import JobState
from penstock.lifecycles.container import CANONICAL_STATES, ContainerJobState
from penstock.ports.clock import Clock
from penstock.ports.engine_api import EngineApi
from penstock.ports.store import JobQuery
from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.files.output import LogPage
from penstock.workloads.container.host import ContainerHost, low_disk
from penstock.workloads.container.job import (
    PROTOCOL_VERSION,
    TOPIC,
    ContainerJob,
    ContainerResult,
    ErrorCode,
    JobError,
    Mode,
    Priority,
    Rejected,
    Stream,
    StreamCount,
    log_name,
)
from penstock.workloads.container.machine import disk_of, need_of
from penstock.workloads.container.protocol.submission import Accepted, read_job

_LARGE = 256 << 10
"""Bytes of a submission that is read in a thread, so that nobody waits behind it."""
_PLAIN_ID = re.compile(r"(?!x-)[A-Za-z0-9][A-Za-z0-9._-]{0,199}", re.ASCII)
"""Ids that are those of the canonical job, too; others are hashed."""
_ID_LABEL, _IMAGE_LABEL = "container.job_id", "container.image"
_SPARE = 60.0
"""Seconds beyond all limits of its own that a job has in the engine."""
_DISK_RETRY = 60.0
_ON_ITS_WAY = 5.0
_WAITING = frozenset(CANONICAL_STATES[ContainerJobState.QUEUED])
_PRIORITIES = {
    Priority.HIGH: JobPriority.CRITICAL,
    Priority.NORMAL: JobPriority.INTERACTIVE,
    Priority.LOW: JobPriority.BATCH,
}


class ContainerRecord(Struct, frozen=True):
    """A container job: the canonical one and, once it has ended, its result."""

    job: Job
    result: ContainerResult | None = None

    @property
    def job_id(self) -> str:
        return self.job.request.labels.get(_ID_LABEL, self.job.job_id)

    @property
    def state(self) -> ContainerJobState:
        return next(ours for ours, theirs in CANONICAL_STATES.items() if self.job.state in theirs)

    @property
    def is_final(self) -> bool:
        return self.job.is_final

    @property
    def exit_code(self) -> int | None:
        return self.result.exit_code if self.result is not None else None

    @property
    def error(self) -> JobError | None:
        if not self.is_final or self.job.state is JobState.SUCCEEDED:
            return None
        end = self.job.result
        code = (end.error_code if end is not None else None) or self.job.state.value
        message = (end.error_message if end is not None else None) or code
        return JobError(code, message, self.result.error_field if self.result is not None else "")

    @property
    def priority(self) -> Priority:
        asked = self.job.request.priority
        return next(ours for ours, theirs in _PRIORITIES.items() if theirs is asked)

    @property
    def labels(self) -> dict[str, str]:
        own = (_ID_LABEL, _IMAGE_LABEL)
        return {name: text for name, text in self.job.request.labels.items() if name not in own}

    @property
    def image(self) -> str:
        return self.job.request.labels.get(_IMAGE_LABEL, "")

    @property
    def artifacts(self) -> tuple[Artifact, ...]:
        return self.job.result.artifacts if self.job.result is not None else ()

    def count(self, stream: Stream) -> StreamCount:
        if self.result is None:
            return StreamCount()
        return getattr(self.result, f"{stream}_count")  # type: ignore[no-any-return]


class WorkerHealth(Struct, frozen=True, kw_only=True):
    """`GET /health`: the fields of versions 1 and 2, then more."""

    status: str
    """`ok`, or `degraded` when no engine answers, the disk is low, or it drains."""
    uptime_seconds: int
    load_average: tuple[float, float, float]
    running_jobs: int
    max_concurrent_jobs: int
    temperature_c: float | None = None
    """Always null, as in the protocol's own worker."""
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
    """Whether a submission would be accepted now."""
    engine: Mapping[str, Any]
    """name, reachable, version, runtimes, error."""
    problems: tuple[str, ...] = ()
    """Why the status is not `ok`."""


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
    gpus: bool
    """Whether jobs can have GPUs."""
    limits: Mapping[str, Any]
    """`defaults` and `max` of a job's limits, and the `capacity` for all jobs together."""


class ContainerFacade:
    """The protocol's operations, for the one caller that the worker's token stands for."""

    def __init__(
        self, api: EngineApi, host: ContainerHost, config: WorkerConfig, clock: Clock
    ) -> None:
        self._api, self._host, self._config, self._clock = api, host, config, clock
        self._since = clock.monotonic()
        self._draining = False

    # -- submitting -------------------------------------------------------------------------

    async def submit(self, body: bytes, key: str = "") -> ContainerRecord:
        """It is durable when this returns. Raises Rejected, with nothing stored."""
        read = self._read(body) if len(body) < _LARGE else asyncio.to_thread(self._read, body)
        accepted = read if isinstance(read, Accepted) else await read
        job = accepted.job
        refused = self._too_large(job) or self.closed(job.job_id)
        if refused is not None:
            # Who asks again after a lost answer learns that the job is there.
            if await self.get(job.job_id) is not None:
                raise _taken(job.job_id)
            raise refused
        request = self._request(accepted, await self._api.put_blob(accepted.body), key)
        try:
            (stored,) = submitted = await self._api.submit([request])
        except Conflict:
            known = await self.get(job.job_id)
            if known is None or (key and known.job.request.idempotency_key == key):
                raise _key_reused(job.job_id) from None
            raise _taken(job.job_id) from None
        except TooMany as error:
            if await self.get(job.job_id) is not None:
                raise _taken(job.job_id) from None
            raise Rejected(
                ErrorCode.QUEUE_FULL,
                f"the queue is full (max_queued_jobs={self._config.max_queued_jobs})",
                job_id=job.job_id,
                status=429,
                retry_after=error.retry_after,
            ) from None
        is_new = stored.job_id in getattr(submitted, "new", ())
        if not is_new and not (key and stored.request.idempotency_key == key):
            raise _taken(job.job_id)
        return ContainerRecord(stored)

    def _read(self, body: bytes) -> Accepted:
        return read_job(body, self._config, self._host.facts)

    def _request(self, accepted: Accepted, pointer: str, key: str) -> JobRequest:
        job, limits, config = accepted.job, accepted.job.limits, self._config
        preparing = 2 * limits.pull_seconds + (config.build.max_seconds if job.build else 0)
        labels = {**job.labels, _IMAGE_LABEL: job.image}
        if (job_id := _canonical_id(job.job_id)) != job.job_id:
            labels[_ID_LABEL] = job.job_id
        return JobRequest(
            job_id=job_id,
            topic=TOPIC,
            context_ptr=pointer,
            priority=_PRIORITIES[job.priority],
            labels=labels,
            idempotency_key=key or None,
            timeout=preparing + limits.max_runtime_seconds + config.stop_grace + _SPARE,
        )

    def closed(self, job_id: Any = None) -> Rejected | None:
        """Why no job at all is accepted now."""
        if self._draining:
            message = "this worker accepts no new jobs (it is draining)"
            return Rejected(ErrorCode.DRAINING, message, job_id=job_id, status=503)
        if low := low_disk(self._config):
            return Rejected(
                ErrorCode.DISK_LOW, low, job_id=job_id, status=503, retry_after=_DISK_RETRY
            )
        return None

    def _too_large(self, job: ContainerJob) -> Rejected | None:
        """A job that could never start."""
        found = self._host.capacity.too_small(need_of(job, self._config))
        if found is None:
            return None
        field, why = found
        return Rejected(ErrorCode.NOT_ALLOWED, f"{field} {why}", field=field, job_id=job.job_id)

    # -- looking ----------------------------------------------------------------------------

    async def get(self, job_id: str) -> ContainerRecord | None:
        try:
            return await self._record(await self._api.get(_canonical_id(job_id)))
        except NotFound:
            return None

    async def _record(self, job: Job) -> ContainerRecord:
        pointer = job.result.result_ptr if job.result is not None else None
        if not pointer:
            return ContainerRecord(job)
        data = await self._api.get_blob(pointer)
        return ContainerRecord(job, msgspec.json.decode(data, type=ContainerResult))

    async def waits_for(self, record: ContainerRecord) -> str:
        """Why a queued job has not started, in a sentence; empty for any other."""
        return "" if record.is_final else await self._api.why(record.job.job_id)

    async def find(
        self,
        states: Sequence[ContainerJobState] = (),
        labels: Mapping[str, str] | None = None,
        image: str | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> Sequence[ContainerRecord]:
        """Newest first; all conditions must hold. `before`: only those whose `seq` is less."""
        labels = dict(labels or {}) | ({_IMAGE_LABEL: image} if image is not None else {})
        wanted = tuple(one for state in states for one in CANONICAL_STATES.get(state, ()))
        if states and not wanted:
            return []
        query = JobQuery(topic=TOPIC, states=wanted, labels=labels, before=before, limit=limit)
        return [await self._record(job) for job in await self._api.find(query)]

    async def wait(
        self, job_id: str, seconds: float, *, removed: bool = False
    ) -> ContainerRecord | None:
        """The record when it is final (and its container is removed), or as it is when the time is
        over."""
        until = self._clock.monotonic() + seconds
        canonical = _canonical_id(job_id)
        try:
            await self._api.wait(canonical, seconds)
            if removed:
                await self._host.is_clear_of(canonical, until - self._clock.monotonic())
        except WaitTimedOut:
            pass
        except NotFound:
            return None
        return await self.get(job_id)

    async def cancel(self, job_id: str) -> ContainerRecord | None:
        """Ask for its end. A queued job has ended when this returns; of a running one the
        container is being ended, and `wait` tells when it is gone."""
        canonical = _canonical_id(job_id)
        try:
            queued = (await self._api.get(canonical)).state in _WAITING
            # A job on its way to its worker has ended as soon as that has heard of it.
            timeout = _ON_ITS_WAY if queued else 0.0
            answer = await self._api.cancel(
                canonical, reason="cancelled by a caller", timeout=timeout
            )
        except NotFound:
            return None
        return await self._record(answer.job)

    # -- output -----------------------------------------------------------------------------

    async def logs(
        self,
        job_id: str,
        stream: Stream,
        offset: int,
        *,
        limit: int,
        wait: float = 0,
        text: bool = False,
    ) -> LogPage | None:
        """What is kept from `offset` on (negative: so many bytes before the end), waiting for
        up to `wait` seconds if there is nothing yet; as `text`, whole characters of it. None if
        there is no such job."""
        until = self._clock.monotonic() + wait
        canonical, ragged = _canonical_id(job_id), offset < 0
        while True:
            output = self._host.outputs.get(canonical)
            if output is not None:
                page = await asyncio.to_thread(output.page, stream, offset, limit)
            else:
                record = await self.get(job_id)
                if record is None:
                    return None
                page = await self._kept_page(record, stream, offset, limit)
            read = page.next
            if text:
                page = page.whole(ragged=ragged and page.offset > 0)
            left = until - self._clock.monotonic()
            if page.data or page.end or left <= 0:
                return page
            if output is not None:
                await output.more(stream, read, left)
                if self._host.outputs.get(canonical) is not output:
                    left = 0.05  # it has ended: its record follows
            await self._host.next_change(min(left, 1.0 if output is None else 0.05))

    async def _kept_page(
        self, record: ContainerRecord, stream: Stream, offset: int, limit: int
    ) -> LogPage:
        if not record.is_final:
            return LogPage(stream, 0, b"", 0)
        count = record.count(stream)
        total, kept = count.bytes, count.kept
        asked = max(total + offset, 0) if offset < 0 else min(offset, total)
        head = kept if kept == total else (kept + 1) // 2
        tail = total - (kept - head)
        at = asked if asked < head else max(asked, tail)
        size = min(limit, (head if at < head else total) - at)
        data = await self._kept(record, stream, at if at < head else head + at - tail, size)
        after = at + len(data)
        end = after >= total or not data
        return LogPage(stream, at, data, after, at - asked, end, after == head < tail)

    async def _kept(self, record: ContainerRecord, stream: Stream, at: int, size: int) -> bytes:
        """Some of what is kept of a stream; the text of the result has all of it, or else there is
        an artifact."""
        if record.result is None or size <= 0:
            return b""
        for artifact in record.artifacts:
            if artifact.name == log_name(stream):
                return await self._api.read_blob(artifact.pointer, at, size)
        text: str = getattr(record.result, stream)
        return text.encode()[at : at + size]

    async def read_artifact(self, artifact: Artifact, at: int, size: int) -> bytes:
        return await self._api.read_blob(artifact.pointer, at, size)

    # -- the worker itself ------------------------------------------------------------------

    def drain(self, on: bool) -> None:
        """Accept no new jobs until further notice; those that are there go on."""
        self._draining = on

    async def figures(self, traffic: Traffic, streams: int) -> Figures:
        """For Prometheus."""
        return await Figures.of(self._api, traffic, streams=streams)

    async def info(self) -> WorkerInfo:
        config, machine, facts = self._config, self._host.machine, self._host.facts
        builds = config.build.enabled and (facts is None or facts.can_build)
        capacity = self._host.capacity
        return WorkerInfo(
            worker_id=config.worker_id,
            hostname=machine.hostname,
            os=machine.os,
            os_architecture=machine.architecture,
            protocol_version=PROTOCOL_VERSION,
            cpu_model=machine.cpu_model,
            cpu_cores=machine.cpu_cores,
            cpu_threads=machine.threads,
            memory_mb=machine.memory().total_mb,
            labels=config.labels,
            version=__version__,
            engine=self._host.engine.name,
            modes=(Mode.IMAGE, Mode.BUILD) if builds else (Mode.IMAGE,),
            gpus=facts is not None and not facts.no_gpus,
            limits={
                "defaults": msgspec.structs.asdict(config.defaults),
                "max": msgspec.structs.asdict(config.max_limits),
                "capacity": {
                    "jobs": config.max_concurrent_jobs,
                    "memory_mb": capacity.memory_mb,
                    "cpus": capacity.cpus,
                },
            },
        )

    async def health(self) -> WorkerHealth:
        config, machine, host = self._config, self._host.machine, self._host
        memory, status, facts = machine.memory(), await self._api.status(), host.facts
        running, closed = status.tally.get(JobState.RUNNING, 0), self.closed()
        queued = sum(status.tally.get(state, 0) for state in _WAITING)
        told = (host.problem, closed.error.message if closed is not None else "")
        problems = tuple(sentence for sentence in told if sentence)
        jobs_disk = disk_of(config.jobs_dir)
        root_dir = str(config.docker_root_dir or (facts.root_dir if facts else ""))
        engine_disk = disk_of(root_dir)
        return WorkerHealth(
            status="degraded" if problems else "ok",
            uptime_seconds=int(self._clock.monotonic() - self._since),
            load_average=machine.load_average(),
            running_jobs=running,
            max_concurrent_jobs=config.max_concurrent_jobs,
            timestamp_unix_ms=int(self._clock.now() * 1000),
            cpu_threads=machine.threads,
            memory_total_mb=memory.total_mb,
            memory_available_mb=memory.available_mb,
            jobs_path=str(config.jobs_dir.absolute()),
            jobs_disk_total_mb=jobs_disk.total_mb,
            jobs_disk_available_mb=jobs_disk.available_mb,
            docker_root_dir=root_dir,
            docker_disk_total_mb=engine_disk.total_mb,
            docker_disk_available_mb=engine_disk.available_mb,
            queued_jobs=queued,
            max_queued_jobs=config.max_queued_jobs,
            draining=self._draining,
            accepting=closed is None and queued < config.max_queued_jobs,
            engine={
                "name": host.engine.name,
                "reachable": not host.problem,
                "version": facts.version if facts else None,
                "runtimes": facts.runtimes if facts else (),
                "error": host.problem or None,
            },
            problems=problems,
        )


def _canonical_id(job_id: str) -> str:
    """The id of the canonical job."""
    if _PLAIN_ID.fullmatch(job_id):
        return job_id
    return f"x-{sha256(job_id.encode(errors='surrogatepass')).hexdigest()[:40]}"


def _taken(job_id: str) -> Rejected:
    return Rejected(
        ErrorCode.JOB_ID_ALREADY_EXISTS,
        f"there is a job {job_id} already; give the new one another job_id",
        job_id=job_id,
        status=409,
    )


def _key_reused(job_id: str) -> Rejected:
    return Rejected(
        ErrorCode.IDEMPOTENCY_KEY_REUSED,
        "the idempotency key was used for another submission",
        job_id=job_id,
        status=409,
    )
