"""OpenAI files and batches in the engine: the service, and its API for callers."""

from __future__ import annotations

import asyncio
import builtins
import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

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
from penstock.core.job import IdSource
from penstock.core.journal import Stride
from penstock.lifecycles.canonical import TERMINAL
from penstock.ports.clock import Clock
from penstock.ports.engine_api import KeyRole
from penstock.workloads.llm.batch_run import BatchDependencies, BatchRun
from penstock.workloads.llm.batches import Batch, BatchStoreQuery, Draft, Purpose, StoredFile

if TYPE_CHECKING:
    from penstock.control.guard import Guard

log = logging.getLogger(__name__)

MAX_METADATA = 16
_WINDOW = re.compile(r"([1-9]\d{0,5})([smhd])", re.ASCII)
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": DAY}
_LONGEST = 30 * DAY
_ALL = 1_000_000_000
ABANDONED = 3600.0
"""Seconds after which an upload that nobody goes on with is dropped."""
UploadKey = tuple[str, str]
"""Whose an upload is, and its name."""
_SWEEP = 60.0
"""Seconds between looks for files whose time is over."""
_TRY_AGAIN = 5.0
"""Seconds after which a batch that could not go on is tried again."""


class PendingUploads:
    """Files that are being written, over all callers."""

    def __init__(self, max_file: int, clock: Clock) -> None:
        self.max_file = max_file
        self._clock = clock
        self._drafts: dict[UploadKey, Draft] = {}
        self._used: dict[UploadKey, float] = {}
        """When each was last written to."""

    def add(self, key: UploadKey, draft: Draft) -> None:
        self._drafts[key], self._used[key] = draft, self._clock.monotonic()

    def use(self, key: UploadKey) -> Draft | None:
        if (draft := self._drafts.get(key)) is not None:
            self._used[key] = self._clock.monotonic()
        return draft

    async def drop(self, key: UploadKey) -> None:
        self._used.pop(key, None)
        if (draft := self._drafts.pop(key, None)) is not None:
            await draft.drop()

    async def drop_abandoned(self) -> None:
        """Those whose client has not written for an hour: it is dead, or as good as that."""
        limit = self._clock.monotonic() - ABANDONED
        for key in [key for key, used in self._used.items() if used < limit]:
            await self.drop(key)


