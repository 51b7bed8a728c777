"""In-memory index of unfinished jobs: which wait, which are with a worker, and who could run them.

It is a projection of what was committed: filled from the ledger at start and kept up to date by
`observe`, which hears every commit in order. The records are those of the ledger's own index.
Scheduler, reconciler and engine API look at the same one.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from msgspec import Struct

from penstock.control.approvals import why_held
from penstock.control.backlog import Backlog
from penstock.control.dependencies import (
    Dependencies,
    Families,
    ends_with_parent,
    has_parents,
    waits_for,
)
from penstock.control.limits import Limiter
from penstock.control.workers import Roster, matches
from penstock.core.job import Job, JobRequest, TopicDefaults, ready_at
from penstock.core.journal import Stride
from penstock.core.verdict import SafetyVerdict
from penstock.lifecycles.canonical import HELD, TERMINAL, WAITING, JobEvent, JobState


class Wait(Struct, frozen=True):
    """What a running job waits for."""

    jobs: tuple[str, ...]
    """Some of them."""
    count: int


class OpenJobs:
    """Waiting jobs, held jobs, and who could take them."""

    def __init__(self, roster: Roster, now: Callable[[], float]) -> None:
        self.roster = roster
        self._now = now
        self.unjudged: dict[int, Job] = {}
        """Waiting jobs, by seq, that the safety kernel must be shown."""
        self.unread: dict[int, None] = {}
        """Waiting jobs, by seq, that it must be shown once their records are read again."""
        self.awaiting_approval: dict[int, Job] = {}
        """Jobs that wait for people's approval, by seq."""
        self.dependencies = Dependencies()
        self.families = Families()
        self.awaited: Counter[str] = Counter()
        """Jobs, by id, that waiting jobs name in `after`, whether they have ended or not."""
        self.backlog = Backlog()
        self.held: dict[str, Job] = {}
        """Jobs with a worker, by id."""
        self.orphaned: dict[str, str] = {}
        """Held jobs whose worker is gone, by id, and why. They are in the backlog again, but for
        those in `reattaching`."""
        self.reattaching: set[str] = set()
        """Orphaned jobs, by id, that wait for a worker that can reattach to their work."""
        self.uncharged: set[str] = set()
        """Orphaned jobs, by id, whose last attempt is not charged to them."""
        self.doubtful: dict[int, str] = {}
        """Waiting jobs, by seq, that the safety kernel could not judge, and why."""
        self.deadlines: dict[int, float] = {}
        """Waiting jobs that have a deadline, by seq."""
        self.awaiting: dict[str, Wait] = {}
        """Held jobs, by id, that wait for other jobs: they hold no slot and no limit."""
        self.resuming: dict[str, None] = {}
        """Those among them that have what they waited for."""
        self.limiter = Limiter(now, held=self._running, waiting=self._with_records)
        self.finished = 0
        self._waiting = 0
        self.coming: dict[str, JobRequest] = {}
        """Requests, by id, that have room in the queues and are not committed yet."""
        self._expiries: list[tuple[float, int]] = []
        """When a hold ends, and whose; it may be another hold, or none, by then."""
        self.topics: set[str] = set()
        """Globs that some worker has ever served here."""
        self.topic_defaults: dict[str, TopicDefaults] = {}
        """What those who serve a topic want its jobs to have."""
        self.served_is_new = False
        """Whether topics or their defaults have changed since they were last stored."""

    def restore(self, jobs: Iterable[Job]) -> None:
        """Take up what an earlier engine left unfinished."""
        for job in jobs:
            self._enter(job)

    def observe(self, strides: Sequence[Stride]) -> None:
        """Hear a commit."""
        for stride in strides:
            before, after = stride.path.before, stride.path.after
            if after in TERMINAL:
                if before not in TERMINAL:  # else it is only a note
                    for job in stride.jobs:
                        self._leave(job)
            elif after in HELD:
                for job in stride.jobs:
                    self._hold(job)
            elif before is None:
                for job in stride.jobs:
                    self._enter(job)
            else:
                event = stride.path.steps[-1][1]
                for job in stride.jobs:
                    if job.seq in self.unjudged:
                        self.unjudged[job.seq] = job
                    elif job.hold is not None:
                        self._hear_of_hold(job, event)

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
            self.roster.hold(job.worker_id or "", job.job_id, job.attempt)
            self.limiter.hold(job)
        request = job.request
        if request.deadline is not None:
            self.deadlines[job.seq] = request.deadline
        if request.child_of is not None and not request.detached:
            self.families.enter(job, self.held.get(request.parent_job_id or ""))

    def _hold(self, job: Job) -> None:
        job_id = job.request.job_id
        before = self.held.get(job_id)
        self.held[job_id] = job
        if before is None:
            self._waiting -= 1
            self.unjudged.pop(job.seq, None)
            if job.request.after:
                self._release_parents(job.request)
            limiter = self.limiter
            if limiter.in_use or job.verdict is not None:
                limiter.wait_no_more(job.seq)
                limiter.hold(job)
            if job.seq in self.dependencies.members:
                self.dependencies.forget(job.seq)
        if before is None or before.attempt != job.attempt:
            if self.orphaned:
                self._forget_loss(job_id)
            if job_id in self.awaiting:
                self.go_on(job)
            self.roster.hold(job.worker_id or "", job_id, job.attempt)

    def _hear_of_hold(self, job: Job, event: JobEvent) -> None:
        seq = job.seq
        if event is JobEvent.PARK:
            self.await_approval(job)
        elif seq in self.awaiting_approval:
            self.awaiting_approval[seq] = job
            if job.hold is not None and job.hold.approved:
                # By the rules that are in force when it goes, not when it was asked for.
                self.unjudged[seq] = self.awaiting_approval.pop(seq)

    def _leave(self, job: Job) -> None:
        job_id, seq = job.request.job_id, job.seq
        self.finished += job.successor is None
        self.deadlines.pop(seq, None)
        self.backlog.discard(seq)
        if self.held.pop(job_id, None) is not None:
            self._forget_loss(job_id)
            self.awaiting.pop(job_id, None)
            self.resuming.pop(job_id, None)
            self.roster.release(job.worker_id, job_id, job.attempt)
            if self.limiter.in_use:
                self.limiter.let_go(job_id)
        else:
            self._waiting -= 1
            if job.request.after:
                self._release_parents(job.request)
            self.unjudged.pop(seq, None)
            self.unread.pop(seq, None)
            self.awaiting_approval.pop(seq, None)
            self.doubtful.pop(seq, None)
            self.limiter.wait_no_more(seq)
            if seq in self.dependencies.members:
                self.dependencies.forget(seq)
        if job_id in self.dependencies.children:
            self.dependencies.hear(job)
        if self.families.parents or self.families.doomed:
            self.families.hear(job)
            if ends_with_parent(job.request):
                self.families.leave(job)

    # -- waiting ------------------------------------------------------------------

    def queue(self, job: Job, verdict: SafetyVerdict | None = None) -> None:
        """Let a job that safety allows wait for its turn."""
        if self.doubtful:
            self.doubtful.pop(job.seq, None)
        limiter = self.limiter
        limited = verdict is not None or limiter.in_use
        buckets = limiter.buckets(job, verdict) if limited else ()
        self.backlog.add(job, self._now(), buckets, self._rank(job))

    def _rank(self, job: Job) -> float | None:
        return self.families.rank(job) if ends_with_parent(job.request) else None

    def await_approval(self, job: Job) -> None:
        """Let a job wait for people."""
        assert job.hold is not None
        self.doubtful.pop(job.seq, None)
        self.unread.pop(job.seq, None)
        self.awaiting_approval[job.seq] = job
        heapq.heappush(self._expiries, (job.hold.until, job.seq))

    def next_expiry(self) -> float | None:
        """When the first hold ends that is still waited for."""
        expiries = self._expiries
        while expiries:
            until, seq = expiries[0]
            job = self.awaiting_approval.get(seq)
            if job is not None and job.hold is not None and job.hold.until == until:
                return until
            heapq.heappop(expiries)
        return None

    def take_expired(self, now: float, most: int) -> list[Job]:
        """Jobs whose hold has ended; they no longer await approval."""
        expired: list[Job] = []
        while len(expired) < most and (until := self.next_expiry()) is not None and until <= now:
            _, seq = heapq.heappop(self._expiries)
            expired.append(self.awaiting_approval.pop(seq))
        return expired

    def judge_again(self, job: Job) -> None:
        """What was decided about a waiting job was overtaken: begin anew with this record."""
        if job.state in WAITING:
            self.backlog.discard(job.seq)
            self.awaiting_approval.pop(job.seq, None)
            self.unjudged[job.seq] = job

    def judge_all_again(self) -> None:
        """Let everything that waits be judged again; what is with a worker is not."""
        self.unread.update(dict.fromkeys(self.backlog.empty()))
        self.unread.update(dict.fromkeys(self.dependencies.waiting()))
        for job_id in self.orphaned.keys() - self.reattaching:
            job = self.held[job_id]
            self.unread.pop(job.seq, None)
            self.backlog.add(job, self._now(), order=self._rank(job))
        self.unjudged.update(self.awaiting_approval)
        self.awaiting_approval.clear()
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
        return seq in self.unjudged or seq in self.awaiting_approval or seq in self.backlog

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

    def expecting(self, requests: Sequence[JobRequest]) -> _Expected:
        """Count requests as waiting until they are committed, or refused."""
        return _Expected(self.coming, self.limiter, requests)

    def _with_records(self) -> list[Job]:
        return [*self.unjudged.values(), *self.awaiting_approval.values()]

    # -- held ---------------------------------------------------------------------

    def _running(self) -> Iterator[Job]:
        """Held jobs that count against limits."""
        return (job for job_id, job in self.held.items() if job_id not in self.awaiting)

    def wait(self, job: Job, wait: Wait) -> None:
        """A held job waits for others: it gives back its slot and its limits."""
        self.awaiting[job.job_id] = wait
        self.resuming.pop(job.job_id, None)
        self.roster.set_waiting(job.worker_id, job.job_id, waits=True)
        self.limiter.let_go(job.job_id)

    def may_go_on(self, job: Job) -> bool:
        """Whether the limits and the pool have room for a job that has waited."""
        if job.job_id not in self.awaiting:
            return True
        return self.limiter.has_room_again(job) and self.roster.has_capacity(job.worker_id)

    def go_on(self, job: Job) -> None:
        """A held job that waited goes on: it counts again."""
        self.resuming.pop(job.job_id, None)
        if self.awaiting.pop(job.job_id, None) is not None:
            self.roster.set_waiting(job.worker_id, job.job_id, waits=False)
            if self.limiter.in_use:
                self.limiter.hold_again(job)

    def orphan(self, job: Job, why: str) -> None:
        """A held job lost its worker and may go to another: it waits again."""
        self._lose(job, why)
        self.reattaching.discard(job.job_id)
        self.backlog.add(job, self._now(), order=self._rank(job))  # it is in its buckets already

    def await_reattach(self, job: Job, why: str) -> None:
        """A held job lost its worker, and its work may go on without it: it waits for a worker
        that can reattach to that. The loss is not charged to the job."""
        self._lose(job, why)
        self.reattaching.add(job.job_id)
        self.uncharged.add(job.job_id)

    def _lose(self, job: Job, why: str) -> None:
        self.go_on(job)
        self.roster.release(job.worker_id, job.job_id, job.attempt)
        self.orphaned[job.job_id] = why

    def _forget_loss(self, job_id: str) -> bool:
        self.uncharged.discard(job_id)
        self.reattaching.discard(job_id)
        return self.orphaned.pop(job_id, None) is not None

    def reclaim(self, job_id: str, attempt: int) -> bool:
        """A worker came back and says that it has this: it keeps it, if it is still live."""
        job = self.held.get(job_id)
        if job is None or job.attempt != attempt:
            return False
        if self._forget_loss(job_id):
            self.backlog.discard(job.seq)
        return True

    def may_go_out(self, job: Job) -> bool:
        """Whether a job that came up may really be given to a worker."""
        if job.state in WAITING:
            return True
        return job.job_id in self.orphaned and not job.cancel_requested

    def is_live(self, job_id: str, attempt: int) -> bool:
        """Whether this attempt is the one we wait for."""
        job = self.held.get(job_id)
        return job is not None and job.attempt == attempt and job_id not in self.orphaned

    def learn(self, topics: Iterable[str], topic_defaults: Mapping[str, TopicDefaults]) -> None:
        """Take in what a worker serves."""
        new_topics = not self.topics.issuperset(topics)
        new_defaults = any(
            self.topic_defaults.get(topic) != defaults for topic, defaults in topic_defaults.items()
        )
        self.served_is_new |= new_topics or new_defaults
        self.topics.update(topics)
        self.topic_defaults.update(topic_defaults)

    def recall(self, topics: Iterable[str], topic_defaults: Mapping[str, TopicDefaults]) -> None:
        """Take in what was stored of workers that served here before."""
        self.topics.update(topics)
        for topic, defaults in topic_defaults.items():
            self.topic_defaults.setdefault(topic, defaults)

    def knows(self, topic: str) -> bool:
        """Whether some pool or worker serves, or ever served, this topic."""
        globs = {glob for pool in self.roster.pools.values() for glob in pool.topics}
        return any(matches(topic, glob) for glob in globs | self.topics)

    def running(self) -> int:
        return sum(job.state is JobState.RUNNING for job in self.held.values())

    def why(self, job: Job, now: float) -> str | None:
        """What holds a waiting job back, in a sentence, if it is not its time or the workers."""
        if (known := self.awaiting_approval.get(job.seq)) is not None and known.hold is not None:
            return why_held(known.hold)
        if (parents := self.dependencies.why(job.seq, self._state_of)) is not None:
            return parents
        if (doom := self.families.doomed.get(job.seq)) is not None:
            return f"it is about to be cancelled: {doom}"
        if job.seq in self.unjudged and has_parents(job.request):
            return waits_for(job.request.after, self._state_of)
        if job.job_id in self.orphaned or ready_at(job.request, job.accepted_at) > now:
            return None
        return self.limiter.why(job)

    def why_awaiting(self, job: Job) -> str | None:
        """What a running job waits for, in a sentence."""
        if (wait := self.awaiting.get(job.job_id)) is None:
            return None
        if job.job_id in self.resuming:
            said = self.limiter.why(job) or "the pool is at its capacity"
            return f"it has waited for other jobs and is about to go on: {said}"
        return f"{waits_for(wait.jobs, self._state_of, wait.count)}, and holds no slot meanwhile"

    def _state_of(self, job_id: str) -> str:
        job = self.held.get(job_id)
        return "waiting" if job is None else job.state


class _Expected:
    """Requests that have room in the queues while they are being committed."""

    __slots__ = ("_coming", "_limiter", "_mine", "_requests")

    def __init__(
        self, coming: dict[str, JobRequest], limiter: Limiter, requests: Sequence[JobRequest]
    ) -> None:
        self._coming, self._limiter, self._requests = coming, limiter, requests

    def __enter__(self) -> None:
        coming = self._coming
        self._mine = [request for request in self._requests if request.job_id not in coming]
        for request in self._mine:
            coming[request.job_id] = request
            self._limiter.reserve_room(request)

    def __exit__(self, *error: object) -> None:
        coming = self._coming
        for request in self._mine:
            if coming.get(request.job_id) is request:
                del coming[request.job_id]
                self._limiter.release_room(request)
