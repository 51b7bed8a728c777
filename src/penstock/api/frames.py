"""Server-sent events: how what happens is written down, once for all who read it.

The `id` of an event is where to resume after it. A frame with an id and no data tells how far
a reader is without giving it an event; browsers treat it so, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any
from weakref import ref

from msgspec import UNSET, Struct, UnsetType

from penstock.api.reply import encode
from penstock.core.journal import Transition
from penstock.lifecycles.canonical import JobEvent, JobState
from penstock.ports.engine_api import EventBatch
from penstock.ports.store import JournalEvent
from penstock.workloads.pipeline.records import PipelineEvent, PipelineEventKind


class EventData(Struct, frozen=True, gc=False):
    """One transition of one job."""

    job_id: str
    tenant: str
    topic: str
    n: int
    """Its number in the job's history."""
    before: JobState | None
    event: JobEvent
    after: JobState
    attempt: int
    actor: str
    at: float
    reason: str
    worker_id: str | None
    cursor: int | UnsetType = UNSET
    """Its place in the journal; not told in the stream of a single job."""


def frame_of(transition: Transition, tenant: str, topic: str, cursor: int | None = None) -> bytes:
    """An event of the journal, or, without a cursor, of one job."""
    data = EventData(
        transition.job_id,
        tenant,
        topic,
        transition.n,
        transition.before,
        transition.event,
        transition.after,
        transition.attempt,
        transition.actor,
        transition.at,
        transition.reason,
        transition.worker_id,
        UNSET if cursor is None else cursor,
    )
    place = transition.n if cursor is None else cursor
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (place, transition.event.encode(), encode(data))


def named(event: str, data: object, place: str = "") -> bytes:
    """Any other event."""
    at = f"id: {place}\n" if place else ""
    return b"%bevent: %b\ndata: %b\n\n" % (at.encode(), event.encode(), encode(data))


class RunEventData(Struct, frozen=True, gc=False):
    """Something that happened to a run."""

    id: int
    """Its number in the history of the run's job; progress has that of the event before it."""
    job_id: str
    at: float
    kind: PipelineEventKind
    data: dict[str, Any]
    """What belongs to its kind; for `custom`, what the stage gave."""


def run_frame(event: PipelineEvent) -> bytes:
    """Progress is not stored, so it has no id of its own to resume after."""
    data = RunEventData(event.id, event.job_id, event.at, event.kind, event.data)
    is_stored = event.kind is not PipelineEventKind.STAGE_PROGRESS
    return named(event.kind, data, str(event.id) if is_stored else "")


def opening(place: object, retry: float) -> bytes:
    """Where the stream begins, and after how many seconds to come back to it."""
    return b"retry: %d\nid: %b\n\n" % (round(retry * 1000), str(place).encode())


def heartbeat(place: object) -> bytes:
    return b": still here\nid: %b\n\n" % str(place).encode()


class EventFilter(Struct, frozen=True, kw_only=True):
    """Which events of the journal; all conditions must hold."""

    topic: str | None = None
    """A glob, as in `job.text.*`."""
    state: tuple[JobState, ...] = ()
    """Only moves into one of these."""
    event: tuple[JobEvent, ...] = ()
    job_id: str | None = None
    tenant: str | None = None

    @property
    def is_empty(self) -> bool:
        return self == _NO_FILTER

    def lets(self, event: JournalEvent) -> bool:
        transition = event.transition
        return (
            (self.job_id is None or transition.job_id == self.job_id)
            and (self.tenant is None or event.tenant == self.tenant)
            and (not self.state or transition.after in self.state)
            and (not self.event or transition.event in self.event)
            and (self.topic is None or fnmatchcase(event.topic, self.topic))
        )


_NO_FILTER = EventFilter()


class Written:
    """What was made of batches already, for as long as the batches are there."""

    def __init__(self) -> None:
        self._made: dict[int, _Made] = {}

    def __len__(self) -> int:
        return len(self._made)

    def whole(self, batch: EventBatch) -> bytes:
        made = self._of(batch)
        if made.whole is None:
            made.whole = self._write(batch.events)
        return made.whole

    def matching(self, batch: EventBatch, wanted: EventFilter) -> bytes:
        return self._write(event for event in batch.events if wanted.lets(event))

    def of_job(self, batch: EventBatch, job_id: str) -> list[JournalEvent]:
        made = self._of(batch)
        if made.by_job is None:
            by_job = defaultdict(list)
            for event in batch.events:
                by_job[event.transition.job_id].append(event)
            made.by_job = by_job
        return made.by_job.get(job_id, [])

    def _of(self, batch: EventBatch) -> _Made:
        # By identity: to compare two batches would cost more than to write one.
        key = id(batch)
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = _Made(ref(batch, lambda _: self._made.pop(key, None)))
        return made

    def _write(self, events: Iterable[JournalEvent]) -> bytes:
        return b"".join(
            [
                frame_of(event.transition, event.tenant, event.topic, event.cursor)
                for event in events
            ]
        )


class _Made:
    __slots__ = ("_batch", "by_job", "whole")

    def __init__(self, batch: ref[EventBatch]) -> None:
        self._batch = batch
        self.whole: bytes | None = None
        self.by_job: Mapping[str, list[JournalEvent]] | None = None
