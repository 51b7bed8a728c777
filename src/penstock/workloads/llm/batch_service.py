"""OpenAI files and batches in the engine: the service, and its API for callers."""

from __future__ import annotations

import builtins
import logging
import re
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from penstock.core.check import DAY
from penstock.core.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    NotPermitted,
    PenstockError,
    TooLarge,
)
from penstock.core.job import IdSource, Job, JobRequest
from penstock.lifecycles.batch import BatchStatus
from penstock.lifecycles.canonical import TERMINAL, JobState
from penstock.ports.shared_state import SharedState
from penstock.ports.store import JobQuery, StepQuery
from penstock.workloads.llm.batch_executor import JSON_LINES, BatchExecutor
from penstock.workloads.llm.batch_lines import LATE
from penstock.workloads.llm.batches import (
    ROW,
    TOPIC,
    Batch,
    BatchError,
    Batches,
    FileRecords,
    PageQuery,
    Purpose,
    StoredFile,
    read_batch,
)

if TYPE_CHECKING:
    from penstock.control.gateway import Gateway
    from penstock.control.guard import Guard

log = logging.getLogger(__name__)

MAX_METADATA = 16
MAX_PAGE = 10_001
"""One more than a page shows, so that it knows whether there are more."""
INPUT = "openai.input_file_id"
"""The label of a batch's job that names its input."""
_WINDOW = re.compile(r"([1-9]\d{0,5})([smhd])", re.ASCII)
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": DAY}
_LONGEST = 30 * DAY
_GRACE = DAY
"""Seconds after the end of its window in which a batch must have written its files."""
_OPEN = tuple(state for state in JobState if state not in TERMINAL)
_ENDED = {JobState.CANCELLED: BatchStatus.CANCELLED, JobState.TIMEOUT: BatchStatus.EXPIRED}
_ENDING = {
    BatchStatus.FAILED: BatchStatus.VALIDATING,
    BatchStatus.CANCELLED: BatchStatus.CANCELLING,
}
_ALL = 1_000_000_000
_SWEEP = 60.0
"""Seconds between looks for files whose time is over."""
_START = 5.0
"""Seconds in which a batch whose worker was lost is expected to run again."""
_POLL = 0.1


