"""What workers say, and what it means for the board and for the jobs they hold."""

from __future__ import annotations

from collections.abc import Callable

from penstock.control.board import Board
from penstock.control.endings import ending
from penstock.control.losses import Losses
from penstock.control.orders import Orders
from penstock.core.ids import IdSource
from penstock.core.job import Job, JobResult
from penstock.core.transition import Move
from penstock.lifecycles.canonical import JobEvent, JobState, Role
from penstock.ports.bus import (
    AnyMessage,
    Credit,
    Farewell,
    Finished,
    Handshake,
    Heartbeat,
    Returned,
    Started,
    WorkerFacts,
)


class Intake:
    """Turns messages into moves; keeps the roster by the way."""

    def __init__(
        self,
        board: Board,
        orders: Orders,
        losses: Losses,
        ids: IdSource,
        chance: Callable[[], float],
    ) -> None:
        self._board, self._roster, self._orders = board, board.roster, orders
        self._losses, self._ids, self._chance = losses, ids, chance
        self.on_their_way: set[tuple[str, int]] = set()
        """Attempts sent to workers after they introduced themselves, and before we read it."""

    def take_in(self, message: AnyMessage, now: float, monotonic: float) -> list[Move]:
        """The moves that a message asks for."""
        match message:
            case Finished(result):
                self._roster.heard(result.worker_id or "", monotonic)
                self._roster.release(result.worker_id, result.job_id, result.attempt)
                return [self._finish(result, now)]
            case Started(job_id, attempt, worker_id):
                actor = f"{Role.WORKER}:{worker_id}"
                self.still_has(message, monotonic)
                return [Move(job_id, (JobEvent.START,), actor, now, attempt=attempt)]
            case Heartbeat(worker_id):
                self._hear(worker_id, monotonic)
            case WorkerFacts(worker_id, session, facts):
                self._hear(worker_id, monotonic)
                record = self._roster.workers.get(worker_id)
                if record is not None and record.session == session:
                    record.facts = facts
            case Credit(worker_id, limit):
                if (record := self._roster.workers.get(worker_id)) is not None:
                    record.limit = limit
            case Returned(job_id, attempt, _, reason, charged):
                if self._board.is_live(job_id, attempt):
                    if not charged:
                        self._board.forgive(job_id)
                    return self._take_back(self._board.held[job_id], reason, now)
            case Handshake():
                return self._greet(message, now, monotonic)
            case Farewell():
                self._see_off(message, monotonic)
        return []

    def _take_back(self, job: Job, reason: str, now: float) -> list[Move]:
        """What did not begin, or can go on elsewhere, waits for another worker."""
        if job.state is JobState.RUNNING:
            return self._losses.lose(job, reason, now)
        self._board.set_adrift(job, reason)
        return []

    def still_has(self, started: Started, monotonic: float) -> bool:
        """Whether a worker may keep what it says it starts: nobody else has it yet."""
        job_id, attempt = started.job_id, started.attempt
        given_up = job_id in self._board.adrift
        if not self._board.reclaim(job_id, attempt):
            return False
        if given_up:
            self._roster.hold(started.worker_id, job_id, attempt, monotonic)
        return True

    def _hear(self, worker_id: str, monotonic: float) -> None:
        """A sign of life; from a worker that we gave up for lost, a reason to ask again."""
        if not self._roster.heard(worker_id, monotonic):
            self._orders.ask_who(worker_id)

    def _finish(self, result: JobResult, now: float) -> Move:
        job = self._board.held.get(result.job_id)
        return ending(job, result, now, self._ids, self._chance())

    # -- coming -------------------------------------------------------------------

    def _greet(self, hello: Handshake, now: float, monotonic: float) -> list[Move]:
        board, roster = self._board, self._roster
        record = roster.worker(hello.worker_id)
        if record.ready and record.session not in ("", hello.session):
            reason = f"a worker {hello.worker_id} is here already (process {record.pid})"
            self._orders.dismiss(hello.worker_id, hello.session, reason)
            return []
        roster.pool(hello.pool)
        unknown = {
            job_id: attempt
            for job_id, attempt in record.held.items()
            if (job_id, attempt) not in hello.held and board.is_live(job_id, attempt)
        }
        over_the_same_link = (record.session, record.link) == (hello.session, hello.link)
        record.greet(hello, monotonic)
        for attempt in list(unknown.items()):
            # It only says once more who it is, or was given this since: it can't know yet.
            if over_the_same_link or attempt in self.on_their_way:
                record.held.update([attempt])
                del unknown[attempt[0]]
        board.learn(hello.topics, hello.offers)
        self._orders.welcome(hello.worker_id, hello.session)
        self._give_back(hello)
        lost = [board.held[job_id] for job_id in unknown]
        why = f"worker {hello.worker_id} came back without it"
        return [move for job in lost for move in self._losses.lose(job, why, now)]

    def _give_back(self, hello: Handshake) -> None:
        """A worker that comes back keeps what is still its own, and drops the rest."""
        for job_id, attempt in hello.held:
            if not self._board.reclaim(job_id, attempt):
                self._roster.release(hello.worker_id, job_id, attempt)
                self._orders.end(hello.worker_id, (job_id, attempt), "this attempt is not live")
            elif self._board.held[job_id].cancel_requested:
                reason = "cancelled while the worker was away"
                self._orders.end(hello.worker_id, (job_id, attempt), reason)

    # -- going --------------------------------------------------------------------

    def _see_off(self, farewell: Farewell, monotonic: float) -> None:
        record = self._roster.workers.get(farewell.worker_id)
        if record is None or (farewell.session and farewell.session != record.session):
            return
        if farewell.lost:
            if farewell.link == record.link:  # not a connection that it has replaced since
                record.missing_since = monotonic
        elif record.held and farewell.gone:
            record.missing_since = float("-inf")
        elif record.held:
            record.draining = True
        else:
            del self._roster.workers[farewell.worker_id]
