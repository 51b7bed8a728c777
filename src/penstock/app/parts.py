"""The parts of one engine, made from its settings and handed to each other."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from penstock import __version__
from penstock.adapters.files.blobs import FileBlobs
from penstock.adapters.files.start_log import FileStartLogs
from penstock.api.openai.batch_format import OpenAiBatchFormat
from penstock.config import Settings, UnknownTopics
from penstock.control.checkpoints import CheckpointService
from penstock.control.engine_api import Services
from penstock.control.feed import Feed, JournalHub
from penstock.control.gateway import Gateway
from penstock.control.guard import KeyRegistry
from penstock.control.ledger import Ledger
from penstock.control.open_jobs import OpenJobs
from penstock.control.policy import Rulebook
from penstock.control.pruner import Pruner
from penstock.control.reconciler import Reconciler
from penstock.control.scheduler import Scheduler
from penstock.control.schedules import ScheduleRunner
from penstock.control.workers import Pool, Roster
from penstock.core.job import IdSource, Timeouts
from penstock.ports.blobs import Blobs
from penstock.ports.bus import MemoryBus
from penstock.ports.clock import Clock
from penstock.ports.engine_api import OWNER, EngineStatus
from penstock.ports.executor import Executor
from penstock.ports.shared_state import SharedState
from penstock.workloads.llm.batch_run import BatchDependencies
from penstock.workloads.llm.batch_service import BatchApi, BatchService, PendingUploads
from penstock.workloads.llm.batches import BatchStore
from penstock.workloads.llm.values import MODEL_TOPICS
from penstock.workloads.pipeline.executor import PipelineExecutor
from penstock.workloads.pipeline.records import TOPIC as PIPELINE_TOPICS
from penstock.workloads.pipeline.service import PipelineApi, PipelineService


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
    restores: Sequence[Callable[[], Awaitable[None]]]
    """What takes up what an earlier engine left, in this order."""


def assemble(
    settings: Settings,
    store: Ledger,
    shared: SharedState,
    batch_store: BatchStore,
    rulebook: Rulebook,
    clock: Clock,
    token: str,
    executors: Sequence[Executor],
    blobs: Blobs,
) -> Parts:
    """Make them, and let them hear of every commit. Nothing runs yet."""
    ids = IdSource()
    kernel, timeouts = rulebook.kernel, msgspec.convert(settings, Timeouts, from_attributes=True)
    bus = MemoryBus()
    pools = {
        name: Pool(name, pool.topics, pool.capacity, pool.labels)
        for name, pool in settings.pools.items()
    }
    open_jobs = OpenJobs(Roster(pools), clock.now)
    feed, hub = Feed(store, open_jobs.held.__contains__), JournalHub(store, clock)
    for listener in (open_jobs.observe, feed.hear, hub.hear):
        store.listen(listener)
    starts = FileStartLogs(settings.starts)
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
        store, bus, clock, max_rows=settings.max_steps, max_bytes=settings.max_step_bytes
    )
    gateway = Gateway(
        store,
        blobs,
        open_jobs,
        clock,
        checks={topic: one.check for one in executors for topic in one.topics},
        refuse_unknown=settings.unknown_topics is UnknownTopics.REFUSE,
        max_input=settings.max_input,
        max_waiting=settings.max_waiting,
        ids=ids,
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
    uploading = PendingUploads(settings.max_file, clock)
    batches = BatchService(
        _batch_dependencies(settings, batch_store, blobs, gateway, clock), uploading, ids=ids
    )
    store.listen(batches.hear, MODEL_TOPICS)
    schedules = ScheduleRunner(store, partial(gateway.submit, by=OWNER.principal), clock)
    pruner = Pruner(
        store,
        blobs,
        clock,
        retention=settings.retention or None,
        needed=schedules.pointers,
        awaited=open_jobs.awaited,
        records=(batches,),
    )
    keys = KeyRegistry(store, clock, token)
    return Parts(
        store=store,
        blobs=blobs,
        open_jobs=open_jobs,
        gateway=gateway,
        feed=feed,
        hub=hub,
        pruner=pruner,
        rulebook=rulebook,
        schedules=schedules,
        nudge=scheduler.nudge,
        keys=keys,
        pipelines=lambda guard: PipelineApi(pipelines, guard, feed),
        batches=lambda guard: BatchApi(batches, uploading, guard),
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
        },
        restores=(keys.load, schedules.restore, pipelines.restore, batches.restore),
    )


def open_blobs(settings: Settings) -> FileBlobs:
    return FileBlobs(
        settings.blobs,
        inline_limit=settings.inline_limit,
        max_size=max(settings.max_input, settings.max_result),
        max_artifact=settings.max_artifact,
        sources=settings.allowed_sources,
    )


def _batch_dependencies(
    settings: Settings, batch_store: BatchStore, blobs: Blobs, gateway: Gateway, clock: Clock
) -> BatchDependencies:
    refuses = settings.unknown_topics is UnknownTopics.REFUSE
    return BatchDependencies(
        batch_store=batch_store,
        store=gateway.store,
        blobs=blobs,
        gateway=gateway,
        batch_format=OpenAiBatchFormat(partial(_topic_for, gateway.open_jobs)),
        clock=clock,
        knows=lambda topic: not refuses or gateway.open_jobs.knows(topic),
        room=settings.batch_jobs,
        longest=settings.max_input,
        grace=settings.lease,
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
