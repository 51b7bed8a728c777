"""Messages from workers become moves, and orders go out to workers after their commit.

Also how jobs end: a result becomes a move, a failed job gets its retry, and the job of a lost
worker goes to another one or ends. Pure but for chance, ids and the start log.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from penstock.control.open_jobs import OpenJobs, Wait
from penstock.core.job import IdSource, Job, JobResult, Timeouts, may_retry, retry_of, run_limit
from penstock.core.ledger import Accept, Move
from penstock.lifecycles.canonical import JobEvent, JobState, Role
from penstock.ports.bus import (
    AnyMessage,
    Bus,
    Confirmed,
    Credit,
    Dismissed,
    Dispatch,
    Drain,
    Farewell,
    Finished,
    Handshake,
    Heartbeat,
    JobCancel,
    Reintroduce,
    Resumed,
    Returned,
    Settled,
    Started,
    StartLogs,
    Waiting,
    Welcomed,
    WorkerFacts,
    jobs_of,
)

Attempt = tuple[str, int]
"""(job_id, attempt)"""


class Orders:
    """Speaks to each worker on its own subject."""

    def __init__(self, bus: Bus, limits: Timeouts, start_logs: str = "") -> None:
        self._bus, self._limits, self._start_logs = bus, limits, start_logs

    def dispatch(self, jobs: Iterable[Job]) -> None:
        """Give each job to the worker that its record names."""
        batches: dict[str, list[Dispatch]] = defaultdict(list)
        for job in jobs:
            request = job.request
            timeout = run_limit(job, self._limits.timeout)
            constraints = None if job.verdict is None else job.verdict.constraints
            started = job.state is JobState.RUNNING
            order = Dispatch(request, job.attempt, timeout, request.deadline, constraints, started)
            batches[job.worker_id or ""].append(order)
        for worker_id, batch in batches.items():
            self._bus.publish(jobs_of(worker_id), batch)

    def end(self, worker_id: str | None, attempt: Attempt, reason: str) -> None:
        self._say(worker_id, JobCancel(*attempt, reason, Role.SCHEDULER.value))

    def confirm(self, starts: Iterable[tuple[str, Attempt]]) -> None:
        """Let workers begin what is durably theirs."""
        for worker_id, attempts in _by_worker(starts).items():
            self._say(worker_id, Confirmed(tuple(attempts)))

    def settle(self, results: Iterable[tuple[str, Attempt]]) -> None:
        """Let workers forget results that are durable, or known to be late."""
        for worker_id, attempts in _by_worker(results).items():
            self._say(worker_id, Settled(tuple(attempts)))

    def resume(self, job: Job) -> None:
        self._say(job.worker_id, Resumed(job.job_id, job.attempt))

    def welcome(self, worker_id: str, session: str) -> None:
        self._say(worker_id, Welcomed(session, self._start_logs))

    def dismiss(self, worker_id: str, session: str, reason: str) -> None:
        self._say(worker_id, Dismissed(session, reason))

    def drain(self, worker_id: str, session: str) -> None:
        self._say(worker_id, Drain(session))

    def ask_who(self, worker_id: str) -> None:
        self._say(worker_id, Reintroduce())

    def _say(self, worker_id: str | None, message: AnyMessage) -> None:
        self._bus.publish(jobs_of(worker_id or ""), [message])


def _by_worker(pairs: Iterable[tuple[str, Attempt]]) -> dict[str, list[Attempt]]:
    grouped: dict[str, list[Attempt]] = defaultdict(list)
    for worker_id, attempt in pairs:
        grouped[worker_id].append(attempt)
    return grouped


class Intake:
    """Turns messages into moves; keeps the roster by the way."""

    def __init__(
        self,
        open_jobs: OpenJobs,
        orders: Orders,
        losses: Losses,
        ids: IdSource,
        chance: Callable[[], float],
    ) -> None:
        self._open_jobs, self._roster, self._orders = open_jobs, open_jobs.roster, orders
        self._losses, self._ids, self._chance = losses, ids, chance
        self.on_their_way: set[tuple[str, int]] = set()
        """Attempts sent to workers after they introduced themselves, and before we read it."""

    def take_in(self, message: AnyMessage, now: float, monotonic: float) -> list[Move]:
        """The moves that a message asks for."""
        match message:
            case Finished(result):
                self.release(result, monotonic)
                return [self._finish(result, now)]
            case Started(job_id, attempt, worker_id):
                actor = f"{Role.WORKER}:{worker_id}"
                self.still_has(message, monotonic)
                return [Move(job_id, (JobEvent.START,), actor, now, attempt=attempt)]
            case Heartbeat(worker_id):
                self._hear(worker_id, monotonic)
            case WorkerFacts(worker_id, session, facts):
                self._hear(worker_id, monotonic)
                self._roster.set_facts(worker_id, session, facts)
            case Credit(worker_id, limit):
                self._roster.set_limit(worker_id, limit)
            case Waiting(job_id, attempt, _, jobs, count):
                if self._open_jobs.is_live(job_id, attempt):
                    if count:
                        self._open_jobs.wait(self._open_jobs.held[job_id], Wait(jobs, count))
                    else:
                        self._open_jobs.resuming[job_id] = None
            case Returned(job_id, attempt, _, reason, charged):
                if self._open_jobs.is_live(job_id, attempt):
                    return self._take_back(self._open_jobs.held[job_id], reason, charged, now)
            case Handshake():
                return self._greet(message, now, monotonic)
            case Farewell():
                self._see_off(message, monotonic)
        return []

    def release(self, result: JobResult, monotonic: float) -> None:
        """The worker that ended a job has room for another."""
        self._roster.heard(result.worker_id or "", monotonic)
        self._roster.release(result.worker_id, result.job_id, result.attempt)

    def _take_back(self, job: Job, reason: str, charged: bool, now: float) -> list[Move]:
        """What did not begin, or can go on elsewhere, waits for another worker."""
        if charged and job.state is JobState.RUNNING:
            return self._losses.lose(job, reason, now)
        if not charged:
            self._open_jobs.uncharged.add(job.job_id)
        self._open_jobs.orphan(job, reason)
        return []

    def still_has(self, started: Started, monotonic: float) -> bool:
        """Whether a worker may keep what it says it starts: no other worker has it yet."""
        job_id, attempt = started.job_id, started.attempt
        given_up = job_id in self._open_jobs.orphaned
        if not self._open_jobs.reclaim(job_id, attempt):
            return False
        if given_up:
            self._roster.hold(started.worker_id, job_id, attempt)
            self._roster.heard(started.worker_id, monotonic)
        return True

    def _hear(self, worker_id: str, monotonic: float) -> None:
        """A sign of life; from a worker that we gave up for lost, a reason to ask again."""
        if not self._roster.heard(worker_id, monotonic):
            self._orders.ask_who(worker_id)

    def _finish(self, result: JobResult, now: float) -> Move:
        job = self._open_jobs.held.get(result.job_id)
        return ending(job, result, now, self._ids, self._chance())

    # -- coming -------------------------------------------------------------------

    def _greet(self, hello: Handshake, now: float, monotonic: float) -> list[Move]:
        open_jobs, roster = self._open_jobs, self._roster
        record = roster.worker(hello.worker_id)
        if record.ready and record.session not in ("", hello.session):
            reason = f"a worker {hello.worker_id} is here already (process {record.pid})"
            self._orders.dismiss(hello.worker_id, hello.session, reason)
            return []
        unknown = {
            job_id: attempt
            for job_id, attempt in record.held.items()
            if (job_id, attempt) not in hello.held and open_jobs.is_live(job_id, attempt)
        }
        over_the_same_link = (record.session, record.link) == (hello.session, hello.link)
        roster.greet(hello, monotonic)
        for attempt in list(unknown.items()):
            # It only says once more who it is, or was given this since: it can't know yet.
            if over_the_same_link or attempt in self.on_their_way:
                roster.hold(hello.worker_id, *attempt)
                del unknown[attempt[0]]
        open_jobs.learn(hello.topics, hello.topic_defaults)
        self._orders.welcome(hello.worker_id, hello.session)
        if record.draining:  # it may have missed the order when its connection was lost
            self._orders.drain(hello.worker_id, hello.session)
        self._give_back(hello)
        lost = [open_jobs.held[job_id] for job_id in unknown]
        why = f"worker {hello.worker_id} came back without it"
        return [move for job in lost for move in self._losses.lose(job, why, now)]

    def _give_back(self, hello: Handshake) -> None:
        """A worker that comes back keeps what is still its own, and drops the rest."""
        for job_id, attempt in hello.held:
            if not self._open_jobs.reclaim(job_id, attempt):
                self._roster.release(hello.worker_id, job_id, attempt)
                self._orders.end(hello.worker_id, (job_id, attempt), "this attempt is not live")
            elif self._open_jobs.held[job_id].cancel_requested:
                reason = "cancelled while the worker was away"
                self._orders.end(hello.worker_id, (job_id, attempt), reason)

    # -- going --------------------------------------------------------------------

    def _see_off(self, farewell: Farewell, monotonic: float) -> None:
        record = self._roster.workers.get(farewell.worker_id)
        if record is None or (farewell.session and farewell.session != record.session):
            return
        if farewell.lost:
            if farewell.link == record.link:  # not a connection that it has replaced since
                self._roster.set_missing(record, monotonic)
        elif record.held and farewell.gone:
            self._roster.set_missing(record, float("-inf"))
        elif record.held:
            self._roster.drain(record)
        else:
            self._roster.forget(record)


# -- endings --------------------------------------------------------------------

_EVENTS: dict[JobState, tuple[JobEvent, Role]] = {
    JobState.SUCCEEDED: (JobEvent.SUCCEED, Role.WORKER),
    JobState.FAILED: (JobEvent.FAIL, Role.WORKER),
    # The seed lets only the control plane say these; the worker's word is the evidence.
    JobState.TIMEOUT: (JobEvent.EXPIRE, Role.RECONCILER),
    JobState.CANCELLED: (JobEvent.CANCEL, Role.RECONCILER),
}


def ending(job: Job | None, result: JobResult, now: float, ids: IdSource, chance: float) -> Move:
    """The move that ends a job as `result` says, with its retry in the same commit."""
    event, role = _EVENTS[result.status]
    then: tuple[Accept, ...] = ()
    if job is not None and not job.cancel_requested and may_retry(job, result):
        again = retry_of(job, result, ids.next(now), now, chance)
        reason = f"retry {again.retry_number} of {job.request.retry.retries} of {job.job_id}"
        by = Role.SCHEDULER.value
        then = (Accept(again, now, by, reason, fresh=True, unless_cancelled=True),)
    actor = f"{role}:{result.worker_id}" if role is Role.WORKER else role.value
    return Move(
        result.job_id,
        (event,),
        actor,
        now,
        _reason(result),
        attempt=result.attempt,
        result=result,
        then=then,
    )


def cancellation(job: Job, code: str, why: str, now: float) -> Move:
    """The move by which the control plane itself ends a job."""
    result = JobResult(
        job_id=job.job_id,
        status=JobState.CANCELLED,
        attempt=job.attempt,
        error_code=code,
        error_message=why,
    )
    return Move(
        job.job_id,
        (JobEvent.CANCEL,),
        Role.RECONCILER.value,
        now,
        why,
        version=job.version,
        result=result,
    )


def _reason(result: JobResult) -> str:
    if result.error_code is None:
        return ""
    said = result.error_code
    if result.error_message:
        said += f": {result.error_message[:200]}"
    return said


def reattach_timeout(open_jobs: OpenJobs, job: Job) -> float | None:
    """Seconds for which a lost job waits for a worker that can reattach to its work."""
    defaults = open_jobs.topic_defaults.get(job.request.topic)
    return None if defaults is None else defaults.reattach_timeout


class Losses:
    """Gives a job to another worker where that is safe, and ends it where it is not."""

    def __init__(
        self,
        open_jobs: OpenJobs,
        starts: StartLogs,
        limits: Timeouts,
        ids: IdSource,
        chance: Callable[[], float],
    ) -> None:
        self._open_jobs, self._starts, self._limits = open_jobs, starts, limits
        self._ids, self._chance = ids, chance

    def lose(self, job: Job, why: str, now: float) -> list[Move]:
        """Let it wait for another worker, or return the move that ends it."""
        return [] if self.await_reattach(job, why) else self.give_up(job, why, now)

    def await_reattach(self, job: Job, why: str) -> bool:
        """Let it wait for a worker that can reattach to its work; False if there can be none.

        Also a job that a user wants ended: its work goes on until such a worker ends it.
        """
        reattaches = reattach_timeout(self._open_jobs, job) is not None and self._has_begun(job)
        if reattaches:
            self._open_jobs.await_reattach(job, why)
        return reattaches

    def give_up(self, job: Job, why: str, now: float) -> list[Move]:
        """The same for a job whose work can't be reattached."""
        if self._may_go_on(job):
            self._open_jobs.orphan(job, why)
            return []
        return [self.expire(job, "WORKER_LOST", why, now)]

    def _has_begun(self, job: Job) -> bool:
        """Whether it runs, or its worker began it and died before it could say so."""
        if job.state is JobState.DISPATCHED and not job.request.idempotent:
            return not self._starts.revoke(job.job_id, job.attempt)
        return job.state is JobState.RUNNING

    def _may_go_on(self, job: Job) -> bool:
        if job.request.idempotent:
            defaults = self._open_jobs.topic_defaults.get(job.request.topic)
            most = defaults.max_attempts if defaults is not None else None
            uncharged = job.uncharged + (job.job_id in self._open_jobs.uncharged)
            charged = job.attempt - uncharged
            begun_too_often = charged >= (most or self._limits.max_attempts)
            return job.state is JobState.DISPATCHED or not begun_too_often
        return job.state is JobState.DISPATCHED and self._starts.revoke(job.job_id, job.attempt)

    def expire(self, job: Job, code: str, why: str, now: float) -> Move:
        """End it TIMEOUT, with its retry if its policy wants one."""
        result = JobResult(
            job_id=job.job_id,
            status=JobState.TIMEOUT,
            worker_id=job.worker_id,
            attempt=job.attempt,
            error_code=code,
            error_message=why,
        )
        return ending(job, result, now, self._ids, self._chance())
