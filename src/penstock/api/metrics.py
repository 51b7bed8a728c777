"""Figures for Prometheus, read when they are asked for.

Requests are counted as they are answered; all else is asked of the EngineApi at the time of a
scrape. Labels have few values: a route is its template, never a path, and what a caller may
name freely (pools, limits and their keys) is cut off at a number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from msgspec import Struct
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from penstock.api.operation import Operation
from penstock.api.reply import NO_STORE, Reply
from penstock.core.errors import NotPermitted
from penstock.lifecycles.canonical import TERMINAL, JobState
from penstock.ports.engine_api import (
    Activity,
    EngineApi,
    EngineStatus,
    JobCounts,
    KeyRole,
    LimitView,
    PoolView,
    WorkerView,
)
from penstock.ports.executor import MODELS, PAUSED, TOKENS, USAGE

if TYPE_CHECKING:
    from penstock.api.call import Call

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Seconds; upper ends of the buckets of the histogram, but for the last."""
_ENDS = (*map(str, BOUNDS), "+Inf")
WAITS = (0.002, 0.008, 0.032, 0.128, 0.512, 2.048, 8.192, 32.768, 131.072, 524.288, 2097.152)
"""Seconds; upper ends of the buckets of waiting times, steps of the scale of `Activity.waits`."""
_MOST = 100
"""Maximum number of pools, limits, and keys per limit that are exported."""
_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class Traffic:
    """Counts and durations of requests."""

    def __init__(self) -> None:
        self.answers: Counter[tuple[str, str, int]] = Counter()
        """By method, route and status."""
        self.times: dict[tuple[str, str], Times] = {}
        """By method and route; without streams and waits."""

    def count(self, operation: Operation | None, status: int, seconds: float | None) -> None:
        if operation is None:
            self.answers["other", "none", status] += 1
            return
        route = operation.method, operation.path
        self.answers[*route, status] += 1
        if seconds is not None:
            times = self.times.get(route)
            if times is None:
                times = self.times[route] = Times()
            times.add(seconds)


