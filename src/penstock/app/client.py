"""A caller's view of an engine, here or elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import msgspec

from penstock.app.handle import JobHandle, aeach, each
from penstock.app.portal import Portal
from penstock.core.check import check_finite
from penstock.core.errors import InvalidRequest
from penstock.core.job import Job, JobRequest
from penstock.core.pipes import PipesView
from penstock.core.pointer import encode_data
from penstock.core.stages import PipelineEvent
from penstock.ports.desk import (
    Bulk,
    Cleaned,
    Desk,
    EngineStatus,
    EventBatch,
    PoolView,
    WorkerView,
)
from penstock.ports.pipelines import Pipelines
from penstock.ports.store import JobQuery, Verified
from penstock.workloads.function.context import running
from penstock.workloads.function.definition import JobFunction
from penstock.workloads.function.options import SubmitOptions, checked

_INLINE = 4096
_encode = msgspec.json.Encoder().encode


class Client:
    """Submits and looks up jobs. Every method has an async twin with an `a` before its name."""

    def __init__(
        self,
        desk: Desk,
        portal: Portal,
        now: Callable[[], float],
        functions: Mapping[str, JobFunction[..., Any]] | None = None,
        url: str = "",
    ) -> None:
        self.desk = desk
        self.url = url
        """Where the engine's HTTP API is, if this client knows one."""
        self._portal, self._now = portal, now
        self._functions = functions or {}
        self.bound = Bound(self, portal)
        self.approvals = Front(desk.approvals, portal)
        self.policy = Front(desk.policy, portal)
        self.schedules = Front(desk.schedules, portal)
        self.limits = Front(desk.limits, portal)
        self.keys = Front(desk.keys, portal)
        self.audit = Front(desk.audit, portal)
        self.pipelines = PipelinesFront(desk.pipelines, portal)
        self.batches = Front(desk.batches, portal)

    # -- reading ------------------------------------------------------------------

    def read(self, pointer: str) -> bytes:
        """What a job's result_ptr or context_ptr names."""
        return self._portal.run(self.desk.get_blob(pointer))

    async def aread(self, pointer: str) -> bytes:
        return await self._portal.arun(self.desk.get_blob(pointer))

    # -- submitting ---------------------------------------------------------------

    def submit(
        self,
        topic: str,
        input: Mapping[str, Any] | None = None,
        **options: Unpack[SubmitOptions],
    ) -> JobHandle:
        """Submit one job; returns when it is durable.

        Raises InvalidRequest and its kin, with nothing stored.
        """
        return self._portal.run(self._submit(topic, [input], options))[0]

    async def asubmit(
        self,
        topic: str,
        input: Mapping[str, Any] | None = None,
        **options: Unpack[SubmitOptions],
    ) -> JobHandle:
        return (await self._portal.arun(self._submit(topic, [input], options)))[0]

    def submit_many(
        self,
        topic: str,
        inputs: Sequence[Mapping[str, Any] | None],
        **options: Unpack[SubmitOptions],
    ) -> list[JobHandle]:
        """Submit a job for each input, all of them or none."""
        return self._portal.run(self._submit(topic, inputs, options))

    async def asubmit_many(
        self,
        topic: str,
        inputs: Sequence[Mapping[str, Any] | None],
        **options: Unpack[SubmitOptions],
    ) -> list[JobHandle]:
        return await self._portal.arun(self._submit(topic, inputs, options))

    async def _submit(
        self,
        topic: str,
        inputs: Sequence[Mapping[str, Any] | None],
        options: Mapping[str, Any],
    ) -> list[JobHandle]:
        """Submit with what the function of the topic, if we know it, wants and defaults to."""
        function = self._functions.get(topic)
        if function is not None:
            options = {**function.submit_defaults, **options}
            inputs = [function.signature.bind((), given or {}) for given in inputs]
            return await self._submit_bound(topic, inputs, options)
        return await self._submit_open(topic, inputs, options, complete=False)

    async def _submit_bound(
        self,
        topic: str,
        inputs: Sequence[Mapping[str, Any] | None],
        options: Mapping[str, Any],
    ) -> list[JobHandle]:
        """Submit inputs that were checked against their function, with its defaults."""
        return await self._submit_open(topic, inputs, options, complete=True)

    async def _submit_open(
        self,
        topic: str,
        inputs: Sequence[Mapping[str, Any] | None],
        options: Mapping[str, Any],
        *,
        complete: bool,
    ) -> list[JobHandle]:
        fields = request_fields(checked(options), self._now())
        fields["complete"] = complete
        requests = []
        for given in inputs:
            pointer = "" if given is None else await self._pointer(given)
            requests.append(JobRequest(topic=topic, context_ptr=pointer, **fields))
        jobs = await self.desk.submit(requests)
        return [self._handle(job) for job in jobs]

    def request(
        self,
        topic: str,
        input: Mapping[str, Any] | None = None,
        **options: Unpack[SubmitOptions],
    ) -> JobRequest:
        """What `submit` would submit: for a schedule, say."""
        return self._portal.run(self._request(topic, input, options))

    async def arequest(
        self,
        topic: str,
        input: Mapping[str, Any] | None = None,
        **options: Unpack[SubmitOptions],
    ) -> JobRequest:
        return await self._portal.arun(self._request(topic, input, options))

    async def _request(
        self, topic: str, given: Mapping[str, Any] | None, options: Mapping[str, Any]
    ) -> JobRequest:
        function = self._functions.get(topic)
        if function is not None:
            options = {**function.submit_defaults, **options}
            given = function.signature.bind((), given or {})
        fields = request_fields(checked(options), self._now())
        pointer = "" if given is None else await self._pointer(given)
        return JobRequest(topic=topic, context_ptr=pointer, complete=function is not None, **fields)

    async def _pointer(self, given: Mapping[str, Any]) -> str:
        payload = encode_input(given)
        if len(payload) <= _INLINE:
            return encode_data(payload)
        return await self.desk.put_blob(payload)

    # -- looking up ---------------------------------------------------------------

    def get(self, job_id: str) -> JobHandle:
        """The job with this id. Raises NotFound."""
        return self._handle(self._portal.run(self.desk.get(job_id)))

    async def aget(self, job_id: str) -> JobHandle:
        return self._handle(await self._portal.arun(self.desk.get(job_id)))

    def jobs(self, **query: Any) -> list[JobHandle]:
        """Jobs, newest first; the conditions are those of `penstock.JobQuery`."""
        return self._portal.run(self._jobs(query))

    async def ajobs(self, **query: Any) -> list[JobHandle]:
        return await self._portal.arun(self._jobs(query))

    async def _jobs(self, query: dict[str, Any]) -> list[JobHandle]:
        return [self._handle(job) for job in await self.desk.find(JobQuery(**query))]

    # -- many jobs ----------------------------------------------------------------

    def cancel_many(self, reason: str = "", **query: Any) -> Bulk:
        """Cancel every unfinished job that matches; the conditions are those of JobQuery."""
        return self._portal.run(self.desk.cancel_many(JobQuery(**query), reason=reason))

    async def acancel_many(self, reason: str = "", **query: Any) -> Bulk:
        return await self._portal.arun(self.desk.cancel_many(JobQuery(**query), reason=reason))

    def retry_many(self, **query: Any) -> Bulk:
        """Retry every job that ended FAILED or TIMEOUT, was not retried, and matches."""
        return self._portal.run(self.desk.retry_many(JobQuery(**query)))

    async def aretry_many(self, **query: Any) -> Bulk:
        return await self._portal.arun(self.desk.retry_many(JobQuery(**query)))

    def events(self, after: int | None = None) -> Iterator[EventBatch]:
        """Everything that happens to any job, from a cursor on, or from now on; for ever."""
        return each(self.desk.events(after), self._portal)

    def aevents(self, after: int | None = None) -> AsyncIterator[EventBatch]:
        return aeach(self.desk.events(after), self._portal)

    # -- the engine ---------------------------------------------------------------

    def status(self) -> EngineStatus:
        """What the engine is, and how many jobs are where."""
        return self._portal.run(self.desk.status())

    async def astatus(self) -> EngineStatus:
        return await self._portal.arun(self.desk.status())

    def topics(self) -> list[str]:
        """The topics (globs) that workers serve now."""
        return self._portal.run(self.desk.topics())

    async def atopics(self) -> list[str]:
        return await self._portal.arun(self.desk.topics())

    def workers(self) -> list[WorkerView]:
        return self._portal.run(self.desk.workers())

    async def aworkers(self) -> list[WorkerView]:
        return await self._portal.arun(self.desk.workers())

    def pipes(self) -> PipesView:
        """Models that are split over nodes, and those nodes."""
        return self._portal.run(self.desk.pipes())

    async def apipes(self) -> PipesView:
        return await self._portal.arun(self.desk.pipes())

    def pools(self) -> list[PoolView]:
        return self._portal.run(self.desk.pools())

    async def apools(self) -> list[PoolView]:
        return await self._portal.arun(self.desk.pools())

    def pause_pool(self, name: str) -> PoolView:
        """Give its workers nothing new; what they have, they finish."""
        return self._portal.run(self.desk.pause_pool(name))

    async def apause_pool(self, name: str) -> PoolView:
        return await self._portal.arun(self.desk.pause_pool(name))

    def resume_pool(self, name: str) -> PoolView:
        return self._portal.run(self.desk.resume_pool(name))

    async def aresume_pool(self, name: str) -> PoolView:
        return await self._portal.arun(self.desk.resume_pool(name))

    def verify(self) -> Verified:
        """Fold every job's log and compare it with its record."""
        return self._portal.run(self.desk.verify())

    async def averify(self) -> Verified:
        return await self._portal.arun(self.desk.verify())

    def prune(self, older_than: float) -> Cleaned:
        """Forget jobs that ended more than so many seconds ago."""
        return self._portal.run(self.desk.prune(older_than))

    async def aprune(self, older_than: float) -> Cleaned:
        return await self._portal.arun(self.desk.prune(older_than))

    def _handle(self, job: Job) -> JobHandle:
        return JobHandle(self.desk, self._portal, job)


