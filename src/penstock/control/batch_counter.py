"""The part of the engine's Desk for files and batches, served within a caller's rights."""

from __future__ import annotations

import builtins
import secrets
from collections.abc import Mapping

from msgspec.structs import replace

from penstock.control.batches import BatchKeeper, Uploading
from penstock.control.guard import Guard
from penstock.core.caller import KeyRole
from penstock.core.errors import InvalidRequest, NotFound, NotPermitted, TooLarge
from penstock.ports.batches import Batch, Draft, ShelfQuery, StoredFile

MAX_PAGE = 10_001
"""One more than a door shows at a time, so that it knows whether there are more."""


class BatchesCounter:
    """See `penstock.ports.batches.Batches`."""

    def __init__(self, keeper: BatchKeeper, uploading: Uploading, guard: Guard) -> None:
        self._keeper, self._uploading, self._guard = keeper, uploading, guard

    # -- files --------------------------------------------------------------------

    async def begin_upload(self) -> str:
        self._guard.require(KeyRole.SUBMIT, "file.create")
        upload_id = secrets.token_hex(16)
        await self._uploading.drop_abandoned()
        self._uploading.add((self._guard.by, upload_id), await self._keeper.shelf.draft())
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
        file = await self._keeper.shelf.file(file_id)
        if file is None or not self._guard.caller.sees(file.tenant):
            raise NotFound(f"no file {file_id[:200]!r}", hint="GET /v1/files lists those there are")
        return file

    async def files(self, query: ShelfQuery) -> builtins.list[StoredFile]:
        mine = self._narrowed(query)
        return [] if mine is None else await self._keeper.shelf.files(mine)

    async def read_file(self, file_id: str, start: int, length: int) -> bytes:
        await self.file(file_id)
        return await self._keeper.shelf.read(file_id, start, length)

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

    async def list(self, query: ShelfQuery) -> builtins.list[Batch]:
        mine = self._narrowed(query)
        return [] if mine is None else await self._keeper.list(mine)

    async def cancel(self, batch_id: str) -> Batch:
        await self.get(batch_id)
        with self._guard.doing("batch.cancel", batch_id, role=KeyRole.SUBMIT):
            return await self._keeper.cancel(batch_id)

    def _narrowed(self, query: ShelfQuery) -> ShelfQuery | None:
        """Within the caller's sight; None if nothing of it is."""
        if not 1 <= query.limit <= MAX_PAGE:
            raise InvalidRequest("limit", f"must be between 1 and {MAX_PAGE}")
        mine = self._guard.caller.tenant
        if mine is None or query.tenant == mine:
            return query
        return replace(query, tenant=mine) if query.tenant is None else None
