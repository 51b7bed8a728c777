"""A caller's view of an engine, here or elsewhere, and of one job there.

What a caller can do is written once, as a coroutine of an `EngineApi`. `twins` makes two methods
of it: one that blocks, and one to be awaited with an `a` before its name.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    TypeVar,
    Unpack,
    cast,
)

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from penstock import values
from penstock.adapters.link.blocking import AllInUse, LinkPool
from penstock.app.portal import Portal, at_exit, not_at_exit
from penstock.control.engine_api import LocalEngineApi
from penstock.core.errors import (
    InvalidRequest,
    NotRunning,
    job_ended,
)
from penstock.core.job import Job, JobRequest, chain_of, has_child_key
from penstock.core.ledger import Step
from penstock.core.pointer import decode_data, encode_data, media_type
from penstock.lifecycles.canonical import JobState
from penstock.ports.credentials import Credentials
from penstock.ports.engine_api import (
    Approvals,
    Audit,
    Bulk,
    Cancellation,
    EngineApi,
    EventBatch,
    JobUpdate,
    Keys,
    Limits,
    Policy,
    Schedules,
    StreamBatch,
    StreamQuery,
    journal,
)
from penstock.ports.store import JobConditions, JobQuery, LogLine, StepQuery
from penstock.workloads.function.context import (
    awaiting,
    child_keys,
    current_span,
    running,
    waiting,
)
from penstock.workloads.function.definition import JobFunction
from penstock.workloads.function.options import SubmitOptions, checked, with_keys
from penstock.workloads.llm.batches import Batches
from penstock.workloads.pipeline.interface import Pipelines
from penstock.workloads.pipeline.records import PipelineEvent
from penstock.workloads.pipes.status import PipesView, status_of

if TYPE_CHECKING:
    from penstock.app.application import Session
    from penstock.app.artifacts import ArtifactHandle

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
S = TypeVar("S", bound="_Caller")
Method = Callable[Concatenate[S, P], T]
Work = Callable[[EngineApi], Coroutine[Any, Any, T]]
Twins = tuple[Method[S, P, T], Method[S, P, Coroutine[Any, Any, T]]]

_INLINE = 4096


# -- calling ----------------------------------------------------------------------


class EngineCalls:
    """An engine as callers reach it: on its loop, or from their own thread."""

    def __init__(
        self,
        api: EngineApi,
        portal: Portal,
        direct: LinkPool | None = None,
        functions: Mapping[str, JobFunction[..., Any]] | None = None,
        reopen: Callable[[], Client] | None = None,
    ) -> None:
        """`reopen` connects again in a forked child."""
        self._api, self._portal, self._direct, self._reopen = api, portal, direct, reopen
        self.functions = functions or {}
        """The functions that are known here, by topic: they say what type a result has."""
        self._local = api if isinstance(api, LocalEngineApi) else None

    @property
    def api(self) -> EngineApi:
        self._check_process()
        return self._api

    @property
    def portal(self) -> Portal:
        self._check_process()
        return self._portal

    def _check_process(self) -> None:
        """In a forked child, connect again. Raises EngineUnavailable for an embedded engine."""
        if not self._portal.is_forked:
            return
        if self._reopen is None:
            self._portal.check_process()
            return
        made = self._reopen()._engine
        self._api, self._portal, self._direct = made._api, made._portal, made._direct

    def submit(self, requests: list[JobRequest]) -> list[Job]:
        """Block until all are durable jobs."""
        if (local := self._local) is not None:
            return self.portal.call(lambda: local.begin_submit(requests))
        return self.run(lambda api: api.submit(requests))

    def run(self, work: Callable[[EngineApi], Coroutine[Any, Any, T]]) -> T:
        """Block until `work` is done."""
        portal = self.portal
        if self._direct is not None:
            portal.check_thread()
            try:
                return self._direct.run(work)
            except AllInUse:
                pass
        return portal.run(work(self._api))

    def arun(self, work: Callable[[EngineApi], Coroutine[Any, Any, T]]) -> Coroutine[Any, Any, T]:
        portal = self.portal
        return portal.arun(work(self._api))

    def wait(self, work: Work[T], jobs: Sequence[str], *, on_loop: bool = False) -> T:
        """Block until `work` is done, which waits for these jobs; `on_loop`: it needs the loop.

        Inside another job, that one holds no slot meanwhile, and stops waiting if it should end.
        """
        ctx = running.get()
        if ctx is None or not jobs or asyncio._get_running_loop() is not None:
            return self.portal.run(work(self._api)) if on_loop else self.run(work)
        with waiting(jobs):
            portal = self.portal
            return portal.run(work(self._api), ctx.cancel)

    async def await_(self, work: Work[T], jobs: Sequence[str]) -> T:
        """The same, for code that awaits it."""
        if running.get() is None or not jobs:
            return await self.arun(work)
        async with awaiting(jobs):
            return await self.arun(work)

    def each(self, values: AsyncIterator[T], jobs: Sequence[str] = ()) -> Iterator[T]:
        """An engine's stream, read from any thread; it waits for these jobs."""
        return _each(self, self.portal, values, jobs)

    def aeach(self, values: AsyncIterator[T], jobs: Sequence[str] = ()) -> AsyncIterator[T]:
        """An engine's stream, read from any event loop."""
        return _aeach(self, self.portal, values, jobs)


