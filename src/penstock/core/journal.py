"""The journal: pages of strides, how they are encoded, and what they say of a job.

A *stride* is one move that one or many jobs made in one commit: the same events, actor, time
and worker. A commit appends its strides as one page (a very large one as several). Pages are
numbered in commit order and never change. A job's record lists the pages that it is in, so
its history is found without an index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from penstock.core.job import Job
from penstock.core.transition import GIVES, Path, Transition, plan_of
from penstock.lifecycles.canonical import CANONICAL, JobEvent, JobState

EVENT_BITS = 16
"""A cursor is a page number and, in its last bits, the place of an event in the page."""
PAGE_EVENTS = 4000
"""Events after which a commit begins another page."""


def cursor_of(page: int, index: int) -> int:
    """The cursor of event `index` (from 1 on) of a page."""
    return page << EVENT_BITS | index


def page_of(cursor: int) -> int:
    return cursor >> EVENT_BITS


class Stride(Struct, frozen=True, gc=False):
    """One move that many jobs made together. `jobs` are their records after it."""

    path: Path
    actor: str
    at: float
    reason: str
    worker_id: str | None
    """Set where the move gives the jobs to a worker."""
    pool: str | None
    jobs: list[Job]

    def transitions(self, job: Job) -> tuple[Transition, ...]:
        """The log entries of one of its jobs; the reason belongs to the last."""
        return spell_out(
            self.path.steps,
            job.request.job_id,
            job.version,
            job.attempt,
            self.actor,
            self.at,
            self.reason,
            self.worker_id,
        )


class Page(Struct, frozen=True, gc=False):
    number: int
    strides: list[Stride]


class LoggedStride(Struct, frozen=True, array_like=True):
    """A stride as the journal keeps it: jobs by their `seq`."""

    before: JobState | None
    events: tuple[JobEvent, ...]
    actor: str
    at: float
    reason: str
    worker_id: str | None
    pool: str | None
    seqs: list[int]
    versions: list[int]
    attempts: list[int]

    def transitions(self, index: int, job_id: str) -> tuple[Transition, ...]:
        return spell_out(
            steps_of(self.before, self.events),
            job_id,
            self.versions[index],
            self.attempts[index],
            self.actor,
            self.at,
            self.reason,
            self.worker_id,
        )


@cache
def steps_of(
    before: JobState | None, events: tuple[JobEvent, ...]
) -> tuple[tuple[JobState | None, JobEvent, JobState], ...]:
    steps = []
    state = before
    for event in events:
        after = CANONICAL.initial if state is None else CANONICAL.after(state, event)
        steps.append((state, event, after))
        state = after
    return tuple(steps)


def encode_page(strides: Sequence[Stride]) -> bytes:
    return _encode(
        [
            (
                stride.path.before,
                [event for _, event, _ in stride.path.steps],
                stride.actor,
                stride.at,
                stride.reason,
                stride.worker_id,
                stride.pool,
                [job.seq for job in stride.jobs],
                [job.version for job in stride.jobs],
                [job.attempt for job in stride.jobs],
            )
            for stride in strides
        ]
    )


_encode = msgspec.msgpack.Encoder().encode
decode_page = msgspec.msgpack.Decoder(list[LoggedStride]).decode


def spell_out(
    steps: Sequence[tuple[JobState | None, JobEvent, JobState]],
    job_id: str,
    version: int,
    attempt: int,
    actor: str,
    at: float,
    reason: str,
    worker_id: str | None,
) -> tuple[Transition, ...]:
    """The steps of one job's move; `version` and `attempt` are those after the last."""
    attempt -= sum(event in GIVES for _, event, _ in steps)
    spelled = []
    for n, (before, event, after) in enumerate(steps, start=version - len(steps) + 1):
        given_to = None
        if event in GIVES:
            attempt += 1
            given_to = worker_id
        said = reason if n == version else ""
        spelled.append(
            Transition(job_id, n, before, event, after, attempt, actor, at, said, given_to)
        )
    return tuple(spelled)


def history_of(job: Job, pages: Sequence[tuple[int, Sequence[LoggedStride]]]) -> list[Transition]:
    """A job's transitions up to its version, from the pages that it lists."""
    found: list[Transition] = []
    for _, strides in pages:
        for stride in strides:
            for index, seq in enumerate(stride.seqs):
                if seq == job.seq and stride.versions[index] <= job.version:
                    found.extend(stride.transitions(index, job.job_id))
    return found


def replay(job: Job, page: int, stride: LoggedStride, index: int) -> Job:
    """The record after a stride that its row does not tell of yet.

    Only what the journal alone says: a move that brings a result, a verdict or a hold
    is written to the row in its own commit.
    """
    if stride.versions[index] <= job.version or stride.before is None:
        return job
    plan = plan_of(stride.before, stride.events, stride.actor.partition(":")[0])
    changed = replace(
        job,
        state=plan.after,
        version=stride.versions[index],
        updated_at=stride.at,
        pages=job.pages if job.pages[-1:] == (page,) else (*job.pages, page),
    )
    if plan.gives:
        changed = replace(
            changed,
            attempt=stride.attempts[index],
            worker_id=stride.worker_id,
            pool=stride.pool,
            dispatched_at=stride.at,
            started_at=stride.at if plan.restarts else None,
        )
    if plan.starts:
        changed = replace(changed, started_at=stride.at)
    if plan.asks:
        changed = replace(changed, cancel_requested=True)
    return changed


def catch_up(
    jobs: dict[int, Job], pages: Iterable[tuple[int, Sequence[LoggedStride]]]
) -> list[int]:
    """Bring records, by `seq`, up to date with these pages; answers which of them were behind."""
    behind: dict[int, None] = {}
    for page, strides in pages:
        for stride in strides:
            for index, seq in enumerate(stride.seqs):
                job = jobs.get(seq)
                if job is not None and (now := replay(job, page, stride, index)) is not job:
                    jobs[seq] = now
                    behind[seq] = None
    return list(behind)


def moves_of(
    page: int, strides: Sequence[LoggedStride], after: int
) -> Iterator[tuple[int, LoggedStride, int]]:
    """The moves of a page that end after a cursor: the cursor of the first event, the stride,
    and the place of the job in it."""
    cursor = cursor_of(page, 1)
    for stride in strides:
        length = len(stride.events)
        start = max(0, (after + 1 - cursor) // length)
        for index in range(start, len(stride.seqs)):
            yield cursor + index * length, stride, index
        cursor += len(stride.seqs) * length


def last_cursor(page: int, strides: Sequence[LoggedStride]) -> int:
    """The cursor of a page's last event."""
    return cursor_of(page, sum(len(stride.events) * len(stride.seqs) for stride in strides))
