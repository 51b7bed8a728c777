"""OpenAI files and batches in the engine: their upkeep, and the API for callers."""

from __future__ import annotations

import builtins
import logging
import math
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
from penstock.workloads.llm.batch_executor import JSON_LINES, LATE, BatchExecutor
from penstock.workloads.llm.batches import (
    ROW,
    TOPIC,
    Batch,
    BatchError,
    Batches,
    FilePurpose,
    FileRecords,
    PageQuery,
    StoredFile,
    read_batch,
)

if TYPE_CHECKING:
    from penstock.control.gateway import Gateway
    from penstock.control.guard import Guard

log = logging.getLogger(__name__)

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
    """A service: `run` until cancelled, which deletes files whose time is over. The pruner asks it
    what unfinished batches need."""

    def __init__(
        self,
        gateway: Gateway,
        state: SharedState,
        executor: BatchExecutor,
        *,
        max_file: int,
        ids: IdSource,
    ) -> None:
        self.gateway, self.files, self.executor = gateway, FileRecords(state), executor
        self.max_file, self.ids = max_file, ids

    async def run(self) -> None:
        clock = self.gateway.clock
        while True:
            await clock.sleep(_SWEEP)
            try:
                await self._delete_files(lambda file: (file.expires_at or math.inf) <= clock.now())
            except (PenstockError, OSError) as error:
                log.error("can't delete files whose time is over: %s", error)

    async def inputs(self, labels: Mapping[str, str]) -> set[str]:
        """The inputs of batches that have not ended."""
        query = JobQuery(topic=TOPIC, states=_OPEN, labels=labels, limit=_ALL)
        return {job.request.labels.get(INPUT, "") for job in await self.gateway.store.find(query)}

    async def _delete_files(self, is_old: Callable[[StoredFile], bool]) -> int:
        old = [*filter(is_old, await self.files.all())]
        needed = await self.inputs({}) if old else ()
        for file in old:
            if file.id not in needed:
                await self.files.delete(file.id)
        return len(old)

    def needs_since(self) -> float:
        """Jobs that ended from this time on may be of a batch that still has to tell of them."""
        jobs = self.gateway.store.jobs.values()
        begun = (job.accepted_at for job in jobs if job.request.topic == TOPIC)
        return min(begun, default=float("inf"))

    async def pointers(self) -> builtins.list[str]:
        return [file.pointer for file in await self.files.all()]

    async def prune(self, before: float) -> int:
        """Delete files that were made before a time; those with a time of their own have that."""
        return await self._delete_files(
            lambda file: file.expires_at is None and file.created_at < before
        )


