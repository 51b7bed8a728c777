"""Pipelines of an engine that is elsewhere, over HTTP.

A start is given a key here, before it is sent: if the answer is lost, sending it again is
answered with the run that it became.
"""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from penstock.adapters.http.line import Line, segment
from penstock.core.ids import IdSource
from penstock.core.item_view import ItemView, item_of
from penstock.core.run_view import RunView, record_of
from penstock.core.stages import (
    Breaker,
    ItemOutcome,
    ItemRecord,
    PipelineEvent,
    PipelineEventKind,
    PipelineInfo,
    PipelineRecord,
)
from penstock.lifecycles.pipeline import PIPELINE
from penstock.ports.clock import Clock
from penstock.ports.pipelines import CancelAnswer, RunQuery

_PAGE = 500
_POLL = 30.0
"""Seconds that one call waits for a run's end."""


class PipelineList(Struct, frozen=True):
    pipelines: list[PipelineInfo]


class RunStarted(Struct, frozen=True):
    job_id: str


class RunPage(Struct, frozen=True):
    runs: list[RunView]
    next: str | None = None


class ItemList(Struct, frozen=True):
    items: list[ItemView]


class BreakerList(Struct, frozen=True):
    breakers: list[Breaker]


_event = msgspec.json.Decoder(PipelineEvent).decode


class HttpPipelines:
    """See `penstock.ports.pipelines.Pipelines`."""

    def __init__(self, line: Line, clock: Clock) -> None:
        self._line, self._clock = line, clock
        self._ids = IdSource()

    async def list(self) -> builtins.list[PipelineInfo]:
        return (await self._line.get("/v1/pipelines", PipelineList)).pipelines

    async def show(self, name: str) -> PipelineInfo:
        return await self._line.get(f"/v1/pipelines/{segment(name)}", PipelineInfo)

    async def start(
        self,
        name: str,
        config: dict[str, Any] | None = None,
        *,
        tenant: str = "default",
        idempotency_key: str | None = None,
        retry_of: str | None = None,
    ) -> PipelineRecord:
        body = {
            "config": config or {},
            # The tenant that keys without one mean by themselves needs no mention.
            "tenant": None if tenant == "default" else tenant,
            "idempotency_key": idempotency_key or self._ids.next(self._clock.now()),
            "retry_of": retry_of,
        }
        path = f"/v1/pipelines/{segment(name)}/runs"
        started = await self._line.send("POST", path, RunStarted, body, again=True)
        return await self.get(started.job_id)

    async def get(self, job_id: str) -> PipelineRecord:
        return record_of(await self._line.get(_at(job_id), RunView))

    async def runs(self, query: RunQuery) -> builtins.list[PipelineRecord]:
        found: builtins.list[PipelineRecord] = []
        wanted: dict[str, Any] = {
            "pipeline": query.pipeline,
            "status": [status.value for status in query.statuses],
            "tenant": query.tenant,
            "retry_of": query.retry_of,
        }
        if query.before is not None:
            wanted |= {"before": query.before[0], "before_id": query.before[1]}
        cursor: str | None = None
        while (left := query.limit - len(found)) > 0:
            page = {**wanted, "limit": min(left, _PAGE), "cursor": cursor}
            runs = await self._line.get("/v1/runs", RunPage, page)
            found += [record_of(view) for view in runs.runs]
            cursor = runs.next
            if cursor is None:
                break
        return found

    async def items(
        self,
        job_id: str,
        stage: str,
        *,
        after: int = -1,
        limit: int = 100,
        outcomes: tuple[ItemOutcome, ...] = (),
    ) -> builtins.list[ItemRecord]:
        found: builtins.list[ItemRecord] = []
        path = f"{_at(job_id)}/stages/{segment(stage)}/items"
        wanted = {"outcome": [outcome.value for outcome in outcomes]}
        while (left := limit - len(found)) > 0:
            most = min(left, _PAGE)
            page = {**wanted, "after": after, "limit": most}
            items = (await self._line.get(path, ItemList, page)).items
            found += [item_of(view) for view in items]
            if len(items) < most:
                break
            after = items[-1].seq
        return found

    async def cancel(self, job_id: str, *, reason: str = "", timeout: float = 10.0) -> CancelAnswer:
        end = self._clock.monotonic() + timeout
        first: CancelAnswer | None = None
        while True:
            patience = min(max(0.0, end - self._clock.monotonic()), _POLL)
            answer = await self._line.send(
                "POST",
                f"{_at(job_id)}/cancel",
                CancelAnswer,
                {"reason": reason, "timeout": patience},
                wait=patience,
                again=True,
            )
            first = first or answer
            if PIPELINE.is_final(answer.status) or self._clock.monotonic() >= end:
                # Asked again, a run that our own cancel ended is one that had ended.
                return answer if answer.accepted else replace(first, status=answer.status)

    async def retry_failed(self, job_id: str) -> PipelineRecord:
        started = await self._line.send("POST", f"{_at(job_id)}/retry-failed", RunStarted)
        return await self.get(started.job_id)

    async def stream(self, job_id: str, after: int = 0) -> AsyncIterator[PipelineEvent]:
        """A lost connection is made again, from the last event on."""
        events = self._line.stream(
            f"{_at(job_id)}/stream", {"after": after or None}, PipelineEventKind.JOB_COMPLETE
        )
        async with aclosing(events):
            async for some in events:
                for event in some:
                    if event.data:
                        yield _event(event.data)

    async def breakers(self) -> builtins.list[Breaker]:
        return (await self._line.get("/v1/breakers", BreakerList)).breakers

    async def reset_breaker(self, name: str) -> Breaker:
        path = f"/v1/breakers/{segment(name)}/reset"
        return await self._line.send("POST", path, Breaker, again=True)


def _at(job_id: str) -> str:
    return f"/v1/runs/{segment(job_id)}"
