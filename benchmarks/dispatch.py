"""Processor time of choosing the next job and its worker, by number of tenants and workers.

`python benchmarks/dispatch.py` prints a table. No store and no worker process takes part.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice

from penstock.control.backlog import Backlog
from penstock.control.workers import DEFAULT_POOL, Placement, Roster
from penstock.core.job import Job
from penstock.ports.bus import Handshake
from penstock.testing.samples import T0, a_job

TENANTS = (1, 10, 10_000)
WORKERS = (1, 1_000)
_A_TURN = 500
_SLOTS = 1_000


def drain(tenants: int, workers: int, jobs: int = 20_000) -> float:
    """Microseconds a job when many wait and a turn gives out 500."""
    backlog, (roster, placement) = Backlog(), _workers(workers)
    for job in _jobs(jobs, tenants):
        backlog.add(job, T0 + jobs)

    def work() -> None:
        while turn := _turn(backlog, placement):
            for worker_id in turn.values():
                roster.release(worker_id, "", 1)

    return _microseconds(work) / jobs


def one_a_turn(tenants: int, workers: int, jobs: int = 2_000, no_worker: int = 0) -> float:
    """Microseconds a job when jobs come one by one, and `no_worker` others can't be placed."""
    backlog, (roster, placement) = Backlog(), _workers(workers)
    for job in _jobs(no_worker, tenants, first=jobs + 1, topic="job.other"):
        backlog.add(job, T0 + jobs + no_worker)
    _turn(backlog, placement)
    coming = _jobs(jobs, tenants)

    def work() -> None:
        for job in coming:
            backlog.add(job, T0 + jobs)
            for worker_id in _turn(backlog, placement).values():
                roster.hold(worker_id, job.job_id, 1)
                roster.release(worker_id, job.job_id, 1)

    return _microseconds(work) / jobs


def _turn(backlog: Backlog, placement: Placement) -> dict[int, str]:
    placement.refresh()
    picks = backlog.pick(placement.find, placement.has_room, placement.freed)
    return dict(islice(picks, _A_TURN))


def _workers(number: int) -> tuple[Roster, Placement]:
    roster = Roster({})
    for n in range(number):
        slots = max(1, _SLOTS // number)
        roster.greet(Handshake(f"w{n}", DEFAULT_POOL, ("job.test",), slots, {}), 0.0)
    placement = Placement(roster)
    placement.refresh()
    return roster, placement


def _jobs(number: int, tenants: int, first: int = 1, topic: str = "job.test") -> list[Job]:
    return [
        a_job(f"j{seq}", seq=seq, at=T0 + seq / 1_000, tenant=f"t{seq % tenants}", topic=topic)
        for seq in range(first, first + number)
    ]


def _microseconds(work: Callable[[], None]) -> float:
    before = time.process_time()
    work()
    return (time.process_time() - before) * 1e6


def main() -> None:
    print(
        "| tenants | workers | 500 a turn, µs a job | one a turn | beside 10,000 without worker |"
    )
    print("|--:|--:|--:|--:|--:|")
    for tenants in TENANTS:
        for workers in WORKERS:
            rounds = range(3)
            many = min(drain(tenants, workers) for _ in rounds)
            one = min(one_a_turn(tenants, workers) for _ in rounds)
            beside = min(one_a_turn(tenants, workers, no_worker=10_000) for _ in rounds)
            print(f"| {tenants:,} | {workers:,} | {many:.2f} | {one:.1f} | {beside:.1f} |")


if __name__ == "__main__":
    main()
