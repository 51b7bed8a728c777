"""An EngineApi whose engine is elsewhere, behind its HTTP API.

Most methods are one line: the declared method of the interface and its route. Parameters fill
the path and the query of the route; the others become the JSON body.

A submission is given its id here, before it is sent, and a start of a pipeline its key: if the
answer is lost, sending it again is answered with the job that it became.
"""

from __future__ import annotations

import builtins
import inspect
import re
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import asdict, replace

from penstock.adapters.http.connection import (
    Connection,
    ConnectionOptions,
    NoSuchPart,
    Request,
    Response,
    encode,
    segment,
)
from penstock.core.errors import InvalidRequest, PenstockError, Unavailable, WaitTimedOut
from penstock.core.job import IdSource, Job, JobRequest
from penstock.core.journal import Transition
from penstock.core.ledger import Step
from penstock.core.pointer import data_media_type, decode_data
from penstock.lifecycles.pipeline import PIPELINE
from penstock.ports.blobs import BlobStat
from penstock.ports.engine_api import (
    ONCE,
    Approvals,
    Bulk,
    Cancellation,
    Ended,
    EngineApi,
    EngineStatus,
    EventBatch,
    JobUpdate,
    Keys,
    Limit,
    Limits,
    LimitView,
    Logged,
    Policy,
    Schedule,
    Schedules,
    ScheduleView,
    Streamed,
)
from penstock.ports.store import (
    AuditEntry,
    AuditQuery,
    JobQuery,
    JournalEvent,
    LogLine,
    StepPage,
    StepQuery,
)
from penstock.workloads.llm.batches import Batches
from penstock.workloads.pipeline.interface import (
    CancelAnswer,
    ItemView,
    Pipelines,
    RunQuery,
    item_of,
)
from penstock.workloads.pipeline.records import (
    ItemOutcome,
    ItemRecord,
    PipelineEvent,
    PipelineEventKind,
    PipelineRecord,
)

P = ParamSpec("P")
T = TypeVar("T")

_BATCH = 5_000
"""Jobs in one call."""
_BATCH_BYTES = 16 << 20
_PAGE = 1000
_RUN_PAGE = 500
_POLL = 30.0
"""Seconds that one call waits for the end of a job or run."""
_LONG = 3600.0
"""Seconds for what reads the whole store."""
_BLOB_PART = 8 << 20
"""Bytes of a blob that are read at once."""
_SET_BY_ENGINE = ("job_id", "tenant", "principal", "schedule", "retry_number")
"""Fields of a schedule's job that its submitter does not set."""


