"""Applies the safety kernel to waiting jobs and turns its verdicts into moves.

A verdict is stored with the move that follows from it. A job that is judged again, after a
restart or by other rules, is written about only if the verdict is another one.

`WaitingJobs` looks after the jobs that wait for something other than a worker: for people, for
their parents, or to be read again.
"""

from __future__ import annotations

import logging
from itertools import islice

from msgspec import Struct, field

from penstock.control.approvals import expiry, is_current, lifted, park, refusal
from penstock.control.dependencies import has_parents
from penstock.control.endings import cancellation
from penstock.control.open_jobs import OpenJobs
from penstock.control.safety import SafetyKernel
from penstock.control.store_retry import RetryingStore
from penstock.core.job import Job
from penstock.core.ledger import BulkMove, Change, Move
from penstock.core.verdict import Decision, Hold, SafetyVerdict
from penstock.lifecycles.canonical import WAITING, JobEvent, JobState, Role

log = logging.getLogger(__name__)

_SCHEDULER = Role.SCHEDULER.value
_RECONCILER = Role.RECONCILER.value
_SCHEDULE = (JobEvent.SCHEDULE,)
_JUDGED_A_TURN = 2000
"""Maximum number of jobs judged in one commit."""


class News(Struct):
    """A verdict and hold to store with the job's next move."""

    verdict: SafetyVerdict
    hold: Hold | None = None


class Judged(Struct):
    """The outcome of one round."""

    moves: list[Change] = field(default_factory=list)
    """Moves of jobs that were denied or put on hold."""
    passed: list[Job] = field(default_factory=list)
    """Jobs that are allowed, and are queued or wait for their parents."""
    children: dict[int, tuple[Job, SafetyVerdict | None]] = field(default_factory=dict)
    """Those of them that wait for parents, by seq."""
    news: dict[int, News] = field(default_factory=dict)
    """By seq, where the record does not have the verdict yet."""

    def admissions(self, gone: set[int], now: float) -> tuple[list[Change], list[BulkMove]]:
        """The moves of allowed jobs that no worker took: they become SCHEDULED, most as one."""
        moves: list[Change] = []
        plain = BulkMove(job_ids=[], events=_SCHEDULE, actor=_SCHEDULER, at=now, versions=[])
        assert plain.versions is not None
        for job in self.passed:
            if job.seq in gone:
                continue
            news = self.news.get(job.seq) if self.news else None
            if job.state is JobState.PENDING and news is None:
                plain.job_ids.append(job.request.job_id)
                plain.versions.append(job.version)
            elif news is not None:
                moves.append(_judged(job, news, now))
        return moves, [plain] if plain.job_ids else []


def _judged(job: Job, news: News, now: float) -> Move:
    event, said = JobEvent.SCHEDULE, ""
    if job.state is not JobState.PENDING:
        event, said = JobEvent.NOTE, _judged_again(news.verdict)
    return Move(
        job.job_id,
        (event,),
        _SCHEDULER,
        now,
        said,
        version=job.version,
        verdict=news.verdict,
        hold=news.hold,
    )


class Judge:
    """Judges the jobs that are not judged yet."""

    def __init__(self, open_jobs: OpenJobs, kernel: SafetyKernel) -> None:
        self._open_jobs, self._kernel = open_jobs, kernel

    def sit(self, now: float) -> Judged:
        """Judge up to a number of jobs; the rest, and those the kernel failed on, stay."""
        open_jobs, judged = self._open_jobs, Judged()
        unjudged = open_jobs.unjudged
        if not unjudged:
            return judged
        decide, built_in = self._kernel.decide, self._kernel.built_in
        passed, queue = judged.passed, open_jobs.queue
        undecided: dict[int, Job] = {}
        for job in list(islice(unjudged.values(), _JUDGED_A_TURN)):
            del unjudged[job.seq]
            try:
                verdict = decide(job.request)
            except Exception as error:
                log.exception("the safety kernel could not judge job %s", job.job_id)
                open_jobs.doubtful[job.seq] = f"the safety kernel failed: {error}"
                undecided[job.seq] = job
                continue
            if not (built_in and job.verdict is None and verdict.decision is Decision.ALLOW):
                self._follow(job, verdict, judged, now)
            elif job.request.after:
                self._let_pass(job, None, judged)
            else:
                passed.append(job)
                queue(job)
        unjudged.update(undecided)
        return judged

    def _follow(self, job: Job, verdict: SafetyVerdict, judged: Judged, now: float) -> None:
        hold = job.hold
        if verdict.decision is Decision.DENY:
            judged.moves.append(refusal(job, verdict, now))
            return
        if verdict.decision is Decision.REQUIRE_APPROVAL:
            if has_parents(job.request):
                self._open_jobs.dependencies.admit(job)  # if a parent fails, no approval is needed
            if hold is None or not is_current(hold, verdict, job.request):
                judged.moves.append(park(job, verdict, now))
                return
            if not hold.approved:
                if hold.until <= now:
                    judged.moves.append(expiry(job, now))
                else:
                    self._open_jobs.park(job)
                return
        elif hold is not None and not hold.approved:
            judged.news[job.seq] = News(verdict, lifted(hold))
        if job.verdict != verdict:
            judged.news.setdefault(job.seq, News(verdict))
        self._let_pass(job, verdict, judged)

    def _let_pass(self, job: Job, verdict: SafetyVerdict | None, judged: Judged) -> None:
        judged.passed.append(job)
        if has_parents(job.request) and not self._open_jobs.dependencies.admit(job):
            self._open_jobs.doubtful.pop(job.seq, None)
            judged.children[job.seq] = (job, verdict)
        else:
            self._open_jobs.queue(job, verdict)


