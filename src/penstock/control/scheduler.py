"""Moves jobs PENDING -> SCHEDULED -> DISPATCHED, and commits what workers say of them.

The scheduler works in turns. A turn takes everything that has happened since the last one,
decides, and makes one commit of it: results free slots, and the slots are filled again in
the same commit. Dispatches go out after the commit and never before.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Sequence
from itertools import islice

import msgspec

from penstock.control.board import Board
from penstock.control.buckets import Bucket
from penstock.control.intake import Intake
from penstock.control.judge import Judge, Judged
from penstock.control.limiter import Gate
from penstock.control.limits import Limits
from penstock.control.losses import Losses
from penstock.control.orders import Orders
from penstock.control.placement import Places
from penstock.control.safety import SafetyKernel
from penstock.control.store_retry import RetryingStore, apply_storable
from penstock.control.waiting import WaitingRoom
from penstock.core.errors import StoreFailed
from penstock.core.ids import IdSource
from penstock.core.job import Job, JobResult, Offer
from penstock.core.transition import Answer, Change, Move, Verdict
from penstock.lifecycles.canonical import WAITING, JobEvent, JobState, Role
from penstock.ports.bus import (
    HANDSHAKE,
    HEARTBEAT,
    RESULT,
    AnyMessage,
    Bus,
    Finished,
    Handshake,
    Started,
    WorkerFacts,
)
from penstock.ports.clock import Clock
from penstock.ports.failpoint import failpoint
from penstock.ports.starts import NoStarts, Starts
from penstock.ports.store import Store

log = logging.getLogger(__name__)

_SCHEDULER = Role.SCHEDULER.value
_SERVED = "served"
_MOST_A_TURN = 500
"""Messages taken in, and jobs dispatched, in one commit at most: while the engine is busy
with some, its workers are busy with others."""
_NOT_STORABLE = "RESULT_NOT_STORABLE"
_LOOK = 1.0
"""Seconds between looks at the wall clock while something waits for a time: it may be set, and
it goes on while the computer sleeps."""
_KERNEL_RETRY = 1.0
"""Seconds between tries while the safety kernel can't answer."""


class _Served(msgspec.Struct):
    topics: list[str]
    offers: dict[str, Offer]