def operation(
    declared: Callable[Concatenate[Any, P], Awaitable[T]],
    route: str,
    field: str = "",
    *,
    wait: float = 0.0,
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """A method of a part: one call of a route, as in `POST /v1/jobs/{job_id}/retry?tenant`.

    `field` of the answer is its value. A call is repeated after a lost answer unless it is one of
    `ONCE`.
    """
    again = declared.__qualname__.removeprefix("EngineApi.").lower() not in ONCE
    method, _, path = route.partition(" ")
    path, _, query = path.partition("?")
    in_path, in_query = re.findall(r"{(\w+)}", path), query.split("&") if query else []
    signature, hints = inspect.signature(declared), typing.get_type_hints(declared)
    kind: type[T] = hints["return"]

    async def call(self: _Part, /, *args: P.args, **kwargs: P.kwargs) -> T:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = dict(list(bound.arguments.items())[1:])
        at = path.format_map({name: segment(given.pop(name)) for name in in_path})
        asked = {name: _unless_default(name, given.pop(name)) for name in in_query}
        return await self._http.send(
            method, at, kind, given or None, query=asked, again=again, wait=wait, field=field
        )

    return call


def _unless_default(name: str, value: Any) -> Any:
    """The default tenant of keys without a tenant is not sent."""
    return None if name == "tenant" and value == "default" else value


class _Part:
    def __init__(self, http: Connection) -> None:
        self._http, self._clock = http, http.clock

    async def _poll(
        self,
        ask: Callable[[float, float | None], Awaitable[T]],
        is_done: Callable[[T], bool],
        timeout: float | None,
        *,
        only_waits: bool = False,
    ) -> T:
        """Ask until the answer is final or the time is over; each call says how long it may wait,
        and when the caller's time is over. A timeout of 0 waits for an answer all the same, unless
        the call `only_waits`."""
        end = float("inf") if timeout is None else self._clock.monotonic() + timeout
        until = end if timeout or only_waits else None
        while True:
            answer = await ask(min(max(0.0, end - self._clock.monotonic()), _POLL), until)
            if is_done(answer) or self._clock.monotonic() >= end:
                return answer

    def _post_waiting(
        self, path: str, kind: type[T], body: Mapping[str, Any], field: str = ""
    ) -> Callable[[float, float | None], Awaitable[T]]:
        """A POST that waits for as long as its body says."""
        return lambda patience, until: self._http.send(
            *("POST", path, kind, {**body, "timeout": patience}),
            wait=patience,
            again=True,
            until=until,
            field=field,
        )


class HttpApprovals(_Part):
    """See `penstock.ports.engine_api.Approvals`."""

    approve = operation(Approvals.approve, "POST /v1/jobs/{job_id}/approve")
    reject = operation(Approvals.reject, "POST /v1/jobs/{job_id}/reject")


class HttpPolicy(_Part):
    """See `penstock.ports.engine_api.Policy`."""

    current = operation(Policy.current, "GET /v1/policy")
    explain = operation(Policy.explain, "GET /v1/jobs/{job_id}/policy")
    simulate = operation(Policy.simulate, "POST /v1/policy/simulate", wait=300.0)
    reload = operation(Policy.reload, "POST /v1/policy/reload")


class HttpSchedules(_Part):
    """See `penstock.ports.engine_api.Schedules`."""

    list = operation(Schedules.list, "GET /v1/schedules", "schedules")
    get = operation(Schedules.get, "GET /v1/schedules/{name}?tenant")
    fire = operation(Schedules.fire, "POST /v1/schedules/{name}/fire?tenant")
    delete = operation(Schedules.delete, "DELETE /v1/schedules/{name}?tenant")

    async def put(self, schedule: Schedule) -> ScheduleView:
        body = msgspec.to_builtins(schedule)
        name, tenant, job = body.pop("name"), body.pop("tenant"), body.pop("request")
        body["job"] = {key: value for key, value in job.items() if key not in _SET_BY_ENGINE}
        path, query = (
            f"/v1/schedules/{segment(name)}",
            {"tenant": _unless_default("tenant", tenant)},
        )
        return await self._http.send("PUT", path, ScheduleView, body, query=query, again=True)

    async def pause(
        self, name: str, tenant: str = "default", *, paused: bool = True
    ) -> ScheduleView:
        return await (self._pause if paused else self._resume)(name, tenant)

    _pause = operation(Schedules.get, "POST /v1/schedules/{name}/pause?tenant")
    _resume = operation(Schedules.get, "POST /v1/schedules/{name}/resume?tenant")


class HttpLimits(_Part):
    """See `penstock.ports.engine_api.Limits`."""

    list = operation(Limits.list, "GET /v1/limits", "limits")
    delete = operation(Limits.delete, "DELETE /v1/limits/{name}")

    async def put(self, limit: Limit) -> LimitView:
        body = msgspec.to_builtins(limit)
        path = f"/v1/limits/{segment(body.pop('name'))}"
        return await self._http.send("PUT", path, LimitView, body, again=True)


class HttpKeys(_Part):
    """See `penstock.ports.engine_api.Keys`."""

    create = operation(Keys.create, "POST /v1/keys")
    list = operation(Keys.list, "GET /v1/keys", "keys")
    revoke = operation(Keys.revoke, "DELETE /v1/keys/{key_id}")


class HttpAudit(_Part):
    """See `penstock.ports.engine_api.Audit`."""

    async def read(self, query: AuditQuery) -> list[AuditEntry]:
        return await self._http.pages("/v1/audit", AuditEntry, asdict(query), "entries")


class HttpBatches:
    """Refuses every call: files and batches have OpenAI's HTTP API, and OpenAI's clients."""

    def __getattr__(self, name: str) -> Any:
        return self._refuse

    async def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise Unavailable(
            "over HTTP, files and batches are asked for as OpenAI's API has them",
            hint="use the openai package with the engine's URL and /v1, or the engine's socket",
        )


class HttpPipelines(_Part):
    """See `penstock.workloads.pipeline.interface.Pipelines`."""

    def __init__(self, http: Connection) -> None:
        super().__init__(http)
        self._ids = IdSource()

    list = operation(Pipelines.list, "GET /v1/pipelines", "pipelines")
    show = operation(Pipelines.show, "GET /v1/pipelines/{name}")
    breakers = operation(Pipelines.breakers, "GET /v1/breakers", "breakers")
    reset_breaker = operation(Pipelines.reset_breaker, "POST /v1/breakers/{name}/reset")

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
            "tenant": _unless_default("tenant", tenant),
            "idempotency_key": idempotency_key or self._ids.next(self._clock.now()),
            "retry_of": retry_of,
        }
        path = f"/v1/pipelines/{segment(name)}/runs"
        return await self.get(
            await self._http.send("POST", path, str, body, again=True, field="job_id")
        )

    async def retry_failed(self, job_id: str) -> PipelineRecord:
        path = f"{_run(job_id)}/retry-failed"
        return await self.get(await self._http.send("POST", path, str, field="job_id"))

    async def get(self, job_id: str) -> PipelineRecord:
        return await self._http.send("GET", _run(job_id), PipelineRecord)

    async def runs(self, query: RunQuery) -> builtins.list[PipelineRecord]:
        conditions = asdict(query)
        conditions["status"] = conditions.pop("statuses")
        conditions["before"], conditions["before_id"] = query.before or (None, None)
        return await self._http.pages("/v1/runs", PipelineRecord, conditions, "runs", _RUN_PAGE)

    async def items(
        self,
        job_id: str,
        stage: str,
        *,
        after: int = -1,
        limit: int = 100,
        outcomes: tuple[ItemOutcome, ...] = (),
    ) -> builtins.list[ItemRecord]:
        path = f"{_run(job_id)}/stages/{segment(stage)}/items"
        query = {"outcome": outcomes, "after": after, "limit": limit}
        views = await self._http.pages(path, ItemView, query, "items", _RUN_PAGE, number="seq")
        return [item_of(view) for view in views]

    async def cancel(self, job_id: str, *, reason: str = "", timeout: float = 10.0) -> CancelAnswer:
        answers: builtins.list[CancelAnswer] = []

        def has_ended(answer: CancelAnswer) -> bool:
            answers.append(answer)
            return PIPELINE.is_final(answer.status)

        ask = self._post_waiting(f"{_run(job_id)}/cancel", CancelAnswer, {"reason": reason})
        last = await self._poll(ask, has_ended, timeout)
        first = answers[0]
        # Asked again, a run that our own cancel ended is one that had ended.
        return last if last.accepted else replace(first, status=last.status)

    async def stream(self, job_id: str, after: int = 0) -> AsyncIterator[PipelineEvent]:
        """A lost connection is made again, from the last event on."""
        events = self._http.stream(
            f"{_run(job_id)}/stream", {"after": after or None}, PipelineEventKind.JOB_COMPLETE
        )
        async with aclosing(events):
            async for some in events:
                for event in some:
                    if event.data:
                        yield _event(event.data)


