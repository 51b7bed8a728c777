"""What callers can ask about pipelines and their runs."""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator
from typing import Any, Protocol

from msgspec import Struct

from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.workloads.pipeline.records import (
    Breaker,
    ItemOutcome,
    ItemRecord,
    PipelineEvent,
    PipelineInfo,
    PipelineRecord,
)

MAX_PAGE = 1000
"""Runs or items of one answer."""


class RunQuery(Struct, frozen=True, kw_only=True):
    """Which runs, newest first. All conditions must hold."""

    pipeline: str | None = None
    statuses: tuple[PipelineJobStatus, ...] = ()
    tenant: str | None = None
    retry_of: str | None = None
    before: tuple[float, str] | None = None
    """(created_at, id) at which the page before ended."""
    limit: int = 50


class CancelAnswer(Struct, frozen=True):
    """What became of a request to cancel a run."""

    accepted: bool
    status: PipelineJobStatus
    """The status after the request."""
    reason: str = ""
    """Why it was not accepted."""


class Pipelines(Protocol):
    """What a caller can ask about pipelines. A run's id is its canonical job's id."""

    async def list(self) -> builtins.list[PipelineInfo]:
        """What can be started."""

    async def show(self, name: str) -> PipelineInfo:
        """One of them. NotFound."""

    async def start(
        self,
        name: str,
        config: dict[str, Any] | None = None,
        *,
        tenant: str = "default",
        idempotency_key: str | None = None,
        retry_of: str | None = None,
    ) -> PipelineRecord:
        """Submit a canonical job for it. NotFound, InvalidRequest (names the config's field),
        PipelineBusy (names the running job)."""

    async def get(self, job_id: str) -> PipelineRecord: ...

    async def runs(self, query: RunQuery) -> builtins.list[PipelineRecord]: ...

    async def items(
        self,
        job_id: str,
        stage: str,
        *,
        after: int = -1,
        limit: int = 100,
        outcomes: tuple[ItemOutcome, ...] = (),
    ) -> builtins.list[ItemRecord]:
        """NotFound also for a stage that the run does not have."""

    async def cancel(self, job_id: str, *, reason: str = "", timeout: float = 10.0) -> CancelAnswer:
        """Waits up to `timeout` for running work to stop."""

    async def retry_failed(self, job_id: str) -> PipelineRecord:
        """A new run, linked by `retry_of`, of what failed and what depends on it.
        IllegalMove unless the run has ended; InvalidRequest if nothing failed in it."""

    def stream(self, job_id: str, after: int = 0) -> AsyncIterator[PipelineEvent]:
        """Its events from an id on, as they come, until `job_complete`. NotFound at once."""

    async def breakers(self) -> builtins.list[Breaker]: ...

    async def reset_breaker(self, name: str) -> Breaker:
        """Close it by hand. NotFound."""