class BatchApi:
    """`penstock.workloads.llm.batches.Batches`, for one caller and within their rights."""

    def __init__(self, service: BatchService, guard: Guard) -> None:
        self._service, self._guard = service, guard
        self._gateway, self._files = service.gateway, service.files
        self._runs = service.executor.runs
        gateway = service.gateway
        self._store, self._blobs, self._clock = gateway.store, gateway.blobs, gateway.clock

    # -- files --------------------------------------------------------------------

    async def write_upload(self, upload: str, start: int, data: bytes) -> None:
        self._guard.require(Batches.write_upload)
        if start < 0:
            raise InvalidRequest("start", "must not be negative")
        most = self._service.max_file
        if start + len(data) > most:
            await self.drop_upload(upload)
            raise TooLarge("file", f"is longer than {most:,} bytes", hint="split it in several")
        await self._blobs.write_part(self._mine(upload), start, data)

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
            meant, now = self._guard.tenant(tenant), self._clock.now()
            if not self._guard.caller.sees(meant):
                raise NotPermitted(
                    f"tenant: {self._guard.by} may not keep a file for {tenant!r}",
                    hint="leave it out: the key says whose it is",
                )
            if purpose != FilePurpose.BATCH:
                problem = f"{purpose[:60]!r} is of no use here"
                raise InvalidRequest("purpose", problem, hint="files are for batches: 'batch'")
            expires_at = None if expires_after is None else now + _lifetime(expires_after)
            stat = await self._blobs.finish_upload(self._mine(upload), digest, size, JSON_LINES)
            file = StoredFile(
                id="file-" + self._service.ids.next(now),
                filename=_plain_name(filename),
                purpose=FilePurpose.BATCH,
                created_at=now,
                tenant=meant,
                bytes=stat.size,
                expires_at=expires_at,
                pointer=stat.uri,
            )
            await self._files.put(file)
            return file

    async def drop_upload(self, upload: str) -> None:
        await self._blobs.drop_upload(self._mine(upload))

    def _mine(self, upload: str) -> str:
        """The name of the upload of this caller; nobody else's has it."""
        return sha256(f"{self._guard.by}/{upload}".encode()).hexdigest()[:32]

    async def file(self, file_id: str) -> StoredFile:
        file = await self._files.get(file_id)
        if file is None or not self._guard.caller.sees(file.tenant):
            raise NotFound(f"no file {file_id[:200]!r}", hint="GET /v1/files lists those there are")
        return file

    async def files(self, query: PageQuery) -> builtins.list[StoredFile]:
        mine = self._narrowed(query)
        return [] if mine is None else await self._files.page(mine)

    async def read_file(self, file_id: str, start: int, length: int) -> bytes:
        return await self._blobs.read((await self.file(file_id)).pointer, start, length)

    async def delete_file(self, file_id: str) -> None:
        file = await self.file(file_id)
        with self._guard.doing(Batches.delete_file, file.id):
            if await self._service.inputs({INPUT: file.id}):
                raise Conflict(
                    f"{file.id} is the input of a batch that has not ended",
                    hint="wait for its end, or cancel it",
                )
            await self._files.delete(file.id)

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
            if file.purpose is not FilePurpose.BATCH:
                problem = f"{file.id} has the purpose {file.purpose}"
                raise InvalidRequest("input_file_id", problem, hint="it takes 'batch'")
            if output_expires_after is not None:
                _lifetime(output_expires_after)
            _check_metadata(metadata or {})
            now = self._clock.now()
            batch = Batch(
                endpoint=endpoint,
                input_file_id=input_file_id,
                completion_window=completion_window,
                created_at=now,
                expires_at=now + _seconds(completion_window),
                metadata=metadata,
                output_expires_after=output_expires_after,
            )
            record = msgspec.json.encode(batch)
            self._service.executor.check(TOPIC, record)
            request = JobRequest(
                job_id="batch_" + self._service.ids.next(now),
                topic=TOPIC,
                context_ptr=await self._blobs.put(record),
                tenant=file.tenant,
                labels={INPUT: file.id},
                deadline=batch.expires_at + _GRACE,
            )
            (job,) = await self._gateway.submit([request], by=self._guard.by)
            return read_batch(record, job)

    async def get(self, batch_id: str) -> Batch:
        return await self._view(await self._job(batch_id))

    async def _job(self, batch_id: str) -> Job:
        job = await self._store.get(batch_id)
        is_batch = job is not None and job.request.topic == TOPIC
        if job is None or not is_batch or not self._guard.caller.sees(job.request.tenant):
            raise NotFound(
                f"no batch {batch_id[:200]!r}", hint="penstock batch list, or GET /v1/batches"
            )
        return job

    async def list(self, query: PageQuery) -> builtins.list[Batch]:
        if (mine := self._narrowed(query)) is None:
            return []
        before = None if mine.after is None else (await self._job(mine.after)).seq
        wanted = JobQuery(topic=TOPIC, tenant=mine.tenant, before=before, limit=mine.limit)
        return [await self._view(job) for job in await self._store.find(wanted)]

    async def cancel(self, batch_id: str) -> Batch:
        """A batch that has begun ends by itself, with its files; another one ends at once."""
        job = await self._job(batch_id)
        with self._guard.doing(Batches.cancel, batch_id):
            if not job.is_final and job.attempt:
                until = self._clock.now() + _START
                while job.job_id not in self._runs and self._clock.now() < until:
                    await self._clock.sleep(_POLL)
                job = await self._job(job.job_id)
            if job.is_final:
                ended = (await self._view(job)).status
                raise Conflict(f"batch {job.job_id} is {ended}: it has ended")
            if (run := self._runs.get(job.job_id)) is not None:
                await run.cancel()
            else:
                why, by = "the batch was cancelled", self._guard.by
                job = await self._gateway.cancel(job.job_id, reason=why, children=True, by=by)
            return await self._view(job)

    async def _view(self, job: Job) -> Batch:
        """A batch as it is now; of a job that the engine ended, with what that means for a
        batch."""
        run = self._runs.get(job.job_id)
        if run is not None and not job.is_final:
            batch = run.view
        else:
            batch = read_batch(await self._blobs.get(await self._record(job)), job)
        if not job.is_final:
            if not batch.has_ended:
                return batch
            ending = _ENDING.get(batch.status, BatchStatus.FINALIZING)
            return replace(batch, status=ending)  # its job is about to end
        if batch.has_ended or job.result is None:
            return batch
        code, message = job.result.error_code or str(job.state), job.result.error_message
        status = BatchStatus.EXPIRED if code == LATE else _ENDED.get(job.state, BatchStatus.FAILED)
        errors = batch.errors
        if status is BatchStatus.FAILED:
            errors = (BatchError(code=code.lower(), message=message or code),)
        return replace(batch, status=status, errors=errors, **{f"{status}_at": job.finished_at})

    async def _record(self, job: Job) -> str:
        """Where the newest record of a batch is: its result, its checkpoint, or its input."""
        if job.result is not None and job.result.result_ptr:
            return job.result.result_ptr
        page = await self._store.read_steps(job.job_id, StepQuery(name=ROW, limit=1))
        return page.steps[0].output if page.steps else job.request.context_ptr

    def _narrowed(self, query: PageQuery) -> PageQuery | None:
        """Within the caller's sight; None if nothing of it is."""
        if not 1 <= query.limit <= MAX_PAGE:
            raise InvalidRequest("limit", f"must be between 1 and {MAX_PAGE}")
        mine = self._guard.caller.tenant
        if mine is None or query.tenant == mine:
            return query
        return replace(query, tenant=mine) if query.tenant is None else None


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


def _check_metadata(metadata: Mapping[str, str]) -> None:
    longest = max((max(len(key) * 8, len(value)) for key, value in metadata.items()), default=0)
    if len(metadata) > 16 or longest > 512:
        hint = "at most 16 entries, 64 characters each and 512 for its value"
        raise InvalidRequest("metadata", "is too large", hint=hint)
