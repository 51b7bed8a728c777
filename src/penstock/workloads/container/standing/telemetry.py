"""Figures of one container worker for Prometheus.

What happens is counted as it happens; what is the case is asked for at a scrape. Labels have
few values: nothing that a caller can name is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from penstock.lifecycles.container import ContainerJobState
from penstock.workloads.container.job import Code, ContainerRecord

_WAITS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5, 10, 60, 300, 1800, 7200)
_RUNS = (0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600, 14_400, 86_400)
"""Seconds; upper ends of the buckets."""
_CODES = frozenset(Code)
_SHARE = 0.2
"""How much the newest job counts in the usual run time."""


class Now(Struct, frozen=True, kw_only=True):
    """What is the case."""

    version: str
    engine: str
    started_at: float
    queued: int
    running: int
    slots: int
    engine_up: bool
    draining: bool
    disk_available_mb: int | None
    memory_mb_free: float
    cpus_free: float


class Telemetry:
    """Of one worker, in a registry of its own, so that there may be many in a process."""

    def __init__(self, now: Callable[[], Now]) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_Told(now))
        self._jobs = Counter(
            "penstock_container_jobs",
            "Jobs that ended, by state and error code.",
            ["state", "code"],
            registry=registry,
        )
        self._accepted = Counter(
            "penstock_container_jobs_accepted", "Jobs that were taken.", registry=registry
        )
        self._refused = Counter(
            "penstock_container_jobs_refused",
            "Submissions that were refused, by error code.",
            ["code"],
            registry=registry,
        )
        self._wait = Histogram(
            "penstock_container_queue_wait_seconds",
            "Seconds between a job's submission and its start.",
            buckets=_WAITS,
            registry=registry,
        )
        self._run = Histogram(
            "penstock_container_run_seconds",
            "Seconds between a job's start and its end.",
            buckets=_RUNS,
            registry=registry,
        )
        self._output = Counter(
            "penstock_container_output_bytes",
            "Bytes that containers wrote, kept or not.",
            ["stream"],
            registry=registry,
        )
        self.usual_run = 1.0
        """Seconds that jobs have taken lately."""

    def refused(self, code: str) -> None:
        self._refused.labels(code if code in _CODES else "other").inc()

    def hear(self, record: ContainerRecord) -> None:
        """After a change of its state is durable."""
        if record.state is ContainerJobState.QUEUED:
            self._accepted.inc()
        elif record.state is ContainerJobState.RUNNING:
            started_at = record.started_at or record.created_at
            self._wait.observe(max(0.0, started_at - record.created_at))
        elif record.is_final:
            self._hear_end(record)

    def _hear_end(self, record: ContainerRecord) -> None:
        code = record.error.code if record.error else ""
        self._jobs.labels(record.state.value, code if code in {"", *_CODES} else "other").inc()
        self._output.labels("stdout").inc(record.stdout.bytes)
        self._output.labels("stderr").inc(record.stderr.bytes)
        if record.started_at is not None and record.finished_at is not None:
            took = max(0.0, record.finished_at - record.started_at)
            self._run.observe(took)
            self.usual_run += _SHARE * (took - self.usual_run)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Told(Collector):
    def __init__(self, now: Callable[[], Now]) -> None:
        self._now = now

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        now = self._now()
        yield InfoMetricFamily(
            "penstock_container_worker",
            "The worker that answers.",
            {"version": now.version, "engine": now.engine},
        )
        figures: tuple[tuple[str, str, float | None], ...] = (
            ("start_time_seconds", "When the worker started.", now.started_at),
            ("queued", "Jobs that wait.", now.queued),
            ("running", "Jobs that run.", now.running),
            ("slots", "Jobs that may run at once.", now.slots),
            (
                "memory_free_bytes",
                "Memory that jobs can still ask for.",
                now.memory_mb_free * 2**20,
            ),
            ("cpus_free", "Processors that jobs can still ask for.", now.cpus_free),
            ("engine_up", "1 while the container engine answers.", float(now.engine_up)),
            ("draining", "1 while no new jobs are taken.", float(now.draining)),
            ("disk_free_bytes", "Free space where jobs have their files.", _bytes(now)),
        )
        for name, help, value in figures:
            if value is not None:
                yield GaugeMetricFamily(f"penstock_container_{name}", help, value)


def _bytes(now: Now) -> float | None:
    return None if now.disk_available_mb is None else now.disk_available_mb * 2.0**20
