"""A Desk whose engine is elsewhere, behind its HTTP API.

A submission is given its id here, before it is sent: if the answer is lost, sending it again
is answered with the job that it became.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from penstock.adapters.http.batches import HttpBatches
from penstock.adapters.http.blobs import HttpBlobs
from penstock.adapters.http.counters import (
    HttpApprovals,
    HttpAudit,
    HttpKeys,
    HttpLimits,
    HttpPolicy,
    HttpSchedules,
)
from penstock.adapters.http.line import Line, LineOptions, encode, segment
from penstock.adapters.http.pipelines import HttpPipelines
from penstock.core.errors import PenstockError, WaitTimedOut
from penstock.core.ids import IdSource
from penstock.core.job import Job, JobRequest
from penstock.core.pipes import PipesView
from penstock.core.transition import Transition
from penstock.ports.batches import Batches
from penstock.ports.blobs import BlobStat
from penstock.ports.clock import Clock, SystemClock
from penstock.ports.desk import (
    Bulk,
    Cancellation,
    Cleaned,
    EngineStatus,
    EventBatch,
    JobUpdate,
    Logged,
    PoolView,
    Streamed,
    WorkerView,
)
from penstock.ports.store import JobQuery, JournalEvent, LogLine, Verified

_BATCH = 5_000
"""Jobs in one call."""
_MANY = "/v1/jobs/batch"
_BATCH_BYTES = 16 << 20
_PAGE = 1000
_POLL = 30.0
"""Seconds that one call waits for a job's end."""
_INSISTENT = 12
"""Tries of a call that waits: its caller has time, and the engine may be restarting."""


class Jobs(Struct, frozen=True):
    jobs: list[Job]
    next: str | None = None


class Why(Struct, frozen=True):
    why: str


class History(Struct, frozen=True):
    transitions: list[Transition]


class Lines(Struct, frozen=True):
    lines: list[LogLine]


class Topics(Struct, frozen=True):
    topics: list[str]


class Workers(Struct, frozen=True):
    workers: list[WorkerView]


class Pools(Struct, frozen=True):
    pools: list[PoolView]


class Place(Struct, frozen=True):
    """What an event says of itself besides its transition."""

    cursor: int
    tenant: str
    topic: str


_transition = msgspec.json.Decoder(Transition).decode
_place = msgspec.json.Decoder(Place).decode
_update = msgspec.json.Decoder(JobUpdate).decode