class Scheduler:
    """A service: `run` until cancelled."""

    def __init__(
        self,
        store: Store,
        bus: Bus,
        board: Board,
        kernel: SafetyKernel,
        clock: Clock,
        limits: Limits,
        *,
        starts: Starts | None = None,
        ids: IdSource | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.store, self.bus, self.board, self.kernel = store, bus, board, kernel
        self.clock = clock
        self._retrying = RetryingStore(store, clock)
        starts = starts or NoStarts()
        self.orders = Orders(bus, limits, starts.folder)
        ids = ids or IdSource()
        losses = Losses(board, starts, limits, ids, chance)
        self.intake = Intake(board, self.orders, losses, ids, chance)
        self._inbox: list[AnyMessage] = []
        self._in_hand: list[AnyMessage] = []
        """What the turn that is under way took in."""
        self._met: set[str] = set()
        """Workers whose introduction is in the inbox."""
        self._wake = asyncio.Event()
        self._next_ready: float | None = None
        self._judge = Judge(board, kernel)
        self._waiting_room = WaitingRoom(board, self._retrying)
        self._rules_changed = False
        board.limiter.monotonic = clock.monotonic
        board.limiter.on_change = self.rejudge

    @property
    def trouble(self) -> str:
        """Why nothing can be read or committed at the moment."""
        return self._retrying.retry.trouble

    async def run(self) -> None:
        """Listen, then take turns for ever."""
        stop_listening = self.store.listen(self.hear)
        readers = [
            self.bus.subscribe(RESULT, self.receive),
            self.bus.subscribe(HANDSHAKE, self.meet),
            self.bus.subscribe(HEARTBEAT, self.beat),
        ]
        try:
            await self._recall_served()
            while True:
                await self.turn()
                await self._until_needed()
        finally:
            stop_listening()
            for reader in readers:
                await reader.close()

    async def _recall_served(self) -> None:
        """What was ever served here is known again before its workers are back."""
        known = await self._retrying.recall(_SERVED)
        if known is not None:
            served = msgspec.json.decode(known, type=_Served)
            self.board.recall(served.topics, served.offers)

    async def _remember_served(self) -> None:
        served = _Served(sorted(self.board.topics), self.board.offers)
        self.board.served_is_new = False
        try:
            await self.store.remember(_SERVED, msgspec.json.encode(served))
        except StoreFailed as error:
            self.board.served_is_new = True
            log.error("can't remember what is served here: %s", error)

    async def beat(self, messages: list[AnyMessage]) -> None:
        """Heartbeats count when they come, however long the turn that is under way."""
        for message in messages:
            self.intake.take_in(message, self.clock.now(), self.clock.monotonic())
            if isinstance(message, WorkerFacts):
                self._wake.set()  # it may have resumed a topic

    async def meet(self, messages: list[AnyMessage]) -> None:
        """Whoever introduces itself listens already: what is sent from now on reaches it."""
        self._met.update(m.worker_id for m in messages if isinstance(m, Handshake))
        await self.receive(messages)

    async def receive(self, messages: list[AnyMessage]) -> None:
        self._inbox.extend(messages)
        self._wake.set()

    def hear(self, moved: Sequence[Answer]) -> None:
        """After a commit, by whoever made it: pass on cancels, and wake for new work."""
        for answer in moved:
            job = answer.job
            assert job is not None
            if job.cancel_requested and any(
                entry.event is JobEvent.REQUEST_CANCEL for entry in answer.transitions
            ):
                attempt = (job.job_id, job.attempt)
                self.orders.end(job.worker_id, attempt, answer.transitions[-1].reason)
        self._wake.set()

    def has_word_from(self, worker_id: str) -> bool:
        """Whether a worker has said something that no commit tells of yet."""
        return any(_sender(message) == worker_id for message in self._in_hand + self._inbox)

    def has_word_of(self, job_id: str) -> bool:
        """Whether somebody has said something of a job that no commit tells of yet."""
        return any(_subject(message) == job_id for message in self._in_hand + self._inbox)

    def nudge(self) -> None:
        """Something changed that no commit tells of: take a turn."""
        self._wake.set()

    def rejudge(self) -> None:
        """Rules or limits are others now: whatever waits is judged again, from the next turn."""
        self._rules_changed = True
        self._wake.set()

    async def _until_needed(self) -> None:
        pauses = [] if self._next_ready is None else [self._next_ready - self.clock.now()]
        if self.board.doubtful:
            pauses.append(_KERNEL_RETRY)
        if (expires := self.board.next_expiry()) is not None:
            pauses.append(expires - self.clock.now())
        if (opens_in := self.board.limiter.opens_in()) is not None:
            pauses.append(opens_in)
        if not pauses:
            await self._wake.wait()
        else:
            pause = min(max(0.0, min(pauses)), _LOOK)
            waiter = asyncio.ensure_future(self._wake.wait())
            sleeper = asyncio.ensure_future(self.clock.sleep(pause))
            try:
                await asyncio.wait((waiter, sleeper), return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiter.cancel()
                sleeper.cancel()

    # -- a turn -------------------------------------------------------------------

    async def turn(self) -> None:
        """Take in what came, decide, commit, and send what the commit allows."""
        self._wake.clear()
        now = self.clock.now()
        inbox = self._in_hand = self._inbox[:_MOST_A_TURN]
        self._inbox = self._inbox[_MOST_A_TURN:]
        if self._inbox:
            self._wake.set()
        self._met.clear()
        changes: list[Change] = []
        asked: list[tuple[int, Started]] = []
        for message in inbox:
            try:
                moves = self.intake.take_in(message, now, self.clock.monotonic())
            except Exception:  # a worker's mistake must not end the engine
                log.exception("dropping a message that can't be handled: %r", message)
                continue
            if type(message) is Started and message.confirm:
                asked.append((len(changes), message))
            changes.extend(moves)
        self.intake.on_their_way.clear()
        if self.board.served_is_new:
            await self._remember_served()
        finished = len(changes)
        if self._rules_changed:
            self._rules_changed = False
            self.board.judge_all_again()
        changes.extend(await self._waiting_room.call_up(now))
        judged = self._judge.sit(now)
        changes.extend(judged.moves)
        await self._waiting_room.ask_for_parents(judged)
        if self._waiting_room.is_not_done:
            self._wake.set()
        decided = len(changes)
        self._next_ready = self.board.backlog.wake(now)
        picked, taken = await self._pick()
        changes.extend(self._dispatch(job, worker_id, judged, now) for job, worker_id in picked)
        dispatched = len(changes)
        changes.extend(judged.admissions({job.seq for job, _ in picked}, now))
        if not changes:
            self._in_hand = []
            return
        answers = await self._commit(changes)
        await self._end_unstorable(changes[:finished], answers[:finished], now)
        self._in_hand = []
        self._confirm([(message, answers[index]) for index, message in asked])
        self._settle(changes[:finished])
        if not self._send(answers[decided:dispatched]):
            self.board.limiter.retract(taken)
        self._begin_anew(answers[finished:decided])
        self._begin_anew(answers[dispatched:])
        await self._note_refused(changes[:finished], answers[:finished])

    async def _commit(self, changes: list[Change]) -> list[Answer]:
        """Commit, however long the disk refuses: what workers reported must not be lost."""
        return await apply_storable(self._retrying.apply, changes)

    async def _end_unstorable(
        self, changes: Sequence[Change], answers: Sequence[Answer], now: float
    ) -> None:
        """Let a job fail whose result can't be stored as it is."""
        failures: list[Change] = []
        for change, answer in zip(changes, answers, strict=True):
            if answer.job is None and isinstance(change, Move) and change.result is not None:
                result = JobResult(
                    job_id=change.job_id,
                    status=JobState.FAILED,
                    worker_id=change.result.worker_id,
                    attempt=change.result.attempt,
                    error_code=_NOT_STORABLE,
                    error_message="its result or error holds a value that can't be stored",
                )
                failures += self.intake.take_in(Finished(result), now, self.clock.monotonic())
        if failures:
            await self._commit(failures)

    def _begin_anew(self, answers: Sequence[Answer]) -> None:
        """What was decided about a waiting job was overtaken by something else."""
        for answer in answers:
            if answer.verdict is Verdict.REFUSED and answer.job is not None:
                self.board.judge_again(answer.job)
                self._wake.set()

    # -- dispatch -----------------------------------------------------------------

    async def _pick(self) -> tuple[list[tuple[Job, str]], Collection[Bucket]]:
        """Who goes where, and the buckets of limits that they fill."""
        if self._rules_changed:
            return [], ()  # what waits was let pass by others
        roster, backlog, limiter = self.board.roster, self.board.backlog, self.board.limiter
        for bucket in limiter.freed():
            backlog.open(bucket)
        places = Places(roster.workers.values(), roster.pools, roster.paused)
        gate = Gate(limiter, places.find)
        place = gate.place if limiter.in_use else places.find
        chosen = dict(islice(backlog.pick(place, places.has_room), _MOST_A_TURN))
        if not chosen:
            return [], ()
        if len(chosen) == _MOST_A_TURN:
            self._wake.set()
        picked: list[tuple[Job, str]] = []
        for job in await self._retrying.fetch(list(chosen)):
            worker_id = chosen[job.seq]
            if worker_id not in roster.workers:  # it was lost while the records were read
                self._put_back(job)
            elif self.board.may_go_out(job):
                picked.append((job, worker_id))
        if len(picked) < len(chosen):
            limiter.retract(gate.taken)
            self._wake.set()
        return picked, gate.taken.keys()

    def _dispatch(self, job: Job, worker_id: str, judged: Judged, now: float) -> Move:
        pool = self.board.roster.workers[worker_id].pool
        events: tuple[JobEvent, ...]
        match job.state:
            case JobState.PENDING:
                events = (JobEvent.SCHEDULE, JobEvent.DISPATCH)
            case JobState.SCHEDULED:
                events = (JobEvent.DISPATCH,)
            case _:
                events = (JobEvent.REDISPATCH,)
        reason = self.board.adrift.get(job.job_id, "")
        news = judged.news.get(job.seq) if judged.news else None
        return Move(
            job.job_id,
            events,
            _SCHEDULER,
            now,
            reason,
            version=job.version,
            worker_id=worker_id,
            pool=pool,
            verdict=None if news is None else news.verdict,
            hold=None if news is None else news.hold,
        )

    def _send(self, answers: Sequence[Answer]) -> bool:
        """Give out what was committed; False if some of it was not."""
        given: list[Job] = []
        all_moved = True
        for answer in answers:
            job = answer.job
            if job is not None and answer.moved:
                if self.board.is_live(job.job_id, job.attempt):
                    given.append(job)
                    if job.worker_id in self._met:
                        self.intake.on_their_way.add((job.job_id, job.attempt))
                continue
            all_moved = False
            self._wake.set()
            if job is not None:
                self._put_back(job)
        if given:
            self.orders.dispatch(given)
            failpoint("after-dispatch")
        for job in given:
            if self.board.held[job.job_id].cancel_requested:
                # The order to end it was given before there was anything to end.
                attempt = (job.job_id, job.attempt)
                self.orders.end(job.worker_id, attempt, "cancelled while it was dispatched")
        return all_moved

    def _put_back(self, job: Job) -> None:
        """A job that came up and was not given out waits again."""
        if job.state in WAITING:
            self.board.judge_again(job)
        elif self.board.may_go_out(job):
            self.board.set_adrift(job, self.board.adrift[job.job_id])

    def _settle(self, changes: Sequence[Change]) -> None:
        """Tell workers elsewhere which of their results are safe, or known to be late."""
        workers = self.board.roster.workers
        results: list[tuple[str, tuple[str, int]]] = []
        for change in changes:
            if isinstance(change, Move) and (result := change.result) is not None:
                record = workers.get(result.worker_id or "")
                if result.worker_id and (record is None or not record.local):
                    results.append((result.worker_id, (result.job_id, result.attempt)))
        self.orders.settle(results)

    def _confirm(self, asked: Sequence[tuple[Started, Answer]]) -> None:
        """Let workers begin whose start is durable; the others must drop the job."""
        durable: list[tuple[str, tuple[str, int]]] = []
        for message, answer in asked:
            attempt = (message.job_id, message.attempt)
            if answer.verdict is Verdict.REFUSED:
                self.orders.end(message.worker_id, attempt, answer.why)
            elif not self.intake.still_has(message, self.clock.monotonic()):
                self.orders.end(message.worker_id, attempt, "the job has ended meanwhile")
            else:
                durable.append((message.worker_id, attempt))
        self.orders.confirm(durable)

    async def _note_refused(self, changes: Sequence[Change], answers: Sequence[Answer]) -> None:
        """A result that came too late, or for a dead attempt, is logged and changes nothing."""
        notes: list[Change] = []
        for change, answer in zip(changes, answers, strict=True):
            if answer.moved or not isinstance(change, Move) or answer.job is None:
                continue
            if change.result is not None and answer.why:
                said = f"{change.result.status} of attempt {change.attempt} ignored: {answer.why}"
                actor = f"{Role.WORKER}:{change.result.worker_id}"
                notes.append(Move(change.job_id, (JobEvent.NOTE,), actor, change.at, said))
        if notes:
            await self._commit(notes)


def _sender(message: AnyMessage) -> str | None:
    if isinstance(message, Finished):
        return message.result.worker_id
    return getattr(message, "worker_id", None)


def _subject(message: AnyMessage) -> str | None:
    if isinstance(message, Finished):
        return message.result.job_id
    return getattr(message, "job_id", None)