class Times:
    """Histogram of durations."""

    __slots__ = ("buckets", "total")

    def __init__(self) -> None:
        self.buckets = [0] * len(_ENDS)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        self.buckets[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds


class Figures(Struct, frozen=True):
    """The values of one scrape."""

    status: EngineStatus
    workers: list[WorkerView]
    pools: list[PoolView]
    limits: list[LimitView]
    counts: JobCounts
    traffic: Traffic
    streams: int = 0
    events: int = 0

    @classmethod
    async def of(
        cls, api: EngineApi, traffic: Traffic, *, streams: int = 0, events: int = 0
    ) -> Figures:
        return cls(
            await api.status(),
            await api.workers(),
            await api.pools(),
            await api.limits.list(),
            await api.counts(),
            traffic,
            streams,
            events,
        )

    def text(self) -> bytes:
        registry = CollectorRegistry()
        registry.register(_MetricsCollector(self))
        return generate_latest(registry)


class _MetricsCollector(Collector):
    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        figures = self._figures
        yield from _engine(figures.status)
        yield from _topics(figures.counts)
        yield from _fleet(figures.workers, figures.pools)
        yield from _limits(figures.limits)
        yield from _traffic(figures)


def _engine(status: EngineStatus) -> Iterator[Metric]:
    yield InfoMetricFamily(
        "penstock_build",
        "The engine that answers.",
        {"version": status.version, "durability": status.durability.value},
    )
    yield InfoMetricFamily(
        "penstock_policy", "The snapshot of the rules in force.", {"snapshot": status.rules}
    )
    yield GaugeMetricFamily(
        "penstock_policy_problem",
        "1 while the rule file as it is can't be used, and the last good rules go on.",
        float(bool(status.policy_problem)),
    )
    yield GaugeMetricFamily(
        "penstock_start_time_seconds", "When the engine started.", status.started_at
    )
    help = "Jobs that are stored, by the state of their newest try."
    jobs = GaugeMetricFamily("penstock_jobs", help, labels=["state"])
    for state in JobState:
        jobs.add_metric([state.value], status.tally.get(state, 0))
    yield jobs
    for name, help, value in (
        ("retried", "Tries that are stored and were retried since.", status.retried),
        ("waiting", "Jobs that wait for a worker, for their time or for others.", status.waiting),
        ("awaiting_approval", "Jobs that are awaiting approval.", status.awaiting_approval),
        ("held", "Jobs that workers have.", status.held),
    ):
        yield GaugeMetricFamily(f"penstock_jobs_{name}", help, value)
    yield from _activity(status.activity)


def _activity(activity: Activity) -> Iterator[Metric]:
    for name, help, value in (
        ("submitted", "Jobs submitted since the engine started, without retries.", "submitted"),
        ("started", "Attempts that were the first of their job to start.", "started"),
        ("retries", "Tries that did not succeed and were retried.", "retried"),
    ):
        yield CounterMetricFamily(f"penstock_jobs_{name}", help, getattr(activity, value))
    ended = CounterMetricFamily(
        "penstock_jobs_ended", "Jobs that ended, by their final state.", labels=["state"]
    )
    for state in JobState:
        if state in TERMINAL:
            ended.add_metric([state.value], activity.ended.get(state, 0))
    yield ended
    failures = CounterMetricFamily(
        "penstock_job_failures", "Tries that did not succeed, by error code.", labels=["code"]
    )
    for code, number in sorted(activity.failures.items()):
        failures.add_metric([code], number)
    yield failures
    counts = [0] * (len(WAITS) + 1)
    for wait in activity.waits:
        counts[bisect_left(WAITS, wait.seconds)] += wait.count
    ends = (*map(str, WAITS), "+Inf")
    waits = HistogramMetricFamily(
        "penstock_job_wait_seconds", "How long jobs had waited when they started."
    )
    waits.add_metric(
        [], list(zip(ends, accumulate(map(float, counts)), strict=True)), activity.waited
    )
    yield waits


def _topics(counts: JobCounts) -> Iterator[Metric]:
    jobs = GaugeMetricFamily(
        "penstock_topic_jobs", "Unfinished jobs, by topic and state.", labels=["topic", "state"]
    )
    busiest = sorted(counts.topics.items(), key=lambda one: (-sum(one[1].values()), one[0]))
    for topic, states in busiest[:_MOST]:
        for state, number in states.items():
            jobs.add_metric([topic, state.value], number)
    yield jobs


def _fleet(workers: list[WorkerView], pools: list[PoolView]) -> Iterator[Metric]:
    pools = sorted(pools, key=lambda pool: pool.name)[:_MOST]
    told = {pool.name for pool in pools}
    count = GaugeMetricFamily(
        "penstock_workers", "Workers, by pool and status.", labels=["pool", "status"]
    )
    found = Counter((w.pool, w.status) for w in workers if w.pool in told)
    for labels, number in sorted(found.items()):
        count.add_metric(labels, number)
    yield count
    slots = GaugeMetricFamily(
        "penstock_pool_slots", "Jobs that a pool's workers can run at once.", labels=["pool"]
    )
    held = GaugeMetricFamily("penstock_pool_held", "Jobs that a pool has.", labels=["pool"])
    paused = GaugeMetricFamily(
        "penstock_pool_paused", "1 while a pool is given nothing new.", labels=["pool"]
    )
    for pool in pools:
        slots.add_metric([pool.name], sum(w.slots for w in workers if w.pool == pool.name))
        held.add_metric([pool.name], pool.held)
        paused.add_metric([pool.name], float(pool.paused))
    yield from (slots, held, paused)
    topics = GaugeMetricFamily(
        "penstock_topic_paused",
        "Workers that serve a topic but can't run it at present: their engine is unavailable.",
        labels=["topic"],
    )
    unable = Counter(topic for w in workers for topic in w.facts.get(PAUSED, ()))
    for topic, number in sorted(unable.items())[:_MOST]:
        topics.add_metric([topic], number)
    yield topics
    models = GaugeMetricFamily(
        "penstock_model_engines",
        "Engines of a language model, by state: loading, ready, ill or gone (not in memory).",
        labels=["topic", "state"],
    )
    states = Counter(
        (topic, str(facts["state"]))
        for w in workers
        for topic, facts in w.facts.get(MODELS, {}).items()
        if "state" in facts
    )
    for labels, number in sorted(states.items())[:_MOST]:
        models.add_metric(labels, number)
    yield models
    yield from _tokens(workers)
    yield from _used(workers)


def _tokens(workers: list[WorkerView]) -> Iterator[Metric]:
    family = CounterMetricFamily(
        "penstock_model_tokens",
        "Tokens of a language model since its workers started: prompt (read, without those that "
        "were cached) or completion (generated).",
        labels=["topic", "kind"],
    )
    counts: Counter[tuple[str, str]] = Counter()
    for worker in workers:
        for topic, kinds in worker.facts.get(TOKENS, {}).items():
            for kind, number in kinds.items():
                counts[topic, kind] += number
    for labels, number in sorted(counts.items())[:_MOST]:
        family.add_metric(labels, number)
    yield family


def _used(workers: list[WorkerView]) -> Iterator[Metric]:
    """Sums by worker: jobs as labels would have no bound."""
    memory = GaugeMetricFamily(
        "penstock_container_memory_bytes",
        "Peak memory of the containers that run now, added up.",
        labels=["worker"],
    )
    running = GaugeMetricFamily("penstock_containers", "Containers that run.", labels=["worker"])
    for worker in workers[:_MOST]:
        if (used := worker.facts.get(USAGE)) is not None:
            peaks = (one.get("peak_memory_bytes") or 0 for one in used.values())
            memory.add_metric([worker.worker_id], sum(peaks))
            running.add_metric([worker.worker_id], len(used))
    yield memory
    yield running


def _limits(limits: list[LimitView]) -> Iterator[Metric]:
    labels = ["limit", "key"]
    running = GaugeMetricFamily(
        "penstock_limit_running", "Jobs with workers that a limit counts.", labels=labels
    )
    waiting = GaugeMetricFamily(
        "penstock_limit_waiting", "Waiting jobs that a limit counts.", labels=labels
    )
    for view in sorted(limits, key=lambda view: view.limit.name)[:_MOST]:
        for use in view.uses[:_MOST]:
            which = [view.limit.name, ",".join(use.key)]
            running.add_metric(which, use.running)
            waiting.add_metric(which, use.waiting)
    yield from (running, waiting)


def _traffic(figures: Figures) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "penstock_event_streams", "Streams of events that are open.", figures.streams
    )
    yield CounterMetricFamily(
        "penstock_events_sent", "Events sent to readers of streams.", figures.events
    )
    answers = CounterMetricFamily(
        "penstock_http_requests", "Requests answered.", labels=["method", "route", "status"]
    )
    for (method, route, status), number in sorted(figures.traffic.answers.items()):
        answers.add_metric([method, route, str(status)], number)
    yield answers
    times = HistogramMetricFamily(
        "penstock_http_request_duration_seconds",
        "How long requests took that neither wait nor stream.",
        labels=["method", "route"],
    )
    for labels, taken in sorted(figures.traffic.times.items()):
        buckets = list(zip(_ENDS, accumulate(map(float, taken.buckets)), strict=True))
        times.add_metric(labels, buckets, taken.total)
    yield times


async def metrics(call: Call) -> Reply:
    if call.caller.tenant is not None:
        raise NotPermitted("metrics cover all tenants", hint="use a key that has no tenant")
    events = call.services.events
    figures = await Figures.of(
        call.api, call.services.traffic, streams=events.open, events=events.told
    )
    return Reply(figures.text(), headers=((b"content-type", _TYPE), NO_STORE))


OPERATIONS = (
    Operation(
        "GET",
        "/metrics",
        metrics,
        role=KeyRole.OPERATE,
        all_tenants=True,
        answer=str,
        answer_type="text/plain",
        summary="Figures for Prometheus",
    ),
)