class BatchService:
    """A service: `restore`, then `run` until cancelled."""

    def __init__(
        self, needs: BatchDependencies, uploading: PendingUploads, *, ids: IdSource | None = None
    ) -> None:
        self.batch_store = needs.batch_store
        self._needs, self._clock, self._uploading = needs, needs.clock, uploading
        self._ids = ids or IdSource()
        self._runs: dict[str, BatchRun] = {}
        """Of the batches that have not ended."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_running = False

    # -- the service ------------------------------------------------------------------

    async def restore(self) -> None:
        await self.batch_store.open()
        for batch in await self.batch_store.batches(BatchStoreQuery(limit=_ALL, oldest_first=True)):
            if not batch.has_ended:
                self._runs[batch.id] = BatchRun(batch, self._needs)

    async def run(self) -> None:
        self._is_running = True
        try:
            for batch_run in [*self._runs.values()]:
                self._begin(batch_run)
            while True:
                await self._clock.sleep(_SWEEP)
                await self._drop_expired()
        finally:
            self._is_running = False
            tasks = [*self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, batch_run: BatchRun) -> None:
        if self._is_running:
            doing = self._see_through(batch_run)
            self._tasks[batch_run.batch.id] = asyncio.get_running_loop().create_task(
                doing, name=f"penstock {batch_run.batch.id}"
            )

    async def _see_through(self, batch_run: BatchRun) -> None:
        """Its troubles stay its own: a full disk passes, and others go on meanwhile."""
        batch_id = batch_run.batch.id
        while not batch_run.batch.has_ended:
            try:
                await batch_run.run()
            except PenstockError as error:
                log.error("%s can't go on: %s", batch_id, error)
                await self._clock.sleep(_TRY_AGAIN)
            except Exception:
                log.exception("%s can't go on", batch_id)
                await self._clock.sleep(_TRY_AGAIN)
        self._runs.pop(batch_id, None)
        self._tasks.pop(batch_id, None)
        log.info("%s ended %s", batch_id, batch_run.batch.status)

    def hear(self, strides: Sequence[Stride]) -> None:
        """Listen to the ledger: which lines of a batch have ended."""
        for stride in strides:
            if stride.path.after not in TERMINAL:
                continue
            for job in stride.jobs:
                batch_run = self._runs.get(job.request.workflow_id or "")
                if batch_run is not None:
                    batch_run.hear(job)

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
        if self._is_needed(file):
            raise Conflict(
                f"{file.id} is the input of a batch that has not ended",
                hint="wait for its end, or cancel it",
            )
        await self.batch_store.remove_file(file.id)

    def _is_needed(self, file: StoredFile) -> bool:
        return any(batch_run.batch.input_file_id == file.id for batch_run in self._runs.values())

    # -- batches ----------------------------------------------------------------------

    async def create(
        self,
        file: StoredFile,
        endpoint: str,
        *,
        by: str,
        window: str,
        metadata: Mapping[str, str] | None,
        output_expires_after: int | None,
    ) -> Batch:
        endpoints = self._needs.batch_format.endpoints
        if endpoint not in endpoints:
            raise InvalidRequest(
                "endpoint",
                f"{endpoint[:60]!r} takes no batches",
                hint=f"one of {', '.join(endpoints)}",
            )
        if file.purpose is not Purpose.BATCH:
            raise InvalidRequest(
                "input_file_id",
                f"{file.id} has the purpose {file.purpose}",
                hint="it takes 'batch'",
            )
        if output_expires_after is not None:
            _lifetime(output_expires_after)
        _check_metadata(metadata)
        now = self._clock.now()
        batch = Batch(
            id="batch_" + self._ids.next(now),
            endpoint=endpoint,
            input_file_id=file.id,
            completion_window=window,
            created_at=now,
            expires_at=now + _seconds(window),
            tenant=file.tenant,
            principal=by,
            metadata=metadata,
            output_expires_after=output_expires_after,
        )
        self._runs[batch.id] = batch_run = BatchRun(batch, self._needs)
        try:
            await self.batch_store.put_batch(batch)
        except BaseException:
            del self._runs[batch.id]
            raise
        self._begin(batch_run)
        return batch

    async def get(self, batch_id: str) -> Batch | None:
        batch_run = self._runs.get(batch_id)
        return await self.batch_store.batch(batch_id) if batch_run is None else batch_run.view

    async def list(self, query: BatchStoreQuery) -> builtins.list[Batch]:
        found = await self.batch_store.batches(query)
        return [
            batch if (batch_run := self._runs.get(batch.id)) is None else batch_run.view
            for batch in found
        ]

    async def cancel(self, batch_id: str) -> Batch:
        batch_run = self._runs.get(batch_id)
        if batch_run is None:
            batch = await self.batch_store.batch(batch_id)
            if batch is None:
                raise NotFound(f"no batch {batch_id!r}")
            raise Conflict(f"batch {batch_id} is {batch.status}: it has ended")
        return await batch_run.cancel()

    # -- upkeep -----------------------------------------------------------------------

    def needs_since(self) -> float:
        """Jobs that ended from this time on may be of a batch that still has to tell of them."""
        begun = (batch_run.batch.created_at for batch_run in self._runs.values())
        return min(begun, default=float("inf"))

    async def pointers(self) -> builtins.list[str]:
        return []  # files of batches are not blobs

    async def prune(self, before: float) -> int:
        """Forget batches that ended, and files that were made, before a time; returns how many.

        Files with a time of their own have that instead."""
        gone = 0
        for batch in await self.batch_store.batches(BatchStoreQuery(limit=_ALL)):
            if (ended_at := batch.ended_at) is not None and ended_at < before:
                gone += await self.batch_store.remove_batch(batch.id)
        for file in await self.batch_store.files(BatchStoreQuery(limit=_ALL)):
            old = file.expires_at is None and file.created_at < before
            if old and not self._is_needed(file):
                gone += await self.batch_store.remove_file(file.id)
        return gone

    async def _drop_expired(self) -> None:
        now = self._clock.now()
        try:
            for file in await self.batch_store.files(BatchStoreQuery(limit=_ALL)):
                over = file.expires_at is not None and file.expires_at <= now
                if over and not self._is_needed(file):
                    await self.batch_store.remove_file(file.id)
            await self._uploading.drop_abandoned()
        except (PenstockError, OSError) as error:
            log.error("can't delete files whose time is over: %s", error)


def _seconds(window: str) -> float:
    found = _WINDOW.fullmatch(window)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0 < seconds <= _LONGEST:
        raise InvalidRequest(
            "completion_window", f"{window[:60]!r} is no time", hint="as 24h, and at most 30d"
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


MAX_PAGE = 10_001
"""One more than a door shows at a time, so that it knows whether there are more."""


class BatchApi:
    """`penstock.workloads.llm.batches.Batches`, for one caller and within their rights."""

    def __init__(self, keeper: BatchService, uploading: PendingUploads, guard: Guard) -> None:
        self._keeper, self._uploading, self._guard = keeper, uploading, guard

    # -- files --------------------------------------------------------------------

    async def begin_upload(self) -> str:
        self._guard.require(KeyRole.SUBMIT, "file.create")
        upload_id = secrets.token_hex(16)
        await self._uploading.drop_abandoned()
        self._uploading.add((self._guard.by, upload_id), await self._keeper.batch_store.draft())
        return upload_id

    async def write_upload(self, upload_id: str, data: bytes) -> None:
        draft, most = self._draft(upload_id), self._uploading.max_file
        if draft.size + len(data) > most:
            await self.drop_upload(upload_id)
            raise TooLarge("file", f"is longer than {most:,} bytes", hint="split it in several")
        await draft.write(data)

    async def keep_upload(
        self,
        upload_id: str,
        filename: str,
        purpose: str,
        *,
        tenant: str = "default",
        expires_after: int | None = None,
    ) -> StoredFile:
        draft = self._draft(upload_id)
        try:
            with self._guard.doing("file.create", filename[:128], role=KeyRole.SUBMIT):
                file = self._keeper.new_file(filename, purpose, self._mine(tenant), expires_after)
                return await draft.keep(file)
        finally:
            await self.drop_upload(upload_id)

    async def drop_upload(self, upload_id: str) -> None:
        await self._uploading.drop((self._guard.by, upload_id))

    def _draft(self, upload_id: str) -> Draft:
        draft = self._uploading.use((self._guard.by, upload_id))
        if draft is None:
            hint = "it was kept, dropped or left alone for an hour; begin another"
            raise NotFound(f"no upload {upload_id!r}", hint=hint)
        return draft

    def _mine(self, tenant: str) -> str:
        meant = self._guard.tenant(tenant)
        if not self._guard.caller.sees(meant):
            raise NotPermitted(
                f"tenant: {self._guard.by} may not keep a file for {tenant!r}",
                hint="leave it out: the key says whose it is",
            )
        return meant

    async def file(self, file_id: str) -> StoredFile:
        file = await self._keeper.batch_store.file(file_id)
        if file is None or not self._guard.caller.sees(file.tenant):
            raise NotFound(f"no file {file_id[:200]!r}", hint="GET /v1/files lists those there are")
        return file

    async def files(self, query: BatchStoreQuery) -> builtins.list[StoredFile]:
        mine = self._narrowed(query)
        return [] if mine is None else await self._keeper.batch_store.files(mine)

    async def read_file(self, file_id: str, start: int, length: int) -> bytes:
        await self.file(file_id)
        return await self._keeper.batch_store.read(file_id, start, length)

    async def delete_file(self, file_id: str) -> None:
        file = await self.file(file_id)
        with self._guard.doing("file.delete", file.id, role=KeyRole.SUBMIT):
            await self._keeper.delete_file(file)

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
        with self._guard.doing("batch.create", input_file_id, role=KeyRole.SUBMIT):
            return await self._keeper.create(
                file,
                endpoint,
                by=self._guard.by,
                window=completion_window,
                metadata=metadata,
                output_expires_after=output_expires_after,
            )

    async def get(self, batch_id: str) -> Batch:
        batch = await self._keeper.get(batch_id)
        if batch is None or not self._guard.caller.sees(batch.tenant):
            raise NotFound(
                f"no batch {batch_id[:200]!r}", hint="GET /v1/batches lists those there are"
            )
        return batch

    async def list(self, query: BatchStoreQuery) -> builtins.list[Batch]:
        mine = self._narrowed(query)
        return [] if mine is None else await self._keeper.list(mine)

    async def cancel(self, batch_id: str) -> Batch:
        await self.get(batch_id)
        with self._guard.doing("batch.cancel", batch_id, role=KeyRole.SUBMIT):
            return await self._keeper.cancel(batch_id)

    def _narrowed(self, query: BatchStoreQuery) -> BatchStoreQuery | None:
        """Within the caller's sight; None if nothing of it is."""
        if not 1 <= query.limit <= MAX_PAGE:
            raise InvalidRequest("limit", f"must be between 1 and {MAX_PAGE}")
        mine = self._guard.caller.tenant
        if mine is None or query.tenant == mine:
            return query
        return replace(query, tenant=mine) if query.tenant is None else None
