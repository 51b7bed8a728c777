"""The HTTP API before a store of runs where nothing happens by itself: a test says what does."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
from msgspec.structs import replace
from tests.integration.api.house import House

from penstock.api.health import Health
from penstock.api.options import HttpOptions
from penstock.api.server import HttpServer
from penstock.app.engine import Engine
from penstock.core.errors import (
    IllegalMove,
    InvalidRequest,
    NotAuthenticated,
    NotFound,
    NotPermitted,
)
from penstock.lifecycles.pipeline import PipelineJobEvent
from penstock.ports.clock import SystemClock
from penstock.ports.engine_api import OWNER, Caller, EngineApi, KeyRole, Session
from penstock.workloads.pipeline.records import (
    Breaker,
    BreakerState,
    ItemOutcome,
    ItemRecord,
    PipelineEvent,
    PipelineEventKind,
    PipelineInfo,
    PipelineRecord,
    StageInfo,
    StageKind,
    StageRecord,
    StageStatus,
)
from penstock.workloads.pipeline.storage.memory import MemoryPipelineStore
from penstock.workloads.pipeline.interface import (
    CancelAnswer,
    Claim,
    Happening,
    RunQuery,
    Save,
    StageItems,
)

_E, _K = PipelineJobEvent, PipelineEventKind
NEWS = PipelineInfo(
    name="news",
    topic="job.pipeline.news",
    fingerprint="f1",
    stages=(
        StageInfo(name="ingest", kind=StageKind.MAP, over="config:feeds", concurrency=5),
        StageInfo(name="brief", kind=StageKind.STEP, of="ingest"),
    ),
    config_schema={"type": "object"},
)
T0 = 1_000.0


class StorePipelines:
    """`penstock.workloads.pipeline.store.Pipelines` over a store, for one caller."""

    def __init__(self, store: MemoryPipelineStore, caller: Caller = OWNER) -> None:
        self.store, self.caller = store, caller
        self.asked: list[tuple[str, Any]] = []

    async def list(self) -> builtins.list[PipelineInfo]:
        return await self.store.declared()

    async def show(self, name: str) -> PipelineInfo:
        for info in await self.list():
            if info.name == name:
                return info
        raise NotFound(f"no pipeline {name!r}", hint="did you mean news?")

    async def start(
        self,
        name: str,
        config: dict[str, Any] | None = None,
        *,
        tenant: str = "default",
        idempotency_key: str | None = None,
        retry_of: str | None = None,
    ) -> PipelineRecord:
        self._require(KeyRole.SUBMIT)
        info = await self.show(name)
        for field in config or {}:
            if field != "feeds":
                raise InvalidRequest(f"config.{field}", "unknown field")
        if not self.caller.sees(tenant):
            raise NotPermitted(f"tenant: not {tenant!r}")
        job_id = idempotency_key or f"run-{len(await self.store.find(RunQuery(limit=10_000)))}"
        record = a_run(job_id, tenant=tenant, config=config or {}, retry_of=retry_of)
        return await self.store.create(record, single_flight=info.single_flight)

    async def get(self, job_id: str) -> PipelineRecord:
        record = await self.store.get(job_id)
        if record is None or not self.caller.sees(record.tenant):
            raise NotFound(f"no job {job_id!r}")
        return record

    async def runs(self, query: RunQuery) -> builtins.list[PipelineRecord]:
        mine = self.caller.tenant
        if mine is not None and query.tenant not in (None, mine):
            return []
        return await self.store.find(replace(query, tenant=mine or query.tenant))

    async def items(
        self,
        job_id: str,
        stage: str,
        *,
        after: int = -1,
        limit: int = 100,
        outcomes: tuple[ItemOutcome, ...] = (),
    ) -> builtins.list[ItemRecord]:
        if (await self.get(job_id)).stage(stage) is None:
            raise NotFound(f"it has no stage {stage!r}")
        return await self.store.items(job_id, stage, after=after, limit=limit, outcomes=outcomes)

    async def cancel(self, job_id: str, *, reason: str = "", timeout: float = 10.0) -> CancelAnswer:
        await self.get(job_id)
        self._require(KeyRole.SUBMIT)
        self.asked.append((reason, timeout))
        return await self.store.request_cancel(job_id, T0 + 9)

    async def retry_failed(self, job_id: str) -> PipelineRecord:
        record = await self.get(job_id)
        self._require(KeyRole.SUBMIT)
        if not record.is_final:
            raise IllegalMove("pipeline job", record.status, "retry_failed")
        if not record.errors and all(stage.failed == 0 for stage in record.stages):
            raise InvalidRequest("job_id", "nothing failed in it")
        return await self.start(
            record.pipeline, record.config, tenant=record.tenant, retry_of=record.id
        )

    async def stream(self, job_id: str, after: int = 0) -> AsyncIterator[PipelineEvent]:
        await self.get(job_id)
        changed = asyncio.Event()
        stop = self.store.listen(lambda _: changed.set())
        try:
            while True:
                changed.clear()
                ended = (await self.get(job_id)).is_final
                events = await self.store.events(job_id, after, 100)
                for event in events:
                    after = event.id
                    yield event
                if not events:
                    if ended:
                        return
                    await changed.wait()
        finally:
            stop()

    async def breakers(self) -> builtins.list[Breaker]:
        self._require(KeyRole.OPERATE)
        return await self.store.breakers()

    async def reset_breaker(self, name: str) -> Breaker:
        self._require(KeyRole.OPERATE)
        held = await self.store.breaker(name)
        if held is None:
            raise NotFound(f"no breaker {name!r}")
        closed = replace(held, state=BreakerState.CLOSED, version=held.version + 1)
        assert await self.store.put_breaker(closed)
        return closed

    def _require(self, role: KeyRole) -> None:
        if not self.caller.may(role):
            raise NotPermitted(f"it takes the role {role}")


class StoreEngineApi:
    """An EngineApi with pipelines only."""

    def __init__(self, store: MemoryPipelineStore, caller: Caller = OWNER) -> None:
        self.pipelines = StorePipelines(store, caller)

    async def cancel_many(self, query: object) -> None:
        """What a House does at its end."""


CALLERS = {
    "owner": OWNER,
    "ann": Caller("ann", frozenset({KeyRole.SUBMIT}), "acme"),
    "bob": Caller("bob", frozenset({KeyRole.SUBMIT, KeyRole.OPERATE}), "beta"),
    "looker": Caller("looker", frozenset({KeyRole.APPROVE})),
}


class StoreAuthenticator:
    """Everybody's name is their key."""

    def __init__(self, store: MemoryPipelineStore) -> None:
        self.apis = {name: StoreEngineApi(store, caller) for name, caller in CALLERS.items()}

    def authenticate(self, token: str) -> Session:
        if token not in self.apis:
            raise NotAuthenticated("this key opens nothing")
        return Session(CALLERS[token], cast("EngineApi", self.apis[token]))


