"""The parts of one engine, made from its settings and handed to each other."""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from penstock import __version__
from penstock.adapters.files.blobs import FileBlobs
from penstock.adapters.files.start_log import FileStartLogs
from penstock.adapters.memory.store import MemoryBackend
from penstock.adapters.sqlite.database import WriterLock
from penstock.adapters.sqlite.store import SqliteBackend
from penstock.api.openai.batches import OpenAiBatchFormat
from penstock.config import Settings, UnknownTopics
from penstock.control.checkpoints import CheckpointService
from penstock.control.credentials import CredentialRegistry
from penstock.control.engine_api import Services
from penstock.control.feed import Feed, JournalHub
from penstock.control.gateway import Gateway
from penstock.control.guard import KeyRegistry
from penstock.control.home import HomeFollower
from penstock.control.inbox import InboxService
from penstock.control.ledger import Ledger
from penstock.control.open_jobs import OpenJobs
from penstock.control.policy import Rulebook
from penstock.control.pruner import Pruner
from penstock.control.reconciler import Reconciler
from penstock.control.scheduler import Scheduler
from penstock.control.schedules import ScheduleRunner
from penstock.control.statistics import Statistics
from penstock.control.stream import EventStream
from penstock.control.workers import Pool, Roster
from penstock.core.errors import Misconfigured
from penstock.core.job import IdSource, Job, Timeouts
from penstock.core.shards import Shard
from penstock.ports.blobs import Blobs
from penstock.ports.bus import MemoryBus
from penstock.ports.clock import Clock
from penstock.ports.engine_api import OWNER, EngineStatus
from penstock.ports.executor import Executor
from penstock.ports.shared_state import SharedState
from penstock.ports.store import Backend, Durability
from penstock.workloads.container.job import TOPIC as CONTAINERS
from penstock.workloads.container.protocol.body import pointers_in
from penstock.workloads.llm.batch_executor import BatchExecutor, BatchOptions
from penstock.workloads.llm.batch_service import BatchApi, BatchService
from penstock.workloads.llm.values import MODEL_TOPICS
from penstock.workloads.pipeline.executor import PipelineExecutor
from penstock.workloads.pipeline.records import TOPIC as PIPELINE_TOPICS
from penstock.workloads.pipeline.records import StageStatus, pipeline_of
from penstock.workloads.pipeline.service import PipelineApi, PipelineService

if TYPE_CHECKING:
    from penstock.adapters.otel.traces import TraceExporter


class Service(Protocol):
    async def run(self) -> None:
        """Until cancelled."""


@dataclass(frozen=True)
class Parts(Services):
    """Whatever runs, listens or is asked."""

    bus: MemoryBus
    starts: FileStartLogs
    scheduler: Scheduler
    reconciler: Reconciler
    running: Mapping[str, Service]
    restores: Sequence[Callable[[], Awaitable[object]]]
    """What takes up what an earlier engine left, in this order."""
    batch_executor: BatchExecutor


