"""What becomes of a job whose worker is gone. Pure but for chance, ids, and the book."""

from __future__ import annotations

from collections.abc import Callable

from penstock.control.board import Board
from penstock.control.endings import ending
from penstock.control.limits import Limits
from penstock.core.ids import IdSource
from penstock.core.job import Job, JobResult
from penstock.core.transition import Move
from penstock.lifecycles.canonical import JobState
from penstock.ports.starts import Starts


class Losses:
    """Gives a job to another worker where that is safe, and ends it where it is not."""

    def __init__(
        self,
        board: Board,
        starts: Starts,
        limits: Limits,
        ids: IdSource,
        chance: Callable[[], float],
    ) -> None:
        self._board, self._starts, self._limits = board, starts, limits
        self._ids, self._chance = ids, chance

    def lose(self, job: Job, why: str, now: float) -> list[Move]:
        """Let it wait for another worker, or return the move that ends it."""
        if self._may_go_on(job):
            self._board.set_adrift(job, why)
            return []
        return [self.expire(job, "WORKER_LOST", why, now)]

    def _may_go_on(self, job: Job) -> bool:
        if job.request.idempotent:
            offer = self._board.offers.get(job.request.topic)
            most = offer.max_attempts if offer is not None else None
            charged = job.attempt - self._board.forgiven.get(job.job_id, 0)
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