def _run(job_id: str) -> str:
    return f"/v1/runs/{segment(job_id)}"


class Steps(Struct, frozen=True):
    steps: list[Step]
    next: str | None = None


class EventCursor(Struct, frozen=True):
    """What an event says of itself besides its transition."""

    cursor: int
    tenant: str
    topic: str


_event = msgspec.json.Decoder(PipelineEvent).decode
_transition = msgspec.json.Decoder(Transition).decode
_cursor = msgspec.json.Decoder(EventCursor).decode
_update = msgspec.json.Decoder(JobUpdate).decode


class HttpEngineApi(_Part):
    """See `penstock.ports.engine_api.EngineApi`."""

    def __init__(
        self, url: str, token: str = "", *, options: ConnectionOptions | None = None
    ) -> None:
        super().__init__(Connection(url, token, options or ConnectionOptions()))
        self._ids = IdSource()
        self.approvals = HttpApprovals(self._http)
        self.policy = HttpPolicy(self._http)
        self.schedules = HttpSchedules(self._http)
        self.limits = HttpLimits(self._http)
        self.keys = HttpKeys(self._http)
        self.audit = HttpAudit(self._http)
        self.pipelines = HttpPipelines(self._http)
        self.batches: Batches = HttpBatches()

    async def connect(self) -> None:
        """See whether an engine is there and takes the key. NotRunning, NotAuthenticated."""
        await self._http.open()
        try:
            (await self._http.once(Request("GET", "/v1/status"))).read(EngineStatus)
        except BaseException:
            await self._http.close()
            raise

    async def close(self) -> None:
        await self._http.close()

    get = operation(EngineApi.get, "GET /v1/jobs/{job_id}")
    history = operation(EngineApi.history, "GET /v1/jobs/{job_id}/history", "transitions")
    why = operation(EngineApi.why, "GET /v1/jobs/{job_id}/why", "why")
    count_steps = operation(EngineApi.count_steps, "GET /v1/jobs/{job_id}/steps/counts", "counts")
    count_children = operation(
        EngineApi.count_children, "GET /v1/jobs/{job_id}/children/counts", "counts"
    )
    retry = operation(EngineApi.retry, "POST /v1/jobs/{job_id}/retry")
    topics = operation(EngineApi.topics, "GET /v1/topics", "topics")
    workers = operation(EngineApi.workers, "GET /v1/workers", "workers")
    pools = operation(EngineApi.pools, "GET /v1/pools", "pools")
    pause_pool = operation(EngineApi.pause_pool, "POST /v1/pools/{name}/pause")
    resume_pool = operation(EngineApi.resume_pool, "POST /v1/pools/{name}/resume")
    status = operation(EngineApi.status, "GET /v1/status")
    verify = operation(EngineApi.verify, "POST /v1/verify", wait=_LONG)
    prune = operation(EngineApi.prune, "POST /v1/prune", wait=_LONG)

    # -- submitting ---------------------------------------------------------------

    async def submit(self, requests: Sequence[JobRequest]) -> list[Job]:
        """All or none up to a few thousand at once; more are accepted part by part."""
        named = [self._named(request) for request in requests]
        if len(named) == 1:
            return [await self._http.send("POST", "/v1/jobs", Job, named[0], again=True)]
        jobs: list[Job] = []
        for part in parted([Raw(encode(request)) for request in named]):
            body = {"jobs": part}
            try:
                jobs += await self._http.send(
                    "POST", "/v1/jobs/batch", list[Job], body, again=True, field="jobs"
                )
            except PenstockError as error:
                if jobs:
                    error.hint = f"the first {len(jobs)} of {len(named)} jobs are stored"
                raise
        return jobs

    def _named(self, request: JobRequest) -> JobRequest:
        if request.principal:  # of a job that submits: here the key says who it is
            request = replace(request, principal="")
        if request.job_id or request.idempotency_key:
            return request
        return replace(request, job_id=self._ids.next(self._clock.now()))

    # -- looking ------------------------------------------------------------------

    async def find(self, query: JobQuery) -> list[Job]:
        conditions = {
            **filter_of(query),
            "dead": query.dead or None,
            "tries": query.tries or None,
            "before": query.before,
            "since": query.since,
            "order": "oldest" if query.oldest_first else None,
            "limit": query.limit,
        }
        return await self._http.pages("/v1/jobs", Job, conditions, "jobs")

    async def wait(self, job_id: str, timeout: float | None = None) -> Job:
        def ask(patience: float, until: float | None) -> Awaitable[Response]:
            path, query = f"{at(job_id)}/wait", {"timeout": patience}
            return self._http.call("GET", path, query=query, wait=patience, again=True, until=until)

        answer = await self._poll(ask, _has_ended, timeout, only_waits=True)
        job = answer.read(Job)
        if not _has_ended(answer):
            raise WaitTimedOut(
                f"job {job_id} is still {job.state} after {timeout:g} s",
                hint="the job goes on; wait again later, or cancel it",
            )
        return job

    async def wait_many(
        self,
        job_ids: Sequence[str],
        count: int = 1,
        *,
        or_failure: bool = False,
        timeout: float | None = None,
    ) -> list[Ended]:
        body = {"job_ids": job_ids, "count": count, "or_failure": or_failure}
        ask = self._post_waiting("/v1/jobs:wait", list[Ended], body, "ended")
        return await self._poll(ask, bool, timeout, only_waits=True)

    async def read_log(self, job_id: str, after: int = 0, limit: int = 1000) -> list[LogLine]:
        query = {"after": after, "limit": limit}
        return await self._http.pages(f"{at(job_id)}/logs", LogLine, query, "lines", number="n")

    async def read_steps(self, job_id: str, query: StepQuery) -> StepPage:
        cursor = None if query.after is None else f"{query.after[1]}:{query.after[0]}"
        wanted = {"name": query.name, "cursor": cursor, "limit": min(query.limit, _PAGE)}
        page = await self._http.send("GET", f"{at(job_id)}/steps", Steps, query=wanted)
        return StepPage(page.steps, page.next is not None)

    async def follow(
        self, job_id: str, after_log: int | None = 0, after_move: int | None = None
    ) -> AsyncIterator[JobUpdate]:
        after = None if after_move is None else f"{after_move}-{after_log or 0}"
        query = {"after_log": after_log or None, "after": after}
        stream = self._http.stream(f"{at(job_id)}/updates", query)
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
        stream = self._http.stream("/v1/events", {"after": after})
        async with aclosing(stream):
            async for events in stream:
                told = []
                for event in events:
                    if event.kind:
                        place = _cursor(event.data)
                        transition = _transition(event.data)
                        told.append(
                            JournalEvent(place.cursor, place.tenant, place.topic, transition)
                        )
                yield EventBatch(tuple(told), int(events[-1].id))

    # -- ending and repeating -----------------------------------------------------

    async def cancel(
        self, job_id: str, *, reason: str = "", children: bool = False, timeout: float = 10.0
    ) -> Cancellation:
        body = {"reason": reason, "children": children}
        ask = self._post_waiting(f"{at(job_id)}/cancel", Cancellation, body)
        return await self._poll(ask, lambda answer: answer.ended, timeout)

    async def cancel_many(self, query: JobQuery, *, reason: str = "") -> Bulk:
        body = {**meant(query), "reason": reason}
        return await self._http.send("POST", "/v1/jobs:cancel", Bulk, body)

    async def retry_many(self, query: JobQuery) -> Bulk:
        return await self._http.send("POST", "/v1/jobs:retry", Bulk, meant(query))

    # -- payloads: uploaded in one piece, downloaded in parts ----------------------

    async def put_blob(self, data: bytes, media_type: str = "application/json") -> str:
        # A blob is named by its content, so it can be sent twice.
        answer = await self._http.call(
            "POST", "/v1/blobs", data=data, headers={"Content-Type": media_type}, again=True
        )
        return answer.read(str, "uri")

    async def get_blob(self, uri: str) -> bytes:
        if uri.startswith("data:"):
            return decode_data(uri)
        parts = []
        size, have = 1, 0
        while have < size:
            answer = await self._blob_part(uri, have, _BLOB_PART)
            if answer is None:
                break
            parts.append(answer.body)
            have += len(answer.body)
            size = _size(answer)
        return b"".join(parts)

    async def stat_blob(self, uri: str, *, job_id: str | None = None) -> BlobStat:
        if job_id is not None:
            raise InvalidRequest("job_id", "is for workers, and they do not use HTTP")
        if uri.startswith("data:"):
            return BlobStat(uri, len(decode_data(uri)), data_media_type(uri))
        answer = await self._blob_part(uri, 0, 1)
        if answer is None:  # an empty one has no first byte
            answer = await self._http.call("GET", f"/v1/blobs/{segment(uri)}", again=True)
        return BlobStat(uri, _size(answer), answer.headers.get("Content-Type", ""))

    async def read_blob(self, uri: str, start: int, length: int) -> bytes:
        if uri.startswith("data:"):
            return decode_data(uri)[start : start + length]
        answer = await self._blob_part(uri, start, length) if length > 0 else None
        return b"" if answer is None else answer.body

    async def _blob_part(self, uri: str, start: int, length: int) -> Response | None:
        """None where it has ended before."""
        headers = {"Range": f"bytes={start}-{start + length - 1}"}
        path = f"/v1/blobs/{segment(uri)}"
        try:
            return await self._http.call("GET", path, headers=headers, again=True)
        except NoSuchPart:
            return None


def _has_ended(answer: Response) -> bool:
    """Whether the job of a wait has; 202 is sent when the time of one call is over."""
    return answer.status == 200


def _size(answer: Response) -> int:
    """Of the whole blob, according to one part of it."""
    _, _, size = answer.headers.get("Content-Range", "").rpartition("/")
    return int(size) if size.isdecimal() else len(answer.body)


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


_NO_FILTERS = {"states", "labels", "dead", "tries", "before", "since", "oldest_first", "limit"}
"""Fields of a JobQuery that HTTP names otherwise, or that are only of listings."""


def filter_of(query: JobQuery) -> dict[str, Any]:
    """The conditions that hold for listings and for operations on many."""
    plain = {name: value for name, value in asdict(query).items() if name not in _NO_FILTERS}
    labels = [f"{name}={value}" for name, value in query.labels.items()]
    return {**plain, "state": [state.value for state in query.states], "label": labels}


def meant(query: JobQuery) -> Mapping[str, Any]:
    """Which jobs an operation on many is for; every job, if there is no condition."""
    conditions = {
        name: value for name, value in filter_of(query).items() if value not in (None, [])
    }
    return conditions or {"all": True}