class HttpDesk:
    """See `penstock.ports.desk.Desk`."""

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        ca_file: Path | None = None,
        options: LineOptions | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._line = Line(url, token, options or LineOptions(ca_file=ca_file), self._clock)
        self._ids = IdSource()
        self._blobs = HttpBlobs(self._line)
        self.approvals = HttpApprovals(self._line)
        self.policy = HttpPolicy(self._line)
        self.schedules = HttpSchedules(self._line)
        self.limits = HttpLimits(self._line)
        self.keys = HttpKeys(self._line)
        self.audit = HttpAudit(self._line)
        self.pipelines = HttpPipelines(self._line, self._clock)
        self.batches: Batches = HttpBatches()

    async def connect(self) -> None:
        """See whether an engine is there and takes the key. NotRunning, NotAuthenticated."""
        await self._line.open()
        try:
            (await self._line.call("GET", "/v1/status")).read(EngineStatus)
        except BaseException:
            await self._line.close()
            raise

    async def close(self) -> None:
        await self._line.close()

    # -- submitting ---------------------------------------------------------------

    async def submit(self, requests: Sequence[JobRequest]) -> list[Job]:
        """All or none up to a few thousand at once; more are accepted part by part."""
        named = [self._named(request) for request in requests]
        if len(named) == 1:
            return [await self._line.send("POST", "/v1/jobs", Job, named[0], again=True)]
        jobs: list[Job] = []
        for part in parted([Raw(encode(request)) for request in named]):
            body = {"jobs": part}
            try:
                jobs += (await self._line.send("POST", _MANY, Jobs, body, again=True)).jobs
            except PenstockError as error:
                if jobs:
                    error.hint = f"the first {len(jobs)} of {len(named)} jobs are stored"
                raise
        return jobs

    def _named(self, request: JobRequest) -> JobRequest:
        if request.job_id or request.idempotency_key:
            return request
        return replace(request, job_id=self._ids.next(self._clock.now()))

    # -- looking ------------------------------------------------------------------

    async def get(self, job_id: str) -> Job:
        return await self._line.get(at(job_id), Job)

    async def find(self, query: JobQuery) -> list[Job]:
        found: list[Job] = []
        wanted: dict[str, Any] = {
            **filter_of(query),
            "dead": query.dead or None,
            "before": query.before,
            "since": query.since,
            "order": "oldest" if query.oldest_first else None,
        }
        cursor: str | None = None
        while (left := query.limit - len(found)) > 0:
            page = {**wanted, "limit": min(left, _PAGE), "cursor": cursor}
            jobs = await self._line.get("/v1/jobs", Jobs, page)
            found += jobs.jobs
            cursor = jobs.next
            if cursor is None:
                break
        return found

    async def history(self, job_id: str) -> list[Transition]:
        return (await self._line.get(f"{at(job_id)}/history", History)).transitions

    async def why(self, job_id: str) -> str:
        return (await self._line.get(f"{at(job_id)}/why", Why)).why

    async def wait(self, job_id: str, timeout: float | None = None) -> Job:
        end = None if timeout is None else self._clock.monotonic() + timeout
        while True:
            left = _POLL if end is None else max(0.0, end - self._clock.monotonic())
            patience = min(left, _POLL)
            answer = await self._line.call(
                "GET",
                f"{at(job_id)}/wait",
                query={"timeout": patience},
                wait=patience,
                again=True,
                tries=_INSISTENT,
            )
            job = answer.read(Job)
            if answer.status == 200:
                return job
            if end is not None and self._clock.monotonic() >= end:
                raise WaitTimedOut(
                    f"job {job_id} is still {job.state} after {timeout:g} s",
                    hint="it goes on; ask again later, or cancel it",
                )

    async def read_log(self, job_id: str, after: int = 0, limit: int = 1000) -> list[LogLine]:
        found: list[LogLine] = []
        while (left := limit - len(found)) > 0:
            page = {"after": after, "limit": min(left, _PAGE)}
            lines = (await self._line.get(f"{at(job_id)}/logs", Lines, page)).lines
            found += lines
            if len(lines) < page["limit"]:
                break
            after = lines[-1].n
        return found

    async def follow(self, job_id: str, after_log: int | None = 0) -> AsyncIterator[JobUpdate]:
        stream = self._line.stream(f"{at(job_id)}/updates", {"after_log": after_log or None})
        last = (0, 0)
        async with aclosing(stream):
            async for events in stream:
                for event in events:
                    if event.kind in ("", "end"):
                        continue
                    update = _update(event.data)
                    if after_log is None and isinstance(update, Logged):
                        continue
                    if isinstance(update, Streamed):
                        if (update.attempt, update.n) <= last:
                            continue  # a stream that was cut off begins again with all of them
                        last = (update.attempt, update.n)
                    yield update

    async def events(self, after: int | None = None) -> AsyncIterator[EventBatch]:
        stream = self._line.stream("/v1/events", {"after": after})
        async with aclosing(stream):
            async for events in stream:
                told = []
                for event in events:
                    if event.kind:
                        place = _place(event.data)
                        transition = _transition(event.data)
                        told.append(
                            JournalEvent(place.cursor, place.tenant, place.topic, transition)
                        )
                yield EventBatch(tuple(told), int(events[-1].id))

    # -- ending and repeating -----------------------------------------------------

    async def cancel(
        self, job_id: str, *, reason: str = "", children: bool = False, timeout: float = 10.0
    ) -> Cancellation:
        end = self._clock.monotonic() + timeout
        while True:
            patience = min(max(0.0, end - self._clock.monotonic()), _POLL)
            done = await self._line.send(
                "POST",
                f"{at(job_id)}/cancel",
                Cancellation,
                {"reason": reason, "children": children, "timeout": patience},
                wait=patience,
                again=True,
            )
            if done.ended or self._clock.monotonic() >= end:
                return done

    async def retry(self, job_id: str) -> Job:
        return await self._line.send("POST", f"{at(job_id)}/retry", Job)

    async def cancel_many(self, query: JobQuery, *, reason: str = "") -> Bulk:
        body = {**meant(query), "reason": reason}
        return await self._line.send("POST", "/v1/jobs:cancel", Bulk, body)

    async def retry_many(self, query: JobQuery) -> Bulk:
        return await self._line.send("POST", "/v1/jobs:retry", Bulk, meant(query))

    # -- the engine ---------------------------------------------------------------

    async def topics(self) -> list[str]:
        return (await self._line.get("/v1/topics", Topics)).topics

    async def workers(self) -> list[WorkerView]:
        return (await self._line.get("/v1/workers", Workers)).workers

    async def pipes(self) -> PipesView:
        return await self._line.get("/v1/pipes", PipesView)

    async def pools(self) -> list[PoolView]:
        return (await self._line.get("/v1/pools", Pools)).pools

    async def pause_pool(self, name: str) -> PoolView:
        path = f"/v1/pools/{segment(name)}/pause"
        return await self._line.send("POST", path, PoolView, again=True)

    async def resume_pool(self, name: str) -> PoolView:
        path = f"/v1/pools/{segment(name)}/resume"
        return await self._line.send("POST", path, PoolView, again=True)

    async def status(self) -> EngineStatus:
        return await self._line.get("/v1/status", EngineStatus)

    async def verify(self) -> Verified:
        return await self._line.send("POST", "/v1/verify", Verified, again=True, wait=_LONG)

    async def prune(self, older_than: float) -> Cleaned:
        body = {"older_than": older_than}
        return await self._line.send("POST", "/v1/prune", Cleaned, body, wait=_LONG)

    # -- payloads -----------------------------------------------------------------

    async def put_blob(self, data: bytes, media_type: str = "application/json") -> str:
        return await self._blobs.put(data, media_type)

    async def get_blob(self, uri: str) -> bytes:
        return await self._blobs.get(uri)

    async def stat_blob(self, uri: str) -> BlobStat:
        return await self._blobs.stat(uri)

    async def read_blob(self, uri: str, start: int, length: int) -> bytes:
        return await self._blobs.read(uri, start, length)