class BatchService:
    """A service: `run` until cancelled, which deletes files whose time is over."""

    def __init__(
        self,
        gateway: Gateway,
        state: SharedState,
        executor: BatchExecutor,
        *,
        max_file: int,
        ids: IdSource,
    ) -> None:
        self.gateway, self.files = gateway, FileRecords(state)
        self.max_file, self._ids = max_file, ids
        self.blobs, self._store, self._clock = gateway.blobs, gateway.store, gateway.clock
        self._executor = executor

    async def run(self) -> None:
        while True:
            await self._clock.sleep(_SWEEP)
            try:
                await self._delete_files(self._is_expired)
            except (PenstockError, OSError) as error:
                log.error("can't delete files whose time is over: %s", error)

    def _is_expired(self, file: StoredFile) -> bool:
        return file.expires_at is not None and file.expires_at <= self._clock.now()

    # -- files ------------------------------------------------------------------------

    def new_file(
        self, filename: str, purpose: str, tenant: str, expires_after: int | None
    ) -> StoredFile:
        """What an upload is going to be. Raises InvalidRequest."""
        if purpose != Purpose.BATCH:
            raise InvalidRequest(
                "purpose",
                f"{purpose[:60]!r} is of no use here",
                hint="files are for batches: 'batch'",
            )
        now = self._clock.now()
        return StoredFile(
            id="file-" + self._ids.next(now),
            filename=_plain_name(filename),
            purpose=Purpose.BATCH,
            created_at=now,
            tenant=tenant,
            expires_at=None if expires_after is None else now + _lifetime(expires_after),
        )

    async def delete_file(self, file: StoredFile) -> None:
        if await self._inputs({INPUT: file.id}):
            raise Conflict(
                f"{file.id} is the input of a batch that has not ended",
                hint="wait for its end, or cancel it",
            )
        await self.files.delete(file.id)

    async def _inputs(self, labels: Mapping[str, str]) -> set[str]:
        """The inputs of batches that have not ended."""
        query = JobQuery(topic=TOPIC, states=_OPEN, labels=labels, limit=_ALL)
        return {job.request.labels.get(INPUT, "") for job in await self._store.find(query)}

    async def _delete_files(self, is_old: Callable[[StoredFile], bool]) -> int:
        old = [*filter(is_old, await self.files.all())]
        needed = await self._inputs({}) if old else ()
        for file in old:
            if file.id not in needed:
                await self.files.delete(file.id)
        return len(old)

    # -- batches ----------------------------------------------------------------------

    async def create(self, file: StoredFile, window: str, batch: Batch, *, by: str) -> Batch:
        now = self._clock.now()
        batch = replace(batch, created_at=now, expires_at=now + _seconds(window))
        if file.purpose is not Purpose.BATCH:
            raise InvalidRequest(
                "input_file_id",
                f"{file.id} has the purpose {file.purpose}",
                hint="it takes 'batch'",
            )
        if batch.output_expires_after is not None:
            _lifetime(batch.output_expires_after)
        _check_metadata(batch.metadata)
        record = msgspec.json.encode(batch)
        self._executor.check(TOPIC, record)
        request = JobRequest(
            job_id="batch_" + self._ids.next(now),
            topic=TOPIC,
            context_ptr=await self.blobs.put(record),
            tenant=file.tenant,
            labels={INPUT: file.id},
            deadline=batch.expires_at + _GRACE,
        )
        (job,) = await self.gateway.submit([request], by=by)
        return read_batch(record, job)

    async def job(self, batch_id: str) -> Job | None:
        job = await self._store.get(batch_id)
        return job if job is not None and job.request.topic == TOPIC else None

    async def view(self, job: Job) -> Batch:
        """A batch as it is now."""
        if job.is_final:
            return await self._ended(job)
        run = self._executor.runs.get(job.job_id)
        batch = await self._stored(job) if run is None else run.view
        if batch.has_ended:  # its job is about to end
            batch = replace(batch, status=_ENDING.get(batch.status, BatchStatus.FINALIZING))
        return batch

    async def _stored(self, job: Job) -> Batch:
        result = job.result.result_ptr if job.result is not None else None
        pointer = result or job.request.context_ptr
        if result is None:
            page = await self._store.read_steps(job.job_id, StepQuery(name=ROW, limit=1))
            pointer = page.steps[0].output if page.steps else pointer
        return read_batch(await self.blobs.get(pointer), job)

    async def _ended(self, job: Job) -> Batch:
        """The last record; of a job that the engine ended, with what that means for a batch."""
        batch = await self._stored(job)
        if batch.has_ended or job.result is None:
            return batch
        status = _ENDED.get(job.state, BatchStatus.FAILED)
        code, message = job.result.error_code or str(job.state), job.result.error_message
        if code == LATE:
            status = BatchStatus.EXPIRED
        errors = batch.errors
        if status is BatchStatus.FAILED:
            errors = (BatchError(code=code.lower(), message=message or code),)
        return replace(batch, status=status, errors=errors, **{f"{status}_at": job.finished_at})

    async def list(self, query: PageQuery) -> builtins.list[Batch]:
        before = None
        if query.after is not None:
            last = await self.job(query.after)
            if last is None or query.tenant not in (None, last.request.tenant):
                raise NotFound(f"after: there is no {query.after!r} here")
            before = last.seq
        wanted = JobQuery(topic=TOPIC, tenant=query.tenant, before=before, limit=query.limit)
        return [await self.view(job) for job in await self._store.find(wanted)]

    async def cancel(self, job: Job, by: str) -> Batch:
        """A batch that has begun ends by itself, with its files; another one ends at once."""
        if not job.is_final and job.attempt:
            until = self._clock.now() + _START
            while job.job_id not in self._executor.runs and self._clock.now() < until:
                await self._clock.sleep(_POLL)
            job = await self.job(job.job_id) or job
        if job.is_final:
            raise Conflict(f"batch {job.job_id} is {(await self.view(job)).status}: it has ended")
        if (run := self._executor.runs.get(job.job_id)) is not None:
            await run.cancel()
        else:
            why = "the batch was cancelled"
            job = await self.gateway.cancel(job.job_id, reason=why, children=True, by=by)
        return await self.view(job)

    # -- upkeep -----------------------------------------------------------------------

    def needs_since(self) -> float:
        """Jobs that ended from this time on may be of a batch that still has to tell of them."""
        jobs = self._store.jobs.values()
        begun = (job.accepted_at for job in jobs if job.request.topic == TOPIC)
        return min(begun, default=float("inf"))

    async def pointers(self) -> builtins.list[str]:
        return [file.pointer for file in await self.files.all()]

    async def prune(self, before: float) -> int:
        """Delete files that were made before a time; those with a time of their own have that."""
        return await self._delete_files(
            lambda file: file.expires_at is None and file.created_at < before
        )


def _seconds(window: str) -> float:
    found = _WINDOW.fullmatch(window)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0 < seconds <= _LONGEST:
        raise InvalidRequest(
            "completion_window", f"{window[:60]!r} is not a time", hint="as 24h, and at most 30d"
        )
    return seconds


def _lifetime(seconds: int) -> int:
    if not 3600 <= seconds <= _LONGEST:
        raise InvalidRequest(
            "expires_after.seconds", f"{seconds} is out of range", hint=f"3600 to {_LONGEST:.0f}"
        )
    return seconds


def _plain_name(filename: str) -> str:
    """A name to show: no folders, nothing that a terminal would obey."""
    name = re.split(r"[/\\]", filename)[-1]
    return "".join(c for c in name if c.isprintable())[:255] or "file"


