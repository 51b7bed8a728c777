"""The parts of one engine, made from its settings and handed to each other."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from penstock import __version__
from penstock.adapters.files.blobs import FileBlobs
from penstock.adapters.files.starts import FileStarts
from penstock.adapters.memory.bus import MemoryBus
from penstock.api.openai.dialect import OpenAiDialect
from penstock.config import Settings, UnknownTopics
from penstock.control.approvals import ApprovalBox
from penstock.control.batch_surroundings import Surroundings
from penstock.control.batches import BatchKeeper, Uploading
from penstock.control.board import Board
from penstock.control.desk import EngineDesk, Services
from penstock.control.feed import Feed
from penstock.control.gateway import Gateway
from penstock.control.journal import JournalHub
from penstock.control.keys import KeyRing
from penstock.control.limit_book import LimitKeeper
from penstock.control.limits import Limits
from penstock.control.pipelines import Normalise, OnEnd, PipelineKeeper
from penstock.control.policy_desk import PolicyDesk
from penstock.control.pools import PoolKeeper
from penstock.control.pruner import Pruner
from penstock.control.reconciler import Reconciler
from penstock.control.roster import Pool, Roster
from penstock.control.rulebook import Rulebook
from penstock.control.safety import SafetyKernel
from penstock.control.scheduler import Scheduler
from penstock.control.schedules import ScheduleKeeper
from penstock.core.caller import OWNER
from penstock.core.ids import IdSource
from penstock.core.llm import MODEL_TOPICS
from penstock.ports.batches import Shelf
from penstock.ports.clock import Clock
from penstock.ports.desk import EngineStatus
from penstock.ports.pipelines import PipelineStore
from penstock.ports.store import Store

CheckInput = Callable[[str, bytes], None]


@dataclass(frozen=True)
class Parts:
    """Whatever runs, listens or is asked."""

    blobs: FileBlobs
    bus: MemoryBus
    board: Board
    feed: Feed
    hub: JournalHub
    starts: FileStarts
    scheduler: Scheduler
    reconciler: Reconciler
    pruner: Pruner
    kernel: SafetyKernel
    rulebook: Rulebook
    schedules: ScheduleKeeper
    limits: LimitKeeper
    pools: PoolKeeper
    keys: KeyRing
    pipelines: PipelineKeeper
    batches: BatchKeeper
    desk: EngineDesk


def assemble(
    settings: Settings,
    store: Store,
    runs: PipelineStore,
    shelf: Shelf,
    kernel: SafetyKernel,
    rulebook: Rulebook,
    clock: Clock,
    token: str,
    check_input: CheckInput,
    normalise: Normalise,
    on_end: OnEnd,
) -> Parts:
    """Make them, and let them hear of every commit. Nothing runs yet."""
    ids = IdSource()
    limits = _limits(settings)
    blobs = FileBlobs(
        settings.blobs,
        inline_limit=settings.inline_limit,
        max_size=max(settings.max_input, settings.max_result),
        sources=settings.allowed_sources,
    )
    bus = MemoryBus()
    pools = {
        name: Pool(name, pool.topics, pool.capacity, pool.labels)
        for name, pool in settings.pools.items()
    }
    board = Board(Roster(pools), clock.now)
    feed, hub = Feed(store, board.held.__contains__), JournalHub(store, clock)
    for listener in (board.observe, feed.hear, hub.hear):
        store.listen(listener)
    starts = FileStarts(settings.starts)
    scheduler = Scheduler(store, bus, board, kernel, clock, limits, starts=starts, ids=ids)
    rulebook.on_change = scheduler.rejudge
    reconciler = Reconciler(
        store,
        bus,
        board,
        clock,
        limits,
        nudge=scheduler.nudge,
        has_word_from=scheduler.has_word_from,
        has_word_of=scheduler.has_word_of,
        starts=starts,
        ids=ids,
    )
    gateway = Gateway(
        store,
        blobs,
        board,
        clock,
        check_input=check_input,
        refuse_unknown=settings.unknown_topics is UnknownTopics.REFUSE,
        max_input=settings.max_input,
        max_waiting=settings.max_waiting,
        ids=ids,
    )
    pipelines = PipelineKeeper(
        runs, store, gateway, blobs, clock, normalise=normalise, on_end=on_end, ids=ids
    )
    store.listen(pipelines.hear)
    uploading = Uploading(settings.max_file, clock)
    batches = BatchKeeper(_surroundings(settings, shelf, blobs, gateway, clock), uploading, ids=ids)
    store.listen(batches.hear)
    schedules = ScheduleKeeper(store, partial(gateway.submit, by=OWNER.principal), clock)
    pruner = Pruner(
        store,
        blobs,
        clock,
        retention=settings.retention or None,
        needed=schedules.pointers,
        awaited=board.awaited,
        runs=runs,
        batches=batches,
    )
    limit_keeper = LimitKeeper(store, board.limiter, clock)
    pool_keeper = PoolKeeper(store, board.roster, scheduler.nudge)
    keys = KeyRing(store, clock, token)
    services = Services(
        store=store,
        blobs=blobs,
        board=board,
        gateway=gateway,
        approvals=ApprovalBox(store, kernel, clock),
        feed=feed,
        hub=hub,
        pruner=pruner,
        kernel=kernel,
        rulebook=rulebook,
        policy=PolicyDesk(rulebook, kernel, store, clock),
        schedules=schedules,
        limits=limit_keeper,
        pools=pool_keeper,
        keys=keys,
        pipelines=pipelines,
        batches=batches,
        uploading=uploading,
        clock=clock,
        about=_about(settings, kernel, clock),
    )
    return Parts(
        blobs=blobs,
        bus=bus,
        board=board,
        feed=feed,
        hub=hub,
        starts=starts,
        scheduler=scheduler,
        reconciler=reconciler,
        pruner=pruner,
        kernel=kernel,
        rulebook=rulebook,
        schedules=schedules,
        limits=limit_keeper,
        pools=pool_keeper,
        keys=keys,
        pipelines=pipelines,
        batches=batches,
        desk=EngineDesk(services),
    )


def _surroundings(
    settings: Settings, shelf: Shelf, blobs: FileBlobs, gateway: Gateway, clock: Clock
) -> Surroundings:
    refuses = settings.unknown_topics is UnknownTopics.REFUSE
    return Surroundings(
        shelf=shelf,
        store=gateway.store,
        blobs=blobs,
        gateway=gateway,
        dialect=OpenAiDialect(partial(_topic_for, gateway.board)),
        clock=clock,
        knows=lambda topic: not refuses or gateway.board.knows(topic),
        room=settings.batch_jobs,
        longest=settings.max_input,
        grace=settings.lease,
    )


def _topic_for(board: Board, model: str) -> str:
    """Of the topics that are served now, or else were once: its workers may be away."""
    topics = [prefix + model for prefix in MODEL_TOPICS]
    now = {topic for worker in board.roster.workers.values() for topic in worker.topics}
    for served in (now, board.topics):
        for topic in topics:
            if topic in served:
                return topic
    return topics[0]


def _limits(settings: Settings) -> Limits:
    return Limits(
        timeout=settings.timeout,
        dispatch_timeout=settings.dispatch_timeout,
        lease=settings.lease,
        lost_grace=settings.lost_grace,
        kill_grace=settings.kill_grace,
        max_attempts=settings.max_attempts,
    )


def _about(settings: Settings, kernel: SafetyKernel, clock: Clock) -> EngineStatus:
    return EngineStatus(
        version=__version__,
        pid=os.getpid(),
        started_at=clock.now(),
        durability=settings.durability,
        data_dir=str(settings.data_dir),
        rules=kernel.rules.snapshot,
        tally={},
        waiting=0,
        held=0,
        workers=0,
        finished=0,
    )
