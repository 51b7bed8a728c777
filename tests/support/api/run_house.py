"""The HTTP API in front of runs where nothing happens by itself: a test says what does."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
from msgspec.structs import replace
from tests.support.api.house import House

from penstock.api.about import Health
from penstock.api.options import HttpOptions
from penstock.api.server import HttpServer
from penstock.app.engine import Engine
from penstock.core.errors import (
    IllegalMove,
    InvalidRequest,
    NotAuthenticated,
    NotFound,
    NotPermitted,
    PipelineBusy,
)
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.ports.clock import SystemClock
from penstock.ports.engine_api import OWNER, Caller, EngineApi, KeyRole, Session
from penstock.workloads.pipeline.interface import CancelAnswer, RunQuery
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
    by_name,
)

_S, _K = PipelineJobStatus, PipelineEventKind
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


class Runs:
    """Runs, their items and events, as a test makes them."""

    def __init__(self) -> None:
        self.records: dict[str, PipelineRecord] = {}
        self.kept_breakers: dict[str, Breaker] = {}
        self._items: dict[tuple[str, str], dict[int, ItemRecord]] = {}
        self._events: dict[str, list[PipelineEvent]] = {}
        self.changed = asyncio.Event()

    async def create(
        self, record: PipelineRecord, *, single_flight: bool = False
    ) -> PipelineRecord:
        open_ = [r for r in self.records.values() if r.pipeline == record.pipeline]
        running = next((r for r in open_ if not r.is_final), None)
        if single_flight and running is not None and record.id not in self.records:
            raise PipelineBusy("it runs once at a time", running=running.id)
        return self.records.setdefault(record.id, record)

    async def get(self, job_id: str) -> PipelineRecord | None:
        return self.records.get(job_id)

    async def find(self, query: RunQuery) -> builtins.list[PipelineRecord]:
        def place(record: PipelineRecord) -> tuple[float, str]:
            return record.created_at, record.id

        found = sorted(self.records.values(), key=place, reverse=True)
        return [
            record
            for record in found
            if query.pipeline in (None, record.pipeline)
            and query.tenant in (None, record.tenant)
            and query.retry_of in (None, record.retry_of)
            and (not query.statuses or record.status in query.statuses)
            and (query.before is None or place(record) < query.before)
        ][: query.limit]

    async def items(
        self,
        job_id: str,
        stage: str,
        *,
        after: int = -1,
        limit: int = 100,
        outcomes: tuple[ItemOutcome, ...] = (),
    ) -> builtins.list[ItemRecord]:
        rows = sorted(self._items.get((job_id, stage), {}).items())
        found = [
            item for n, item in rows if n > after and (not outcomes or item.outcome in outcomes)
        ]
        return found[:limit]

    async def events(
        self, job_id: str, after: int = 0, limit: int = 1000
    ) -> builtins.list[PipelineEvent]:
        found = [one for one in self._events.get(job_id, ()) if (one.id or 0) > after]
        return found[:limit]

    def put(
        self, job_id: str, happened: builtins.list[tuple[PipelineEventKind, dict[str, Any]]]
    ) -> None:
        events = self._events.setdefault(job_id, [])
        for kind, data in happened:
            events.append(PipelineEvent(len(events) + 1, job_id, T0 + 1, kind, data))
        self.changed.set()
        self.changed = asyncio.Event()

    def put_items(self, job_id: str, stage: str, items: builtins.list[ItemRecord]) -> None:
        self._items.setdefault((job_id, stage), {}).update({item.seq: item for item in items})

    async def put_breaker(self, breaker: Breaker) -> bool:
        self.kept_breakers[breaker.name] = breaker
        return True


class StorePipelines:
    """`penstock.workloads.pipeline.interface.Pipelines` over them, for one caller."""

    def __init__(self, store: Runs, caller: Caller = OWNER) -> None:
        self.store, self.caller = store, caller
        self.asked: list[tuple[str, Any]] = []

    async def list(self) -> builtins.list[PipelineInfo]:
        return [NEWS]

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
        record = await self.get(job_id)
        if record.is_final:
            return CancelAnswer(False, record.status, f"it has ended {record.status}")
        running = record.status is _S.RUNNING
        changes = {} if running else {"status": _S.CANCELLED, "finished_at": T0 + 9}
        self.store.records[job_id] = replace(record, cancel_requested=True, **changes)
        self.store.put(job_id, [] if running else [(_K.JOB_COMPLETE, {"status": "CANCELLED"})])
        return CancelAnswer(True, self.store.records[job_id].status)

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
        while True:
            changed = self.store.changed
            ended = (await self.get(job_id)).is_final
            events = await self.store.events(job_id, after, 100)
            for event in events:
                after = event.id or after
                yield event
            if not events:
                if ended:
                    return
                await changed.wait()

    async def breakers(self) -> builtins.list[Breaker]:
        self._require(KeyRole.OPERATE)
        return [*self.store.kept_breakers.values()]

    async def reset_breaker(self, name: str) -> Breaker:
        self._require(KeyRole.OPERATE)
        held = self.store.kept_breakers.get(name)
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

    def __init__(self, store: Runs, caller: Caller = OWNER) -> None:
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

    def __init__(self, store: Runs) -> None:
        self.apis = {name: StoreEngineApi(store, caller) for name, caller in CALLERS.items()}

    def authenticate(self, token: str) -> Session:
        if token not in self.apis:
            raise NotAuthenticated("this key opens nothing")
        return Session(CALLERS[token], cast("EngineApi", self.apis[token]))


class RunHouse(House):
    """A House whose engine is a store of runs."""

    def __init__(self, store: Runs, door: StoreAuthenticator, server: HttpServer) -> None:
        super().__init__(cast("Engine", _Behind(door.apis["owner"])), server, "owner")
        self.store, self.door = store, door

    # -- what happens -------------------------------------------------------------

    async def begin(self, job_id: str = "r1", **fields: Any) -> None:
        """A run that is under way in its first stage."""
        await self.store.create(a_run(job_id, **fields))
        running = {"status": _S.RUNNING, "started_at": T0 + 1, "current_stage": "ingest"}
        await self.save(job_id, [(_K.JOB_START, {})], **running)
        stage = replace(_stages()[0], status=StageStatus.RUNNING, total=3)
        await self.save(job_id, [(_K.STAGE_START, {"stage": "ingest"})], stage=stage)

    async def emit(self, job_id: str = "r1", *numbers: int) -> None:
        for number in numbers:
            await self.save(job_id, [(_K.CUSTOM, {"stage": "ingest", "done": number})])

    async def finish(self, job_id: str = "r1", *, failed: int = 0) -> None:
        done = replace(_stages()[0], status=StageStatus.COMPLETED, total=3, failed=failed)
        await self.save(job_id, [(_K.STAGE_COMPLETE, {"stage": "ingest"})], stage=done)
        end = _S.PARTIAL if failed else _S.COMPLETED
        await self.save(
            job_id, [(_K.JOB_COMPLETE, {"status": "?"})], status=end, finished_at=T0 + 1
        )

    async def save(
        self,
        job_id: str,
        happened: list[tuple[PipelineEventKind, dict[str, Any]]],
        stage: StageRecord | None = None,
        **fields: Any,
    ) -> None:
        record = self.store.records[job_id]
        if stage is not None:
            fields["stage_progress"] = {**record.stage_progress, stage.name: stage}
        self.store.records[job_id] = replace(record, **fields)
        self.store.put(job_id, happened)

    async def put_items(self, items: list[ItemRecord], job_id: str = "r1") -> None:
        self.store.put_items(job_id, "ingest", items)


class _Behind(msgspec.Struct):
    api: StoreEngineApi


def _stages() -> tuple[StageRecord, ...]:
    return tuple(
        StageRecord(name=stage.name, index=index, kind=stage.kind)
        for index, stage in enumerate(NEWS.stages)
    )


def a_run(job_id: str, **fields: Any) -> PipelineRecord:
    fields = {"created_at": T0, "stage_progress": by_name(_stages()), "pipeline": "news", **fields}
    return PipelineRecord(id=job_id, trace_id=f"trace-{job_id}", **fields)


@asynccontextmanager
async def run_house(**options: Any) -> AsyncIterator[RunHouse]:
    store = Runs()
    door = StoreAuthenticator(store)
    http = HttpOptions(**{"port": 0, "grace": 0.5, **options})
    server = HttpServer(door, http, clock=SystemClock(), health=Health)
    async with RunHouse(store, door, server) as one:
        yield one
