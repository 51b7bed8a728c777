"""What a stage's function knows of its job, as its parameter `ctx`.

A context belongs to one attempt at one item. What the function counts and reports is
kept there until the item ends, and written together with it: so an item that is run again,
after a failure or a crash, is counted once.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from penstock.core.errors import NotFound
from penstock.core.job import JobRequest
from penstock.core.trace import part_span
from penstock.ports.executor import CancelToken, Context, Environment, WaitContext
from penstock.workloads.pipeline.breakers import Breakers
from penstock.workloads.pipeline.definition import Definition
from penstock.workloads.pipeline.payloads import Payloads, Portal, Reader, Results, encode
from penstock.workloads.pipeline.records import PipelineRecord, StageRecord
from penstock.workloads.pipeline.retrying import bounded
from penstock.workloads.pipeline.rows import ItemReport, Metric, RunRows

if TYPE_CHECKING:
    from penstock.workloads.pipeline.calls import Pools

_MAX_MESSAGE = 500
_MOST_ERRORS = 20
_LONGEST_ERROR = 300
_MAX_EMIT = 3000
"""Bytes of an event: it is an entry of the job's history."""


def report_metric(report: ItemReport, name: str, value: Metric, fix: bool) -> None:
    """Add to a metric, or set it. Raises TypeError or ValueError for what can't be stored."""
    name, value = str(name), _storable(name, value)
    if fix or isinstance(value, str):
        report.added.pop(name, None)
        report.fixed[name] = value
    elif isinstance(before := report.fixed.get(name), int | float):
        report.fixed[name] = before + value
    else:
        report.added[name] = report.added.get(name, 0) + value


def _storable(name: str, value: Any) -> Metric:
    """A metric as a plain value, also where it is numpy's."""
    if isinstance(value, bool | int):
        return value if type(value) in (bool, int) else int(value)
    if isinstance(value, str):
        return bounded(value)
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"metric {name} can't be {number}")
    return number


class RunOptions(Struct, frozen=True, kw_only=True):
    """How a run uses the machine it is on. Times are in seconds."""

    inline_limit: int = 16 << 10
    """Bytes of an input or output that are kept in its row; larger ones go to a blob."""
    page: int = 500
    """Rows read or listed at once: what bounds the memory of a stage."""
    backlog: int = 500
    """Ended items that wait to be written, at most."""
    max_outputs: int = 100_000
    """How much one call may yield before it is taken to be endless."""
    max_result: int = 64 << 20
    """Bytes of one output."""
    threads: int = 32
    processes: int | None = None
    kill_grace: float = 5.0
    """How long a call that ran out of time has to stop before it is killed, or left."""
    progress_every: float = 0.25
    """The least time between two reports of progress."""


DEFAULTS = RunOptions()


class Resources:
    """What the items of one job share: clients, models. Made when first asked for."""

    def __init__(self, factories: Mapping[str, Callable[[], Any]]) -> None:
        self._factories = factories
        self._made: dict[str, Any] = {}
        self._lock = threading.RLock()

    def get(self, name: str) -> Any:
        with self._lock:
            if name not in self._made:
                if name not in self._factories:
                    there = ", ".join(self._factories) or "none"
                    raise NotFound(f"there is no resource {name!r}", hint=f"there are: {there}")
                self._made[name] = self._factories[name]()
            return self._made[name]

    async def close(self, ctx: Context) -> None:
        """Close what can be closed, the last made first. What goes wrong is logged."""
        while self._made:
            name, made = self._made.popitem()
            close = getattr(made, "aclose", None) or getattr(made, "close", None)
            try:
                if callable(close) and inspect.isawaitable(closing := close()):
                    await closing
            except Exception as error:
                ctx.log(f"resource {name} could not be closed: {error!r}", level="warning")


class RunScope:
    """What the parts of one run share, and the contexts of its calls. Made in the event loop."""

    def __init__(
        self,
        pipeline: Definition,
        record: PipelineRecord,
        context: Context,
        environment: Environment,
        *,
        options: RunOptions,
        pools: Pools,
        breakers: Breakers,
    ) -> None:
        """`context` is that of the job that runs it; `pools` and `breakers` are shared with other
        runs."""
        self.pipeline, self.record, self.options = pipeline, record, options
        self.clock, self.shared = environment.clock, environment.state
        self.rows = RunRows(environment.api.read_steps, record.id)
        self.context, self.pools, self.breakers = context, pools, breakers
        self.payloads = Payloads(environment.blobs, options.inline_limit, options.max_result)
        self.config = pipeline.config_of(record.config)
        self.stage: Callable[[str], StageRecord] = self._recorded
        """A stage as it is by now."""
        self.reader = Reader(self.rows, self.payloads, lambda name: self.stage(name))
        self.portal = Portal()
        self.resources = Resources(pipeline.resources)
        self.lock = threading.Lock()
        self.output_counts: dict[str, int] = {}
        """How many outputs the stages that have ended gave."""
        self.on_progress: Callable[[str, float | None, str], None] = (
            lambda stage, fraction, message: context.progress(fraction, message)
        )
        self.on_emit: Callable[[str, str, bytes], None] = lambda stage, key, data: None

    def _recorded(self, name: str) -> StageRecord:
        stage = self.record.stage(name)
        if stage is None:
            raise NotFound(f"no stage {name!r}")
        return stage