_LONG = 3600.0
"""Seconds for what reads the whole store."""


def at(job_id: str) -> str:
    return f"/v1/jobs/{segment(job_id)}"


def parted(encoded: Sequence[Raw]) -> list[list[Raw]]:
    """In parts that an engine takes at once."""
    parts: list[list[Raw]] = []
    size = _BATCH_BYTES
    for one in encoded:
        length = len(bytes(one))
        if size + length > _BATCH_BYTES or len(parts[-1]) == _BATCH:
            parts.append([])
            size = 0
        parts[-1].append(one)
        size += length
    return parts


def filter_of(query: JobQuery) -> dict[str, Any]:
    """The conditions that hold for listings and for operations on many."""
    return {
        "job_id": query.job_id,
        "state": [state.value for state in query.states],
        "topic": query.topic,
        "tenant": query.tenant,
        "parent_job_id": query.parent_job_id,
        "workflow_id": query.workflow_id,
        "label": [f"{name}={value}" for name, value in query.labels.items()],
        "idempotency_key": query.idempotency_key,
        "principal": query.principal,
        "schedule": query.schedule,
        "parked": query.parked,
        "accepted_from": query.accepted_from,
        "accepted_to": query.accepted_to,
    }


def meant(query: JobQuery) -> Mapping[str, Any]:
    """Which jobs an operation on many is for; every job, if there is no condition."""
    conditions = {
        name: value for name, value in filter_of(query).items() if value not in (None, [])
    }
    return conditions or {"all": True}
