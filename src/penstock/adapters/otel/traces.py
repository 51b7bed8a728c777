"""Exports jobs as OpenTelemetry traces.

A job becomes spans when it has ended: one for the whole job, one for its wait, one for each
attempt, and one for each part that its workload names (the stages of a pipeline). The times come
from the job's record and its log, so nothing is measured twice, and a restart loses no span of an
open job.
Span ids are those of `penstock.core.trace`: code inside a job continues the same trace.

Inputs, results and error messages are never exported.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from urllib.parse import urlsplit

from msgspec import Struct
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import SpanKind, Status, StatusCode

from penstock.core.errors import PenstockError
from penstock.core.job import Job
from penstock.core.journal import GIVES, Stride, Transition
from penstock.core.trace import TraceParent, attempt_span, caller_span, job_span, part_span
from penstock.lifecycles.canonical import TERMINAL, JobEvent, JobState

log = logging.getLogger(__name__)

MAX_PENDING = 10_000
"""Ended jobs that wait to be exported; older ones are dropped."""
_TIMEOUT = 2.0
"""Seconds for one export, unless the environment says otherwise."""
_UNSUCCESSFUL = frozenset({JobState.FAILED, JobState.TIMEOUT, JobState.DENIED})


class Part(Struct, frozen=True):
    """A named part of a job, as a stage of a pipeline."""

    name: str
    start: float
    end: float
    error: str = ""


Parts = Callable[[Job], Awaitable[Sequence[Part]]]


class TraceExporter:
    """Hears of every commit, and exports the jobs that ended. A service."""

    def __init__(
        self,
        exporter: SpanExporter,
        version: str,
        history: Callable[[str], Awaitable[list[Transition]]],
        parts: Parts,
    ) -> None:
        about = {SERVICE_VERSION: version}
        if "OTEL_SERVICE_NAME" not in os.environ:
            about[SERVICE_NAME] = "penstock"
        self._ids = _GivenIds()
        self._provider = TracerProvider(
            resource=Resource.create(about), id_generator=self._ids, shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("penstock", version)
        self._history, self._parts = history, parts
        self._ended: deque[Job] = deque(maxlen=MAX_PENDING)
        self._some = asyncio.Event()
        self.dropped = 0

    def hear(self, strides: Sequence[Stride]) -> None:
        """After a commit."""
        for stride in strides:
            if stride.path.after in TERMINAL and stride.path.before not in TERMINAL:
                self.dropped += max(0, len(self._ended) + len(stride.jobs) - MAX_PENDING)
                self._ended.extend(stride.jobs)
                self._some.set()

    async def run(self) -> None:
        """Until cancelled; what has ended by then is still exported."""
        try:
            while True:
                await self._some.wait()
                self._some.clear()
                while self._ended:
                    await self._export(self._ended.popleft())
        finally:
            for job in self._ended:
                self._job(job, [_only_attempt(job)])
            # An exporter may wait for a server that is away.
            await asyncio.shield(asyncio.to_thread(self._provider.shutdown))

    async def _export(self, job: Job) -> None:
        caller = caller_span(job.request)
        if caller is not None and not caller.sampled:
            return
        try:
            if job.attempt > 1:
                attempts = attempts_of(await self._history(job.job_id))
            else:
                attempts = [_only_attempt(job)]
            parts = await self._parts(job) if job.started_at is not None else ()
        except PenstockError as error:
            log.warning("job %s: its log can't be read for its trace: %s", job.job_id, error)
            attempts, parts = [], ()
        self._job(job, attempts)
        self._add_parts(job, parts)

    def _job(self, job: Job, attempts: Sequence[_Attempt]) -> None:
        request, whole = job.request, job_span(job.request)
        result = job.result
        code = (result.error_code if result is not None else None) or ""
        end = job.finished_at or job.updated_at
        failed = code or job.state.value if job.state in _UNSUCCESSFUL else ""
        about = {
            "penstock.job.id": job.job_id,
            "penstock.job.topic": request.topic,
            "penstock.job.state": job.state.value,
            "penstock.job.attempts": job.attempt,
            "penstock.tenant": request.tenant,
        }
        if request.child_of:
            about["penstock.job.parent"] = request.child_of
        if code:
            about["error.type"] = code
        parent = caller_span(request)
        self._span(f"job {request.topic}", whole, parent, (job.accepted_at, end), about, failed)
        started = next((one.start for one in attempts if one.start is not None), end)
        self._span("wait", part_span(request, "wait"), whole, (job.accepted_at, started), {})
        for attempt in attempts:
            if attempt.start is None:
                continue
            run = {"penstock.worker.id": attempt.worker_id or "", "penstock.job.id": job.job_id}
            times = attempt.start, attempt.end or end
            reason = failed if attempt.end is None else "WORKER_LOST"
            span = attempt_span(request, attempt.number)
            self._span(f"attempt {attempt.number}", span, whole, times, run, reason)

    def _add_parts(self, job: Job, parts: Iterable[Part]) -> None:
        parent = attempt_span(job.request, job.attempt)
        for part in parts:
            span = part_span(job.request, part.name)
            about = {"penstock.job.id": job.job_id, "penstock.stage": part.name}
            self._span(
                f"stage {part.name}", span, parent, (part.start, part.end), about, part.error
            )

    def _span(
        self,
        name: str,
        span: TraceParent,
        parent: TraceParent | None,
        times: tuple[float, float],
        about: Mapping[str, str | int],
        error: str = "",
    ) -> None:
        start, end = times
        self._ids.span = span
        made = self._tracer.start_span(
            name,
            _context(parent),
            SpanKind.CONSUMER if name.startswith("job ") else SpanKind.INTERNAL,
            dict(about),
            start_time=_nanoseconds(start),
        )
        if error:
            made.set_status(Status(StatusCode.ERROR, error))
        made.end(_nanoseconds(max(start, end)))


class _Attempt(Struct, frozen=True):
    number: int
    start: float | None
    end: float | None
    """When it was superseded; None for the last one."""
    worker_id: str | None


def _only_attempt(job: Job) -> _Attempt:
    return _Attempt(job.attempt, job.started_at, None, job.worker_id)


def attempts_of(history: Iterable[Transition]) -> list[_Attempt]:
    """Each attempt of a job, from its start to the next dispatch."""
    found: list[_Attempt] = []
    number, start, worker_id = 0, None, None
    for entry in history:
        if entry.event in GIVES:
            if number:
                found.append(_Attempt(number, start, entry.at, worker_id))
            restarted = entry.at if entry.after is JobState.RUNNING else None
            number, start, worker_id = entry.attempt, restarted, entry.worker_id
        elif entry.event is JobEvent.START:
            start = entry.at
    return [*found, _Attempt(number, start, None, worker_id)] if number else found


class _GivenIds(IdGenerator):
    """The ids of the span that is made next."""

    span = TraceParent("0" * 32, "0" * 16)

    def generate_trace_id(self) -> int:
        return int(self.span.trace_id, 16)

    def generate_span_id(self) -> int:
        return int(self.span.span_id, 16)


def _context(parent: TraceParent | None) -> Context:
    """An empty one makes a root span, whatever is current here."""
    if parent is None:
        return Context()
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if parent.sampled else 0)
    span_id = int(parent.span_id, 16)
    known = trace.SpanContext(int(parent.trace_id, 16), span_id, is_remote=True, trace_flags=flags)
    return trace.set_span_in_context(trace.NonRecordingSpan(known), Context())


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Sends spans to an OTLP collector over HTTP. Headers, certificates and timeouts come from the
    environment (`OTEL_EXPORTER_OTLP_…`)."""
    path = urlsplit(endpoint).path.rstrip("/")
    url = endpoint if path else f"{endpoint.rstrip('/')}/v1/traces"
    # A collector that is away must not delay the engine's stop for longer.
    said = any(f"OTEL_EXPORTER_OTLP_{name}TIMEOUT" in os.environ for name in ("", "TRACES_"))
    return OTLPSpanExporter(url, timeout=None if said else _TIMEOUT)