def assemble(
    settings: Settings,
    store: Ledger,
    shared: SharedState,
    rulebook: Rulebook,
    clock: Clock,
    token: str,
    executors: Sequence[Executor],
    blobs: Blobs,
    home: str,
) -> Parts:
    """Make them, and let them hear of every commit. Nothing runs yet. `home`: the database of
    shard 0, if that is another one."""
    ids = IdSource()
    kernel, timeouts = rulebook.kernel, timeouts_of(settings)
    bus = MemoryBus()
    pools = {
        name: Pool(name, pool.topics, pool.capacity, pool.labels)
        for name, pool in settings.pools.items()
    }
    open_jobs = OpenJobs(Roster(pools), clock.now)
    open_jobs.limiter.shards = store.shard.count
    feed, hub = Feed(store, open_jobs.held.__contains__), JournalHub(store, clock)
    statistics = Statistics(store, clock)
    for listener in (open_jobs.observe, feed.hear, hub.hear, statistics.hear):
        store.listen(listener)
    # Another engine of the same database could not read what workers began on this machine.
    starts = FileStartLogs(None if settings.store else settings.starts)
    scheduler = Scheduler(store, bus, open_jobs, kernel, clock, timeouts, starts=starts, ids=ids)
    rulebook.on_change = scheduler.rejudge
    reconciler = Reconciler(
        store,
        bus,
        open_jobs,
        clock,
        timeouts,
        nudge=scheduler.nudge,
        has_word_from=scheduler.has_word_from,
        has_word_of=scheduler.has_word_of,
        starts=starts,
        ids=ids,
    )
    checkpoints = CheckpointService(
        store,
        bus,
        clock,
        max_rows=settings.limits.max_checkpoint_rows,
        max_bytes=settings.limits.max_checkpoint_bytes,
    )
    batch_executor = BatchExecutor(_batch_options(settings, open_jobs, clock))
    checks = {topic: one.check for one in (*executors, batch_executor) for topic in one.topics}
    open_jobs.learn(batch_executor.topics, batch_executor.topic_defaults)
    gateway = Gateway(
        store,
        blobs,
        open_jobs,
        clock,
        checks=checks,
        refuse_unknown=settings.unknown_topics is UnknownTopics.REFUSE,
        max_input=settings.limits.max_input,
        max_waiting=settings.limits.max_waiting,
        ids=ids,
        traces=bool(settings.telemetry.otlp_endpoint),
    )
    pipelines = PipelineService(
        store,
        gateway,
        blobs,
        shared,
        clock,
        executors=[one for one in executors if isinstance(one, PipelineExecutor)],
        ids=ids,
    )
    store.listen(pipelines.hear, (PIPELINE_TOPICS,))
    batches = BatchService(
        gateway, shared, batch_executor, max_file=settings.openai.max_file, ids=ids
    )
    schedules = ScheduleRunner(store, partial(gateway.submit, by=OWNER.principal), clock)
    pruner = Pruner(
        store,
        blobs,
        clock,
        retention=settings.storage.retention or None,
        future=schedules.requests,
        awaited=open_jobs.awaited,
        named={CONTAINERS: pointers_in},
        records=(batches,),
    )
    inbox: dict[str, Service] = {}
    if settings.store:
        from penstock.adapters.postgres.inbox import PostgresInbox

        taken = PostgresInbox(home or settings.store, store.shard)
        inbox = {"inbox": InboxService(taken, gateway, blobs, clock)}
    traces: dict[str, Service] = {}
    if endpoint := settings.telemetry.otlp_endpoint:
        exporter = _trace_exporter(endpoint, store, pipelines)
        store.listen(exporter.hear)
        traces = {"traces": exporter}
    keys, credentials = KeyRegistry(store, clock, token), CredentialRegistry(store, clock)
    home_follower: dict[str, Service] = {}
    if home:
        follows = HomeFollower(store.home, keys, credentials, open_jobs, scheduler.nudge, clock)
        home_follower = {"home": follows}
    return Parts(
        store=store,
        blobs=blobs,
        open_jobs=open_jobs,
        gateway=gateway,
        feed=feed,
        hub=hub,
        stream=EventStream(store, hub, feed, open_jobs, clock),
        statistics=statistics,
        pruner=pruner,
        rulebook=rulebook,
        schedules=schedules,
        nudge=scheduler.nudge,
        keys=keys,
        credentials=credentials,
        pipelines=lambda guard: PipelineApi(pipelines, guard, feed),
        batches=lambda guard: BatchApi(batches, guard),
        clock=clock,
        about=_about(settings, kernel.rules.snapshot, clock),
        bus=bus,
        starts=starts,
        scheduler=scheduler,
        reconciler=reconciler,
        running={
            "scheduler": scheduler,
            "reconciler": reconciler,
            "checkpoints": checkpoints,
            "pruner": pruner,
            "rulebook": rulebook,
            "schedules": schedules,
            "pipelines": pipelines,
            "batches": batches,
            "statistics": statistics,
            **inbox,
            **traces,
            **home_follower,
        },
        restores=(
            keys.load,
            credentials.load,
            schedules.restore,
            pipelines.restore,
            statistics.restore,
        ),
        batch_executor=batch_executor,
    )


