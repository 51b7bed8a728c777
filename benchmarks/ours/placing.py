"""What it costs to choose a waiting job and a worker for it, with few and many of both."""

from __future__ import annotations

import time
from collections import deque
from itertools import count, cycle, islice
from pathlib import Path

from ours.speed import Figures

from penstock.control.backlog import Backlog
from penstock.control.workers import Placement, Roster
from penstock.core.job import Job, JobRequest
from penstock.lifecycles.canonical import JobState
from penstock.ports.bus import Handshake

_SLOTS = 4
_TURN = 20
"""Jobs that end, and as many that are placed, in one turn of the scheduler."""
_NOBODY = "job.nobody"


def placement(folder: Path, *, workers: int, tenants: int, jobs: int) -> Figures:
    """Processor time a job, and the same with ten times as many workers and tenants.

    All slots are taken, and in each turn a few jobs end. Half of the tenants have jobs that no
    worker serves.
    """
    return {
        "few_us": _cost(workers, tenants, jobs),
        "many_us": _cost(10 * workers, 10 * tenants, jobs),
    }


def _cost(workers: int, tenants: int, jobs: int) -> float:
    roster, backlog = Roster({}), Backlog()
    for n in range(workers):
        hello = Handshake(
            worker_id=f"w{n}", pool="default", topics=("job.bench.*",), slots=_SLOTS, labels={}
        )
        roster.greet(hello, 0.0)
    places = Placement(roster)
    room = workers * _SLOTS
    seqs = count(1)
    for n in range(2 * (tenants + room)):
        backlog.add(_job(next(seqs), n % tenants), 1.0)
    served = cycle(range(0, tenants, 2))
    held: deque[tuple[str, int]] = deque()
    placed, spent = 0, 0.0
    while placed < jobs:
        more = [_job(next(seqs), tenant) for tenant in islice(served, _TURN)]
        begin = time.thread_time()
        for _ in range(min(_TURN, len(held))):
            worker, seq = held.popleft()
            roster.release(worker, str(seq), 1)
        for job in more:
            backlog.add(job, 1.0)
        places.refresh()
        before = len(held)
        for seq, worker in backlog.pick(places.find, places.has_room, places.freed):
            roster.hold(worker, str(seq), 1)
            held.append((worker, seq))
        if before:  # else it was the first turn, which fills all slots
            spent += time.thread_time() - begin
            placed += len(held) - before
        assert len(held) == room, f"{len(held)} of {room} slots are in use"
    return spent / placed * 1e6


def _job(seq: int, tenant: int) -> Job:
    topic = _NOBODY if tenant % 2 else f"job.bench.t{tenant % 5}"
    request = JobRequest(job_id=str(seq), topic=topic, tenant=f"tenant-{tenant}")
    return Job(
        seq=seq,
        request=request,
        state=JobState.SCHEDULED,
        version=1,
        accepted_at=0.0,
        updated_at=0.0,
    )
