"""The dispatch board: what the control plane knows by heart.

The board is a projection of what was committed. It is filled from the store at start and
kept by `observe`, which hears every commit in order; nobody writes on it what is not yet
durable. Scheduler, reconciler and desk all look at the same board.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from penstock.control.backlog import Backlog
from penstock.control.limiter import Limiter
from penstock.control.placement import matches
from penstock.control.roster import Roster
from penstock.core.job import Job, Offer
from penstock.core.transition import Answer
from penstock.lifecycles.canonical import HELD, TERMINAL, WAITING, JobState


class Board:
    """Waiting jobs, held jobs, and who could take them."""

    def __init__(self, roster: Roster, now: Callable[[], float]) -> None:
        self.roster = roster
        self._now = now
        self.unjudged: dict[int, Job] = {}
        """Accepted, by seq, and not yet shown to the safety kernel."""
        self.backlog = Backlog()
        self.held: dict[str, Job] = {}
        """Jobs with a worker, by id."""
        self.adrift: dict[str, str] = {}
        """Held jobs whose worker is gone, by id, and why; they are in the backlog again."""
        self.doubtful: dict[int, str] = {}
        """Waiting jobs, by seq, that the safety kernel could not judge, and why."""
        self.deadlines: dict[int, float] = {}
        """Waiting jobs that have a deadline, by seq."""
        self.parked: dict[int, Job] = {}
        """Jobs that wait for people's approval, by seq."""
        self.limiter = Limiter()
        self.finished = 0
        self.topics: set[str] = set()
        """Globs that some worker has ever served here."""
        self.offers: dict[str, Offer] = {}
        """What those who serve a topic want its jobs to have."""

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

    def _enter(self, job: Job) -> None:
        if job.state in WAITING:
            self.unjudged[job.seq] = job
        else:
            self.held[job.job_id] = job
            record = self.roster.worker(job.worker_id or "")
            record.held[job.job_id] = job.attempt
        if job.request.deadline is not None:
            self.deadlines[job.seq] = job.request.deadline

    def _hold(self, job: Job) -> None:
        job_id = job.request.job_id
        before = self.held.get(job_id)
        self.held[job_id] = job
        if before is None or before.attempt != job.attempt:
            self.adrift.pop(job_id, None)
            self.roster.worker(job.worker_id or "").held[job_id] = job.attempt

    def _leave(self, job: Job) -> None:
        job_id = job.request.job_id
        self.finished += 1
        self.unjudged.pop(job.seq, None)
        self.backlog.discard(job.seq)
        self.deadlines.pop(job.seq, None)
        self.doubtful.pop(job.seq, None)
        if self.held.pop(job_id, None) is not None:
            self.adrift.pop(job_id, None)
            self.roster.release(job.worker_id, job_id, job.attempt)

    def queue(self, job: Job) -> None:
        """Let a job that safety allows wait for its turn."""
        self.doubtful.pop(job.seq, None)
        self.backlog.add(job, self._now())

    def set_adrift(self, job: Job, why: str) -> None:
        """A held job lost its worker and may go to another: it waits again."""
        self.roster.release(job.worker_id, job.job_id, job.attempt)
        self.adrift[job.job_id] = why
        self.backlog.add(job, self._now())

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

    def learn(self, topics: Iterable[str], offers: Mapping[str, Offer]) -> bool:
        """Take in what a worker serves; True if that is news."""
        new_topics = not self.topics.issuperset(topics)
        new_offers = any(self.offers.get(topic) != offer for topic, offer in offers.items())
        self.topics.update(topics)
        self.offers.update(offers)
        return new_topics or new_offers

    def knows(self, topic: str) -> bool:
        """Whether some pool or worker serves, or ever served, this topic."""
        globs = {glob for pool in self.roster.pools.values() for glob in pool.topics}
        return any(matches(topic, glob) for glob in globs | self.topics)

    def running(self) -> int:
        return sum(job.state is JobState.RUNNING for job in self.held.values())

    def waiting(self) -> int:
        """How many jobs are accepted and with no worker yet."""
        return len(self.unjudged) + len(self.backlog) + len(self.parked)

    def why(self, job: Job, now: float) -> str | None:
        """What holds a waiting job back, if it is not the workers."""
        return None