def _check_metadata(metadata: Mapping[str, str] | None) -> None:
    if metadata is None:
        return
    if len(metadata) > MAX_METADATA:
        raise InvalidRequest("metadata", f"has more than {MAX_METADATA} entries")
    for key, value in metadata.items():
        if len(key) > 64 or len(value) > 512:
            raise InvalidRequest(
                "metadata", f"{key[:64]!r} is too long", hint="64 characters and 512 for its value"
            )


class BatchApi:
    """`penstock.workloads.llm.batches.Batches`, for one caller and within their rights."""

    def __init__(self, service: BatchService, guard: Guard) -> None:
        self._service, self._guard = service, guard

    # -- files --------------------------------------------------------------------

    async def write_upload(self, upload: str, start: int, data: bytes) -> None:
        self._guard.require(Batches.write_upload)
        if start < 0:
            raise InvalidRequest("start", "must not be negative")
        most = self._service.max_file
        if start + len(data) > most:
            await self.drop_upload(upload)
            raise TooLarge("file", f"is longer than {most:,} bytes", hint="split it in several")
        await self._service.blobs.write_part(self._mine(upload), start, data)

    async def keep_upload(
        self,
        upload: str,
        digest: str,
        size: int,
        filename: str,
        purpose: str,
        *,
        tenant: str = "default",
        expires_after: int | None = None,
    ) -> StoredFile:
        with self._guard.doing(Batches.keep_upload, filename[:128]):
            service, whose = self._service, self._tenant(tenant)
            file = service.new_file(filename, purpose, whose, expires_after)
            blobs = service.blobs
            stat = await blobs.finish_upload(self._mine(upload), digest, size, JSON_LINES)
            file = replace(file, bytes=stat.size, pointer=stat.uri)
            await service.files.put(file)
            return file

    async def drop_upload(self, upload: str) -> None:
        await self._service.blobs.drop_upload(self._mine(upload))

    def _mine(self, upload: str) -> str:
        """The name of the upload of this caller; nobody else's has it."""
        return sha256(f"{self._guard.by}/{upload}".encode()).hexdigest()[:32]

    def _tenant(self, tenant: str) -> str:
        meant = self._guard.tenant(tenant)
        if not self._guard.caller.sees(meant):
            raise NotPermitted(
                f"tenant: {self._guard.by} may not keep a file for {tenant!r}",
                hint="leave it out: the key says whose it is",
            )
        return meant

    async def file(self, file_id: str) -> StoredFile:
        file = await self._service.files.get(file_id)
        if file is None or not self._guard.caller.sees(file.tenant):
            raise NotFound(f"no file {file_id[:200]!r}", hint="GET /v1/files lists those there are")
        return file

    async def files(self, query: PageQuery) -> builtins.list[StoredFile]:
        mine = self._narrowed(query)
        return [] if mine is None else await self._service.files.page(mine)

    async def read_file(self, file_id: str, start: int, length: int) -> bytes:
        return await self._service.blobs.read((await self.file(file_id)).pointer, start, length)

    async def delete_file(self, file_id: str) -> None:
        file = await self.file(file_id)
        with self._guard.doing(Batches.delete_file, file.id):
            await self._service.delete_file(file)

    # -- batches ------------------------------------------------------------------

    async def create(
        self,
        input_file_id: str,
        endpoint: str,
        *,
        completion_window: str = "24h",
        metadata: Mapping[str, str] | None = None,
        output_expires_after: int | None = None,
    ) -> Batch:
        file = await self.file(input_file_id)
        with self._guard.doing(Batches.create, input_file_id):
            batch = Batch(
                endpoint=endpoint,
                input_file_id=input_file_id,
                completion_window=completion_window,
                expires_at=0.0,
                metadata=metadata,
                output_expires_after=output_expires_after,
            )
            return await self._service.create(file, completion_window, batch, by=self._guard.by)

    async def get(self, batch_id: str) -> Batch:
        return await self._service.view(await self._job(batch_id))

    async def _job(self, batch_id: str) -> Job:
        job = await self._service.job(batch_id)
        if job is None or not self._guard.caller.sees(job.request.tenant):
            raise NotFound(
                f"no batch {batch_id[:200]!r}", hint="GET /v1/batches lists those there are"
            )
        return job

    async def list(self, query: PageQuery) -> builtins.list[Batch]:
        mine = self._narrowed(query)
        return [] if mine is None else await self._service.list(mine)

    async def cancel(self, batch_id: str) -> Batch:
        job = await self._job(batch_id)
        with self._guard.doing(Batches.cancel, batch_id):
            return await self._service.cancel(job, self._guard.by)

    def _narrowed(self, query: PageQuery) -> PageQuery | None:
        """Within the caller's sight; None if nothing of it is."""
        if not 1 <= query.limit <= MAX_PAGE:
            raise InvalidRequest("limit", f"must be between 1 and {MAX_PAGE}")
        mine = self._guard.caller.tenant
        if mine is None or query.tenant == mine:
            return query
        return replace(query, tenant=mine) if query.tenant is None else None