class Front:
    """A part of a Desk with blocking methods; each has an async twin with an `a` before it."""

    def __init__(self, part: object, portal: Portal) -> None:
        self._part, self._portal = part, portal

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method: Any = getattr(self._part, name, None)
        if method is not None:
            return lambda *given, **named: self._portal.run(method(*given, **named))
        twin: Any = getattr(self._part, name[1:], None) if name.startswith("a") else None
        if twin is not None:
            return lambda *given, **named: self._portal.arun(twin(*given, **named))
        raise AttributeError(f"{type(self._part).__name__} has no {name!r}")

    def __dir__(self) -> list[str]:
        names = [name for name in dir(self._part) if not name.startswith("_")]
        return names + [f"a{name}" for name in names]


class PipelinesFront(Front):
    """Pipelines, with their events to be iterated over, plainly or asynchronously."""

    def __init__(self, part: Pipelines, portal: Portal) -> None:
        super().__init__(part, portal)
        self._pipelines = part

    def stream(self, job_id: str, after: int = 0) -> Iterator[PipelineEvent]:
        """What happens to a run, from an event's id on, until it has ended."""
        return each(self._pipelines.stream(job_id, after), self._portal)

    def astream(self, job_id: str, after: int = 0) -> AsyncIterator[PipelineEvent]:
        return aeach(self._pipelines.stream(job_id, after), self._portal)


