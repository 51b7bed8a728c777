"""What the control plane says to workers. Everything here is said after a commit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from penstock.control.limits import Limits
from penstock.core.job import Job
from penstock.core.policy import run_limit
from penstock.lifecycles.canonical import Role
from penstock.ports.bus import (
    AnyMessage,
    Bus,
    Confirmed,
    Dismissed,
    Dispatch,
    JobCancel,
    Reintroduce,
    Settled,
    Welcomed,
    jobs_of,
)

Attempt = tuple[str, int]
"""(job_id, attempt)"""


class Orders:
    """Speaks to each worker on its own subject."""

    def __init__(self, bus: Bus, limits: Limits, books: str = "") -> None:
        self._bus, self._limits, self._books = bus, limits, books

    def dispatch(self, jobs: Iterable[Job]) -> None:
        """Give each job to the worker that its record names."""
        batches: dict[str, list[Dispatch]] = defaultdict(list)
        for job in jobs:
            request = job.request
            timeout = run_limit(job, self._limits.timeout)
            constraints = None if job.verdict is None else job.verdict.constraints
            order = Dispatch(request, job.attempt, timeout, request.deadline, constraints)
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

    def welcome(self, worker_id: str, session: str) -> None:
        self._say(worker_id, Welcomed(session, self._books))

    def dismiss(self, worker_id: str, session: str, reason: str) -> None:
        self._say(worker_id, Dismissed(session, reason))

    def ask_who(self, worker_id: str) -> None:
        self._say(worker_id, Reintroduce())

    def _say(self, worker_id: str | None, message: AnyMessage) -> None:
        self._bus.publish(jobs_of(worker_id or ""), [message])


def _by_worker(pairs: Iterable[tuple[str, Attempt]]) -> dict[str, list[Attempt]]:
    grouped: dict[str, list[Attempt]] = defaultdict(list)
    for worker_id, attempt in pairs:
        grouped[worker_id].append(attempt)
    return grouped
