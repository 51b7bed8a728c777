"""An EngineApi whose engine is elsewhere, behind its HTTP API.

Most methods are derived from the table of operations (`penstock.ports.operations`): parameters fill
the path and the query of the route; the others become the JSON body. Written out here are those
whose HTTP shape differs: submissions, waits, streams, blobs.

A submission is given its id here, before it is sent, and a start of a pipeline its key: if the
answer is lost, sending it again is answered with the job that it became.
"""

from __future__ import annotations

import builtins
import inspect
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NoReturn, Protocol, TypeVar

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import asdict, replace

from penstock.adapters.http.connection import (
    Connection,
    ConnectionOptions,
    Event,
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
from penstock.lifecycles.canonical import JobState
from penstock.lifecycles.pipeline import PIPELINE
from penstock.ports.blobs import BlobStat
from penstock.ports.engine_api import (
    Bulk,
    Cancellation,
    Ended,
    EngineApi,
    EngineStatus,
    JobProgressView,
    JobTotal,
    JobUpdate,
    Logged,
    PoolView,
    Schedule,
    ScheduleView,
    StreamBatch,
    Streamed,
    StreamKind,
    StreamQuery,
    WorkerView,
)
from penstock.ports.operations import (
    Method,
    Parameters,
    binding_of,
    bindings_of,
    cursor,
    parts_of,
    proxy_class,
)
from penstock.ports.store import (
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
    item_of,
)
from penstock.workloads.pipeline.records import (
    ItemRecord,
    PipelineEvent,
    PipelineEventKind,
    PipelineRecord,
)

T = TypeVar("T")

_BATCH = 5_000
"""Jobs in one call."""
_BATCH_BYTES = 16 << 20
_PAGE = 1000
_POLL = 30.0
"""Seconds that one call waits for the end of a job or run."""
_BLOB_PART = 8 << 20
"""Bytes of a blob that are read at once."""
_SET_BY_ENGINE = ("job_id", "tenant", "principal", "schedule", "retry_number")
"""Fields of a schedule's job that its submitter does not set."""


def _method(name: str, declared: Method) -> Callable[..., Any]:
    """A method of a part: one call of the route that the table of operations has for it."""
    if not any(binding.path for binding in bindings_of(declared)):
        return _refuse
    signature, parameters = inspect.signature(declared), Parameters(declared)
    kind = parameters.answer
    item: Any = typing.get_args(kind)[0] if typing.get_origin(kind) is list else None
    shown, record_of = _VIEWS.get(item, (item, None))

    async def call(self: _Part, /, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        values = parameters.values(dict(list(bound.arguments.items())[1:]))
        binding = binding_of(declared, **values)
        body = {name: value for name, value in values.items() if name not in binding.given}
        at = binding.path.format_map({name: segment(body.pop(name)) for name in binding.in_path})
        query = {
            wire: _unless_default(wire, body.pop(name)) for wire, name in binding.query.items()
        }
        if (paging := binding.paging) is not None:
            start = values[paging.start]
            if start != parameters.defaults[paging.start]:
                query["cursor"] = cursor(binding.name, start)
            found = await self._http.pages(at, shown, query, binding.field, paging.most)
            return found if record_of is None else [record_of(one) for one in found]
        return await self._http.send(
            binding.method,
            at,
            kind,
            body or None,
            query=query,
            again=not binding.once,
            wait=binding.patience,
            field=binding.field,
        )

    return call


async def _refuse(self: _Part, *args: Any, **kwargs: Any) -> NoReturn:
    """Files and batches have OpenAI's HTTP API, and OpenAI's clients."""
    raise Unavailable(
        "files and batches are not available through this HTTP client",
        hint="use the openai package with the engine's URL and /v1, or the engine's socket",
    )


_VIEWS: dict[Any, tuple[Any, Callable[[Any], Any]]] = {ItemRecord: (ItemView, item_of)}
"""Records that JSON shows otherwise: as what, and how the record is made of it."""


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


class _Schedules(_Part):
    """See `penstock.ports.engine_api.Schedules`."""

    async def put(self, schedule: Schedule) -> ScheduleView:
        body = msgspec.to_builtins(schedule)
        name, tenant, job = body.pop("name"), body.pop("tenant"), body.pop("request")
        body["job"] = {key: value for key, value in job.items() if key not in _SET_BY_ENGINE}
        path, query = (
            f"/v1/schedules/{segment(name)}",
            {"tenant": _unless_default("tenant", tenant)},
        )
        return await self._http.send("PUT", path, ScheduleView, body, query=query, again=True)


class _Pipelines(_Part):
    """See `penstock.workloads.pipeline.interface.Pipelines`."""

    get: Callable[[str], Awaitable[PipelineRecord]]

    def __init__(self, http: Connection) -> None:
        super().__init__(http)
        self._ids = IdSource()

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
_json = msgspec.json.Decoder(dict[str, Any]).decode
_update = msgspec.json.Decoder(JobUpdate).decode


def _entry(data: bytes) -> JournalEvent:
    place = _cursor(data)
    return JournalEvent(place.cursor, place.tenant, place.topic, _transition(data))


def _batch(event: Event) -> StreamBatch:
    """One event of the stream as a batch."""
    match event.kind:
        case "job" | "approval" | "note":
            return StreamBatch(event.id, (_entry(event.data),))
        case "gap":
            return StreamBatch(event.id, gap=_json(event.data)["reason"])
        case "worker_gone":
            return StreamBatch(event.id, gone_workers=(_json(event.data)["worker_id"],))
        case "counts":
            return StreamBatch(event.id, counts=_decode(event.data, dict[JobState, int]))
        case "log":
            return StreamBatch(event.id, lines=(_decode(event.data, LogLine),))
        case "progress":
            return StreamBatch(event.id, progress=(_decode(event.data, JobProgressView),))
        case "worker":
            return StreamBatch(event.id, workers=(_decode(event.data, WorkerView),))
        case "pool":
            return StreamBatch(event.id, pools=(_decode(event.data, PoolView),))
    return StreamBatch(event.id)


def _decode(data: bytes, kind: type[T]) -> T:
    return msgspec.json.decode(data, type=kind)


class _Engine(_Part):
    """See `penstock.ports.engine_api.EngineApi`."""

    def __init__(self, http: Connection) -> None:
        super().__init__(http)
        self._ids = IdSource()
        for name, part in _PARTS.items():
            setattr(self, name, part(http))

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

    async def count(self, query: JobQuery) -> JobTotal:
        tries = {"dead": query.dead or None, "tries": query.tries or None}
        asked = {**filter_of(query), **tries, "total": True, "limit": 1}
        return await self._http.send("GET", "/v1/jobs", JobTotal, query=asked, field="total")

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

    async def read_steps(self, job_id: str, query: StepQuery) -> StepPage:
        start = None if query.after is None else cursor("get_steps", query.after)
        wanted = {"name": query.name, "cursor": start, "limit": min(query.limit, _PAGE)}
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

    async def stream(
        self, query: StreamQuery, after: str | None = None
    ) -> AsyncIterator[StreamBatch]:
        """A lost connection is made again: entries and lines go on, values are told anew."""
        asked = {
            "after": after,
            "kind": query.kinds or tuple(StreamKind),
            "topic": query.topic,
            "tenant": query.tenant,
            "state": query.states,
            "event": query.events,
            "job_id": query.job_ids,
            "log": query.logs,
            "replay": query.replay,
        }
        stream = self._http.stream("/v1/stream", asked)
        async with aclosing(stream):
            async for events in stream:
                for event in events:
                    yield _batch(event)

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


_OWN: dict[str, type[_Part]] = {"schedules": _Schedules, "pipelines": _Pipelines}
"""Parts with methods whose HTTP shape differs; the other methods are derived from the table."""
_PARTS = {
    name: proxy_class(interface, _OWN.get(name, _Part), _method)
    for name, interface in parts_of(EngineApi, {"Batches": Batches, "Pipelines": Pipelines}).items()
}
_EngineApi = proxy_class(EngineApi, _Engine, _method)


class HttpEngineApi(EngineApi, Protocol):
    """The API of an engine behind its HTTP API."""

    async def connect(self) -> None: ...

    async def close(self) -> None: ...


def http_engine_api(
    url: str, token: str = "", *, options: ConnectionOptions | None = None
) -> HttpEngineApi:
    """The API of the engine at this URL; to be connected before it is used."""
    api: HttpEngineApi = _EngineApi(Connection(url, token, options or ConnectionOptions()))
    return api


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
