"""The runs of a folder whose engine is not running: they can be read, and nothing else."""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from penstock.core.errors import NotFound
from penstock.workloads.pipeline.records import (
    Breaker,
    ItemOutcome,
    ItemRecord,
    PipelineEvent,
    PipelineInfo,
    PipelineRecord,
)
from penstock.workloads.pipeline.storage.sqlite.reader import SqlitePipelineReader
from penstock.workloads.pipeline.store import RunQuery

Refuse = Callable[..., Coroutine[Any, Any, Any]]


class OfflinePipelines:
    """The part of `penstock.workloads.pipeline.store.Pipelines` that only reads.

    The file is opened when it is first asked for; where there is none, no run is known.
    """

    def __init__(self, path: Path, refuse: Refuse) -> None:
        self._path, self._refuse = path, refuse
        self._opened: SqlitePipelineReader | None = None
        self.start = self.cancel = self.retry_failed = self.reset_breaker = refuse

    @property
    def _store(self) -> SqlitePipelineReader | None:
        if self._opened is None and self._path.is_file():
            self._opened = SqlitePipelineReader(self._path)
        return self._opened

    async def list(self) -> builtins.list[PipelineInfo]:
        return await self._store.declared() if self._store is not None else []

    async def show(self, name: str) -> PipelineInfo:
        known = {info.name: info for info in await self.list()}
        if name not in known:
            raise NotFound(f"no pipeline {name!r}", hint=f"there are: {', '.join(known) or 'none'}")
        return known[name]

    async def get(self, job_id: str) -> PipelineRecord:
        record = await self._store.get(job_id) if self._store is not None else None
        if record is None:
            raise NotFound(f"no run {job_id!r}", hint="'penstock pipeline runs' lists them")
        return record

    async def runs(self, query: RunQuery) -> builtins.list[PipelineRecord]:
        return await self._store.find(query) if self._store is not None else []

    async def items(
        self,
        job_id: str,
        stage: str,
        *,
        after: int = -1,
        limit: int = 100,
        outcomes: tuple[ItemOutcome, ...] = (),
    ) -> builtins.list[ItemRecord]:
        record = await self.get(job_id)
        if record.stage(stage) is None:
            there = ", ".join(one.name for one in record.stages) or "none"
            raise NotFound(f"run {job_id} has no stage {stage!r}", hint=f"there are: {there}")
        assert self._store is not None
        return await self._store.items(job_id, stage, after=after, limit=limit, outcomes=outcomes)

    async def stream(self, job_id: str, after: int = 0) -> AsyncIterator[PipelineEvent]:
        """What happened so far. Refused at the end of that, where more is to come."""
        record = await self.get(job_id)
        assert self._store is not None
        while events := await self._store.events(job_id, after):
            for event in events:
                after = event.id
                yield event
        if not record.is_final:
            await self._refuse()

    async def breakers(self) -> builtins.list[Breaker]:
        return await self._store.breakers() if self._store is not None else []

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()
