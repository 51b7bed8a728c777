"""Finds and repairs timeouts, lost workers and passed deadlines.

`findings` decides, as a pure function of the open jobs, two times and the time limits of held jobs;
`Reconciler` is the loop that acts on it. How long a job may be held is counted on the monotonic
clock, from when it was first seen here, so a change of the wall clock ends no running job. A
worker is lost when its lease expired, or when its connection dropped and it did not come back in
time. If the reconciler itself was delayed (a suspended laptop, a stalled disk), it extends the
leases and the time limits of held jobs by that delay.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from penstock.control.intake import Losses, cancellation, reattach_timeout
from penstock.control.ledger import Ledger
from penstock.control.open_jobs import OpenJobs
from penstock.control.store_retry import apply_storable
from penstock.control.workers import WorkerRecord
from penstock.core.errors import StoreFailed
from penstock.core.job import IdSource, Job, Timeouts, run_limit
from penstock.core.ledger import Answer, Change
from penstock.lifecycles.canonical import JobState, Role
from penstock.ports.bus import Bus, JobCancel, NoStartLogs, StartLogs, jobs_of
from penstock.ports.clock import Clock

log = logging.getLogger(__name__)

_RECONCILER = Role.RECONCILER.value
_LOST = "WORKER_LOST"
_SLACK = 2.0
"""Seconds beyond a limit that a worker gets to report the end itself."""


class Overdue(Struct, frozen=True):
    """A held job that is past a limit."""

    job: Job
    code: str
    why: str


class HeldUntil(Struct, frozen=True):
    """Until when a worker may hold a job, or a lost job may wait for a worker that can reattach to
    it, by the monotonic clock; and what is wrong after."""

    attempt: int
    state: JobState
    until: float
    code: str
    why: str
    reattaching: bool = False


class TooLate(Struct, frozen=True):
    """A waiting job whose deadline has passed."""

    seq: int


class Unwanted(Struct, frozen=True):
    """A job between two workers that a user wants ended."""

    job: Job
    why: str


class Unclaimed(Struct, frozen=True):
    """A lost job to whose work no worker could reattach in time."""

    job: Job
    why: str


class Lost(Struct, frozen=True):
    """A worker that is gone."""

    worker: WorkerRecord
    why: str


Finding = Overdue | TooLate | Unwanted | Unclaimed | Lost


def held_until(
    open_jobs: OpenJobs,
    timeouts: Timeouts,
    now: float,
    monotonic: float,
    known: Mapping[str, HeldUntil],
) -> dict[str, HeldUntil]:
    """The limit of each held job; it stands until the job starts or goes to another worker."""
    held = {}
    for job_id, job in open_jobs.held.items():
        limit = known.get(job_id)
        lost = job_id in open_jobs.reattaching
        if limit is None or (limit.attempt, limit.state) != (job.attempt, job.state):
            limit = _limit_of(job, timeouts, now, monotonic)
        if lost and not limit.reattaching:
            seconds = reattach_timeout(open_jobs, job) or 0.0
            limit = replace(
                limit, until=min(limit.until, monotonic + seconds), code=_LOST, reattaching=True
            )
        elif limit.reattaching and not lost:  # its worker was only away
            limit = _limit_of(job, timeouts, now, monotonic)
        held[job_id] = limit
    return held


def _limit_of(job: Job, timeouts: Timeouts, now: float, monotonic: float) -> HeldUntil:
    request, grace = job.request, timeouts.kill_grace + _SLACK
    if job.state is JobState.DISPATCHED:
        seconds = request.dispatch_timeout or timeouts.dispatch_timeout
        code = "NOT_STARTED"
        why = f"worker {job.worker_id} did not start it within {seconds:g} s"
    else:
        limit = run_limit(job, timeouts.timeout)
        seconds = limit + grace
        code, why = "TIMEOUT", f"it ran for more than {limit:g} s"
    if request.deadline is not None and request.deadline - now + grace <= seconds:
        seconds = request.deadline - now + grace
        code, why = "DEADLINE_EXCEEDED", "its deadline passed while it was running"
    return HeldUntil(job.attempt, job.state, monotonic + seconds, code, why)


def findings(
    open_jobs: OpenJobs,
    timeouts: Timeouts,
    now: float,
    monotonic: float,
    held: Mapping[str, HeldUntil],
) -> Iterator[Finding]:
    """Everything that is wrong at this moment. Pure."""
    for worker in open_jobs.roster.workers.values():
        if (why := _why_lost(worker, timeouts, monotonic)) is not None:
            yield Lost(worker, why)
    for job in open_jobs.held.values():
        if (why := open_jobs.orphaned.get(job.job_id)) is not None:
            if job.job_id in open_jobs.reattaching:
                limit = held.get(job.job_id)
                if limit is not None and limit.reattaching and monotonic > limit.until:
                    yield Unclaimed(job, why)
            elif job.cancel_requested:
                yield Unwanted(job, why)
        elif (limit := held.get(job.job_id)) is not None and monotonic > limit.until:
            yield Overdue(job, limit.code, limit.why)
    yield from map(TooLate, _too_late(open_jobs, now))


def _too_late(open_jobs: OpenJobs, now: float) -> Iterator[int]:
    for seq, deadline in open_jobs.deadlines.items():
        if deadline <= now and open_jobs.waits(seq):
            yield seq


def _why_lost(worker: WorkerRecord, timeouts: Timeouts, monotonic: float) -> str | None:
    if worker.local and worker.missing_since is None:
        return None
    if worker.missing_since is not None:
        if monotonic - worker.missing_since >= timeouts.lost_grace:
            return f"worker {worker.worker_id} lost its connection and did not come back"
    elif monotonic - worker.heard_at > timeouts.lease:
        return f"worker {worker.worker_id} was silent for more than {timeouts.lease:g} s"
    return None


class Reconciler:
    """A service: `run` until cancelled."""

    def __init__(
        self,
        store: Ledger,
        bus: Bus,
        open_jobs: OpenJobs,
        clock: Clock,
        timeouts: Timeouts,
        *,
        nudge: Callable[[], None] = lambda: None,
        has_word_from: Callable[[str], bool] = lambda worker_id: False,
        has_word_of: Callable[[str], bool] = lambda job_id: False,
        starts: StartLogs | None = None,
        ids: IdSource | None = None,
        chance: Callable[[], float] = random.random,
        interval: float = 0.5,
    ) -> None:
        self.store, self.bus, self.open_jobs, self.clock, self.timeouts = (
            store,
            bus,
            open_jobs,
            clock,
            timeouts,
        )
        self._nudge = nudge
        self._has_word_from, self._has_word_of = has_word_from, has_word_of
        self._losses = Losses(
            open_jobs, starts or NoStartLogs(), timeouts, ids or IdSource(), chance
        )
        self._interval = interval
        self._last = clock.monotonic()
        self._held_until: dict[str, HeldUntil] = {}

    async def run(self) -> None:
        self._last = self.clock.monotonic()
        while True:
            await self.clock.sleep(self._interval)
            try:
                await self.sweep()
            except StoreFailed as error:
                log.error("can't commit what should be mended: %s", error)

    async def sweep(self) -> None:
        """Look once, and mend what is found."""
        self._last, before = self.clock.monotonic(), self._last
        self._forgive(self._last - before - self._interval)
        # Read before anything is judged: a worker may come back while the store is slow.
        late = await self._read(list(_too_late(self.open_jobs, self.clock.now())))
        monotonic = self._last = self.clock.monotonic()
        now = self.clock.now()
        held = held_until(self.open_jobs, self.timeouts, now, monotonic, self._held_until)
        self._held_until = held
        changes: list[Change] = []
        found = [
            finding
            for finding in findings(self.open_jobs, self.timeouts, now, monotonic, held)
            if not self._may_be_outdated(finding)
        ]
        for finding in found:
            changes.extend(self._mend(finding, late, now))
        if changes:
            self._tell(await apply_storable(self.store.apply, changes))
        for finding in found:
            if isinstance(finding, Lost):
                self._forget(finding.worker)

    def _may_be_outdated(self, finding: Finding) -> bool:
        """While the disk refuses, what workers say waits: nothing is held against them."""
        match finding:
            case Lost(worker):
                return self._has_word_from(worker.worker_id)
            case Overdue(job):
                return self._has_word_of(job.job_id)
        return False

    def _forgive(self, overslept: float) -> None:
        if overslept > self._interval:
            for worker in self.open_jobs.roster.workers.values():
                worker.heard_at += overslept
                if worker.missing_since is not None:
                    worker.missing_since += overslept
            self._held_until = {
                job_id: replace(limit, until=limit.until + overslept)
                for job_id, limit in self._held_until.items()
            }

    async def _read(self, seqs: Sequence[int]) -> dict[int, Job]:
        return {job.seq: job for job in await self.store.fetch(seqs)} if seqs else {}

    def _mend(self, finding: Finding, late: Mapping[int, Job], now: float) -> Iterator[Change]:
        match finding:
            case Overdue(job, code, why):
                yield self._losses.expire(job, code, why, now)
            case TooLate(seq):
                if (waiting := late.get(seq)) is not None:
                    why = "its deadline passed before it ran"
                    yield cancellation(waiting, "DEADLINE_EXCEEDED", why, now)
            case Unwanted(job, why):
                yield cancellation(job, "CANCELLED", f"cancelled; {why}", now)
            case Unclaimed(job, why):
                seconds = reattach_timeout(self.open_jobs, job) or 0.0
                said = f"{why}; no worker could reattach to it within {seconds:g} s"
                if job.cancel_requested:
                    yield cancellation(job, "CANCELLED", f"cancelled; {said}", now)
                else:
                    yield from self._losses.give_up(job, said, now)
                self._nudge()
            case Lost(worker, why):
                yield from self._lose(worker, why, now)

    def _lose(self, worker: WorkerRecord, why: str, now: float) -> list[Change]:
        log.warning("%s; it held %d jobs", why, len(worker.held))
        changes: list[Change] = []
        for job_id, attempt in list(worker.held.items()):
            job = self.open_jobs.held.get(job_id)
            if job is None or job.attempt != attempt:
                continue
            if self._losses.await_reattach(job, why):
                continue
            if job.cancel_requested:
                changes.append(cancellation(job, "CANCELLED", f"cancelled; {why}", now))
            else:
                changes.extend(self._losses.give_up(job, why, now))
        self.open_jobs.roster.drain(worker)  # until it introduces itself again
        self._nudge()
        return changes

    def _forget(self, worker: WorkerRecord) -> None:
        """Once all that it held is seen to, and unless it came back meanwhile."""
        if worker.draining and not worker.held:
            self.open_jobs.roster.forget(worker)

    def _tell(self, answers: list[Answer]) -> None:
        """Tell the worker that still holds an ended job to release it."""
        for answer in answers:
            job = answer.job
            if answer.moved and job is not None and job.attempt:
                order = JobCancel(
                    job.job_id, job.attempt, f"the job ended {job.state}", _RECONCILER
                )
                self.bus.publish(jobs_of(job.worker_id or ""), [order])