def memory_name(tenant: str, pipeline: str, name: str) -> str:
    """What `ctx.remember` keeps a value under: each tenant has its own."""
    return f"pipeline-memory/{tenant}/{pipeline}/{name}"


class StageContext:
    """Given to plain functions. May be used from any thread."""

    __slots__ = ("_report", "_run", "_until", "attempt", "cancel", "key", "stage")

    def __init__(
        self,
        run: RunScope,
        stage: str,
        key: str,
        attempt: int,
        cancel: CancelToken,
        until: float | None = None,
    ) -> None:
        self._run, self.stage, self.key, self.attempt = run, stage, key, attempt
        self.cancel = cancel
        """Asks the function to end: by a cancel, a timeout, or because its worker stops."""
        self._until = until
        self._report: ItemReport | None = None

    @property
    def job_id(self) -> str:
        return self._run.record.id

    @property
    def attempt_context(self) -> Context:
        """The Context of the job: what the function submits is a child of it."""
        return self._run.context

    @property
    def request(self) -> JobRequest:
        return self._run.context.request

    @property
    def waits(self) -> WaitContext | None:
        """Lets the run give back its slot while the function waits for other jobs."""
        return self._run.context.waits

    @property
    def trace_id(self) -> str:
        return self._run.record.trace_id

    @property
    def traceparent(self) -> str:
        """W3C trace context of the stage: what calls to other systems send as `traceparent`."""
        return str(part_span(self.request, self.stage))

    @property
    def pipeline(self) -> str:
        return self._run.pipeline.name

    @property
    def config(self) -> Any:
        """The job's config, as its type."""
        return self._run.config

    def cancelled(self) -> bool:
        return self.cancel.requested

    def check(self) -> None:
        """Raise `penstock.Cancelled` if the function should end."""
        self.cancel.raise_if_requested()

    def now(self) -> float:
        return self._run.clock.now()

    def remaining(self) -> float:
        """Seconds until its time is up; infinite where it has no timeout."""
        if self._until is None:
            return math.inf
        return self._until - self._run.clock.monotonic()

    def start_clock(self, timeout: float) -> None:
        """Its time counts from now: it waited for a thread, or a process, before."""
        self._until = self._run.clock.monotonic() + timeout

    def progress(self, fraction: float | None = None, message: str = "") -> None:
        known = None if fraction is None or not math.isfinite(fraction) else float(fraction)
        self._run.on_progress(self.stage, known, bounded(str(message), _MAX_MESSAGE))

    def log(self, text: str, level: str = "info") -> None:
        self._run.context.log(text, level=level)

    def metric(self, name: str, value: Metric = 1, *, set: bool = False) -> None:
        """Add to a metric of the stage, or set it."""
        with self._run.lock:
            report_metric(self._reported(), name, value, set)

    def error(self, text: str) -> None:
        """Report an error without failing: the stage ends partial."""
        with self._run.lock:
            errors = self._reported().errors
            if len(errors) < _MOST_ERRORS:
                errors.append(bounded(str(text), _LONGEST_ERROR))

    def emit(self, data: dict[str, Any]) -> None:
        """Write an event of one's own into the run's history. It must be JSON, and small."""
        encoded = encode(data)
        if len(encoded) > _MAX_EMIT:
            raise ValueError(f"an event may have {_MAX_EMIT} bytes of JSON, has {len(encoded)}")
        self._run.portal.post(self._run.on_emit, self.stage, self.key, encoded)

    def resource(self, name: str) -> Any:
        """What the pipeline declared under this name; one for all items of a job."""
        return self._run.resources.get(name)

    def results(self, stage: str) -> Results[Any]:
        """The outputs of a stage that has ended. NotFound."""
        return self._results(stage, self._run.portal)

    def recall(self, name: str) -> Any:
        """What an earlier run of this pipeline and tenant remembered, or None."""
        return self._run.portal.call(self._recall(name))

    def remember(self, name: str, value: Any) -> Any:
        """Keep a value, as JSON, for later runs of this pipeline and tenant."""
        return self._run.portal.call(self._remember(name, value))

    def _results(self, stage: str, portal: Portal | None) -> Results[Any]:
        counts = self._run.output_counts
        if stage not in counts:
            ended = ", ".join(counts) or "none"
            raise NotFound(f"no stage {stage!r} has ended", hint=f"these have: {ended}")
        return Results(self._run.reader, stage, counts[stage], portal=portal)

    async def _recall(self, name: str) -> Any:
        data = await self._run.shared.read(self._memory_name(name))
        return None if data is None else msgspec.json.decode(data)

    async def _remember(self, name: str, value: Any) -> None:
        await self._run.shared.write(self._memory_name(name), encode(value))

    def _memory_name(self, name: str) -> str:
        return memory_name(self._run.record.tenant, self.pipeline, name)

    def _reported(self) -> ItemReport:
        if self._report is None:
            self._report = ItemReport({}, {}, [])
        return self._report


class AsyncStageContext(StageContext):
    """Given to async functions: what waits is awaited."""

    __slots__ = ()

    def results(self, stage: str) -> Results[Any]:
        return self._results(stage, None)

    async def recall(self, name: str) -> Any:
        return await self._recall(name)

    async def remember(self, name: str, value: Any) -> None:
        await self._remember(name, value)


def report_of(ctx: StageContext) -> ItemReport | None:
    """What was reported through it, to be kept with the item."""
    return ctx._report
