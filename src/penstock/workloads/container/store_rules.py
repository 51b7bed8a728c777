"""What a change does to a container job's record: the rules that every `ContainerStore` asks.

Pure, so that stores in memory and in a file can't come to differ.
"""

from __future__ import annotations

from msgspec import UNSET
from msgspec.structs import replace

from penstock.core.errors import Conflict, NotFound, TooMany
from penstock.core.machine import Step
from penstock.lifecycles.container import CONTAINER, ContainerJobEvent
from penstock.workloads.container.job import ContainerRecord, End
from penstock.workloads.container.store import Change


def check_new(record: ContainerRecord) -> None:
    """Raises ValueError for a record that can't be a new one."""
    times = (record.started_at, record.finished_at)
    if record.state is not CONTAINER.initial or times != (None, None):
        raise ValueError(f"a new record is {CONTAINER.initial}, and nothing has happened to it")


def id_taken(job_id: str) -> Conflict:
    return Conflict(f"there is a job {job_id} already", hint="give the new one another job_id")


def key_taken(key: str, job_id: str) -> Conflict:
    return Conflict(f"the idempotency key {key} brought job {job_id}", hint="use a key once")


def queue_full(most_waiting: int) -> TooMany:
    return TooMany(
        f"{most_waiting} jobs wait already, and no more may",
        retry_after=1,
        hint="submit it again later, or raise max_queued_jobs",
    )


def missing(job_id: str) -> NotFound:
    return NotFound(f"no container job {job_id}")


def advance(record: ContainerRecord, change: Change) -> ContainerRecord:
    """The record after a change; the same object where nothing changes.

    Raises IllegalMove for what the table does not have, ValueError for an end without the event
    that brings it.
    """
    state = record.state
    if change.event is not None:
        state = CONTAINER.after(state, change.event)
        if CONTAINER.judge(record.state, change.event) is Step.REPEAT:
            return record
    ends = state in CONTAINER.final and state is not record.state
    if change.end is not None and not ends:
        raise ValueError(f"how job {change.job_id} ended comes with the event that ends it")
    starts = change.event is ContainerJobEvent.START
    after = replace(
        record if change.end is None else _ended(record, change.end),
        state=state,
        started_at=change.at if starts else record.started_at,
        finished_at=change.at if ends else record.finished_at,
        container=record.container if change.container is UNSET else change.container,
        engine=record.engine if change.engine is UNSET else change.engine,
    )
    return record if after == record else after


def _ended(record: ContainerRecord, end: End) -> ContainerRecord:
    return replace(
        record,
        exit_code=end.exit_code,
        error=end.error,
        usage=end.usage,
        stdout=end.stdout,
        stderr=end.stderr,
        artifacts=end.artifacts,
        skipped=end.skipped,
        image_id=end.image_id or record.image_id,
    )