def _each(
    engine: EngineCalls, portal: Portal, values: AsyncIterator[T], jobs: Sequence[str]
) -> Iterator[T]:
    try:
        portal.check_process()
        while (value := engine.wait(lambda _: _next(values), jobs, on_loop=True)) is not None:
            yield value
            portal.check_process()
    finally:
        if not portal.is_forked:
            portal.run(_close(values))


async def _aeach(
    engine: EngineCalls, portal: Portal, values: AsyncIterator[T], jobs: Sequence[str]
) -> AsyncIterator[T]:
    try:
        portal.check_process()
        while (value := await engine.await_(lambda _: _next(values), jobs)) is not None:
            yield value
            portal.check_process()
    finally:
        if not portal.is_forked:
            await portal.arun(_close(values))


async def _next(values: AsyncIterator[T]) -> T | None:
    return await anext(values, None)


async def _close(values: AsyncIterator[T]) -> None:
    await values.aclose()  # type: ignore[attr-defined]


class _Caller:
    __slots__ = ()
    _engine: EngineCalls
    _part = ""
    """The part of the engine's API that its methods are passed on to; empty: the API itself."""

    @property
    def _awaited(self) -> tuple[str, ...]:
        """The jobs that its waiting methods wait for."""
        return ()


def twins(
    method: Callable[Concatenate[S, EngineApi, P], Coroutine[Any, Any, T]],
    told: Any = None,
    *,
    hidden: str = "api",
    waits: bool = False,
) -> Twins[S, P, T]:
    """A blocking method and its async twin, of a coroutine that is given the engine's API.

    They have name, text and parameters of `told`, without the `hidden` one; without `told`, of
    `method`. `waits`: it waits for jobs.
    """

    def run(self: S, /, *args: P.args, **given: P.kwargs) -> T:
        engine, jobs = self._engine, self._awaited if waits else ()
        return engine.wait(lambda api: method(self, api, *args, **given), jobs)

    async def arun(self: S, /, *args: P.args, **given: P.kwargs) -> T:
        engine, jobs = self._engine, self._awaited if waits else ()
        return await engine.await_(lambda api: method(self, api, *args, **given), jobs)

    told = told or method
    signature = inspect.signature(told)
    parameters = [one for name, one in signature.parameters.items() if name != hidden]
    made: Any
    for made, prefix in ((run, ""), (arun, "a")):
        made.__name__ = prefix + told.__name__.removeprefix("_")
        made.__doc__ = told.__doc__
        made.__signature__ = signature.replace(parameters=parameters)
    return run, arun


