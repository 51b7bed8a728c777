"""Shows waiting jobs to the safety kernel, and says what follows from its verdicts.

A verdict is stored with the move that follows from it. A job that is judged again, after a
restart or by other rules, is written about only if the verdict is another one.
"""

from __future__ import annotations

import logging
from itertools import islice

from msgspec import Struct, field

from penstock.control.board import Board
from penstock.control.dependencies import has_parents
from penstock.control.holds import expiry, is_current, lifted, parking, refusal
from penstock.control.safety import SafetyKernel
from penstock.core.job import Job
from penstock.core.transition import Change, Move
from penstock.core.verdict import Decision, Hold, SafetyVerdict
from penstock.lifecycles.canonical import JobEvent, JobState, Role

log = logging.getLogger(__name__)

_SCHEDULER = Role.SCHEDULER.value
_SCHEDULE = (JobEvent.SCHEDULE,)
_JUDGED_A_TURN = 2000
"""Jobs shown to the safety kernel in one commit at most."""


class News(Struct):
    """What a job's next move must say of its verdict."""

    verdict: SafetyVerdict
    hold: Hold | None = None


class Judged(Struct):
    """What came of one sitting."""

    moves: list[Change] = field(default_factory=list)
    """Jobs that were refused or parked."""
    passed: list[Job] = field(default_factory=list)
    """Jobs that may go, and are in the backlog or wait for others."""
    children: dict[int, tuple[Job, SafetyVerdict | None]] = field(default_factory=dict)
    """Those of them that wait for others, by seq."""
    news: dict[int, News] = field(default_factory=dict)
    """By seq, where the verdict is not yet in the record."""

    def admissions(self, gone: set[int], now: float) -> list[Change]:
        """Jobs that passed and found no room are SCHEDULED, and wait."""
        waiting = [job for job in self.passed if job.seq not in gone]
        if not self.news:
            return [
                Move(job.job_id, _SCHEDULE, _SCHEDULER, now, version=job.version)
                for job in waiting
                if job.state is JobState.PENDING
            ]
        moves: list[Change] = []
        for job in waiting:
            news = self.news.get(job.seq)
            if job.state is JobState.PENDING:
                event, said = JobEvent.SCHEDULE, ""
            elif news is not None:
                event, said = JobEvent.NOTE, _judged_again(news.verdict)
            else:
                continue
            moves.append(
                Move(
                    job.job_id,
                    (event,),
                    _SCHEDULER,
                    now,
                    said,
                    version=job.version,
                    verdict=None if news is None else news.verdict,
                    hold=None if news is None else news.hold,
                )
            )
        return moves


class Judge:
    """Asks the kernel about what the board has not judged yet."""

    def __init__(self, board: Board, kernel: SafetyKernel) -> None:
        self._board, self._kernel = board, kernel

    def sit(self, now: float) -> Judged:
        """Judge what is there, up to a number; the rest, and doubtful cases, stay."""
        board, judged = self._board, Judged()
        unjudged = board.unjudged
        if not unjudged:
            return judged
        decide, built_in = self._kernel.decide, self._kernel.built_in
        passed, queue = judged.passed, board.queue
        undecided: dict[int, Job] = {}
        for job in list(islice(unjudged.values(), _JUDGED_A_TURN)):
            del unjudged[job.seq]
            try:
                verdict = decide(job.request)
            except Exception as error:
                log.exception("the safety kernel could not judge job %s", job.job_id)
                board.doubtful[job.seq] = f"the safety kernel failed: {error}"
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
                self._board.dependencies.admit(job)  # if a parent fails, nobody need be asked
            if hold is None or not is_current(hold, verdict, job.request):
                judged.moves.append(parking(job, verdict, now))
                return
            if not hold.approved:
                if hold.until <= now:
                    judged.moves.append(expiry(job, now))
                else:
                    self._board.park(job)
                return
        elif hold is not None and not hold.approved:
            judged.news[job.seq] = News(verdict, lifted(hold))
        if job.verdict != verdict:
            judged.news.setdefault(job.seq, News(verdict))
        self._let_pass(job, verdict, judged)

    def _let_pass(self, job: Job, verdict: SafetyVerdict | None, judged: Judged) -> None:
        judged.passed.append(job)
        if has_parents(job.request) and not self._board.dependencies.admit(job):
            self._board.doubtful.pop(job.seq, None)
            judged.children[job.seq] = (job, verdict)
        else:
            self._board.queue(job, verdict)


def _judged_again(verdict: SafetyVerdict) -> str:
    return f"judged again: {verdict.decision} by rule {verdict.rule_id}"
