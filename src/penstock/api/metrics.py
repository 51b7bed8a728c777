"""Figures for Prometheus, read when they are asked for.

Requests are counted as they are answered; all else is asked of the EngineApi at the time of a
scrape. Labels have few values: a route is its template, never a path, and what a caller may
name freely (pools, limits and their keys) is cut off at a number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

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

from penstock.api.operation import Operation, route
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
from penstock.ports.executor import MODELS, PAUSED, RUNS, TOKENS, USAGE
from penstock.workloads.pipes.status import status_of

if TYPE_CHECKING:
    from penstock.api.call import Call

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Seconds; upper ends of the buckets of the histogram, but for the last."""
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
        self.buckets = [0] * (len(BOUNDS) + 1)
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
        yield from _runs(figures.workers)
        yield from _nodes(figures.workers)
        yield from _limits(figures.limits)
        yield from _traffic(figures)


Sample = tuple[Iterable[str], float]
"""Values of labels, and of the metric."""


def _family(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    help: str,
    labels: Sequence[str],
    samples: Iterable[Sample],
) -> Metric:
    family = kind(f"penstock_{name}", help, labels=labels)
    for values, number in samples:
        family.add_metric(list(values), number)
    return family


_gauge, _counter = partial(_family, GaugeMetricFamily), partial(_family, CounterMetricFamily)


def _histogram(
    name: str,
    help: str,
    bounds: Sequence[float],
    samples: Iterable[tuple[Sequence[str], Sequence[int], float]],
    labels: Sequence[str] = (),
) -> Metric:
    """Of each sample: values of labels, counts by bucket, and the sum."""
    family = HistogramMetricFamily(f"penstock_{name}", help, labels=labels)
    ends = (*map(str, bounds), "+Inf")
    for values, counts, total in samples:
        buckets = list(zip(ends, accumulate(map(float, counts)), strict=True))
        family.add_metric(values, buckets, total)
    return family


def _engine(status: EngineStatus) -> Iterator[Metric]:
    build = {"version": status.version, "durability": status.durability.value}
    yield InfoMetricFamily("penstock_build", "The engine that answers.", build)
    rules = {"snapshot": status.rules}
    yield InfoMetricFamily("penstock_policy", "The snapshot of the rules in force.", rules)
    stored = "Jobs that are stored, by the state of their newest try."
    tally = (([state.value], status.tally.get(state, 0)) for state in JobState)
    yield _gauge("jobs", stored, ["state"], tally)
    problem = "1 while the rule file as it is can't be used, and the last good rules go on."
    for name, help, value in (
        ("policy_problem", problem, bool(status.policy_problem)),
        ("start_time_seconds", "When the engine started.", status.started_at),
        ("jobs_retried", "Tries that are stored and were retried since.", status.retried),
        (
            "jobs_waiting",
            "Jobs that wait for a worker, for their time or for others.",
            status.waiting,
        ),
        ("jobs_awaiting_approval", "Jobs that are awaiting approval.", status.awaiting_approval),
        ("jobs_held", "Jobs that workers have.", status.held),
    ):
        yield _gauge(name, help, [], [([], value)])
    yield from _activity(status.activity)


def _activity(activity: Activity) -> Iterator[Metric]:
    submitted = "Jobs submitted since the engine started, without retries."
    started = "Attempts that were the first of their job to start."
    yield _counter("jobs_submitted", submitted, [], [([], activity.submitted)])
    yield _counter("jobs_started", started, [], [([], activity.started)])
    retries = "Tries that did not succeed and were retried."
    yield _counter("jobs_retries", retries, [], [([], activity.retried)])
    ends = (([one.value], activity.ended.get(one, 0)) for one in JobState if one in TERMINAL)
    yield _counter("jobs_ended", "Jobs that ended, by their final state.", ["state"], ends)
    failures = (([code], number) for code, number in sorted(activity.failures.items()))
    help = "Tries that did not succeed, by error code."
    yield _counter("job_failures", help, ["code"], failures)
    counts = [0] * (len(WAITS) + 1)
    for wait in activity.waits:
        counts[bisect_left(WAITS, wait.seconds)] += wait.count
    help = "How long jobs had waited when they started."
    yield _histogram("job_wait_seconds", help, WAITS, [([], counts, activity.waited)])


def _topics(counts: JobCounts) -> Iterator[Metric]:
    busiest = sorted(counts.topics.items(), key=lambda one: (-sum(one[1].values()), one[0]))
    jobs = (
        ([topic, state.value], number)
        for topic, states in busiest[:_MOST]
        for state, number in states.items()
    )
    yield _gauge("topic_jobs", "Unfinished jobs, by topic and state.", ["topic", "state"], jobs)