def passed_on(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Twins[_Caller, P, T]:
    """A method of the engine's API, or of a part of it, as it is."""
    name = method.__name__

    async def call(self: _Caller, api: EngineApi, /, *args: P.args, **given: P.kwargs) -> T:
        target = getattr(api, self._part) if self._part else api
        return await getattr(target, name)(*args, **given)  # type: ignore[no-any-return]

    return twins(call, method, hidden="")


def about_job(
    method: Callable[Concatenate[EngineApi, str, P], Coroutine[Any, Any, T]],
    *,
    waits: bool = False,
) -> Twins[JobHandle[Any], P, T]:
    """A method of the engine that is given a job's id, for the job at hand."""
    name = method.__name__

    async def call(self: JobHandle[Any], api: EngineApi, /, *args: P.args, **given: P.kwargs) -> T:
        return await getattr(api, name)(self.job_id, *args, **given)  # type: ignore[no-any-return]

    return twins(call, method, hidden="job_id", waits=waits)


# -- the engine's client ----------------------------------------------------------


class Client(_Caller):
    """Submits and looks up jobs. Every method has an async twin with an `a` before its name."""

    _now: Callable[[], float] = staticmethod(time.time)

    def __init__(
        self,
        api: EngineApi,
        portal: Portal,
        functions: Mapping[str, JobFunction[..., Any]] | None = None,
        url: str = "",
        direct: LinkPool | None = None,
        reopen: Callable[[], Client] | None = None,
    ) -> None:
        self._engine = engine = EngineCalls(api, portal, direct, functions, reopen)
        self.url = url
        """Where the engine's HTTP API is, if this client knows one."""
        self.approvals = ApprovalsClient(engine)
        self.policy = PolicyClient(engine)
        self.schedules = SchedulesClient(engine)
        self.limits = LimitsClient(engine)
        self.keys = KeysClient(engine)
        self.credentials = CredentialsClient(engine)
        self.audit = AuditClient(engine)
        self.pipelines = PipelinesClient(engine)
        self.batches = BatchesClient(engine)

    @property
    def api(self) -> EngineApi:
        return self._engine.api

    # -- submitting ---------------------------------------------------------------

    def submit(
        self,
        topic: str,
        input: Mapping[str, Any] | None = None,
        **options: Unpack[SubmitOptions],
    ) -> JobHandle[Any]:
        """Submit one job; returns when it is durable.

        Raises InvalidRequest and its kin, with nothing stored.
        """
        return self._submit(*self._requests(topic, [input], options))[0]

    async def asubmit(
        self,
        topic: str,
        input: Mapping[str, Any] | None = None,
        **options: Unpack[SubmitOptions],
    ) -> JobHandle[Any]:
        return (await self._asubmit(*self._requests(topic, [input], options)))[0]

    def submit_many(
        self,
        topic: str,
        inputs: Sequence[Mapping[str, Any] | None],
        *,
        keys: Sequence[str] | None = None,
        **options: Unpack[SubmitOptions],
    ) -> list[JobHandle[Any]]:
        """Submit a job for each input, all of them or none; `keys` are their idempotency keys."""
        return self._submit(*self._requests(topic, inputs, options, keys))

    async def asubmit_many(
        self,
        topic: str,
        inputs: Sequence[Mapping[str, Any] | None],
        *,
        keys: Sequence[str] | None = None,
        **options: Unpack[SubmitOptions],
    ) -> list[JobHandle[Any]]:
        return await self._asubmit(*self._requests(topic, inputs, options, keys))

    def _submit_checked(
        self, topic: str, payloads: Sequence[bytes], options: Mapping[str, Any]
    ) -> list[JobHandle[Any]]:
        """Submit jobs of a function, which has checked their inputs and options."""
        return self._submit(*_requests(topic, payloads, request_fields(options, True, self._now)))

    async def _asubmit_checked(
        self, topic: str, payloads: Sequence[bytes], options: Mapping[str, Any]
    ) -> list[JobHandle[Any]]:
        return await self._asubmit(
            *_requests(topic, payloads, request_fields(options, True, self._now))
        )

    async def _request(
        self,
        api: EngineApi,
        topic: str,
        input: Mapping[str, Any] | None = None,
        **options: Unpack[SubmitOptions],
    ) -> JobRequest:
        """What `submit` would submit outside a job: for a schedule, say."""
        prepared = self._requests(topic, [input], {**options, "fresh": True})
        return replace((await _uploaded(api, *prepared))[0], child_of=None)

    request, arequest = twins(_request)

    def _submit(
        self, requests: list[JobRequest], large: Mapping[int, bytes]
    ) -> list[JobHandle[Any]]:
        try:
            if large:
                requests = self._engine.run(lambda api: _uploaded(api, requests, large))
            return self._handles(self._engine.submit(requests))
        except BaseException:
            _give_keys_back(requests)
            raise

    async def _asubmit(
        self, requests: list[JobRequest], large: Mapping[int, bytes]
    ) -> list[JobHandle[Any]]:
        try:
            if large:
                await self._engine.arun(lambda api: _uploaded(api, requests, large))
            return self._handles(await self._engine.arun(lambda api: api.submit(requests)))
        except BaseException:
            _give_keys_back(requests)
            raise

    def _requests(
        self,
        topic: str,
        inputs: Inputs,
        options: Mapping[str, Any],
        keys: Sequence[str] | None = None,
    ) -> Prepared:
        """With what the function of the topic, if we know it, wants and defaults to."""
        function = self._engine.functions.get(topic)
        fields = checked(options) if options else {}
        if function is None:
            payloads = [b"" if given is None else encode_input(given) for given in inputs]
        else:
            fields = {**function.submit_defaults, **fields}
            payloads = [function.signature.bind((), given or {}) for given in inputs]
        if keys is not None:
            fields = with_keys(fields, keys)
        return _requests(topic, payloads, request_fields(fields, function is not None, self._now))

    # -- jobs ---------------------------------------------------------------------

    async def _get(self, api: EngineApi, job_id: str) -> JobHandle[Any]:
        """The job with this id. Raises NotFound."""
        return JobHandle(self._engine, await api.get(job_id))

    async def _jobs(
        self, api: EngineApi, /, **query: Unpack[JobConditions]
    ) -> list[JobHandle[Any]]:
        """Jobs, newest first; the conditions are those of `penstock.JobQuery`.

        A job and its retries are one: its newest try. With `tries=True` each try is listed.
        """
        return self._handles(await api.find(JobQuery(**query)))

    async def _cancel_many(
        self, api: EngineApi, /, reason: str = "", **query: Unpack[JobConditions]
    ) -> Bulk:
        """Cancel every unfinished job that matches; the conditions are those of JobQuery."""
        return await api.cancel_many(JobQuery(**query), reason=reason)

    async def _retry_many(self, api: EngineApi, /, **query: Unpack[JobConditions]) -> Bulk:
        """Retry every job that ended FAILED or TIMEOUT, was not retried, and matches."""
        return await api.retry_many(JobQuery(**query))

    async def _read(self, api: EngineApi, pointer: str) -> bytes:
        """What a job's result_ptr or context_ptr names."""
        return await _content(api, pointer)

    get, aget = twins(_get)
    jobs, ajobs = twins(_jobs)
    cancel_many, acancel_many = twins(_cancel_many)
    retry_many, aretry_many = twins(_retry_many)
    read, aread = twins(_read)

    def events(self, after: int | None = None) -> Iterator[EventBatch]:
        """Everything that happens to any job, from a cursor on, or from now on; for ever."""
        return self._engine.each(journal(self.api, after))

    def aevents(self, after: int | None = None) -> AsyncIterator[EventBatch]:
        return self._engine.aeach(journal(self.api, after))

    def stream(
        self, query: StreamQuery | None = None, after: str | None = None
    ) -> Iterator[StreamBatch]:
        """Everything that happens, in one stream, from a place on or from now on; for ever."""
        return self._engine.each(self.api.stream(query or StreamQuery(), after))

    def astream(
        self, query: StreamQuery | None = None, after: str | None = None
    ) -> AsyncIterator[StreamBatch]:
        return self._engine.aeach(self.api.stream(query or StreamQuery(), after))

    def _handles(self, jobs: Sequence[Job]) -> list[JobHandle[Any]]:
        return [JobHandle(self._engine, job) for job in jobs]

    # -- the engine ---------------------------------------------------------------

    async def _pipes(self, api: EngineApi) -> PipesView:
        """Models that are split over nodes, and those nodes."""
        return status_of(await api.workers())

    pipes, apipes = twins(_pipes)
    status, astatus = passed_on(EngineApi.status)
    count, acount = passed_on(EngineApi.count)
    counts, acounts = passed_on(EngineApi.counts)
    timeline, atimeline = passed_on(EngineApi.timeline)
    topics, atopics = passed_on(EngineApi.topics)
    describe_topics, adescribe_topics = passed_on(EngineApi.describe_topics)
    workers, aworkers = passed_on(EngineApi.workers)
    worker, aworker = passed_on(EngineApi.worker)
    drain_worker, adrain_worker = passed_on(EngineApi.drain_worker)
    pools, apools = passed_on(EngineApi.pools)
    pool, apool = passed_on(EngineApi.pool)
    pause_pool, apause_pool = passed_on(EngineApi.pause_pool)
    resume_pool, aresume_pool = passed_on(EngineApi.resume_pool)
    verify, averify = passed_on(EngineApi.verify)
    prune, aprune = passed_on(EngineApi.prune)


Inputs = Sequence[Mapping[str, Any] | None]
Prepared = tuple[list[JobRequest], dict[int, bytes]]
"""Requests, and by their index the inputs that are too large to be part of them."""


def _requests(topic: str, payloads: Sequence[bytes], fields: dict[str, Any]) -> Prepared:
    requests: list[JobRequest] = []
    large: dict[int, bytes] = {}
    keys: Iterator[str] | None = None
    by_parent = fields.pop("by_parent", False)
    if (given := fields.pop("keys", None)) is not None:
        if len(given) != len(payloads):
            raise InvalidRequest("keys", f"{len(given)} keys for {len(payloads)} jobs")
        keys = iter(given)
    elif by_parent:
        ctx = running.get()
        assert ctx is not None
        take, chain = child_keys(ctx).take, fields["child_of"]
        keys = (take(chain, topic, getattr(payload, "in_order", payload)) for payload in payloads)
    for payload in payloads:
        if keys is not None:
            fields["idempotency_key"] = next(keys)
        own = fields
        if type(payload) is values.Input and payload.results_of:
            after = dict.fromkeys((*fields.get("after", ()), *payload.results_of))
            own = {**fields, "after": tuple(after), "takes_results": True}
        if len(payload) > _INLINE:
            large[len(requests)], payload = payload, b""
        pointer = encode_data(payload) if payload else ""
        requests.append(JobRequest(topic=topic, context_ptr=pointer, **own))
    return requests, large


def _give_keys_back(requests: Sequence[JobRequest]) -> None:
    """After a job's submission failed, what it submits next under the same key is the same."""
    if (ctx := running.get()) is not None:
        for request in requests:
            if has_child_key(request):
                child_keys(ctx).give_back(request.idempotency_key or "")


async def _uploaded(
    api: EngineApi, requests: list[JobRequest], large: Mapping[int, bytes]
) -> list[JobRequest]:
    for index, payload in large.items():
        pointer = await api.put_blob(payload)
        requests[index] = msgspec.structs.replace(requests[index], context_ptr=pointer)
    return requests


# -- its parts --------------------------------------------------------------------


class ClientPart(_Caller):
    """A part of an EngineApi, as `client.schedules`, with blocking methods; each has an async twin
    with an `a` before its name."""

    def __init__(self, engine: EngineCalls) -> None:
        self._engine = engine


class ApprovalsClient(ClientPart):
    """See `penstock.ports.engine_api.Approvals`."""

    _part = "approvals"
    approve, aapprove = passed_on(Approvals.approve)
    reject, areject = passed_on(Approvals.reject)


class PolicyClient(ClientPart):
    """See `penstock.ports.engine_api.Policy`."""

    _part = "policy"
    current, acurrent = passed_on(Policy.current)
    explain, aexplain = passed_on(Policy.explain)
    simulate, asimulate = passed_on(Policy.simulate)
    reload, areload = passed_on(Policy.reload)


class SchedulesClient(ClientPart):
    """See `penstock.ports.engine_api.Schedules`."""

    _part = "schedules"
    put, aput = passed_on(Schedules.put)
    list, alist = passed_on(Schedules.list)
    get, aget = passed_on(Schedules.get)
    pause, apause = passed_on(Schedules.pause)
    fire, afire = passed_on(Schedules.fire)
    delete, adelete = passed_on(Schedules.delete)


class LimitsClient(ClientPart):
    """See `penstock.ports.engine_api.Limits`."""

    _part = "limits"
    put, aput = passed_on(Limits.put)
    list, alist = passed_on(Limits.list)
    get, aget = passed_on(Limits.get)
    delete, adelete = passed_on(Limits.delete)


class KeysClient(ClientPart):
    """See `penstock.ports.engine_api.Keys`."""

    _part = "keys"
    create, acreate = passed_on(Keys.create)
    list, alist = passed_on(Keys.list)
    revoke, arevoke = passed_on(Keys.revoke)
    create_link, acreate_link = passed_on(Keys.create_link)


class CredentialsClient(ClientPart):
    """See `penstock.ports.credentials.Credentials`."""

    _part = "credentials"
    create_token, acreate_token = passed_on(Credentials.create_token)
    tokens, atokens = passed_on(Credentials.tokens)
    revoke_token, arevoke_token = passed_on(Credentials.revoke_token)
    list, alist = passed_on(Credentials.list)
    revoke, arevoke = passed_on(Credentials.revoke)


class AuditClient(ClientPart):
    """See `penstock.ports.engine_api.Audit`."""

    _part = "audit"
    read, aread = passed_on(Audit.read)


class PipelinesClient(ClientPart):
    """See `penstock.workloads.pipeline.interface.Pipelines`."""

    _part = "pipelines"
    list, alist = passed_on(Pipelines.list)
    show, ashow = passed_on(Pipelines.show)
    start, astart = passed_on(Pipelines.start)
    get, aget = passed_on(Pipelines.get)
    runs, aruns = passed_on(Pipelines.runs)
    items, aitems = passed_on(Pipelines.items)
    cancel, acancel = passed_on(Pipelines.cancel)
    retry_failed, aretry_failed = passed_on(Pipelines.retry_failed)
    breakers, abreakers = passed_on(Pipelines.breakers)
    reset_breaker, areset_breaker = passed_on(Pipelines.reset_breaker)

    def stream(self, job_id: str, after: int = 0) -> Iterator[PipelineEvent]:
        """What happens to a run, from an event's id on, until it has ended."""
        return self._engine.each(self._engine.api.pipelines.stream(job_id, after))

    def astream(self, job_id: str, after: int = 0) -> AsyncIterator[PipelineEvent]:
        return self._engine.aeach(self._engine.api.pipelines.stream(job_id, after))


class BatchesClient(ClientPart):
    """See `penstock.workloads.llm.batches.Batches`."""

    _part = "batches"
    write_upload, awrite_upload = passed_on(Batches.write_upload)
    keep_upload, akeep_upload = passed_on(Batches.keep_upload)
    drop_upload, adrop_upload = passed_on(Batches.drop_upload)
    file, afile = passed_on(Batches.file)
    files, afiles = passed_on(Batches.files)
    read_file, aread_file = passed_on(Batches.read_file)
    delete_file, adelete_file = passed_on(Batches.delete_file)
    create, acreate = passed_on(Batches.create)
    get, aget = passed_on(Batches.get)
    list, alist = passed_on(Batches.list)
    cancel, acancel = passed_on(Batches.cancel)


# -- requests ---------------------------------------------------------------------


def encode_input(given: Any) -> bytes:
    """A job's input as JSON. Raises InvalidRequest for what JSON can't say."""
    if not isinstance(given, Mapping):
        raise InvalidRequest("input", f"expected a mapping, got {type(given).__name__}")
    return values.encode_input(given)


def request_fields(
    options: Mapping[str, Any], complete: bool, now: Callable[[], float] = time.time
) -> dict[str, Any]:
    """A caller's options as fields of a JobRequest. Inside a job, that job is the parent.

    `complete`: they have what the function of the topic wants.
    """
    fields = {"job_id": "", **options, "complete": complete}
    fresh = fields.pop("fresh", False)
    if options:
        if (key := fields.pop("key", None)) is not None:
            fields["idempotency_key"] = key
        if (parent := fields.pop("parent", None)) is not None:
            fields["parent_job_id"] = fields["child_of"] = parent
        if (delay := fields.pop("delay", None)) is not None:
            fields["run_at"] = now() + delay
    if (ctx := running.get()) is not None:
        # What a job submits is its tenant's and its submitter's, as it is itself.
        if "child_of" not in fields:
            parent = ctx.request
            fields["child_of"], fields["parent_job_id"] = chain_of(parent), parent.job_id
            named = fields["job_id"] or "idempotency_key" in fields or "keys" in fields
            fields["by_parent"] = not (named or fresh)
        fields.setdefault("tenant", ctx.request.tenant)
        fields["principal"] = ctx.request.principal
    if "traceparent" not in fields and (span := current_span()) is not None:
        fields["traceparent"] = span
    return fields


# -- one job ----------------------------------------------------------------------


class JobHandle(_Caller, Generic[T_co]):
    """One submitted job. Every method has an async twin with an `a` before its name; `await job`
    is `await job.aresult()`."""

    __slots__ = ("_engine", "_record", "job_id")

    def __init__(self, engine: EngineCalls, job: Job | str) -> None:
        """Of a job's record, or of its id alone, which takes less memory."""
        self._engine = engine
        self._record = None if isinstance(job, str) else job
        self.job_id: str = job if isinstance(job, str) else job.request.job_id

    @property
    def record(self) -> Job:
        """The record as it was when it was last looked at; for a handle that `map` made, it is
        looked at now."""
        return self.refresh() if self._record is None else self._record

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobHandle) and other.job_id == self.job_id

    def __hash__(self) -> int:
        return hash(self.job_id)

    @property
    def first_try(self) -> str:
        """The id of the first try: by it a job and its retries are known."""
        return chain_of(self.record.request)

    @property
    def _awaited(self) -> tuple[str, ...]:
        """What is still to be waited for."""
        job = self._record
        ended = job is not None and job.is_final and job.successor is None
        return () if ended else (self.job_id,)

    @property
    def state(self) -> JobState:
        """Looks again, as `refresh` does; in async code it is `(await job.arefresh()).state`."""
        return self.refresh().state

    def __repr__(self) -> str:
        state = "" if self._record is None else f" {self._record.state}"
        return f"<job {self.job_id}{state}>"

    def _by_id(self) -> JobHandle[T_co]:
        """A handle of the same job that does not hold its record."""
        return JobHandle(self._engine, self.job_id)

    def __await__(self) -> Generator[Any, None, T_co]:
        return self.aresult().__await__()

    def result(self, timeout: float | None = None) -> T_co:
        """Wait, following retries, and return what the job returned.

        It has the type that the job's function says it returns, where the function is known (the
        client has the application); else it is plain JSON. Raises JobFailed, JobCancelled,
        JobDenied, JobTimedOut; WaitTimedOut if `timeout` seconds were not enough.
        """
        if (outcome := self._at_hand()) is None:
            outcome = self._engine.wait(lambda api: self._outcome(api, timeout), self._awaited)
        return self._value(outcome)

    async def aresult(self, timeout: float | None = None) -> T_co:
        if (outcome := self._at_hand()) is None:
            outcome = await self._engine.await_(
                lambda api: self._outcome(api, timeout), self._awaited
            )
        return self._value(outcome)

    async def _outcome(self, api: EngineApi, timeout: float | None) -> Outcome:
        return await outcome_of(api, await api.wait(self.job_id, timeout))

    def _at_hand(self) -> Outcome | None:
        """The outcome of a job that is known to have ended with a small result."""
        job = self._record
        return None if job is None or job.state is not JobState.SUCCEEDED else at_hand(job)

    def _value(self, outcome: Outcome) -> T_co:
        """In the caller's thread: what reads a value may be the user's code, and slow."""
        if not outcome.pointer:
            return cast(T_co, None)
        function = self._engine.functions.get(outcome.topic)
        reader = values.PLAIN if function is None else function.returns
        return cast(T_co, reader.read(outcome.payload, media_type(outcome.pointer)))

    async def _refresh(self, api: EngineApi) -> Job:
        """Look at the record again."""
        self._record = job = await api.get(self.job_id)
        return job

    async def _logs(self, api: EngineApi, after: int = 0) -> list[LogLine]:
        """What it wrote to its log, from a line's number on."""
        return await api.read_log(self.job_id, after)

    async def _cancel(
        self, api: EngineApi, reason: str = "", *, children: bool = False, timeout: float = 10.0
    ) -> Cancellation:
        """End it, and wait until it has ended or `timeout` seconds have passed."""
        return await api.cancel(self.job_id, reason=reason, children=children, timeout=timeout)

    async def _approve(self, api: EngineApi, reason: str = "") -> Job:
        """Approve it, if it is awaiting approval."""
        return await api.approvals.approve(self.job_id, reason=reason)

    async def _reject(self, api: EngineApi, reason: str = "") -> Job:
        """Reject it: it ends DENIED."""
        return await api.approvals.reject(self.job_id, reason=reason)

    async def _artifacts(
        self, api: EngineApi, timeout: float | None = None
    ) -> list[ArtifactHandle]:
        """The files that it left, whatever its end. Waits for the end, following retries."""
        from penstock.app.artifacts import ArtifactHandle

        job = await api.wait(self.job_id, timeout)
        left = job.result.artifacts if job.result is not None else ()
        return [ArtifactHandle(self._engine, one) for one in left]

    async def _tries(self, api: EngineApi, limit: int = 1000) -> list[Job]:
        """The records of all its tries, oldest first, but at most the first `limit`."""
        job = self._record or await self._refresh(api)
        query = JobQuery(first_try=chain_of(job.request), oldest_first=True, limit=limit)
        return await api.find(query)

    async def _retry(self, api: EngineApi) -> JobHandle[T_co]:
        """Submit it again as a new job, after its newest try ended badly."""
        return JobHandle(self._engine, await api.retry(self.job_id))

    wait, await_end = about_job(EngineApi.wait, waits=True)
    refresh, arefresh = twins(_refresh)
    why, awhy = about_job(EngineApi.why)
    history, ahistory = about_job(EngineApi.history)
    logs, alogs = twins(_logs)
    count_children, acount_children = about_job(EngineApi.count_children)
    cancel, acancel = twins(_cancel)
    approve, aapprove = twins(_approve)
    reject, areject = twins(_reject)
    artifacts, aartifacts = twins(_artifacts, waits=True)
    tries, atries = twins(_tries)
    retry, aretry = twins(_retry)

    def steps(self, name: str | None = None) -> Iterator[Step]:
        """The rows that the job checkpointed, in the order of name and `n`; read in pages."""
        return self._engine.each(self._steps(name))

    def asteps(self, name: str | None = None) -> AsyncIterator[Step]:
        return self._engine.aeach(self._steps(name))

    async def _steps(self, name: str | None) -> AsyncIterator[Step]:
        query: StepQuery | None = StepQuery(name=name)
        while query is not None:
            page = await self._engine.api.read_steps(self.job_id, query)
            for step in page.steps:
                yield step
            query = replace(query, after=page.last) if page.more else None

    def follow(self) -> Iterator[JobUpdate]:
        """Log lines, progress and moves as they happen, until the job has ended."""
        return self._engine.each(self._engine.api.follow(self.job_id))

    def afollow(self) -> AsyncIterator[JobUpdate]:
        return self._engine.aeach(self._engine.api.follow(self.job_id))


