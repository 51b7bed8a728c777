"""Files and batches, asked of an engine elsewhere."""

from __future__ import annotations

import builtins
from collections.abc import Mapping

from penstock.adapters.link.client import Link
from penstock.ports.batches import Batch, ShelfQuery, StoredFile


class RemoteBatches:
    """See `penstock.ports.batches.Batches`."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def begin_upload(self) -> str:
        return await self._link.call("batches.begin_upload", str)

    async def write_upload(self, upload_id: str, data: bytes) -> None:
        await self._link.call("batches.write_upload", type(None), upload_id=upload_id, data=data)

    async def keep_upload(
        self,
        upload_id: str,
        filename: str,
        purpose: str,
        *,
        tenant: str = "default",
        expires_after: int | None = None,
    ) -> StoredFile:
        return await self._link.call(
            "batches.keep_upload",
            StoredFile,
            upload_id=upload_id,
            filename=filename,
            purpose=purpose,
            tenant=tenant,
            expires_after=expires_after,
        )

    async def drop_upload(self, upload_id: str) -> None:
        await self._link.call("batches.drop_upload", type(None), upload_id=upload_id)

    async def file(self, file_id: str) -> StoredFile:
        return await self._link.call("batches.file", StoredFile, file_id=file_id)

    async def files(self, query: ShelfQuery) -> builtins.list[StoredFile]:
        return await self._link.call("batches.files", builtins.list[StoredFile], query=query)

    async def read_file(self, file_id: str, start: int, length: int) -> bytes:
        return await self._link.call(
            "batches.read_file", bytes, file_id=file_id, start=start, length=length
        )

    async def delete_file(self, file_id: str) -> None:
        await self._link.call("batches.delete_file", type(None), file_id=file_id)

    async def create(
        self,
        input_file_id: str,
        endpoint: str,
        *,
        completion_window: str = "24h",
        metadata: Mapping[str, str] | None = None,
        output_expires_after: int | None = None,
    ) -> Batch:
        return await self._link.call(
            "batches.create",
            Batch,
            input_file_id=input_file_id,
            endpoint=endpoint,
            completion_window=completion_window,
            metadata=metadata,
            output_expires_after=output_expires_after,
        )

    async def get(self, batch_id: str) -> Batch:
        return await self._link.call("batches.get", Batch, batch_id=batch_id)

    async def list(self, query: ShelfQuery) -> builtins.list[Batch]:
        return await self._link.call("batches.list", builtins.list[Batch], query=query)

    async def cancel(self, batch_id: str) -> Batch:
        return await self._link.call("batches.cancel", Batch, batch_id=batch_id)