def _fleet(workers: list[WorkerView], pools: list[PoolView]) -> Iterator[Metric]:
    pools = sorted(pools, key=lambda pool: pool.name)[:_MOST]
    told = {pool.name for pool in pools}
    found = Counter((w.pool, w.status) for w in workers if w.pool in told)
    help = "Workers, by pool and status."
    yield _gauge("workers", help, ["pool", "status"], sorted(found.items()))
    slots = Counter[str]()
    for worker in workers:
        slots[worker.pool] += worker.slots
    for name, help, value in (
        ("slots", "Jobs that a pool's workers can run at once.", lambda one: slots[one.name]),
        ("held", "Jobs that a pool has.", lambda one: one.held),
        ("paused", "1 while a pool is given nothing new.", lambda one: one.paused),
    ):
        yield _gauge(f"pool_{name}", help, ["pool"], [([one.name], value(one)) for one in pools])
    unable = Counter((topic,) for w in workers for topic in w.facts.get(PAUSED, ()))
    help = "Workers that serve a topic but can't run it at present: their engine is unavailable."
    yield _gauge("topic_paused", help, ["topic"], _some(unable))
    states = Counter(
        (topic, str(facts["state"]))
        for w in workers
        for topic, facts in w.facts.get(MODELS, {}).items()
        if "state" in facts
    )
    help = "Engines of a language model, by state: loading, ready, ill or gone (not in memory)."
    yield _gauge("model_engines", help, ["topic", "state"], _some(states))
    tokens: Counter[tuple[str, ...]] = Counter()
    for worker in workers:
        for topic, kinds in worker.facts.get(TOKENS, {}).items():
            for kind, number in kinds.items():
                tokens[topic, kind] += number
    help = (
        "Tokens of a language model since its workers started: prompt (read, without those that "
        "were cached) or completion (generated)."
    )
    yield _counter("model_tokens", help, ["topic", "kind"], _some(tokens))
    first: Counter[tuple[str, ...]] = Counter()
    for worker in workers:
        for topic, facts in worker.facts.get(MODELS, {}).items():
            if (told := facts.get("first_token_ms")) is not None:
                first[topic,] = max(first[topic,], told / 1000)
    help = (
        "Time to the first token, without waiting: the median of a worker's last 20 answers; of "
        "several workers the longest."
    )
    yield _gauge("model_first_token_seconds", help, ["topic"], _some(first))
    # Sums by worker: jobs as labels would have no bound.
    used = {w.worker_id: w.facts[USAGE].values() for w in workers[:_MOST] if USAGE in w.facts}
    peaks = [
        ([name], sum(one.get("peak_memory_bytes") or 0 for one in of)) for name, of in used.items()
    ]
    help = "Peak memory of the containers that run now, added up."
    yield _gauge("container_memory_bytes", help, ["worker"], peaks)
    running = [([name], len(of)) for name, of in used.items()]
    yield _gauge("containers", "Containers that run.", ["worker"], running)


def _runs(workers: list[WorkerView]) -> Iterator[Metric]:
    about = "that ended since the workers started"
    for kind, label, help in (
        ("runs", "status", f"Runs of a pipeline {about}, by status."),
        ("items", "outcome", f"Items of pipeline runs {about}: ok, failed or skipped."),
    ):
        counts: Counter[tuple[str, ...]] = Counter()
        for worker in workers:
            for pipeline, ended in worker.facts.get(RUNS, {}).items():
                counts.update({(pipeline, name): n for name, n in ended[kind].items()})
        yield _counter(f"pipeline_{kind}", help, ["pipeline", label], _some(counts))


def _nodes(workers: list[WorkerView]) -> Iterator[Metric]:
    """Of models that are split over nodes."""
    view = status_of(workers)
    help = "1 while nodes hold every layer of a split model, and its jobs can begin."
    complete = [([pipe.model], float(pipe.complete)) for pipe in view.pipes[:_MOST]]
    yield _gauge("pipe_complete", help, ["model"], complete)
    states = Counter((node.state,) for node in view.nodes)
    yield _gauge("nodes", "Nodes, by state.", ["state"], _some(states))
    for name, help, field in (
        ("jobs", "Jobs that are on a node.", "jobs"),
        ("tokens_per_second", "Tokens that a node computes a second.", "tokens_per_s"),
        ("busy_ratio", "Share of the time in which a node computes, 0 to 1.", "busy"),
        ("cache_used_bytes", "Memory of a node's KV cache that is in use.", "cache_used"),
        ("cache_size_bytes", "Memory that a node has for its KV cache.", "cache_total"),
    ):
        figures = [([node.node_id], getattr(node, field)) for node in view.nodes[:_MOST]]
        yield _gauge(f"node_{name}", help, ["node"], figures)


def _some(counts: Counter[Any]) -> Sequence[Sample]:
    return sorted(counts.items())[:_MOST]


def _limits(limits: list[LimitView]) -> Iterator[Metric]:
    uses = [
        ([view.limit.name, ",".join(use.key)], use)
        for view in sorted(limits, key=lambda view: view.limit.name)[:_MOST]
        for use in view.uses[:_MOST]
    ]
    for name, help in (
        ("running", "Jobs with workers that a limit counts."),
        ("waiting", "Waiting jobs that a limit counts."),
    ):
        samples = [(labels, getattr(use, name)) for labels, use in uses]
        yield _gauge(f"limit_{name}", help, ["limit", "key"], samples)


def _traffic(figures: Figures) -> Iterator[Metric]:
    open_now, sent = "Streams of events that are open.", "Events sent to readers of streams."
    yield _gauge("event_streams", open_now, [], [([], figures.streams)])
    yield _counter("events_sent", sent, [], [([], figures.events)])
    answers = (
        ([method, route, str(status)], number)
        for (method, route, status), number in sorted(figures.traffic.answers.items())
    )
    labels = ["method", "route", "status"]
    yield _counter("http_requests", "Requests answered.", labels, answers)
    times = ((of, one.buckets, one.total) for of, one in sorted(figures.traffic.times.items()))
    help = "How long requests took that neither wait nor stream."
    yield _histogram("http_request_duration_seconds", help, BOUNDS, times, labels[:2])


@route(
    "GET /metrics",
    role=KeyRole.OPERATE,
    all_tenants=True,
    answer=str,
    answer_type="text/plain",
)
async def metrics(call: Call) -> Reply:
    """Figures for Prometheus."""
    if call.caller.tenant is not None:
        raise NotPermitted("metrics cover all tenants", hint="use a key that has no tenant")
    events = call.services.events
    figures = await Figures.of(
        call.api, call.services.traffic, streams=events.open, events=events.told
    )
    return Reply(figures.text(), headers=((b"content-type", _TYPE), NO_STORE))