class RunHouse(House):
    """A House whose engine is a store of runs."""

    def __init__(
        self, store: MemoryPipelineStore, door: StoreAuthenticator, server: HttpServer
    ) -> None:
        super().__init__(cast("Engine", _Behind(door.apis["owner"])), server, "owner")
        self.store, self.door = store, door

    # -- what happens -------------------------------------------------------------

    async def begin(self, job_id: str = "r1", **fields: Any) -> None:
        """A run that is under way in its first stage."""
        await self.store.create(a_run(job_id, **fields))
        assert await self.store.claim(Claim(job_id=job_id, owner="w1", now=T0, fence=1))
        await self.save(job_id, [(_K.JOB_START, {})], event=_E.EXECUTE, current_stage="ingest")
        stage = replace(_stages()[0], status=StageStatus.RUNNING, total=3)
        await self.save(job_id, [(_K.STAGE_START, {"stage": "ingest"})], stages=(stage,))

    async def progress(self, job_id: str = "r1", *numbers: int) -> None:
        for number in numbers:
            await self.save(job_id, [(_K.STAGE_PROGRESS, {"stage": "ingest", "done": number})])

    async def finish(self, job_id: str = "r1", *, failed: int = 0) -> None:
        done = replace(_stages()[0], status=StageStatus.COMPLETED, total=3, failed=failed)
        await self.save(job_id, [(_K.STAGE_COMPLETE, {"stage": "ingest"})], stages=(done,))
        end = _E.COMPLETE_PARTLY if failed else _E.COMPLETE
        await self.save(job_id, [(_K.JOB_COMPLETE, {"status": "?"})], event=end)

    async def save(
        self, job_id: str, news: list[tuple[PipelineEventKind, dict[str, Any]]], **fields: Any
    ) -> None:
        happened = tuple(Happening(kind, data) for kind, data in news)
        await self.store.save(Save(job_id=job_id, fence=1, at=T0 + 1, happened=happened, **fields))

    async def put_items(self, items: list[ItemRecord], job_id: str = "r1") -> None:
        group = StageItems("ingest", tuple(items))
        listed = StageItems("ingest", tuple(replace(i, outcome=ItemOutcome.PENDING) for i in items))
        await self.save(job_id, [], listed=(listed,), ended=(group,))


class _Behind(msgspec.Struct):
    api: StoreEngineApi


def _stages() -> tuple[StageRecord, ...]:
    return tuple(
        StageRecord(name=stage.name, index=index, kind=stage.kind)
        for index, stage in enumerate(NEWS.stages)
    )


def a_run(job_id: str, **fields: Any) -> PipelineRecord:
    fields = {"created_at": T0, "stages": _stages(), "pipeline": "news", **fields}
    return PipelineRecord(id=job_id, trace_id=f"trace-{job_id}", **fields)


@asynccontextmanager
async def run_house(**options: Any) -> AsyncIterator[RunHouse]:
    store = MemoryPipelineStore()
    await store.declare([NEWS])
    door = StoreAuthenticator(store)
    http = HttpOptions(**{"port": 0, "grace": 0.5, **options})
    server = HttpServer(door, http, clock=SystemClock(), health=Health)
    async with RunHouse(store, door, server) as one:
        yield one