class Bound:
    """What functions submit through: their inputs are checked already."""

    def __init__(self, client: Client, portal: Portal) -> None:
        self._client, self._portal = client, portal

    def submit(self, topic: str, input: Mapping[str, Any], **options: Any) -> JobHandle:
        return self._portal.run(self._client._submit_bound(topic, [input], options))[0]

    async def asubmit(self, topic: str, input: Mapping[str, Any], **options: Any) -> JobHandle:
        return (await self._portal.arun(self._client._submit_bound(topic, [input], options)))[0]

    def submit_many(
        self, topic: str, inputs: Sequence[Mapping[str, Any]], **options: Any
    ) -> list[JobHandle]:
        return self._portal.run(self._client._submit_bound(topic, inputs, options))

    async def asubmit_many(
        self, topic: str, inputs: Sequence[Mapping[str, Any]], **options: Any
    ) -> list[JobHandle]:
        return await self._portal.arun(self._client._submit_bound(topic, inputs, options))


def encode_input(given: Any) -> bytes:
    """A job's input as JSON. Raises InvalidRequest for what JSON can't say."""
    if not isinstance(given, Mapping):
        raise InvalidRequest("input", f"expected a mapping, got {type(given).__name__}")
    check_finite("input", given)
    try:
        return _encode(given)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest("input", f"can't be stored as JSON: {error}") from error


def request_fields(options: Mapping[str, Any], now: float) -> dict[str, Any]:
    """A caller's options as fields of a JobRequest. Inside a job, that job is the parent."""
    fields = dict(options)
    fields.setdefault("job_id", "")
    if (key := fields.pop("key", None)) is not None:
        fields["idempotency_key"] = key
    if (parent := fields.pop("parent", None)) is not None:
        fields["parent_job_id"] = parent
    if (ctx := running.get()) is not None:
        # What a job submits is its tenant's and its submitter's, as it is itself.
        fields.setdefault("parent_job_id", ctx.job_id)
        fields.setdefault("tenant", ctx.request.tenant)
        fields["principal"] = ctx.request.principal
    if (delay := fields.pop("delay", None)) is not None:
        fields["run_at"] = now + delay
    return fields