def open_backend(
    settings: Settings,
    lock: WriterLock | None = None,
    *,
    own: bool = True,
    patience: float | None = None,
    shard: Shard | None = None,
) -> Backend:
    """Where the jobs of these settings are kept. `lock` is the data directory's, if it is held;
    `patience` the seconds to wait for another engine of the same database to end."""
    if settings.store:
        from penstock.adapters.postgres.store import LEASE, PostgresBackend

        return PostgresBackend(
            settings.store,
            durability=settings.durability,
            max_log_lines=settings.limits.max_log_lines,
            patience=2 * LEASE if patience is None else patience,
            # Socket, token and start logs are in the data directory, which one engine may use.
            instance=_instance(settings.data_dir),
            lock=lock or (WriterLock(settings.lock_file) if own else None),
            shard=shard,
        )
    if settings.durability is Durability.MEMORY:
        return MemoryBackend()
    return SqliteBackend(
        settings.database,
        durability=settings.durability,
        max_log_lines=settings.limits.max_log_lines,
        lock=lock,
    )


def _instance(data_dir: Path) -> str:
    """A name for this very folder of this running machine, under whatever path."""
    found = os.stat(data_dir)
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = boot.read_text().strip() if boot.exists() else socket.gethostname()
    return f"{machine}:{found.st_dev}:{found.st_ino}"


def timeouts_of(settings: Settings) -> Timeouts:
    said = settings.timeouts
    return Timeouts(
        timeout=said.run,
        dispatch_timeout=said.dispatch,
        lease=said.lease,
        lost_grace=said.lost_grace,
        kill_grace=said.kill_grace,
        max_attempts=settings.limits.max_attempts,
    )


def open_blobs(settings: Settings) -> FileBlobs:
    return FileBlobs(
        settings.blobs,
        inline_limit=settings.storage.inline_limit,
        max_size=max(settings.limits.max_input, settings.limits.max_result),
        max_artifact=settings.limits.max_artifact,
        sources=settings.allowed_sources,
    )


def _batch_options(settings: Settings, open_jobs: OpenJobs, clock: Clock) -> BatchOptions:
    refuses = settings.unknown_topics is UnknownTopics.REFUSE
    return BatchOptions(
        batch_format=OpenAiBatchFormat(partial(_topic_for, open_jobs)),
        knows=lambda topic: not refuses or open_jobs.knows(topic),
        room=settings.openai.max_batch_jobs,
        longest=settings.limits.max_input,
        settled_at=clock.now() + settings.timeouts.lease,
    )


def _topic_for(open_jobs: OpenJobs, model: str) -> str:
    """Of the topics that are served now, or else were once: its workers may be away."""
    topics = [prefix + model for prefix in MODEL_TOPICS]
    now = {topic for worker in open_jobs.roster.workers.values() for topic in worker.topics}
    for served in (now, open_jobs.topics):
        for topic in topics:
            if topic in served:
                return topic
    return topics[0]


def _trace_exporter(endpoint: str, store: Ledger, pipelines: PipelineService) -> TraceExporter:
    try:
        from penstock.adapters.otel.traces import Part, TraceExporter, otlp_exporter
    except ImportError as error:
        raise Misconfigured(
            f"telemetry.otlp_endpoint is set, and {error.name} is not installed",
            hint="pip install 'penstock[otel]'",
        ) from None

    async def stages(job: Job) -> list[Part]:
        if pipeline_of(job.request.topic) is None:
            return []
        record = await pipelines.reader.record(job, config={})
        return [
            Part(
                stage.name,
                stage.started_at,
                stage.finished_at or job.finished_at or job.updated_at,
                "STAGE_FAILED" if stage.status is StageStatus.FAILED else "",
            )
            for stage in record.stages
            if stage.started_at is not None
        ]

    return TraceExporter(otlp_exporter(endpoint), __version__, store.history, stages)


def _about(settings: Settings, rules: str, clock: Clock) -> EngineStatus:
    return EngineStatus(
        version=__version__,
        pid=os.getpid(),
        started_at=clock.now(),
        durability=settings.durability,
        data_dir=str(settings.data_dir),
        rules=rules,
        tally={},
        waiting=0,
        held=0,
        workers=0,
        finished=0,
    )
