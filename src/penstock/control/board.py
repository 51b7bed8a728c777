"""The dispatch board: what the control plane knows by heart.

The board is a projection of what was committed. It is filled from the store at start and
kept by `observe`, which hears every commit in order; nobody writes on it what is not yet
durable. Scheduler, reconciler and desk all look at the same board.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager

from penstock.control.backlog import Backlog
from penstock.control.dependencies import Dependencies
from penstock.control.holds import why_parked
from penstock.control.limiter import Limiter
from penstock.control.placement import matches
from penstock.control.roster import Roster
from penstock.core.job import Job, JobRequest, Offer
from penstock.core.policy import ready_at
from penstock.core.transition import Answer
from penstock.core.verdict import SafetyVerdict
from penstock.lifecycles.canonical import HELD, TERMINAL, WAITING, JobEvent, JobState


class Board:
    """Waiting jobs, held jobs, and who could take them."""

    def __init__(self, roster: Roster, now: Callable[[], float]) -> None:
        self.roster = roster
        self._now = now
        self.unjudged: dict[int, Job] = {}
        """Waiting jobs, by seq, that the safety kernel must be shown."""
        self.unread: dict[int, None] = {}
        """Waiting jobs, by seq, that it must be shown once their records are read again."""
        self.parked: dict[int, Job] = {}
        """Jobs that wait for people's approval, by seq."""
        self.dependencies = Dependencies()
        self.awaited: Counter[str] = Counter()
        """Jobs, by id, that waiting jobs name in `after`, whether they have ended or not."""
        self.backlog = Backlog()
        self.held: dict[str, Job] = {}
        """Jobs with a worker, by id."""
        self.adrift: dict[str, str] = {}
        """Held jobs whose worker is gone, by id, and why; they are in the backlog again."""
        self.forgiven: dict[str, int] = {}
        """Attempts of held jobs, by id, that are not charged to them. Not stored: after a restart
        they count like all others."""
        self.doubtful: dict[int, str] = {}
        """Waiting jobs, by seq, that the safety kernel could not judge, and why."""
        self.deadlines: dict[int, float] = {}
        """Waiting jobs that have a deadline, by seq."""
        self.limiter = Limiter(now, held=self.held.values, waiting=self._with_records)
        self.finished = 0
        self._waiting = 0
        self.coming: dict[str, JobRequest] = {}
        """Requests, by id, that have room in the queues and are not committed yet."""
        self._expiries: list[tuple[float, int]] = []
        """When a hold ends, and whose; it may be another hold, or none, by then."""
        self.topics: set[str] = set()
        """Globs that some worker has ever served here."""
        self.offers: dict[str, Offer] = {}
        """What those who serve a topic want its jobs to have."""
        self.served_is_new = False
        """Whether topics or offers have changed since they were last stored."""

    def restore(self, jobs: Iterable[Job]) -> None:
        """Take up what an earlier engine left unfinished."""
        for job in jobs:
            self._enter(job)

    def observe(self, moved: Sequence[Answer]) -> None:
        """Hear a commit."""
        for answer in moved:
            job, entry = answer.job, answer.entry
            assert job is not None
            assert entry is not None
            if job.finished_at is not None:
                if entry.path.before not in TERMINAL:  # else it is only a note
                    self._leave(job)
            elif job.state in HELD:
                self._hold(job)
            elif job.version == 1:
                self._enter(job)
            elif job.seq in self.unjudged:
                self.unjudged[job.seq] = job
            elif job.hold is not None:
                self._hear_of_hold(job, entry.path.steps[-1][1])

    def _enter(self, job: Job) -> None:
        if self.coming and (request := self.coming.pop(job.job_id, None)) is not None:
            self.limiter.release_room(request)
        if job.state in WAITING:
            self._waiting += 1
            if job.request.after:
                self._await_parents(job.request)
            self.unjudged[job.seq] = job
            if self.limiter.in_use:
                self.limiter.wait(job)
        else:
            self.held[job.job_id] = job
            record = self.roster.worker(job.worker_id or "")
            record.held[job.job_id] = job.attempt
            self.limiter.hold(job)
        if job.request.deadline is not None:
            self.deadlines[job.seq] = job.request.deadline

    def _hold(self, job: Job) -> None:
        job_id = job.request.job_id
        before = self.held.get(job_id)
        self.held[job_id] = job
        if before is None:
            self._waiting -= 1
            if job.request.after:
                self._release_parents(job.request)
            limiter = self.limiter
            if limiter.in_use or job.verdict is not None:
                limiter.wait_no_more(job.seq)
                limiter.hold(job)
            if job.seq in self.dependencies.members:
                self.dependencies.forget(job.seq)
        if before is None or before.attempt != job.attempt:
            self.adrift.pop(job_id, None)
            self.roster.worker(job.worker_id or "").held[job_id] = job.attempt

    def _hear_of_hold(self, job: Job, event: JobEvent) -> None:
        seq = job.seq
        if event is JobEvent.PARK:
            self.park(job)
        elif seq in self.parked:
            self.parked[seq] = job
            if job.hold is not None and job.hold.approved:
                # By the rules that are in force when it goes, not when it was asked for.
                self.unjudged[seq] = self.parked.pop(seq)

    def _leave(self, job: Job) -> None:
        job_id, seq = job.request.job_id, job.seq
        self.finished += 1
        self.deadlines.pop(seq, None)
        self.backlog.discard(seq)
        if self.held.pop(job_id, None) is not None:
            self.adrift.pop(job_id, None)
            self.forgiven.pop(job_id, None)
            self.roster.release(job.worker_id, job_id, job.attempt)
            if self.limiter.in_use:
                self.limiter.let_go(job_id)
        else:
            self._waiting -= 1
            if job.request.after:
                self._release_parents(job.request)
            self.unjudged.pop(seq, None)
            self.unread.pop(seq, None)
            self.parked.pop(seq, None)
            self.doubtful.pop(seq, None)
            self.limiter.wait_no_more(seq)
            if seq in self.dependencies.members:
                self.dependencies.forget(seq)
        if job_id in self.dependencies.children:
            self.dependencies.hear(job)

    # -- waiting ------------------------------------------------------------------

    def queue(self, job: Job, verdict: SafetyVerdict | None = None) -> None:
        """Let a job that safety allows wait for its turn."""
        if self.doubtful:
            self.doubtful.pop(job.seq, None)
        limiter = self.limiter
        limited = verdict is not None or limiter.in_use
        self.backlog.add(job, self._now(), limiter.buckets(job, verdict) if limited else ())

    def park(self, job: Job) -> None:
        """Let a job wait for people."""
        assert job.hold is not None
        self.doubtful.pop(job.seq, None)
        self.unread.pop(job.seq, None)
        self.parked[job.seq] = job
        heapq.heappush(self._expiries, (job.hold.until, job.seq))

    def next_expiry(self) -> float | None:
        """When the first hold ends that is still waited for."""
        expiries = self._expiries
        while expiries:
            until, seq = expiries[0]
            job = self.parked.get(seq)
            if job is not None and job.hold is not None and job.hold.until == until:
                return until
            heapq.heappop(expiries)
        return None

    def take_expired(self, now: float, most: int) -> list[Job]:
        """Jobs whose hold has ended; they are parked no more."""
        expired: list[Job] = []
        while len(expired) < most and (until := self.next_expiry()) is not None and until <= now:
            _, seq = heapq.heappop(self._expiries)
            expired.append(self.parked.pop(seq))
        return expired

    def judge_again(self, job: Job) -> None:
        """What was decided about a waiting job was overtaken: begin anew with this record."""
        if job.state in WAITING:
            self.backlog.discard(job.seq)
            self.parked.pop(job.seq, None)
            self.unjudged[job.seq] = job

    def judge_all_again(self) -> None:
        """Let everything that waits be judged again; what is with a worker is not."""
        self.unread.update(dict.fromkeys(self.backlog.empty()))
        self.unread.update(dict.fromkeys(self.dependencies.waiting()))
        for job_id in self.adrift:
            job = self.held[job_id]
            self.unread.pop(job.seq, None)
            self.backlog.add(job, self._now())
        self.unjudged.update(self.parked)
        self.parked.clear()
        for seq in self.unjudged:
            self.unread.pop(seq, None)

    def read_again(self, asked: Iterable[int], jobs: Iterable[Job]) -> None:
        """The records of jobs that were unread, as far as they still wait for that."""
        for job in jobs:
            if job.seq in self.unread and job.state in WAITING and not self._has_place(job.seq):
                self.unjudged[job.seq] = job
                self.limiter.wait(job)
        for seq in asked:
            self.unread.pop(seq, None)

    def release(self, seqs: Iterable[int]) -> None:
        """The parents of these jobs have ended: what had passed already may go on."""
        for seq in seqs:
            if not self._has_place(seq):
                self.unread[seq] = None

    def _has_place(self, seq: int) -> bool:
        return seq in self.unjudged or seq in self.parked or seq in self.backlog

    def waits(self, seq: int) -> bool:
        """Whether a job is with no worker, or with none any more."""
        return self._has_place(seq) or seq in self.unread or seq in self.dependencies

    def waiting(self) -> int:
        """How many jobs are accepted and were never with a worker."""
        return self._waiting

    def _await_parents(self, request: JobRequest) -> None:
        self.awaited.update(set(request.after))

    def _release_parents(self, request: JobRequest) -> None:
        for parent_id in set(request.after):
            self.awaited[parent_id] -= 1
            if self.awaited[parent_id] <= 0:
                del self.awaited[parent_id]

    @contextmanager
    def keeping_parents(self, children: Sequence[JobRequest]) -> Generator[None]:
        """Keep the parents of these in the store until they are committed, or refused."""
        for request in children:
            self._await_parents(request)
        try:
            yield
        finally:
            for request in children:
                self._release_parents(request)

    @contextmanager
    def expecting(self, requests: Iterable[JobRequest]) -> Generator[None]:
        """Count requests as waiting until they are committed, or refused."""
        mine = {r.job_id: r for r in requests if r.job_id not in self.coming}
        self.coming.update(mine)
        for request in mine.values():
            self.limiter.reserve_room(request)
        try:
            yield
        finally:
            for job_id, request in mine.items():
                if self.coming.get(job_id) is request:
                    del self.coming[job_id]
                    self.limiter.release_room(request)

    def _with_records(self) -> list[Job]:
        return [*self.unjudged.values(), *self.parked.values()]

    # -- held ---------------------------------------------------------------------

    def set_adrift(self, job: Job, why: str) -> None:
        """A held job lost its worker and may go to another: it waits again."""
        self.roster.release(job.worker_id, job.job_id, job.attempt)
        self.adrift[job.job_id] = why
        self.backlog.add(job, self._now())  # it is in its buckets already

    def forgive(self, job_id: str) -> None:
        """Don't charge the present attempt to the job."""
        self.forgiven[job_id] = self.forgiven.get(job_id, 0) + 1

    def reclaim(self, job_id: str, attempt: int) -> bool:
        """A worker came back and says that it has this: it keeps it, if it is still live."""
        job = self.held.get(job_id)
        if job is None or job.attempt != attempt:
            return False
        if self.adrift.pop(job_id, None) is not None:
            self.backlog.discard(job.seq)
        return True

    def may_go_out(self, job: Job) -> bool:
        """Whether a job that came up may really be given to a worker."""
        if job.state in WAITING:
            return True
        return job.job_id in self.adrift and not job.cancel_requested

    def is_live(self, job_id: str, attempt: int) -> bool:
        """Whether this attempt is the one we wait for."""
        job = self.held.get(job_id)
        return job is not None and job.attempt == attempt and job_id not in self.adrift

    def learn(self, topics: Iterable[str], offers: Mapping[str, Offer]) -> None:
        """Take in what a worker serves."""
        new_topics = not self.topics.issuperset(topics)
        new_offers = any(self.offers.get(topic) != offer for topic, offer in offers.items())
        self.served_is_new |= new_topics or new_offers
        self.topics.update(topics)
        self.offers.update(offers)

    def recall(self, topics: Iterable[str], offers: Mapping[str, Offer]) -> None:
        """Take in what was stored of workers that served here before."""
        self.topics.update(topics)
        for topic, offer in offers.items():
            self.offers.setdefault(topic, offer)

    def knows(self, topic: str) -> bool:
        """Whether some pool or worker serves, or ever served, this topic."""
        globs = {glob for pool in self.roster.pools.values() for glob in pool.topics}
        return any(matches(topic, glob) for glob in globs | self.topics)

    def running(self) -> int:
        return sum(job.state is JobState.RUNNING for job in self.held.values())

    def why(self, job: Job, now: float) -> str | None:
        """What holds a waiting job back, in a sentence, if it is not its time or the workers."""
        if (parked := self.parked.get(job.seq)) is not None and parked.hold is not None:
            return why_parked(parked.hold)
        if (parents := self.dependencies.why(job.seq, self._state_of)) is not None:
            return parents
        if job.job_id in self.adrift or ready_at(job.request, job.accepted_at) > now:
            return None
        return self.limiter.why(job)

    def _state_of(self, job_id: str) -> str:
        job = self.held.get(job_id)
        return "waiting" if job is None else job.state