def _judged_again(verdict: SafetyVerdict) -> str:
    return f"judged again: {verdict.decision} by rule {verdict.rule_id}"


_READ = 2000
"""Records read again in one turn at most."""
_ENDED = 500
"""Jobs that waited in vain and are ended in one commit, at most."""
_LOOKED_UP = 500
"""Parents looked up in one turn at most."""


class WaitingJobs:
    """Looks after waiting jobs; each call does a bounded part of what is due."""

    def __init__(self, open_jobs: OpenJobs, store: RetryingStore) -> None:
        self._open_jobs, self._store = open_jobs, store

    @property
    def is_not_done(self) -> bool:
        """Whether there is more to do at once."""
        open_jobs, parents = self._open_jobs, self._open_jobs.dependencies
        return bool(
            parents.unknown
            or parents.doomed
            or open_jobs.families.unknown
            or open_jobs.families.doomed
            or open_jobs.unread
            or len(open_jobs.unjudged) > len(open_jobs.doubtful)
        )

    async def call_up(self, now: float) -> list[Change]:
        """Read again what must be judged again; end what waited in vain."""
        open_jobs = self._open_jobs
        if open_jobs.unread:
            asked = list(islice(open_jobs.unread, _READ))
            open_jobs.read_again(asked, await self._store.fetch(asked))
        ended: list[Change] = [expiry(job, now) for job in open_jobs.take_expired(now, _ENDED)]
        if open_jobs.dependencies.doomed:
            ended.extend(await self._end_children(now))
        if open_jobs.families.doomed:
            ended.extend(await self._end_with_parents(now))
        return ended

    async def _end_with_parents(self, now: float) -> list[Change]:
        """Cancel children whose parent ended without success, wherever they are."""
        doomed = self._open_jobs.families.doomed
        reasons = dict(islice(doomed.items(), _ENDED))
        ended: list[Change] = []
        for job in await self._store.fetch(list(reasons)):
            why = reasons.pop(job.seq)
            if job.state in WAITING:
                ended.append(cancellation(job, "PARENT_ENDED", why, now))
            elif job.is_final or job.cancel_requested:
                doomed.pop(job.seq, None)
            else:
                ask = (JobEvent.REQUEST_CANCEL,)
                ended.append(Move(job.job_id, ask, _RECONCILER, now, why, version=job.version))
        for seq in reasons:  # no longer in the store
            doomed.pop(seq, None)
        return ended

    async def _end_children(self, now: float) -> list[Change]:
        parents = self._open_jobs.dependencies
        reasons = dict(islice(parents.doomed.items(), _ENDED))
        jobs = {job.seq: job for job in await self._store.fetch(list(reasons))}
        ended: list[Change] = []
        for seq, why in reasons.items():
            if (job := jobs.get(seq)) is not None and job.state in WAITING:
                ended.append(cancellation(job, "PARENT_FAILED", why, now))
            else:
                parents.forget(seq)
        return ended

    async def ask_for_parents(self, judged: Judged) -> None:
        """Look up the parents that nobody knows of; queue the jobs that need not wait."""
        open_jobs, parents = self._open_jobs, self._open_jobs.dependencies
        for parent_id in list(islice(parents.unknown, _LOOKED_UP)):
            parents.look_up(parent_id, await self._store.get(parent_id))
        for chain in list(islice(open_jobs.families.unknown, _LOOKED_UP)):
            tries = [await self._store.get(chain[1])]
            while (last := tries[-1]) is not None and last.successor is not None:
                tries.append(await self._store.get(last.successor))
            open_jobs.families.look_up(chain, tries[-1])
        if parents.released:
            released = parents.take_released()
            for seq in released:
                if (child := judged.children.get(seq)) is not None:
                    open_jobs.queue(*child)
            open_jobs.release(released)