class Outcome(Struct, frozen=True, gc=False):
    """What a job returned, as it is stored."""

    topic: str
    pointer: str
    """Empty if it returned nothing."""
    blob: bytes | None = None
    """The content of a pointer that does not carry it itself."""

    @property
    def payload(self) -> bytes:
        if self.blob is not None:
            return self.blob
        return decode_data(self.pointer) if self.pointer else b"null"


def at_hand(job: Job) -> Outcome | None:
    """What an ended job returned, if its record has it; raises the JobEnded of any other end."""
    if job.state is not JobState.SUCCEEDED:
        raise job_ended(job)
    pointer = (job.result.result_ptr if job.result is not None else None) or ""
    if pointer and not pointer.startswith("data:"):
        return None
    return Outcome(job.request.topic, pointer)


async def outcome_of(api: EngineApi, job: Job) -> Outcome:
    """What an ended job returned; raises the JobEnded of any other end."""
    if (outcome := at_hand(job)) is not None:
        return outcome
    assert job.result is not None
    pointer = job.result.result_ptr or ""
    return Outcome(job.request.topic, pointer, await api.get_blob(pointer))


async def _content(api: EngineApi, pointer: str) -> bytes:
    """The content of a pointer; a small payload is part of it, without a request."""
    return decode_data(pointer) if pointer.startswith("data:") else await api.get_blob(pointer)


# -- a client without a session ---------------------------------------------------


class DefaultClient:
    """Connects when it is first needed, to the engine on the data folder or to one in this
    process, and lets go when the process ends."""

    def __init__(self, embed: Callable[[], Session], check: Callable[[Client], None]) -> None:
        """`embed` starts an engine in this process; `check` raises if the one that is running
        won't do."""
        self._embed, self._check = embed, check
        self._session: Session | None = None
        self._client: Client | None = None
        self._pid = 0

    def client(self) -> Client:
        if self._client is None or self._pid != os.getpid():  # a fork's parent keeps its own
            self._client, self._pid = self._connected(), os.getpid()
        return self._client

    def _connected(self) -> Client:
        from penstock.app.application import connect

        session = connect()
        try:
            client = session.__enter__()
        except NotRunning:
            session = self._embed()
            client = session.__enter__()
        else:
            try:
                self._check(client)
            except BaseException:
                session.__exit__(None, None, None)
                raise
        self._session = session
        at_exit(self.close)
        return client

    def close(self) -> None:
        """Let go of the engine; what it has accepted goes on at its next start."""
        session, self._session, self._client = self._session, None, None
        if session is not None:
            not_at_exit(self.close)
            session.__exit__(None, None, None)
