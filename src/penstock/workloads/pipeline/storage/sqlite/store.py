"""Pipeline runs in a SQLite file of their own, which several processes may share.

Writes go through `GroupCommit`, many to a flush; `reader` has the reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import apsw

from penstock.adapters.sqlite.group_commit import GroupCommit
from penstock.ports.store import Durability, Listeners
from penstock.workloads.pipeline.records import (
    Breaker,
    PipelineInfo,
    PipelineRecord,
)
from penstock.workloads.pipeline.storage.sqlite.reader import MANY, SqlitePipelineReader
from penstock.workloads.pipeline.storage.sqlite.schema import open_writer
from penstock.workloads.pipeline.storage.sqlite.writing import Writing
from penstock.workloads.pipeline.store import CancelAnswer, Claim, Save, Saved

Listener = Callable[[Sequence[str]], None]


class SqlitePipelineStore(SqlitePipelineReader):
    """See the module and `penstock.workloads.pipeline.store.PipelineStore`."""

    def __init__(
        self,
        path: Path,
        *,
        durability: Durability = Durability.DISK,
        slow_disk: bool = False,
    ) -> None:
        self.durability = durability
        self._writer = open_writer(path, durability)
        try:
            super().__init__(path)
        except BaseException:
            self._writer.close()
            raise
        self._writing = Writing(self._writer, self._sql)
        self._listeners: Listeners[Sequence[str]] = Listeners()
        self._commits = GroupCommit(
            "pipeline",
            self._writer,
            path,
            told=self._listeners.tell,
            durability=durability,
            slow_disk=slow_disk,
        )
        self._closed = False

    # -- writing ------------------------------------------------------------------

    async def create(
        self, record: PipelineRecord, *, single_flight: bool = False
    ) -> PipelineRecord:
        return await self._commits.run(partial(self._writing.create, record, single_flight))

    async def claim(self, claim: Claim) -> PipelineRecord | None:
        return await self._commits.run(partial(self._writing.claim, claim))

    async def save(self, save: Save) -> Saved:
        return await self._commits.run(partial(self._writing.save, save))

    async def request_cancel(self, job_id: str, now: float) -> CancelAnswer:
        return await self._commits.run(partial(self._writing.request_cancel, job_id, now))

    async def fail_stale(self, job_id: str, now: float, message: str, version: int) -> bool:
        work = partial(self._writing.fail_stale, job_id, now, message, version)
        return await self._commits.run(work)

    async def forget_stages(self, job_id: str, fence: int, stages: Sequence[str]) -> None:
        await self._commits.run(partial(self._writing.forget_stages, job_id, fence, stages))

    async def put_breaker(self, breaker: Breaker) -> bool:
        return await self._commits.run(lambda _: self._writing.put_breaker(breaker))

    async def declare(self, infos: Sequence[PipelineInfo]) -> None:
        await self._commits.run(lambda _: self._writing.declare(infos))

    async def remember(self, name: str, value: bytes) -> None:
        await self._commits.run(lambda _: self._writing.remember(name, value))

    async def prune(self, finished_before: float, limit: int = 1000) -> int:
        """As in the port; what is removed then is removed a little at a time."""
        count = await self._commits.run(lambda _: self._writing.doom(finished_before, limit))
        while await self._commits.run(lambda _: self._writing.bury(MANY)):
            pass
        return count

    def listen(self, listener: Listener) -> Callable[[], None]:
        return self._listeners.add(listener)

    @property
    def _connection(self) -> apsw.Connection:
        """The writer's, which has the newest pages at hand, unless a thread is using it."""
        return self._reader if self._commits.is_in_thread else self._writer

    async def close(self) -> None:
        """Finish what is under way, then let go of the file."""
        if self._closed:
            return
        self._closed = True
        await self._commits.close()
        await super().close()
        self._writer.close()
